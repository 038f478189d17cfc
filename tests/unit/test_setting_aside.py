"""A thread that has to wait for long: its partition goes on without it, in bounded memory, and it loses nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bufstore.buffer.flush.owned_partition import OwnedPartition
from bufstore.buffer.flush.verdict import Verdict
from bufstore.buffer.places import first_place
from bufstore.buffer.ports.ledger import Cursor, FlushFailed
from thorough import examples
from unit.test_flusher import SUBJECTS, Bench, FeedLog, FeedServer, bench, failing
from unit.test_owned_partition import FakeFeed, messages

#: What a feed may hold in these tests.
BOUND = 40
PARTITION = SUBJECTS.partition("t")
GOOD = [t for t in (f"g{n}" for n in range(99)) if SUBJECTS.partition(t) == PARTITION][:4]


class SmallFeeds(FeedLog):
    async def feed(self, partition: int, term: int, start: int, wake: Callable[[], None]) -> Any:
        made = await super().feed(partition, term, start, wake)
        made._feed._source._groups._messages_max = BOUND
        return made


class SmallServer(FeedServer):
    kind = SmallFeeds


class World(Bench):
    """A thread "t" that the store refuses while `refused` says why."""

    def __init__(self) -> None:
        super().__init__(SmallServer())
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


def world(main: Callable[[World], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bufstore.buffer.flush.owned_partition._ORDER_SLACK", BOUND, raising=False)
    monkeypatch.setattr("unit.test_flusher.Bench", World)
    bench(main)


def test_a_thread_that_waits_stops_nobody_and_is_flushed_when_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(it: World) -> None:
        await it.start()
        most = 0
        for n in range(0, 200, 10):
            await it.write(10, n)
            assert await it.flushed(*GOOD, within_s=20.0), f"the others stopped after {n} rounds"
            most = max(most, it.in_memory())
        assert most <= 6 * BOUND, "memory is bounded however long it waits"
        assert await it.stored("t") is None
        assert it.flusher is not None
        assert it.flusher.state.pending >= 200
        assert "1 threads have to wait" in it.flusher.state.trouble
        assert await it.cursor() == 0, "nothing that is not settled is passed"
        it.refused = None
        assert await it.flushed("t", within_s=60.0)
        assert await it.stored("t") == list(range(200))
        await it.write(1, 200)
        assert await it.flushed("t", *GOOD)
        await asyncio.sleep(2)
        assert await it.cursor() == it.log.last_seq
        assert (it.owned.aside, it.owned.pending, it.owned.pending_bytes, it.owned.unsettled) == ({}, {}, 0, 0)
        assert it.flusher.state.trouble == ""
        assert not it.ledger.parked.entries

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
def test_an_owner_that_ends_while_a_thread_waits_leaves_nothing_out(
    monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    async def main(it: World) -> None:
        await it.start()
        await it.write(50)
        assert await it.flushed(*GOOD)
        await it.stop()
        it.refused = it.refused if again else None
        await it.start()
        await it.write(50, 50)
        assert await it.flushed(*GOOD)
        it.refused = None
        assert await it.flushed("t")
        for thread_id in ("t", *GOOD):
            assert await it.stored(thread_id) == list(range(100))
        await asyncio.sleep(1)
        assert await it.cursor() == it.log.last_seq

    world(main, monkeypatch)


def test_poison_in_a_thread_that_waited_is_parked_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(it: World) -> None:
        await it.start()
        await it.write(30)
        await it.writer.append(["poison"], "t")
        for n in range(30, 60):
            await it.writer.append([n], "t")
        assert await it.flushed(*GOOD)
        it.refused = None
        failing(it, lambda c: FlushFailed("22021", Verdict.POISON) if b"\xa6poison" in c.messages else None)
        assert await it.flushed("t")
        assert len(it.ledger.parked.entries) == 31, "it, and what builds on it"
        assert await it.stored("t") == list(range(30))

    world(main, monkeypatch)


def test_an_app_that_raises_for_a_thread_set_aside_is_asked_as_often_as_for_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main(it: World) -> None:
        it.refused = FlushFailed("apply() raised KeyError", Verdict.SUSPECT)
        await it.start()
        await it.write(50)
        await asyncio.sleep(5)
        assert not it.ledger.parked.entries
        assert it.owned.aside
        assert await it.flushed("t", within_s=300.0)
        assert len(it.ledger.parked.entries) == 50

    world(main, monkeypatch)


def test_a_log_that_does_not_answer_is_asked_again_and_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(it: World) -> None:
        await it.start()
        await it.write(50)
        assert await it.flushed(*GOOD)
        it.refused = None
        it.log.fault = lambda kind: "unavailable" if kind == "read" else ""
        await asyncio.sleep(20)
        assert await it.stored("t") is None
        it.log.fault = lambda kind: ""
        assert await it.flushed("t")
        assert await it.stored("t") == list(range(50))

    world(main, monkeypatch)


def test_while_all_are_refused_only_those_are_read_again_that_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many wait: otherwise reading them again, for nothing, is all that the process does."""

    async def main(it: World) -> None:
        threads = [t for t in (f"b{n}" for n in range(2000)) if SUBJECTS.partition(t) == PARTITION][:300]
        refusal: FlushFailed | None = FlushFailed("23502", Verdict.POISON)
        failing(it, lambda _: refusal)
        await it.start()
        for thread_id in threads:
            await it.writer.append(["m"], thread_id)
            await asyncio.sleep(0.01)
        await asyncio.sleep(20)
        assert len(it.owned.aside) > 200
        log, reads = it.log.opened[-1], 0
        after = log.after

        async def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal reads
            reads += 1
            return await after(*args, **kwargs)

        log.after = counted  # type: ignore[method-assign]
        await asyncio.sleep(60)
        assert 0 < reads < 600, "eight threads every two seconds, and eight of the others every eight"
        assert not it.ledger.parked.entries
        refusal = None
        assert await it.flushed(*threads, within_s=10.0)
        await asyncio.sleep(1)
        assert await it.cursor() == it.log.last_seq

    world(main, monkeypatch)


def test_what_is_not_found_again_is_passed_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader that the others have left shows an old end: the partition is taken again, and nothing is left out."""

    async def main(it: World) -> None:
        await it.start()
        await it.write(50)
        assert await it.flushed(*GOOD)
        log = it.log.opened[-1]
        after, cut = log.after, it.log.last_of(SUBJECTS.of("t")) - first_place(20)

        async def old(subject: str, seq: int, timeout_s: float, limit: int = 0) -> Any:
            return [m for m in await after(subject, seq, timeout_s, limit) if m.seq <= cut]

        log.after = old  # type: ignore[method-assign]
        takeovers = it.flusher.state.takeovers  # type: ignore[union-attr]
        it.refused = None
        await asyncio.sleep(20)
        assert it.flusher is not None
        assert it.flusher.state.takeovers > takeovers
        log.after = after  # type: ignore[method-assign]
        assert await it.flushed("t")
        assert await it.stored("t") == list(range(50))

    world(main, monkeypatch)


THREADS = ("t", "u", "v")


@examples(200)
@given(data=st.data())
def test_whatever_is_set_aside_the_cursor_passes_nothing_that_is_open(data: st.DataObject) -> None:
    feed = FakeFeed()
    owned = OwnedPartition(Cursor(0, 1, 0, 0), feed, SUBJECTS)  # type: ignore[arg-type]
    log: dict[str, list[int]] = {t: [] for t in THREADS}
    sizes: dict[int, int] = {}
    done: set[int] = set()
    end = 0

    def settle(settled: set[int]) -> None:
        cursor = owned.cursor_after(settled)
        owned.settle(settled, cursor, 0.0)
        done.update(settled)

    def recall(thread_id: str, count: int) -> None:
        aside = owned.aside[thread_id]
        if not aside.recalled:
            positions = [p for p in log[thread_id] if aside.read_to < p <= aside.last][:count]
            if positions and positions[0] - sizes[positions[0]] + 1 > aside.read_to:
                owned.recall(thread_id, [items[p] for p in positions])

    items: dict[int, Any] = {}
    for _ in range(data.draw(st.integers(1, 40))):
        match data.draw(st.sampled_from(["arrive", "arrive", "settle", "aside", "recall"])):
            case "arrive":
                thread_id, size = data.draw(st.sampled_from(THREADS)), data.draw(st.integers(1, 3))
                made, (position,) = messages([size], end + 1)
                end = position
                feed.arrived = [type(m)(SUBJECTS.of(thread_id), m.seq, m.header, m.body) for m in made]
                before = set(owned.pending)
                owned.collect()
                for seq in set(owned.pending) - before:
                    items[seq] = owned.pending[seq]
                if position not in items:  # it is set aside at once; the log has it
                    other = OwnedPartition(Cursor(0, 1, 0, 0), (again := FakeFeed()), SUBJECTS)  # type: ignore[arg-type]
                    again.arrived = [type(m)(SUBJECTS.of(thread_id), m.seq, m.header, m.body) for m in made]
                    other.collect()
                    items[position] = other.pending[position]
                log[thread_id].append(position)
                sizes[position] = size
            case "settle":
                thread_id = data.draw(st.sampled_from(THREADS))
                ready = sorted(seq for seq, i in owned.pending.items() if i.thread_id == thread_id)
                settle(set(ready[: data.draw(st.integers(0, len(ready)))]))
            case "aside":
                owned.set_aside(data.draw(st.sets(st.sampled_from(THREADS), max_size=3)))
            case "recall" if owned.aside:
                recall(data.draw(st.sampled_from(sorted(owned.aside))), data.draw(st.integers(1, 4)))
        open_ = sorted(p for found in log.values() for p in found if p not in done)
        assert not open_ or owned.cursor.seq < open_[0], "the cursor passed an entry that is not settled"
        assert owned.cursor.seq in (0, *items)
        assert not owned.cursor.seq or owned.cursor.id == items[owned.cursor.seq].entry.id
        assert owned.unsettled == len(open_)
        assert owned.pending_bytes >= 0
        assert all(p > owned.passable for p, i in owned.pending.items() if i.thread_id not in owned.aside)
    for _ in range(100):
        settle(set(owned.pending))
        for thread_id in list(owned.aside):
            recall(thread_id, 10)
    assert (owned.cursor.seq, owned.pending, owned.aside, owned.pending_bytes) == (end, {}, {}, 0)
