"""The flush path: gather, coalesce, one transaction, ack, purge.

Rule 1: Postgres holds the truth. Watermarks, cursors, terms and parked entries change in the flush transaction
only; leases, acks and what is in memory here may be lost or wrong at any moment without losing an entry.
Rule 2: any doubt about a partition (a hole in its feed, another owner, a lost connection) ends in the same way: its
memory is dropped and it is taken again, from the cursor, with a higher term.

Theory of operation. A member renews its lease and computes the partitions that it owns. Taking a partition raises its
term in Postgres, which fences every earlier owner, and follows the log from the cursor. Every window, all owned
partitions are flushed in one transaction: rows locked in id order, `chain.plan` on the locked rows decides what is
applied, the domain coalesces it, watermarks and cursors move, commit. Then the progress report, then the ack, later
the purge.

Failure model. What passes is retried from memory. What says that one entry is to blame is split: by partition, by
thread, by entry; so a locked row delays only its own thread, and poison parks alone. What only an operator can
mend is retried slowly and reported. The loops restart themselves after an error nobody thought of.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential
from tenacity.stop import stop_when_event_set

from bufstore.buffer.chain import Parked, Row, plan
from bufstore.buffer.entry import Malformed, StoredEntry, assemble, entry_id
from bufstore.buffer.lease import Lease
from bufstore.buffer.ports import (
    AppendUnknown,
    Coalesce,
    Cursor,
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
from bufstore.buffer.retention import Retention
from bufstore.buffer.share import Item, Share
from bufstore.buffer.subjects import Subjects
from bufstore.buffer.verdict import Verdict
from bufstore.buffer.waiting import Waiting
from bufstore.config import BufferConfig
from bufstore.errors import BufstoreError, LogRolledBack, StoreMisconfigured, StoreUnavailable

_log = logging.getLogger(__name__)

_BACKOFF_MAX_S = 2.0
#: An app's code that raises for a thread is asked this often before the entry is taken for poison: about a minute.
_SUSPECT_TRIES = 10
_TAKE_RETRY_S = 0.5
#: A window that Postgres could not commit in time is tried again with half as many entries, down to this.
_ROOM_MIN = 50


@dataclass
class FlusherState:
    """What the flusher did and where it stands; counters since the start."""

    running: bool = False
    partitions: tuple[int, ...] = ()
    transactions: int = 0
    entries: int = 0
    changes: int = 0
    parked: int = 0
    retries: int = 0
    takeovers: int = 0
    pending: int = 0
    #: Why nothing is flushed at the moment; empty when all is well.
    trouble: str = ""
    #: True when the trouble needs an operator.
    stopped: bool = False


class _Later(Exception):
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


class Flusher:
    """Flushes the partitions it owns; see the module's text. One per process and log."""

    def __init__(
        self,
        log: Log,
        hot: HotState,
        ledger: Ledger,
        coalesce: Coalesce,
        subjects: Subjects,
        config: BufferConfig,
        member: str,
        prepare: Callable[[], Awaitable[None]],
    ) -> None:
        self._log = log
        self._hot = hot
        self._ledger = ledger
        self._coalesce = coalesce
        self._subjects = subjects
        self._config = config
        self._member = member
        self._prepare = prepare
        self._prepared = False
        self._loop = asyncio.get_running_loop()
        self._shares: dict[int, Share] = {}
        self._wanted: frozenset[int] = frozenset()
        self._wake = asyncio.Event()
        self._stopping = asyncio.Event()
        self._asked_at = float("-inf")
        self._window_began: float | None = None
        self._waiting = Waiting()
        #: Partitions that could not be taken, and when to try again.
        self._untakeable: dict[int, float] = {}
        self._room = config.flush_max_entries
        #: Entries that turned out not to be applicable, and why, until they are parked.
        self._poison: dict[int, str] = {}
        #: Threads that wait for room in quarantine, and whether that was said.
        self._unparkable: set[str | None] = set()
        self._quarantine_full = False
        self._tasks: list[asyncio.Task[None]] = []
        self._lease = Lease(hot, member, subjects.partitions, config.lease_s, self._own)
        self._retention = Retention(log, config, self._shares)
        self.state = FlusherState()

    async def start(self) -> None:
        """Join the members and begin to flush."""
        await self._hot.on_call(self._on_call)
        self.state.running = True
        loops = {"lease": self._lease.keep, "flush": self._flush_windows, "retention": self._retention.keep}
        for name, work in loops.items():
            task = asyncio.create_task(self._supervise(name, work), name=f"bufstore-flusher-{name}")
            self._tasks.append(task)

    async def aclose(self) -> None:
        """Stop: finish the window on its way, give up the partitions, leave the members."""
        if not self.state.running:
            return
        self._stopping.set()
        self._wake.set()
        self._lease.members_changed()
        _, late = await asyncio.wait(self._tasks, timeout=self._config.flush_timeout_s) if self._tasks else ((), ())
        for task in late:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for share in list(self._shares.values()):
            await self._drop(share, "closing")
        with contextlib.suppress(BufstoreError, AppendUnknown):
            await self._hot.leave(self._member)
        self.state.running = False

    def ask(self) -> None:
        """Flush now instead of at the end of the window; also what arrives within the next second."""
        self._asked_at = self._loop.time()
        self._wake.set()

    def owns(self, partition: int) -> bool:
        """Whether this flusher holds the partition."""
        return partition in self._shares

    # --- supervision ------------------------------------------------------------------------------------------

    async def _supervise(self, name: str, work: Callable[[asyncio.Event], Awaitable[None]]) -> None:
        while not self._stopping.is_set():
            try:
                await work(self._stopping)
            except Exception as e:
                self.state.trouble = f"{name}: unexpected {type(e).__name__}"
                _log.exception("the flusher's %s loop failed; it starts again", name, extra={"action": "flusher_error"})
                await self._pause(1.0)

    async def _pause(self, seconds: float) -> None:
        """Sleep, or until stopped."""
        with contextlib.suppress(asyncio.TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    # --- which partitions -------------------------------------------------------------------------------------

    def _on_call(self, partition: int) -> None:
        if partition < 0:
            self._lease.members_changed()
        elif partition in self._shares:
            self.ask()

    def _own(self, partitions: frozenset[int]) -> None:
        if partitions != self._wanted:
            self._wanted = partitions
            self._wake.set()

    async def _adjust(self) -> None:
        """Give up what is not ours (any more) or lost, take what is."""
        for partition, share in list(self._shares.items()):
            if share.feed.lost is not None:
                await self._drop(share, share.feed.lost)
            elif partition not in self._wanted:
                await self._drop(share, "another member owns it")
        now = self._loop.time()
        missing = sorted(p for p in self._wanted - self._shares.keys() if self._untakeable.get(p, 0.0) <= now)
        if not missing:
            return
        try:
            if not self._prepared:
                await self._prepare()
                self._prepared = True
            cursors = await self._ledger.take(missing, self._member)
        except (BufstoreError, FlushFailed) as e:
            self._report_trouble(e, stopped=isinstance(e, (StoreMisconfigured, LogRolledBack)))
            self._untakeable.update(dict.fromkeys(missing, now + _TAKE_RETRY_S))
            return
        for cursor in cursors:
            try:
                await self._follow(cursor)
                self._untakeable.pop(cursor.partition, None)
            except (BufstoreError, AppendUnknown) as e:
                # One partition that cannot be followed delays no other.
                self._report_trouble(e, stopped=isinstance(e, LogRolledBack))
                self._untakeable[cursor.partition] = now + _TAKE_RETRY_S

    async def _follow(self, cursor: Cursor) -> None:
        """Check that the log still is the one that the cursor speaks of, and follow it from there."""
        end = await self._log.end(5.0)
        if end < cursor.seq:
            raise LogRolledBack(
                f"the log ends at {end}, Postgres has applied partition {cursor.partition} to {cursor.seq}"
            )
        if cursor.id and cursor.seq >= self._log.generation_start:
            # The entry at the cursor is never purged: if it is not there, the log was purged further than this
            # Postgres has got, or it is not the same log.
            found = await self._log.identity(cursor.seq)
            if found is None or entry_id(found) != cursor.id:
                raise LogRolledBack(
                    f"position {cursor.seq} of the log no longer holds the entry at the cursor of partition "
                    f"{cursor.partition}; set its cursor_id to 0 in buffer_partitions to go on without a check"
                )
        feed = await self._log.feed(cursor.partition, cursor.term, cursor.seq + 1, self._wake.set)
        share = self._shares[cursor.partition] = Share(cursor, feed, self._subjects)
        if cursor.seq:
            # Committed by now, whenever that was: retention counts from here.
            share.commits.append((self._loop.time(), cursor.seq))
        self.state.takeovers += 1
        self.state.partitions = tuple(sorted(self._shares))

    async def _drop(self, share: Share, reason: str) -> None:
        _log.info("partition %d: %s", share.cursor.partition, reason, extra={"action": "partition_dropped"})
        self._shares.pop(share.cursor.partition, None)
        self.state.partitions = tuple(sorted(self._shares))
        await share.feed.close()

    # --- the window -------------------------------------------------------------------------------------------

    async def _flush_windows(self, stopping: asyncio.Event) -> None:
        pause = wait_random_exponential(multiplier=0.05, max=_BACKOFF_MAX_S)
        while True:
            async for attempt in AsyncRetrying(
                wait=pause,
                retry=retry_if_exception_type(_Later),
                stop=stop_when_event_set(stopping),  # type: ignore[arg-type]
                sleep=self._pause,
                before_sleep=self._count_retry,
                retry_error_callback=lambda _: None,
            ):
                with attempt:
                    await self._window()
            if stopping.is_set():
                return

    def _count_retry(self, state: RetryCallState) -> None:
        self.state.retries += 1

    async def _window(self) -> None:
        """Gather until a window is due, flush it."""
        while True:
            self._wake.clear()
            if not self._stopping.is_set():
                await self._adjust()
            for share in self._shares.values():
                if share.collect():
                    await share.feed.more()
            pending = self._pending()
            self.state.pending = sum(len(s.pending) for s in self._shares.values())
            if not pending and not self._untakeable:
                self._clear_trouble()
            wait = self._due_in(pending)
            if wait <= 0:
                break
            if self._stopping.is_set():
                return
            with contextlib.suppress(asyncio.TimeoutError):
                async with asyncio.timeout(wait):
                    await self._wake.wait()
        self._window_began = None
        if pending:
            self._asked_at = float("-inf")
            await self._settle(pending)
        await self._settle_waiting()
        if not self._untakeable:
            self._clear_trouble()

    async def _settle_waiting(self) -> None:
        """Try the threads that had to wait, each in a transaction of its own: it may have to wait again."""
        due = self._waiting.due(self._loop.time())
        items: dict[str | None, list[Item]] = {}
        for share in self._shares.values() if due else ():
            for item in share.pending.values():
                if item.thread_id in due:
                    items.setdefault(item.thread_id, []).append(item)
        self._waiting.discard(due - items.keys())  # their partition was given up
        together = {t: items.pop(t) for t in list(items) if t in self._unparkable}
        self._unparkable.difference_update(due)
        if together:  # what waits for room in quarantine asks for it once, not a thousand times
            await self._settle(together)
        for thread_id, entries in items.items():
            await self._settle({thread_id: entries})

    def _clear_trouble(self) -> None:
        self.state.trouble = self._waiting.trouble()
        self.state.stopped = False

    def _due_in(self, pending: Mapping[str | None, list[Item]]) -> float:
        """Seconds until the window must be flushed; at most what keeps lost feeds from going unnoticed."""
        count = sum(len(items) for items in pending.values())
        size = sum(share.pending_bytes for share in self._shares.values())
        if not count:
            now = self._loop.time()
            soonest = self._waiting.soonest(now + 1.0)
            return 0 if self._stopping.is_set() or soonest <= now else min(soonest - now, 1.0)
        now = self._loop.time()
        if self._window_began is None:
            self._window_began = now
        full = count >= self._config.flush_max_entries // 2 or size >= self._config.flush_max_bytes // 2
        if now - self._asked_at < 1.0 or full or self._stopping.is_set():
            return 0
        return min(self._window_began + self._config.flush_interval_s - now, 1.0)

    def _pending(self) -> dict[str | None, list[Item]]:
        """What to flush, by thread, bounded; threads whose row is locked by somebody wait their turn."""
        room = self._room
        found: dict[str | None, list[Item]] = {}
        for share in self._shares.values():
            for item in share.pending.values():
                if item.thread_id in self._waiting:
                    continue
                if room <= 0:
                    return found
                room -= 1
                found.setdefault(item.thread_id, []).append(item)
        return found

    # --- one transaction, split when it cannot commit whole ----------------------------------------------------------

    async def _settle(self, threads: Mapping[str | None, list[Item]], *, probe: bool = False) -> None:
        try:
            await self._commit(threads, probe=probe)
        except NotOwner as e:
            for partition in {self._partition_of(t, items) for t, items in threads.items()}:
                if partition in self._shares:
                    await self._drop(self._shares[partition], f"another owner took it ({e})")
            raise _Later from e
        except (StoreUnavailable, StoreMisconfigured) as e:
            # Maybe it was too much for the time there is.
            self._room = max(_ROOM_MIN, min(self._room, sum(map(len, threads.values()))) // 2)
            self._report_trouble(e, stopped=isinstance(e, StoreMisconfigured))
            raise _Later from e
        except _NoRoom as e:
            await self._settle_parkable(threads, e)
        except FlushFailed as e:
            what = e.verdict
            if what in (Verdict.RETRY, Verdict.STOP):
                self._report_trouble(e, stopped=what is Verdict.STOP)
                raise _Later from e
            if e.culprits:
                await self._settle_culprits(threads, e)
            elif what is Verdict.POISON and len(threads) > 1 and not probe:
                await self._settle(threads, probe=True)
            else:
                await self._settle_parts(threads, what, e)
        except (BufstoreError, AppendUnknown) as e:
            self._report_trouble(e, stopped=False)
            raise _Later from e

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
            # In order, and only as far as it goes: the second half builds on the first.
            second = {t: items for t, items in second.items() if t not in self._waiting}
            if second:
                await self._settle(second)

    async def _settle_parts(self, threads: Mapping[str | None, list[Item]], what: Verdict, error: FlushFailed) -> None:
        """Commit in smaller parts what cannot be committed whole."""
        if len(threads) > 1:
            for part in _split(threads, self._partition_of):
                await self._settle(part)
            return
        ((thread_id, items),) = threads.items()
        if thread_id is not None and self._has_to_wait(thread_id, what, error):
            return
        if what is Verdict.ISOLATE:  # our own tables: nothing of one thread
            self._report_trouble(error, stopped=False)
            raise _Later from error
        if len(items) > 1:
            # In order, and only as far as it goes: the second half builds on the first.
            await self._settle({thread_id: items[: len(items) // 2]})
            if thread_id not in self._waiting:
                await self._settle({thread_id: items[len(items) // 2 :]})
        else:
            item = items[0]
            if not isinstance(item, StoredEntry) or item.entry.id in self._poison:
                # Parking itself was refused: this is not about the entry.
                self._report_trouble(error, stopped=False)
                raise _Later from error
            self._poison[item.entry.id] = str(error)
            await self._settle(threads)

    def _has_to_wait(self, thread_id: str, what: Verdict, error: FlushFailed) -> bool:
        if what is Verdict.POISON:
            return False
        tries = self._waiting.tries(thread_id)
        if what is Verdict.SUSPECT and tries >= _SUSPECT_TRIES:
            return False
        if not tries:
            _log.warning("thread %s has to wait: %s", thread_id, error, extra={"action": "thread_waits"})
        self._waiting.add(thread_id, str(error), self._loop.time())
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
            self._waiting.add(thread_id, str(error), self._loop.time())
        if not self._quarantine_full:
            self._quarantine_full = True
            _log.error("%s", error, extra={"action": "quarantine_full"})
        if rest:
            await self._settle(rest)

    async def _commit(self, threads: Mapping[str | None, list[Item]], *, probe: bool) -> None:
        """Flush these threads' entries in one transaction; on return they are settled."""
        filled: dict[str, list[Item]] = {}
        parked: list[Parked] = []

        def decide(rows: Mapping[str, Row]) -> Decision:
            decision = self._decide(threads, filled, rows)
            parked[:] = decision.parked
            return decision

        while True:
            settled = {item.seq for items in threads.values() for item in items}
            shares = [share for _, share in sorted(self._shares.items()) if not settled.isdisjoint(share.pending)]
            moves = [Move(share.cursor, share.cursor_after(settled)) for share in shares]
            try:
                names = sorted(t for t in threads if t is not None)
                decision = await self._ledger.flush(moves, names, decide, probe=probe)
                break
            except QuarantineFull as e:
                raise _NoRoom(e, parked) from e
            except _Gap as gap:
                for thread_id, after in gap.threads.items():
                    filled[thread_id] = await self._fill(thread_id, after, max(i.seq for i in threads[thread_id]))
        # The second line that matters, the commit, is behind us: entries, watermarks and cursor are in Postgres
        # together. Acknowledging before it would lose what a crash rolls back.
        now = self._loop.time()
        self._room = min(2 * self._room, self._config.flush_max_entries)
        for share, move in zip(shares, moves, strict=True):
            share.settle(settled, move.after, now, resolution_s=self._config.retain_after_flush_s / 1000)
        self._count(threads, decision)
        with contextlib.suppress(BufstoreError):  # waiters also look into Postgres
            await self._hot.report({move.after.partition: move.after.seq for move in moves})
            for thread_id in {p.item.thread_id for p in decision.parked if p.item.thread_id is not None}:
                await self._hot.tell_parked(thread_id)
        for share in shares:
            await share.feed.ack(share.cursor.seq)

    def _decide(
        self, threads: Mapping[str | None, list[Item]], filled: Mapping[str, list[Item]], rows: Mapping[str, Row]
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
            while True:
                complete = thread_id in filled
                todo = plan(row, [*filled.get(thread_id, ()), *items], complete=complete, poison=self._poison.keys())
                if todo.gap_before is not None:
                    gaps[thread_id] = row.flushed_seq
                    break
                try:
                    if todo.apply:
                        batch.append(self._coalesce(thread_id, row.version, todo.apply))
                except Inapplicable as e:
                    self._poison[e.entry_id] = str(e)
                    continue
                new_rows[thread_id] = todo.row
                parked += map(self._with_cause, todo.park)
                break
        if gaps:
            raise _Gap(gaps)
        return Decision(batch=batch, rows=new_rows, parked=parked)

    def _with_cause(self, parked: Parked) -> Parked:
        cause = self._poison.get(parked.item.entry.id) if isinstance(parked.item, StoredEntry) else None
        return parked if cause is None else msgspec.structs.replace(parked, cause=cause)

    async def _fill(self, thread_id: str, after: int, last: int) -> list[Item]:
        """The thread's entries in the log above one position, up to another."""
        messages = await self._log.after(self._subjects.of(thread_id), after, 10.0)
        return [item for item in assemble(messages, thread_id) if item.seq <= last]

    def _partition_of(self, thread_id: str | None, items: Sequence[Item]) -> int:
        if thread_id is not None:
            return self._subjects.partition(thread_id)
        item = items[0]
        assert isinstance(item, Malformed)
        return next((p for p, s in self._shares.items() if item.seq in s.pending), -1)

    def _count(self, threads: Mapping[str | None, list[Item]], decision: Decision) -> None:
        self._waiting.discard(threads)
        self._quarantine_full = self._quarantine_full and not decision.parked
        self.state.transactions += 1
        self.state.entries += sum(len(items) for items in threads.values())
        self.state.changes += len(decision.batch)
        self.state.parked += len(decision.parked)
        for parked in decision.parked:
            item = parked.item
            _log.error(
                "entry %d of thread %s is quarantined: %s",
                item.seq,
                item.thread_id,
                parked.cause,
                extra={"action": "entry_parked"},
            )
            if isinstance(item, StoredEntry):
                self._poison.pop(item.entry.id, None)

    def _report_trouble(self, error: BaseException, *, stopped: bool) -> None:
        text = f"{type(error).__name__}: {error}"
        if text != self.state.trouble:
            level = logging.ERROR if stopped else logging.WARNING
            _log.log(level, "cannot flush: %s", text, extra={"action": "flush_failed"})
        self.state.trouble, self.state.stopped = text, stopped


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
