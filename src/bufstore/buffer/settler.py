"""Settling entries: one transaction for all that waits, split when it cannot commit whole.

What passes is tried again from memory. What says that one entry is to blame is split: by partition, by thread, by
entry; so a locked row delays its own thread only, and poison parks alone. See `bufstore.buffer.verdict`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping, Sequence, Set
from typing import Any

import msgspec

from bufstore.buffer.chain import Parked, Plan, Row, plan
from bufstore.buffer.entry import Malformed, StoredEntry, assemble
from bufstore.buffer.flusher_state import FlusherState
from bufstore.buffer.ports import (
    AppendUnknown,
    Coalesce,
    Decision,
    FlushFailed,
    HotState,
    Inapplicable,
    Ledger,
    Log,
    Move,
    NotOwner,
    QuarantineFull,
)
from bufstore.buffer.share import Item
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
#: A window that Postgres could not commit in time is tried again with half as many entries, down to this.
_ROOM_MIN = 50


class Later(Exception):
    """Not now; everything stays as it is."""


class _NoRoom(Exception):
    """The quarantine has not room for what a flush would park: how many entries of which thread."""

    def __init__(self, error: QuarantineFull, parked: Sequence[Parked]) -> None:
        super().__init__(str(error))
        self.room = error.room
        self.parked = Counter(p.item.thread_id for p in parked)


class _Gap(Exception):
    """Entries are missing between a row and what has arrived; fetch them first."""

    def __init__(self, threads: Mapping[str, int]) -> None:
        super().__init__(f"{len(threads)} threads have gaps")
        self.threads = threads


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
        self._room = config.flush_max_entries
        #: Entries that turned out not to be applicable, and why, until they are parked.
        self._poison: dict[int, str] = {}
        #: Threads that wait for room in quarantine, and whether that was said.
        self._unparkable: set[str | None] = set()
        self._quarantine_full = False

    async def settle_pending(self) -> None:
        """Flush what has arrived, except of threads that have to wait. Raises Later when it cannot be flushed now."""
        pending = self._pending()
        if pending:
            await self._settle(pending)

    async def settle_waiting(self) -> None:
        """Try the threads that had to wait, each in a transaction of its own: it may have to wait again."""
        due = self.waiting.due(self._loop.time())
        items: dict[str | None, list[Item]] = {}
        for share in self._shares.values() if due else ():
            for item in share.pending.values():
                if item.thread_id in due:
                    items.setdefault(item.thread_id, []).append(item)
        self.waiting.discard(due - items.keys())  # their partition was given up
        together = {t: items.pop(t) for t in list(items) if t in self._unparkable}
        self._unparkable.difference_update(due)
        if together:  # what waits for room in quarantine asks for it once, not a thousand times
            await self._settle(together)
        for thread_id, entries in items.items():
            await self._settle({thread_id: entries})

    def ready(self) -> int:
        """How many entries can be settled now: all but those of threads that have to wait."""
        if not self.waiting:
            return sum(len(share.pending) for share in self._shares.values())
        return sum(i.thread_id not in self.waiting for share in self._shares.values() for i in share.pending.values())

    def _pending(self) -> dict[str | None, list[Item]]:
        """What to flush, by thread, bounded; threads whose row is locked by somebody wait their turn."""
        room = self._room
        found: dict[str | None, list[Item]] = {}
        for share in self._shares.values():
            for item in share.pending.values():
                if item.thread_id in self.waiting:
                    continue
                if room <= 0:
                    return found
                room -= 1
                found.setdefault(item.thread_id, []).append(item)
        return found

    async def _settle(self, threads: MutableMapping[str | None, list[Item]], *, probe: bool = False) -> None:
        try:
            await self._commit(threads, probe=probe)
        except NotOwner as e:
            for partition in {self._partition_of(t, items) for t, items in threads.items()}:
                if partition in self._shares:
                    await self._takeover.drop(self._shares[partition], f"another owner took it ({e})")
            raise Later from e
        except (StoreUnavailable, StoreMisconfigured) as e:
            # Maybe it was too much for the time there is.
            self._room = max(_ROOM_MIN, min(self._room, sum(map(len, threads.values()))) // 2)
            self._state.report(e, stopped=isinstance(e, StoreMisconfigured))
            raise Later from e
        except _NoRoom as e:
            await self._settle_parkable(threads, e)
        except FlushFailed as e:
            what = e.verdict
            if what in (Verdict.RETRY, Verdict.STOP):
                self._state.report(e, stopped=what is Verdict.STOP)
                raise Later from e
            if e.culprits:
                await self._settle_culprits(threads, e)
            elif what is Verdict.POISON and len(threads) > 1 and not probe:
                await self._settle(threads, probe=True)
            else:
                await self._settle_parts(threads, what, e)
        except (BufstoreError, AppendUnknown) as e:
            self._state.report(e, stopped=False)
            raise Later from e

    async def _settle_culprits(self, threads: Mapping[str | None, list[Item]], error: FlushFailed) -> None:
        """Some threads are to blame: the others in one transaction, these halved, all at once, down to the entries."""
        rest: dict[str | None, list[Item]] = {}
        first: dict[str | None, list[Item]] = {}
        second: dict[str | None, list[Item]] = {}
        for thread_id, items in threads.items():
            cause = error.culprits.get(thread_id or "")
            if cause is None:
                rest[thread_id] = items
            elif len(items) > 1:
                first[thread_id], second[thread_id] = items[: len(items) // 2], items[len(items) // 2 :]
            elif not isinstance(items[0], StoredEntry) or items[0].entry.id in self._poison:
                await self._settle_parts({thread_id: items}, error.verdict, error)
            else:
                self._poison[items[0].entry.id] = cause
                rest[thread_id] = items
        if rest:
            await self._settle(rest)
        if first:
            await self._settle(first)
            reach(Failpoint.FLUSH_HALF_SETTLED)
            # In order, and only as far as it goes: the second half builds on the first.
            second = {t: items for t, items in second.items() if t not in self.waiting}
            if second:
                await self._settle(second)

    async def _settle_parts(
        self, threads: MutableMapping[str | None, list[Item]], what: Verdict, error: FlushFailed
    ) -> None:
        """Commit in smaller parts what cannot be committed whole."""
        if len(threads) > 1:
            for part in _split(threads, self._partition_of):
                await self._settle(part)
            return
        ((thread_id, items),) = threads.items()
        if thread_id is not None and self._has_to_wait(thread_id, what, error):
            return
        if what is Verdict.ISOLATE:  # our own tables: nothing of one thread
            self._state.report(error, stopped=False)
            raise Later from error
        if len(items) > 1:
            # In order, and only as far as it goes: the second half builds on the first.
            await self._settle({thread_id: items[: len(items) // 2]})
            if thread_id not in self.waiting:
                await self._settle({thread_id: items[len(items) // 2 :]})
        else:
            item = items[0]
            if not isinstance(item, StoredEntry) or item.entry.id in self._poison:
                # Parking itself was refused: this is not about the entry.
                self._state.report(error, stopped=False)
                raise Later from error
            self._poison[item.entry.id] = str(error)
            await self._settle(threads)

    def _has_to_wait(self, thread_id: str, what: Verdict, error: FlushFailed) -> bool:
        if what is Verdict.POISON:
            return False
        tries = self.waiting.tries(thread_id)
        if what is Verdict.SUSPECT and tries >= _SUSPECT_TRIES:
            return False
        if not tries:
            _log.warning("thread %r has to wait: %s", thread_id, error, extra={"action": "thread_waits"})
        self.waiting.add(thread_id, str(error), self._loop.time())
        return True

    async def _settle_parkable(self, threads: Mapping[str | None, list[Item]], error: _NoRoom) -> None:
        """There is no room in quarantine for all that would have to go there: nothing is dropped, that part waits."""
        room = error.room
        rest = dict(threads)
        for thread_id, count in error.parked.items():
            if count <= room:
                room -= count
                continue
            del rest[thread_id]
            self._unparkable.add(thread_id)
            self.waiting.add(thread_id, str(error), self._loop.time())
        if not self._quarantine_full:
            self._quarantine_full = True
            _log.error("%s", error, extra={"action": "quarantine_full"})
        if rest:
            await self._settle(rest)

    async def _commit(self, threads: MutableMapping[str | None, list[Item]], *, probe: bool) -> None:
        """Flush these threads' entries in one transaction; on return they are settled.

        Entries that were missing between are added to `threads`: if one of them is to blame it must be found, too.
        """
        complete: set[str] = set()
        parked: list[Parked] = []

        def decide(rows: Mapping[str, Row]) -> Decision:
            decision = self._decide(threads, complete, rows)
            parked[:] = decision.parked
            return decision

        while True:
            settled = {item.seq for items in threads.values() for item in items}
            shares = [share for _, share in sorted(self._shares.items()) if not settled.isdisjoint(share.pending)]
            moves = [Move(share.cursor, share.cursor_after(settled)) for share in shares]
            try:
                names = sorted(t for t in threads if t is not None)
                reach(Failpoint.FLUSH_BEFORE)
                decision = await self._ledger.flush(moves, names, decide, probe=probe)
                break
            except QuarantineFull as e:
                raise _NoRoom(e, parked) from e
            except _Gap as gap:
                for thread_id, after in gap.threads.items():
                    threads[thread_id] = await self._fill(thread_id, after, threads[thread_id])
                complete |= gap.threads.keys()
        # The second line that matters, the commit, is behind us: entries, watermarks and cursor are in Postgres
        # together. Acknowledging before it would lose what a crash rolls back.
        reach(Failpoint.FLUSH_COMMITTED)
        now = self._loop.time()
        self._room = min(2 * self._room, self._config.flush_max_entries)
        for share, move in zip(shares, moves, strict=True):
            share.settle(settled, move.after, now)
        self._count(threads, decision)
        with contextlib.suppress(BufstoreError):  # waiters also look into Postgres
            await self._hot.report({move.after.partition: move.after.seq for move in moves})
            for thread_id in {p.item.thread_id for p in decision.parked if p.item.thread_id is not None}:
                await self._hot.tell_parked(thread_id)
        reach(Failpoint.FLUSH_REPORTED)
        for share in shares:
            await share.feed.ack(share.cursor.seq)
        reach(Failpoint.FLUSH_ACKED)

    def _decide(
        self, threads: Mapping[str | None, list[Item]], complete: Set[str], rows: Mapping[str, Row]
    ) -> Decision:
        batch = []
        new_rows: dict[str, Row] = {}
        parked: list[Parked] = []
        gaps: dict[str, int] = {}
        for thread_id, items in threads.items():
            if thread_id is None:
                parked += [Parked(item, item.cause) for item in items if isinstance(item, Malformed)]
                continue
            row = rows[thread_id]
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
        return next((p for p, s in self._shares.items() if item.seq in s.pending), -1)

    def _count(self, threads: Mapping[str | None, list[Item]], decision: Decision) -> None:
        self.waiting.discard(threads)
        self._quarantine_full = self._quarantine_full and not decision.parked
        self._state.transactions += 1
        self._state.entries += sum(len(items) for items in threads.values())
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


def decide_thread(
    thread_id: str,
    row: Row,
    items: Sequence[Item],
    poison: MutableMapping[int, str],
    coalesce: Coalesce,
    *,
    complete: bool,
) -> tuple[Plan, Any]:
    """What becomes of a thread's entries (see `chain.plan`), and the one change that equals those that are applied.

    Entries that turn out not to be applicable are added to `poison`, with the cause.
    """
    while True:
        todo = plan(row, items, complete=complete, poison=poison.keys())
        if todo.gap_before is not None or not todo.apply:
            return todo, None
        try:
            change = coalesce(thread_id, row.version, todo.apply)
        except Inapplicable as e:
            poison[e.entry_id] = str(e)
            continue
        return msgspec.structs.replace(todo, row=msgspec.structs.replace(todo.row, gone=change.gone)), change


def _split(
    threads: Mapping[str | None, list[Item]], partition_of: Callable[[str | None, Sequence[Item]], int]
) -> list[dict[str | None, list[Item]]]:
    """Smaller parts of a window: by partition if there are several, else halves."""
    parts: dict[int, dict[str | None, list[Item]]] = {}
    for thread_id, items in threads.items():
        parts.setdefault(partition_of(thread_id, items), {})[thread_id] = items
    if len(parts) > 1:
        return list(parts.values())
    names = list(threads)
    return [{t: threads[t] for t in half} for half in (names[: len(names) // 2], names[len(names) // 2 :])]
