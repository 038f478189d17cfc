"""A silent feed is not trusted for ever: its server may be behind the log."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from bufstore.buffer.flush.overdue import Overdue
from bufstore.buffer.flush.verdict import Verdict
from bufstore.buffer.places import place
from bufstore.buffer.ports.ledger import FlushFailed
from bufstore.jetstream.messages import StoredMessage
from unit.fake_log import run
from unit.test_flusher import SUBJECTS, Bench, FeedLog, FeedServer, bench

PARTITION = SUBJECTS.partition("t")


class Lagging:
    """A feed of a server that has nothing above a position, and does not say that it lags."""

    def __init__(self, feed: Any, has: int) -> None:
        self._feed, self._has = feed, has

    def __getattr__(self, name: str) -> Any:
        return getattr(self._feed, name)

    through = None

    def take(self) -> list[StoredMessage]:
        # What the server lacks is not delivered, and not asked for again.
        return [m for m in self._feed.take() if m.seq <= self._has]


class LaggingLog(FeedLog):
    """A log of which the first `lagging` feeds of PARTITION lag: they end where the log ended."""

    _stream: LaggingServer

    async def feed(self, partition: int, start: int, wake: Callable[[], None]) -> Any:
        server, feed = self._stream, await super().feed(partition, start, wake)
        if partition != PARTITION:
            return feed
        server.made += 1
        return Lagging(feed, start - 1) if server.made <= server.lagging else feed

    async def partition_ends(self) -> list[int]:
        self._stream.looks += 1
        return await super().partition_ends()

    async def _follow(self, seq: int, wake: Callable[[], None]) -> Any:
        consumer = await super()._follow(seq, wake)
        self._stream.consumers += 1
        if self._stream.end_reason:
            asyncio.get_running_loop().call_later(0.01, consumer.lose, self._stream.end_reason)
        if self._stream.paused:
            consumer.take = list  # type: ignore[method-assign]
        return consumer


class LaggingServer(FeedServer):
    kind = LaggingLog
    lagging = 0
    #: Whether new consumers deliver nothing, and how many were made.
    paused = False
    consumers = 0
    #: Why new consumers end at once; empty: they do not.
    end_reason = ""
    #: How many feeds of PARTITION were made, and how often partitions were asked for their ends.
    made = 0
    looks = 0


class World(Bench):
    def __init__(self) -> None:
        super().__init__(LaggingServer())
        self.log: LaggingServer

    async def ask_until_flushed(self, within_s: float) -> bool:
        """Ask for a flush as often as a waiting caller does. Returns whether the thread was flushed in time."""
        assert self.flusher is not None
        for _ in range(int(within_s / 0.25)):
            self.flusher.ask(PARTITION)
            if await self.flushed("t", within_s=0.2):
                return True
        return False


def world(main: Callable[[World], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unit.test_flusher.Bench", World)
    bench(main)


def test_a_feed_that_leaves_out_what_somebody_waits_for_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(it: World) -> None:
        it.log.lagging = 1
        await it.start()
        await it.writer.append([1])
        assert await it.ask_until_flushed(10.0)
        assert await it.stored() == [1]
        assert it.log.made == 2

    world(main, monkeypatch)


def test_a_feed_that_leaves_out_entries_is_replaced_though_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(it: World) -> None:
        it.log.lagging = 1
        await it.start()
        await asyncio.sleep(1)
        await it.writer.append([1])
        assert await it.flushed("t", within_s=100.0)
        assert it.log.looks <= 4, "the log is asked rarely"

    world(main, monkeypatch)


def test_a_feed_behind_which_there_is_nothing_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(it: World) -> None:
        await it.start()
        await it.writer.append([1])
        assert await it.flushed("t")
        assert it.flusher is not None
        for _ in range(240):
            it.flusher.ask(PARTITION)
            await asyncio.sleep(0.25)
        assert it.log.made == 1
        assert it.log.looks <= 130, "not at each question"

    world(main, monkeypatch)


def test_who_is_flushed_at_once_costs_the_log_no_question(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(it: World) -> None:
        await it.start()
        for n in range(50):
            await it.writer.append([n])
            assert await it.ask_until_flushed(10.0)
        assert it.log.looks == 0

    world(main, monkeypatch)


def test_a_feed_that_has_no_room_is_not_taken_for_one_that_lags(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(it: World) -> None:
        await it.start()
        await asyncio.sleep(1)
        flush = it.ledger.flush

        async def away(*_: Any, **__: Any) -> Any:
            raise FlushFailed("the database is away", Verdict.RETRY)

        it.ledger.flush = away  # type: ignore[method-assign]
        feed = it.log.feeds[PARTITION]
        feed._feed.delivery._groups._messages_max = 4
        for n in range(8):
            await it.writer.append([n])
        assert not await it.ask_until_flushed(30.0)
        assert it.log.looks > 0
        it.ledger.flush = flush  # type: ignore[method-assign]
        assert await it.ask_until_flushed(30.0)
        assert it.log.made == 1
        assert it.log.feeds[PARTITION] is feed

    world(main, monkeypatch)


def test_where_all_feeds_lag_they_are_replaced_ever_more_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(it: World) -> None:
        it.log.lagging = 1000
        await it.start()
        await it.writer.append([1])
        assert not await it.ask_until_flushed(60.0)
        assert 3 <= it.log.made <= 8
        it.log.lagging = 0
        assert await it.ask_until_flushed(60.0)

    world(main, monkeypatch)


def test_a_leader_that_does_not_answer_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(it: World) -> None:
        it.log.lagging = 1
        await it.start()
        await it.writer.append([1])
        it.log.fault = lambda kind: "unavailable" if kind == "read" else ""
        assert not await it.ask_until_flushed(20.0)
        assert it.log.made == 1
        it.log.fault = lambda _: ""
        assert await it.ask_until_flushed(10.0)

    world(main, monkeypatch)


async def _paused_with_all_partitions_written(it: World) -> tuple[list[str], asyncio.Task[None]]:
    """Let every consumer deliver nothing, and ask for each partition. Returns the threads, and the task that asks."""
    threads = {SUBJECTS.partition(f"t{n}"): f"t{n}" for n in range(20)}
    await it.start()
    await asyncio.sleep(1)
    for consumer in it.log.stream.feeds:
        consumer.take = list  # type: ignore[method-assign]
    for thread_id in threads.values():
        await it.writer.append([1], thread_id)

    async def ask() -> None:
        while it.flusher is not None:
            for partition in threads:
                it.flusher.ask(partition)
                await asyncio.sleep(0.05)

    it.log.consumers = 0
    return list(threads.values()), asyncio.create_task(ask())


def test_a_consumer_that_delivers_nothing_is_replaced_once_for_all_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: each partition got the same consumer again, for ever."""

    async def main(it: World) -> None:
        threads, asking = await _paused_with_all_partitions_written(it)
        assert await it.flushed(*threads, within_s=10.0)
        await asyncio.sleep(60)
        assert it.log.consumers <= 2, "they are opened side by side, and a second one may begin where the others are"
        asking.cancel()

    world(main, monkeypatch)


def test_where_all_consumers_deliver_nothing_many_partitions_replace_no_more_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main(it: World) -> None:
        it.log.paused = True
        threads, asking = await _paused_with_all_partitions_written(it)
        assert not await it.flushed(*threads, within_s=60.0)
        assert 3 <= it.log.consumers <= 10
        it.log.paused = False
        assert await it.flushed(*threads, within_s=60.0)
        asking.cancel()

    world(main, monkeypatch)


def test_who_waits_behind_what_is_of_others_is_not_overdue_while_that_is_delivered() -> None:
    """To begin again would deliver all of those entries once more."""

    class Ends:
        async def partition_ends(self) -> list[int]:
            return [place(1000, 0)]

    async def main() -> None:
        doubts: list[str] = []
        feed = SimpleNamespace(through=None, crowded=False, doubt=doubts.append)
        owned: Any = SimpleNamespace(delivered=place(1, 0), feed=feed)
        ends: Any = Ends()
        overdue = Overdue(ends, {0: owned}, lambda: None)
        await overdue._look({0})
        for group in range(2, 60):
            feed.through = SimpleNamespace(seq=place(group, 0))
            overdue.judge()
            assert not doubts
            await asyncio.sleep(1)
        for group in range(1000, 1003):
            feed.through = SimpleNamespace(seq=place(group, 0))
            overdue.judge()
            await asyncio.sleep(1)
        assert doubts, "it was left out"

    run(main())


def test_a_feed_that_ends_at_once_again_and_again_is_told_and_made_seldom(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main(it: World) -> None:
        it.log.end_reason = "409 Exceeded Something"
        await it.start()
        assert it.flusher is not None
        await it.writer.append([1])
        await asyncio.sleep(2)
        for _ in range(100):
            assert "409 Exceeded Something" in it.flusher.state.trouble, "all the time"
            await asyncio.sleep(0.1)
        assert it.log.consumers <= 2 * 12 / 0.5
        assert [r.levelname for r in caplog.records if getattr(r, "action", "") == "flush_failed"] == ["WARNING"]
        it.log.end_reason = ""
        assert await it.ask_until_flushed(10.0)
        await asyncio.sleep(5)
        assert not it.flusher.state.trouble

    world(main, monkeypatch)
