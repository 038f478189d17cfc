"""The ledger in Postgres: watermarks, cursors, terms, quarantine, and what waits. Knows no domain."""
