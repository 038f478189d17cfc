"""Feeds of partitions from the one feed of groups that a process has.

Each group is delivered once to a process, which gives the entries of each partition to the feed of that partition.
What the server delivers ahead is bounded by what is not acknowledged: a group is acknowledged when each partition that
has entries in it has passed them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from bufstore.buffer.places import group_of
from bufstore.errors import BufstoreError
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
        self.wake = wake
        self._arrived: list[StoredMessage] = []
        self._lost: str | None = None

    @property
    def lost(self) -> str | None:
        return self._lost or self._source.lost

    def take(self) -> list[StoredMessage]:
        arrived, self._arrived = self._arrived, []
        return arrived

    @property
    def through(self) -> StoredMessage | None:
        """The last entry of the log, of any partition, if nothing of this one waits to be taken before it."""
        return None if self._arrived or self.lost is not None else self._source.last

    async def more(self) -> None:
        """An entry is never in pieces here."""

    @property
    def crowded(self) -> bool:
        return self._source.crowded

    async def go_on(self, seq: int) -> None:
        await self.ack(seq)

    async def ack(self, seq: int) -> None:
        self.acked = max(self.acked, min(seq, self.delivered))
        await self._source.acknowledge()

    async def close(self) -> None:
        self.lose("closed")
        await self._source.remove(self)

    @property
    def lost_itself(self) -> str | None:
        """Why this feed is lost, whatever becomes of the groups."""
        return self._lost

    def lose(self, reason: str) -> None:
        """Deliver no more."""
        if self._lost is None:
            self._lost = reason
            self.wake()

    def add(self, message: StoredMessage) -> None:
        """Deliver an entry."""
        if message.seq > self.delivered and self._lost is None:
            self.delivered = message.seq
            self._arrived.append(message)


class Feeds:
    """All partitions that a process follows, and the feed of groups behind them."""

    def __init__(self, follow: Callable[[int, Callable[[], None]], Awaitable[StreamFeed]], split: Split) -> None:
        """`follow`: begins a feed of groups at this sequence."""
        self._follow, self._split = follow, split
        self._feeds: dict[int, PartitionFeed] = {}
        self._groups: StreamFeed | None = None
        #: The last group that was delivered; and which feeds have got all of theirs up to there.
        self._delivered = 0
        self._covered: set[PartitionFeed] = set()
        #: Groups that are not acknowledged: their sequences, and up to which place each partition has entries in them.
        self._open: deque[tuple[int, dict[int, int]]] = deque()
        #: The last entry that was given out.
        self.last: StoredMessage | None = None
        self._task: asyncio.Task[None] | None = None
        self._something = asyncio.Event()
        self._changing = asyncio.Lock()
        self._lost: str | None = None

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
        """Deliver a partition's entries from the place `start`. Raises LogUnavailable."""
        if (before := self._feeds.get(partition)) is not None:
            before.lose("the partition is followed anew")
        feed = self._feeds[partition] = PartitionFeed(self, partition, start, wake)
        async with self._changing:
            if self._feeds.get(partition) is feed and (self.lost is not None or not self._covers(feed)):
                try:
                    await self._begin()
                except BaseException:
                    if self._feeds.get(partition) is feed:
                        del self._feeds[partition]
                    raise
        return feed

    def _covers(self, feed: PartitionFeed) -> bool:
        """Whether everything that the feed wants is still to be delivered, or was delivered to it."""
        if self._groups is None:
            return False
        return feed in self._covered or group_of(feed.delivered + 1) > self._delivered

    async def _begin(self) -> None:
        """Have groups delivered from where the first feed needs them. What comes again is known by its place."""
        await self._end()
        self._covered = {feed for feed in self._feeds.values() if feed.lost_itself is None}
        start = min(group_of(feed.acked + 1) for feed in self._covered)
        self._lost = self.last = None
        self._delivered = start - 1
        self._groups = await self._follow(start, self._something.set)
        self._task = asyncio.create_task(self._guarded(self._groups), name="bufstore-feeds")

    async def _guarded(self, groups: StreamFeed) -> None:
        try:
            await self._deliver(groups)
        except (BufstoreError, AppendUnknown) as e:
            self._lost = f"the groups cannot be read: {e}"
        except Exception as e:
            _log.exception("cannot give out the entries of a group", extra={"action": "flusher_error"})
            self._lost = f"unexpected {type(e).__name__} in a group"
        finally:
            for feed in self._feeds.values():
                feed.wake()

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
                self.last, self._delivered = entries[-1][1], message.seq
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
            if any(
                (feed := self._feeds.get(p)) is not None and feed.lost is None and feed.acked < place
                for p, place in touched.items()
            ):
                break
            self._open.popleft()
            passed = seq
        if passed and self._groups is not None:
            await self._groups.ack(passed)

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
        for feed in list(self._feeds.values()):
            feed.lose("closed")
        self._feeds.clear()
        await self._end()

    async def _end(self) -> None:
        groups, self._groups = self._groups, None
        task, self._task = self._task, None
        self._open.clear()
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if groups is not None:
            await groups.close()
