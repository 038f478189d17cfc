"""A thread whose row is locked waits in a real Postgres: the log forgets it, and no reader does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import psycopg
import pytest

from bufstore import BufferedThreadStore, Consistency, FlushTimeout, OutcomeUnknown, ReadNotFresh
from bufstore.config import BufferConfig
from command_line import bufstore_cli, where
from conftest import Deployment
from helpdesk_store import HelpdeskStore
from helpers import eventually, fresh, query, run_of, said
from integration.test_target import helpdesk

#: These tests wait until the log has purged entries.
pytestmark = pytest.mark.alone

_SOON = {"append_timeout_s": 4.0, "read_timeout_s": 4.0, "retain_after_flush_s": 8.0}


@asynccontextmanager
async def held(deployment: Deployment, thread_id: str) -> AsyncIterator[None]:
    """Lock the buffer's row of a thread."""
    row = f"SELECT FROM {deployment.name}.buffer_threads WHERE thread_id = %s FOR UPDATE"
    async with await psycopg.AsyncConnection.connect(deployment.servers.postgres.dsn) as connection:
        found = await connection.execute(row, [thread_id])  # type: ignore[arg-type]
        assert found.rowcount == 1
        yield
        await connection.rollback()


async def _has_to_wait(store: BufferedThreadStore) -> bool:
    return "1 thread has to wait" in (await store.health()).flusher


async def wait_in_ledger(deployment: Deployment, count: int) -> None:
    async def waits() -> bool:
        found = await query(deployment.servers.postgres.dsn, f"SELECT count(*) FROM {deployment.name}.buffer_waiting")
        return bool(found == [(count,)])

    await eventually(waits)


async def forgotten(store: BufferedThreadStore, thread_id: str, beside: str) -> None:
    """Write another thread of the partition until the log has nothing of this thread."""
    subject = store.buffer.subjects.of(thread_id)

    async def gone() -> bool:
        with suppress(OutcomeUnknown):  # a write has little time
            await store.checkpoint(beside, [], run_of(beside))
        return not await store.buffer.log.last([subject])

    await eventually(gone, 90)


@pytest.mark.long
async def test_the_log_forgets_a_thread_that_waits_and_nobody_else_does(deploy: Callable[..., Deployment]) -> None:
    deployment = deploy(partitions=1, failover_window_s=8.0)
    thread_id, beside = fresh("held"), fresh("beside")
    shown: list[Any] = [said(0), said(1)]
    async with deployment.store(**_SOON) as owner, deployment.store(flusher=False, **_SOON) as other:
        await owner.checkpoint(thread_id, shown, run_of(thread_id))
        await owner.force_flush(thread_id)
        async with held(deployment, thread_id):
            for n in range(2, 5):
                await owner.checkpoint_append(thread_id, [said(n)], run_of(thread_id, n), idempotency_key=f"k{n}")
                shown.append(said(n))
            await wait_in_ledger(deployment, 3)
            await forgotten(owner, thread_id, beside)
            assert await other.load_messages(thread_id) == shown
            assert (await other.load_run(run_of(thread_id, 4).run_id)) is not None
            assert await other.load_messages(thread_id, consistency=Consistency.EVENTUAL) == shown[:2]
            for lost in (
                other.load_messages(thread_id, consistency=Consistency.STRONG),
                other.query_messages(thread_id),
                other.query_threads(),
                other.query_runs(),
            ):
                with pytest.raises(ReadNotFresh):
                    await lost
            for late in (other.force_flush(thread_id, timeout_s=8), other.force_flush_all(timeout_s=8)):
                with pytest.raises(FlushTimeout, match="another session holds its row"):
                    await late
            again = await other.checkpoint_append(
                thread_id, [said(4)], run_of(thread_id, 4), idempotency_key="k4", expected_version=None
            )
            assert again.repeated
            await other.checkpoint_append(thread_id, [said(5)], run_of(thread_id, 5), expected_version=5)
            shown.append(said(5))
            await wait_in_ledger(deployment, 4)
            report = await other.verify()
            assert (report.ok, report.waiting, report.unflushed_entries) == (True, 4, 4), report.findings
            status = await asyncio.to_thread(bufstore_cli, "status", "--json", **where(deployment))
            waiting = status.json["waiting"]
            assert (waiting["entries"], waiting["threads"]) == (4, 1)
            assert waiting["reason"] == "another session holds its row"
            assert waiting["since"] is not None
            assert not status.json["flushing"]
            health = await other.health()
            assert (health.can_write, health.can_read, health.flushing) == (True, True, False)
            assert "4 of 1 threads" in health.flush_trouble
            told = await asyncio.to_thread(bufstore_cli, "status", **where(deployment))
            assert "waiting entries: 4 of 1 threads, since " in told.out
        await other.force_flush(thread_id, timeout_s=20)
        assert await other.load_messages(thread_id, consistency=Consistency.STRONG) == shown
        assert [t.thread_id for t in (await other.query_threads(limit=10)).threads if t.thread_id == thread_id]
        await wait_in_ledger(deployment, 0)
        assert await other.quarantined() == 0


async def test_a_thread_that_waits_is_read_and_written_in_front_of_an_apps_own_store(
    deploy: Callable[..., Deployment],
) -> None:
    """The app's rows and ours cannot be read in one snapshot."""
    deployment = deploy(partitions=1, failover_window_s=8.0)
    dsn = await helpdesk(deployment)
    thread_id, beside = fresh("held"), fresh("beside")
    async with HelpdeskStore(dsn) as inner:
        options: dict[str, Any] = {"postgres": dsn, "schema": deployment.name} | _SOON
        async with deployment.store(inner, **options) as store:
            await store.checkpoint(thread_id, [said(0)], run_of(thread_id))
            await store.force_flush(thread_id)
            async with held(deployment, thread_id):
                await store.checkpoint_append(thread_id, [said(1)], run_of(thread_id))
                await wait_in_ledger(deployment, 1)
                await forgotten(store, thread_id, beside)
                async with deployment.store(inner, **(options | {"flusher": False})) as other:
                    assert await other.load_messages(thread_id) == [said(0), said(1)]
                    await other.checkpoint_append(thread_id, [said(2)], run_of(thread_id), expected_version=2)
            shown = [said(0), said(1), said(2)]
            flushing = asyncio.create_task(store.force_flush(thread_id, timeout_s=20))
            while not flushing.done():
                assert await store.load_messages(thread_id) == shown
            await flushing
            assert await store.load_messages(thread_id, consistency=Consistency.STRONG) == shown
            assert await store.quarantined() == 0


async def test_the_next_owner_of_the_partition_goes_on(deploy: Callable[..., Deployment]) -> None:
    deployment = deploy(partitions=1, failover_window_s=8.0)
    thread_id, beside = fresh("held"), fresh("beside")
    async with deployment.store(flusher=False, **_SOON) as writer:
        async with deployment.store(**_SOON) as first:
            await writer.checkpoint(thread_id, [said(0)], run_of(thread_id))
            await first.force_flush(thread_id)
            async with held(deployment, thread_id):
                await writer.checkpoint_append(thread_id, [said(1)], run_of(thread_id))
                await wait_in_ledger(deployment, 1)
                await forgotten(first, thread_id, beside)
                await first.aclose()
                async with deployment.store(**_SOON) as second:
                    await writer.checkpoint_append(thread_id, [said(2)], run_of(thread_id))
                    await writer.checkpoint(beside, [said(0)], run_of(beside))
                    await second.force_flush(beside, timeout_s=20)
                    await wait_in_ledger(deployment, 2)
                    await eventually(lambda: _has_to_wait(second))
        async with deployment.store(**_SOON) as third:
            await third.force_flush(thread_id, timeout_s=20)
            found = await third.load_messages(thread_id, consistency=Consistency.EVENTUAL)
            assert found == [said(0), said(1), said(2)]
            assert await third.quarantined() == 0


@pytest.mark.long  # ten seconds
async def test_a_deletion_that_waits_deletes_and_the_thread_can_be_made_again(
    deploy: Callable[..., Deployment],
) -> None:
    deployment = deploy(partitions=1, failover_window_s=8.0)
    thread_id, beside = fresh("held"), fresh("beside")
    async with deployment.store(**_SOON) as store, deployment.store(flusher=False, **_SOON) as other:
        await store.checkpoint(thread_id, [said(0)], run_of(thread_id))
        await store.force_flush(thread_id)
        async with held(deployment, thread_id):
            await store.delete_thread(thread_id)
            await wait_in_ledger(deployment, 1)
            await forgotten(store, thread_id, beside)
            assert await other.load_messages(thread_id) is None
            await other.checkpoint(thread_id, [said(7)], run_of(thread_id, 7))
            assert await store.load_messages(thread_id) == [said(7)]
        await store.force_flush(thread_id, timeout_s=20)
        assert await store.load_messages(thread_id, consistency=Consistency.EVENTUAL) == [said(7)]
        assert await store.quarantined() == 0


@pytest.mark.parametrize(
    "lock", ["LOCK TABLE {schema}.messages IN ACCESS EXCLUSIVE MODE", "SELECT FROM {schema}.threads FOR UPDATE"]
)
async def test_what_waited_for_a_lock_is_flushed_as_ever_when_it_is_gone(deployment: Deployment, lock: str) -> None:
    """After a lock of seconds (VACUUM FULL, CREATE INDEX, a migration) entries were once flushed by eight for good."""
    threads = [fresh() for _ in range(10)]
    async with deployment.store() as store:
        for t in threads:
            await store.checkpoint_append(t, [said(0)], run_of(t))
        await store.force_flush_all()
        async with await psycopg.AsyncConnection.connect(deployment.servers.postgres.dsn) as other:
            await other.execute(lock.format(schema=deployment.name))  # type: ignore[call-overload]
            for n in range(1, 41):
                await asyncio.gather(*(store.checkpoint_append(t, [said(n)], run_of(t)) for t in threads))
            await wait_in_ledger(deployment, 400)
            await other.rollback()
        before = (await store.statistics()).flusher.transactions
        await store.force_flush_all(timeout_s=20)
        assert (await store.statistics()).flusher.transactions - before < 25, "not entry by entry"
        for t in threads:
            assert await store.load_messages(t, consistency=Consistency.STRONG) == [said(n) for n in range(41)]
        assert await store.quarantined() == 0


def test_a_partition_may_have_a_share_of_the_log_waiting() -> None:
    config = BufferConfig()
    assert (1 - config.outage_reserve) * config.log.max_bytes / config.log.partitions == 64 << 20
