"""The flusher on a log and a ledger in memory: it passes nothing unsettled, and a fault delays only its own thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from bufstore.buffer.chain import Watermark
from bufstore.buffer.flush import owned_partition
from bufstore.buffer.flush.flusher import Flusher
from bufstore.buffer.flush.owned_partition import OwnedPartition
from bufstore.buffer.flush.verdict import Verdict
from bufstore.buffer.groups.feeds import PartitionFeed
from bufstore.buffer.groups.log import GroupLog
from bufstore.buffer.operate.quarantine import Quarantine
from bufstore.buffer.operate.replay import Outcome
from bufstore.buffer.places import group_of, place
from bufstore.buffer.ports.ledger import Cursor, FlushFailed
from bufstore.buffer.subjects import Subjects
from bufstore.buffer.target import Target
from bufstore.config import LogConfig
from bufstore.errors import Closed, ConfigError, LogRolledBack, LogUnavailable, StoreUnavailable
from bufstore.jetstream.messages import Outgoing, StoredMessage
from bufstore.memory.ledger import MemoryLedger
from bufstore.memory.shared_state import MemoryBucket, MemorySharedState
from bufstore.threads.coalesce import coalesce
from bufstore.threads.memory_store import MemoryThreadStore
from bufstore.threads.model import Run
from bufstore.threads.payload import Removal
from bufstore.threads.write import editing
from unit.fake_log import run
from unit.group_server import GroupServer
from unit.test_appender import Instance, World

SUBJECTS = Subjects("thread", 4)


class HidingFeed:
    """A feed that leaves out the entries of some groups, and does not say so."""

    def __init__(self, feed: PartitionFeed, hidden: set[int]) -> None:
        self._feed, self._hidden = feed, hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self._feed, name)

    @property
    def through(self) -> StoredMessage | None:
        return None if self._hidden else self._feed.through

    def take(self) -> list[StoredMessage]:
        return [m for m in self._feed.take() if group_of(m.seq) not in self._hidden]


class FeedLog(GroupLog):
    """A log whose feeds can be refused, or leave out groups, as its server says."""

    _stream: FeedServer

    async def feed(self, partition: int, start: int, wake: Callable[[], None]) -> Any:
        server = self._stream
        if partition in server.refuse_feed:
            raise server.refuse_feed[partition]
        server.feeds[partition] = HidingFeed(await super().feed(partition, start, wake), server.hidden)
        return server.feeds[partition]


class FeedServer(GroupServer):
    """A server that refuses feeds of its processes, or hides groups from them."""

    kind = FeedLog

    def __init__(self) -> None:
        super().__init__()
        self.hidden: set[int] = set()
        self.refuse_feed: dict[int, Exception] = {}
        self.feeds: dict[int, HidingFeed] = {}

    @property
    def groups(self) -> list[int]:
        """The sequences of the groups that hold entries."""
        return sorted({group_of(m.seq) for m in self.messages})


class Bench:
    """A world with a running flusher."""

    def __init__(self, server: FeedServer | None = None, **config: Any) -> None:
        self.log = server or FeedServer()
        self.world = World(self.log, **({"flush_interval_s": 0.1, "log": LogConfig(partitions=4)} | config))
        self.ledger: MemoryLedger = self.world.ledger
        self.writer = Instance(self.world)
        self.flusher: Flusher | None = None

    async def start(self) -> None:
        parts = self.world.parts(MemorySharedState(MemoryBucket()), self.ledger)
        self.flusher = Flusher(parts, "me", prepare=self.ledger.setup)
        await self.flusher.start()

    async def stop(self) -> None:
        assert self.flusher is not None
        await self.flusher.aclose()
        self.flusher = None

    async def flushed(self, *threads: str, within_s: float = 60.0) -> bool:
        """Whether everything of the threads is flushed in time."""
        for _ in range(int(within_s * 10)):
            watermarks = [await self.ledger.watermark(t) for t in threads]
            if all(r.flushed_seq >= self.log.last_of(SUBJECTS.of(t)) for r, t in zip(watermarks, threads, strict=True)):
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
        assert group_of(it.log.feeds[partition].acked) == 5
        assert len(it.log.messages) == 5, "nothing is purged before its time"
        await asyncio.sleep(300)
        assert it.log.groups == [5], "the entry at the cursor stays"

    bench(main, log=LogConfig(partitions=4, failover_window_s=20.0), retain_after_flush_s=100.0)


def test_a_postgres_that_went_back_gets_what_it_missed() -> None:
    """The copy that takes over lacks a commit, though the owner's term is the same."""

    async def main(it: Bench) -> None:
        await it.start()
        await it.writer.checkpoint(["a"], "t")
        assert await it.flushed("t")
        watermarks, cursors = dict(it.ledger._rows), dict(it.ledger._cursors)
        store = MemoryThreadStore()
        await store.apply(None, [coalesce("t", 0, it.world.tail("t"))])  # type: ignore[arg-type]
        await it.writer.append(["b"], "t")
        await it.writer.checkpoint(["u"], "u")
        assert await it.flushed("t", "u")
        it.ledger._rows, it.ledger._cursors = watermarks, cursors
        it.world.store.__dict__.update(store.__dict__)
        others = [f"v{n}" for n in range(12)]  # some of each partition, so that every cursor moves on
        for thread_id in others:
            await it.writer.checkpoint(["v"], thread_id)
        assert await it.flushed("t", "u", *others)
        assert await it.stored("t") == ["a", "b"]
        assert await it.stored("u") == ["u"]

    bench(main)


def went_back(it: Bench) -> Callable[[], None]:
    """Return a function that puts the database back to its present state."""
    parts = it.ledger._rows, it.ledger._cursors, it.world.store._messages, it.world.store._threads
    copies = [dict(part) for part in parts]

    def put_back() -> None:
        for part, copy in zip(parts, copies, strict=True):
            part.clear()
            part.update(copy)

    return put_back


def test_a_postgres_that_went_back_gets_what_it_missed_also_when_nothing_is_written_any_more() -> None:
    async def main(it: Bench) -> None:
        await it.start()
        await it.writer.append(["a"])
        assert await it.flushed("t")
        put_back = went_back(it)
        await it.writer.append(["b"])
        assert await it.flushed("t")
        put_back()
        assert await it.stored() == ["a"]
        assert await it.flushed("t", within_s=10.0)
        assert await it.stored() == ["a", "b"]

    bench(main)


def test_nothing_is_purged_that_a_postgres_which_is_away_may_have_lost() -> None:
    """Postgres may return as an older copy, long after the failover window: the time at which it went away counts."""

    async def main(it: Bench) -> None:
        await it.start()
        await it.writer.append(["a"])
        assert await it.flushed("t")
        put_back = went_back(it)
        for n in range(5):
            await it.writer.append([n])
            assert await it.flushed("t")
        await asyncio.sleep(6)  # it goes away after it was asked again
        cursors = it.ledger.cursors

        async def away() -> dict[int, Cursor]:
            raise StoreUnavailable("Postgres is away")

        it.ledger.cursors = away  # type: ignore[method-assign]
        await asyncio.sleep(300)
        put_back()
        it.ledger.cursors = cursors  # type: ignore[method-assign]
        assert await it.flushed("t")
        assert await it.stored() == ["a", 0, 1, 2, 3, 4]

    bench(main, log=LogConfig(partitions=4, failover_window_s=20.0), retain_after_flush_s=20.0)


def test_several_holes_in_one_delivery_are_all_filled() -> None:
    async def main(it: Bench) -> None:
        for n in range(8):
            await it.writer.append([n])
        it.log.hidden.update({2, 5, 6})
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
        assert [group_of(e.seq) for e in parked] == [5, 6, 7, 8]
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


def failing(it: Bench, fails: Callable[[Any], BaseException | None]) -> None:
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


def test_of_entries_that_name_no_thread_as_many_are_parked_as_there_is_space_for() -> None:
    """Regression: the entries of one window were counted together, and none was parked in an empty quarantine."""

    async def main(it: Bench) -> None:
        it.ledger._quarantine_max = 5
        for _ in range(8):
            it.log.stream.store([Outgoing(SUBJECTS.groups, b"junk", "no group")])
        await it.start()
        await asyncio.sleep(60)
        assert len(it.ledger.parked.entries) == 5
        await it.ledger.parked.discard(list(it.ledger.parked.entries))
        await asyncio.sleep(60)
        assert len(it.ledger.parked.entries) == 3
        assert group_of((await it.ledger.cursors())[0].seq) == 8

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
    """Otherwise a log full of flushed entries accepts no more, and without new entries nothing is committed."""

    async def main(it: Bench) -> None:
        await it.start()
        for n in range(5):
            await it.writer.append([n])
        assert await it.flushed("t")
        await it.stop()
        await it.start()
        await asyncio.sleep(300)
        assert it.log.groups == [5]

    bench(main, log=LogConfig(partitions=4, failover_window_s=20.0), retain_after_flush_s=100.0)


def test_a_failed_purge_is_made_up_for() -> None:
    async def main(it: Bench) -> None:
        await it.start()
        for n in range(5):
            await it.writer.append([n])
        assert await it.flushed("t")
        purge, fails = it.log.purge_below, 3

        async def sometimes(seq: int) -> None:
            nonlocal fails
            fails -= 1
            if fails >= 0:
                raise LogRolledBack("some error")
            await purge(seq)

        it.log.purge_below = sometimes  # type: ignore[method-assign]
        await asyncio.sleep(600)
        assert it.log.groups == [5]

    bench(main, log=LogConfig(partitions=4, failover_window_s=20.0), retain_after_flush_s=100.0)


def test_a_purge_that_a_close_ends_is_no_trouble(caplog: pytest.LogCaptureFixture) -> None:
    """What it publishes, with the tombstones of deleted threads, goes the way of appends, which is closed first."""

    async def main(it: Bench) -> None:
        await it.start()
        for n in range(5):
            await it.writer.append([n])
        assert await it.flushed("t")

        async def closed(_: int) -> None:
            raise Closed("the store is closed")

        it.log.purge_below = closed  # type: ignore[method-assign]
        await asyncio.sleep(600)
        await it.stop()

    bench(main, log=LogConfig(partitions=4, failover_window_s=20.0), retain_after_flush_s=100.0)
    assert [r.message for r in caplog.records if r.levelname == "WARNING"] == []


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
        assert (await it.ledger.cursors())[partition] == Cursor(
            partition, 3, place(2, 0), (await it.ledger.watermark("t")).applied_id
        )

    bench(main)


def test_an_owner_in_doubt_takes_back_what_it_has_lost_itself_though_it_has_raised_the_term() -> None:
    """Regression: a commit that does not move the cursor raises the term, which counted as another owner's."""

    async def main(it: Bench) -> None:
        await it.start()
        assert it.flusher is not None
        partition, held = SUBJECTS.partition("t"), True
        failing(it, lambda c: FlushFailed("55P03", Verdict.ISOLATE) if held else None)
        await it.writer.append(["waits in the ledger"])
        await asyncio.sleep(3)
        before = (await it.ledger.cursors())[partition]
        held = False
        assert await it.flushed("t")
        after = (await it.ledger.cursors())[partition]
        assert (after.seq, after.term) == (before.seq, before.term + 1)
        it.flusher._tasks["lease"].cancel()
        it.flusher._takeover.hold()
        it.flusher._takeover.owned_partitions[partition].doubt = "its feed was lost"
        await it.writer.append(["in doubt"])
        assert await it.flushed("t", within_s=10.0)

    bench(main)


@pytest.mark.parametrize(
    ("cursor", "unsettled", "doubt", "flushed"),
    [(7, 0, None, True), (9, 0, None, True), (6, 0, None, False), (9, 1, None, False), (9, 0, "a hole", False)],
)
def test_only_what_is_held_settled_and_not_in_doubt_counts_as_flushed_here(
    cursor: int, unsettled: int, doubt: str | None, flushed: bool
) -> None:
    owned: Any = SimpleNamespace(cursor=Cursor(1, 1, cursor, 5), unsettled=unsettled, doubt=doubt)
    other: Any = SimpleNamespace(cursor=Cursor(0, 1, 3, 5), unsettled=0, doubt=None)
    flusher: Any = SimpleNamespace(_owned={0: other, 1: owned})
    assert Flusher.has_flushed(flusher, {0: 0, 1: 7}) is flushed
    assert not Flusher.has_flushed(flusher, {0: 0, 2: 0})


async def _one_waits(it: Bench) -> Flusher:
    """Return the flusher, once an entry of thread "t", whose row is locked, waits in the ledger."""
    await it.start()
    assert it.flusher is not None
    it.ledger.locked.add("t")
    await it.writer.append(["waits in the ledger"])
    await asyncio.sleep(3)
    return it.flusher


def test_a_commit_whose_answer_is_on_its_way_is_not_taken_for_another_owners() -> None:
    async def main(it: Bench) -> None:
        flusher = await _one_waits(it)
        it.ledger.locked.clear()
        flush, takeovers = it.ledger.flush, flusher.state.takeovers

        async def slow(*arguments: Any, **options: Any) -> Any:
            found = await flush(*arguments, **options)
            await flusher._takeover.compare()
            return found

        it.ledger.flush = slow  # type: ignore[method-assign]
        assert await it.flushed("t")
        it.ledger.flush = flush  # type: ignore[method-assign]
        await asyncio.sleep(1)
        assert flusher.state.takeovers == takeovers
        partition = SUBJECTS.partition("t")
        before = (await it.ledger.cursors())[partition]
        await it.ledger.take([partition], "somebody else")
        for _ in range(3):
            await asyncio.sleep(1)
            await flusher._takeover.compare()
        await asyncio.sleep(1)
        assert flusher.state.takeovers == takeovers + 1, "but another owner's is, if nothing is written either"
        assert (await it.ledger.cursors())[partition].term == before.term + 2

    bench(main)


def test_commits_that_are_made_while_postgres_is_asked_are_not_taken_for_another_owners() -> None:
    """Regression: a partition whose waiting entries were flushed beside new ones was given up by most looks."""

    async def main(it: Bench) -> None:
        flusher = await _one_waits(it)
        flush, cursors, takeovers = it.ledger.flush, it.ledger.cursors, flusher.state.takeovers
        before = (await cursors())[SUBJECTS.partition("t")]
        committed, comparing = asyncio.Event(), asyncio.Event()

        async def slow() -> Any:
            comparing.set()
            await committed.wait()
            return await cursors()

        it.ledger.cursors = slow  # type: ignore[method-assign]
        compared = asyncio.create_task(flusher._takeover.compare())
        await comparing.wait()

        async def noted(*arguments: Any, **options: Any) -> Any:
            found = await flush(*arguments, **options)
            now = (await cursors())[before.partition]
            if now.term > before.term and now.seq > before.seq:
                committed.set()
                await compared  # before the answer to this commit is here
            return found

        it.ledger.flush = noted  # type: ignore[method-assign]
        it.ledger.locked.clear()
        assert await it.flushed("t")
        await it.writer.append(["new"])
        assert await it.flushed("t")
        assert compared.done()
        await asyncio.sleep(1)
        assert flusher.state.takeovers == takeovers

    bench(main)


@pytest.mark.parametrize("other", ["another database", "an empty one"])
def test_who_takes_partitions_in_another_database_flushes_nothing_into_it(other: str) -> None:
    async def main(it: Bench) -> None:
        it.log.stream.target = Target("threads", "postgres", "thread-1")
        if other == "another database":
            it.ledger._named = Target("threads", "postgres", "thread-2")
        await it.writer.append([1])
        await it.start()
        assert it.flusher is not None
        assert not await it.flushed("t", within_s=3.0)
        assert not it.ledger._rows and await it.stored() is None
        refused = it.log.opened[-1].refused
        assert refused is not None and "database" in str(refused)
        assert it.flusher.state.stopped and not it.flusher.cursors()

    bench(main)


def test_a_log_that_others_have_gone_on_with_meanwhile_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who stood still after it took a partition may not find the entry at its cursor: others flushed and purged on."""

    async def gone(*_: Any) -> str:
        return "the entry is gone"

    async def main(it: Bench) -> None:
        await it.start()
        await it.writer.append([1])
        assert it.flusher is not None and await it.flushed("t")
        cursor = (await it.ledger.cursors())[SUBJECTS.partition("t")]
        monkeypatch.setattr("bufstore.buffer.flush.takeover.mismatch", gone)
        assert await it.flusher._takeover._mismatch(cursor, 0) == "the entry is gone"
        await it.ledger.take([cursor.partition], "somebody else")
        with pytest.raises(LogUnavailable, match="another owner took"):
            await it.flusher._takeover._mismatch(cursor, 0)

    bench(main)


@pytest.mark.parametrize("differs", [(0, 0, 1), (0, -1, 0), (-1, 0, 0), (-1, 1, 1), (2, 0, 0), (1, 1, 1), (1, -1, 1)])
def test_a_cursor_that_we_cannot_have_left_so_is_doubted(differs: tuple[int, int, int]) -> None:
    """By how much term, position and id differ. A commit of ours that is on its way changes the term or the others."""

    async def main(it: Bench) -> None:
        await it.start()
        await it.writer.append([1])
        assert it.flusher is not None and await it.flushed("t")
        partition, cursors = SUBJECTS.partition("t"), await it.ledger.cursors()
        found, owned = cursors[partition], it.flusher._owned[partition]
        term, seq, id_ = differs
        other = Cursor(partition, found.term + term, found.seq + seq, found.id + id_)

        async def now() -> dict[int, Cursor]:
            return cursors | {partition: other}

        it.ledger.cursors = now  # type: ignore[method-assign]
        await it.flusher._takeover.compare()
        assert owned.doubt is not None
        assert not any(o.doubt for p, o in it.flusher._owned.items() if p != partition)

    bench(main)


def test_an_answer_from_before_a_commit_is_compared_with_what_we_had_then() -> None:
    async def main(it: Bench) -> None:
        await it.start()
        await it.writer.append([1])
        assert it.flusher is not None and await it.flushed("t")
        cursors, told, answered, takeovers = (
            it.ledger.cursors,
            asyncio.Event(),
            asyncio.Event(),
            it.flusher.state.takeovers,
        )

        async def late() -> dict[int, Cursor]:
            found = dict(await cursors())
            told.set()
            await answered.wait()
            return found

        it.ledger.cursors = late  # type: ignore[method-assign]
        compared = asyncio.create_task(it.flusher._takeover.compare())
        await told.wait()
        await it.writer.append([2])
        assert await it.flushed("t")
        await asyncio.sleep(1)
        answered.set()
        await compared
        await asyncio.sleep(1)
        assert it.flusher.state.takeovers == takeovers

        async def lost() -> dict[int, Cursor]:
            return {p: c for p, c in (await cursors()).items() if p != SUBJECTS.partition("t")}

        it.ledger.cursors = lost  # type: ignore[method-assign]
        await it.flusher._takeover.compare()
        assert [p for p, owned in it.flusher._owned.items() if owned.doubt] == [SUBJECTS.partition("t")]

    bench(main)


def test_a_log_that_ends_before_a_cursor_takes_no_more_writes_of_this_process() -> None:
    async def main(it: Bench) -> None:
        await it.writer.append([1])
        partition = SUBJECTS.partition("t")
        it.ledger._cursors[partition] = Cursor(partition, 1, it.log.last_seq + 100_000, 5)
        await it.start()
        await asyncio.sleep(1)
        refused = it.log.opened[-1].refused
        assert refused is not None and "the log ends at" in str(refused)
        assert it.flusher is not None and partition not in it.flusher.cursors()
        assert not await it.flushed("t", within_s=3.0)

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
        assert (await it.ledger.watermark("t")) != Watermark()

    bench(main)


def test_a_log_that_runs_full_gives_up_what_it_wishes_to_retain_but_not_the_failover_window() -> None:
    async def main(it: Bench) -> None:
        fill = 0.2

        async def filled() -> tuple[int, int]:
            return int(fill * 1000), 1000

        it.log.fill = filled  # type: ignore[method-assign]
        await it.start()
        for n in range(5):
            await it.writer.append([n])
        assert await it.flushed("t")
        await asyncio.sleep(3600)
        assert len(it.log.messages) == 5, "there is room"
        fill = 0.8
        for n in range(5):
            await it.writer.append([n])
        assert await it.flushed("t")
        flushed_before = it.log.groups[:4]
        await asyncio.sleep(20)
        assert not set(flushed_before) & {*it.log.groups}, "flushed long ago: gone"
        assert len(it.log.messages) == 6, "flushed just now: a failover may still need it"
        await asyncio.sleep(100)
        assert it.log.groups == [10]

    bench(main, log=LogConfig(partitions=4, failover_window_s=60.0), retain_after_flush_s=24 * 3600.0)


def test_partitions_that_are_idle_or_stuck_hold_no_purge_up() -> None:
    async def main(it: Bench) -> None:
        other = other_partition("t")
        failing(it, lambda c: FlushFailed("55P03", Verdict.ISOLATE) if c.thread_id == other else None)
        await it.start()
        await it.writer.append(["stuck"], other)
        for n in range(5):
            await it.writer.append([n])
        await asyncio.sleep(600)
        assert it.log.groups == [6]
        assert len(it.ledger.waiting.entries) == 1
        assert await it.stored(other) is None

    bench(main, log=LogConfig(partitions=4, failover_window_s=20.0), retain_after_flush_s=100.0)


def test_nothing_is_acked_before_it_is_applied_or_parked() -> None:
    async def main(it: Bench) -> None:
        acks, early = list[int](), list[int]()

        def look(partition: int, seq: int) -> None:
            for m in it.log.messages:
                if m.seq <= seq and int(m.subject.split(".")[1]) == partition:
                    thread_id = "t" if m.subject == SUBJECTS.of("t") else "u"
                    watermark = it.ledger._rows.get(thread_id, Watermark())
                    broken = watermark.broken_since
                    if watermark.flushed_seq < m.seq or not (
                        m.seq in it.ledger.parked.entries or broken is None or m.seq < broken
                    ):
                        early.append(m.seq)  # an error here would be caught by the flusher, which tries again
            acks.append(seq)

        class Watched(FeedLog):
            async def feed(self, partition: int, start: int, wake: Callable[[], None]) -> Any:
                made = await super().feed(partition, start, wake)
                acknowledge = made.ack

                async def ack(seq: int) -> None:
                    look(partition, seq)
                    await acknowledge(seq)

                made.ack = ack
                return made

        it.log.kind = Watched
        failing(it, lambda c: FlushFailed("22021", Verdict.POISON) if b"\xa6poison" in c.messages else None)
        await it.start()
        for message in ("good", "poison", "behind it"):
            await it.writer.append([message], "t")
            await it.writer.append(["good"], "u")
        assert await it.flushed("t", "u")
        await asyncio.sleep(5)
        assert {*map(group_of, it.ledger.parked.entries)} == {3, 5}
        assert group_of(max(acks)) == 6
        assert early == []

    bench(main)


class StandingStill:
    """Has each flush of a bench wait until it may go on."""

    def __init__(self, it: Bench) -> None:
        self._flush = it.ledger.flush
        self.begun, self.goes_on = asyncio.Event(), asyncio.Event()
        it.ledger.flush = self._wait  # type: ignore[method-assign]

    async def _wait(self, *arguments: Any, **options: Any) -> Any:
        self.begun.set()
        await self.goes_on.wait()
        return await self._flush(*arguments, **options)


def test_what_arrives_while_postgres_commits_is_decoded_meanwhile() -> None:
    async def main(it: Bench) -> None:
        flushes = StandingStill(it)
        await it.start()
        await it.writer.append(["first"])
        await flushes.begun.wait()
        for message in ("second", "third"):
            await it.writer.append([message])
        await it.writer.append(["other"], "u")
        await asyncio.sleep(1)
        assert it.flusher is not None
        assert sum(len(owned.pending) for owned in it.flusher._owned.values()) == 4
        flushes.goes_on.set()
        assert await it.flushed("t", "u")
        assert await it.stored() == ["first", "second", "third"]

    bench(main)


def test_an_error_in_what_arrives_while_postgres_commits_is_told_and_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main(it: Bench) -> None:
        flushes = StandingStill(it)
        await it.start()
        await it.writer.append(["first"])
        await flushes.begun.wait()
        with monkeypatch.context() as patch:
            patch.setattr(OwnedPartition, "_item", lambda *_: 1 / 0)
            await it.writer.append(["second"])
            await asyncio.sleep(1)
        assert it.flusher is not None
        flushes.goes_on.set()
        assert await it.flushed("t")
        assert await it.stored() == ["first", "second"]
        assert it.flusher.state.takeovers == 4 + 1
        assert "cannot decode an entry" in caplog.text

    bench(main)


@pytest.mark.parametrize("where", ["_item", "size_of"])
def test_the_cursor_does_not_pass_what_could_not_be_decoded_during_a_commit(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a later entry of the partition was taken, and the write that let it wait in the ledger moved on."""

    async def main(it: Bench) -> None:
        here = [t for t in map(str, range(100)) if SUBJECTS.partition(t) == SUBJECTS.partition("t")]
        lost, other = here[:2]
        await it.start()
        it.ledger.locked.add("t")
        await it.writer.append(["waits in the ledger"], "t")
        await asyncio.sleep(3)
        flushes = StandingStill(it)
        await it.writer.append(["first"], other)
        await flushes.begun.wait()
        with monkeypatch.context() as patch:
            patch.setattr(OwnedPartition if where == "_item" else owned_partition, where, lambda *_: 1 / 0)
            await it.writer.append(["cannot be decoded now"], lost)
            await asyncio.sleep(0.05)
        await it.writer.append(["behind it"], "t")
        await asyncio.sleep(0.05)
        flushes.goes_on.set()
        assert await it.flushed(lost, other)
        it.ledger.locked.clear()
        assert await it.flushed("t")
        assert await it.stored(lost) == ["cannot be decoded now"]
        assert await it.stored() == ["waits in the ledger", "behind it"]

    bench(main)


def test_an_error_nobody_thought_of_is_told_and_tried_again() -> None:
    async def main(it: Bench) -> None:
        flush, fails = it.ledger.flush, 3

        async def sometimes(*args: Any, **options: Any) -> Any:
            nonlocal fails
            fails -= 1
            if fails >= 0:
                raise RuntimeError("nobody thought of it")
            return await flush(*args, **options)

        it.ledger.flush = sometimes  # type: ignore[method-assign]
        await it.start()
        await it.writer.append([1])
        troubles = set()
        while fails >= 0:
            await asyncio.sleep(0.1)
            assert it.flusher is not None
            troubles.add(it.flusher.state.trouble)
        assert any(troubles), "health() must show it"
        assert await it.flushed("t", within_s=10.0)
        assert await it.stored() == [1]
        await asyncio.sleep(2)
        assert it.flusher.state.trouble == ""

    bench(main)


def test_a_postgres_that_lost_a_commit_behind_a_thread_that_waits_gets_it_again() -> None:
    """The cursor still stands before that thread, so the commit does not move it; the loss is noticed all the same."""

    async def main(it: Bench) -> None:
        await it.start()
        good = next(t for t in (f"g{n}" for n in range(99)) if SUBJECTS.partition(t) == SUBJECTS.partition("t"))
        held = True
        failing(it, lambda c: FlushFailed("55P03", Verdict.ISOLATE) if held and c.thread_id == "t" else None)
        await it.writer.append(["held"], "t")
        await asyncio.sleep(0.2)  # the entry still waits in memory, and not in the ledger
        put_back = went_back(it)
        await it.writer.append(["good"], good)
        assert await it.flushed(good)
        put_back()
        assert await it.flushed(good)
        held = False
        assert await it.flushed("t", good)
        assert (await it.stored("t"), await it.stored(good)) == (["held"], ["good"])

    bench(main)


def test_a_deletion_that_is_replayed_leaves_a_tombstone_which_is_buried() -> None:
    async def main(it: Bench) -> None:
        refused = FlushFailed("23503 a table of the app's refers to it", Verdict.POISON)
        failing(it, lambda c: refused if refused is not None and c.deleted else None)
        await it.start()
        await it.writer.append(["a"])
        assert await it.flushed("t")
        first = (await it.ledger.watermark("t")).applied_id
        await it.writer.appender.append("t", editing(Removal(), "t", first))
        assert await it.flushed("t")
        assert len(it.ledger.parked.entries) == 1
        refused = None
        quarantine = Quarantine(it.world.parts(MemorySharedState(MemoryBucket()), it.ledger))
        assert [r.outcome for r in await quarantine.replay_thread("t")] == [Outcome.APPLIED]
        assert it.ledger._rows["t"].gone
        for n in range(40):
            await it.writer.append([n], f"g{n % 5}")
            await asyncio.sleep(10)
        await asyncio.sleep(300)
        assert "t" not in it.ledger._rows

    bench(main, log=LogConfig(partitions=4, failover_window_s=20.0), retain_after_flush_s=100.0)


def test_an_orderly_end_is_no_line_for_each_partition(caplog: pytest.LogCaptureFixture) -> None:
    """Regression: each process that ended logged "partition 3: closing" for every partition that it had."""
    caplog.set_level("INFO")

    async def main(it: Bench) -> None:
        await it.start()
        await it.writer.append(["a"])
        assert await it.flushed("t")
        await it.stop()

    bench(main)
    assert not [record for record in caplog.records if getattr(record, "action", "") == "partition_dropped"]
