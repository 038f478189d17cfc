"""Erasing a thread, on a log in memory and in virtual time: what is removed, what stays, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from itertools import pairwise
from typing import Any

import pytest

from bufstore import (
    AlreadyExists,
    BufferedThreadStore,
    Children,
    Consistency,
    FlushTimeout,
    LineageError,
    LogConfig,
    LogRolledBack,
    MemoryThreadStore,
    Run,
    Unavailable,
)
from bufstore.buffer.flush.verdict import Verdict
from bufstore.buffer.ports.ledger import FlushFailed
from bufstore.memory import MemoryNats
from helpers import fresh, run_of
from unit.fake_log import run
from unit.test_buffered_in_memory import alone, instance


class Picky(MemoryThreadStore):
    """A store that refuses messages with a mark."""

    async def apply(self, connection: Any, batch: Any) -> None:
        if any(b"poison" in m for c in batch for m in c.messages):
            raise AlreadyExists("refused")
        await super().apply(connection, batch)


async def content_of(store: BufferedThreadStore, thread_id: str) -> list[bytes]:
    """The bodies of the thread's messages in the log."""
    return [m.body async for _, m in store.buffer.log.scan(threads=[thread_id])]


def test_what_was_written_leaves_the_log_and_others_stay() -> None:
    async def main(store: BufferedThreadStore) -> None:
        gone, other = fresh(), fresh()
        for thread_id in (gone, other):
            for n in range(3):
                await store.checkpoint(thread_id, [f"secret {i}" for i in range(n + 1)], run_of(thread_id))
        erasure = await store.erase(gone)
        assert (erasure.thread_ids, erasure.found, erasure.log_messages) == ((gone,), True, 3)
        assert not any(b"secret" in body for body in await content_of(store, gone))
        assert await store.load_checkpoint(gone, consistency=Consistency.STRONG) is None
        assert len(await content_of(store, other)) == 3
        assert await store.load_messages(other) == [f"secret {n}" for n in range(3)]
        await store.checkpoint(gone, ["new"], run_of(gone, 1))
        assert await store.load_messages(gone, consistency=Consistency.STRONG) == ["new"]

    alone(main)


def test_erasures_at_once_name_all_that_they_remove() -> None:
    """Readers take a hole that no message names for a loss. Each message also names the highest of those before it."""

    async def main() -> None:
        nats, inner, gone = MemoryNats(), MemoryThreadStore(), [fresh() for _ in range(6)]
        log = LogConfig(failover_window_s=20.0)
        async with instance(nats, inner, log=log) as one, instance(nats, inner, log=log) as two:
            for thread_id in gone:
                await one.checkpoint(thread_id, ["secret"], run_of(thread_id))
            stream = nats.streams[log.stream]
            written = {m.seq for m in stream.messages}
            await asyncio.gather(*(store.erase(t) for t, store in zip(gone, [one, two] * 3, strict=True)))
            numbers = [set(map(int, m.body.split(b","))) for m in stream.messages if ".erased." in m.subject]
            holes = written - {m.seq for m in stream.messages}
            assert len(holes) == len(written)
            assert holes <= set().union(*numbers)
            assert all(max(before) in after for before, after in pairwise(numbers))

    run(main())


def test_a_try_that_failed_half_way_leaves_no_content_of_descendants_to_the_next_one() -> None:
    """The descendants are deleted by then, and have no parent any more."""

    async def main() -> None:
        nats, inner = MemoryNats(), MemoryThreadStore()
        top, child, below, back = (fresh() for _ in range(4))
        async with instance(nats, inner, log=LogConfig(failover_window_s=20.0)) as store:
            for thread_id, parent in ((top, None), (child, top), (below, child), (back, top)):
                await store.checkpoint(thread_id, ["secret"], run_of(thread_id, parent_thread_id=parent))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(10):  # all of them are deleted, and it waits for the failover window
                    await store.erase(top, children=Children.CASCADE)
            await store.checkpoint(back, ["not secret"], run_of(back, 1))
        async with instance(nats, inner, log=LogConfig(failover_window_s=20.0)) as store:
            again = await store.erase(top, children=Children.CASCADE)
            assert (set(again.thread_ids), again.written_again) == ({top, child, below}, (back,))
            for thread_id in (top, child, below):
                assert not any(b"secret" in body for body in await content_of(store, thread_id))
            assert await store.load_messages(back) == ["not secret"]
            assert (await store.erase(top, children=Children.CASCADE)).thread_ids == (top,)

    run(main())


def during(store: BufferedThreadStore, what: Callable[[], Awaitable[object]]) -> None:
    """Call `what` when the next erasure of a tree has looked for descendants, and deleted nothing yet."""
    ledger = store.lanes.first.ledger
    begin, calls = ledger.begin_erasure, iter([what])

    async def begin_erasure(thread_id: str, descendants: Collection[str]) -> list[str]:
        found = await begin(thread_id, descendants)
        for call in calls:
            await call()
        return found

    ledger.begin_erasure = begin_erasure  # type: ignore[method-assign]


@pytest.mark.parametrize("how", ["written", "moved"])
def test_a_child_that_comes_while_its_parent_is_erased_goes_whole(how: str) -> None:
    async def main(store: BufferedThreadStore) -> None:
        top, child = fresh(), fresh()
        await store.checkpoint(top, ["secret"], run_of(top))
        if how == "moved":
            await store.checkpoint(child, ["secret"], run_of(child))
            during(store, lambda: store.set_parent(child, top))
        else:
            during(store, lambda: store.checkpoint(child, ["secret"], run_of(child, parent_thread_id=top)))
        erasure = await store.erase(top, children=Children.CASCADE)
        assert (set(erasure.thread_ids), erasure.written_again) == ({top, child}, ())
        assert await store.load_thread(child) is None
        assert not any(b"secret" in body for body in await content_of(store, child))

    alone(main)


def test_an_erasure_leaves_what_is_in_quarantine_of_a_thread_that_is_no_descendant_any_more() -> None:
    async def main() -> None:
        top, child = fresh(), fresh()
        async with instance(MemoryNats(), Picky()) as store:
            await store.checkpoint(top, ["secret"], run_of(top))
            await store.checkpoint(child, ["fine"], run_of(child, parent_thread_id=top))
            await store.force_flush_all()

            async def detach_and_park() -> None:
                await store.set_parent(child, None)
                await store.checkpoint(child, ["fine", "poison"], run_of(child, 1))
                await store.force_flush_all()
                assert await store.quarantined() == 1

            during(store, detach_and_park)
            erasure = await store.erase(top, children=Children.CASCADE)
            assert (erasure.thread_ids, erasure.written_again, erasure.quarantined) == ((top,), (child,), 0)
            assert await store.quarantined() == 1
            assert await store.load_messages(child, quarantined="known") == ["fine"]

    run(main())


def test_an_erasure_forgets_nothing_that_another_one_has_remembered_meanwhile() -> None:
    async def main() -> None:
        nats, inner, log = MemoryNats(), MemoryThreadStore(), LogConfig(failover_window_s=20.0)
        top, first, second = fresh(), fresh(), fresh()
        async with instance(nats, inner, log=log) as here, instance(nats, inner, log=log) as there:
            await here.checkpoint(top, ["secret"], run_of(top))
            await here.checkpoint(first, ["secret"], run_of(first, parent_thread_id=top))
            waiting = asyncio.create_task(here.erase(top, children=Children.CASCADE))
            await asyncio.sleep(10)  # it waits for the failover window
            await there.checkpoint(top, ["again"], run_of(top, 1))
            await there.checkpoint(second, ["secret"], run_of(second, parent_thread_id=top))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(15):
                    await there.erase(top, children=Children.CASCADE)
            assert set((await waiting).thread_ids) == {top, first}
            assert set((await there.erase(top, children=Children.CASCADE)).thread_ids) == {top, second}
            assert not any(b"secret" in body for body in await content_of(there, second))

    run(main())


def test_nothing_leaves_the_log_while_postgres_may_still_need_it() -> None:
    async def main(store: BufferedThreadStore) -> None:
        thread_id = fresh()
        await store.checkpoint(thread_id, ["secret"], run_of(thread_id))
        loop = asyncio.get_running_loop()
        began = loop.time()
        erasing = asyncio.create_task(store.erase(thread_id))
        await asyncio.sleep(19)
        assert any(b"secret" in body for body in await content_of(store, thread_id))
        await erasing
        assert loop.time() - began >= 20

    alone(main, log=LogConfig(failover_window_s=20.0))


def test_a_postgres_that_goes_back_is_waited_for_again() -> None:
    async def main() -> None:
        nats, inner, thread_id = MemoryNats(), MemoryThreadStore(), fresh()
        async with instance(nats, inner, log=LogConfig(failover_window_s=20.0)) as store:
            ledger = inner.ledger(0)
            tables = [inner._threads, inner._messages, ledger._rows, ledger._cursors]
            await store.checkpoint(thread_id, ["secret"], run_of(thread_id))
            await store.force_flush(thread_id)
            copies = [dict(table) for table in tables]
            erasing = asyncio.create_task(store.erase(thread_id))
            await asyncio.sleep(15)
            for table, copy in zip(tables, copies, strict=True):
                table.clear()
                table.update(copy)
            await asyncio.sleep(10)
            # Postgres has flushed the removal again, and a copy made now may lack it.
            assert any(b"secret" in body for body in await content_of(store, thread_id))
            assert (await erasing).log_messages == 1
            assert await inner.load_checkpoint(thread_id) is None

    run(main())


def test_where_nobody_flushes_it_says_so_and_can_be_repeated() -> None:
    async def main() -> None:
        nats, inner, thread_id = MemoryNats(), MemoryThreadStore(), fresh()
        async with instance(nats, inner, flusher=False, flush_timeout_s=5.0) as store:
            await store.checkpoint(thread_id, ["secret"], run_of(thread_id))
            with pytest.raises(Unavailable):
                await store.erase(thread_id)
            async with instance(nats, inner):
                assert (await store.erase(thread_id)).log_messages == 1
            assert not any(b"secret" in body for body in await content_of(store, thread_id))

    run(main())


def test_it_may_be_repeated_and_says_when_there_was_nothing() -> None:
    async def main(store: BufferedThreadStore) -> None:
        thread_id = fresh()
        await store.checkpoint(thread_id, ["secret"], run_of(thread_id))
        await store.delete_thread(thread_id)
        assert (await store.erase(thread_id)).found
        again = await store.erase(thread_id)
        assert (again.found, again.log_messages, again.quarantined) == (False, 0, 0)
        assert not (await store.erase(fresh())).found

    alone(main)


def test_a_deletion_that_waits_in_postgres_is_waited_for() -> None:
    """Regression: where the log had forgotten it, an erasure said that there was nothing; the rows were still there."""

    class Holding(MemoryThreadStore):
        held = False

        async def apply(self, connection: Any, batch: Any) -> None:
            if self.held and any(c.thread_id == "t" for c in batch):
                raise FlushFailed("55P03", Verdict.ISOLATE)
            await super().apply(connection, batch)

    async def main() -> None:
        inner = Holding()
        async with instance(MemoryNats(), inner, flush_timeout_s=5.0, retain_after_flush_s=60.0) as store:
            await store.checkpoint("t", ["secret"], run_of("t"))
            await store.force_flush("t")
            inner.held = True
            await store.delete_thread("t")
            n = 0
            while await content_of(store, "t"):
                n += 1
                for other in range(20):
                    await store.checkpoint_append(f"other {other}", [n], run_of(f"other {other}", n))
                await asyncio.sleep(10)
            with pytest.raises(FlushTimeout):
                await store.erase("t")
            assert await inner.load_messages("t") == ["secret"]
            erasing = asyncio.create_task(store.erase("t"))
            await asyncio.sleep(1)
            inner.held = False
            assert (await erasing).found
            assert await inner.load_checkpoint("t") is None
            assert not (await store.erase("t")).found

    run(main())


@pytest.mark.parametrize("first", [[], ["good"]], ids=["alone", "behind what was applied"])
def test_poison_leaves_log_and_quarantine(first: list[str]) -> None:
    async def main() -> None:
        nats, inner, thread_id, other = MemoryNats(), Picky(), fresh(), fresh()
        async with instance(nats, inner) as store:
            if first:
                await store.checkpoint(thread_id, first, run_of(thread_id))
            for t in (thread_id, other):
                await store.checkpoint(t, [*first, "poison"], run_of(t, 1))
            await asyncio.sleep(120)
            assert await store.quarantined() == 2
            erasure = await store.erase(thread_id)
            assert (erasure.found, erasure.quarantined) == (True, 1)
            assert not any(b"poison" in body for body in await content_of(store, thread_id))
            assert await store.quarantined() == 1
            await store.checkpoint(thread_id, ["new"], run_of(thread_id, 2))
            assert await store.load_messages(thread_id, consistency=Consistency.STRONG) == ["new"]

    run(main())


def test_poison_that_came_behind_a_deletion_leaves_the_log_too() -> None:
    async def main() -> None:
        nats, inner, thread_id, other = MemoryNats(), Picky(), fresh(), fresh()
        async with instance(nats, inner) as store:
            await store.checkpoint(thread_id, ["good"], run_of(thread_id))
            await store.delete_thread(thread_id)
            for t in (thread_id, other):
                await store.checkpoint(t, ["poison"], run_of(t, 1))
            await asyncio.sleep(120)
            assert await store.quarantined() == 2
            erasure = await store.erase(thread_id)
            assert (erasure.written_again, erasure.quarantined) == ((), 1)
            assert not any(b"poison" in body for body in await content_of(store, thread_id))
            await store.checkpoint(thread_id, ["new"], run_of(thread_id, 2))
            assert await store.load_messages(thread_id, consistency=Consistency.STRONG) == ["new"]

    run(main())


@pytest.mark.parametrize("deleted", [False, True])
def test_poison_that_was_discarded_leaves_the_log_too(deleted: bool) -> None:
    """There is no thread to delete, and no entry in quarantine either: only the log still has what was written."""

    async def main() -> None:
        nats, inner, thread_id = MemoryNats(), Picky(), fresh()
        async with instance(nats, inner) as store:
            if deleted:
                await store.checkpoint(thread_id, ["good"], run_of(thread_id))
                await store.delete_thread(thread_id)
            await store.checkpoint(thread_id, ["poison"], run_of(thread_id, 1))
            await asyncio.sleep(120)
            (parked,) = await store.quarantine.page()
            assert await store.quarantine.discard([parked.seq]) == 1
            erasure = await store.erase(thread_id)
            assert (erasure.written_again, erasure.quarantined, erasure.log_messages > 0) == ((), 0, True)
            assert not any(b"poison" in body for body in await content_of(store, thread_id))
            await store.checkpoint(thread_id, ["new"], run_of(thread_id, 2))
            assert await store.load_messages(thread_id, consistency=Consistency.STRONG) == ["new"]

    run(main())


def test_descendants_are_erased_with_their_ancestor() -> None:
    async def main(store: BufferedThreadStore) -> None:
        parent, child, grandchild = fresh("parent"), fresh("child"), fresh("grandchild")
        await store.checkpoint(parent, ["secret"], run_of(parent))
        for thread_id, above in ((child, parent), (grandchild, child)):
            run_ = Run(run_id=fresh("run"), thread_id=thread_id, parent_thread_id=above)
            await store.checkpoint(thread_id, ["secret"], run_)
        with pytest.raises(LineageError):
            await store.erase(parent)
        erasure = await store.erase(parent, children=Children.CASCADE)
        assert sorted(erasure.thread_ids) == sorted([parent, child, grandchild])
        assert erasure.log_messages == 3
        for thread_id in erasure.thread_ids:
            assert not any(b"secret" in body for body in await content_of(store, thread_id))

    alone(main)


def test_what_is_written_while_it_waits_stays() -> None:
    async def main(store: BufferedThreadStore) -> None:
        thread_id = fresh()
        await store.checkpoint(thread_id, ["secret"], run_of(thread_id))
        erasing = asyncio.create_task(store.erase(thread_id))
        await asyncio.sleep(10)
        await store.checkpoint(thread_id, ["new"], run_of(thread_id, 1))
        await erasing
        bodies = await content_of(store, thread_id)
        assert not any(b"secret" in body for body in bodies)
        assert any(b"new" in body for body in bodies)
        assert await store.load_messages(thread_id, consistency=Consistency.STRONG) == ["new"]

    alone(main)


def test_groups_of_many_threads_go_and_nobody_loses_anything() -> None:
    async def main() -> None:
        nats, inner = MemoryNats(), MemoryThreadStore()
        gone, others = fresh(), [fresh() for _ in range(30)]
        large = "large" * 100_000
        async with (
            instance(nats, inner) as store,
            instance(nats, inner, flusher=False) as idle,
            instance(nats, inner, flusher=False) as writer,
        ):
            for n in range(3):  # each round is one group
                new = [(t, [f"secret of {t}" for _ in range(n + 1)]) for t in (gone, *others)]
                await asyncio.gather(*(store.checkpoint(t, messages, run_of(t, n)) for t, messages in new))
            await store.checkpoint(gone, [large], run_of(gone, 3))
            # The other instances see the log before the erasure.
            for other in (idle, writer):
                for t in others:
                    assert len(await other.load_messages(t)) == 3
            await writer.checkpoint_append(others[0], ["more"], run_of(others[0], 3))
            stream = nats.streams["THREADLOG"]
            before = {m.seq for m in stream.messages}

            assert (await store.erase(gone)).log_messages == 4
            left = {m.seq for m in stream.messages}
            told = [m.body for m in stream.messages if m.subject == store.buffer.subjects.erased]
            assert {int(seq) for body in told for seq in body.split(b",")} == before - left
            assert not any(f"secret of {gone}".encode() in m.body for m in nats.streams["THREADLOG"].messages)
            assert not any(b"large" in m.body for m in nats.streams["THREADLOG"].messages)

            for n, at in enumerate((store, idle, writer)):
                for i, t in enumerate(others):
                    added = ["more"] if i == 0 else []
                    whole = [f"secret of {t}"] * 3 + added + [str(k) for k in range(n)]
                    assert await at.load_messages(t, consistency=Consistency.STRONG) == whole
                    await at.checkpoint_append(t, [str(n)], run_of(t, 10 + n))
                assert await at.load_checkpoint(gone, consistency=Consistency.STRONG) is None
            await store.force_flush_all()
            assert await store.quarantined() == 0
        async with instance(nats, inner) as later:
            for t in others:
                assert (await later.load_messages(t))[-3:] == ["0", "1", "2"]

    run(main())


def test_what_ends_the_log_goes_too() -> None:
    async def main(store: BufferedThreadStore) -> None:
        thread_id = fresh()
        receipt = await store.checkpoint(thread_id, ["secret"], run_of(thread_id))
        assert await store.buffer.eraser.erase({thread_id: receipt.thread_seq + 1}) == 1
        assert await content_of(store, thread_id) == []
        # Entries that are no longer in the log are in Postgres, and the thread goes on from there.
        assert await store.load_messages(thread_id, consistency=Consistency.STRONG) == ["secret"]
        await store.checkpoint_append(thread_id, ["more"], run_of(thread_id, 1))
        assert await store.load_messages(thread_id, consistency=Consistency.STRONG) == ["secret", "more"]

    alone(main)


def test_a_postgres_of_before_an_erasure_is_refused() -> None:
    async def main() -> None:
        nats, inner, other, gone = MemoryNats(), MemoryThreadStore(), fresh(), fresh()
        async with instance(nats, inner) as store:
            ledger = inner.ledger(0)
            tables = [inner._threads, inner._messages, ledger._rows, ledger._cursors]
            await store.checkpoint(other, ["first"], run_of(other))
            await store.force_flush_all()
            copies = [dict(table) for table in tables]
            await asyncio.gather(*(store.checkpoint(t, ["first", "second"], run_of(t, 1)) for t in (other, gone)))
            await store.erase(gone)
        for table, copy in zip(tables, copies, strict=True):
            table.clear()
            table.update(copy)
        with pytest.raises(LogRolledBack):
            async with instance(nats, inner):
                pass

    run(main())


def test_what_is_not_archived_stays() -> None:
    async def main() -> None:
        nats, inner, thread_id = MemoryNats(), MemoryThreadStore(), fresh()
        log = LogConfig(archive=True, failover_window_s=20.0)
        async with instance(nats, inner, log=log, flush_timeout_s=5.0) as store:
            receipt = await store.checkpoint(thread_id, ["secret"], run_of(thread_id))
            with pytest.raises(FlushTimeout, match="archived"):
                await store.erase(thread_id)
            assert len(await content_of(store, thread_id)) == 2
            await inner.ledger(0).set_archived(receipt.thread_seq + 2048)
            assert (await store.erase(thread_id)).log_messages == 1
            assert len(await content_of(store, thread_id)) == 1

    run(main())


def test_what_is_parked_after_the_deletion_is_no_remains_of_before() -> None:
    """Regression: whatever quarantine had of the thread was discarded once the failover window was over."""

    async def main() -> None:
        inner = Picky()
        async with instance(MemoryNats(), inner) as store:
            await store.checkpoint("t", ["secret"], run_of("t"))
            erasing = asyncio.create_task(store.erase("t"))
            await asyncio.sleep(5)
            await store.checkpoint("t", ["new", "poison"], run_of("t", 1))
            await store.checkpoint_append("t", ["newer"], run_of("t", 1))
            await asyncio.sleep(5)
            assert not erasing.done()
            erasure = await erasing
            assert (erasure.written_again, erasure.quarantined) == (("t",), 0)
            assert await store.quarantine.count() == 2
            inner.__class__ = MemoryThreadStore
            await store.quarantine.replay_thread("t")
            assert await store.load_messages("t") == ["new", "poison", "newer"]

    run(main())


def test_what_is_written_while_an_erasure_waits_is_told() -> None:
    async def main(store: BufferedThreadStore) -> None:
        await store.checkpoint("t", ["secret"], run_of("t"))
        erasing = asyncio.create_task(store.erase("t"))
        await asyncio.sleep(5)
        await store.checkpoint("t", ["new"], run_of("t", 1))
        erasure = await erasing
        assert (erasure.written_again, erasure.log_messages) == (("t",), 1)
        assert await store.load_messages("t") == ["new"]

    alone(main)


def test_a_repeated_erasure_leaves_the_new_life_of_a_descendant_alone_that_is_parked() -> None:
    async def main() -> None:
        inner = Picky()
        async with instance(MemoryNats(), inner) as store:
            await store.checkpoint("parent", ["secret"], run_of("parent"))
            await store.checkpoint("child", ["secret"], run_of("child", parent_thread_id="parent"))
            interrupted = asyncio.create_task(store.erase("parent", children=Children.CASCADE))
            await asyncio.sleep(5)
            interrupted.cancel()
            await asyncio.sleep(5)
            await store.checkpoint("child", ["new", "poison"], run_of("child", 1))
            await store.force_flush_all()
            erasure = await store.erase("parent", children=Children.CASCADE)
            assert (erasure.written_again, erasure.quarantined) == (("child",), 0)
            inner.__class__ = MemoryThreadStore
            await store.quarantine.replay_thread("child")
            assert await store.load_messages("child") == ["new", "poison"]

    run(main())
