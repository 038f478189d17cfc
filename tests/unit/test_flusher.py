"""The flusher on a log and a ledger in memory: nothing unsettled is passed, and trouble stays where it is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from bufstore.buffer.chain import Row
from bufstore.buffer.entry import StoredMessage
from bufstore.buffer.flusher import Flusher
from bufstore.buffer.ports import Cursor, FlushFailed
from bufstore.buffer.subjects import Subjects
from bufstore.buffer.verdict import Verdict
from bufstore.config import LogConfig
from bufstore.errors import ConfigError, LogRolledBack
from bufstore.memory.ledger import MemoryLedger
from bufstore.memory.store import MemoryThreadStore
from bufstore.threads.coalesce import coalesce
from bufstore.threads.model import Run
from unit.fake_log import FakeLog, run
from unit.test_appender import Instance, World

SUBJECTS = Subjects("thread", 4)


class FakeHot:
    """One member, whose progress reports go nowhere."""

    async def renew_member(self, member: str, ttl_s: int) -> None: ...

    async def leave(self, member: str) -> None: ...

    async def announce(self) -> None: ...

    async def members(self) -> list[str]:
        return ["me"]

    async def report(self, progress: Mapping[int, int]) -> None: ...

    async def tell_parked(self, thread_id: str) -> None: ...

    async def on_call(self, callback: Callable[[int], None]) -> None: ...


class LogFeed:
    """Hands over what stands in the fake log; `hidden` messages are never delivered."""

    def __init__(self, log: FeedLog, partition: int, start: int) -> None:
        self.lost: str | None = None
        self._log, self._partition, self._next = log, partition, start
        self.acked = 0

    def take(self) -> list[StoredMessage]:
        prefix = SUBJECTS.of_partition(self._partition)[:-1]
        found = [m for m in self._log.messages if m.seq >= self._next and m.subject.startswith(prefix)]
        if found:
            self._next = found[-1].seq + 1
        return [m for m in found if m.seq not in self._log.hidden]

    async def more(self) -> None: ...

    async def ack(self, seq: int) -> None:
        self.acked = seq

    async def close(self) -> None: ...


class FeedLog(FakeLog):
    """A fake log that can be followed."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: set[int] = set()
        self.refuse_feed: dict[int, Exception] = {}
        self.feeds: dict[int, LogFeed] = {}
        self.purges: list[tuple[int, int]] = []

    async def feed(self, partition: int, term: int, start: int, wake: Callable[[], None]) -> LogFeed:
        if partition in self.refuse_feed:
            raise self.refuse_feed[partition]
        self.feeds[partition] = LogFeed(self, partition, start)
        return self.feeds[partition]

    async def purge(self, partition: int, below: int) -> None:
        prefix = SUBJECTS.of_partition(partition)[:-1]
        self.purges.append((partition, below))
        self.messages = [m for m in self.messages if m.seq >= below or not m.subject.startswith(prefix)]


class Bench:
    """A world whose flusher runs."""

    def __init__(self, **config: Any) -> None:
        self.log = FeedLog()
        self.world = World(self.log, **({"flush_interval_s": 0.1, "log": LogConfig(partitions=4)} | config))
        self.ledger: MemoryLedger = self.world.ledger
        self.writer = Instance(self.world)
        self.flusher: Flusher | None = None

    async def start(self) -> None:
        self.flusher = Flusher(
            self.log,
            FakeHot(),
            self.ledger,
            coalesce,
            SUBJECTS,
            self.world.config,
            "me",
            prepare=self.ledger.setup,
        )
        await self.flusher.start()

    async def stop(self) -> None:
        assert self.flusher is not None
        await self.flusher.aclose()
        self.flusher = None

    async def flushed(self, *threads: str, within_s: float = 60.0) -> bool:
        """Whether everything of the threads gets flushed in time."""
        for _ in range(int(within_s * 10)):
            rows = [await self.ledger.row(t) for t in threads]
            if all(r.flushed_seq >= self.log.last_of(SUBJECTS.of(t)) for r, t in zip(rows, threads, strict=True)):
                return True
            await asyncio.sleep(0.1)
        return False

    async def stored(self, thread_id: str = "t") -> list[Any] | None:
        return await self.world.store.load_messages(thread_id)

    async def aclose(self) -> None:
        if self.flusher is not None:
            await self.flusher.aclose()
        await self.writer.aclose()


def bench(main: Callable[[Bench], Any], **config: Any) -> None:
    async def whole() -> None:
        it = Bench(**config)
        try:
            await main(it)
        finally:
            await it.aclose()

    run(whole())


def test_what_is_appended_is_flushed_acked_and_purged() -> None:
    async def main(it: Bench) -> None:
        await it.start()
        for n in range(5):
            await it.writer.append([n])
            await asyncio.sleep(0.3)
        assert await it.flushed("t")
        assert await it.stored() == [0, 1, 2, 3, 4]
        partition = SUBJECTS.partition("t")
        assert it.log.feeds[partition].acked == 5
        assert len(it.log.messages) == 5, "nothing is purged before its time"
        await asyncio.sleep(300)
        assert [m.seq for m in it.log.messages] == [5], "the entry at the cursor stays"

    bench(main, failover_window_s=20.0, retain_after_flush_s=100.0)


def test_a_postgres_that_went_back_gets_what_it_missed() -> None:
    """The copy that takes over misses a commit; the owner's term is the same as before."""

    async def main(it: Bench) -> None:
        await it.start()
        await it.writer.checkpoint(["a"], "t")
        assert await it.flushed("t")
        rows, cursors = dict(it.ledger._rows), dict(it.ledger._cursors)
        store = MemoryThreadStore()
        await store.apply(None, [coalesce("t", 0, it.world.tail("t"))])  # type: ignore[arg-type]
        await it.writer.append(["b"], "t")
        await it.writer.checkpoint(["u"], "u")
        assert await it.flushed("t", "u")
        it.ledger._rows, it.ledger._cursors = rows, cursors
        it.world.store.__dict__.update(store.__dict__)
        others = [f"v{n}" for n in range(12)]  # some of each partition: every cursor moves on
        for thread_id in others:
            await it.writer.checkpoint(["v"], thread_id)
        assert await it.flushed("t", "u", *others)
        assert await it.stored("t") == ["a", "b"]
        assert await it.stored("u") == ["u"]

    bench(main)


def test_several_holes_in_one_delivery_are_all_filled() -> None:
    async def main(it: Bench) -> None:
        for n in range(8):
            await it.writer.append([n])
        it.log.hidden = {2, 5, 6}
        await it.start()
        assert await it.flushed("t")
        assert await it.stored() == list(range(8))
        assert it.ledger.parked.entries == {}

    bench(main)


def test_poison_among_what_fills_a_hole_is_found_and_parked_alone() -> None:
    async def main(it: Bench) -> None:
        failing(it, lambda c: FlushFailed("22021", Verdict.POISON) if b"\xa6poison" in c.messages else None)
        for n in range(8):
            await it.writer.append(["poison" if n == 4 else f"m{n}"])
        it.log.hidden = {3, 4, 5, 6, 7}
        await it.start()
        assert await it.flushed("t")
        parked = sorted(it.ledger.parked.entries.values(), key=lambda e: e.seq)
        assert [e.seq for e in parked] == [5, 6, 7, 8]
        assert "22021" in parked[0].cause
        assert "predecessor" in parked[1].cause
        assert await it.stored() == ["m0", "m1", "m2", "m3"]

    bench(main)


def other_partition(thread_id: str) -> str:
    return next(t for t in (f"o{n}" for n in range(99)) if SUBJECTS.partition(t) != SUBJECTS.partition(thread_id))


@pytest.mark.parametrize("error", [ConfigError("a consumer of this name is not ours"), LogRolledBack("entry gone")])
def test_a_partition_that_cannot_be_taken_delays_no_other(error: Exception) -> None:
    async def main(it: Bench) -> None:
        other = other_partition("t")
        await it.writer.append(["x"], "t")
        await it.writer.append(["y"], other)
        it.log.refuse_feed = {SUBJECTS.partition("t"): error}
        await it.start()
        assert await it.flushed(other, within_s=20.0)
        assert it.flusher is not None
        assert it.flusher.state.trouble
        it.log.refuse_feed = {}
        assert await it.flushed("t")

    bench(main)


def failing(it: Bench, fails: Callable[[Any], Exception | None]) -> None:
    apply = it.world.store.apply

    async def wrapped(connection: object, batch: Sequence[Any]) -> None:
        for change in batch:
            error = fails(change)
            if error is not None:
                raise error
        await apply(connection, batch)

    it.world.store.apply = wrapped  # type: ignore[method-assign]


def test_what_the_database_refuses_is_parked_alone() -> None:
    async def main(it: Bench) -> None:
        failing(it, lambda c: FlushFailed("22021", Verdict.POISON) if b"\xa6poison" in c.messages else None)
        for n in range(6):
            await it.writer.append([f"m{n}"], "t")
            await it.writer.append([f"m{n}"], "u")
        await it.writer.append(["poison"], "t")
        await it.writer.append(["behind it"], "t")
        await it.start()
        assert await it.flushed("t", "u")
        assert len(it.ledger.parked.entries) == 2
        assert await it.stored("u") == await it.stored("t") == [f"m{n}" for n in range(6)]

    bench(main)


def test_an_app_that_raises_for_one_thread_holds_up_its_own_thread_only_and_says_so() -> None:
    async def main(it: Bench) -> None:
        bad = True
        error = FlushFailed("apply() raised KeyError", Verdict.ISOLATE)
        failing(it, lambda c: error if bad and c.thread_id == "t" else None)
        await it.writer.append(["x"], "t")
        for n in range(20):
            await it.writer.append(["y"], f"o{n}")
        await it.start()
        assert await it.flushed(*(f"o{n}" for n in range(20)), within_s=5.0)
        await asyncio.sleep(1)
        assert it.flusher is not None
        assert it.flusher.state.trouble, "health() must show that a thread is not flushed"
        bad = False
        assert await it.flushed("t")

    bench(main)


def test_a_database_that_is_away_costs_nothing_but_time() -> None:
    async def main(it: Bench) -> None:
        away = True
        failing(it, lambda c: FlushFailed("57P03", Verdict.RETRY) if away else None)
        await it.start()
        for n in range(10):
            await it.writer.append([n], "t")
            await asyncio.sleep(1)
        assert await it.stored() is None
        assert it.flusher is not None
        assert it.flusher.state.trouble
        away = False
        assert await it.flushed("t", within_s=10.0)
        assert await it.stored() == list(range(10))
        await asyncio.sleep(2)
        assert it.flusher.state.trouble == ""

    bench(main)


def test_a_restarted_owner_purges_what_was_flushed_before() -> None:
    """Else a log that is full of flushed entries takes nothing any more: nothing is appended, so nothing committed."""

    async def main(it: Bench) -> None:
        await it.start()
        for n in range(5):
            await it.writer.append([n])
        assert await it.flushed("t")
        await it.stop()
        await it.start()
        await asyncio.sleep(300)
        assert [m.seq for m in it.log.messages] == [5]

    bench(main, failover_window_s=20.0, retain_after_flush_s=100.0)


def test_a_failed_purge_is_made_up_for() -> None:
    async def main(it: Bench) -> None:
        await it.start()
        for n in range(5):
            await it.writer.append([n])
        assert await it.flushed("t")
        purge, fails = it.log.purge, 3

        async def sometimes(partition: int, below: int) -> None:
            nonlocal fails
            fails -= 1
            if fails >= 0:
                raise LogRolledBack("some error")
            await purge(partition, below)

        it.log.purge = sometimes  # type: ignore[method-assign]
        await asyncio.sleep(600)
        assert [m.seq for m in it.log.messages] == [5]

    bench(main, failover_window_s=20.0, retain_after_flush_s=100.0)


def test_an_owner_whose_term_was_raised_commits_nothing_and_starts_again() -> None:
    async def main(it: Bench) -> None:
        await it.start()
        await it.writer.append([0])
        assert await it.flushed("t")
        partition = SUBJECTS.partition("t")
        await it.ledger.take([partition], "somebody else")
        await it.writer.append([1])
        assert await it.flushed("t")
        assert await it.stored() == [0, 1]
        assert (await it.ledger.cursors())[partition] == Cursor(partition, 3, 2, (await it.ledger.row("t")).applied_id)

    bench(main)


def test_closing_flushes_what_has_arrived() -> None:
    async def main(it: Bench) -> None:
        await it.start()
        await asyncio.sleep(1)
        for n in range(30):
            await it.writer.append([n], f"t{n}")
        await asyncio.sleep(0.05)
        await it.stop()
        assert it.ledger._rows.keys() == {f"t{n}" for n in range(30)}

    bench(main, flush_interval_s=30.0)


def test_a_thread_that_the_wrapped_store_held_before_is_flushed_on_top() -> None:
    async def main(it: Bench) -> None:
        await it.world.store.checkpoint("t", ["old"], Run(run_id="r", thread_id="t"))
        await it.start()
        await it.writer.append(["new"])
        assert await it.flushed("t")
        assert await it.stored() == ["old", "new"]
        assert (await it.ledger.row("t")) != Row()

    bench(main)
