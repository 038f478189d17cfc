"""The ledger in Postgres: watermarks, cursors, terms and quarantine. Knows no domain."""
