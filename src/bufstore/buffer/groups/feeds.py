"""Feeds of partitions from the one feed of groups that a process has.

Each group is delivered once to a process, which gives the entries of each partition to the feed of that partition
(`bufstore.buffer.groups.delivery`).

A partition that needs groups which the others have had already (it was taken over from another process, or was set
aside) gets them in a delivery of its own, up to where the common one stands, and then goes on with that: the others
wait neither for it nor for what it has missed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from bufstore.buffer.groups.delivery import Delivery, Split, StreamFeed
from bufstore.buffer.places import group_of
from bufstore.errors import BufstoreError, Closed
from bufstore.jetstream.messages import StoredMessage


class PartitionFeed:
    """The entries of one partition; see `bufstore.buffer.ports.log.Feed`."""

    def __init__(self, source: Feeds, partition: int, start: int, wake: Callable[[], None]) -> None:
        self._source = source
        self.partition = partition
        #: Everything up to here was delivered, or was not to be.
        self.delivered = start - 1
        #: Everything up to here is acknowledged.
        self.acked = start - 1
        #: What delivers to it, from its start on, so that it misses none.
        self.delivery: Delivery | None = None
        #: Whether it is set aside, until it has passed what was delivered.
        self.aside = False
        self.wake = wake
        self._arrived: list[StoredMessage] = []
        self._lost: str | None = None

    @property
    def lost(self) -> str | None:
        if self._lost is None and self.delivery is not None:
            self._lost = self.delivery.lost
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
        if self._arrived or self.delivery is None or self.lost is not None:
            return None
        return self.delivery.last

    @property
    def crowded(self) -> bool:
        return self.aside or (self.delivery is not None and self.delivery.crowded)

    async def ack(self, seq: int) -> None:
        # The cursor of an idle partition goes to an entry of another: there is nothing to deliver up to there.
        self.acked = max(self.acked, seq)
        self.delivered = max(self.delivered, seq)
        if self.aside and self.acked >= self.delivered:
            await self._source.resume(self)
        elif self.delivery is not None:
            await self.delivery.acknowledge()

    async def close(self) -> None:
        self.lose("closed")
        await self._source.remove(self)

    def lose(self, reason: str) -> None:
        """Deliver no more."""
        if self._lost is None:
            self._lost = reason
            self.wake()

    def set_aside(self) -> None:
        """Deliver nothing more until everything is passed that was delivered."""
        self.aside, self.delivery = True, None

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
        self._common: Delivery | None = None
        #: Those that bring partitions up to where the common one stands.
        self._late: set[Delivery] = set()
        self._changing = asyncio.Lock()
        self._closed = False

    async def open(self, partition: int, start: int, wake: Callable[[], None]) -> PartitionFeed:
        """Deliver a partition's entries from the place `start` on. Raises LogUnavailable, Closed."""
        if (before := self._feeds.get(partition)) is not None:
            before.lose("the partition is followed anew")
            self._leave(before)
        feed = self._feeds[partition] = PartitionFeed(self, partition, start, wake)
        try:
            await self._attach(feed)
        except BaseException:
            if self._feeds.get(partition) is feed:
                del self._feeds[partition]
            self._leave(feed)
            raise
        return feed

    async def resume(self, feed: PartitionFeed) -> None:
        """Deliver again to a feed that was set aside, or have it lost."""
        feed.aside = False
        try:
            await self._attach(feed)
        except BufstoreError as e:
            feed.lose(f"the groups cannot be followed again: {e}")
        except BaseException:
            feed.lose("the groups cannot be followed again")
            raise

    async def _attach(self, feed: PartitionFeed) -> None:
        async with self._changing:
            if self._closed:
                raise Closed("the store is closed")
            if feed.delivery is not None:  # with another that was opened at the same time
                return
            await self._end_useless()
            common = self._common
            if common is not None and group_of(feed.acked + 1) >= common.next:
                common.serve(feed)
                return
            feeds = [f for f in self._feeds.values() if f.delivery is None and not (f.ended or f.aside)]
            first = min((group_of(f.acked + 1) for f in feeds), default=0)
            delivery = Delivery(self._split, self._joins)
            await delivery.begin(lambda wake: self._follow(first, wake), first)
            for one in feeds:
                if self._feeds.get(one.partition) is one and not one.ended:  # nor was it closed meanwhile
                    delivery.serve(one)
            if common is None:
                self._common = delivery
            else:
                self._late.add(delivery)

    async def _end_useless(self) -> None:
        """End what delivers no more, or to nobody. Feeds that have not looked yet are served by the next delivery."""
        common = self._common
        if common is not None and (common.lost is not None or not common.feeds):
            for feed in list(common.feeds.values()):
                if not feed.ended:
                    feed.delivery = None
            self._common = None
            await common.close()
        for late in [late for late in self._late if late.lost is not None or not late.feeds]:
            self._late.discard(late)
            await late.close()

    def _joins(self, delivery: Delivery) -> bool:
        """Whether a delivery has nothing more to do: those that it served have what the others had."""
        common = self._common
        if delivery is common:
            return False
        if delivery.feeds and (common is None or common.lost is not None or delivery.next < common.next):
            return False
        for feed in list(delivery.feeds.values()):
            if common is not None and not feed.ended:
                common.serve(feed)
        delivery.feeds.clear()
        return True

    def _leave(self, feed: PartitionFeed) -> None:
        if feed.delivery is not None and feed.delivery.feeds.get(feed.partition) is feed:
            del feed.delivery.feeds[feed.partition]

    async def remove(self, feed: PartitionFeed) -> None:
        """Deliver this partition no more."""
        self._leave(feed)
        if self._feeds.get(feed.partition) is feed:
            del self._feeds[feed.partition]
        if feed.delivery is not None and feed.delivery.feeds:
            await feed.delivery.acknowledge()
        else:
            async with self._changing:
                await self._end_useless()

    async def aclose(self) -> None:
        """Deliver nothing any more."""
        self._closed = True
        for feed in list(self._feeds.values()):
            feed.lose("closed")
            self._leave(feed)
        self._feeds.clear()
        async with self._changing:
            await self._end_useless()
