"""Keeps the entries of waiting threads in the ledger, where the cursor has passed them and they hold up nobody.

A thread that waits for longer than a moment waits for something that lasts. From then on its entries are written into
the ledger (`bufstore.buffer.ports.waiting`) as they come, in a transaction that lets the cursor pass them. So the feed
is free for the other threads, and the log may let go of these entries. When the thread's turn comes, they are read from
the ledger, a part at a time. Entries of the thread that arrive meanwhile queue behind them.

Bounded: the log keeps all bytes but its `outage_reserve` for flushed entries, and each partition has an equal share of
them. Once a partition has that many bytes in the ledger, no more of its entries pass. Then its cursor stops, and soon
its feed does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bufstore.buffer.flush.deciding import Threads
from bufstore.buffer.flush.owned_partition import OwnedPartition, size_of
from bufstore.buffer.flush.waiting import Waiting
from bufstore.buffer.parts import AnyParts
from bufstore.buffer.ports.waiting import WaitingEntry

#: How many seconds a thread waits in memory first: most locks last for a moment, too short to write and read back.
_IN_MEMORY_S = 0.5
#: The most entries of one thread that are read at a time.
_PART = 1000


class Queues:
    """Knows which threads have entries in the ledger, of all partitions of one owner."""

    def __init__(self, parts: AnyParts, owned_partitions: Mapping[int, OwnedPartition], waiting: Waiting) -> None:
        self._ledger, self._subjects = parts.ledger, parts.subjects
        self._owned = owned_partitions
        self._waiting = waiting
        config = parts.config
        self._bytes_max = int((1 - config.outage_reserve) * config.log.max_bytes / config.log.partitions)
        #: About how many bytes are read or written at a time.
        self._part_bytes = config.flush_max_bytes // 4
        #: The partitions whose threads were put into the schedule.
        self._adopted: dict[int, OwnedPartition] = {}
        #: Until then nothing is written, because a write failed.
        self.not_before = 0.0
        #: Threads of which even a single entry could not be written, and until when that is not tried again.
        self._in_memory: dict[str | None, float] = {}

    def adopt(self, now: float) -> None:
        """Put the threads that wait in newly taken partitions into the schedule, and let go of those given up."""
        self._adopted = {p: owned for p, owned in self._adopted.items() if self._owned.get(p) is owned}
        for partition, owned in self._owned.items():
            if self._adopted.get(partition) is not owned:
                self._adopted[partition] = owned
                for thread_id, queued in owned.queues.items():
                    if thread_id not in self._waiting:
                        self._waiting.add(thread_id, queued.reason, now, cause=queued.reason)

    def __contains__(self, thread_id: str | None) -> bool:
        owned = self._owner(thread_id)
        return owned is not None and thread_id in owned.queues

    def takes(self, owned: OwnedPartition, thread_id: str | None, now: float) -> bool:
        """Return whether entries of the thread that are in memory may pass into the ledger now."""
        if thread_id is None or thread_id not in self._waiting or now < self.not_before:
            return False
        if owned.queued_bytes >= self._bytes_max or now < self._in_memory.get(thread_id, 0.0):
            return False
        return thread_id in owned.queues or now - self._waiting.since(thread_id) >= _IN_MEMORY_S

    def keep_in_memory(self, thread_id: str | None, now: float, until: float) -> None:
        """Let no entry of the thread pass into the ledger until then, because it cannot be written."""
        self._in_memory = {t: at for t, at in self._in_memory.items() if at > now} | {thread_id: until}

    def full(self) -> list[int]:
        """Return the partitions of which no more entries may pass into the ledger."""
        return [p for p, owned in sorted(self._owned.items()) if owned.queued_bytes >= self._bytes_max]

    def next_in(self, room: int, now: float) -> list[WaitingEntry]:
        """Return the entries to write into the ledger next, at most `room`."""
        chosen: list[WaitingEntry] = []
        if not self._waiting:  # the usual case, without a look at all entries
            return chosen
        size = 0
        for partition, owned in self._owned.items():
            space = self._bytes_max - owned.queued_bytes
            for item in owned.pending.values():
                if len(chosen) >= room or size >= self._part_bytes:
                    return chosen
                if space <= 0:
                    break
                if self.takes(owned, item.thread_id, now):
                    chosen.append(WaitingEntry(item, partition, self._waiting.reason(item.thread_id)))
                    size += size_of(item)
                    space -= size_of(item)
        return chosen

    async def read(self, thread_ids: Sequence[str], entries: int) -> Threads:
        """Return the first entries of these threads, about `entries` in all. Raises what the ledger raises."""
        each = max(1, min(_PART, entries // max(len(thread_ids), 1)))
        items = await self._ledger.waiting.first(thread_ids, each, self._part_bytes)
        found: Threads = {}
        for thread_id in thread_ids:
            owned = self._owner(thread_id)
            if owned is None or thread_id not in owned.queues:
                continue  # the partition was given up meanwhile
            if not items:
                owned.doubt = (
                    f"the ledger has no waiting entries of thread {thread_id!r}, although there should be some"
                )
            if thread_id in items:
                owned.recall(items[thread_id])
                found[thread_id] = list(items[thread_id])
        return found

    def let_go(self) -> None:
        """Forget the entries that were read and are not settled; they are read again later."""
        for owned in self._owned.values():
            owned.recalled.clear()

    def _owner(self, thread_id: str | None) -> OwnedPartition | None:
        return self._owned.get(self._subjects.partition(thread_id)) if thread_id is not None else None
