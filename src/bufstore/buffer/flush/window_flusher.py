"""Flushes a window in one transaction; if the window cannot be committed whole, commits as much of it as possible.

This module decides which threads are tried together, which wait, and which entry is to blame; `committer` runs the
transaction (`bufstore.buffer.flush.committer`), and `queues` keeps the entries that wait for long
(`bufstore.buffer.flush.queues`).

After a transient error, the flush is tried again from memory. When an error concerns some threads, these are found: a
locked row delays its own thread only, poison is parked alone, and the others are committed.
`bufstore.buffer.flush.verdict` says what an error means, and `bufstore.buffer.flush.blame` when no entry is to blame.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

from bufstore.buffer.entry import Item, StoredEntry
from bufstore.buffer.flush.blame import THREADS_MIN, Blame
from bufstore.buffer.flush.committer import Committed, Committer, NoRoom, WindowOutcome
from bufstore.buffer.flush.deciding import Threads, by_partition, halves, is_one_entry
from bufstore.buffer.flush.flusher_state import FlusherState
from bufstore.buffer.flush.next_window import gather
from bufstore.buffer.flush.queues import Queues
from bufstore.buffer.flush.takeover import Takeover
from bufstore.buffer.flush.verdict import Verdict
from bufstore.buffer.flush.waiting import Waiting
from bufstore.buffer.parts import AnyParts
from bufstore.buffer.ports.ledger import (
    FlushFailed,
    NotOwner,
)
from bufstore.errors import BufstoreError, StoreUnavailable
from bufstore.failpoints import Failpoint, reach
from bufstore.jetstream.messages import AppendUnknown
from bufstore.log_lines import LogLines

_log = LogLines(__name__)

#: If an app's code raises for a thread, the thread is tried this often before its entry counts as poison: about a
#: minute.
_SUSPECT_TRIES = 10
#: When a refusal concerns everybody, or threads wait for locks of the store's own tables (each such lock is waited for
#: in turn): how many threads are tried at a time, after how many seconds the others are due, and how long a thread
#: waits at most if the refusal concerns everybody.
_TRIED_AT_ONCE = 8
_OTHERS_S = 8.0
_EVERYBODYS_MAX_S = 2.0
#: The longest wait of an entry that is too much even alone: each try of it delays everybody.
_ALONE_MAX_S = 64.0
#: A Postgres that does not answer within this time is away for all threads: waiting for longer would only hide that.
_THERE_S = 5.0
#: This many refused threads are enough to find out what is wrong.
_REFUSED_MAX = 100


@contextlib.contextmanager
def _own_memory() -> Iterator[None]:
    """Raise FlushFailed if this process has no memory for what is in the block, as if Postgres had none."""
    try:
        yield
    except MemoryError as e:
        raise FlushFailed("this process has no memory left to flush it", Verdict.SHRINK) from e


class Later(Exception):
    """Nothing can be flushed now; everything stays as it is."""


class WindowFlusher:
    """Flushes the entries that the followed partitions hold in memory."""

    def __init__(self, parts: AnyParts, takeover: Takeover, state: FlusherState) -> None:
        self._ledger, self._config = parts.ledger, parts.config
        self._takeover = takeover
        self._owned = takeover.owned_partitions
        self._committer = Committer(parts, takeover.owned_partitions)
        self._poison = self._committer.poison
        self._state = state
        self._loop = asyncio.get_running_loop()
        self.waiting = Waiting()
        self.queues = Queues(parts, takeover.owned_partitions, self.waiting)
        self._blame = Blame()
        #: The causes that concern everybody and were logged; and the causes that are locks of the store's own tables.
        self._told: set[str] = set()
        self._locks: set[str] = set()
        #: For each cause that concerns everybody, when it is tried again.
        self._next_try: dict[str, float] = {}
        #: How many entries a window, and a write into the ledger, may have: half as many after one that failed.
        self._room = self._queue_room = parts.config.flush_max_entries
        #: Whether the last window left something out for lack of space.
        self.more = False
        self._quarantine_full = False

    # --- what is flushed when ---------------------------------------------------------------------------------

    async def settle_pending(self) -> None:
        """Flush the entries that have arrived, except those of waiting threads. Raises Later if that fails for now."""
        pending = self._gather(lambda thread_id: thread_id not in self.waiting)
        self.more = sum(map(len, pending.values())) >= self._room
        if pending:
            await self._settle(pending)

    async def settle_waiting(self) -> None:
        """Try the waiting threads that are due, together; a thread that fails again waits again, longer."""
        due = self.waiting.due(self._loop.time())
        if not due:
            return
        in_memory = self._gather(set(due).__contains__)
        # The partitions of these threads were given up, or the window had no space for them.
        gone = [t for t in due if t not in in_memory and t not in self.queues]
        if sum(map(len, in_memory.values())) < self._room:
            self.waiting.discard(gone)
            self._blame.settled(gone)
        waiting = [t for t in due if t in in_memory or t in self.queues]
        try:
            alone = [t for t in waiting if self.waiting.alone(t)]
            waiting = [t for t in waiting if not self.waiting.alone(t)]
            if alone:
                await self._try_alone(alone[0], in_memory)
            for cause in {self.waiting.cause(t) for t in waiting}:
                if self._is_everybodys(cause) or cause in self._locks:
                    concerned = [t for t in waiting if self.waiting.cause(t) == cause]
                    waiting = [t for t in waiting if self.waiting.cause(t) != cause]
                    await self._try_some(cause, concerned, in_memory)
            await self._try(waiting, in_memory)
        finally:
            self.queues.let_go()

    async def _try_alone(self, thread_id: str | None, in_memory: Threads) -> None:
        """Try the first entry of a thread that may hold everybody up. They take a third of the time together.

        Each of them may take as long as a flush may; one after the other they would leave no time for anybody else.
        """
        began = self._loop.time()
        await self._try([thread_id], in_memory, first_only=True)
        now = self._loop.time()
        self.waiting.postpone_alone(now + min(2 * (now - began), _ALONE_MAX_S))

    async def _try_some(self, cause: str, concerned: Sequence[str | None], in_memory: Threads) -> None:
        """Find out whether the cause has passed, by trying the first entry of some of the threads."""
        now = self._loop.time()
        # A cause that concerns everybody is tried now and then, however many threads there are to try it with.
        tried = concerned[:_TRIED_AT_ONCE] if now >= self._next_try.get(cause, 0.0) else []
        others_at = now + _OTHERS_S
        if self._is_everybodys(cause):
            others_at = self._next_try[cause] = now + _EVERYBODYS_MAX_S if tried else self._next_try[cause]
        self.waiting.postpone(cause, tried, now, others_at)
        await self._try(tried, in_memory, first_only=True, probe=_REFUSED_MAX)
        if any(self.waiting.tries(t) == 0 for t in tried):
            self._next_try.pop(cause, None)
            self.waiting.hurry(cause, self._loop.time())

    async def _try(
        self, thread_ids: Sequence[str | None], in_memory: Threads, *, first_only: bool = False, probe: int = 0
    ) -> None:
        """Flush entries of these threads: those in memory, or the first ones in the ledger for threads that wait there.

        Of a queued thread that has failed, only one entry is read: most likely it fails again.
        """
        most = 1 if first_only else self._room
        found: Threads = {t: in_memory[t][:most] for t in thread_ids if t in in_memory}
        queued = [t for t in thread_ids if t is not None and t not in in_memory]
        failed = [t for t in queued if first_only or self.waiting.tries(t)]
        going_on = [t for t in queued if not (first_only or self.waiting.tries(t))]
        read: Sequence[str] = ()
        try:
            for part, most in ((failed, len(failed)), (going_on, self._room)):
                room = min(most, self._room - sum(map(len, found.values())))
                if part and room > 0:
                    read = part[:room]
                    with _own_memory():
                        found.update(await self.queues.read(read, room))
        except (BufstoreError, FlushFailed) as e:
            if not isinstance(e, FlushFailed) or e.verdict is not Verdict.SHRINK:
                raise self._later(e) from e
            if len(read) > 1:
                self._room = len(read) // 2
                raise self._later(e) from e
            self._wait(read[0], e, alone=True, longest_s=_ALONE_MAX_S)
        if found:
            await self._settle(found, probe=probe)

    async def queue_waiting(self) -> None:
        """Write the entries of threads that wait for long into the ledger. Raises Later if that fails for now."""
        waiting = self.queues.next_in(self._queue_room, self._loop.time())
        if not waiting:
            return
        try:
            with _own_memory():
                await self._committer.queue(waiting)
        except (NotOwner, BufstoreError, AppendUnknown) as e:
            raise self._later(e) from e
        except FlushFailed as e:
            if not e.verdict.of_statement and len(waiting) > 1:
                self._queue_room = len(waiting) // 2
                raise self._later(e) from e
            if not e.verdict.of_statement:  # as far as we can tell, this one entry fails: the others need not wait
                self._queue_room = self._config.flush_max_entries
                now = self._loop.time()
                self.queues.keep_in_memory(waiting[0].item.thread_id, now, now + _OTHERS_S)
                self._state.report(e)
                return
            # The other threads must not wait for this: the cursor stays, as if the space were used up.
            self.queues.not_before = self._loop.time() + _OTHERS_S
            _log.error(
                "waiting entries cannot be written into the ledger; they stay in the log: %s",
                e,
                extra={"action": "queue_failed"},
            )
        else:
            self._queue_room = min(2 * self._queue_room, self._config.flush_max_entries)

    def ready(self) -> int:
        """Return how many entries can be flushed now, or can pass into the ledger."""
        if not self.waiting:
            return sum(len(owned.pending) for owned in self._owned.values())
        now = self._loop.time()
        return sum(
            i.thread_id not in self.waiting or self.queues.takes(owned, i.thread_id, now)
            for owned in self._owned.values()
            for i in owned.pending.values()
        )

    def trouble(self) -> tuple[str, bool]:
        """Return a text that says how many threads are not flushed and why, and whether an operator must act."""
        self._told = {cause for cause in self._told & self.waiting.causes().keys() if self._is_everybodys(cause)}
        text = self.waiting.trouble()
        if full := self.queues.full():
            text += f"; partitions {full} have stopped because too many bytes of their entries wait in the ledger"
        return text, bool(self._told)

    def _gather(self, wanted: Callable[[str | None], bool]) -> Threads:
        self._committer.begin_window()
        return gather(self._owned.values(), wanted, self._room)

    # --- what becomes of it -----------------------------------------------------------------------------------

    async def _settle(self, threads: Threads, *, probe: int = 0, once_more: bool = False) -> None:
        try:
            outcome = await self._attempt(threads, probe=probe)
        except NoRoom as e:
            await self._settle_parkable(threads, e)
            return
        except (FlushFailed, StoreUnavailable) as e:
            self._less(threads)
            failed = e if isinstance(e, FlushFailed) else FlushFailed(str(e), Verdict.RETRY)
            if not await self._waits_alone(threads, failed):
                raise self._later(e) from e
            return
        except (NotOwner, BufstoreError, AppendUnknown) as e:
            raise self._later(e) from e
        now = self._loop.time()
        for thread_id in outcome.locked:
            self._wait(thread_id, FlushFailed("another session holds its row", Verdict.LOCKED))
        for refused, error in outcome.refused.items():
            if refused is not None:
                if error.verdict is Verdict.LOCKED:
                    self._locks.add(error.cause)
                at_least = 1 if error.verdict is Verdict.DENIED else THREADS_MIN
                self._blame.refused(refused, error.cause, now, at_least=at_least)
        self._blame.taken(outcome.taken, now)
        if outcome.refused:
            await self._settle_refused(threads, outcome.refused, unsure=bool(outcome.taken) and not once_more)
        if outcome.untried and not any(self._is_everybodys(e.cause) for e in outcome.refused.values()):
            self.more = True

    def _later(self, error: Exception) -> Later:
        """Note why nothing can be flushed now. A partition that another owner took is given up."""
        if not isinstance(error, NotOwner):
            self._state.report(error)
        elif error.partition in self._owned:
            self._takeover.drop(self._owned[error.partition], f"another owner took it ({error})")
        return Later()

    def _less(self, threads: Threads) -> None:
        """Try fewer entries next time: these may have been too many for the time."""
        self._room = max(1, min(self._room, sum(map(len, threads.values()))) // 2)

    async def _waits_alone(self, threads: Threads, error: FlushFailed) -> bool:
        """Have a single entry wait if it is too much even alone, or if the error is its own. Returns whether it is."""
        too_much = error.verdict is Verdict.SHRINK and is_one_entry(threads)
        if not too_much and not (error.verdict is Verdict.RETRY and await self._is_of_one(threads, error.cause)):
            return False
        self._wait(next(iter(threads)), error, alone=True, longest_s=_ALONE_MAX_S if too_much else None)
        return True

    async def _is_of_one(self, threads: Threads, cause: str) -> bool:
        """Return whether a single entry ends the session or gets no answer while Postgres answers everything else."""
        # When that many threads have the same error, it is not their fault.
        few = any(t in self.waiting for t in threads) or self.waiting.causes()[cause] < _TRIED_AT_ONCE
        if not few or not is_one_entry(threads):
            return False
        with contextlib.suppress(BufstoreError, FlushFailed, TimeoutError):
            async with asyncio.timeout(_THERE_S):
                await self._ledger.cursors()
            return True
        return False

    async def _attempt(self, threads: Threads, *, probe: int = 0) -> WindowOutcome:
        """Commit as much as possible. Raises FlushFailed for an error that does not concern single threads."""
        try:
            return await self._commit(threads, probe=probe)
        except FlushFailed as e:
            if not e.verdict.of_statement or (e.verdict is Verdict.DENIED and not e.of_batch):
                raise
            error = e
        if not probe and error.of_batch:
            return await self._attempt(threads, probe=_REFUSED_MAX)
        # Savepoints cannot find this error: it comes at the commit, or from the buffer's own tables.
        parts = by_partition(threads, self._committer.partition_of)
        if len(threads) == 1 or (error.verdict is Verdict.LOCKED and len(parts) == 1):
            return WindowOutcome(refused=dict.fromkeys(threads, error))
        outcome = WindowOutcome()
        for part in parts if len(parts) > 1 else halves(threads):
            if len(outcome.refused) < _REFUSED_MAX:
                outcome.add(await self._attempt(part, probe=probe or _REFUSED_MAX))
            else:
                outcome.untried |= part.keys()
        return outcome

    async def _settle_refused(
        self, threads: Threads, refused: Mapping[str | None, FlushFailed], *, unsure: bool
    ) -> None:
        """Deal with refused threads: each waits, or the entry to blame is found and parked.

        `unsure`: the store took other threads in the same transactions. If somebody has mended a table in the middle of
        one, that does not tell poison from entries that were tried too early: these are tried once more.
        """
        park: Threads = {}
        again: Threads = {}
        first: Threads = {}
        second: Threads = {}
        for thread_id, error in refused.items():
            items = threads[thread_id]
            if thread_id is None:  # our own tables: no single thread is concerned
                raise self._later(error) from error
            if not self._is_poison(thread_id, error):
                self._wait(thread_id, error)
            elif len(items) > 1:
                first[thread_id], second[thread_id] = items[: len(items) // 2], items[len(items) // 2 :]
            elif not isinstance(items[0], StoredEntry) or items[0].entry.id in self._poison:
                self._wait(thread_id, error)  # parking itself was refused: this is not about the entry
            elif unsure:
                again[thread_id] = items
            else:
                self._blame.parked(thread_id, error.cause)
                self._poison[items[0].entry.id] = str(error)
                park[thread_id] = items
        if park:
            await self._settle(park)
        if again:
            await self._settle(again, probe=len(again), once_more=True)
        if first:
            await self._settle(first, probe=len(first))
            reach(Failpoint.FLUSH_HALF_SETTLED)
            # Only if the first half of a thread is settled: the second half builds on it.
            second = {t: items for t, items in second.items() if self._is_settled(t, first[t])}
            if second:
                await self._settle(second, probe=len(second))

    def _is_settled(self, thread_id: str | None, items: Sequence[Item]) -> bool:
        owned = self._owned.get(self._committer.partition_of(thread_id, items))
        if owned is None or thread_id in self.waiting:
            return False
        return not any(item.seq in owned.pending or item.seq in owned.recalled for item in items)

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
            text = "the store refuses many threads for one reason; nothing is parked, their entries wait: %s"
            _log.error(text, error, extra={"action": "refused_to_all"})
        elif not everybodys and not self.waiting.tries(thread_id):
            _log.warning(
                "thread %r has to wait; none of its entries are lost: %s",
                thread_id,
                error,
                extra={"action": "thread_waits"},
            )
        longest = {"longest_s": longest_s or _EVERYBODYS_MAX_S} if longest_s or everybodys else {}
        self.waiting.add(thread_id, str(error), self._loop.time(), cause=error.cause, alone=alone, **longest)

    async def _settle_parkable(self, threads: Threads, error: NoRoom) -> None:
        """Settle as much as the quarantine has space for, which is not enough: the rest waits, nothing is dropped."""
        room = error.room
        rest = dict(threads)
        for thread_id, count in error.parked.items():
            if count <= room:
                room -= count
                continue
            if thread_id is None and room > 0:
                # Entries of no thread do not depend on each other, and hold their cursor: park as many as fit.
                rest[None], room = list(rest[None])[:room], 0
                continue
            del rest[thread_id]
            self.waiting.add(thread_id, str(error), self._loop.time())
        told = self._quarantine_full
        self._quarantine_full = full = told or not error.busy
        if full and not told:
            _log.error("%s", error, extra={"action": "quarantine_full"})
        if rest:
            await self._settle(rest)
            self._quarantine_full = full  # also if some of these were parked

    async def _commit(self, threads: Threads, *, probe: int) -> WindowOutcome:
        with _own_memory():
            committed = await self._committer.commit(threads, probe=probe)
        if committed is None:
            return WindowOutcome()
        self._room = min(2 * self._room, self._config.flush_max_entries)
        self._count(threads, committed)
        await self._committer.acknowledge(committed)
        return committed.outcome

    def _count(self, threads: Threads, committed: Committed) -> None:
        decision = committed.decision
        left_out = committed.outcome.left_out
        settled = [t for t in threads if t is not None and t not in left_out]
        queued = [t for t in settled if t in self.waiting and t in self.queues]
        self.waiting.progress(queued, self._loop.time())
        self.waiting.discard(set(settled).difference(queued))
        self._blame.settled(settled)
        self._quarantine_full = self._quarantine_full and not decision.parked
        self._state.transactions += 1
        self._state.entries += committed.entries
        self._state.changes += len(decision.batch)
        self._state.parked += len(decision.parked)
        for parked in decision.parked:
            item = parked.item
            _log.error(
                "entry %d of thread %r went to quarantine: %s",
                item.seq,
                item.thread_id,
                parked.cause,
                extra={"action": "entry_parked"},
            )
            if isinstance(item, StoredEntry):
                self._poison.pop(item.entry.id, None)
