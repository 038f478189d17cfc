"""The conformance suite of logs, second part: `bufstore.buffer.ports.log.Feed`, by which a partition is followed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from bufstore.buffer.ports.log import Feed, Log
from bufstore.errors import ConfigError
from bufstore.jetstream.messages import Outgoing
from bufstore.testing.basics import Check, raises, registrar
from bufstore.testing.log import FIRST, PATIENCE_S, Logs, eventually, put

CHECKS: list[Check] = []
_check = registrar(CHECKS)

#: As many as fit into a batch.
_MANY = 500


@dataclass
class _Follower:
    """What follows a partition as a flusher does: it takes whenever it is woken."""

    feed: Feed
    woken: asyncio.Event
    #: Positions, as they came.
    seen: list[int] = field(default_factory=list)

    async def until(self, check: Callable[[], bool]) -> None:
        """Take until this is so."""
        async with asyncio.timeout(PATIENCE_S):
            self.seen += [m.seq for m in self.feed.take()]
            while not check():
                await self.woken.wait()
                self.woken.clear()
                self.seen += [m.seq for m in self.feed.take()]


async def _follow(log: Log, term: int = 1, start: int = FIRST, partition: int = 0) -> _Follower:
    woken = asyncio.Event()
    return _Follower(await log.feed(partition, term, start, woken.set), woken)


async def _lost(feed: Feed) -> None:
    """Wait for that as a flusher does, by looking: where nothing more is said, silence tells it."""

    async def lost() -> bool:
        return feed.lost is not None

    await eventually(lost)


@_check()
async def a_feed_delivers_one_partition_in_order(logs: Logs) -> None:
    log, writer = await logs.made(), await logs.made()
    (a, b), (c,) = logs.threads(0, 2), logs.threads(1)
    await put(writer, a, c, b)
    follower = await _follow(log)
    await follower.until(lambda: len(follower.seen) == 2)
    # What comes later wakes the follower.
    await put(writer, c, a, c, b)
    await follower.until(lambda: len(follower.seen) == 4)
    assert follower.seen == [FIRST, FIRST + 2, FIRST + 4, FIRST + 6]
    assert follower.feed.lost is None
    await follower.feed.close()


@_check()
async def a_feed_begins_at_a_position(logs: Logs) -> None:
    log = await logs.made()
    (a,) = logs.threads(0)
    await put(log, a, a, a)
    follower = await _follow(log, start=FIRST + 1)
    await follower.until(lambda: len(follower.seen) == 2)
    assert follower.seen == [FIRST + 1, FIRST + 2]
    await follower.feed.close()


@_check()
async def what_was_acknowledged_is_known_by_term(logs: Logs) -> None:
    log, other = await logs.made(), await logs.made()
    (a,) = logs.threads(0)
    await put(log, a, a, a)
    assert await other.acked(0, 1) is None
    follower = await _follow(log)
    await follower.until(lambda: len(follower.seen) == 3)
    await follower.feed.ack(FIRST + 1)

    async def known() -> bool:
        return await other.acked(0, 1) == FIRST + 1

    await eventually(known)
    assert await other.acked(0, 2) is None
    await follower.feed.close()


@_check()
async def the_feed_of_the_next_term_ends_the_one_before(logs: Logs) -> None:
    here, there = await logs.made(), await logs.made()
    (a,) = logs.threads(0)
    await put(here, a)
    old = await _follow(here)
    await old.until(lambda: old.seen == [FIRST])
    new = await _follow(there, term=2)
    await new.until(lambda: new.seen == [FIRST])
    await _lost(old.feed)
    assert new.feed.lost is None
    assert await there.acked(0, 1) is None
    await new.feed.close()


@_check()
async def two_feeds_of_one_term_do_not_begin_at_different_places(logs: Logs) -> None:
    here, there = await logs.made(), await logs.made()
    follower = await _follow(here)
    with raises(ConfigError):
        await there.feed(0, 1, FIRST + 1, lambda: None)
    await follower.feed.close()


@_check()
async def a_feed_that_is_closed_delivers_no_more(logs: Logs) -> None:
    log = await logs.made()
    (a,) = logs.threads(0)
    follower = await _follow(log)
    await follower.feed.close()
    assert follower.feed.lost is not None
    await put(log, a)
    assert follower.feed.take() == []


@_check()
async def a_feed_is_lost_with_its_log(logs: Logs) -> None:
    log = await logs.made()
    follower = await _follow(log)
    await log.remove()
    await _lost(follower.feed)


@_check()
async def a_feed_waits_for_acknowledgements(logs: Logs) -> None:
    log = await logs.made()
    (a,) = logs.threads(0)
    for _ in range(10):
        await log.publish_batch([Outgoing(a, b"x")] * _MANY, PATIENCE_S)
    follower = await _follow(log)
    # It delivers some, and then holds back.
    await follower.until(lambda: follower.feed.crowded)
    held_back = len(follower.seen)
    assert 0 < held_back < 10 * _MANY
    while len(follower.seen) < 10 * _MANY:
        before = len(follower.seen)
        await follower.feed.ack(follower.seen[-1])
        await follower.until(lambda before=before: len(follower.seen) > before)  # type: ignore[misc]
    assert follower.seen == list(range(FIRST, FIRST + 10 * _MANY))
    assert not follower.feed.crowded or follower.feed.lost is None
    await follower.feed.close()
