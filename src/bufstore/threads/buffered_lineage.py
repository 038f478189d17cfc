"""Changes of lineage of a buffered store, one at a time, across processes.

They touch several threads, whose entries no single message can hold. So each is first written, whole, to one record in
the hot bucket, with the record's last sequence as compare-and-set: that is where it takes its place among the others,
and proves that none came between its checks and it. Then its edits are appended, and the record is marked as done.

Failure model. Who finds a change that is not marked carries it out first: edits can be repeated. Who comes back to his
own, late, looks at the record between reading a thread and the append that stands directly behind what was read: if the
record has moved on, his change has been carried out by somebody else; if it moves after the look, that change of the
thread fails the append. A bucket that is lost while two changes are under way lets them overlap.

A checkpoint whose run gives a thread its parent is such a change too, if the thread is there already. Its record stands
while it is appended, and others wait for it, as long as an append may take: refused, it has changed nothing. Of a
process that died they then carry out the parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable

import msgspec

from bufstore.buffer.ports import AppendUnknown, Conflict, HotState
from bufstore.config import BufferConfig
from bufstore.errors import (
    LineageError,
    LogUnavailable,
    NotFound,
    OutcomeUnknown,
    ReadNotFresh,
    Rejected,
    StoreUnavailable,
    Unavailable,
)
from bufstore.threads.buffered_edits import BufferedEdits, Overtaken
from bufstore.threads.edits import Change
from bufstore.threads.lineage import LineageChange, NamedParents, carry_out, check, new_parent
from bufstore.threads.lists import BufferedLists
from bufstore.threads.model import Run, Thread
from bufstore.threads.queries import LIMIT_MAX, ThreadQuery
from bufstore.threads.read import ThreadReads
from bufstore.types import Consistency, Receipt


class _Record(msgspec.Struct, frozen=True, array_like=True):
    id: int
    change: LineageChange
    done: bool = False
    #: True for a checkpoint: whoever wrote it is about to append it.
    saving: bool = False


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Record).decode


class BufferedLineage:
    """Carries out changes of lineage; see the module's text."""

    def __init__(
        self, reads: ThreadReads, lists: BufferedLists, edits: BufferedEdits, hot: HotState, config: BufferConfig
    ) -> None:
        self._reads = reads
        self._lists = lists
        self._edits = edits
        self._hot = hot
        self._config = config
        self._parents = NamedParents(self.thread)
        #: Changes whose record may have been stored.
        self._placed: set[int] = set()
        #: The last checkpoint's record that was waited for, and since when.
        self._awaited = (0, 0.0)

    async def saving(self, run: Run, append: Callable[[], Awaitable[Receipt]]) -> Receipt:
        """Append a checkpoint, in its turn if its run changes the lineage of a thread that is there.

        Raises LineageError if the run names a parent that its thread cannot have, and what `append` raises. When only
        Postgres could tell and it is away, the checkpoint is more important: nothing is checked.
        """
        if await self._gives_parent(run) and self._edits.possible:
            receipt = await self._save_in_turn(run, append)
        else:
            receipt = await append()
        self._parents.remember(run)
        return receipt

    async def _gives_parent(self, run: Run) -> bool:
        with contextlib.suppress(StoreUnavailable, ReadNotFresh, TimeoutError):
            async with asyncio.timeout(self._config.read_timeout_s):
                return await self._parents.check(run)
        return False

    async def _save_in_turn(self, run: Run, append: Callable[[], Awaitable[Receipt]]) -> Receipt:
        mine = _Record(secrets.randbits(63), new_parent(run.thread_id, run.parent_thread_id), saving=True)
        try:
            async with asyncio.timeout(self._config.read_timeout_s + self._config.append_timeout_s):
                seq = await self._turn(mine, lambda: self._gives_parent(run))
        except TimeoutError:
            raise self._no_turn(mine) from None
        finally:
            self._placed.discard(mine.id)
        try:
            # Not within that timeout: an append ends by itself, and knows what came of it.
            receipt = await append()
        except (Rejected, Unavailable):
            if seq is not None:
                await self._mark(mine, seq)
            raise
        if seq is not None:
            await self._mark(mine, seq)
        return receipt

    async def change(self, wanted: LineageChange) -> Receipt:
        """Check, take a place, carry out. Raises NotFound, LineageError, and what reads and appends raise.

        Bounded by ``flush_timeout_s``. Given up after it took its place: OutcomeUnknown, and the next change carries it
        out; repeating it is safe.
        """
        self._edits.check_store()
        self._parents.forget()
        mine = _Record(secrets.randbits(63), wanted)
        try:
            async with asyncio.timeout(self._config.flush_timeout_s):
                return await self._change(wanted, mine)
        except TimeoutError:
            raise self._no_turn(mine) from None
        finally:
            self._placed.discard(mine.id)

    def _no_turn(self, mine: _Record) -> OutcomeUnknown | LogUnavailable:
        thread_id = mine.change.thread_id
        if mine.id in self._placed:
            return OutcomeUnknown(thread_id, f"{mine.id:x}")
        return LogUnavailable(f"no turn to change the lineage of thread {thread_id!r} in time")

    async def _change(self, wanted: LineageChange, mine: _Record) -> Receipt:
        async def wants() -> bool:
            await check(_Family(self, None), wanted)
            return True

        seq = await self._turn(mine, wants)
        assert seq is not None
        try:
            receipt = await self._carry_out(mine, seq)
        except (Overtaken, NotFound):
            state, last = await self._reads.joined(wanted.thread_id)
            receipt = Receipt(wanted.thread_id, last, state.row.applied_id, state.row.version)
        await self._mark(mine, seq)
        return receipt

    async def _turn(self, mine: _Record, wants: Callable[[], Awaitable[bool]]) -> int | None:
        """Finish what others began, ask whether the change is still wanted, put its record: where it stands then."""
        while True:
            seq, record = await self._record()
            if record is not None and not record.done:
                await self._finish(record, seq)
                continue
            if not await wants():
                return None
            self._placed.add(mine.id)
            try:
                return await self._hot.put_lineage(_encode(mine), seq, self._config.append_timeout_s)
            except (Conflict, AppendUnknown):
                seq, record = await self._record()
                if record is not None and record.id == mine.id:
                    return seq
                self._placed.discard(mine.id)  # another's; if mine was there before it, it has been carried out

    async def _finish(self, record: _Record, seq: int) -> None:
        """Wait for another's checkpoint that is being appended; carry out anything else, and what is overdue."""
        if record.saving:
            now = asyncio.get_running_loop().time()
            if self._awaited[0] != record.id:
                self._awaited = (record.id, now)
            waited = now - self._awaited[1]
            if waited < self._config.append_timeout_s:
                await asyncio.sleep(min(0.005 + waited / 10, 0.25))
                return
        with contextlib.suppress(Overtaken, NotFound):
            await self._carry_out(record, seq)
        await self._mark(record, seq)

    async def _carry_out(self, record: _Record, seq: int) -> Receipt:
        return await carry_out(_Family(self, seq), record.change)

    async def _mark(self, record: _Record, seq: int) -> None:
        done = msgspec.structs.replace(record, done=True)
        with contextlib.suppress(Conflict, AppendUnknown, LogUnavailable):  # else the next one does it again
            await self._hot.put_lineage(_encode(done), seq, self._config.append_timeout_s)

    async def _record(self) -> tuple[int, _Record | None]:
        seq, body = await self._hot.lineage(self._config.append_timeout_s)
        try:
            return seq, _decode(body) if body else None
        except msgspec.MsgspecError:
            raise LineageError("the lineage record in the hot bucket is none of this release") from None

    async def thread(self, thread_id: str) -> Thread | None:
        """The thread as reads show it, also with a broken chain."""
        return (await self._reads.joined(thread_id))[0].thread

    async def children(self, thread_id: str) -> list[str]:
        """All children, flushed ones and others."""
        query = ThreadQuery(parent_thread_id=thread_id)
        found: list[str] = []
        level, cursor = Consistency.READ_YOUR_WRITES, None
        while True:
            page = await self._lists.threads(query, LIMIT_MAX, cursor, level)
            found += [thread.thread_id for thread in page.threads]
            level, cursor = Consistency.EVENTUAL, page.next_cursor  # flushed by the first page's barrier
            if cursor is None:
                return sorted(set(found))

    async def edit(self, wanted: Change, seq: int | None) -> Receipt:
        """Append an edit while the record still is the one at `seq`. Raises Overtaken."""

        async def overtaken() -> bool:
            return (await self._hot.lineage(self._config.append_timeout_s))[0] != seq

        return await self._edits.edit(wanted, overtaken=overtaken)


class _Family:
    """See `bufstore.threads.lineage.Family`: with the record at `seq`, if edits are to be made."""

    def __init__(self, lineage: BufferedLineage, seq: int | None) -> None:
        self._lineage = lineage
        self._seq = seq

    async def thread(self, thread_id: str) -> Thread | None:
        return await self._lineage.thread(thread_id)

    async def children(self, thread_id: str) -> list[str]:
        return await self._lineage.children(thread_id)

    async def edit(self, wanted: Change) -> Receipt:
        return await self._lineage.edit(wanted, self._seq)
