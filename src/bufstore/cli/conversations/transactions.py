"""How many transactions Postgres has ended, by its own count."""

from __future__ import annotations

import asyncio

from bufstore.cli.connect import Endpoints

_TIMEOUT_S = 5.0
#: How long a session that we have closed may take to end.
_SESSION_END_S = 5.0


async def count_transactions(target: Endpoints) -> int:
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
