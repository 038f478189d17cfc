"""Connections to Postgres: the pool, what its errors mean, migrations, arrays as parameters."""
