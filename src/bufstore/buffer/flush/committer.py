"""Runs one flush transaction: the decisions on the locked watermarks, the commit, and the acks after it.

`window_flusher` decides which entries are flushed together, and what happens to refused ones.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from bufstore.buffer.chain import Parked, Watermark
from bufstore.buffer.entry import Item, Malformed, items_of
from bufstore.buffer.flush.deciding import Threads, decide_thread, payload_bytes
from bufstore.buffer.flush.owned_partition import OwnedPartition, size_of
from bufstore.buffer.parts import AnyParts
from bufstore.buffer.ports.ledger import Decision, FlushFailed, QuarantineBusy, QuarantineFull
from bufstore.buffer.ports.waiting import WaitingEntry
from bufstore.errors import BufstoreError
from bufstore.failpoints import Failpoint, reach

_FILL_S = 10.0


class NoRoom(Exception):
    """The quarantine has no space for the entries that a flush would park; `parked` counts them by thread."""

    def __init__(self, error: QuarantineFull, parked: Sequence[Parked]) -> None:
        super().__init__(str(error))
        self.room = error.room
        self.busy = isinstance(error, QuarantineBusy)
        self.parked = Counter(p.item.thread_id for p in parked)


class _Gap(Exception):
    """Entries are missing between a watermark and the entries that have arrived; fetch them first."""

    def __init__(self, threads: Mapping[str, int]) -> None:
        super().__init__(f"{len(threads)} threads have gaps")
        self.threads = threads


@dataclass
class WindowOutcome:
    """The threads of which the store took something, and the threads that were left out."""

    taken: set[str] = field(default_factory=set)
    locked: set[str] = field(default_factory=set)
    refused: dict[str | None, FlushFailed] = field(default_factory=dict)
    untried: set[str | None] = field(default_factory=set)

    def add(self, other: WindowOutcome) -> None:
        """Add the outcome of another part of the window."""
        self.taken |= other.taken
        self.locked |= other.locked
        self.refused |= other.refused
        self.untried |= other.untried

    @property
    def left_out(self) -> Set[str | None]:
        """The threads of which nothing was settled."""
        return {*self.locked, *self.refused, *self.untried}


@dataclass(frozen=True)
class Committed:
    """The result of a transaction: its partitions, how many entries it settled, and what became of the threads."""

    owned_partitions: Collection[OwnedPartition]
    entries: int
    decision: Decision
    outcome: WindowOutcome


class Committer:
    """Commits entries of the partitions in `owned_partitions`, which are the ones that this process follows."""

    def __init__(self, parts: AnyParts, owned_partitions: Mapping[int, OwnedPartition]) -> None:
        self._log, self._shared, self._ledger = parts.log, parts.shared, parts.ledger
        self._coalesce = parts.domain.coalesce
        self._subjects = parts.subjects
        self._owned = owned_partitions
        #: The partitions as they were when the window was gathered.
        self._window: Mapping[int, OwnedPartition] = {}
        #: The ids of entries that turned out to be inapplicable, and why, until the entries are parked.
        self.poison: dict[int, str] = {}

    def begin_window(self) -> None:
        """Remember the partitions now: one that is given up or taken again later has other entries."""
        self._window = dict(self._owned)

    async def commit(self, threads: Threads, *, probe: int) -> Committed | None:
        """Flush these threads' entries in one transaction. Returns None if none of the threads are ours any more.

        All entries are settled, except those of threads that are left out. Missing entries are fetched and added to
        `threads`: if one of them is to blame, it must be found too. Raises NoRoom, and what `Ledger.flush` raises.
        """
        complete: set[str] = set()
        parked: list[Parked] = []
        settled: set[int] = set()
        owned_partitions: list[OwnedPartition] = []

        def decide(watermarks: Mapping[str, Watermark]) -> Decision:
            decision = self._decide(threads, complete, watermarks)
            parked[:] = decision.parked
            settled.clear()
            settled.update(i.seq for t, items in threads.items() if t is None or t in watermarks for i in items)
            decision.left = {t: threads[t][-1].seq for t in _queued(owned_partitions, watermarks)}
            decision.cursors = [owned.cursor_after(settled) for owned in owned_partitions]
            return decision

        while True:
            self._leave_lost(threads)
            if not threads:
                return None
            seqs = {item.seq for items in threads.values() for item in items}
            owned_partitions[:] = [
                owned
                for _, owned in sorted(self._owned.items())
                if not (seqs.isdisjoint(owned.pending) and seqs.isdisjoint(owned.recalled))
            ]
            try:
                names = sorted(t for t in threads if t is not None)
                reach(Failpoint.FLUSH_BEFORE)
                held = [owned.cursor for owned in owned_partitions]
                flushed = await self._ledger.flush(held, names, decide, probe=probe, size=payload_bytes(threads))
                break
            except QuarantineFull as e:
                raise NoRoom(e, parked) from e
            except _Gap as gap:
                for thread_id, after in gap.threads.items():
                    threads[thread_id] = await self._fill(thread_id, after, threads[thread_id])
                complete.update(gap.threads)
        # The second line that matters, the commit, is behind us: entries, watermarks and cursor are in Postgres
        # together. Acknowledging before it would lose what a crash rolls back.
        reach(Failpoint.FLUSH_COMMITTED)
        decision, now = flushed.decision, asyncio.get_running_loop().time()
        for owned, cursor in zip(owned_partitions, decision.cursors, strict=True):
            owned.settle(settled, cursor, now)
        taken = {change.thread_id for change in decision.batch}
        outcome = WindowOutcome(
            taken, set(flushed.locked), dict[str | None, FlushFailed](flushed.refused.items()), set(flushed.untried)
        )
        return Committed(owned_partitions, len(settled), decision, outcome)

    async def queue(self, waiting: Sequence[WaitingEntry]) -> None:
        """Write these entries into the ledger to wait there, in one transaction that lets the cursors pass them.

        Raises what `Ledger.flush` raises.
        """
        passed = {entry.item.seq for entry in waiting}
        concerned = [owned for _, owned in sorted(self._owned.items()) if not passed.isdisjoint(owned.pending)]
        decision = Decision(waiting=waiting, cursors=[owned.cursor_after(passed) for owned in concerned])
        held = [owned.cursor for owned in concerned]
        await self._ledger.flush(held, [], lambda _: decision, size=sum(size_of(entry.item) for entry in waiting))
        reach(Failpoint.QUEUE_COMMITTED)
        now = asyncio.get_running_loop().time()
        for owned, cursor in zip(concerned, decision.cursors, strict=True):
            owned.queue([entry for entry in waiting if entry.partition == cursor.partition], cursor, now)
        await self.acknowledge(Committed(concerned, 0, decision, WindowOutcome()))

    async def acknowledge(self, committed: Committed) -> None:
        """Report the commit to all who wait for it or have built on entries that it parked, then ack to JetStream."""
        decision = committed.decision
        with contextlib.suppress(BufstoreError):  # waiters also look into Postgres
            # This goes before the report: a caller that hears of the flush may at once write on a parked entry.
            for thread_id in {p.item.thread_id for p in decision.parked if p.item.thread_id is not None}:
                await self._shared.tell_parked(thread_id)
            await self._shared.report({cursor.partition: cursor.seq for cursor in decision.cursors})
        reach(Failpoint.FLUSH_REPORTED)
        for owned in committed.owned_partitions:
            owned.feed.passed(owned.cursor.seq)
        for owned in committed.owned_partitions:
            await owned.feed.ack(owned.cursor.seq)
        reach(Failpoint.FLUSH_ACKED)

    def partition_of(self, thread_id: str | None, items: Sequence[Item]) -> int:
        """Return the partition of a thread's entries, or of entries that name no thread."""
        if thread_id is not None:
            return self._subjects.partition(thread_id)
        item = items[0]
        assert isinstance(item, Malformed)
        return next((p for p, s in self._window.items() if item.seq in s.pending), -1)

    def _leave_lost(self, threads: Threads) -> None:
        """Remove the threads whose partitions were given up since gathering: they are no longer ours to flush."""
        lost = {p for p, owned in self._window.items() if self._owned.get(p) is not owned}
        for thread_id in [t for t, items in threads.items() if self.partition_of(t, items) in lost] if lost else ():
            del threads[thread_id]

    def _decide(self, threads: Threads, complete: Set[str], watermarks: Mapping[str, Watermark]) -> Decision:
        batch = []
        new_rows: dict[str, Watermark] = {}
        parked: list[Parked] = []
        gaps: dict[str, int] = {}
        for thread_id, items in threads.items():
            if thread_id is None:
                parked += [Parked(item, item.cause) for item in items if isinstance(item, Malformed)]
                continue
            watermark = watermarks.get(thread_id)
            if watermark is None:  # left out
                continue
            todo, change = decide_thread(
                thread_id, watermark, items, self.poison, self._coalesce, complete=thread_id in complete
            )
            if todo.gap_before is not None:
                gaps[thread_id] = watermark.flushed_seq
                continue
            if change is not None:
                batch.append(change)
            new_rows[thread_id] = todo.watermark
            parked += todo.park
        if gaps:
            raise _Gap(gaps)
        return Decision(batch=batch, watermarks=new_rows, parked=parked)

    async def _fill(self, thread_id: str, after: int, items: Sequence[Item]) -> list[Item]:
        """Return the thread's `items` and its other entries in the log above position `after`, up to the last item."""
        subject = self._subjects.of(thread_id)
        # An entry that is not found counts as missing, so do not read from a replica that lags behind the one that
        # delivered the items.
        await self._log.latest(subject, _FILL_S)
        messages = (await self._log.seen_after({subject: after}))[subject]
        last = max(item.seq for item in items)
        found = {item.seq: item for item in (*items_of(messages, thread_id), *items) if item.seq <= last}
        return [found[seq] for seq in sorted(found)]


def _queued(owned_partitions: Collection[OwnedPartition], thread_ids: Iterable[str]) -> list[str]:
    """Return those of these threads that have entries in the ledger.

    `owned_partitions`: the partitions that the commit holds, even if they were given up while it was on its way.
    """
    queues = [owned.queues for owned in owned_partitions if owned.queues]
    return [t for t in thread_ids if any(t in queue for queue in queues)] if queues else []
