"""Which server is the primary, where a pooler tells an old tale of it.

Postgres says at the start of a session whether it is a standby, and libpq believes that. PgBouncer tells each client
what its first connection was told, until it is told to reconnect; by then it may lead to another server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, LiteralString, TypeVar

import psycopg
from psycopg import AsyncConnection
from psycopg.abc import ConnDict
from psycopg.conninfo import conninfo_attempts_async, conninfo_to_dict, make_conninfo

from bufstore.postgres.connection.refusals import is_refusal, reason_in

#: What libpq says of a server that it is not to connect to.
_STANDBY = "server is in hot standby mode"
_NOT_WANTED = (_STANDBY, "session is read-only")
#: What is told of a standby that libpq took for the primary.
PASSED_OFF = f"{_STANDBY}, and a pooler says that it is not"
#: How long a server may take to say what it is.
_ANSWER_S = 5.0
#: For an app that asked for `read-write`, and for all others.
_READ_ONLY: LiteralString = "SELECT current_setting('transaction_read_only')::bool"
_RECOVERS: LiteralString = "SELECT pg_is_in_recovery()"
#: With it libpq takes any server: of those of a service, which it alone knows, another one each time (libpq 16 on).
_ANY = {"target_session_attrs": "any"} | ({"load_balance_hosts": "random"} if psycopg.pq.version() >= 160000 else {})

C = TypeVar("C", bound=AsyncConnection[Any])


async def to_the_primary(connect: Callable[[str], Awaitable[C]], conninfo: str, doubted: bool) -> tuple[C, bool]:
    """Connect to the server that libpq takes for the primary, or else to one that says itself that it is.

    libpq's choice always comes first: it alone knows all servers of a service. `doubted`: whether an earlier choice was
    a standby; then this one is asked. Return the connection, and whether it is libpq's choice and has said itself that
    it leads to the primary. Raises psycopg.OperationalError.
    """
    unclear: list[str] = []
    try:
        connection = await connect(conninfo)
    except psycopg.OperationalError as e:
        if not is_told_of_a_standby(str(e)):
            raise
        failed = e
    else:
        if not doubted or await _is_primary(connection, conninfo, unclear):
            return connection, doubted
        failed = psycopg.OperationalError(f"connection failed: {PASSED_OFF}")
    for server in await _each_server(conninfo, str(failed)):
        with suppress(psycopg.OperationalError):  # what the first attempt met is told
            connection = await connect(server)
            if await _is_primary(connection, conninfo, unclear):
                return connection, False
    raise psycopg.OperationalError(failure(str(failed), unclear))


def is_told_of_a_standby(text: str) -> bool:
    """Return whether libpq, as psycopg's error says, met a server that says at its start that it is a standby."""
    return any(words in text for words in _NOT_WANTED)


def failure(failed: str, unclear: list[str]) -> str:
    """Return why no primary was found: what libpq met, unless a server did not say what it is, for a while.

    `unclear`: what these said in place of it. A pooler signs clients in when its server is away.
    """
    more = [f"connection failed: {said}" for said in unclear]
    passing = (text for text in more if not is_refusal(reason_in(text)))
    return failed if is_refusal(reason_in(failed)) else next(passing, failed)


async def _is_primary(connection: AsyncConnection[Any], conninfo: str, unclear: list[str]) -> bool:
    """Return whether the server itself says that it is one to connect to. Otherwise the connection is closed."""
    wanted = conninfo_to_dict(conninfo).get("target_session_attrs")
    primary = False
    try:
        async with asyncio.timeout(_ANSWER_S):
            cursor = await connection.execute(_READ_ONLY if wanted == "read-write" else _RECOVERS)
            primary = await cursor.fetchone() == (False,)
    except psycopg.errors.FeatureNotSupported:
        pass  # a standby, which knows no serializable transactions, where these are the default
    except TimeoutError:
        unclear.append("the server does not say in time whether it is the primary")
    except psycopg.Error as e:
        unclear.append(str(e))
    finally:  # also when the pool is being closed
        if not primary:
            await connection.close()
    return primary


async def _each_server(conninfo: str, failed: str) -> list[str]:
    """Return a connection string for each address to ask at; for a service, one for all of its servers."""
    with suppress(psycopg.OperationalError):  # a name is not known any more
        attempts = await conninfo_attempts_async(conninfo_to_dict(conninfo))
        asked = filter(partial(may_be_misjudged, failed), attempts)
        return [make_conninfo("", **(attempt | _ANY)) for attempt in asked]
    return []


def may_be_misjudged(failed: str, attempt: ConnDict) -> bool:
    """Return False for an address that did not even answer, as psycopg's error about all of them says.

    To try it again would take as long again, for which nobody notices that another is the primary by now.
    """
    named = "- host: {!r}, port: {!r}, hostaddr: {!r}: ".format(*map(attempt.get, ("host", "port", "hostaddr")))
    ended = failed.partition(named)[2].partition("\n- host: ")[0]
    return not ended or is_told_of_a_standby(ended)
