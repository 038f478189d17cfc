"""Connections to Postgres: the pool, the meaning of its errors, migrations, arrays as parameters."""
