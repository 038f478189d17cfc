"""Feeds of partitions from the one feed of groups that a process has.

Each group is delivered once to a process, which gives the entries of each partition to the feed of that partition.
What the server delivers ahead is bounded by what is not acknowledged: a group is acknowledged when each partition that
has entries in it has passed them.

A partition that passes nothing while others do would soon stop them all. It is set aside: nothing more is delivered to
it, and nothing waits for it. Once it has passed what it has, the groups are followed anew from there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from bufstore.buffer.places import group_of
from bufstore.errors import BufstoreError, Closed
from bufstore.jetstream.messages import AppendUnknown, StoredMessage

_log = logging.getLogger(__name__)

#: Gives the entries of a message by partition, and whether it is a group at all.
Split = Callable[[StoredMessage], Awaitable[Sequence[tuple[int, StoredMessage]]]]


class StreamFeed(Protocol):
    """The messages of one subject from a position on, in order, without a hole, until it is lost.

    It delivers so much ahead of what is acknowledged, and no more.
    """

    @property
    def lost(self) -> str | None:
        """Why it can deliver no more (a hole, a lost connection, a deleted consumer), or None."""
        ...

    @property
    def crowded(self) -> bool:
        """Whether half of the messages that may be unacknowledged are."""
        ...

    def take(self) -> list[StoredMessage]:
        """What has arrived since the last call."""
        ...

    async def ack(self, seq: int) -> None:
        """Everything up to the message with this sequence is done."""
        ...

    async def close(self) -> None:
        """Stop and remove the consumer."""
        ...


class PartitionFeed:
    """The entries of one partition; see `bufstore.buffer.ports.log.Feed`."""

    def __init__(self, source: Feeds, partition: int, start: int, wake: Callable[[], None]) -> None:
        self._source = source
        self.partition = partition
        #: Everything up to here was delivered, or was not to be.
        self.delivered = start - 1
        #: Everything up to here is acknowledged.
        self.acked = start - 1
        #: Whether the groups are delivered from its start on, so that it misses none.
        self.attached = False
        #: Whether it is set aside, until it has passed what was delivered.
        self.aside = False
        self.wake = wake
        self._arrived: list[StoredMessage] = []
        self._lost: str | None = None

    @property
    def lost(self) -> str | None:
        if self._lost is None and self.attached:
            self._lost = self._source.lost
        return self._lost

    @property
    def ended(self) -> bool:
        """Whether its owner may know that nothing more comes."""
        return self._lost is not None

    def take(self) -> list[StoredMessage]:
        arrived, self._arrived = self._arrived, []
        return arrived

    @property
    def through(self) -> StoredMessage | None:
        """The last entry of the log, of any partition, if nothing of this one waits to be taken before it."""
        return None if self._arrived or self.aside or self.lost is not None else self._source.last

    @property
    def crowded(self) -> bool:
        return self.aside or self._source.crowded

    async def ack(self, seq: int) -> None:
        # The cursor of an idle partition goes to an entry of another: there is nothing to deliver up to there.
        self.acked = max(self.acked, seq)
        self.delivered = max(self.delivered, seq)
        if self.aside and self.acked >= self.delivered:
            await self._source.resume(self)
        else:
            await self._source.acknowledge()

    async def close(self) -> None:
        self.lose("closed")
        await self._source.remove(self)

    def lose(self, reason: str) -> None:
        """Deliver no more."""
        if self._lost is None:
            self._lost = reason
            self.wake()

    def add(self, message: StoredMessage) -> None:
        """Deliver an entry."""
        if self.attached and message.seq > self.delivered and self._lost is None:
            self.delivered = message.seq
            self._arrived.append(message)


class Feeds:
    """All partitions that a process follows, and the feed of groups behind them."""

    def __init__(self, follow: Callable[[int, Callable[[], None]], Awaitable[StreamFeed]], split: Split) -> None:
        """`follow`: begins a feed of groups at this sequence."""
        self._follow, self._split = follow, split
        self._feeds: dict[int, PartitionFeed] = {}
        self._groups: StreamFeed | None = None
        #: The next group has at least this sequence.
        self._next = 0
        #: Groups that are not acknowledged: their sequences, and up to which place each partition has entries in them.
        self._open: deque[tuple[int, dict[int, int]]] = deque()
        #: The last entry that was given out.
        self.last: StoredMessage | None = None
        self._task: asyncio.Task[None] | None = None
        self._something = asyncio.Event()
        self._changing = asyncio.Lock()
        self._lost: str | None = None
        self._closed = False

    @property
    def lost(self) -> str | None:
        """Why nothing more can be delivered, or None."""
        if self._lost is None and self._groups is not None:
            self._lost = self._groups.lost
        return self._lost

    @property
    def crowded(self) -> bool:
        """See `bufstore.buffer.ports.log.Feed`."""
        return self._groups is not None and self._groups.crowded

    async def open(self, partition: int, start: int, wake: Callable[[], None]) -> PartitionFeed:
        """Deliver a partition's entries from the place `start`. Raises LogUnavailable, Closed."""
        if (before := self._feeds.get(partition)) is not None:
            before.lose("the partition is followed anew")
        feed = self._feeds[partition] = PartitionFeed(self, partition, start, wake)
        try:
            await self._attach(feed, start)
        except BaseException:
            if self._feeds.get(partition) is feed:
                del self._feeds[partition]
            raise
        return feed

    async def resume(self, feed: PartitionFeed) -> None:
        """Deliver again to a feed that was set aside, or have it lost."""
        feed.aside = False
        try:
            await self._attach(feed, feed.acked + 1)
        except BufstoreError as e:
            feed.lose(f"the groups cannot be followed again: {e}")
        except BaseException:
            feed.lose("the groups cannot be followed again")
            raise

    async def _attach(self, feed: PartitionFeed, start: int) -> None:
        async with self._changing:
            if self._closed:
                raise Closed("the store is closed")
            following = self._groups is not None and self.lost is None
            if following and group_of(start) >= self._next:
                feed.attached = True
            if not following or not feed.attached:
                await self._begin()

    async def _begin(self) -> None:
        """Have groups delivered from the first one on that any feed needs.

        What was delivered before comes again, and is known by its place. Feeds that are opened meanwhile are served
        too, so opening many at once follows the groups few times.
        """
        try:
            await self._end()
            feeds = [feed for feed in self._feeds.values() if not feed.ended and not feed.aside]
            self._next = min((group_of(feed.acked + 1) for feed in feeds), default=0)
            self._lost = self.last = None
            self._groups = await self._follow(self._next, self._something.set)
        except BaseException:
            self._lose("the groups cannot be followed")
            raise
        for feed in feeds:
            feed.attached = True
        self._task = asyncio.create_task(self._guarded(self._groups), name="bufstore-feeds")

    def _lose(self, reason: str) -> None:
        self._lost = reason
        for feed in self._feeds.values():
            feed.wake()

    async def _guarded(self, groups: StreamFeed) -> None:
        try:
            await self._deliver(groups)
            reason = groups.lost or "closed"
        except (BufstoreError, AppendUnknown) as e:
            reason = f"the groups cannot be read: {e}"
        except Exception as e:
            _log.exception("cannot give out the entries of a group", extra={"action": "flusher_error"})
            reason = f"unexpected {type(e).__name__} in a group"
        self._lose(reason)

    async def _deliver(self, groups: StreamFeed) -> None:
        while groups.lost is None:
            for message in groups.take():
                touched: dict[int, int] = {}
                entries = await self._split(message)
                for partition, entry in entries:
                    feed = self._feeds.get(partition)
                    touched[partition] = entry.seq
                    if feed is not None:
                        feed.add(entry)
                    self.last = entry
                self._next = message.seq + 1
                self._open.append((message.seq, touched))
                for partition in touched:
                    if (feed := self._feeds.get(partition)) is not None:
                        feed.wake()
            await self.acknowledge()
            await self._something.wait()
            self._something.clear()

    async def acknowledge(self) -> None:
        """Acknowledge the groups of which every entry is passed."""
        passed = 0
        while self._open:
            seq, touched = self._open[0]
            behind = [
                feed
                for p, place in touched.items()
                if (feed := self._feeds.get(p)) is not None and not (feed.ended or feed.aside) and feed.acked < place
            ]
            if behind and not self._stops_others(seq):
                break
            for feed in behind:
                feed.aside, feed.attached = True, False
            self._open.popleft()
            passed = seq
        if passed and self._groups is not None:
            await self._groups.ack(passed)

    def _stops_others(self, seq: int) -> bool:
        """Whether half of the room is used up, and some partition has passed more than this group, the first open."""
        return self.crowded and any(group_of(feed.acked) > seq for feed in self._feeds.values() if not feed.ended)

    async def remove(self, feed: PartitionFeed) -> None:
        """Deliver this partition no more."""
        if self._feeds.get(feed.partition) is feed:
            del self._feeds[feed.partition]
        if not self._feeds:
            async with self._changing:
                if not self._feeds:
                    await self._end()
        else:
            await self.acknowledge()

    async def aclose(self) -> None:
        """Deliver nothing any more."""
        self._closed = True
        for feed in list(self._feeds.values()):
            feed.lose("closed")
        self._feeds.clear()
        async with self._changing:
            await self._end()

    async def _end(self) -> None:
        groups, self._groups = self._groups, None
        task, self._task = self._task, None
        self._open.clear()
        try:
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        finally:
            if groups is not None:
                with contextlib.suppress(BufstoreError, AppendUnknown):
                    await groups.close()
