"""Postgres' own statistics."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import psycopg

_NOW = "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint, pg_current_wal_insert_lsn() - '0/0'"
_ROWS = (
    "SELECT coalesce(sum(n_tup_ins + n_tup_upd + n_tup_del), 0) FROM pg_stat_user_tables "
    "WHERE schemaname = %s OR relname = %s"
)
#: Postgres reports a session's statistics some time after its end; this many seconds suffice.
_REPORTED_S = 0.15


@dataclass(frozen=True)
class Counters:
    """Transactions that wrote (each takes an id) and bytes of WAL, since the server's start."""

    transactions: int
    wal: int

    @classmethod
    def now(cls, dsn: str, *, fresh: bool = False) -> Counters:
        """Read the counters. `fresh`: after a checkpoint, so that every contestant begins with clean pages."""
        with psycopg.connect(dsn, autocommit=True) as connection:
            if fresh:
                connection.execute("CHECKPOINT")
            row: Any = connection.execute(_NOW).fetchone()
            return cls(int(row[0]), int(row[1]))


def rows_written(dsn: str, name: str) -> int:
    """Return the number of rows written in the schema or table `name`, once its sessions have ended."""
    before = -1
    while True:
        with psycopg.connect(dsn, autocommit=True) as connection:
            row: Any = connection.execute(_ROWS, [name, name]).fetchone()
        if row[0] == before:
            return int(row[0])
        before = row[0]
        time.sleep(_REPORTED_S)
