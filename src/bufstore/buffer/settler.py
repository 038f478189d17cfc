"""Settling entries: one transaction for all that waits; of what cannot be committed whole, all that can.

What passes is tried again from memory. What is about some threads is found: a locked row delays its own thread only,
poison parks alone, and the others are committed. See `bufstore.buffer.verdict` for what an error means, and
`bufstore.buffer.blame` for when nobody's entry is to blame.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

import msgspec

from bufstore.buffer.blame import THREADS_MIN, Blame
from bufstore.buffer.chain import Parked, Row
from bufstore.buffer.deciding import Threads, by_partition, decide_thread, halves, is_one_entry, payload_bytes
from bufstore.buffer.entry import Malformed, StoredEntry, assemble
from bufstore.buffer.flusher_state import FlusherState
from bufstore.buffer.ports.domain import Coalesce
from bufstore.buffer.ports.hot import HotState
from bufstore.buffer.ports.ledger import (
    Decision,
    Flushed,
    FlushFailed,
    Ledger,
    NotOwner,
    QuarantineBusy,
    QuarantineFull,
)
from bufstore.buffer.ports.log import Log
from bufstore.buffer.ports.stream import AppendUnknown
from bufstore.buffer.share import Item, Share
from bufstore.buffer.subjects import Subjects
from bufstore.buffer.takeover import Takeover
from bufstore.buffer.verdict import Verdict
from bufstore.buffer.waiting import Waiting
from bufstore.config import BufferConfig
from bufstore.errors import BufstoreError, StoreMisconfigured, StoreUnavailable
from bufstore.failpoints import Failpoint, reach

_log = logging.getLogger(__name__)

#: An app's code that raises for a thread is asked this often before the entry is taken for poison: about a minute.
_SUSPECT_TRIES = 10
#: Of the threads that are refused for a reason that is everybody's, or wait for locks of the store's own tables (which
#: are waited for one by one), so many are tried at a time, and this often; it is the others' turn later.
TRIED_AT_ONCE = 8
_OTHERS_S = 8.0
_EVERYBODYS_MAX_S = 2.0
#: An entry that takes too long alone holds everybody up while it is tried.
_ALONE_MAX_S = 64.0
#: So many refused threads are enough to tell what is wrong.
_REFUSED_MAX = 100


class Later(Exception):
    """Not now; everything stays as it is."""


class _NoRoom(Exception):
    """The quarantine has not room for what a flush would park: how many entries of which thread."""

    def __init__(self, error: QuarantineFull, parked: Sequence[Parked]) -> None:
        super().__init__(str(error))
        self.room = error.room
        self.busy = isinstance(error, QuarantineBusy)
        self.parked = Counter(p.item.thread_id for p in parked)


class _Gap(Exception):
    """Entries are missing between a row and what has arrived; fetch them first."""

    def __init__(self, threads: Mapping[str, int]) -> None:
        super().__init__(f"{len(threads)} threads have gaps")
        self.threads = threads


@dataclass
class _Outcome:
    """Of which threads the store took something, and which were left out."""

    taken: set[str] = field(default_factory=set)
    locked: set[str] = field(default_factory=set)
    refused: dict[str | None, FlushFailed] = field(default_factory=dict)
    untried: set[str | None] = field(default_factory=set)

    def add(self, other: _Outcome) -> None:
        self.taken |= other.taken
        self.locked |= other.locked
        self.refused |= other.refused
        self.untried |= other.untried


class Settler:
    """Flushes what the followed partitions hold in memory."""

    def __init__(
        self,
        log: Log,
        hot: HotState,
        ledger: Ledger,
        coalesce: Coalesce,
        subjects: Subjects,
        config: BufferConfig,
        takeover: Takeover,
        state: FlusherState,
    ) -> None:
        self._log = log
        self._hot = hot
        self._ledger = ledger
        self._coalesce = coalesce
        self._subjects = subjects
        self._config = config
        self._takeover = takeover
        self._shares = takeover.shares
        self._state = state
        self._loop = asyncio.get_running_loop()
        self.waiting = Waiting()
        self._blame = Blame()
        #: What is wrong for everybody, as far as was said; and which causes are locks of the store's own tables.
        self._told: set[str] = set()
        self._locks: set[str] = set()
        #: Causes that were no more when some threads were tried.
        self._passing: set[str] = set()
        #: A window that could not be committed is tried again with half as many entries.
        self._room = config.flush_max_entries
        #: Whether the last window left something out for want of room.
        self.more = False
        #: The partitions as they were when the window was gathered.
        self._window: Mapping[int, Share] = {}
        #: Entries that turned out not to be applicable, and why, until they are parked.
        self._poison: dict[int, str] = {}
        self._quarantine_full = False

    # --- what is flushed when ---------------------------------------------------------------------------------

    async def settle_pending(self) -> None:
        """Flush what has arrived, except of threads that have to wait. Raises Later when it cannot be flushed now."""
        pending = self._gather(lambda thread_id: thread_id not in self.waiting)
        self.more = sum(map(len, pending.values())) >= self._room
        if pending:
            await self._settle(pending)

    async def settle_waiting(self) -> None:
        """Try the threads that had to wait, together; whoever fails again waits again, longer."""
        now = self._loop.time()
        due = self.waiting.due(now)
        if not due:
            return
        found = self._gather(set(due).__contains__)
        gone = [t for t in due if t not in found]  # their partition was given up, or there was no room for them
        if sum(map(len, found.values())) < self._room:
            self.waiting.discard(gone)
            self._blame.settled(gone)
        waiting = [t for t in due if t in found]
        for thread_id in [t for t in waiting if self.waiting.alone(t)]:
            waiting.remove(thread_id)
            await self._settle({thread_id: found[thread_id][:1]})
        for cause in {self.waiting.cause(t) for t in waiting}:
            if self._is_everybodys(cause) or cause in self._locks:
                concerned = [t for t in waiting if self.waiting.cause(t) == cause]
                waiting = [t for t in waiting if self.waiting.cause(t) != cause]
                await self._try_some(cause, concerned, found)
        if waiting:
            await self._settle({t: found[t] for t in waiting})

    async def _try_some(self, cause: str, concerned: Sequence[str | None], found: Threads) -> None:
        """Whether it has passed: of some threads, the first entry."""
        tried, now = concerned[:TRIED_AT_ONCE], self._loop.time()
        self.waiting.postpone(cause, tried, now, now + _OTHERS_S)
        await self._settle({t: found[t][:1] for t in tried}, probe=_REFUSED_MAX)
        if all(t in self.waiting for t in tried):
            self._passing.discard(cause)
        else:
            self._passing.add(cause)
            self.waiting.hurry(cause, self._loop.time())

    def tries_some(self, cause: str) -> bool:
        """Whether of those who wait for this only some are tried at a time, and it did not pass for them."""
        return cause not in self._passing and (self._is_everybodys(cause) or cause in self._locks)

    def ready(self) -> int:
        """How many entries can be settled now: all but those of threads that have to wait."""
        if not self.waiting:
            return sum(len(share.pending) for share in self._shares.values())
        return sum(i.thread_id not in self.waiting for share in self._shares.values() for i in share.pending.values())

    def trouble(self) -> tuple[str, bool]:
        """For whom flushing does not go on, and why; whether an operator has to mend it."""
        self._told = {cause for cause in self._told & self.waiting.causes().keys() if self._is_everybodys(cause)}
        return self.waiting.trouble(), bool(self._told)

    def _gather(self, wanted: Callable[[str | None], bool]) -> Threads:
        """What to flush, by thread, bounded."""
        room = self._room
        found: Threads = {}
        self._window = dict(self._shares)
        for share in self._shares.values():
            for item in share.pending.values():
                if not wanted(item.thread_id):
                    continue
                if room <= 0:
                    return found
                room -= 1
                found.setdefault(item.thread_id, []).append(item)
        return found

    # --- what becomes of it -----------------------------------------------------------------------------------

    async def _settle(self, threads: Threads, *, probe: int = 0) -> None:
        try:
            outcome = await self._attempt(threads, probe=probe)
        except NotOwner as e:
            if e.partition in self._shares:
                self._takeover.drop(self._shares[e.partition], f"another owner took it ({e})")
            raise Later from e
        except (StoreUnavailable, StoreMisconfigured) as e:
            self._less(threads)
            if isinstance(e, StoreUnavailable) and await self._is_of_one(threads, str(e)):
                self._wait(next(iter(threads)), FlushFailed(str(e), Verdict.RETRY), alone=True)
                return
            self._state.report(e, stopped=isinstance(e, StoreMisconfigured))
            raise Later from e
        except _NoRoom as e:
            await self._settle_parkable(threads, e)
            return
        except FlushFailed as e:
            self._less(threads)
            if e.verdict is Verdict.SHRINK and is_one_entry(threads):
                self._wait(next(iter(threads)), e, alone=True, longest_s=_ALONE_MAX_S)
                return
            if e.verdict is Verdict.RETRY and await self._is_of_one(threads, e.cause):
                self._wait(next(iter(threads)), e, alone=True)
                return
            self._state.report(e, stopped=e.verdict.needs_operator)
            raise Later from e
        except (BufstoreError, AppendUnknown) as e:
            self._state.report(e, stopped=False)
            raise Later from e
        now = self._loop.time()
        for thread_id in outcome.locked:
            self._wait(thread_id, FlushFailed("somebody else holds its row", Verdict.LOCKED))
        for refused, error in outcome.refused.items():
            if refused is not None:
                if error.verdict is Verdict.LOCKED:
                    self._locks.add(error.cause)
                at_least = 1 if error.verdict is Verdict.DENIED else THREADS_MIN
                self._blame.refused(refused, error.cause, now, at_least=at_least)
        self._blame.taken(outcome.taken, now)
        if outcome.refused:
            await self._settle_refused(threads, outcome.refused)
        if outcome.untried and not any(self._is_everybodys(e.cause) for e in outcome.refused.values()):
            self.more = True

    def _less(self, threads: Threads) -> None:
        """It may have been too much for the time there is."""
        self._room = max(1, min(self._room, sum(map(len, threads.values()))) // 2)

    async def _is_of_one(self, threads: Threads, cause: str) -> bool:
        """Whether it is one entry that ends the session, or gets no answer: for all else Postgres is there."""
        # When so many others have the same it is not theirs.
        few = not threads.keys().isdisjoint(self.waiting) or self.waiting.causes()[cause] < TRIED_AT_ONCE
        if not few or not is_one_entry(threads):
            return False
        with contextlib.suppress(BufstoreError, FlushFailed):
            await self._ledger.cursors()
            return True
        return False

    async def _attempt(self, threads: Threads, *, probe: int = 0) -> _Outcome:
        """Commit what can be committed. Raises FlushFailed for what is not about some of the threads."""
        try:
            return await self._commit(threads, probe=probe)
        except FlushFailed as e:
            if not e.verdict.of_statement or (e.verdict is Verdict.DENIED and not e.of_batch):
                raise
            error = e
        if not probe and error.of_batch:
            return await self._attempt(threads, probe=_REFUSED_MAX)
        # Not found by savepoints: at the commit, or in the buffer's own tables.
        parts = by_partition(threads, self._partition_of)
        if len(threads) == 1 or (error.verdict is Verdict.LOCKED and len(parts) == 1):
            return _Outcome(refused=dict.fromkeys(threads, error))
        outcome = _Outcome()
        for part in parts if len(parts) > 1 else halves(threads):
            if len(outcome.refused) < _REFUSED_MAX:
                outcome.add(await self._attempt(part, probe=probe or _REFUSED_MAX))
            else:
                outcome.untried |= part.keys()
        return outcome

    async def _settle_refused(self, threads: Threads, refused: Mapping[str | None, FlushFailed]) -> None:
        """Of these threads the store takes something not: they wait, or the entry to blame is found and parked."""
        park: Threads = {}
        first: Threads = {}
        second: Threads = {}
        for thread_id, error in refused.items():
            items = threads[thread_id]
            if thread_id is None:  # our own tables: nothing of one thread
                self._state.report(error, stopped=False)
                raise Later from error
            if not self._is_poison(thread_id, error):
                self._wait(thread_id, error)
            elif len(items) > 1:
                first[thread_id], second[thread_id] = items[: len(items) // 2], items[len(items) // 2 :]
            elif not isinstance(items[0], StoredEntry) or items[0].entry.id in self._poison:
                self._wait(thread_id, error)  # parking itself was refused: this is not about the entry
            else:
                self._blame.parked(thread_id, error.cause)
                self._poison[items[0].entry.id] = str(error)
                park[thread_id] = items
        if park:
            await self._settle(park)
        if first:
            await self._settle(first, probe=len(first))
            reach(Failpoint.FLUSH_HALF_SETTLED)
            # In order, and only as far as it goes: the second half builds on the first.
            second = {t: items for t, items in second.items() if self._is_settled(t, first[t])}
            if second:
                await self._settle(second, probe=len(second))

    def _is_settled(self, thread_id: str | None, items: Sequence[Item]) -> bool:
        share = self._shares.get(self._partition_of(thread_id, items))
        if share is None or thread_id in self.waiting:
            return False
        return not any(item.seq in share.pending for item in items)

    def _is_poison(self, thread_id: str, error: FlushFailed) -> bool:
        if error.verdict is Verdict.SUSPECT:
            if self.waiting.tries(thread_id) < _SUSPECT_TRIES:
                return False
        elif error.verdict is not Verdict.POISON:
            return False
        return not self._is_everybodys(error.cause)

    def _is_everybodys(self, cause: str) -> bool:
        return self._blame.everybodys(cause, self._loop.time())

    def _wait(
        self, thread_id: str | None, error: FlushFailed, *, alone: bool = False, longest_s: float | None = None
    ) -> None:
        everybodys = self._is_everybodys(error.cause)
        if everybodys and error.cause not in self._told and error.verdict is not Verdict.LOCKED:
            self._told.add(error.cause)
            text = "this is refused to all, and nobody's entry is to blame; nothing is parked: %s"
            _log.error(text, error, extra={"action": "refused_to_all"})
        elif not everybodys and not self.waiting.tries(thread_id):
            _log.warning("thread %r has to wait: %s", thread_id, error, extra={"action": "thread_waits"})
        longest = {"longest_s": longest_s or _EVERYBODYS_MAX_S} if longest_s or everybodys else {}
        self.waiting.add(thread_id, str(error), self._loop.time(), cause=error.cause, alone=alone, **longest)

    async def _settle_parkable(self, threads: Threads, error: _NoRoom) -> None:
        """There is no room in quarantine for all that would have to go there: nothing is dropped, that part waits."""
        room = error.room
        rest = dict(threads)
        for thread_id, count in error.parked.items():
            if count <= room:
                room -= count
                continue
            del rest[thread_id]
            self.waiting.add(thread_id, str(error), self._loop.time())
        if not self._quarantine_full and not error.busy:
            self._quarantine_full = True
            _log.error("%s", error, extra={"action": "quarantine_full"})
        if rest:
            await self._settle(rest)

    # --- the transaction --------------------------------------------------------------------------------------

    async def _commit(self, threads: Threads, *, probe: int) -> _Outcome:
        """Flush these threads' entries in one transaction; on return they are settled, but for those left out.

        Entries that were missing between are added to `threads`: if one of them is to blame it must be found, too.
        """
        complete: set[str] = set()
        parked: list[Parked] = []
        settled: set[int] = set()
        shares: list[Share] = []

        def decide(rows: Mapping[str, Row]) -> Decision:
            decision = self._decide(threads, complete, rows)
            parked[:] = decision.parked
            settled.clear()
            settled.update(i.seq for t, items in threads.items() if t is None or t in rows for i in items)
            decision.cursors = [share.cursor_after(settled) for share in shares]
            return decision

        while True:
            self._leave_lost(threads)
            if not threads:
                return _Outcome()
            seqs = {item.seq for items in threads.values() for item in items}
            shares[:] = [share for _, share in sorted(self._shares.items()) if not seqs.isdisjoint(share.pending)]
            try:
                names = sorted(t for t in threads if t is not None)
                reach(Failpoint.FLUSH_BEFORE)
                held = [share.cursor for share in shares]
                flushed = await self._ledger.flush(held, names, decide, probe=probe, size=payload_bytes(threads))
                break
            except QuarantineFull as e:
                raise _NoRoom(e, parked) from e
            except _Gap as gap:
                for thread_id, after in gap.threads.items():
                    threads[thread_id] = await self._fill(thread_id, after, threads[thread_id])
                complete.update(gap.threads)
        # The second line that matters, the commit, is behind us: entries, watermarks and cursor are in Postgres
        # together. Acknowledging before it would lose what a crash rolls back.
        reach(Failpoint.FLUSH_COMMITTED)
        decision = flushed.decision
        now = self._loop.time()
        self._room = min(2 * self._room, self._config.flush_max_entries)
        for share, cursor in zip(shares, decision.cursors, strict=True):
            share.settle(settled, cursor, now)
        self._count(threads, flushed, len(settled))
        with contextlib.suppress(BufstoreError):  # waiters also look into Postgres
            await self._hot.report({cursor.partition: cursor.seq for cursor in decision.cursors})
            for thread_id in {p.item.thread_id for p in decision.parked if p.item.thread_id is not None}:
                await self._hot.tell_parked(thread_id)
        reach(Failpoint.FLUSH_REPORTED)
        for share in shares:
            await share.feed.ack(share.cursor.seq)
        reach(Failpoint.FLUSH_ACKED)
        taken = {change.thread_id for change in decision.batch}
        return _Outcome(
            taken, set(flushed.locked), dict[str | None, FlushFailed](flushed.refused.items()), set(flushed.untried)
        )

    def _leave_lost(self, threads: Threads) -> None:
        """Forget the threads of partitions that were given up since they were gathered: they are not ours to flush."""
        lost = {p for p, share in self._window.items() if self._shares.get(p) is not share}
        for thread_id in [t for t, items in threads.items() if self._partition_of(t, items) in lost] if lost else ():
            del threads[thread_id]

    def _decide(self, threads: Threads, complete: Set[str], rows: Mapping[str, Row]) -> Decision:
        batch = []
        new_rows: dict[str, Row] = {}
        parked: list[Parked] = []
        gaps: dict[str, int] = {}
        for thread_id, items in threads.items():
            if thread_id is None:
                parked += [Parked(item, item.cause) for item in items if isinstance(item, Malformed)]
                continue
            row = rows.get(thread_id)
            if row is None:  # left out
                continue
            todo, change = decide_thread(
                thread_id, row, items, self._poison, self._coalesce, complete=thread_id in complete
            )
            if todo.gap_before is not None:
                gaps[thread_id] = row.flushed_seq
                continue
            if change is not None:
                batch.append(change)
            new_rows[thread_id] = todo.row
            parked += map(self._with_cause, todo.park)
        if gaps:
            raise _Gap(gaps)
        return Decision(batch=batch, rows=new_rows, parked=parked)

    def _with_cause(self, parked: Parked) -> Parked:
        cause = self._poison.get(parked.item.entry.id) if isinstance(parked.item, StoredEntry) else None
        return parked if cause is None else msgspec.structs.replace(parked, cause=cause)

    async def _fill(self, thread_id: str, after: int, items: Sequence[Item]) -> list[Item]:
        """The thread's `items`, and what else stands in the log above position `after` up to the last of them."""
        messages = await self._log.after(self._subjects.of(thread_id), after, 10.0)
        last = max(item.seq for item in items)
        found = {item.seq: item for item in (*assemble(messages, thread_id), *items) if item.seq <= last}
        return [found[seq] for seq in sorted(found)]

    def _partition_of(self, thread_id: str | None, items: Sequence[Item]) -> int:
        if thread_id is not None:
            return self._subjects.partition(thread_id)
        item = items[0]
        assert isinstance(item, Malformed)
        return next((p for p, s in self._window.items() if item.seq in s.pending), -1)

    def _count(self, threads: Threads, flushed: Flushed, entries: int) -> None:
        decision = flushed.decision
        left_out: Iterable[str | None] = {*flushed.locked, *flushed.refused, *flushed.untried}
        settled = [t for t in threads if t is not None and t not in left_out]
        self.waiting.discard(settled)
        self._blame.settled(settled)
        self._quarantine_full = self._quarantine_full and not decision.parked
        self._state.transactions += 1
        self._state.entries += entries
        self._state.changes += len(decision.batch)
        self._state.parked += len(decision.parked)
        for parked in decision.parked:
            item = parked.item
            _log.error(
                "entry %d of thread %r is quarantined: %s",
                item.seq,
                item.thread_id,
                parked.cause,
                extra={"action": "entry_parked"},
            )
            if isinstance(item, StoredEntry):
                self._poison.pop(item.entry.id, None)
