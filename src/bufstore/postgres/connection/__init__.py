"""Connections to Postgres: the pool, the meaning of its errors, migrations, named statements, arrays as parameters."""
