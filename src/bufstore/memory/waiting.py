"""The entries that wait, in memory, beside `MemoryLedger`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from bufstore.buffer.entry import Item, bytes_of
from bufstore.buffer.ports.waiting import Queue, WaitingEntry, WaitingTotals


class MemoryWaiting:
    """See `bufstore.buffer.ports.waiting.WaitingEntries`."""

    def __init__(self) -> None:
        #: The entries by thread and position, each with the time since which it waits.
        self.entries: dict[tuple[str, int], tuple[WaitingEntry, datetime]] = {}

    def write(self, waiting: Sequence[WaitingEntry], left: Mapping[str, int]) -> None:
        """As part of a flush, remove the entries up to `left`, and add `waiting`: none of these may wait already."""
        assert not any((e.item.thread_id, e.item.seq) in self.entries for e in waiting), "no entry waits twice"
        for thread_id, seq in [key for key in self.entries if key[1] <= left.get(key[0], 0)]:
            del self.entries[thread_id, seq]
        now = datetime.now(UTC)
        for entry in waiting:
            assert entry.item.thread_id is not None
            self.entries[entry.item.thread_id, entry.item.seq] = entry, now

    def first_positions(self) -> dict[int, int]:
        """Return, by partition, the position of the first entry that waits."""
        first: dict[int, int] = {}
        for (_, seq), (entry, _) in self.entries.items():
            first[entry.partition] = min(seq, first.get(entry.partition, seq))
        return first

    def last_position(self, thread_id: str) -> int:
        """Return the position of the thread's last entry that waits; 0: none."""
        return max((seq for t, seq in self.entries if t == thread_id), default=0)

    async def queues(self, partition: int) -> list[Queue]:
        mine = sorted((seq, t, e) for (t, seq), (e, _) in self.entries.items() if e.partition == partition)
        by_thread: dict[str, list[WaitingEntry]] = {}
        for _, thread_id, entry in mine:
            by_thread.setdefault(thread_id, []).append(entry)
        return [
            Queue(t, len(found), sum(bytes_of(e.item) for e in found), min(e.reason for e in found), found[-1].item.seq)
            for t, found in by_thread.items()
        ]

    async def first(self, thread_ids: Sequence[str], entries: int, bytes_: int) -> dict[str, list[Item]]:
        found: dict[str, list[Item]] = {}
        size = 0
        for thread_id in thread_ids:
            for entry in self._of(thread_id)[:entries]:
                if size >= bytes_:
                    return found
                size += bytes_of(entry.item)
                found.setdefault(thread_id, []).append(entry.item)
        return found

    async def of_thread(self, thread_id: str) -> list[Item]:
        return [entry.item for entry in self._of(thread_id)]

    async def threads(self, after: str, limit: int) -> list[str]:
        return sorted({t for t, _ in self.entries if t > after})[:limit]

    async def among(self, thread_ids: Sequence[str]) -> set[str]:
        return {t for t, _ in self.entries} & set(thread_ids)

    async def totals(self) -> WaitingTotals:
        if not self.entries:
            return WaitingTotals()
        reasons = Counter(e.reason for e, _ in self.entries.values())
        return WaitingTotals(
            entries=len(self.entries),
            threads=len({t for t, _ in self.entries}),
            bytes=sum(bytes_of(e.item) for e, _ in self.entries.values()),
            since=min(since for _, since in self.entries.values()),
            reason=reasons.most_common(1)[0][0],
        )

    def _of(self, thread_id: str) -> list[WaitingEntry]:
        return [self.entries[key][0] for key in sorted(key for key in self.entries if key[0] == thread_id)]
