"""Which server is the primary, where a pooler tells an old tale of it.

Postgres says at the start of a session whether it is a standby, and libpq believes that. PgBouncer tells each client
what its first connection was told, until it is told to reconnect; by then it may lead to another server.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, LiteralString

import psycopg
from psycopg import AsyncConnection
from psycopg.conninfo import conninfo_to_dict, make_conninfo

#: What libpq says of a server that it is not to connect to.
STANDBY = "server is in hot standby mode"
_NOT_WANTED = (STANDBY, "session is read-only")
#: How long a server may take to say what it is.
_ANSWER_S = 5.0
#: For an app that asked for `read-write`, and for all others.
_READ_ONLY: LiteralString = "SELECT current_setting('transaction_read_only')::bool"
_RECOVERS: LiteralString = "SELECT pg_is_in_recovery()"


def is_told_of_a_standby(text: str) -> bool:
    """Return whether libpq, as psycopg's error says, met a server that says at its start that it is a standby."""
    return any(words in text for words in _NOT_WANTED)


async def is_primary(connection: AsyncConnection[Any], conninfo: str) -> bool:
    """Return whether the server itself says that it is one to connect to."""
    wanted = conninfo_to_dict(conninfo).get("target_session_attrs")
    with suppress(psycopg.Error, TimeoutError):
        async with asyncio.timeout(_ANSWER_S):
            cursor = await connection.execute(_READ_ONLY if wanted == "read-write" else _RECOVERS)
            return await cursor.fetchone() == (False,)
    return False


def each_server(conninfo: str) -> list[str]:
    """Return a connection string for each server that this one names, in which libpq takes any server."""
    given: dict[str, Any] = dict(conninfo_to_dict(conninfo))
    lists = {name: str(given[name]).split(",") for name in ("host", "hostaddr", "port") if given.get(name)}
    named = max(map(len, (lists.get(name, []) for name in ("host", "hostaddr"))))
    if named > 1:
        each = [{name: of[n] if n < len(of) else of[0] for name, of in lists.items()} for n in range(named)]
    else:  # or the environment, or a service's file, names it
        each = [{}]
    return [make_conninfo(**(given | one | {"target_session_attrs": "any"})) for one in each]
