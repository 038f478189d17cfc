"""The store in Postgres: its statements, its rows, its tables."""
