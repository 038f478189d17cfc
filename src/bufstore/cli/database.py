"""What the command line asks Postgres itself."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from psycopg import sql
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from bufstore.cli.connect import Target
from bufstore.errors import StoreUnavailable
from bufstore.threads.postgres.store import PostgresThreadStore

_TIMEOUT_S = 5.0
_PATIENCE_S = 60.0
#: How long a session that we have closed may take to end.
_SESSION_END_S = 5.0


async def existing(store: PostgresThreadStore, thread_ids: Sequence[str]) -> set[str]:
    """Those of `thread_ids` that Postgres has, in one statement. Waits for a Postgres that is away for a while."""
    query = sql.SQL("SELECT thread_id FROM {}.threads WHERE thread_id = ANY (%s)").format(sql.Identifier(store.schema))
    async for attempt in AsyncRetrying(
        retry=retry_if_exception_type(StoreUnavailable),
        wait=wait_random_exponential(multiplier=0.1, max=2),
        stop=stop_after_delay(_PATIENCE_S),
        reraise=True,
    ):
        with attempt:
            async with store.pool.lend(_TIMEOUT_S) as connection:
                cursor = await connection.execute(query, [list(thread_ids)])
                return {row[0] for row in await cursor.fetchall()}
    raise AssertionError("unreachable: the last attempt raises")


async def count_transactions(target: Target) -> int:
    """How many transactions the database has ended so far, by the server's own count.

    All of them, also other clients' and those of this question. A session reports what it did at most once a second
    and when it ends: so this waits until our closed sessions are gone. Other clients' last second may be missing.
    """
    async with target.plain(pool_size=1) as store, store.pool.lend(_TIMEOUT_S) as connection:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _SESSION_END_S
        while loop.time() < deadline:
            cursor = await connection.execute(
                "SELECT FROM pg_stat_activity WHERE application_name = %s AND pid <> pg_backend_pid()",
                [target.session],
            )
            if not cursor.rowcount:
                break
            await asyncio.sleep(0.02)
        cursor = await connection.execute(
            "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()"
        )
        row = await cursor.fetchone()
        assert row is not None
        return int(row[0])
