"""How many transactions Postgres has ended, by its own count."""

from __future__ import annotations

import asyncio
from typing import Any, LiteralString

from bufstore.cli.connect import Endpoints
from bufstore.threads.postgres.store import PostgresThreadStore

_TIMEOUT_S = 5.0
#: How long a session that we have closed may take to end.
_SESSION_END_S = 5.0
_OTHERS = "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s AND pid <> pg_backend_pid()"
_ENDED = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()"


async def count_transactions(target: Endpoints) -> int:
    """How many transactions the database has ended so far, by the server's own count.

    All transactions count, also those of other clients and of this question. A session reports its transactions at
    most once a second, and when it ends, so this waits until our closed sessions are gone. The last second of other
    clients may be missing.
    """
    loop = asyncio.get_running_loop()
    async with target.plain(pool_size=1) as store:
        deadline = loop.time() + _SESSION_END_S
        # Each look borrows a connection anew: it has its own time, and in one transaction it would never see a change.
        while loop.time() < deadline:
            if not await _ask(store, _OTHERS, target.session):
                break
            await asyncio.sleep(0.02)
        return int(await _ask(store, _ENDED))


async def _ask(store: PostgresThreadStore, question: LiteralString, *parameters: str) -> Any:
    async with store.pool.lend(_TIMEOUT_S) as connection:
        row = await (await connection.execute(question, parameters)).fetchone()
        assert row is not None
        return row[0]
