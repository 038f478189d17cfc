"""Postgres: connections, migrations, and the ledger."""
