"""A thread that has to wait for long: the cursor passes it, its partition goes on, and it loses nothing."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bufstore.buffer.entry import Malformed
from bufstore.buffer.flush.owned_partition import OwnedPartition
from bufstore.buffer.flush.queues import Queues
from bufstore.buffer.flush.verdict import Verdict
from bufstore.buffer.flush.waiting import Waiting
from bufstore.buffer.places import group_of
from bufstore.buffer.ports.ledger import Cursor, Decision, FlushFailed
from bufstore.buffer.ports.waiting import Queue, WaitingEntry
from bufstore.config import BufferConfig, LogConfig
from bufstore.jetstream.messages import Outgoing
from thorough import examples
from unit.test_flusher import SUBJECTS, Bench, FeedLog, bench, failing, other_partition, went_back
from unit.test_owned_partition import FakeFeed, messages

#: What a feed may hold in these tests.
BOUND = 40
PARTITION = SUBJECTS.partition("t")
GOOD = [t for t in (f"g{n}" for n in range(99)) if SUBJECTS.partition(t) == PARTITION][:4]


class SmallFeeds(FeedLog):
    async def feed(self, partition: int, start: int, wake: Callable[[], None]) -> Any:
        made = await super().feed(partition, start, wake)
        made._feed.delivery._groups._messages_max = BOUND
        return made


class World(Bench):
    """A bench with a thread "t" that the store refuses while `refused` says why."""

    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        self.log.kind = SmallFeeds
        self.refused: FlushFailed | None = FlushFailed("55P03", Verdict.ISOLATE)
        failing(self, lambda c: self.refused if c.thread_id == "t" else None)

    @property
    def owned(self) -> OwnedPartition:
        assert self.flusher is not None
        return self.flusher._owned[PARTITION]

    async def write(self, rounds: int, first: int = 0) -> None:
        for n in range(first, first + rounds):
            await self.writer.append([n], "t")
            for thread_id in GOOD:
                await self.writer.append([n], thread_id)

    def in_memory(self) -> int:
        return len(self.owned.pending) + len(self.owned._order)

    async def cursor(self) -> int:
        return (await self.ledger.cursors())[PARTITION].seq

    def waits(self) -> int:
        return len(self.ledger.waiting.entries)

    async def waiting(self, count: int) -> None:
        for _ in range(600):
            if self.waits() == count:
                return
            await asyncio.sleep(0.1)
        raise AssertionError(f"{self.waits()} entries wait, not {count}")


def world(main: Callable[[World], Any], monkeypatch: pytest.MonkeyPatch, **config: Any) -> None:
    monkeypatch.setattr("bufstore.buffer.flush.owned_partition._ORDER_SLACK", BOUND)
    monkeypatch.setattr("unit.test_flusher.Bench", World)
    bench(main, **config)


def test_a_thread_that_waits_stops_nobody_and_is_flushed_when_it_can_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main(it: World) -> None:
        await it.start()
        most = 0
        for n in range(0, 200, 10):
            await it.write(10, n)
            assert await it.flushed(*GOOD, within_s=20.0), f"the others stopped after {n} rounds"
            most = max(most, it.in_memory())
        assert most <= 6 * BOUND, "memory is bounded however long it waits"
        await it.waiting(200)
        assert await it.stored("t") is None
        assert it.flusher is not None
        assert it.flusher.state.pending >= 200
        assert "1 thread has to wait" in it.flusher.state.trouble
        assert await it.cursor() == it.log.last_seq
        assert (await it.ledger.flushed())[PARTITION] < it.log.messages[0].seq
        assert it.log.feeds[PARTITION].acked == it.log.last_seq
        it.refused = None
        assert await it.flushed("t", within_s=60.0)
        assert await it.stored("t") == list(range(200))
        await it.write(1, 200)
        assert await it.flushed("t", *GOOD)
        await asyncio.sleep(2)
        assert await it.cursor() == it.log.last_seq == (await it.ledger.flushed())[PARTITION]
        assert (it.owned.queues, it.owned.pending, it.owned.recalled) == ({}, {}, {})
        assert (it.owned.queued_bytes, it.owned.pending_bytes, it.owned.unsettled) == (0, 0, 0)
        assert it.waits() == 0
        assert it.flusher.state.trouble == ""
        assert not it.ledger.parked.entries

    world(main, monkeypatch)


def test_what_is_flushed_waits_no_more_though_its_partition_was_given_up_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main(it: World) -> None:
        flush, given_up = it.ledger.flush, 0

        async def flushed(held: Sequence[Cursor], threads: Sequence[str], decide: Any, **options: Any) -> Any:
            nonlocal given_up
            if "t" in threads and it.refused is None and PARTITION in it.flusher._owned:  # type: ignore[union-attr]
                given_up += 1
                it.flusher._takeover.drop(it.owned, "the members changed")  # type: ignore[union-attr]
            done = await flush(held, threads, decide, **options)
            last = (await it.ledger.watermark("t")).flushed_seq
            assert all(seq > last for thread_id, seq in it.ledger.waiting.entries if thread_id == "t")
            return done

        it.ledger.flush = flushed  # type: ignore[method-assign]
        await it.start()
        await it.write(3)
        await it.waiting(3)
        it.refused = None
        assert await it.flushed("t", within_s=60.0)
        assert await it.stored("t") == [0, 1, 2]
        assert given_up
        assert it.waits() == 0

    world(main, monkeypatch)


def test_the_log_is_purged_past_a_thread_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(it: World) -> None:
        await it.start()
        await it.write(50)
        await it.waiting(50)
        await asyncio.sleep(300)
        assert it.log.groups == [group_of(it.log.last_seq)]
        await it.write(20, 50)
        it.refused = None
        assert await it.flushed("t", *GOOD)
        assert await it.stored("t") == list(range(70))
        assert not it.ledger.parked.entries

    world(main, monkeypatch, log=LogConfig(partitions=4, failover_window_s=20.0), retain_after_flush_s=100.0)


def test_a_thread_that_waits_for_a_moment_is_tried_from_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(it: World) -> None:
        written = 0
        write = it.ledger.waiting.write

        def counted(waiting: Any, left: Any) -> None:
            nonlocal written
            written += len(waiting)
            write(waiting, left)

        it.ledger.waiting.write = counted  # type: ignore[method-assign]
        await it.start()
        await it.writer.append([0])
        await asyncio.sleep(0.3)
        it.refused = None
        assert await it.flushed("t", within_s=1.0)
        assert written == 0

    world(main, monkeypatch)


def test_a_thread_that_waits_alone_in_a_burst_stops_nobody_either(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(it: World) -> None:
        await it.start()
        for n in range(5 * BOUND):
            await it.writer.append([n], "t")
        await it.writer.append(["good"], GOOD[0])
        assert await it.flushed(GOOD[0], within_s=30.0)
        it.refused = None
        assert await it.flushed("t")
        assert await it.stored("t") == list(range(5 * BOUND))

    world(main, monkeypatch)


@pytest.mark.parametrize("again", [True, False])
def test_the_next_owner_finds_who_waits(monkeypatch: pytest.MonkeyPatch, again: bool) -> None:
    async def main(it: World) -> None:
        await it.start()
        await it.write(50)
        await it.waiting(50)
        await it.stop()
        it.refused = it.refused if again else None
        await it.start()
        await it.write(50, 50)
        assert await it.flushed(*GOOD)
        if again:
            assert it.flusher is not None
            assert "1 thread has to wait" in it.flusher.state.trouble
        it.refused = None
        assert await it.flushed("t")
        for thread_id in ("t", *GOOD):
            assert await it.stored(thread_id) == list(range(100))
        await asyncio.sleep(1)
        assert await it.cursor() == it.log.last_seq
        assert it.waits() == 0

    world(main, monkeypatch)


def test_the_next_owner_is_delivered_once_more_what_waits_and_takes_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cursor was before its entries, because of another thread's entry."""

    async def main(it: World) -> None:
        await it.start()
        it.refused, other = None, other_partition("t")
        it.ledger.locked |= {"t", other}
        await it.writer.append([0], "t")
        await it.writer.append([0], other)
        await it.waiting(2)
        it.ledger.locked.add(GOOD[0])  # for a moment, so that its entry stays in memory
        await it.writer.append([0], GOOD[0])
        await it.writer.append([1], "t")
        await it.waiting(3)
        before = await it.cursor()
        assert before < it.log.last_of(SUBJECTS.of(GOOD[0]))
        await it.stop()
        it.ledger.locked.discard(GOOD[0])
        await it.start()
        await it.writer.append([1], other)
        await it.waiting(4)
        assert await it.flushed(GOOD[0])
        await asyncio.sleep(1)
        assert await it.cursor() == it.log.last_of(SUBJECTS.of("t"))
        it.ledger.locked.clear()
        assert await it.flushed("t", other, *GOOD)
        assert (await it.stored("t"), await it.stored(other), it.waits()) == ([0, 1], [0, 1], 0)

    world(main, monkeypatch)


def test_poison_in_a_thread_that_waited_is_parked_with_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(it: World) -> None:
        await it.start()
        await it.write(30)
        await it.writer.append(["poison"], "t")
        for n in range(30, 60):
            await it.writer.append([n], "t")
        await it.waiting(61)
        it.refused = None
        failing(it, lambda c: FlushFailed("22021", Verdict.POISON) if b"\xa6poison" in c.messages else None)
        assert await it.flushed("t")
        parked = [it.ledger.parked.entries[seq] for seq in sorted(it.ledger.parked.entries)]
        assert len(parked) == 31, "it, and what builds on it"
        assert "22021" in parked[0].cause
        assert await it.stored("t") == list(range(30))
        assert it.waits() == 0

    world(main, monkeypatch)


def test_what_cannot_be_read_waits_in_its_place_and_is_parked(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(it: World) -> None:
        await it.start()
        await it.write(5)
        it.log.store([Outgoing(SUBJECTS.of("t"), b"", "no entry")])
        await it.waiting(6)
        it.refused = None
        assert await it.flushed("t")
        (parked,) = it.ledger.parked.entries.values()
        assert isinstance(parked.item, Malformed)
        assert parked.item.messages[0].header == "no entry"
        assert await it.stored("t") == list(range(5))

    world(main, monkeypatch)


def test_an_app_that_raises_for_a_thread_is_asked_as_often_as_for_any(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(it: World) -> None:
        it.refused = FlushFailed("apply() raised KeyError", Verdict.SUSPECT)
        await it.start()
        await it.write(50)
        await asyncio.sleep(5)
        assert not it.ledger.parked.entries
        assert it.waits()
        assert await it.flushed("t", within_s=300.0)
        assert len(it.ledger.parked.entries) == 50

    world(main, monkeypatch)


def test_while_all_are_refused_only_those_are_read_again_that_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many threads wait: otherwise the process would do nothing but read them in vain."""

    async def main(it: World) -> None:
        threads = [t for t in (f"b{n}" for n in range(2000)) if SUBJECTS.partition(t) == PARTITION][:300]
        refusal: FlushFailed | None = FlushFailed("23502", Verdict.POISON)
        failing(it, lambda _: refusal)
        await it.start()
        for thread_id in threads:
            await it.writer.append(["m"], thread_id)
            await asyncio.sleep(0.01)
        await asyncio.sleep(20)
        assert len(it.owned.queues) > 200
        read, first = 0, it.ledger.waiting.first

        async def counted(thread_ids: Any, *args: Any) -> Any:
            nonlocal read
            read += len(thread_ids)
            return await first(thread_ids, *args)

        it.ledger.waiting.first = counted  # type: ignore[method-assign]
        await asyncio.sleep(60)
        assert 0 < read < 600, "eight threads every two seconds, and eight of the others every eight"
        assert not it.ledger.parked.entries
        refusal = None
        assert await it.flushed(*threads, within_s=10.0)
        await asyncio.sleep(1)
        assert await it.cursor() == it.log.last_seq

    world(main, monkeypatch)


def test_however_many_wait_a_flush_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(it: World) -> None:
        threads = [t for t in (f"b{n}" for n in range(2000)) if SUBJECTS.partition(t) == PARTITION][:200]
        refusal: FlushFailed | None = FlushFailed("not now", Verdict.ISOLATE)
        failing(it, lambda c: refusal if c.thread_id in threads else None)
        await it.start()
        for n in range(2):
            for thread_id in threads:
                await it.writer.append([n], thread_id)
        await it.waiting(400)
        await it.stop()
        refusal, most, flush = None, 0, it.ledger.flush

        async def counted(held: Any, thread_ids: Any, *args: Any, **options: Any) -> Any:
            nonlocal most
            most = max(most, len(thread_ids))
            return await flush(held, thread_ids, *args, **options)

        it.ledger.flush = counted  # type: ignore[method-assign]
        await it.start()
        assert await it.flushed(*threads)
        assert 10 < most <= 50
        assert [await it.stored(t) for t in threads] == [[0, 1]] * 200
        assert not it.ledger.parked.entries

    world(main, monkeypatch, flush_max_entries=50)


def test_a_postgres_that_went_back_has_cursor_and_waiting_entries_of_one_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main(it: World) -> None:
        await it.start()
        await it.write(10)
        await it.waiting(10)
        put_back = went_back(it)
        before = dict(it.ledger.waiting.entries)
        await it.write(10, 10)
        await it.waiting(20)
        put_back()
        it.ledger.waiting.entries.clear()
        it.ledger.waiting.entries.update(before)
        await it.write(10, 20)
        await it.waiting(30)
        it.refused = None
        assert await it.flushed("t", *GOOD)
        for thread_id in ("t", *GOOD):
            assert await it.stored(thread_id) == list(range(30))
        assert not it.ledger.parked.entries

    world(main, monkeypatch)


@pytest.mark.long
def test_when_too_much_waits_the_partition_stops_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(it: World) -> None:
        await it.start()
        for n in range(3000):
            await it.writer.append([n], "t")
            if not n % 20:
                await asyncio.sleep(0.05)
        await asyncio.sleep(5)
        waits = it.waits()
        assert 400 < waits < 600, "a quarter of a MiB, with what each entry costs beside its payload"
        await it.writer.append(["good"], GOOD[0])
        assert not await it.flushed(GOOD[0], within_s=20.0)
        assert await it.cursor() < it.log.last_seq
        assert it.flusher is not None
        assert f"partitions {[PARTITION]} have stopped" in it.flusher.state.trouble
        it.refused = None
        assert await it.flushed("t", GOOD[0])
        assert await it.stored("t") == list(range(3000))
        assert it.waits() == 0

    # The bound is a quarter of 4 MiB, divided by four partitions.
    world(main, monkeypatch, log=LogConfig(partitions=4, max_bytes=4 << 20))


def refusing(it: World, fails: Callable[[Decision], FlushFailed | None]) -> Callable[[], None]:
    """Make the ledger refuse decisions for which `fails` returns an error. Returns a function that ends this."""
    flush = it.ledger.flush

    async def refused(held: Any, threads: Any, decide: Any, **options: Any) -> Any:
        def deciding(rows: Any) -> Decision:
            decision: Decision = decide(rows)
            if (error := fails(decision)) is not None:
                raise error
            return decision

        return await flush(held, threads, deciding, **options)

    def mended() -> None:
        it.ledger.flush = flush  # type: ignore[method-assign]

    it.ledger.flush = refused  # type: ignore[method-assign]
    return mended


def test_an_entry_that_neither_the_store_nor_the_ledger_takes_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the entry is too large for the server, say, and the windows of other threads shrank with its own."""

    async def main(it: World) -> None:
        def touched(decision: Decision) -> FlushFailed | None:
            threads = [c.thread_id for c in decision.batch] + [w.item.thread_id for w in decision.waiting]
            return FlushFailed("53200: out of memory", Verdict.SHRINK, of_batch=False) if "t" in threads else None

        it.refused, mended = None, refusing(it, touched)
        await it.start()
        await it.writer.append([0], "t")
        await asyncio.sleep(20)
        locked, *others = [t for t in (f"o{n}" for n in range(99)) if SUBJECTS.partition(t) != PARTITION][:5]
        it.ledger.locked.add(locked)
        await it.writer.append([0], locked)
        for n in range(40):
            for thread_id in others:
                await it.writer.append([n], thread_id)
        assert await it.flushed(*others, within_s=5.0)
        await it.waiting(1)
        mended()
        it.ledger.locked.clear()
        assert await it.flushed("t", locked)

    world(main, monkeypatch)


def test_a_ledger_that_takes_nothing_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, it lacks a right: the cursor stays until that is mended."""

    async def main(it: World) -> None:
        def waits(decision: Decision) -> FlushFailed | None:
            error = FlushFailed("42501: no right to buffer_waiting", Verdict.DENIED, of_batch=False)
            return error if decision.waiting else None

        mended = refusing(it, waits)
        await it.start()
        await it.write(3)
        assert await it.flushed(*GOOD, within_s=20.0)
        await asyncio.sleep(10)
        await it.writer.append([3], GOOD[0])
        assert await it.flushed(*GOOD, within_s=20.0)
        assert await it.cursor() == 0
        mended()
        await it.waiting(3)
        assert await it.cursor() == it.log.last_seq

    world(main, monkeypatch)


def test_a_partition_of_which_nothing_is_found_that_waits_is_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Postgres lacks what the owner knows of: it went back, or somebody changed it."""

    async def main(it: World) -> None:
        await it.start()
        await it.write(5)
        await it.waiting(5)
        assert it.flusher is not None
        takeovers = it.flusher.state.takeovers
        it.ledger.waiting.entries.clear()
        await asyncio.sleep(20)
        assert it.flusher.state.takeovers > takeovers
        assert it.owned.queues == {}

    world(main, monkeypatch)


THREADS = ("t", "u", "v")


@examples(200)
@given(data=st.data())
def test_the_cursor_passes_only_what_is_settled_or_waits(data: st.DataObject) -> None:
    feed = FakeFeed()
    # Entries that waited when another owner had the partition.
    before = [Queue("t", 2, 40, "why", 0)] if data.draw(st.booleans()) else []
    owned = OwnedPartition(Cursor(0, 1, 0, 0), feed, SUBJECTS, before)  # type: ignore[arg-type]
    items: dict[int, Any] = {}
    waits: dict[str, list[int]] = {t: [] for t in THREADS}
    if before:
        made, ends = messages([1, 1], -1)
        waits["t"] = ends
        items |= {end: Malformed("", end, (m,), "", "t") for end, m in zip(ends, made, strict=True)}
    done: set[int] = set()
    end = 0
    for _ in range(data.draw(st.integers(1, 40))):
        term = owned.cursor.term
        match data.draw(st.sampled_from(["arrive", "arrive", "settle", "queue", "recall"])):
            case "arrive":
                thread_id, size = data.draw(st.sampled_from(THREADS)), data.draw(st.integers(0, 3))
                made, (position,) = messages([size], end + 1)
                end = position
                feed.arrived = [type(m)(SUBJECTS.of(thread_id), m.seq, m.header, m.body) for m in made]
                owned.collect()
                items[position] = owned.pending[position]
            case "settle":
                thread_id = data.draw(st.sampled_from(THREADS))
                ready = sorted(seq for seq, i in owned.pending.items() if i.thread_id == thread_id)
                settled = set(ready[: data.draw(st.integers(0, len(ready)))]) if not waits[thread_id] else set()
                owned.settle(settled, owned.cursor_after(settled), 0.0)
                done |= settled
            case "queue":
                thread_id = data.draw(st.sampled_from(THREADS))
                ready = sorted(seq for seq, i in owned.pending.items() if i.thread_id == thread_id)
                passed = ready[: data.draw(st.integers(0, len(ready)))]
                owned.queue([WaitingEntry(items[s], 0, "why") for s in passed], owned.cursor_after(passed), 0.0)
                waits[thread_id] += passed
            case "recall":
                thread_id = data.draw(st.sampled_from(THREADS))
                first = waits[thread_id][: data.draw(st.integers(0, 3))]
                owned.recall(items[seq] for seq in first)
                settled = set(first[: data.draw(st.integers(0, 3))])
                cursor = owned.cursor_after(settled)
                owned.settle(settled, cursor, 0.0)
                owned.recalled.clear()
                assert not settled or (cursor.term, cursor.seq) == (term + 1, owned.cursor.seq), "it shows in the row"
                del waits[thread_id][: len(settled)]
                done |= settled
        waiting = {seq for found in waits.values() for seq in found}
        open_ = sorted(seq for seq in items if seq not in done | waiting)
        assert not open_ or owned.cursor.seq < open_[0], "the cursor passed an entry that is open"
        assert owned.cursor.seq == max((s for s in items if s > 0 and (not open_ or s < open_[0])), default=0)
        assert {t: q.entries for t, q in owned.queues.items()} == {t: len(w) for t, w in waits.items() if w}
        assert owned.queued_bytes == sum(q.bytes for q in owned.queues.values())
        assert owned.unsettled == len(open_) + len(waiting)
        assert min(owned.pending_bytes, owned.queued_bytes) >= 0
        assert bool(owned.queued_bytes) == bool(waiting)


def test_a_partition_that_is_given_up_is_let_go() -> None:
    """Regression: its entries in memory stayed until the partition was taken again."""
    parts: Any = SimpleNamespace(ledger=None, subjects=SUBJECTS, config=BufferConfig())

    class Owned:
        def __init__(self) -> None:
            self.queues: dict[str, Queue] = {}

    owned: dict[int, Any] = {0: Owned()}
    given_up = weakref.ref(owned[0])
    queues = Queues(parts, owned, Waiting())
    queues.adopt(0.0)
    del owned[0]
    queues.adopt(1.0)
    assert given_up() is None
