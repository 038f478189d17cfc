"""The conformance suite of logs, second part: `bufstore.buffer.ports.log.Feed`, which delivers a partition."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from bufstore.buffer.ports.log import Feed, Log
from bufstore.jetstream.messages import Outgoing
from bufstore.testing.basics import Check, registrar
from bufstore.testing.log import FIRST, PATIENCE_S, Logs, eventually, put

CHECKS: list[Check] = []
_check = registrar(CHECKS)

#: How many entries a group has, and a number of groups, more than are delivered ahead.
_MANY = 10
_GROUPS = 150


@dataclass
class _Follower:
    """A reader that follows a partition as a flusher does: it takes entries whenever it is woken."""

    feed: Feed
    woken: asyncio.Event
    #: The positions of the entries, in the order in which they came.
    seen: list[int] = field(default_factory=list)

    async def until(self, check: Callable[[], bool]) -> None:
        """Take entries until `check` gives True."""
        async with asyncio.timeout(PATIENCE_S):
            self.seen += [m.seq for m in self.feed.take()]
            while not check():
                await self.woken.wait()
                self.woken.clear()
                self.seen += [m.seq for m in self.feed.take()]


async def _follow(log: Log, start: int = FIRST, partition: int = 0) -> _Follower:
    woken = asyncio.Event()
    return _Follower(await log.feed(partition, start, woken.set), woken)


async def _lost(feed: Feed) -> None:
    """Wait until the feed is lost, by looking, as a flusher does: where the server says nothing more, silence tells."""

    async def lost() -> bool:
        return feed.lost is not None

    await eventually(lost)


@_check()
async def a_feed_delivers_one_partition_in_order(logs: Logs) -> None:
    log, writer = await logs.made(), await logs.made()
    (a, b), (c,) = logs.threads(0, 2), logs.threads(1)
    places = await put(writer, a, c, b)
    follower = await _follow(log)
    await follower.until(lambda: len(follower.seen) == 2)
    # Entries that come later wake the follower.
    places += await put(writer, c, a, c, b)
    await follower.until(lambda: len(follower.seen) == 4)
    assert follower.seen == [places[n] for n in (0, 2, 4, 6)]
    assert follower.feed.lost is None
    await follower.feed.close()


@_check()
async def a_feed_begins_at_a_position(logs: Logs) -> None:
    log = await logs.made()
    (a,) = logs.threads(0)
    places = await put(log, a, a, a)
    follower = await _follow(log, start=places[0] + 1)
    await follower.until(lambda: len(follower.seen) == 2)
    assert follower.seen == places[1:]
    await follower.feed.close()


@_check()
async def partitions_that_are_added_later_get_all_from_their_start(logs: Logs) -> None:
    log = await logs.made()
    (a,), (b,) = logs.threads(0), logs.threads(1)
    places = await put(log, *[a, b] * 20)
    first = await _follow(log)
    await first.until(lambda: len(first.seen) == 20)
    await first.feed.ack(first.seen[-1])
    second = await _follow(log, start=places[5], partition=1)
    await second.until(lambda: len(second.seen) == 18)
    more = await put(log, a, b)
    await first.until(lambda: len(first.seen) == 21)
    await second.until(lambda: len(second.seen) == 19)
    assert first.seen == [*places[::2], more[0]]
    assert second.seen == [*places[5::2], more[1]]
    for follower in (first, second):
        await follower.feed.close()


@_check()
async def a_partition_that_is_taken_again_gets_all_from_its_start(logs: Logs) -> None:
    log = await logs.made()
    (a,), (b,) = logs.threads(0), logs.threads(1)
    places = await put(log, a, b, a, b)
    other = await _follow(log, partition=1)
    old = await _follow(log)
    await old.until(lambda: len(old.seen) == 2)
    await old.feed.ack(places[2])
    new = await _follow(log, start=places[2])
    await new.until(lambda: len(new.seen) == 1)
    assert new.seen == places[2:3]
    await _lost(old.feed)
    await other.until(lambda: len(other.seen) == 2)
    assert (other.seen, other.feed.lost) == (places[1::2], None)
    for feed in (other.feed, new.feed):
        await feed.close()


@_check()
async def several_instances_follow_one_partition_each_for_itself(logs: Logs) -> None:
    """Only its term in Postgres tells an owner that it was replaced."""
    here, there = await logs.made(), await logs.made()
    (a,) = logs.threads(0)
    places = await put(here, a, a)
    followers = [await _follow(log) for log in (here, there)]
    for follower in followers:
        await follower.until(lambda follower=follower: len(follower.seen) == 2)  # type: ignore[misc]
        assert (follower.seen, follower.feed.lost) == (places, None)
        await follower.feed.close()


@_check()
async def a_feed_says_through_where_the_log_holds_nothing_more_for_it(logs: Logs) -> None:
    log = await logs.made()
    (a,), (b,) = logs.threads(0), logs.threads(1)
    follower = await _follow(log)
    places = await put(log, a, b)

    async def through() -> bool:
        follower.seen += [m.seq for m in follower.feed.take()]
        found = follower.feed.through
        return found is not None and found.seq == places[1]

    await eventually(through)
    assert follower.seen == places[:1]
    await follower.feed.close()


@_check()
async def a_feed_that_is_closed_delivers_no_more(logs: Logs) -> None:
    log = await logs.made()
    (a,), (b,) = logs.threads(0), logs.threads(1)
    follower, other = await _follow(log), await _follow(log, partition=1)
    await follower.feed.close()
    assert follower.feed.lost is not None
    await put(log, a, b)
    await other.until(lambda: len(other.seen) == 1)  # by then the closed one would have its entry
    assert follower.feed.take() == []
    await other.feed.close()


@_check()
async def a_feed_is_lost_with_its_log(logs: Logs) -> None:
    log = await logs.made()
    follower = await _follow(log)
    await log.withdraw([0, 0, 0, 0])
    await log.remove()
    await _lost(follower.feed)


@_check()
async def a_feed_waits_for_acknowledgements(logs: Logs) -> None:
    log = await logs.made()
    (a,) = logs.threads(0)
    places: list[int] = []
    for _ in range(2 * _GROUPS):
        end = await log.publish_batch([Outgoing(a, b"x")] * _MANY, PATIENCE_S)
        places += range(end - _MANY + 1, end + 1)
    follower = await _follow(log)
    # The feed delivers some entries, and then holds back.
    await follower.until(lambda: follower.feed.crowded)
    held_back = len(follower.seen)
    assert 0 < held_back < len(places)
    while len(follower.seen) < len(places):
        before = len(follower.seen)
        await follower.feed.ack(follower.seen[-1])
        await follower.until(lambda before=before: len(follower.seen) > before)  # type: ignore[misc]
    assert follower.seen == places
    assert follower.feed.lost is None
    await follower.feed.close()
