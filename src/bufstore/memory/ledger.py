"""The ledger in memory: with `MemoryThreadStore`, a buffered store for tests that need a real log and no Postgres."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from bufstore.buffer.chain import Watermark
from bufstore.buffer.domain import Applies
from bufstore.buffer.lanes import Layout
from bufstore.buffer.ports.ledger import Cursor, Decision, Flushed, FlushFailed, NotOwner, QuarantineFull
from bufstore.buffer.target import Made, Target
from bufstore.config import BufferConfig
from bufstore.memory.quarantine import MemoryParked, apply_batch
from bufstore.memory.waiting import MemoryWaiting


class MemoryLedger:
    """See `bufstore.buffer.ports.ledger.Ledger`."""

    def __init__(self, target: Applies[Any], *, quarantine_max: int = BufferConfig.quarantine_max) -> None:
        self._target = target
        self._quarantine_max = quarantine_max
        self._archived = self._archiving = 0
        self._rows: dict[str, Watermark] = {}
        self._cursors: dict[int, Cursor] = {}
        self._epoch: int | None = None
        #: Threads whose rows somebody else holds: for tests.
        self.locked: set[str] = set()
        self._named: Target | None = None
        self._layout: Layout | None = None
        self._made: Made | None = None
        self._erasures: dict[str, set[str]] = {}
        #: Another text after a failover: for tests.
        self.run = ""
        self.parked = MemoryParked(self._rows, target)
        self.waiting = MemoryWaiting()

    @property
    def connections(self) -> int:
        return 0

    @property
    def changes_of_database(self) -> int:
        return 0

    async def server_run(self) -> str:
        return self.run

    async def open(self) -> None:
        """Nothing to open."""

    async def aclose(self) -> None:
        """Nothing to close."""

    async def setup(self, away_s: float | None = None) -> None:
        """Nothing to create."""

    async def look(self) -> bool:
        """There is nothing to create."""
        return True

    async def epoch(self) -> int | None:
        return self._epoch

    async def set_epoch(self, epoch: int) -> None:
        self._epoch = max(self._epoch or 0, epoch)

    async def target(self) -> Target | None:
        return self._named

    async def claim(self, epoch: int, target: Target) -> Target:
        await self.set_epoch(epoch)
        self._named = self._named or target
        return self._named

    async def layout(self) -> Layout | None:
        return self._layout

    async def set_layout(self, layout: Layout) -> None:
        self._layout = self._layout or layout

    async def made(self) -> Made | None:
        return self._made

    async def note_made(self, made: Made) -> None:
        if self._made is None or self._made.epoch < made.epoch:
            self._made = made

    async def begin_erasure(self, thread_id: str, descendants: Collection[str]) -> list[str]:
        self._erasures.setdefault(thread_id, set()).update(descendants)
        return sorted(self._erasures[thread_id])

    async def end_erasure(self, thread_id: str, descendants: Collection[str]) -> None:
        self._erasures.get(thread_id, set()).difference_update(descendants)

    async def take(self, partitions: Sequence[int], owner: str) -> list[Cursor]:
        for p in partitions:
            old = self._cursors.get(p, Cursor(p, 0, 0, 0))
            self._cursors[p] = Cursor(p, old.term + 1, old.seq, old.id)
        return [self._cursors[p] for p in sorted(partitions)]

    async def cursors(self) -> dict[int, Cursor]:
        return dict(self._cursors)

    async def flushed(self) -> dict[int, int]:
        first = self.waiting.first_positions()
        return {p: min(cursor.seq, first.get(p, cursor.seq + 1) - 1) for p, cursor in self._cursors.items()}

    async def watermark(self, thread_id: str) -> Watermark:
        row = self._rows.get(thread_id, Watermark())
        last = self.waiting.last_position(thread_id)
        return msgspec.structs.replace(row, waits_to=last) if last else row

    async def watermarks(self, thread_ids: Sequence[str]) -> dict[str, tuple[Watermark, int]]:
        found = {t: await self.watermark(t) for t in thread_ids}
        return {t: (w, self.parked.given_up.get(t, 0)) for t, w in found.items() if t in self._rows or w.waits_to}

    async def broken(self) -> frozenset[str]:
        return frozenset(t for t, watermark in self._rows.items() if watermark.broken_since is not None)

    async def flush(
        self,
        held: Sequence[Cursor],
        threads: Sequence[str],
        decide: Callable[[Mapping[str, Watermark]], Decision],
        *,
        probe: int = 0,
        size: int = 0,
    ) -> Flushed:
        for cursor in held:
            if self._cursors.get(cursor.partition) != cursor:
                raise NotOwner(cursor.partition, self._cursors.get(cursor.partition), cursor)
        watermarks = {t: self._rows.get(t, Watermark()) for t in threads if t not in self.locked}
        decision = decide(watermarks)
        room = self._quarantine_max - len(self.parked.entries)
        if decision.parked and len(decision.parked) > room:
            raise QuarantineFull(max(0, room), self._quarantine_max)
        refused: dict[str, FlushFailed] = {}
        for part in [[change] for change in decision.batch] if probe else [decision.batch]:
            try:
                await apply_batch(self._target, part)
            except FlushFailed as e:
                if not probe or not e.verdict.of_statement:
                    raise
                refused[part[0].thread_id] = e
        if refused:
            decision = decide({t: watermarks[t] for t in watermarks.keys() - refused.keys()})
        self.waiting.write(decision.waiting, decision.left)
        self._rows |= decision.watermarks
        self._cursors |= {cursor.partition: cursor for cursor in decision.cursors}
        self.parked.park(decision.parked)
        return Flushed(decision, set(threads) - watermarks.keys(), refused)

    async def tombstones(self, below: int, after: str, limit: int) -> list[tuple[int, str]]:
        found = sorted(
            t for t, r in self._rows.items() if r.gone and not r.producers and r.flushed_seq < below and t > after
        )
        return [(self._rows[t].flushed_seq, t) for t in found[:limit]]

    async def bury(self, tombstones: Sequence[tuple[int, str]]) -> None:
        needed = {e.thread_id for e in self.parked.entries.values()} | {t for t, _ in self.waiting.entries}
        for seq, thread_id in tombstones:
            watermark = self._rows.get(thread_id, Watermark())
            if watermark.gone and watermark.flushed_seq == seq and thread_id not in needed and not watermark.producers:
                del self._rows[thread_id]
                self.parked.given_up.pop(thread_id, None)

    async def archived(self) -> int:
        return self._archived

    async def set_archived(self, position: int) -> None:
        self._archived = max(self._archived, position)

    async def begin_archiving(self, position: int) -> None:
        self._archiving = max(self._archiving, position)

    async def may_be_archived(self) -> int:
        return max(self._archived, self._archiving)

    async def quarantined(self) -> int:
        return len(self.parked.entries)
