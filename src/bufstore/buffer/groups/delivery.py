"""One feed of groups, given out by partition.

What the server delivers ahead is bounded by what is not acknowledged: a group is acknowledged when each partition that
has entries in it, and gets them from here, has passed them. A large entry's payload is not in its group; so there is a
bound of its own for those that were given out and are not acknowledged.

A partition that passes nothing while others do would soon stop them all. It is set aside: nothing more is delivered to
it, and nothing waits for it, until it has passed what it has.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import TYPE_CHECKING, Protocol

from bufstore.buffer.places import group_of
from bufstore.errors import BufstoreError
from bufstore.jetstream.messages import AppendUnknown, StoredMessage
from bufstore.log_lines import LogLines
from bufstore.tasks import end, set_within, spawn

if TYPE_CHECKING:
    from bufstore.buffer.groups.feeds import PartitionFeed

_log = LogLines(__name__)

#: Returns the sequence of the group before this one (0: it names none), the entries of a message that belong to these
#: partitions, and its last entry whatever partition that belongs to (its position and id are what counts then), each
#: with its partition.
Split = Callable[[StoredMessage, Collection[int]], Awaitable[tuple[int, Sequence[tuple[int, StoredMessage]]]]]

#: How many groups apart two cursors still count as near: those of a process that starts are hardly ever the same.
_BEHIND_MAX = 256
#: How long large entries that are not passed may keep all partitions from getting more. A flush takes less.
_STOPPED_S = 3.0


class LostAgain(str):
    """Why a feed is lost, if the next one will be lost, too, with its first ack, until somebody changes the reason."""

    __slots__ = ()


class StreamFeed(Protocol):
    """The messages of one subject from a position on, in order, without a hole, until it is lost.

    What it delivers ahead of what is acknowledged is bounded.
    """

    @property
    def lost(self) -> str | None:
        """Why it can deliver no more (a hole, a lost connection, a deleted consumer), or None."""

    @property
    def crowded(self) -> bool:
        """Whether half as many messages are unacknowledged as may be."""

    def take(self) -> list[StoredMessage]:
        """What has arrived since the last call."""

    async def ack(self, seq: int) -> None:
        """Acknowledge everything up to the message with this sequence."""

    async def close(self) -> None:
        """Stop and remove the consumer."""


class Delivery:
    """A feed of groups, and the partitions that it serves."""

    def __init__(self, split: Split, done: Callable[[Delivery], bool], large_bytes_max: int) -> None:
        """`done`: asked after each group; says whether this one has nothing more to do.

        `large_bytes_max`: no large entry is given out while those that are not acknowledged have so many bytes.
        """
        self._split, self._done, self._large_bytes_max = split, done, large_bytes_max
        #: The feeds that it serves, by partition.
        self.feeds: dict[int, PartitionFeed] = {}
        #: The least sequence that the next group can have.
        self.next = 0
        #: The sequence at which it began; None before that, and once something of it is acknowledged.
        self._began: int | None = None
        #: The last entry that was given out.
        self.last: StoredMessage | None = None
        #: Groups that are not acknowledged: their sequences, up to which place each partition has entries in them, and
        #: the bytes of their entries that stand elsewhere in the log.
        self._open: deque[tuple[int, dict[int, int], int]] = deque()
        self._large_bytes = 0
        self._groups: StreamFeed | None = None
        self._task: asyncio.Task[None] | None = None
        self._something = asyncio.Event()
        self._lost: str | None = None

    async def begin(self, follow: Callable[[Callable[[], None]], Awaitable[StreamFeed]], first: int) -> None:
        """Follow the groups from this sequence on. Raises LogUnavailable."""
        self.next = self._began = first
        self._groups = await follow(self._something.set)
        self._task = spawn(self._guarded(self._groups), name="bufstore-feeds")

    def serve(self, feed: PartitionFeed) -> None:
        """Deliver to this feed what comes from now on."""
        self.feeds[feed.partition] = feed
        feed.delivery = self

    @property
    def lost(self) -> str | None:
        """Why nothing more can be delivered, or None."""
        if self._lost is None and self._groups is not None:
            self._lost = self._groups.lost
        return self._lost

    def lose(self, reason: str) -> None:
        """Deliver no more, and have all feeds that it serves lost: no doubt about this one is held against the next."""
        self._lost = self._lost or reason
        for feed in self.feeds.values():
            feed.lose(reason)

    def has_just_begun(self, first: int) -> bool:
        """Whether beginning anew at `first` repeats little more than what is on its way."""
        return self._began is not None and self._began - first <= _BEHIND_MAX

    @property
    def crowded(self) -> bool:
        """See `bufstore.buffer.ports.log.Feed`."""
        if 2 * self._large_bytes > self._large_bytes_max:
            return True
        return self._groups is not None and self._groups.crowded

    async def _guarded(self, groups: StreamFeed) -> None:
        try:
            if await self._deliver(groups):
                return
            reason = groups.lost or "closed"
        except (BufstoreError, AppendUnknown) as e:
            reason = f"the groups cannot be read: {e}"
        except Exception as e:
            _log.exception("cannot give out the entries of a group", extra={"action": "flusher_error"})
            reason = f"unexpected {type(e).__name__} in a group"
        self._lost = reason
        for feed in self.feeds.values():
            feed.wake()

    async def _deliver(self, groups: StreamFeed) -> bool:
        """Give out what arrives. Returns True when there is nothing more to do, False when `groups` is lost."""
        while groups.lost is None:
            for message in groups.take():
                if self._large_bytes >= self._large_bytes_max:
                    await self._room(groups)
                await self._give_out(message)
                if self._done(self):
                    self._lost = "another delivers"
                    return True
            await self.acknowledge()
            await self._something.wait()
            self._something.clear()
        return False

    async def _room(self, groups: StreamFeed) -> None:
        """Wait until large entries have passed."""
        loop = asyncio.get_running_loop()
        held, until = self._large_bytes, loop.time() + _STOPPED_S
        while self._large_bytes >= self._large_bytes_max and groups.lost is None:
            self._something.clear()
            await self.acknowledge(late=loop.time() >= until)
            if self._large_bytes < held or loop.time() >= until:
                held, until = self._large_bytes, loop.time() + _STOPPED_S
            if self._large_bytes >= self._large_bytes_max:
                await set_within(self._something, max(0.0, until - loop.time()))
        self._something.set()  # what has arrived meanwhile was not taken

    async def _give_out(self, message: StoredMessage) -> None:
        while True:
            served = frozenset(self.feeds)
            before, entries = await self._split(message, served)
            if served.issuperset(self.feeds):
                break  # else a feed that is served since gets its part of this message, too
        if before >= (first := max(self.next, 1)):
            _log.error(
                "messages %d to %d were removed from the log before they were flushed; run bufstore verify",
                first,
                before,
                extra={"action": "log_gap"},
            )
        touched: dict[int, int] = {}
        large = 0
        for partition, entry in entries:
            touched[partition] = entry.seq
            if len(entry.body) > len(message.body):
                large += len(entry.body)
            if (feed := self.feeds.get(partition)) is not None:
                feed.add(entry)
            self.last = entry
        self.next = message.seq + 1
        self._open.append((message.seq, touched, large))
        self._large_bytes += large
        for partition in touched:
            if (feed := self.feeds.get(partition)) is not None:
                feed.wake()

    async def acknowledge(self, *, late: bool = False) -> None:
        """Acknowledge the groups of which every entry is passed.

        `late`: nothing more can be delivered until the first of them is, and it has been so for a while.
        """
        passed = 0
        while self._open:
            seq, touched, large = self._open[0]
            behind = [
                feed
                for p, place in touched.items()
                if (feed := self.feeds.get(p)) is not None and not feed.ended and feed.acked < place
            ]
            if behind and not (self._stops_others(seq) or (late and self._others_wait(behind))):
                break
            for feed in behind:
                del self.feeds[feed.partition]
                feed.set_aside()
            self._open.popleft()
            if large:
                self._large_bytes -= large
                self._something.set()
            passed = seq
        if passed and self._groups is not None:
            self._began = None
            await self._groups.ack(passed)

    def _stops_others(self, seq: int) -> bool:
        """Whether half of the room is used up, and some partition has passed more than this group, the first open."""
        return self.crowded and any(group_of(feed.acked) > seq for feed in self.feeds.values() if not feed.ended)

    def _others_wait(self, behind: Collection[PartitionFeed]) -> bool:
        """Whether some other partition has passed all that it was given."""
        return any(f.acked >= f.delivered for f in self.feeds.values() if f not in behind and not f.ended)

    async def close(self) -> None:
        """Deliver nothing any more."""
        groups, self._groups = self._groups, None
        task, self._task = self._task, None
        self._lost = self._lost or "closed"
        self._open.clear()
        try:
            await end(task)
        finally:
            if groups is not None:
                with contextlib.suppress(BufstoreError, AppendUnknown):
                    await groups.close()
