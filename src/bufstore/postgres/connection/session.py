"""What a session is asked when it is lent for the first time."""

from __future__ import annotations

from typing import Any, NamedTuple

import psycopg
from psycopg.rows import tuple_row

#: The last column tells a database from one that takes its place: on another server, on this one after a restart, or
#: made anew. (`pg_database` would tell that, too, but reading it is forbidden more often than calling a function.)
_QUESTION = """
    SELECT pg_catalog.current_setting('default_transaction_isolation'), pg_catalog.pg_is_in_recovery(),
        extract(epoch FROM pg_catalog.pg_postmaster_start_time())::text || ' '
            || pg_catalog.pg_relation_filepath('pg_catalog.pg_class')
"""


class _Databases:
    """Which database a session of this process was of last, and how often that was another one than before."""

    last = ""
    changes = 0


class Session(NamedTuple):
    """What the server says of a session."""

    #: Whether a statement on its own is read committed.
    read_committed: bool
    #: Whether the server is a standby.
    standby: bool


async def ask(connection: psycopg.AsyncConnection[Any]) -> Session:
    """Ask a session which nothing else was asked yet. Raises psycopg's errors."""
    try:
        row = await (await connection.cursor(row_factory=tuple_row).execute(_QUESTION)).fetchone()
    except psycopg.errors.FeatureNotSupported:  # serializable is the default, which only a standby refuses
        return Session(read_committed=False, standby=True)
    level, standby, database = row or ("", False, "")
    if not standby and database != _Databases.last:  # a standby that is promoted runs on: only then it counts
        _Databases.last = database
        _Databases.changes += 1
    return Session(level == "read committed", standby)


def changes_of_database() -> int:
    """Return how often a connection of this process, when it was first used, led to another database than the last.

    A database is another one after a restart of its server. One that comes back after others counts again: what it
    lacks may have been flushed to it meanwhile.
    """
    return _Databases.changes
