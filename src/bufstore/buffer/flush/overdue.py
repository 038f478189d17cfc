"""Notices that a feed delivers nothing although there is something to deliver.

A consumer is led by one node of the cluster and delivers what that node has. A node that was cut off may lead consumers
again long before it has caught up with the log. Until then it sends heartbeats and no messages, as if the partition
were idle. So when a caller asks for a flush that does not come, we ask the log where the partition ends; for feeds that
have been still we also ask now and then on our own. When nothing arrives for a while although the partition goes on,
its feed is doubted: all partitions that the same consumer serves are taken again, with a new consumer, which another
node may lead. A consumer that is still working through entries of other partitions is left alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bufstore.buffer.flush.owned_partition import OwnedPartition
from bufstore.buffer.ports.log import Log
from bufstore.errors import BufstoreError
from bufstore.tasks import set_within

#: A caller that waits for a flush asks again several times within this time.
_ASKED_AGAIN_S = 1.0
#: If callers have asked for a flush for this long and nothing has arrived, we look at the log.
_LOOK_AFTER_S = 0.5
#: The seconds between two looks when nobody asks.
_RARELY_S = 30.0
#: An entry in the log that does not arrive within this time is overdue. The time grows whenever a new consumer did
#: not help: where everything is slow, creating more consumers would only make it slower.
_PATIENCE_S = 1.5
_PATIENCE_GROWS = 1.5
_PATIENCE_MAX_S = 30.0


@dataclass
class _Asked:
    """A request to flush a partition, since which nothing has arrived."""

    owned: OwnedPartition
    delivered: int
    first: float
    last: float


@dataclass
class _Awaited:
    """A partition of which the log holds more than has arrived."""

    owned: OwnedPartition
    end: int
    delivered: int
    since: float


class Overdue:
    """Doubts partitions whose feeds do not deliver what the log holds."""

    def __init__(self, log: Log, owned_partitions: Mapping[int, OwnedPartition], wake: Callable[[], None]) -> None:
        """`wake`: makes the caller call `judge`."""
        self._log = log
        self._owned = owned_partitions
        self._wake = wake
        self._loop = asyncio.get_running_loop()
        self._asked: dict[int, _Asked] = {}
        self._due: set[int] = set()
        self._awaited: dict[int, _Awaited] = {}
        self._patience: dict[int, float] = {}
        #: The feeds as they were at the last look that nobody had asked for.
        self._before: dict[int, tuple[OwnedPartition, int]] = {}
        self._changed = asyncio.Event()

    def ask(self, partition: int) -> None:
        """Note that a caller waits for a flush of this partition; the caller asks again until it is flushed."""
        owned = self._owned.get(partition)
        if owned is None:
            return
        now = self._loop.time()
        asked = self._asked.get(partition)
        if (
            asked is None
            or (asked.owned, asked.delivered) != (owned, owned.delivered)
            or now - asked.last > _ASKED_AGAIN_S
        ):
            self._asked[partition] = _Asked(owned, owned.delivered, now, now)
            return
        asked.last = now
        if now - asked.first >= _LOOK_AFTER_S and partition not in self._awaited:
            asked.first = now
            self._due.add(partition)
            self._changed.set()

    def stop(self) -> None:
        """Make `keep` check whether it is to stop."""
        self._changed.set()

    async def keep(self, stopping: asyncio.Event) -> None:
        """Look at the log: often for partitions that were asked for, rarely for the rest, until `stopping`."""
        rarely_at = self._loop.time() + _RARELY_S
        while not stopping.is_set():
            self._changed.clear()
            due, self._due = self._due, set()
            if self._loop.time() >= rarely_at:
                rarely_at += _RARELY_S
                due |= self._still()
            await self._look(due)
            await set_within(self._changed, rarely_at - self._loop.time())

    def _still(self) -> set[int]:
        """Return the partitions of which nothing has arrived since the last call."""
        now = {p: (owned, owned.delivered) for p, owned in self._owned.items()}
        still = {p for p, seen in now.items() if self._before.get(p) == seen}
        self._before = now
        return still

    async def _look(self, partitions: set[int]) -> None:
        looked_at = {p: self._owned[p] for p in sorted(partitions & self._owned.keys())}
        if not looked_at:
            return
        try:
            ends = await self._log.partition_ends()
        except BufstoreError:
            return  # the caller asks again
        now = self._loop.time()
        for partition, owned in looked_at.items():
            end = ends[partition]
            if end <= owned.delivered:
                self._patience.pop(partition, None)
            elif partition not in self._awaited:
                self._awaited[partition] = _Awaited(owned, end, owned.delivered, now)
        if self._awaited:
            self._wake()

    def judge(self) -> None:
        """Doubt overdue partitions. Call this after collecting everything that the feeds have delivered."""
        now = self._loop.time()
        for partition, awaited in list(self._awaited.items()):
            owned = awaited.owned
            if self._owned.get(partition) is not owned:
                del self._awaited[partition]
            elif owned.delivered >= awaited.end:
                del self._awaited[partition]
                self._patience.pop(partition, None)
            elif (reached := _reached(owned, awaited.end)) > awaited.delivered or owned.feed.crowded:
                # The feed delivers, or has no space to deliver.
                awaited.delivered, awaited.since = reached, now
            elif now - awaited.since >= (patience := self._common_patience()):
                del self._awaited[partition]
                self._patience[partition] = min(patience * _PATIENCE_GROWS, _PATIENCE_MAX_S)
                owned.feed.doubt(
                    f"no entry after {owned.delivered} has arrived, although the log has entries of this partition up "
                    f"to {awaited.end}"
                )

    def _common_patience(self) -> float:
        """Return the longest patience of all partitions: a new consumer is one for all of them."""
        return max((self._patience[p] for p in self._patience.keys() & self._owned.keys()), default=_PATIENCE_S)


def _reached(owned: OwnedPartition, end: int) -> int:
    """Return the position, at most `end`, up to which everything was delivered, of other partitions too."""
    through = owned.feed.through
    return max(owned.delivered, min(through.seq, end) if through is not None else 0)
