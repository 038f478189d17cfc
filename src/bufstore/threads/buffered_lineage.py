"""Changes of lineage of a buffered store, one at a time, across processes.

A change touches several threads, whose entries no single message can hold. So each change is first written, whole, to
one record in the shared state, with the record's last sequence as compare-and-set. This gives the change its place
among the others, and proves that no other change came between its checks and its record. Then its edits are appended,
and the record is marked as done.

Failure model. A process that finds an unmarked change carries that change out first: edits can be repeated. A process
that comes back late to its own change reads a thread, looks at the record, and then appends directly behind what it
read. If the record has moved on, another process has carried the change out. If the record moves after the look, the
other process's edit of the thread fails the append. If a process fails after its change took its place, the outcome is
unknown, and the next process carries the change out. Only a final refusal (a thread in quarantine) ends a change: it is
marked as done and goes no further, so that it stops no other change. A record that cannot be read stops others only for
as long as a change may take. A process carries out another's deletion only if the thread's last entry is still the one
that the deletion was decided on. A thread with later entries may have been deleted before them, and deleting it again
would lose what was acknowledged later. If the bucket is lost while two changes are under way, they may overlap.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import TypeVar

import msgspec
from tenacity import AsyncRetrying, retry_if_exception_type, wait_random_exponential

from bufstore.buffer import producers
from bufstore.errors import (
    FlushTimeout,
    LineageError,
    LogFull,
    LogUnavailable,
    NotFound,
    OutcomeUnknown,
    ReadNotFresh,
    Rejected,
    StoreMisconfigured,
    StoreUnavailable,
    ThreadQuarantined,
    Unavailable,
)
from bufstore.failpoints import Failpoint, reach
from bufstore.jetstream.messages import AppendUnknown, Conflict
from bufstore.threads.buffered_edits import BufferedEdits, Overtaken
from bufstore.threads.edits import WantedEdit
from bufstore.threads.lanes import ThreadLanes
from bufstore.threads.lineage import (
    Children,
    Family,
    Going,
    LineageChange,
    NamedParents,
    carry_out,
    check,
    descendants,
)
from bufstore.threads.lists import BufferedLists
from bufstore.threads.model import Run, Thread
from bufstore.threads.parked_parents import ParkedParents
from bufstore.threads.queries import LIMIT_MAX, ThreadQuery
from bufstore.threads.runs import Runs
from bufstore.threads.state import ThreadState
from bufstore.types import Consistency, Receipt

T = TypeVar("T")


class _Record(msgspec.Struct, frozen=True, array_like=True):
    id: int
    change: LineageChange
    done: bool = False
    #: For a deletion: the id of the thread's last entry when the change took its place. None for other changes.
    base: int | None = None
    #: The producer's item in the entry of the named thread (`bufstore.buffer.producers`); None: no producer.
    mark: bytes | None = None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Record).decode


class BufferedLineage:
    """Carries out changes of lineage; see the module's text."""

    def __init__(self, lanes: ThreadLanes, runs: Runs, lists: BufferedLists, edits: BufferedEdits) -> None:
        self._lanes, self._config = lanes, lanes.config
        #: The first lane's shared state, which has the record for all lanes.
        self._shared = lanes.first.shared
        self._runs, self._lists, self._edits = runs, lists, edits
        self._parents = NamedParents(self._thread, self.change if edits.taken else None)
        self._parked = ParkedParents(lanes, self._shown)
        #: The ids of changes whose record may have been stored.
        self._placed: set[int] = set()
        #: Changes of this process take turns: else each would finish the one that is under way, and look again.
        self._turn = asyncio.Lock()
        #: The sequence of a record that cannot be read, and the loop's time when it was first seen.
        self._unread = (0, 0.0)

    async def agreed(self, run: Run) -> bool:
        """See `NamedParents.agreed`. True also where `admit` checks nothing."""
        if run.parent_thread_id is None:
            return True
        with self._unchecked():
            async with asyncio.timeout(self._config.read_timeout_s):
                return await self._parents.agreed(run)
        return True

    async def admit(self, run: Run) -> None:
        """Check the parent that a run names, and claim its id, before a checkpoint of it.

        If only Postgres knows the parent and is away or refuses to tell, or the lane of the parent or of the record is
        away or full, or changes of lineage take all of ``read_timeout_s``, nothing is checked: the checkpoint is more
        important. Raises LineageError if the run names a parent that its thread cannot have, AlreadyExists.
        """
        if run.parent_thread_id is not None:
            await self._surely((run.thread_id, run.parent_thread_id), partial(self._check_named, run))
        await self._runs.claim(run.run_id, run.thread_id)

    async def _check_named(self, run: Run) -> None:
        """Check the parent that the run names, if that can be done in time."""
        with self._unchecked():
            async with asyncio.timeout(self._config.read_timeout_s):
                await self._parents.check(run)

    def _unchecked(self) -> contextlib.suppress:
        """What a check of a named parent may fail with, and the checkpoint is written all the same."""
        # Where there is one log, the checkpoint would fail for the same reason, and later.
        others = (LogUnavailable, LogFull) if len(self._lanes.all) > 1 else ()
        return contextlib.suppress(StoreUnavailable, StoreMisconfigured, ReadNotFresh, TimeoutError, *others)

    async def change(self, wanted: LineageChange, mark: bytes | None = None, going: Going | None = None) -> Receipt:
        """Check the change, take a place, carry it out. Raises NotFound, LineageError, what reads and appends raise.

        `mark`: an item of `bufstore.buffer.producers`; a change that the named thread has already is not made again.
        `going`: see `Family`.

        Bounded by ``flush_timeout_s``. A change that fails or is given up after it took its place raises
        OutcomeUnknown, and the next change carries it out; repeating it is safe.
        """
        self._edits.check_store()
        mine = _Record(secrets.randbits(63), wanted, mark=mark)
        try:
            async with asyncio.timeout(self._config.flush_timeout_s):
                return await self._in_turn(wanted, mine, going)
        except (TimeoutError, Unavailable, OutcomeUnknown, ReadNotFresh, FlushTimeout, StoreMisconfigured) as e:
            if mine.id in self._placed:
                raise OutcomeUnknown(wanted.thread_id, f"{mine.id:x}") from e
            if isinstance(e, (TimeoutError, OutcomeUnknown)):  # OutcomeUnknown: of a change to be finished first
                raise LogUnavailable(
                    f"thread {wanted.thread_id!r} was not changed in time: it waited for others, for Postgres or "
                    "for the log; nothing was done; retry"
                ) from e
            raise
        finally:
            if mine.id in self._placed:
                self._placed.discard(mine.id)
                self._parents.forget()

    async def _in_turn(self, wanted: LineageChange, mine: _Record, going: Going | None) -> Receipt:
        if self._turn.locked():
            # What is away shows here, to all at once: in turn, each would wait for it by itself.
            with contextlib.suppress(Rejected):
                await self._check(wanted)
        async with self._turn:
            return await self._change(wanted, mine, going)

    async def _change(self, wanted: LineageChange, mine: _Record, going: Going | None) -> Receipt:
        while True:
            seq, record = await self._record()
            if record is not None and not record.done:
                await self._finish(record, seq)
                continue
            if mine.mark is not None:
                known = (await self._joined(wanted.thread_id))[0].watermark
                if producers.holds(known.producers, mine.mark):
                    return Receipt(wanted.thread_id, known.flushed_seq, known.applied_id, known.version, repeated=True)
            named = wanted.thread_id, wanted.parent_thread_id
            mine = msgspec.structs.replace(mine, base=await self._surely(named, lambda: self._check(wanted)))
            self._placed.add(mine.id)
            reach(Failpoint.LINEAGE_BEFORE)
            try:
                seq = await self._shared.put_lineage(_encode(mine), seq, self._config.append_timeout_s)
            except (Conflict, AppendUnknown):
                seq, record = await self._record()
                if record is None or record.id != mine.id:
                    self._placed.discard(mine.id)
                    self._parents.forget()
                    continue  # another's record; if ours was there before, it is carried out: repeating is harmless
            reach(Failpoint.LINEAGE_PLACED)
            try:
                # `repeated` is set if another process carried the change out first, but the thread did not have the
                # mark when this change took its place.
                receipt = msgspec.structs.replace(await self._carry_out(mine, seq, going), repeated=False)
            except (Overtaken, NotFound) as e:
                state, last = await self._joined(wanted.thread_id)
                there = state.thread is not None or state.watermark.broken_since is not None
                if wanted.children is not None and there and isinstance(e, Overtaken):
                    # The thread was deleted and written again, or written to and not deleted. Or a process of an older
                    # release, which knows nothing of a thread that only quarantine has, marked the change as done.
                    raise OutcomeUnknown(wanted.thread_id, f"{mine.id:x}") from e
                receipt = Receipt(wanted.thread_id, last, state.watermark.applied_id, state.watermark.version)
            except LogFull as e:
                # Any process that has read the record, this one too, may carry the change out when there is room again.
                raise OutcomeUnknown(wanted.thread_id, f"{mine.id:x}") from e
            except Rejected as e:
                several = wanted.children in (Children.DETACH, Children.CASCADE)  # some edits may be stored
                if await self._mark(mine, seq) and not several:
                    raise
                raise OutcomeUnknown(wanted.thread_id, f"{mine.id:x}") from e
            reach(Failpoint.LINEAGE_CARRIED_OUT)
            await self._mark(mine, seq)
            reach(Failpoint.LINEAGE_MARKED)
            return receipt

    async def _surely(self, named: Iterable[str | None], check: Callable[[], Awaitable[T]]) -> T:
        """Check; before it refuses, check again what a leader may have shown that the other nodes have left.

        `named`: the threads whose logs must prove themselves. If one cannot, it stays with the refusal.
        """
        try:
            return await check()
        except (NotFound, LineageError):
            if not await self._proven(t for t in named if t is not None):
                raise
        return await check()

    async def _proven(self, thread_ids: Iterable[str]) -> bool:
        """Return whether this process has seen all that was acknowledged of these threads before this call."""
        timeout_s = self._config.read_timeout_s / 2
        try:
            async with asyncio.timeout(timeout_s):
                for buffer, _ in self._lanes.shared_out(thread_ids):
                    await buffer.log.latest_partition_ends(timeout_s)
        except (TimeoutError, LogUnavailable, AppendUnknown):
            return False
        return True

    async def _check(self, wanted: LineageChange) -> int | None:
        """Check the change. Returns the `base` of its `_Record`. Raises NotFound, LineageError."""
        base = None
        if wanted.children is not None:
            base = (await self._joined(wanted.thread_id))[0].watermark.applied_id
        family = self._family(None)
        await check(family, wanted)
        # What cannot be done to a child in quarantine is refused before anything is done.
        if wanted.children is Children.DETACH:
            for child in await family.children(wanted.thread_id):
                await self._lanes.of(child).reads.thread(child, Consistency.READ_YOUR_WRITES)
        elif wanted.children is Children.CASCADE:
            # What is acknowledged now may be parked by its flush.
            leaving = await self._lists.settled(
                lambda: self._parked.leaving(wanted.thread_id, lambda t: descendants(family, t))
            )
            if leaving is not None:
                raise ThreadQuarantined(*leaving)
        return base

    async def _finish(self, record: _Record, seq: int) -> None:
        """Carry out another process's change as far as possible, and mark it as done."""
        try:
            if (
                record.base is None
                or (await self._joined(record.change.thread_id))[0].watermark.applied_id == record.base
            ):
                await self._carry_out(record, seq)
        except LogFull:
            raise
        except (Overtaken, Rejected):
            pass  # another process did it; or the change can go no further, and must not stop others
        finally:
            self._parents.forget()
        await self._mark(record, seq)

    async def _carry_out(self, record: _Record, seq: int, going: Going | None = None) -> Receipt:
        return await carry_out(self._family(seq, record)._replace(going=going), record.change)

    async def _mark(self, record: _Record, seq: int) -> bool:
        """Mark the change as done, trying as often as needed. Returns False when another process was faster.

        The caller bounds the time. No caller may be told that its change is done before it is marked: the next process
        would repeat the change, and a repeated deletion would delete what was written in between.
        """
        done = _encode(msgspec.structs.replace(record, done=True))
        try:
            async for attempt in AsyncRetrying(
                wait=wait_random_exponential(multiplier=0.02, max=0.2),
                retry=retry_if_exception_type((AppendUnknown, LogUnavailable)),
            ):
                with attempt, contextlib.suppress(Conflict):
                    await self._shared.put_lineage(done, seq, self._config.append_timeout_s)
                    return True
        except LogFull as e:  # no refusal of the change, which has its place
            raise LogUnavailable(str(e)) from None
        return False

    async def _record(self) -> tuple[int, _Record | None]:
        seq, body = await self._shared.lineage(self._config.append_timeout_s)
        try:
            return seq, _decode(body) if body else None
        except msgspec.MsgspecError:
            # A newer release may have written it, and may be at work on its change for as long as a change may take.
            now = asyncio.get_running_loop().time()
            if self._unread[0] != seq:
                self._unread = seq, now
            if now - self._unread[1] >= self._config.flush_timeout_s:
                return seq, None
            raise LineageError(
                "this release cannot read the lineage record in the shared state; a change that "
                f"finds it unchanged {self._config.flush_timeout_s:g} s from now replaces it: retry then"
            ) from None

    async def _joined(self, thread_id: str) -> tuple[ThreadState, int]:
        return await self._lanes.of(thread_id).reads.joined(thread_id)

    async def _thread(self, thread_id: str) -> Thread | None:
        """The thread with the parent that it has, or would have after a replay of what is parked of it.

        A thread of which quarantine has everything is there: a replay makes it. Raises StoreUnavailable if the parent
        is not known.
        """
        state, _ = await self._joined(thread_id)
        if state.watermark.broken_since is None:
            return self._known(thread_id, state)
        parent = await self._parked.parent_of(thread_id)
        return msgspec.structs.replace(state.thread or Thread(thread_id=thread_id), parent_thread_id=parent)

    async def _shown(self, thread_id: str) -> Thread | None:
        """The thread as reads show it, even with a broken chain. Raises StoreUnavailable if its parent is unknown."""
        return self._known(thread_id, (await self._joined(thread_id))[0])

    def _known(self, thread_id: str, state: ThreadState) -> Thread | None:
        if state.partial and state.thread is not None and state.thread.parent_thread_id is None:
            down = self._lanes.of(thread_id).reads.store.reason
            raise StoreUnavailable(f"only Postgres knows which parent thread {thread_id!r} has: {down}")
        return state.thread

    async def _children(self, thread_id: str) -> list[str]:
        """The ids of all children, flushed or not, or in quarantine."""
        return await self._lists.settled(lambda: self._flushed_children(thread_id))

    async def _flushed_children(self, thread_id: str) -> list[str]:
        # Before the store: a replay moves an entry from quarantine into the store, and must not do so between the two.
        found = set(await self._parked.children(thread_id))
        query, cursor, before = ThreadQuery(parent_thread_id=thread_id), None, -1
        while True:
            page = await self._lists.threads(query, LIMIT_MAX, cursor, Consistency.EVENTUAL)
            found.update(thread.thread_id for thread in page.threads)
            if page.next_cursor is None:
                if cursor is None or len(found) == before:
                    return sorted(found)
                # A child that changed between two pages moved to the front and is on neither: look again.
                before = len(found)
            cursor = page.next_cursor

    async def descendants(self, thread_id: str) -> list[str]:
        """The threads that a deletion with `Children.CASCADE` would take along."""
        return await descendants(self._family(None), thread_id)

    def _family(self, seq: int | None, record: _Record | None = None) -> Family:
        """The threads as a change of lineage sees them.

        An edit raises Overtaken unless the record is still the one at `seq`. With None, the caller makes no edits.
        """

        async def overtaken() -> bool:
            return (await self._shared.lineage(self._config.append_timeout_s))[0] != seq

        async def edit(wanted: WantedEdit) -> Receipt:
            mark = record.mark if record is not None and wanted.thread_id == record.change.thread_id else None
            receipt = await self._edits.edit(wanted, overtaken=overtaken, mark=mark)
            reach(Failpoint.LINEAGE_EDITED)
            return receipt

        return Family(self._thread, self._children, edit)
