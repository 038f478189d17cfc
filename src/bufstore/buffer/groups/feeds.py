"""Feeds of partitions from the one feed of groups that a process has.

Each group is delivered once to a process, which gives the entries of each partition to the feed of that partition
(`bufstore.buffer.groups.delivery`).

A partition may need groups that the others have had already, because it was taken over from another process, or was set
aside. It gets them in a second delivery, up to where the common delivery stands, and then goes on with the common one:
the others wait neither for it nor for what it has missed. There are never more than these two, because each has a
bounded number of bytes on its way, and the server closes the connection of a client to which it owes too many. A
partition that comes too late for the second delivery is served when that one has ended.

A partition that comes a moment after the common delivery has begun gets no second one, which might go over a whole
backlog beside the common one and never catch up. The common one starts over for all, and a partition that had some of
it already gets nothing twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from bufstore.buffer.groups.delivery import Delivery, Split, StreamFeed
from bufstore.buffer.places import group_of
from bufstore.errors import BufstoreError, Closed
from bufstore.jetstream.messages import AppendUnknown, StoredMessage
from bufstore.log_lines import LogLines
from bufstore.tasks import end, spawn

_log = LogLines(__name__)


class PartitionFeed:
    """The entries of one partition; see `bufstore.buffer.ports.log.Feed`."""

    def __init__(self, source: Feeds, partition: int, start: int, wake: Callable[[], None]) -> None:
        self._source = source
        self.partition = partition
        #: The place up to which everything was delivered, or was not to be delivered.
        self.delivered = start - 1
        #: The place up to which everything is acknowledged.
        self.acked = start - 1
        #: The delivery that serves this feed without a gap; None: none does now.
        self.delivery: Delivery | None = None
        #: Whether the feed is set aside, until its partition has passed what was delivered.
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
        """Whether the feed's owner may know that nothing more comes."""
        return self._lost is not None

    def take(self) -> list[StoredMessage]:
        arrived, self._arrived = self._arrived, []
        return arrived

    @property
    def through(self) -> StoredMessage | None:
        """The last entry that was delivered, of any partition; None if one of this partition is still to be taken."""
        if self._arrived or self.delivery is None or self.lost is not None:
            return None
        return self.delivery.last

    @property
    def crowded(self) -> bool:
        return self.delivery is None or self.delivery.crowded  # set aside, or waiting for its turn

    def passed(self, seq: int) -> None:
        # An idle partition's cursor goes to another partition's entry: up to there, nothing is to be delivered.
        self.acked = max(self.acked, seq)
        self.delivered = max(self.delivered, seq)

    async def ack(self, seq: int) -> None:
        self.passed(seq)
        if self.aside and self.acked >= self.delivered:
            self._source.resume(self)
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

    def doubt(self, reason: str) -> None:
        # A new feed alone would be served by the same delivery.
        if self.delivery is not None:
            self.delivery.lose(reason)

    def set_aside(self) -> None:
        """Deliver nothing more until the partition has passed everything that was delivered."""
        self.aside, self.delivery = True, None

    def add(self, message: StoredMessage) -> None:
        """Deliver an entry."""
        if message.seq > self.delivered and self._lost is None:
            self.delivered = message.seq
            self._arrived.append(message)


class Feeds:
    """All partitions that a process follows, and the feed of groups behind them."""

    def __init__(
        self, follow: Callable[[int, Callable[[], None]], Awaitable[StreamFeed]], split: Split, large_bytes_max: int
    ) -> None:
        """`follow`: begins a feed of groups at a sequence. `large_bytes_max`: see `Delivery`."""
        self._follow, self._split, self._large_bytes_max = follow, split, large_bytes_max
        self._feeds: dict[int, PartitionFeed] = {}
        self._common: Delivery | None = None
        #: The second delivery, which brings partitions up to where the common one stands; None: there is none.
        self._late: Delivery | None = None
        #: Deliveries that have ended by themselves, or were replaced; they are still to be closed.
        self._past: list[Delivery] = []
        #: The task that ends deliveries with nothing more to do, and serves the feeds that waited for that.
        self._tidying: asyncio.Task[None] | None = None
        #: The feeds whose turn came in that task.
        self._tried = set[PartitionFeed]()
        self._changing = asyncio.Lock()
        self._closed = False

    async def open(self, partition: int, start: int, wake: Callable[[], None]) -> PartitionFeed:
        """Deliver a partition's entries from the place `start` on. Raises LogUnavailable, Closed."""
        if (before := self._feeds.get(partition)) is not None:
            before.lose("the partition is followed again")
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

    def resume(self, feed: PartitionFeed) -> None:
        """Deliver again to a feed that was set aside, or have it lost.

        This takes a consumer, which a server may be slow to make. The caller acknowledges for all partitions, so it
        does not wait for that.
        """
        feed.aside = False
        self._tried.discard(feed)  # it may have been served, and set aside, while another is served
        self._tidy_soon()

    async def _attach(self, feed: PartitionFeed) -> None:
        async with self._changing:
            if self._closed:
                raise Closed("the store is closed")
            await self._end_useless()
            if feed.delivery is None:  # else it was served together with another that was opened at the same time
                await self._serve(feed)

    async def _serve(self, feed: PartitionFeed) -> None:
        """Have this feed served, and all that wait like it; later, if both deliveries are further already."""
        for delivery in (self._common, self._late):
            if delivery is not None and group_of(feed.acked + 1) >= delivery.next:
                delivery.serve(feed)
                return
        if self._late is not None:
            return  # once that one has nothing more to do, `_joins` has this feed served
        feeds = self._unserved()
        first = min((group_of(f.acked + 1) for f in feeds), default=0)
        delivery = Delivery(self._split, self._joins, self._large_bytes_max)
        await delivery.begin(lambda wake: self._follow(first, wake), first)
        common = self._common
        if common is not None and common.has_just_begun(first):
            feeds += common.feeds.values()
            common.feeds.clear()
            self._past.append(common)
            self._common = common = None
        for one in feeds:
            if self._feeds.get(one.partition) is one and not one.ended:  # it was not closed meanwhile
                delivery.serve(one)
        if common is None:
            self._common = delivery
        else:
            self._late = delivery
        await self._end_useless()

    def _unserved(self) -> list[PartitionFeed]:
        return [feed for feed in self._feeds.values() if feed.delivery is None and not (feed.ended or feed.aside)]

    async def _end_useless(self) -> None:
        """End deliveries that deliver no more, or to nobody. Feeds that have not noticed yet are served by another."""
        common, late = self._common, self._late
        if common is not None and (common.lost is not None or not common.feeds):
            for feed in list(common.feeds.values()):
                if not feed.ended:
                    feed.delivery = None
                    self._tidy_soon()
            self._common = None
            self._past.append(common)
        if late is not None and (late.lost is not None or not late.feeds):
            self._late = None
            self._past.append(late)
            if self._unserved():
                self._tidy_soon()
        while self._past:
            await self._past[-1].close()
            self._past.pop()

    def _joins(self, delivery: Delivery) -> bool:
        """Whether a delivery has nothing more to do, because the feeds that it served have what the others had."""
        common = self._common
        if delivery is not self._late or (delivery.feeds and common is not None and delivery.next < common.next):
            return False
        self._late = None
        self._tidy_soon()
        if delivery.feeds and (common is None or common.lost is not None):
            if common is not None:
                self._past.append(common)
            self._common = delivery
            return False
        for feed in list(delivery.feeds.values()):
            if common is not None and not feed.ended:
                common.serve(feed)
        delivery.feeds.clear()
        self._past.append(delivery)
        return True

    def _tidy_soon(self) -> None:
        if not self._closed and (self._tidying is None or self._tidying.done()):
            self._tidying = spawn(self._tidy(), name="bufstore-feeds-tidy")
            self._tidying.add_done_callback(self._tidied)

    def _tidied(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is not None:  # perhaps before it began
            for feed in self._unserved():
                feed.lose("the task that serves feeds was cancelled or interrupted")

    async def _tidy(self) -> None:
        """End deliveries that have nothing more to do; serve the feeds that waited for that, or have them lost."""
        self._tried.clear()
        async with self._changing:
            await self._end_useless()
            while not self._closed and (feeds := [f for f in self._unserved() if f not in self._tried]):
                self._tried.add(feeds[0])
                try:
                    await self._serve(feeds[0])
                    if self._late is not None or feeds[0] not in self._tried.intersection(self._unserved()):
                        continue
                    reason = "the groups cannot be followed: their delivery ended at once"
                except (BufstoreError, AppendUnknown) as e:
                    reason = f"the groups cannot be followed: {e}"
                except Exception as e:
                    _log.exception("cannot follow the groups", extra={"action": "flusher_error"})
                    reason = f"the groups cannot be followed: unexpected {type(e).__name__}"
                for feed in feeds:
                    feed.lose(reason)

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
        await end(self._tidying)
        async with self._changing:
            await self._end_useless()
