"""Several logs in front of one store, in memory: the contract, and calls that concern threads of different lanes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bufstore import (
    AlreadyExists,
    BlockingBufferedStore,
    BufferConfig,
    BufferedThreadStore,
    BufstoreError,
    Children,
    ConfigDrift,
    ConfigError,
    Consistency,
    InvalidId,
    LineageError,
    LogConfig,
    LogFull,
    LogRolledBack,
    LogUnavailable,
    MemoryThreadStore,
    Receipt,
    Run,
    ThreadQuarantined,
    ThreadQuery,
    ThreadRunStore,
    repair,
)
from bufstore.buffer.buffer import Buffer
from bufstore.buffer.flush.flusher_state import FlusherState, state_of_all
from bufstore.buffer.flush.verdict import Verdict
from bufstore.buffer.lanes import Layout, check_layout, lane_configs, lane_of, ledger_schema
from bufstore.buffer.operate.health import Health, health_of, health_of_all
from bufstore.buffer.ports.ledger import FlushFailed
from bufstore.buffer.prepare import apart
from bufstore.buffer.subjects import Subjects
from bufstore.config import LANES_MAX
from bufstore.langgraph import AsyncBufferedSaver, MemoryCheckpointStore
from bufstore.memory import MemoryNats
from bufstore.testing import CHECKS, Check
from bufstore.threads.bulk import BulkCheckpoint
from bufstore.threads.model import ThreadChange
from helpers import fresh, run_of, said
from langgraph_savers import checkpoint
from langgraph_savers import config as thread
from thorough import examples
from unit.fake_log import run
from unit.test_buffered_in_memory import alone as alone_with
from unit.test_buffered_in_memory import instance

LOG = LogConfig(lanes=2)


Step = Callable[[ThreadRunStore], Awaitable[object]]


class Picky(MemoryThreadStore):
    """A store that refuses changes of some threads."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: set[str] = set()

    async def apply(self, connection: object, batch: Sequence[ThreadChange]) -> None:
        if any(change.thread_id in self.refused for change in batch):
            raise FlushFailed("22021", Verdict.POISON)
        await super().apply(connection, batch)


def in_lane(lane: int) -> str:
    """A new thread's id in this lane."""
    return next(name for _ in range(1000) if lane_of(name := fresh(), LOG) == lane)


opened, alone = partial(instance, log=LOG), partial(alone_with, log=LOG)


@pytest.mark.parametrize("check", CHECKS, ids=str)
def test_a_store_of_two_lanes_keeps_the_contract(check: Check) -> None:
    alone(check)


# --- the lane of a thread ---------------------------------------------------------------------------------------


def test_a_threads_lane_never_changes() -> None:
    # The next release looks for threads where this one wrote them: these lanes must never change.
    names = ("thread-0", "thread-1", "thread-2", "a", "Ärger", "")
    assert [lane_of(name, LogConfig(lanes=3)) for name in names] == [2, 1, 1, 0, 2, 0]
    assert [lane_of(name, LogConfig()) for name in names] == [0] * 6


@given(partitions=st.integers(1, 32), lanes=st.integers(2, 8))
def test_each_lane_has_threads_of_each_partition(partitions: int, lanes: int) -> None:
    log = LogConfig(partitions=partitions, lanes=lanes)
    subjects = Subjects("thread", partitions)
    names = [f"thread-{n}" for n in range(40 * partitions * lanes)]
    found = {(subjects.partition(name), lane_of(name, log)) for name in names}
    assert found == {(p, lane) for p in range(partitions) for lane in range(lanes)}


def test_each_lane_has_names_of_its_own_and_a_part_of_the_memory() -> None:
    config = BufferConfig(log=LogConfig(lanes=3), cached_threads=100, flush_max_bytes=900)
    lanes = lane_configs(config)
    assert [(c.log.lane, c.log.stream, c.log.bucket, c.log.subject) for c in lanes] == [
        (0, "THREADLOG", "thread-hot", "thread"),
        (1, "THREADLOG-1", "thread-hot-1", "thread-1"),
        (2, "THREADLOG-2", "thread-hot-2", "thread-2"),
    ]
    assert {(c.cached_threads, c.flush_max_bytes, c.log.lanes) for c in lanes} == {(33, 300, 3)}
    assert [ledger_schema("app", c.log) for c in lanes] == ["app", "app_lane1", "app_lane2"]
    assert lane_configs(BufferConfig()) == [BufferConfig()]


def test_a_log_that_begins_anew_has_the_lanes_and_partitions_that_its_ledgers_know() -> None:
    async def main() -> None:
        inner, last = MemoryThreadStore(), LogConfig(lanes=2, partitions=4)
        async with instance(MemoryNats(), inner, log=last):
            pass
        lost = MemoryNats()
        for field, other in (("lanes", replace(last, lanes=1)), ("partitions", replace(last, partitions=8))):
            with pytest.raises(ConfigDrift, match=f"the database of stream THREADLOG: {field} is") as refused:
                async with instance(lost, inner, log=other):
                    pass
            assert "LogConfig.lanes to 2 and LogConfig.partitions to 4" in str(refused.value)
        with pytest.raises(LogRolledBack, match="gone before anything of it was flushed"):
            async with instance(lost, inner, log=last):
                pass

    run(main())


def test_without_lanes_the_number_of_partitions_decides_nothing_that_lasts() -> None:
    check_layout(LogConfig(partitions=4), Layout(1, 8))
    check_layout(LogConfig(partitions=4, lanes=3), None)
    check_layout(LogConfig(partitions=4, lanes=3), Layout(3, 4))


@pytest.mark.parametrize("wrong", [{"lanes": 0}, {"lanes": LANES_MAX + 1}, {"lane": 1}, {"lanes": 2, "lane": 2}])
def test_lanes_that_there_cannot_be(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"LogConfig\.lane"):
        LogConfig(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("refused", [AsyncBufferedSaver, BufferedThreadStore])
def test_a_lane_is_not_opened_without_the_others(refused: Any) -> None:
    store = MemoryThreadStore() if refused is BufferedThreadStore else MemoryCheckpointStore()

    async def main() -> None:
        config = lane_configs(BufferConfig(log=LOG))[1]
        with pytest.raises(ConfigError, match="THREADLOG-1 is lane 1 of 2"):
            await refused.open(store, nats=MemoryNats(), config=config)

    run(main())


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_second_call_to_close_a_saver_waits_for_the_end(lanes: int) -> None:
    """With the first call given up, the program would end before the last lane was flushed."""

    async def main() -> None:
        config = BufferConfig(log=replace(LOG, lanes=lanes))
        saver = await AsyncBufferedSaver.open(MemoryCheckpointStore(), nats=MemoryNats(), config=config)
        session = saver.engine.lanes.all[-1].session
        begun, may_end, aclose = asyncio.Event(), asyncio.Event(), session.aclose

        async def slow() -> None:
            begun.set()
            await may_end.wait()
            await aclose()

        session.aclose = slow  # type: ignore[method-assign]
        first = asyncio.create_task(saver.aclose())
        await begun.wait()
        first.cancel()
        second = asyncio.create_task(saver.aclose())
        await asyncio.sleep(1)
        assert not second.done()
        may_end.set()
        await second
        await saver.aclose()

    run(main())


def test_writes_that_wait_for_one_lane_leave_room_for_those_of_another() -> None:
    async def main() -> None:
        config = BufferConfig(log=LOG, append_timeout_s=5.0)
        saver = await AsyncBufferedSaver.open(MemoryCheckpointStore(), nats=MemoryNats(), config=config)
        here, there = (next(t for t in iter(fresh, "") if lane_of(t, LOG) == lane) for lane in (0, 1))
        waits = saver.engine.of(there).backlog
        cost = waits.enter(1 << 30)
        await saver.aput(thread(here), checkpoint({}, {}), {}, {})
        with pytest.raises(LogUnavailable, match="already waiting for the log"):
            await saver.aput(thread(there), checkpoint({}, {}), {}, {})
        waits.leave(cost)
        await saver.aclose()

    run(main())


# --- calls that concern threads of different lanes --------------------------------------------------------------


def test_each_thread_is_in_the_log_of_its_lane_alone() -> None:
    async def main() -> None:
        nats, inner = MemoryNats(), MemoryThreadStore()
        threads = [in_lane(0), in_lane(1), in_lane(1)]
        async with opened(nats, inner, flusher=False) as store:
            for thread_id in threads:
                await store.checkpoint(thread_id, [said(0)], run_of(thread_id))
            shown = [{e.subject async for _, e in buffer.log.scan(threads=threads)} for buffer in store.lanes.all]
            assert shown == [
                {buffer.subjects.of(t) for t in threads if lane_of(t, LOG) == lane}
                for lane, buffer in enumerate(store.lanes.all)
            ]
            assert sum((await store.lag()).values()) == 3
            async with opened(nats, inner) as flusher:
                await store.force_flush_all()
                assert {t.thread_id for t in (await inner.query_threads()).threads} == set(threads)
                assert list(await flusher.lag()) == list(range(16))
                assert not any((await flusher.lag()).values())
                counted = await flusher.statistics()
                assert (counted.flusher.entries, counted.flusher.running) == (3, True)
            assert ((await store.statistics()).appended, (await store.statistics()).groups) == (3, 3)

    run(main())


def test_a_runs_id_belongs_to_one_thread_of_all_lanes() -> None:
    async def main(store: BufferedThreadStore) -> None:
        one, other = in_lane(0), in_lane(1)
        claimed = run_of(one)
        await store.checkpoint(one, [said(0)], claimed)
        with pytest.raises(AlreadyExists):
            await store.checkpoint(other, [said(0)], msgspec.structs.replace(claimed, thread_id=other))
        assert await store.load_run(claimed.run_id) == claimed
        await store.force_flush_all()
        assert await store.load_run(claimed.run_id, consistency=Consistency.EVENTUAL) == claimed

    alone(main)


@pytest.mark.parametrize("known", ["claimed", "flushed only"])
def test_a_run_is_found_in_whichever_lane_its_thread_is(known: str) -> None:
    async def main() -> None:
        nats, inner = MemoryNats(), MemoryThreadStore()
        async with opened(nats, inner) as store:
            runs = [run_of(in_lane(n % 2), n) for n in range(8)]
            for r in runs:
                await store.checkpoint(r.thread_id, [said(0)], r)
            if known == "flushed only":
                for bucket in nats.buckets.values():
                    bucket.clear()
            assert [await store.load_run(r.run_id) for r in runs] == runs
            assert await store.load_run("nobody's") is None

    run(main())


def test_a_list_shows_what_all_lanes_have_and_marks_what_is_broken_in_any() -> None:
    async def main() -> None:
        nats, inner = MemoryNats(), Picky()
        async with opened(nats, inner, flush_interval_s=600) as store:
            threads = [in_lane(lane) for lane in (0, 1, 0, 1)]
            await asyncio.gather(*(store.checkpoint(t, [said(0)], run_of(t)) for t in threads))
            page = await store.query_threads()
            assert {t.thread_id for t in page.threads} == set(threads)
            assert {r.thread_id for r in (await store.query_runs()).runs} == set(threads)
            for broken in threads[:2]:
                inner.refused.add(broken)
                await store.checkpoint(broken, [said(1)], run_of(broken, 1))
                await store.force_flush_all()
            assert (await store.query_threads()).quarantined == set(threads[:2])
            assert await store.quarantined() == 2
            with pytest.raises(ConfigError, match="quarantine_of"):
                _ = store.quarantine
            inner.refused.clear()
            for broken in threads[:2]:
                with pytest.raises(ThreadQuarantined):
                    await store.load_messages(broken)
                await store.quarantine_of(broken).replay_thread(broken)
                assert await store.load_messages(broken) == [said(1)]
            assert not (await store.query_threads()).quarantined

    run(main())


@pytest.mark.parametrize("lanes", [(0, 1, 0), (1, 0, 1), (1, 1, 0)])
def test_parents_and_children_may_be_in_different_lanes(lanes: Sequence[int]) -> None:
    async def main(store: BufferedThreadStore) -> None:
        root, child, grandchild = (in_lane(lane) for lane in lanes)
        await store.checkpoint(root, [said(0)], run_of(root))
        await store.checkpoint(child, [said(0)], run_of(child, parent_thread_id=root))
        await store.save_thread(grandchild)
        await store.set_parent(grandchild, child)
        with pytest.raises(LineageError):
            await store.set_parent(root, grandchild)
        page = await store.query_threads(ThreadQuery(parent_thread_id=root))
        assert [t.thread_id for t in page.threads] == [child]
        erased = await store.erase(root, children=Children.CASCADE)
        assert (set(erased.thread_ids), erased.found, erased.written_again) == ({root, child, grandchild}, True, ())
        assert not (await store.query_threads()).threads
        for buffer in store.lanes.all:
            assert not [e async for _, e in buffer.log.scan(threads=[root, child, grandchild]) if b"m0" in e.body]

    alone(main)


def test_a_lane_that_is_full_stops_no_other() -> None:
    async def main() -> None:
        nats, inner = MemoryNats(), MemoryThreadStore()
        log = LogConfig(lanes=2, max_bytes=1 << 20)
        async with opened(nats, inner, log=log, flusher=False) as store:
            full, free = in_lane(1), in_lane(0)
            with pytest.raises(LogFull):
                for n in range(200):
                    await store.checkpoint(full, [n, "x" * 10_000], run_of(full))
            await store.checkpoint(free, [said(0)], run_of(free))
            health = await store.health()
            assert health.write_trouble.startswith("lane 1: the log is full")
            async with opened(nats, inner, log=log):
                await store.force_flush_all()
                assert await inner.load_messages(free) == [said(0)]

    run(main())


@pytest.mark.parametrize("error", [LogUnavailable, LogFull])
@pytest.mark.parametrize("new", [True, False])
def test_a_checkpoint_does_not_wait_for_the_lane_of_its_parent(
    new: bool, error: type[BufstoreError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: it was refused while another lane was away, or full in the middle of a deletion."""

    async def main() -> None:
        async with opened(MemoryNats(), MemoryThreadStore()) as store:
            parent, child = in_lane(1), in_lane(0)
            await store.checkpoint(parent, [said(0)], run_of(parent))
            if not new:
                await store.checkpoint(child, [said(0)], run_of(child))

            async def away(*_: Any, **__: Any) -> Any:
                raise error("lane 1")

            with monkeypatch.context() as patched:
                patched.setattr(store.lanes.of(parent).reads, "joined", away)
                await store.checkpoint(child, [said(0), said(1)], run_of(child, 1, parent_thread_id=parent))
            assert await store.load_messages(child) == [said(0), said(1)]

    run(main())


@pytest.mark.parametrize("away", [0, 1])
def test_a_parent_that_cannot_be_is_refused_while_a_lane_is_away(away: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the proof of a refusal asked all lanes, and a checkpoint under itself was stored."""

    async def main() -> None:
        async with opened(MemoryNats(), MemoryThreadStore()) as store:
            one, child = in_lane(0), in_lane(0)
            await store.checkpoint(one, [said(0)], run_of(one))
            await store.checkpoint(child, [said(0)], run_of(child, parent_thread_id=one))

            async def silent(*_: Any) -> Any:
                await asyncio.Event().wait()

            monkeypatch.setattr(store.lanes.all[away].log, "latest_partition_ends", silent)
            for parent in (one, child, in_lane(0)):
                with pytest.raises(LineageError):
                    await store.checkpoint(one, [said(0), said(1)], run_of(one, 1, parent_thread_id=parent))
            monkeypatch.undo()

    run(main())


def test_a_database_that_was_lost_and_repaired_knows_its_lanes() -> None:
    """Regression: it took any number of lanes, so threads were looked for in the wrong ones."""

    async def main() -> None:
        nats, t = MemoryNats(), in_lane(1)
        async with opened(nats, MemoryThreadStore()) as store:
            await store.checkpoint(t, [said(0)], run_of(t))
        restored = MemoryThreadStore()
        for lane in range(2):
            for _ in range(2):
                await repair(restored, nats=nats, config=BufferConfig(log=LOG), apply=True, lane=lane)
        for wrong in (replace(LOG, lanes=1), replace(LOG, lanes=3), replace(LOG, partitions=2)):
            with pytest.raises(ConfigDrift):
                await repair(restored, nats=nats, config=BufferConfig(log=wrong), apply=True)
            with pytest.raises(ConfigDrift):
                async with opened(nats, restored, log=wrong):
                    pass
        async with opened(nats, restored) as store:
            assert await store.load_messages(t) == [said(0)]

    run(main())


def test_the_partitions_of_all_lanes_are_taken_over() -> None:
    async def main() -> None:
        nats, inner, thread_ids = MemoryNats(), MemoryThreadStore(), [in_lane(0), in_lane(1)]
        async with opened(nats, inner) as one:
            async with opened(nats, inner) as two:
                await asyncio.sleep(5)
                for buffers in zip(one.lanes.all, two.lanes.all, strict=True):
                    shares = [b.flusher.state.partitions for b in buffers if b.flusher is not None]
                    assert sorted(shares[0] + shares[1]) == list(range(8))
                    assert all(shares)
            await asyncio.sleep(5)
            for buffer in one.lanes.all:
                assert buffer.flusher is not None
                assert buffer.flusher.state.partitions == tuple(range(8))
            for thread_id in thread_ids:
                await one.checkpoint(thread_id, [said(0)], run_of(thread_id))
        for thread_id in thread_ids:
            assert await inner.load_messages(thread_id) == [said(0)]

    run(main())


def test_all_lanes_open_or_none_and_a_cancelled_close_goes_on() -> None:
    async def main() -> None:
        nats, inner = MemoryNats(), MemoryThreadStore()
        second = lane_configs(BufferConfig(log=LOG))[1]
        # The second lane's stream is opened as a log without lanes, by another store.
        async with await BufferedThreadStore.open(
            Picky(), nats=nats, config=replace(second, log=replace(second.log, lanes=1, lane=0))
        ):
            pass
        with pytest.raises(ConfigDrift):
            await BufferedThreadStore.open(inner, nats=nats, config=BufferConfig(log=LOG))
        assert len(asyncio.all_tasks()) == 1, "nothing of the first lane goes on"

        inner = MemoryThreadStore()
        store = await BufferedThreadStore.open(
            inner, nats=MemoryNats(), config=BufferConfig(log=LOG, flush_interval_s=600)
        )
        threads = [in_lane(0), in_lane(1)]
        for t in threads:
            await store.checkpoint(t, [said(0)], run_of(t))
        closing = asyncio.create_task(store.aclose())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait([closing])
        assert closing.cancelled()
        await store.aclose()
        assert len(asyncio.all_tasks()) == 1
        for t in threads:
            assert await inner.load_messages(t) == [said(0)]

    run(main())


def test_lanes_that_cannot_flush_close_in_the_time_of_one_and_the_store_after_them() -> None:
    class Stuck(MemoryThreadStore):
        closed_at = 0.0

        async def apply(self, connection: object, batch: Sequence[ThreadChange]) -> None:
            await asyncio.sleep(3600)

        def behind(self, *given: Any) -> Any:
            ledger, backing = super().behind(*given)
            return ledger, replace(backing, aclose=self.close)

        async def close(self) -> None:
            self.closed_at = asyncio.get_running_loop().time()

    async def main() -> None:
        inner, loop = Stuck(), asyncio.get_running_loop()
        config = BufferConfig(log=LOG, flush_interval_s=600, flush_timeout_s=30.0)
        store = await BufferedThreadStore.open(inner, nats=MemoryNats(), config=config)
        for t in (in_lane(0), in_lane(1)):
            await store.checkpoint(t, [said(0)], run_of(t))
        began = loop.time()
        closing = [asyncio.create_task(store.lanes.all[1].aclose()), asyncio.create_task(store.aclose())]
        await closing[0]
        assert not inner.closed_at
        await closing[1]
        assert 30 <= inner.closed_at - began <= config.append_timeout_s + config.flush_timeout_s

    run(main())


def test_who_gives_up_opening_twice_leaves_no_lane_open(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        open_, release, opened, began = Buffer.open, Buffer.release, asyncio.Event(), asyncio.Event()

        async def hanging(self: Buffer[Any, Any, Any], **named: Any) -> Buffer[Any, Any, Any]:
            if self.config.log.lane == 2:
                await asyncio.sleep(3600)
            found = await open_(self, **named)
            if self.config.log.lane == 1:
                opened.set()
            return found

        async def slow(self: Buffer[Any, Any, Any], *given: Any, **named: Any) -> None:
            began.set()
            await asyncio.sleep(1)
            await release(self, *given, **named)

        monkeypatch.setattr(Buffer, "open", hanging)
        monkeypatch.setattr(Buffer, "release", slow)
        config = BufferConfig(log=LogConfig(lanes=3))
        opening = asyncio.create_task(BufferedThreadStore.open(MemoryThreadStore(), nats=MemoryNats(), config=config))
        for event in (opened, began):
            await event.wait()
            opening.cancel()
        await asyncio.wait([opening])
        assert opening.cancelled()
        monkeypatch.undo()
        await asyncio.sleep(10)
        assert len(asyncio.all_tasks()) == 1, "nothing of the lanes that were open goes on"

    run(main())


def test_a_log_that_is_refused_for_its_lanes_stays_refused() -> None:
    async def main() -> None:
        nats, inner = MemoryNats(), MemoryThreadStore()
        async with await BufferedThreadStore.open(inner, nats=nats) as store:
            ledger = store.lanes.first.ledger
            assert await ledger.layout() == Layout(1, 8)
            buffer = store.buffer
            assert await apart(buffer.log, ledger, buffer.config.log, buffer.backing.kind) is None
            other = replace(buffer.config.log, lanes=2)
            reason = await apart(buffer.log, ledger, other, buffer.backing.kind)
            assert "lanes is '1'" in str(reason)

    run(main())


def test_a_store_that_cannot_open_all_lanes_flushes_nothing_when_it_gives_up() -> None:
    async def main() -> None:
        nats, inner = MemoryNats(), MemoryThreadStore()
        async with instance(nats, inner, log=LOG, flusher=False) as store:
            await store.checkpoint(t := in_lane(0), [said(0)], run_of(t))
        second = lane_configs(BufferConfig(log=LOG))[1].log
        del nats.streams[second.stream]
        async with await BufferedThreadStore.open(
            Picky(), nats=nats, config=BufferConfig(log=replace(second, lanes=1, lane=0))
        ):
            pass
        with pytest.raises(ConfigDrift):
            await BufferedThreadStore.open(inner, nats=nats, config=BufferConfig(log=LOG, flush_interval_s=600))
        assert await inner.load_messages(t) is None

    run(main())


def test_bulk_writes_go_to_the_lanes_of_their_threads() -> None:
    async def main(store: BufferedThreadStore) -> None:
        threads = [in_lane(lane) for lane in (0, 1, 1, 0)]
        await store.bulk.learn_new(threads)
        runs = {t: run_of(t) for t in threads}
        await store.bulk.claim(runs.values())
        for t in threads:
            steps = [BulkCheckpoint([said(n)], runs[t], whole=False, producer=None) for n in range(3)]
            series = await store.bulk.write(t, steps)
            assert (len(series.receipts), series.error) == (3, None)
        await store.force_flush_all()
        for t in threads:
            assert await store.load_messages(t, consistency=Consistency.EVENTUAL) == [said(n) for n in range(3)]

    alone(main)


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("wrong", [None, 5, "", "\ud800"])
def test_a_bulk_write_to_what_is_no_thread_says_so(wrong: Any, lanes: int) -> None:
    """Regression: with several lanes a row of a pipeline with such an id raised AttributeError or
    UnicodeEncodeError, and ended the pipeline instead of the row.
    """

    async def main() -> None:
        config = BufferConfig(log=LogConfig(lanes=lanes))
        async with await BufferedThreadStore.open(MemoryThreadStore(), nats=MemoryNats(), config=config) as store:
            series = await store.bulk.write(wrong, [BulkCheckpoint([], run_of("t"), whole=True)])
            assert (list(series.receipts), type(series.error)) == ([], InvalidId)

    run(main())


def test_a_blocking_store_has_the_quarantine_of_each_lane() -> None:
    nats, config = MemoryNats(), BufferConfig(log=LOG, flush_interval_s=0.05)
    with BlockingBufferedStore(
        lambda: BufferedThreadStore.open(MemoryThreadStore(), nats=nats, config=config)
    ) as store:
        thread_id = in_lane(1)
        store.checkpoint(thread_id, [said(0)], run_of(thread_id))
        assert store.quarantine_of(thread_id).count() == 0
        with pytest.raises(ConfigError):
            _ = store.quarantine


# --- what all lanes report together -----------------------------------------------------------------------------


def test_health_names_the_lane_that_is_ill() -> None:
    well = health_of(log="", store="", flusher="")
    ill = health_of(log="no answer", store="", flusher="")
    assert health_of_all([well, well]) == well
    assert health_of_all([ill]) == ill
    both = health_of_all([well, ill])
    assert (both.log, both.can_write, both.can_read, both.flushing, both.ok) == (
        "lane 1: no answer", False, False, False, False
    )  # fmt: skip
    assert isinstance(both, Health)


def test_flushers_of_all_lanes_run_when_each_does() -> None:
    one = FlusherState(running=True, partitions=(0, 1), entries=2, transactions=1)
    two = FlusherState(running=False, partitions=(0,), entries=3, trouble="gone", stopped=True)
    assert state_of_all([one, two]) == FlusherState(
        running=False, entries=5, transactions=1, trouble="lane 1: gone", stopped=True
    )


# --- any sequence of calls --------------------------------------------------------------------------------------

#: Two names in each lane.
NAMES = [f"thread-{n}" for n in range(4)]
RUN_IDS = [f"run-{n}" for n in range(4)]
assert sorted(lane_of(name, LOG) for name in NAMES) == [0, 0, 1, 1]
_names = st.sampled_from(NAMES)
_or_none = st.one_of(st.none(), _names)


def _checkpoint(name: str, run_id: str, parent: str | None) -> Step:
    new = Run(run_id=run_id, thread_id=name, parent_thread_id=parent)
    return lambda store: store.checkpoint_append(name, [said(0)["content"]], new)


STEPS: st.SearchStrategy[Step] = st.one_of(
    st.builds(_checkpoint, _names, st.sampled_from(RUN_IDS), _or_none),
    st.builds(
        lambda n, run_id: lambda s: s.create_run(Run(run_id=run_id, thread_id=n)), _names, st.sampled_from(RUN_IDS)
    ),
    st.builds(lambda n: lambda s: s.save_thread(n), _names),
    st.builds(lambda n, parent: lambda s: s.set_parent(n, parent), _names, _or_none),
    st.builds(
        lambda n, children: lambda s: s.delete_thread(n, children=children), _names, st.sampled_from(list(Children))
    ),
    st.builds(lambda n: lambda s: s.load_checkpoint(n), _names),
    st.builds(lambda run_id: lambda s: s.load_run(run_id), st.sampled_from(RUN_IDS)),
    st.builds(lambda n: lambda s: _children(s, n), _names),
    st.builds(lambda: lambda s: _runs(s)),
)


async def _children(store: ThreadRunStore, name: str) -> set[str]:
    page = await store.query_threads(ThreadQuery(parent_thread_id=name))
    return {t.thread_id for t in page.threads}


async def _runs(store: ThreadRunStore) -> set[tuple[str, str]]:
    return {(r.run_id, r.thread_id) for r in (await store.query_runs()).runs}


async def _answer(step: Step, store: ThreadRunStore) -> object:
    """The answer of a step, as far as it is the same on two stores."""
    try:
        answer = await step(store)
    except BufstoreError as e:
        return type(e)
    return "stored" if isinstance(answer, Receipt) else answer


class Site:
    """A log or its lanes, and the process that has it open."""

    def __init__(self, log: LogConfig) -> None:
        self._config = BufferConfig(log=log, flush_interval_s=0.5, lease_s=4)
        self._nats, self.inner = MemoryNats(), MemoryThreadStore()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Site:
        await self.go_on()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def go_on(self) -> None:
        """Open the store in another process, which knows nothing yet."""
        opened = BufferedThreadStore.open(self.inner, nats=self._nats, config=self._config)
        self.store = await self._stack.enter_async_context(await opened)


@examples(60)
@given(st.lists(st.one_of(STEPS, st.just(None)), max_size=25))
def test_any_sequence_of_calls_is_answered_as_with_one_log(steps: list[Step | None]) -> None:
    """At None, another process goes on, while the earlier one keeps what it has begun."""

    async def main() -> None:
        async with Site(LOG) as lanes, Site(LogConfig()) as one:
            for step in steps:
                if step is None:
                    await lanes.go_on()
                    await one.go_on()
                else:
                    assert await _answer(step, lanes.store) == await _answer(step, one.store)
            for site in (lanes, one):
                await site.store.force_flush_all()
                report = await site.store.verify()
                assert report.ok, report.findings
            for name in NAMES:
                assert await lanes.inner.load_checkpoint(name) == await one.inner.load_checkpoint(name)

    run(main())
