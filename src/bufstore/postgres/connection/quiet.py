"""Keeps psycopg's warnings about our connections out of an app's log."""

from __future__ import annotations

import logging
import re
from contextvars import ContextVar

from psycopg import AsyncPipeline, AsyncTransaction

#: Whether what runs is a wait of one of our connections: what psycopg logs of a cancellation does not name it.
WAITING: ContextVar[bool] = ContextVar("WAITING", default=False)


class Ours:
    """Marks our connections."""


class _Quiet(logging.Filter):
    """Keeps psycopg's warnings about our connections for debugging: the error that a caller gets says the same.

    While Postgres is away, psycopg's pool warns of each attempt and each lost connection. After a refused statement, a
    pipeline warns that the statements behind it were refused, too; while Postgres hangs, each statement that is given
    up, that it cannot be cancelled; a transaction whose connection was lost, that it cannot be rolled back. The flusher
    and the reads say it once.
    """

    def __init__(self, pool_name: str) -> None:
        super().__init__()
        self._pool = re.compile(rf"{re.escape(pool_name)}(-worker-\d+|-scheduler)?")

    def filter(self, record: logging.LogRecord) -> bool:
        args = record.args if isinstance(record.args, tuple) else ()
        ours = WAITING.get() or any(map(self._is_ours, args))
        return not ours or logging.getLogger(record.name).isEnabledFor(logging.DEBUG)

    def _is_ours(self, arg: object) -> bool:
        # Some messages name the pool or its task, some the connection, some its pipeline or its transaction.
        if isinstance(arg, str):
            return self._pool.fullmatch(arg) is not None
        return isinstance(arg._conn if isinstance(arg, AsyncPipeline | AsyncTransaction) else arg, Ours)


def quieten(pool_name: str) -> None:
    """Begin with it, for connections that are marked and pools of this name."""
    for name in ("psycopg", "psycopg.pool", "psycopg.transaction"):
        logging.getLogger(name).addFilter(_Quiet(pool_name))
