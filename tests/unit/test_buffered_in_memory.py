"""The buffered store itself, on `MemoryNats`: the same contract, without a server and in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from msgspec.structs import replace as replace_run

from bufstore import (
    AlreadyExists,
    BufferConfig,
    BufferedThreadStore,
    BufstoreError,
    Children,
    ConfigDrift,
    Consistency,
    FlushTimeout,
    IdempotencyConflict,
    LineageError,
    LogConfig,
    LogFull,
    LogRolledBack,
    LogUnavailable,
    MemoryThreadStore,
    NotFound,
    OutcomeUnknown,
    ProducerSequence,
    ReadNotFresh,
    Receipt,
    StoreMisconfigured,
    StoreUnavailable,
    ThreadMetadata,
    ThreadQuarantined,
)
from bufstore.buffer.chain import Watermark
from bufstore.buffer.flush.owned_partition import Queued
from bufstore.buffer.flush.verdict import Verdict
from bufstore.buffer.ports.ledger import FlushFailed
from bufstore.buffer.ports.log import Floor
from bufstore.jetstream.messages import AppendUnknown, Conflict, Outgoing
from bufstore.memory import MemoryNats
from bufstore.memory.log import MemoryLog, MemoryStream
from bufstore.memory.shared_state import MemoryBucket, MemorySharedState
from bufstore.testing import CHECKS, Check
from bufstore.threads import buffered_lineage, edits
from bufstore.threads.bulk import BulkCheckpoint
from helpers import fresh, run_of
from unit.fake_log import run

CONFIG = BufferConfig(flush_interval_s=0.05, lease_s=4)


@asynccontextmanager
async def instance(nats: MemoryNats, store: MemoryThreadStore, **config: Any) -> AsyncIterator[BufferedThreadStore]:
    settings = BufferConfig(**({"flush_interval_s": 0.05, "lease_s": 4} | config))
    async with await BufferedThreadStore.open(store, nats=nats, config=settings) as opened:
        yield opened
        report = await opened.verify()
        assert report.ok, report.findings


def alone(main: Callable[[BufferedThreadStore], Awaitable[None]], **config: Any) -> None:
    async def whole() -> None:
        async with instance(MemoryNats(), MemoryThreadStore(), **config) as store:
            await main(store)

    run(whole())


@pytest.mark.parametrize("check", CHECKS, ids=str)
def test_it_keeps_the_contract(check: Check) -> None:
    alone(check)


def test_instances_share_the_log_and_the_ledger() -> None:
    async def main() -> None:
        nats, inner, thread_id = MemoryNats(), MemoryThreadStore(), fresh()
        async with instance(nats, inner) as one, instance(nats, inner, flusher=False) as two:
            await one.checkpoint(thread_id, [1], run_of(thread_id))
            receipt = await two.checkpoint_append(thread_id, [2], run_of(thread_id), expected_version=1)
            assert await one.load_messages(thread_id, at_least=receipt) == [1, 2]
            assert await two.load_messages(thread_id, consistency=Consistency.STRONG) == [1, 2]
            assert await inner.load_messages(thread_id) == [1, 2]
        async with instance(nats, inner) as three:
            await three.checkpoint_append(thread_id, [3], run_of(thread_id), expected_version=2)
            assert (await three.statistics()).nats_sent > 0
        assert await inner.load_messages(thread_id) == [1, 2, 3]

    run(main())


def test_the_partitions_of_an_instance_that_is_gone_are_taken_over() -> None:
    async def main() -> None:
        nats, inner = MemoryNats(), MemoryThreadStore()
        async with instance(nats, inner) as one:
            async with instance(nats, inner) as two:
                await asyncio.sleep(5)
                shares = [(await s.statistics()).flusher.partitions for s in (one, two)]
                assert sorted(shares[0] + shares[1]) == list(range(8))
                assert all(shares)
            await asyncio.sleep(5)
            assert (await one.statistics()).flusher.partitions == tuple(range(8))

    run(main())


def test_a_full_log_pushes_back_until_it_is_flushed_and_purged() -> None:
    async def main() -> None:
        nats, inner, thread_id = MemoryNats(), MemoryThreadStore(), fresh()
        config = {"log": LogConfig(max_bytes=1 << 20, failover_window_s=20.0), "retain_after_flush_s": 20.0}
        async with instance(nats, inner, flusher=False, **config) as writer:
            with pytest.raises(LogFull):
                for n in range(200):
                    await writer.checkpoint(thread_id, [n, "x" * 10_000], run_of(thread_id))
            async with instance(nats, inner, **config):
                await writer.force_flush_all()
                await asyncio.sleep(60)
                await writer.checkpoint(thread_id, ["again"], run_of(thread_id))
            assert await writer.load_messages(thread_id) == ["again"]

    run(main())


def test_a_flush_is_believed_to_postgres_only() -> None:
    """Reports of progress may speak of commits that a failover has lost."""

    async def main() -> None:
        nats, inner, thread_id = MemoryNats(), MemoryThreadStore(), fresh()
        async with instance(nats, inner) as store:
            ledger = inner.ledger(0)
            for n in range(2):
                tables = [inner._threads, inner._messages, ledger._rows, ledger._cursors]
                copies = [dict(table) for table in tables]
                await store.checkpoint(thread_id, [n], run_of(thread_id))
                await store.force_flush(thread_id)
            for flush_again in (
                lambda: store.force_flush(thread_id),
                lambda: store.force_flush_all(),
                lambda: store.query_messages(thread_id),
                lambda: store.load_messages(thread_id, consistency=Consistency.STRONG),
            ):
                for table, copy in zip(tables, copies, strict=True):
                    table.clear()
                    table.update(copy)
                await flush_again()
                assert await inner.load_messages(thread_id) == [1]

    run(main())


@pytest.mark.parametrize("what", ["thread", "run"])
def test_a_read_that_waits_for_a_flush_in_vain_says_what_it_waits_for(what: str) -> None:
    """Regression: it said "in time" alone, because the limit around the flush ended it without a word."""

    async def main() -> None:
        nats, inner, thread_id = MemoryNats(), MemoryThreadStore(), fresh()
        async with instance(nats, inner, flusher=False) as store, instance(nats, inner, flusher=False) as other:
            await store.checkpoint(thread_id, [1], run_of(thread_id))
            began = asyncio.get_running_loop().time()
            with pytest.raises(ReadNotFresh, match=r"partition [0-9].*no flusher is alive"):
                if what == "thread":
                    await store.load_messages(thread_id, consistency=Consistency.STRONG)
                else:
                    await other.load_run("of nobody")
            assert asyncio.get_running_loop().time() - began <= CONFIG.read_timeout_s + 0.1
        async with instance(nats, inner) as flusher:
            await flusher.force_flush_all()

    run(main())


def test_a_thread_whose_tombstone_is_buried_can_be_read_and_made_again() -> None:
    """The thread's last position is no longer stored, neither in the log nor in a row."""

    async def main() -> None:
        nats, inner, thread_id = MemoryNats(), MemoryThreadStore(), fresh()
        config = {"log": LogConfig(failover_window_s=20.0), "retain_after_flush_s": 20.0}
        async with instance(nats, inner, **config) as one, instance(nats, inner, flusher=False, **config) as two:
            await one.checkpoint(thread_id, [1], run_of(thread_id))
            receipt = await one.delete_thread(thread_id)
            await asyncio.sleep(30)
            subjects = one.buffer.subjects
            same = (t for n in range(99) if subjects.partition(t := f"other-{n}") == subjects.partition(thread_id))
            await one.save_thread(next(same))  # the cursor moves on, and everything below it is purged
            await asyncio.sleep(60)
            assert (await inner.ledger(0).watermark(thread_id)).flushed_seq == 0
            for store in (one, two):
                for level in Consistency:
                    assert await store.load_checkpoint(thread_id, consistency=level, at_least=receipt) is None
            with pytest.raises(ReadNotFresh):
                later = Receipt(thread_id, receipt.thread_seq + (9 << 10), 1, 0)
                await two.load_checkpoint(thread_id, at_least=later)
            await one.save_thread(thread_id)
            await one.checkpoint_append(thread_id, [2], run_of(thread_id), expected_version=0)
            assert await two.load_messages(thread_id, consistency=Consistency.STRONG) == [2]

    run(main())


@pytest.mark.parametrize("how", ["checkpoint", "checkpoint_append", "save_thread", "keyed"])
@pytest.mark.parametrize("waits", [False, True])
def test_what_builds_on_a_tombstone_that_is_buried_meanwhile_is_applied(how: str, waits: bool) -> None:
    """The writer reads the row of the deleted thread, and the row is buried before the writer's entry is in the log.

    `waits`: what the writer reads is a deletion that waits in the ledger.
    """

    async def main() -> None:
        nats, inner, thread_id = MemoryNats(), MemoryThreadStore(), fresh()
        async with instance(nats, inner) as one, instance(nats, inner, flusher=False) as two:
            await one.checkpoint(thread_id, [1], run_of(thread_id))
            await one.force_flush_all()
            subjects, ledger = one.buffer.subjects, inner.ledger(0)
            ledger.locked |= {thread_id} if waits else set()
            await one.delete_thread(thread_id)
            partition = subjects.partition(thread_id)
            await one.save_thread(next(t for n in range(99) if subjects.partition(t := f"o{n}") == partition))
            if waits:
                await asyncio.sleep(7)
                assert ledger.waiting.entries
            else:
                await one.force_flush_all()
            past = 1 + await one.buffer.log.end(5.0)
            await one.buffer.log.let_go({p: Floor(past, 0) for p in range(subjects.partitions)})
            await two.buffer.log.let_go({})
            stream: Any = two.buffer.session.stream  # type: ignore[attr-defined]
            write = stream.publish

            async def burying(message: Any, timeout_s: float) -> int:
                stream.publish = write
                ledger.locked.clear()
                await one.force_flush_all()
                flushed = (await ledger.watermark(thread_id)).flushed_seq
                await one.buffer.log.fence(flushed + 1)
                await ledger.bury([(flushed, thread_id)])
                return await write(message, timeout_s)  # type: ignore[no-any-return]

            stream.publish = burying
            match how:
                case "checkpoint":
                    await two.checkpoint(thread_id, [2], run_of(thread_id))
                case "save_thread":
                    await two.save_thread(thread_id)
                case _:
                    key = "k" if how == "keyed" else None
                    await two.checkpoint_append(thread_id, [2], run_of(thread_id), idempotency_key=key)
            messages = await one.load_messages(thread_id, consistency=Consistency.STRONG)
            assert messages == ([] if how == "save_thread" else [2])
            assert await ledger.quarantined() == 0

    run(main())


def test_a_flush_of_everything_waits_for_what_only_the_ledger_has() -> None:
    """An entry that waits in the ledger does not hold back the log's floor, below which the log shows nothing."""

    async def main() -> None:
        inner, thread_id = MemoryThreadStore(), fresh()
        async with instance(MemoryNats(), inner) as store:
            await store.checkpoint(thread_id, [1], run_of(thread_id))
            await store.force_flush_all()
            ledger, log = inner.ledger(0), store.buffer.log
            ledger.locked.add(thread_id)
            await store.checkpoint_append(thread_id, [2], run_of(thread_id))
            await asyncio.sleep(5)
            assert ledger.waiting.entries
            past = 1 + await log.end(5.0)
            await log.let_go({p: Floor(past, 0) for p in range(store.buffer.subjects.partitions)})
            with pytest.raises(FlushTimeout):
                await store.force_flush_all(timeout_s=2)
            ledger.locked.clear()
            await store.force_flush_all(timeout_s=60)
            assert await inner.load_messages(thread_id) == [1, 2]

    run(main())


def test_a_tombstone_on_which_something_builds_that_is_not_flushed_stays() -> None:
    async def main() -> None:
        nats, inner, thread_id = MemoryNats(), MemoryThreadStore(), fresh()
        async with instance(nats, inner, log=LogConfig(failover_window_s=20.0), retain_after_flush_s=20.0) as store:
            await store.checkpoint(thread_id, [1], run_of(thread_id))
            await store.delete_thread(thread_id)
            same = (
                t
                for n in range(99)
                if store.buffer.subjects.partition(t := f"o{n}") == store.buffer.subjects.partition(thread_id)
            )
            await store.save_thread(next(same))  # the cursor moves behind the deletion, which can then be purged
            await store.force_flush_all()
            ledger = inner.ledger(0)
            flush = ledger.flush

            async def locked(*arguments: Any, **options: Any) -> Any:
                raise StoreUnavailable("it cannot write now")

            ledger.flush = locked  # type: ignore[method-assign]
            await store.checkpoint_append(thread_id, [2], run_of(thread_id, "new run"))
            await asyncio.sleep(60)
            ledger.flush = flush  # type: ignore[method-assign]
            await store.force_flush_all()
            assert await store.quarantined() == 0
            assert await inner.load_messages(thread_id) == [2]

    run(main())


def test_another_configuration_is_drift() -> None:
    async def main() -> None:
        nats, inner = MemoryNats(), MemoryThreadStore()
        async with instance(nats, inner):
            with pytest.raises(ConfigDrift):
                await BufferedThreadStore.open(inner, nats=nats, config=BufferConfig(log=LogConfig(partitions=4)))

    run(main())


def test_a_lost_stream_is_noticed() -> None:
    async def main() -> None:
        nats, inner, thread_id = MemoryNats(), MemoryThreadStore(), fresh()
        async with await BufferedThreadStore.open(inner, nats=nats, config=CONFIG) as store:
            await store.checkpoint(thread_id, [1], run_of(thread_id))
            await store.force_flush(thread_id)
            stream = nats.streams.pop("THREADLOG")
            with pytest.raises(LogUnavailable):
                await store.checkpoint(thread_id, [2], run_of(thread_id, steps=1))
            with pytest.raises(LogRolledBack):
                await BufferedThreadStore.open(inner, nats=nats, config=CONFIG)
            nats.streams["THREADLOG"] = MemoryStream(stream.config)
            with pytest.raises(LogRolledBack):
                await store.checkpoint(thread_id, [2], run_of(thread_id, steps=1))

    run(main())


def test_who_refuses_the_log_says_so_and_leaves_his_partitions_to_others() -> None:
    async def main() -> None:
        nats, inner = MemoryNats(), MemoryThreadStore()
        async with (
            await BufferedThreadStore.open(inner, nats=nats, config=CONFIG) as ill,
            await BufferedThreadStore.open(inner, nats=nats, config=CONFIG) as well,
        ):
            await asyncio.sleep(10)
            assert (await ill.statistics()).flusher.partitions
            ill.buffer.log.refuse(LogRolledBack("the log ends at 5, this process has seen 6 in it"))
            await asyncio.sleep(2)
            assert not ill.buffer.flusher.state.partitions  # type: ignore[union-attr]
            for thread_id in (fresh() for _ in range(20)):
                await well.checkpoint(thread_id, [1], run_of(thread_id))
            await well.force_flush_all(timeout_s=5.0)
            health = await ill.health()
            assert "has seen 6" in health.log
            assert "has seen 6" in health.flusher
            assert (await well.health()).ok
            ill.buffer.session.stream._refused = None  # type: ignore[attr-defined]
            await asyncio.sleep(10)
            assert (await ill.health()).ok
            assert ill.buffer.flusher.state.partitions  # type: ignore[union-attr]

    run(main())


def test_a_flush_that_is_late_names_the_partition_its_owner_and_what_that_waits_for() -> None:
    async def main() -> None:
        nats, inner, thread_id = MemoryNats(), MemoryThreadStore(), fresh()
        writers = replace(CONFIG, flusher=False)
        async with await BufferedThreadStore.open(inner, nats=nats, config=writers) as writer:
            await writer.checkpoint(thread_id, [1], run_of(thread_id))
            partition = writer.buffer.subjects.partition(thread_id)
            with pytest.raises(FlushTimeout, match="no flusher is alive") as late:
                await writer.force_flush(thread_id, timeout_s=2)
            assert late.value.partition == partition
            async with await BufferedThreadStore.open(inner, nats=nats, config=CONFIG) as owner:
                await writer.force_flush(thread_id, timeout_s=10)

                async def apply(*_: object) -> None:
                    raise StoreUnavailable("Postgres has no room")

                well, inner.apply = inner.apply, apply  # type: ignore[method-assign]
                await writer.checkpoint(thread_id, [1, 2], run_of(thread_id, steps=1))
                with pytest.raises(
                    FlushTimeout, match=r"this process is responsible for flushing it: .*Postgres has no room"
                ):
                    await owner.force_flush(thread_id, timeout_s=2)
                await asyncio.sleep(2)
                other = owner.buffer.flusher.member  # type: ignore[union-attr]
                told = f"partition {partition}: .*flusher {other} is responsible for flushing it: .*has no room"
                with pytest.raises(FlushTimeout, match=told):
                    await writer.force_flush_all(timeout_s=2)
                inner.apply = well  # type: ignore[method-assign]
                await writer.force_flush(thread_id, timeout_s=10)

    run(main())


def test_of_two_flushers_a_late_flush_names_the_one_that_is_responsible() -> None:
    async def main() -> None:
        nats, inner, thread_id = MemoryNats(), MemoryThreadStore(), fresh()

        async def apply(*_: object) -> None:
            raise StoreUnavailable("Postgres has no room")

        async with instance(nats, inner) as one, instance(nats, inner) as two:
            await asyncio.sleep(20)  # each partition has its owner
            partition, flusher = one.buffer.subjects.partition(thread_id), one.buffer.flusher
            assert flusher is not None
            if not flusher.owns(partition):
                one, two, flusher = two, one, two.buffer.flusher
            assert flusher is not None
            assert flusher.owns(partition)
            well, inner.apply = inner.apply, apply  # type: ignore[method-assign]
            await one.checkpoint(thread_id, [1], run_of(thread_id))
            await asyncio.sleep(5)
            told = f"flusher {flusher.member} is responsible for flushing it: .*has no room"
            with pytest.raises(FlushTimeout, match=told):
                await two.force_flush(thread_id, timeout_s=2)
            # It is the partition's next owner, and does not have it yet.
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(flusher, "owns", lambda _: False)
                with pytest.raises(FlushTimeout, match="this process is responsible for flushing it"):
                    await one.force_flush(thread_id, timeout_s=2)
            inner.apply = well  # type: ignore[method-assign]

    run(main())


def test_a_flush_that_waits_for_an_answer_of_postgres_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: it named no reason, for a thread that may well have been flushed."""

    async def silent(thread_id: str) -> Watermark:
        await asyncio.Event().wait()
        raise AssertionError

    async def main() -> None:
        nats, inner, thread_id = MemoryNats(), MemoryThreadStore(), fresh()
        async with instance(nats, inner) as store:
            await store.checkpoint(thread_id, [1], run_of(thread_id))
            await store.force_flush(thread_id)
        async with instance(nats, inner, flusher=False) as store:
            with monkeypatch.context() as patched:
                patched.setattr(store.buffer.ledger, "watermark", silent)
                with pytest.raises(FlushTimeout, match=r"the target is \d+ \(Postgres did not say in time"):
                    await store.buffer.waiter.thread(thread_id, 1, 0.3)

    run(main())


@pytest.mark.parametrize("error", [ReadNotFresh("Postgres is away"), StoreMisconfigured("permission denied")])
def test_a_change_of_lineage_that_took_its_place_is_not_said_to_have_failed(error: BufstoreError) -> None:
    """The next change carries it out: whatever stops it after that point, its outcome is unknown."""

    async def main(store: BufferedThreadStore) -> None:
        parent, child = fresh(), fresh()
        for thread_id in (parent, child):
            await store.save_thread(thread_id)
        await store.set_parent(child, parent)
        children = store._lineage._children

        async def away(*_: object) -> list[str]:
            raise error

        store._lineage._children = away  # type: ignore[method-assign]
        with pytest.raises(OutcomeUnknown):
            await store.delete_thread(parent, children=Children.CASCADE)
        store._lineage._children = children  # type: ignore[method-assign]
        await store.save_thread(fresh("other"))
        with pytest.raises(NotFound):
            await store.set_parent(child, None)
        assert await store.load_thread(parent) is None

    alone(main)


def test_a_change_of_lineage_that_met_a_full_log_may_be_carried_out_by_another() -> None:
    """Regression: the call said that nothing was stored, though another process had carried the change out."""

    async def main() -> None:
        nats, inner = MemoryNats(), MemoryThreadStore()
        async with instance(nats, inner) as one, instance(nats, inner, flusher=False) as two:
            child, parent = fresh(), fresh()
            for thread_id in (child, parent):
                await one.save_thread(thread_id)

            found = list[Any]()

            async def full(*record: Any) -> Receipt:
                found[:] = record[:2]
                raise LogFull("maximum bytes exceeded")

            one._lineage._carry_out = full  # type: ignore[method-assign]
            with pytest.raises(OutcomeUnknown):
                await one.set_parent(child, parent)
            await two._lineage._finish(*found)  # as a process does that read the record before
            thread = await two.load_thread(child)
            assert thread is not None
            assert thread.parent_thread_id == parent

    run(main())


@pytest.mark.parametrize("refused", [False, True], ids=["carried out", "refused"])
def test_a_change_of_lineage_that_cannot_be_marked_because_the_bucket_is_full_is_not_said_to_be_refused(
    refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the call said that nothing was stored, though its change was carried out, or would be by the next."""

    async def main(store: BufferedThreadStore) -> None:
        for thread_id in ("child", "parent"):
            await store.save_thread(thread_id)
        put = store.buffer.shared.put_lineage

        async def full(record: bytes, *arguments: Any) -> int:
            if buffered_lineage._decode(record).done:
                raise LogFull("the bucket is full")
            return await put(record, *arguments)

        async def quarantined(*_: Any, **__: Any) -> Receipt:
            raise ThreadQuarantined("child", 1)

        monkeypatch.setattr(store.buffer.shared, "put_lineage", full)
        if refused:
            monkeypatch.setattr(store._edits, "edit", quarantined)
        with pytest.raises(OutcomeUnknown):
            await store.set_parent("child", "parent")
        with pytest.raises(LogUnavailable, match="full"):
            await store.set_parent("parent", None)
        monkeypatch.undo()
        await store.set_parent("parent", None)
        thread = await store.load_thread("child")
        assert thread is not None
        assert thread.parent_thread_id == "parent"

    alone(main)


@pytest.mark.parametrize("children", [Children.DETACH, Children.CASCADE])
def test_a_deletion_finds_a_child_that_changes_between_two_pages(
    children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: such a child kept a parent that was gone, and a deletion with all descendants left it there."""
    monkeypatch.setattr(buffered_lineage, "LIMIT_MAX", 2)

    async def main(store: BufferedThreadStore) -> None:
        inner, names = store._store, [f"c{n}" for n in range(5)]
        await store.save_thread("p")
        for name in names:
            await store.checkpoint(name, [], replace_run(run_of(name), parent_thread_id="p"))
        pages = inner.query_threads

        async def changing(query: Any, *, limit: int, cursor: str | None) -> Any:
            page = await pages(query, limit=limit, cursor=cursor)
            if cursor is None:
                later = set(names) - {thread.thread_id for thread in page.threads}
                await store.save_thread_state(min(later), "changed")
                await store.force_flush(min(later))
            return page

        monkeypatch.setattr(inner, "query_threads", changing)
        await store.delete_thread("p", children=children)
        monkeypatch.undo()
        left = [thread for name in names if (thread := await store.load_thread(name)) is not None]
        assert len(left) == (0 if children is Children.CASCADE else len(names))
        assert not [thread.thread_id for thread in left if thread.parent_thread_id is not None]

    alone(main)


def test_a_parent_that_is_deleted_while_a_run_names_it_is_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: later steps were accepted, and gave their thread a parent that was gone."""

    async def main(store: BufferedThreadStore) -> None:
        named = replace_run(run_of("c"), parent_thread_id="p")
        await store.checkpoint("p", [], run_of("p"))
        await store.checkpoint("c", [1], named)
        in_turn = store._lineage._in_turn

        async def beside(*arguments: Any) -> Receipt:
            monkeypatch.undo()
            await store.checkpoint("c", [1, 2], named)
            return await in_turn(*arguments)

        monkeypatch.setattr(store._lineage, "_in_turn", beside)
        await store.delete_thread("p", children=Children.DETACH)
        with pytest.raises(LineageError):
            await store.checkpoint("c", [1, 2, 3], named)
        await store.checkpoint("c", [1, 2, 3], run_of("c"))
        await store.checkpoint("g", [], run_of("g"))
        await store.set_parent("g", "c")

    alone(main)


def test_a_refused_parent_makes_nobody_look_at_the_parents_of_others_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: one refusal forgot the parents of all threads."""

    async def main(store: BufferedThreadStore) -> None:
        named = replace_run(run_of("c"), parent_thread_id="p")
        for thread_id in ("p", "x"):
            await store.checkpoint(thread_id, [], run_of(thread_id))
        await store.checkpoint("c", [1], named)
        with pytest.raises(LineageError):
            await store.checkpoint("x", [1], replace_run(run_of("x"), parent_thread_id="nobody"))
        with pytest.raises(LineageError):
            await store.set_parent("p", "c")
        looked = list[str]()
        joined = store.buffer.reads.joined

        async def looking(thread_id: str, *arguments: Any, **options: Any) -> Any:
            looked.append(thread_id)
            return await joined(thread_id, *arguments, **options)

        monkeypatch.setattr(store.buffer.reads, "joined", looking)
        await store.checkpoint("c", [1, 2], named)
        assert not looked
        await store.set_parent("x", "p")
        looked.clear()
        await store.checkpoint("c", [1, 2, 3], named)
        assert looked == ["c"], "after a change it looks again"

    alone(main)


def test_a_change_without_an_answer_that_another_process_ended_makes_parents_be_looked_at_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: a child got the parent back that this process had deleted, and that was there no more."""

    async def main() -> None:
        nats, inner = MemoryNats(), MemoryThreadStore()
        async with instance(nats, inner) as ours, instance(nats, inner) as other:
            for thread_id in ("parent", "child", "else"):
                await ours.checkpoint(thread_id, [1], run_of(thread_id))
            child = replace_run(run_of("child"), parent_thread_id="parent")
            await ours.set_parent("child", "parent")
            await ours.checkpoint("child", [1, 2], child)  # remembered: the child may have this parent
            put = ours.buffer.shared.put_lineage

            async def unanswered(*record: Any) -> int:
                monkeypatch.undo()
                await put(*record)
                await other.set_parent("else", None)  # which ends ours first
                raise AppendUnknown("lost")

            monkeypatch.setattr(ours.buffer.shared, "put_lineage", unanswered)
            with pytest.raises(NotFound):
                await ours.delete_thread("parent", children=Children.DETACH)
            with pytest.raises(LineageError, match="does not exist"):
                await ours.checkpoint("child", [1, 2, 3], child)

    run(main())


def test_a_parent_that_there_is_none_of_is_refused_also_while_others_change_the_lineage_for_long() -> None:
    """Regression: the checkpoint waited for its turn, and was then stored unchecked: its thread got that parent."""

    async def main(store: BufferedThreadStore) -> None:
        await store.checkpoint("t", [1], run_of("t"))
        async with store._lineage._turn:
            before = asyncio.get_running_loop().time()
            with pytest.raises(LineageError):
                await store.checkpoint("t", [1, 2], replace_run(run_of("t"), parent_thread_id="nobody"))
            assert asyncio.get_running_loop().time() < before + store.buffer.config.read_timeout_s / 2
        assert await store.load_messages("t") == [1]

    alone(main)


def test_a_record_of_lineage_that_cannot_be_read_stops_others_only_as_long_as_its_change_may_take() -> None:
    """The record may be garbage or of a newer release, whose change may be going on, but not for ever."""

    async def main(store: BufferedThreadStore) -> None:
        await store.save_thread("t")
        await store.buffer.shared.put_lineage(b"garbage", 0, 5.0)
        with pytest.raises(LineageError, match="cannot read the lineage record"):
            await store.delete_thread("t")
        await asyncio.sleep(store.buffer.config.flush_timeout_s)
        await store.delete_thread("t")
        assert await store.load_thread("t") is None
        await store.save_thread("u")
        await store.delete_thread("u")

    alone(main)


def test_who_hears_that_something_is_flushed_has_heard_before_what_was_parked() -> None:
    """A writer that waited for the flush builds on the thread at once, and should not build on a parked entry."""

    async def main(store: BufferedThreadStore) -> None:
        heard = list[str]()
        await store.buffer.shared.on_progress(lambda partition, seq: heard.append("progress"))
        await store.buffer.shared.on_parked(heard.append)
        await store.buffer.log.publish(Outgoing(store.buffer.subjects.of("t"), b"garbage"), 5.0)
        await store.force_flush("t")
        assert heard[0] == "t"

    alone(main)


@pytest.mark.parametrize("everything", [False, True])
def test_a_flush_takes_no_longer_than_it_is_told_however_its_time_is_spent(everything: bool) -> None:
    """The log, Postgres and the flusher answer one after the other, and each takes a while."""

    async def main(store: BufferedThreadStore) -> None:
        log, ledger, loop = store.buffer.log, store.buffer.ledger, asyncio.get_running_loop()

        async def nothing(answer: Any) -> Any:
            await asyncio.sleep(3)
            return answer

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(log, "latest", lambda *_: nothing(0))
            patch.setattr(log, "latest_partition_ends", lambda _: nothing([0] * store.buffer.subjects.partitions))
            patch.setattr(ledger, "cursors", lambda: nothing({}))
            patch.setattr(ledger, "watermark", lambda _: nothing(Watermark()))
            began = loop.time()
            with pytest.raises(FlushTimeout):
                await (store.force_flush_all(timeout_s=4) if everything else store.force_flush("t", timeout_s=4))
            assert loop.time() - began == pytest.approx(4, abs=0.1)

    alone(main)


def test_a_thread_in_quarantine_stops_no_change_of_lineage_of_others() -> None:
    async def main() -> None:
        nats, inner = MemoryNats(), MemoryThreadStore()
        async with instance(nats, inner) as store:
            broken, parent, other = fresh(), fresh(), fresh()
            for thread_id in (broken, parent, other):
                await store.save_thread(thread_id)
            await store.set_parent(broken, parent)
            await store.buffer.log.publish(Outgoing(store.buffer.subjects.of(broken), b"garbage"), 5.0)
            await store.force_flush(broken)
            with pytest.raises(ThreadQuarantined):
                await store.set_parent(broken, None)
            await store.set_parent(other, parent)
            with pytest.raises(ThreadQuarantined):
                await store.delete_thread(parent, children=Children.DETACH)
            await store.set_parent(other, None)
            assert (await store.load_thread(parent)) is not None

    run(main())


# --- the log by itself ------------------------------------------------------------------------------------------


def log_of(epoch: int = 0, **config: Any) -> tuple[MemoryLog, MemoryStream]:
    settings = BufferConfig(log=LogConfig(**config))
    stream = MemoryStream(settings.log, epoch)
    return MemoryLog({settings.log.stream: stream}, settings), stream


def test_a_stream_keeps_what_is_expected_of_one() -> None:
    async def main() -> None:
        log, stream = log_of()
        await log.publish(Outgoing("thread.0.a", b"1", expected=0), 1)
        with pytest.raises(Conflict):
            await log.publish(Outgoing("thread.0.a", b"2", expected=0), 1)
        assert [m.body for m in stream.messages] == [b"1"]
        await log.publish(Outgoing("thread.0.a", b"2", expected=1), 1)
        await log.publish(Outgoing("thread.0.a", b"3"), 1)
        assert await log.publish(Outgoing("thread.1.c", b"4"), 1) == 4
        assert [m.seq for m in await log.after("thread.0.a", 1, 1)] == [2, 3]
        assert [*await log.last(["thread.1.c", "thread.1.d"], 5.0)] == ["thread.1.c"]
        await log.purge_below(3)
        found = await log.identity(2), await log.identity(3), (await log.bounds())[0]
        assert (found[0], found[1] and found[1].body, found[2]) == (None, b"3", 3)

    run(main())


def test_positions_begin_with_the_epoch() -> None:
    async def main() -> None:
        log, _ = log_of(epoch=3)
        assert ((await log.bounds())[0], log.generation_start, await log.end(1)) == (3 << 40, 3 << 40, (3 << 40) - 1)
        assert await log.publish(Outgoing("thread.0.a", b""), 1) == 3 << 40

    run(main())


def test_a_feed_holds_no_more_than_it_may_until_it_is_acked() -> None:
    async def main() -> None:
        log, _ = log_of()
        woken: list[int] = []
        feed = await log.follow("me", "thread.0.a", 2, lambda: woken.append(1))
        for n in range(30):
            await log.publish(Outgoing("thread.0.a", str(n).encode()), 1)
        feed._messages_max = 20
        taken = feed.take()
        assert (len(woken), taken[0].seq, len(taken), feed.take()) == (30, 2, 20, [])
        await feed.ack(7)
        assert [m.seq for m in feed.take()] == [*range(22, 28)]
        again = await log.follow("another", "thread.0.a", 11, lambda: None)
        assert again.take()[0].seq == 11
        assert feed.lost is None
        log.close()
        assert again.lost
        assert feed.lost

    run(main())


def test_what_has_a_time_to_live_is_gone_after_it() -> None:
    async def main() -> None:
        shared = MemorySharedState(MemoryBucket())
        await shared.renew_member("a", 2)
        assert await shared.claim_run("r", "t", 1) == await shared.claim_run("r", "u", 1) == "t"
        assert list(await shared.members()) == ["a"]
        await asyncio.sleep(2)
        assert await shared.members() == {}
        await asyncio.sleep(7 * 24 * 3600)
        assert await shared.thread_of_run("r", 1) is None

    run(main())


def test_a_flush_of_an_empty_log_waits_for_nobody() -> None:
    """So closing such a log waits for no flusher. Postgres is asked once, which entries wait only there."""

    async def main() -> None:
        async with instance(MemoryNats(), MemoryThreadStore(), flusher=False) as store:
            cursors, asked = store.buffer.ledger.cursors, 0

            async def counted() -> Any:
                nonlocal asked
                asked += 1
                return await cursors()

            store.buffer.ledger.cursors = counted  # type: ignore[method-assign]
            began = asyncio.get_running_loop().time()
            await store.force_flush_all()
            assert asyncio.get_running_loop().time() - began < 1
            assert asked == 1

    run(main())


def test_a_thread_that_is_removed_for_good_while_it_is_verified_is_no_finding() -> None:
    """The thread's deletion is flushed; between two reads of `verify`, log and Postgres both forget the thread."""

    async def main() -> None:
        nats, inner, gone, other = MemoryNats(), MemoryThreadStore(), fresh(), fresh()
        windows: dict[str, Any] = {"log": LogConfig(failover_window_s=20.0), "retain_after_flush_s": 20.0}
        async with instance(nats, inner, **windows) as store:
            await store.checkpoint(gone, ["a"], run_of(gone))
            await store.delete_thread(gone)
            await store.checkpoint(other, ["b"], run_of(other))
            await store.force_flush_all()
            ledger: Any = store.buffer.ledger
            watermarks = ledger.watermarks
            assert gone in ledger._rows

            async def later(thread_ids: Any) -> Any:
                ledger.watermarks = watermarks
                await asyncio.sleep(200)
                assert gone not in ledger._rows
                return await watermarks(thread_ids)

            ledger.watermarks = later
            report = await store.verify()
            assert report.ok, report.wrong

    run(main())


@pytest.mark.parametrize("hangs_for_s", [0.0, 3.0, 20.0])
def test_closing_takes_no_longer_than_it_says(hangs_for_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing waits twice for a transaction that hangs: for the last flush, and for the flusher's end."""

    async def main() -> None:
        config = BufferConfig(flush_interval_s=0.05, lease_s=4)
        store = await BufferedThreadStore.open(MemoryThreadStore(), nats=MemoryNats(), config=config)
        await store.checkpoint("t", [1], run_of("t"))
        await store.force_flush_all()

        async def hangs(*_: Any, **__: Any) -> Any:
            await asyncio.sleep(config.flush_timeout_s)
            raise StoreUnavailable("no answer")

        monkeypatch.setattr(store.buffer.ledger, "flush", hangs)
        await store.checkpoint("t", [1, 2], run_of("t", 1))
        await asyncio.sleep(hangs_for_s)
        began = asyncio.get_running_loop().time()
        await store.aclose()
        took = asyncio.get_running_loop().time() - began
        assert took <= config.append_timeout_s + config.flush_timeout_s

    run(main())


def test_an_app_without_a_flusher_tells_what_the_flushers_of_others_report() -> None:
    """Regression: `flushing` was true while the only flusher could not write."""

    async def main() -> None:
        nats, inner = MemoryNats(), MemoryThreadStore()
        async with instance(nats, inner, flusher=False) as app:
            assert not (await app.health()).flushing
            await app.buffer.shared.renew_member("other", 60)
            assert (await app.health()).ok
            await app.buffer.shared.renew_member("other", 60, "Postgres is read-only")
            health = await app.health()
            assert health.flush_trouble == health.flusher == "flusher other: Postgres is read-only"
            assert (health.can_write, health.can_read, health.ok) == (True, True, False)
            await app.buffer.shared.renew_member("other", 60)
            assert (await app.health()).ok

    run(main())


def test_a_store_that_answers_no_reads_shows_in_health_although_flushing_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: the store and the ledger have pools of their own, and only the ledger was asked."""

    async def main() -> None:
        inner = MemoryThreadStore()
        async with instance(MemoryNats(), inner) as store:
            await store.checkpoint("t", [1], run_of("t"))
            await store.force_flush("t")
            assert (await store.health()).ok
            reader: Any = store.buffer.reads.store._reader

            async def refuses() -> None:
                raise StoreMisconfigured("the password is wrong")

            with monkeypatch.context() as patch:
                patch.setattr(reader, "answers", refuses)
                health = await store.health()
                assert "the password is wrong" in health.read_trouble
                assert (health.can_write, health.can_read, health.flushing, health.ok) == (True, False, True, False)
            await asyncio.sleep(1)
            assert (await store.health()).ok

    run(main())


@pytest.mark.parametrize("hangs_for_s", [0.0, 7.0, 25.0])
@pytest.mark.parametrize("rest", ["", "pending", "waits"])
def test_closing_waits_for_a_silent_postgres_only_if_something_is_not_flushed(
    rest: str, hangs_for_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: so did a process that had flushed everything, for its purge and its idle cursors, too."""

    async def main() -> None:
        config = BufferConfig(flush_interval_s=0.05, lease_s=4)
        store = await BufferedThreadStore.open(MemoryThreadStore(), nats=MemoryNats(), config=config)
        await store.checkpoint("t", [1], run_of("t"))
        await store.force_flush_all()
        flusher: Any = store.buffer.flusher
        await asyncio.sleep(2)
        assert len(flusher._owned) == CONFIG.log.partitions

        async def hangs(*_: Any, **__: Any) -> Any:
            await asyncio.sleep(config.flush_timeout_s)
            raise StoreUnavailable("no answer")

        for name in ("flush", "flushed", "cursors", "watermark"):
            monkeypatch.setattr(store.buffer.ledger, name, hangs)
        if rest == "pending":
            await store.checkpoint("t", [1, 2], run_of("t", 1))
        if rest == "waits":
            next(iter(flusher._owned.values())).queues["w"] = Queued(1, 10, "its row is locked")
        await asyncio.sleep(hangs_for_s)
        began = asyncio.get_running_loop().time()
        await store.aclose()
        took = asyncio.get_running_loop().time() - began
        assert took < 1 if not rest else took > 1

    run(main())


def test_a_close_that_failed_is_not_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the second close flushed again, on parts that were closed."""

    async def main() -> None:
        store = await BufferedThreadStore.open(MemoryThreadStore(), nats=MemoryNats(), config=CONFIG)
        close = store.buffer.session.aclose

        async def stubborn() -> None:
            await close()
            raise ValueError("a store of an app's own")

        monkeypatch.setattr(store.buffer.session, "aclose", stubborn)
        with pytest.raises(ValueError, match="an app's own"):
            await store.aclose()
        await store.aclose()

    run(main())


@pytest.mark.parametrize("children", [Children.DETACH, Children.CASCADE])
def test_what_is_written_is_recognized_though_its_parent_is_gone(children: Children) -> None:
    """A pipeline repeats its work after the parent was deleted, with or without its children."""

    async def main() -> None:
        nats, inner = MemoryNats(), MemoryThreadStore()
        child = replace_run(run_of("c"), parent_thread_id="p")
        steps = [BulkCheckpoint([n], child, False, ProducerSequence("app", n)) for n in range(3)]
        async with instance(nats, inner) as store:
            await store.checkpoint("p", [], run_of("p"))
            assert (await store.bulk.write("c", steps[:2])).error is None
            await store.delete_thread("p", children=children)
            left = await store.load_thread("c")
        async with instance(nats, inner) as store:
            series = await store.bulk.write("c", steps)
            assert [receipt.repeated for receipt in series.receipts] == [True, True]
            assert isinstance(series.error, LineageError), "what is new names a parent that there is none of"
            assert await store.load_thread("c") == left

    run(main())


def test_an_edit_that_was_made_is_recognized_though_its_thread_is_quarantined_since() -> None:
    async def main() -> None:
        nats, inner = MemoryNats(), MemoryThreadStore()
        wanted, producer = edits.save_thread("t", ThreadMetadata(title="x")), ProducerSequence("app", 1)
        async with await BufferedThreadStore.open(inner, nats=nats, config=CONFIG) as store:
            await store.checkpoint("t", [1], run_of("t"))
            assert not (await store.bulk.edit(wanted, producer)).repeated
            await store.force_flush("t")
            await store.buffer.log.publish(Outgoing(store.buffer.subjects.of("t"), b"damaged"), 5.0)
            await store.force_flush("t")
            assert (await store.bulk.edit(wanted, producer)).repeated
            with pytest.raises(ThreadQuarantined):
                await store.bulk.edit(wanted, ProducerSequence("app", 2))

    run(main())


class Away(MemoryThreadStore):
    """A store that does not answer while it is `away`."""

    away = False

    async def load_checkpoint(self, thread_id: str) -> Any:
        self._look()
        return await super().load_checkpoint(thread_id)

    async def apply(self, connection: Any, batch: Any) -> None:
        self._look()
        await super().apply(connection, batch)

    def _look(self) -> None:
        if self.away:
            raise StoreUnavailable("it does not answer")


def test_what_the_log_does_not_show_of_a_thread_is_not_taken_for_nothing() -> None:
    """Regression: the last checkpoint has no state and no parent, and a lasting circle of parents came of it."""

    async def main() -> None:
        nats, inner = MemoryNats(), Away()
        settings = replace(CONFIG, log=LogConfig(failover_window_s=20.0), retain_after_flush_s=20.0)
        async with await BufferedThreadStore.open(inner, nats=nats, config=settings) as store:
            for thread_id in ("above", "other"):
                await store.checkpoint(thread_id, [1], run_of(thread_id))
            await store.checkpoint("t", [1], replace_run(run_of("t"), parent_thread_id="above"))
            await store.save_thread_state("t", {"cursor": 5})
            await store.force_flush_all()
            await asyncio.sleep(30)
            for n in range(60):
                await store.save_thread(f"o{n}")
            await asyncio.sleep(90)
        async with await BufferedThreadStore.open(inner, nats=nats, config=settings) as store:
            inner.away = True
            for thread_id in ("other", "above", "t"):
                await store.checkpoint(thread_id, [1, 2], run_of(thread_id))
            assert await store.load_messages("t") == [1, 2]
            with pytest.raises(StoreUnavailable, match="state"):
                await store.load_thread_state("t")
            with pytest.raises(StoreUnavailable, match="parent"):
                await store.set_parent("above", "t")
            named = replace_run(run_of("t"), parent_thread_id="other")
            await store.checkpoint("t", [1, 2, 3], named)
            inner.away = False
            await store.force_flush_all()
            parents = {t: (await store.load_thread(t)).parent_thread_id for t in ("t", "above", "other")}  # type: ignore[union-attr]
            assert parents == {"t": "above", "above": None, "other": None}
            assert await store.load_thread_state("t") == {"cursor": 5}

    run(main())


def test_a_write_that_waits_for_a_silent_store_says_so() -> None:
    """Regression: it said that the log accepts nothing, and operators looked at a NATS that was well."""

    class Silent(MemoryThreadStore):
        def __init__(self) -> None:
            super().__init__()
            self.answers = asyncio.Event()
            self.answers.set()

        async def load_checkpoint(self, thread_id: str) -> Any:
            await self.answers.wait()
            return await super().load_checkpoint(thread_id)

        async def load_run(self, run_id: str) -> Any:
            await self.answers.wait()
            return await super().load_run(run_id)

    async def main() -> None:
        nats, inner = MemoryNats(), Silent()
        windows = replace(CONFIG, log=LogConfig(failover_window_s=20.0), retain_after_flush_s=20.0)
        settings = replace(windows, append_timeout_s=4.0)
        async with await BufferedThreadStore.open(inner, nats=nats, config=settings) as store:
            await store.checkpoint("t", [{"id": "1"}], run_of("t"))
            await store.force_flush_all()
            await asyncio.sleep(30)
            for n in range(60):
                await store.save_thread(f"o{n}")
            await asyncio.sleep(90)
        async with await BufferedThreadStore.open(inner, nats=nats, config=settings) as store:
            inner.answers.clear()
            with pytest.raises(StoreUnavailable, match="nothing was stored"):
                await store.checkpoint_append("t", [{"id": "2"}], run_of("t"))
            await store.checkpoint("new", [1], run_of("new"))
            inner.answers.set()
            await store.checkpoint_append("t", [{"id": "2"}], run_of("t"))
            assert await store.load_messages("t") == [{"id": "1"}, {"id": "2"}]

    run(main())


@pytest.mark.parametrize("flushed", [True, False])
def test_a_thread_that_an_edit_began_is_read_and_edited_in_an_outage(flushed: bool) -> None:
    """Regression: the log had all of it, but only what a checkpoint had begun was read from there."""

    async def main() -> None:
        nats, inner = MemoryNats(), Away()
        async with await BufferedThreadStore.open(inner, nats=nats, config=CONFIG) as store:
            await store.append_messages("t", [{"id": "a"}, {"id": "b"}])
            await store.delete_messages("t", ["b"])
            await store.save_thread("u", ThreadMetadata(title="a title"))
            await store.append_messages("again", [{"id": "a"}])
            await store.delete_thread("again")
            await store.append_messages("again", [{"id": "b"}])
            if flushed:
                await store.force_flush_all()
            inner.away = True
            async with await BufferedThreadStore.open(inner, nats=nats, config=CONFIG) as other:
                for writer, new in ((other, "c"), (store, "d")):
                    await writer.append_messages("t", [{"id": new}])
                    with pytest.raises(AlreadyExists):
                        await writer.append_messages("t", [{"id": "a"}])
                    assert await writer.load_messages("again") == [{"id": "b"}]
                    await writer.append_messages("u", [{"id": new}])
                thread = await other.load_thread("u")
                assert thread is not None
                assert thread.metadata.title == "a title"
                assert await other.load_messages("u") == [{"id": "c"}, {"id": "d"}]
                with pytest.raises(StoreUnavailable):
                    await other.append_messages("new", [{"id": "a"}])
            inner.away = False
            await store.force_flush_all()
            assert await store.load_messages("t", consistency=Consistency.EVENTUAL) == [{"id": i} for i in "acd"]
            assert await store.load_thread("u", consistency=Consistency.EVENTUAL) == thread
            assert await store.quarantined() == 0

    run(main())


@pytest.mark.parametrize("begun", ["sound edit", "poisonous edit"])
def test_in_an_outage_nothing_is_shown_that_was_parked_before_a_whole_list(begun: str) -> None:
    """Regression: the log had all entries, and only the last one tells that those before it were not applied."""

    class Refusing(Away):
        async def apply(self, connection: Any, batch: Any) -> None:
            if any("poison" in change.runs for change in batch):
                raise FlushFailed("a constraint", Verdict.POISON)
            await super().apply(connection, batch)

    async def main() -> None:
        nats, inner = MemoryNats(), Refusing()
        async with await BufferedThreadStore.open(inner, nats=nats, config=CONFIG) as store:
            if begun == "sound edit":
                await store.append_messages("t", ["a"])
            await store.create_run(replace_run(run_of("t"), run_id="poison"))
            await store.save_thread("t", ThreadMetadata(title="parked"))
            await store.save_thread_state("t", "parked")
            await store.force_flush_all()
            with pytest.raises(ThreadQuarantined):
                await store.load_thread("t")
            await store.checkpoint("t", ["b"], run_of("t"))
            await store.force_flush_all()
            whole = await store.load_checkpoint("t")
            assert whole is not None
            assert (whole.messages, whole.state, whole.thread.metadata.title) == (["b"], None, None)
            inner.away = True
            async with await BufferedThreadStore.open(inner, nats=nats, config=CONFIG) as other:
                part = await other.load_checkpoint("t")
                assert part is not None
                assert (part.partial, part.messages) == (True, ["b"])
                for read in (other.load_thread, other.load_thread_state):
                    with pytest.raises(StoreUnavailable):
                        await read("t")
                with pytest.raises(StoreUnavailable):
                    await other.load_run("poison")
            inner.away = False

    run(main())


def test_in_an_outage_a_thread_is_shown_whole_or_the_read_says_what_lacks() -> None:
    """Regression: it was read without metadata and parent, as if it had none."""

    async def main() -> None:
        nats, inner = MemoryNats(), Away()
        await inner.save_thread("t", ThreadMetadata(title="a title"))  # the log never has that
        async with await BufferedThreadStore.open(inner, nats=nats, config=CONFIG) as store:
            await store.save_thread("parent")
            receipt = await store.set_parent("t", "parent")
            await store.checkpoint("t", [1], run_of("t"))
            await store.force_flush_all()
            whole = await store.load_checkpoint("t")
            assert whole is not None
            assert not whole.partial
        async with await BufferedThreadStore.open(inner, nats=nats, config=CONFIG) as store:
            inner.away = True
            await store.checkpoint("new", [1], run_of("new"))
            part = await store.load_checkpoint("t", at_least=receipt)
            assert part is not None
            assert (part.partial, part.messages, part.latest_run) == (True, whole.messages, whole.latest_run)
            with pytest.raises(StoreUnavailable, match="metadata"):
                await store.load_thread("t", at_least=receipt)
            assert await store.load_messages("new") == [1]
            inner.away = False
            await asyncio.sleep(5)
            assert await store.load_checkpoint("t") == whole
            assert await store.load_thread("t") == whole.thread

    run(main())


@pytest.mark.parametrize("append", [False, True])
def test_a_retry_is_recognized_though_its_parent_is_gone(append: bool) -> None:
    """Regression: the retry of a stored write was refused, as if nothing were stored."""

    async def main(store: BufferedThreadStore) -> None:
        async def write(messages: list[Any], key: str) -> Receipt:
            named = replace_run(run_of("child"), parent_thread_id="parent")
            save = store.checkpoint_append if append else store.checkpoint
            return await save("child", messages, named, idempotency_key=key)

        for thread_id in ("parent", *(["child"] if append else [])):
            await store.save_thread(thread_id)
        await write([1], "key")
        await store.delete_thread("parent", children=Children.DETACH)
        assert (await write([1], "key")).repeated
        with pytest.raises(LineageError):
            await write([2], "another key")
        with pytest.raises(IdempotencyConflict):
            await write([2], "key")
        assert await store.load_messages("child") == [1]

    alone(main)


def test_no_run_names_its_own_thread_as_parent_in_an_outage_either() -> None:
    async def main() -> None:
        inner = Away()
        async with await BufferedThreadStore.open(inner, nats=MemoryNats(), config=CONFIG) as store:
            inner.away = True
            await asyncio.sleep(5)
            with pytest.raises(LineageError):
                await store.checkpoint("t", [1], replace_run(run_of("t"), parent_thread_id="t"))
            inner.away = False
            assert await store.load_thread("t") is None

    run(main())


def test_many_changes_of_lineage_at_once_look_at_the_record_a_few_times_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once looked again, and finished the one under way, as often as there were others."""

    async def main(store: BufferedThreadStore) -> None:
        threads = [fresh() for _ in range(40)]
        for thread_id in threads:
            await store.checkpoint(thread_id, [1], run_of(thread_id))
        shared, looks = store.buffer.shared, 0
        lineage = shared.lineage

        async def counted(timeout_s: float) -> tuple[int, bytes]:
            nonlocal looks
            looks += 1
            return await lineage(timeout_s)

        monkeypatch.setattr(shared, "lineage", counted)
        await asyncio.gather(*(store.delete_thread(thread_id) for thread_id in threads))
        assert looks <= 3 * len(threads)
        assert [await store.load_thread(thread_id) for thread_id in threads] == [None] * len(threads)

    alone(main)


def test_changes_of_lineage_that_wait_their_turn_learn_of_an_outage_at_once() -> None:
    async def main(store: BufferedThreadStore) -> None:
        threads = [fresh() for _ in range(40)]
        for thread_id in threads:
            await store.checkpoint(thread_id, [1], run_of(thread_id))
        inner: Any = store._store
        loop = asyncio.get_running_loop()

        async def away(*_: object, **__: object) -> Any:
            await asyncio.sleep(2)
            raise StoreUnavailable("it is away")

        inner.query_threads = away
        began = loop.time()
        outcomes = await asyncio.gather(*map(store.delete_thread, threads), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [StoreUnavailable] * len(threads)
        assert loop.time() - began < 10
        del inner.query_threads

    alone(main)


def test_many_edits_of_a_thread_at_once_read_it_a_few_times_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: each read the thread again as often as there were others, and of 300 most were given up."""

    async def main(store: BufferedThreadStore) -> None:
        await store.save_thread("t")
        reads, looks = store.buffer.reads, 0
        thread = reads.thread

        async def counted(*arguments: Any, **options: Any) -> Any:
            nonlocal looks
            looks += 1
            return await thread(*arguments, **options)

        monkeypatch.setattr(reads, "thread", counted)
        await asyncio.gather(*(store.append_messages("t", [n]) for n in range(40)))
        monkeypatch.undo()
        assert looks <= 2 * 40
        assert sorted(await store.load_messages("t") or []) == [*range(40)]
        assert not store._edits._turns, "nobody waits, so nothing is kept"

    alone(main)


def test_edits_that_wait_their_turn_learn_of_an_outage_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(store: BufferedThreadStore) -> None:
        await store.save_thread("t")
        loop = asyncio.get_running_loop()

        async def away(*_: object, **__: object) -> Any:
            await asyncio.sleep(2)
            raise StoreUnavailable("it is away")

        monkeypatch.setattr(store.buffer.reads, "thread", away)
        began = loop.time()
        appends = [store.append_messages("t", [n]) for n in range(40)]
        outcomes = await asyncio.gather(*appends, return_exceptions=True)
        monkeypatch.undo()
        assert [type(outcome) for outcome in outcomes] == [StoreUnavailable] * len(appends)
        assert loop.time() - began < 3

    alone(main)


@pytest.mark.parametrize("large", [False, True])
def test_who_cancels_all_other_tasks_of_the_loop_leaves_no_write_waiting(large: bool) -> None:
    """Regression: a write waited until its deadline, the log's floor stayed where the entry was, or all writes failed.

    Neither which task is cancelled nor how far it has come may matter.
    """

    async def main(turns: int) -> bool:
        # The limit for one write is longer than the test waits.
        async with instance(MemoryNats(), MemoryThreadStore(), flusher=False, append_timeout_s=30) as store:
            loop, body = asyncio.get_running_loop(), ["x" * (2 << 20 if large else 1)]
            await store.checkpoint("known", [1], run_of("known"))
            write = loop.create_task(store.checkpoint("new", body, run_of("new")))
            for _ in range(turns):
                await asyncio.sleep(0)
            done = write.done()
            others = asyncio.all_tasks() - {asyncio.current_task(), write}
            for task in others:
                task.cancel()
            try:
                async with asyncio.timeout(2):
                    await write
            except (LogUnavailable, OutcomeUnknown) as e:
                assert "cancelled" in str(e)
            writer: Any = store.buffer.session.log.writer
            assert writer.oldest is None
            for thread_id in ("new", "newer"):
                async with asyncio.timeout(2):
                    await store.checkpoint(thread_id, body, run_of(thread_id))
            return done

    turns = 1
    while not run(main(turns)):
        turns += 1
    assert turns > 3
