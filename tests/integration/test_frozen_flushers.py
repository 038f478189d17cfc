"""A process freezes in the middle of a pipeline, where Postgres alone would let it hold its locks for ever."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager, suppress
from typing import Any

import psycopg
import pytest
from psycopg import AsyncPipeline
from psycopg.waiting import Ready, Wait

from bufstore import PostgresThreadStore, StoreUnavailable
from bufstore.buffer.ports.ledger import Cursor, Decision, FlushFailed
from bufstore.postgres.connection import pool
from bufstore.postgres.ledger.ledger import PostgresLedger
from conftest import Deployment
from helpers import eventually, query
from transaction_pooler import TransactionPooler

#: These tests wait for timeouts.
pytestmark = pytest.mark.alone
#: Two thirds of it are longer than the machine may pause: so long a flush may stand still.
LEASE_S = 9


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Freeze the test's first pipeline before its end; the event is set once it is frozen."""
    event, end = asyncio.Event(), pool._end

    def standing(pipeline: AsyncPipeline) -> Generator[Any, Any, None]:
        if not event.is_set():
            pipeline.pgconn.flush()
            event.set()
            while not (yield Wait.R) & Ready.R:
                pass  # nothing arrives until the session ends
        yield from end(pipeline)

    monkeypatch.setattr(pool, "_end", standing)
    return event


@asynccontextmanager
async def ledger(dsn: str, schema: str) -> AsyncIterator[PostgresLedger]:
    async with PostgresThreadStore(dsn, schema=schema, pool_size=2) as store:
        it = PostgresLedger(dsn, store, schema=schema, lease_s=LEASE_S)
        await it.open()
        try:
            await it.setup()
            yield it
        finally:
            await it.aclose()


async def flush(it: PostgresLedger, cursor: Cursor) -> None:
    await it.flush([cursor], ["t"], lambda _: Decision(cursors=[cursor]))


@pytest.mark.parametrize(
    "pooled", [pytest.param(False, id="direct", marks=pytest.mark.long), pytest.param(True, id="pooler")]
)
async def test_who_takes_over_ends_a_flush_that_stands_still_in_a_pipeline(
    deployment: Deployment, frozen: asyncio.Event, pooled: bool
) -> None:
    async with TransactionPooler(deployment.servers.postgres.dsn, servers=4) as pooler:
        dsn = pooler.dsn if pooled else deployment.servers.postgres.dsn
        async with ledger(dsn, deployment.name) as old, ledger(dsn, deployment.name) as new:
            (cursor,) = await old.take([0], "a")
            began = time.monotonic()
            flushing = asyncio.create_task(flush(old, cursor))
            await asyncio.wait_for(frozen.wait(), 10)
            await eventually(lambda: new._tables.run("open_flushes"))  # Postgres has what was sent
            assert await new.take([0], "b") == []
            (taken,) = await eventually(lambda: new.take([0], "b"))
            assert LEASE_S * 2 / 3 < time.monotonic() - began < LEASE_S + 3
            with pytest.raises((StoreUnavailable, FlushFailed)):
                await flushing
            await flush(new, taken)


async def test_who_may_not_end_it_says_who_can(deployment: Deployment, frozen: asyncio.Event) -> None:
    dsn, role = deployment.servers.postgres.dsn, f"role_{deployment.name}"
    async with ledger(dsn, deployment.name) as old:
        await query(dsn, f"CREATE ROLE {role} LOGIN PASSWORD 'right'")
        await query(dsn, f"GRANT USAGE ON SCHEMA {deployment.name} TO {role}")
        await query(dsn, f"GRANT ALL ON ALL TABLES IN SCHEMA {deployment.name} TO {role}")
        limited = psycopg.conninfo.make_conninfo(dsn, user=role, password="right")
        async with ledger(limited, deployment.name) as new:
            (cursor,) = await old.take([0], "a")
            flushing = asyncio.create_task(flush(old, cursor))
            await asyncio.wait_for(frozen.wait(), 10)
            await eventually(lambda: new._tables.run("open_flushes"))  # Postgres has what was sent
            with pytest.raises(StoreUnavailable, match="if its process is frozen") as told:
                await eventually(lambda: new.take([0], "b"))
            advice = str(told.value)
            await query(dsn, advice[advice.index("SELECT") : advice.index(" as ", advice.index("SELECT"))])

            async def taken() -> Any:
                with suppress(StoreUnavailable):  # its backend has still to end
                    return await new.take([0], "b")
                return []

            assert await eventually(taken)
            with pytest.raises((StoreUnavailable, FlushFailed)):
                await flushing


@pytest.mark.long  # a lease
async def test_a_flush_that_works_for_long_is_left_alone(deployment: Deployment) -> None:
    dsn = deployment.servers.postgres.dsn
    async with ledger(dsn, deployment.name) as old, ledger(dsn, deployment.name) as new:
        (cursor,) = await old.take([0], "a")
        slow, looked = asyncio.Event(), asyncio.Event()

        class Slow:
            async def apply(self, connection: psycopg.AsyncConnection[Any], batch: Any) -> None:
                await connection.execute(f"SELECT pg_sleep({LEASE_S})")
                slow.set()
                await looked.wait()

        old._target = Slow()  # type: ignore[assignment]
        flushing = asyncio.create_task(old.flush([cursor], ["t"], lambda _: Decision(cursors=[cursor], batch=["x"])))
        await asyncio.wait_for(slow.wait(), LEASE_S + 10)
        assert await new.take([0], "b") == []
        assert [row[4] for row in await new._tables.run("open_flushes")] == [0.0]
        looked.set()
        await flushing


async def test_a_session_of_somebody_else_is_left_alone(deployment: Deployment) -> None:
    dsn = deployment.servers.postgres.dsn
    async with ledger(dsn, deployment.name) as it, await psycopg.AsyncConnection.connect(dsn) as other:
        await it.take([0], "a")
        await other.execute(f"SELECT FROM {deployment.name}.buffer_partitions FOR UPDATE".encode())
        assert await it.take([0], "b") == []
        assert await it._tables.run("open_flushes") == []
