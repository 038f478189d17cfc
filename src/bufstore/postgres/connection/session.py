"""What a session is asked when it is lent for the first time."""

from __future__ import annotations

from typing import Any, NamedTuple

import psycopg
from psycopg.rows import tuple_row

#: The last column tells a database from one that takes its place: on another server, on this one after a restart, or
#: made anew. (`pg_database` would tell that, too, but reading it can be forbidden.)
_QUESTION = """
    SELECT current_setting('default_transaction_isolation'), pg_is_in_recovery(),
        extract(epoch FROM pg_postmaster_start_time())::text || ' ' || pg_relation_filepath('pg_catalog.pg_class')
"""

#: The databases that this process has met.
_met: set[str] = set()


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
    _met.add(database)
    return Session(level == "read committed", standby)


def databases_met() -> int:
    """Return to how many databases the connections of this process have led, as far as they were used.

    A database counts anew after a restart of its server, and when another one takes its place.
    """
    return len(_met)
