"""What a buffered saver does with the log of one lane and the store behind it, below LangGraph's own objects."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import msgspec

from bufstore.buffer.buffer import Buffer
from bufstore.buffer.domain import nothing_to_do
from bufstore.buffer.entry import StoredEntry
from bufstore.buffer.operate.quarantine import discard_superseded
from bufstore.config import BufferConfig
from bufstore.errors import (
    ConcurrentWriter,
    NotFound,
    ReadNotFresh,
    StoreMisconfigured,
    StoreUnavailable,
    ThreadQuarantined,
    Unavailable,
)
from bufstore.home import Home
from bufstore.langgraph.admission import Admission
from bufstore.langgraph.ancestors import Walk
from bufstore.langgraph.backlog import Backlog
from bufstore.langgraph.domain import LANGGRAPH
from bufstore.langgraph.model import CheckpointKey, CheckpointRow, Delete, Drop, Operation, Put, Tables
from bufstore.langgraph.outlines import within
from bufstore.langgraph.payload import encode_payload, saves_of
from bufstore.langgraph.protocol import CheckpointStore, Outline
from bufstore.langgraph.read_cache import ReadCache
from bufstore.langgraph.reads import CachingReader, CheckpointBuffer, CheckpointReads
from bufstore.langgraph.recent import End, Recent
from bufstore.langgraph.write import Appending, Overtaken
from bufstore.nats.session import Nats, session_to
from bufstore.newest import Newest
from bufstore.types import Consistency, Receipt

#: What to do about a thread that the log does not show while Postgres is away: see docs/LANGGRAPH.md.
NewThreads = Literal["ask", "assume"]
#: Whether a write is refused when another worker has written to the thread since it was read.
OnConflict = Literal["allow", "reject"]


#: How many runs may read what they begin with at the same time: more than keep a pool's connections busy.
_BEGIN_AT_ONCE = 64
_CARRY_BYTES = 1 << 20
#: How many entries in quarantine are looked at at a time.
_PAGE = 100
#: How often, at most, the rows of a drop are chosen: again whenever somebody has written to the thread.
_DROP_TRIES = 10


class LastPut(msgspec.Struct, gc=False):
    """A checkpoint that this process has saved."""

    #: Its id; None: it is not saved yet, or others were being saved beside it.
    id: str | None = None
    #: The thread's life behind it (`bufstore.langgraph.domain.Known`); None: not known.
    life: int | None = None


class CheckpointLane:
    """The buffer of one lane in front of a `CheckpointStore`, and what is done with threads of this lane."""

    def __init__(
        self,
        store: CheckpointStore,
        nats: Nats,
        config: BufferConfig,
        *,
        name: str,
        backlog_bytes: int,
        consistency: Consistency,
        new_threads: NewThreads,
        on_conflict: OnConflict,
        cache_bytes: int,
    ) -> None:
        """`config`: the lane's. `store`: that of all lanes, opened and closed with the first lane's buffer.

        `name`: what the servers call this process. `backlog_bytes`: how much may wait for the log.
        """
        #: The last entry of each thread that this process has read or written: its position (0 if it was read), and
        #: its id. None: nobody asks.
        self._seen: Newest[str, tuple[int, int]] | None = None
        if on_conflict == "reject":
            self._seen = Newest(config.cached_threads)
        #: The last checkpoint that this process saved, by thread and namespace.
        self._put: Newest[tuple[str, str], LastPut] = Newest(config.cached_threads)
        self._store = store = store.of_lane(config.log)
        self._consistency, self._assume_new = consistency, new_threads == "assume"
        self._is_down = self._store_is_down
        ledger, backing = store.behind(config)
        if config.log.lane:
            backing = replace(backing, open=nothing_to_do, aclose=nothing_to_do)
        cache = ReadCache(cache_bytes // 2)
        # 0 where history is left out: there, a flush may give the newest checkpoint another parent.
        self._recent = Recent(cache_bytes // 2 if store.history == "all" else 0)
        reader = CachingReader(backing.reader, cache)
        backing = replace(backing, reader=reader, remembered=reader.remembered)
        self.buffer: CheckpointBuffer = Buffer(LANGGRAPH, session_to(nats, config, name), ledger, backing, config)
        reader.watch = self.buffer.reads.store
        self._reads = CheckpointReads(store, self.buffer, cache, self._recent)
        self._goes_on = self._reads.goes_on
        #: See `CheckpointReads.rows_read`.
        self.rows_read = self._reads.rows_read
        self._home, self._beginning = Home(), Admission(_BEGIN_AT_ONCE, self._is_outage)
        #: The writes that wait for the log.
        self.backlog = Backlog(backlog_bytes, config.append_timeout_s)

    async def watch_quarantine(self) -> None:
        """Forget a thread whenever one of its entries goes to quarantine. The buffer must be open."""
        await self.buffer.shared.on_parked(self._recent.forget)

    # --- one checkpoint ---------------------------------------------------------------------------------------

    async def put(
        self, thread_id: str, ns: str, parent: str | None, id_: str, changed: Container[str], make: Callable[[int], Put]
    ) -> None:
        """Append a checkpoint, behind its parent. Returns once it is durable in the log. Raises like `append`.

        `make`, which is called at once, makes the checkpoint. It adds the values that earlier checkpoints have brought,
        those of all channels but `changed`, if they take no more bytes than its argument. The first checkpoint that
        this process saves on one of another process carries them, so that a third process can read the thread from the
        log alone. Where history is left out, a checkpoint carries them unless the one before it is known to be ours: a
        flush may leave out any checkpoint but its newest.
        """
        before, mine = self._put.get((thread_id, ns)), LastPut()
        self._put[thread_id, ns] = mine  # until this call has ended, nobody knows what others build on
        alone = before is None or before.id is not None
        goes_on = alone and (before.id if before is not None else None) == parent
        if before is not None and self._store.history != "all":
            mine.life = before.life if goes_on else None
            goes_on = goes_on and mine.life is not None
        try:
            if mine.life is None:
                await self.append(thread_id, make(0 if goes_on else self._carry_bytes), last=mine)
            else:
                await self._append_alone(thread_id, make(0), changed, make, mine)
            mine.id = id_ if alone else None
        finally:
            if mine.id is None and self._put.get((thread_id, ns)) is mine:
                del self._put[thread_id, ns]

    async def _append_alone(
        self, thread_id: str, put: Put, changed: Container[str], make: Callable[[int], Put], mine: LastPut
    ) -> None:
        """Append a checkpoint without the values that earlier ones have brought; with them if somebody came between."""
        try:
            await self.append(thread_id, put, last=mine)
        except Overtaken:
            mine.life = None
            # Its own values stay those of when the call began: the caller may have changed its objects by now.
            await self.append(thread_id, _filled(put, make(self._carry_bytes), changed), last=mine)

    @property
    def _carry_bytes(self) -> int:
        return _CARRY_BYTES if self._store.history == "all" else sys.maxsize

    async def append(
        self, thread_id: str, operation: Operation, *, only_behind: int | None = None, last: LastPut | None = None
    ) -> Receipt:
        """Append the operation. Returns once it is durable in the log.

        `only_behind`: the id of the only entry that it may stand behind; else raises ConcurrentWriter. `last` is told
        the thread's life. If it has one already, and the thread's is another by now, raises Overtaken.

        Raises LogFull, LogUnavailable (nothing stored), OutcomeUnknown, ThreadQuarantined, TooLarge, ConcurrentWriter;
        StoreUnavailable for a thread that only Postgres could tell about.
        """
        watched = self._seen is not None
        payload, deletes = encode_payload(operation), isinstance(operation, Delete)
        # A deletion is compared only with what was read of the thread; a drop says what it builds on (`only_behind`).
        checked = only_behind is None and not (deletes and thread_id not in (self._seen or ()))
        seen = partial(self._last_seen, thread_id) if watched and checked else None
        # Kept beside the payload only if a read is to show it: what waits for the log holds no more than it must.
        known = operation if thread_id in self._recent else None
        assume_new = self._assume_new and _may_be_first(operation) and not self._reads.knows_of(thread_id)
        del operation
        life = last.life if last is not None else None
        held = known is not None or life is not None  # a caller that may be overtaken has kept the operation, too
        appending = Appending(
            thread_id, payload, self._is_down, self._goes_on, deletes, assume_new, seen, only_behind, life
        )
        cost = self.backlog.enter(2 * len(payload) if held else len(payload))
        try:
            receipt = await self.buffer.appender.append(thread_id, appending.prepare)
        except (StoreUnavailable, StoreMisconfigured):
            if not assume_new:
                raise
            # Now it is known that the store is away.
            receipt = await self.buffer.appender.append(thread_id, appending.prepare)
        finally:
            self.backlog.leave(cost)
        if self._assume_new:
            self._reads.wrote(thread_id, deletes)
        if last is not None:
            last.life = appending.left
        if thread_id in self._recent:
            self._recent.wrote(thread_id, appending.behind, End(receipt.id, receipt.thread_seq), known, len(payload))
        if watched:
            # This entry stands behind one that was seen or is ours: the next lookup must find it as the last one.
            self._saw(thread_id, receipt.thread_seq, receipt.id)
        return receipt

    async def checkpoint(
        self, thread_id: str, ns: str, checkpoint_id: str | None, *, since: CheckpointKey | None = None
    ) -> tuple[Tables, CheckpointRow] | None:
        """See `CheckpointReads.checkpoint`.

        A run begins with a read of the root namespace. Of runs that begin at once, some read at a time, so that those
        that have begun get on, and the time of the others does not run out while they wait (docs/adr/0061).
        """
        read = partial(self._checkpoint, thread_id, ns, checkpoint_id, since)
        if ns:
            return await read()
        self._home.check()  # on another loop nobody would give it a turn
        async with self._beginning:
            return await read()

    async def _checkpoint(
        self, thread_id: str, ns: str, checkpoint_id: str | None, since: CheckpointKey | None
    ) -> tuple[Tables, CheckpointRow] | None:
        # A caller that names a checkpoint has its id from somewhere.
        may_be_new = self._assume_new and checkpoint_id is None and not self._reads.knows_of(thread_id)
        read = partial(self._reads.checkpoint, thread_id, ns, checkpoint_id, self._consistency, since)
        try:
            last, found = await read()
        except (StoreUnavailable, StoreMisconfigured, ReadNotFresh):
            if not may_be_new or not self._store_is_down():
                raise
            if not await self._in_log(thread_id):
                return None
            last, found = await read()  # its first entry may have come during the first read
        self._saw(thread_id, 0, last)
        return found

    async def ancestors(self, thread_id: str, ns: str, at: str | None, channels: Sequence[str]) -> Walk:
        """See `CheckpointReads.ancestors`. `at`: the id of the first ancestor."""
        walk = Walk(ns, at, channels)
        await self._reads.ancestors(thread_id, walk, self._consistency)
        return walk

    def _saw(self, thread_id: str, position: int, last: int) -> None:
        # Writes that were stored together may return in any order.
        if self._seen is not None and (not position or self._seen.get(thread_id, (0, 0))[0] < position):
            self._seen[thread_id] = position, last

    def _last_seen(self, thread_id: str) -> int:
        return self._seen.get(thread_id, (0, 0))[1] if self._seen is not None else 0

    def _store_is_down(self) -> bool:
        return self.buffer.reads.store.down is not None

    def _is_outage(self, error: Exception) -> bool:
        # A Postgres that refuses everybody counts as away; one that refuses a single row does not.
        return isinstance(error, (Unavailable, ReadNotFresh)) or self._store_is_down()

    async def _in_log(self, thread_id: str) -> bool:
        return await self.buffer.log.latest(self.buffer.subjects.of(thread_id), self.buffer.config.read_timeout_s) > 0

    # --- the whole thread ---------------------------------------------------------------------------------------

    async def flush(self, thread_id: str) -> None:
        """Return once everything of the thread that is acknowledged now is in Postgres. Raises FlushTimeout."""
        await self.buffer.force_flush(thread_id)
        self.flushed(thread_id)

    def flushed(self, thread_id: str | None = None) -> None:
        """Note that somebody flushed this thread, or all of them, and wants to see what Postgres made of it."""
        self._recent.forget(thread_id)  # the notice of parked entries may come later

    async def check_not_parked(self, thread_id: str) -> None:
        """Raise ThreadQuarantined if entries of the thread are in quarantine. Raises StoreUnavailable."""
        reads, ledger = self.buffer.reads, self.buffer.ledger
        since = (await reads.restored.counting(lambda: ledger.watermark(thread_id))).broken_since
        if since is not None:
            raise ThreadQuarantined(thread_id, since)

    async def delete(self, thread_id: str) -> None:
        """Append an entry that deletes the thread. Raises like `append`."""
        await self.append(thread_id, Delete())

    async def outlines(self, thread_id: str) -> list[Outline]:
        """Flush the thread, and return its checkpoints without their values."""

        async def flushed() -> list[Outline]:
            await self.flush(thread_id)
            return await self._store.outlines(thread_id)

        return await self.buffer.reads.same_postgres.within(flushed)

    async def drop(self, thread_id: str, choose: Callable[[list[Outline]], Drop | None]) -> bool:
        """Append the drop that `choose` makes of the thread's checkpoints. Returns whether it chose any.

        One that is too large for an entry is made in parts, each chosen anew once the one before is flushed.

        The drop stands directly behind what was seen: a checkpoint between them might name values that are to go.
        Raises ConcurrentWriter if others write all the time, ThreadQuarantined.
        """
        bytes_max = self.buffer.config.log.entry_bytes_max
        tries, dropped = 0, False
        while tries < _DROP_TRIES:
            await self.flush(thread_id)
            last, outlines = await self._end_and_outlines(thread_id)
            if last is None:
                tries += 1
                continue
            drop = choose(outlines)
            if drop is None:
                await self.check_not_parked(thread_id)
                return dropped
            part = within(drop, outlines, bytes_max)
            try:
                await self.append(thread_id, part, only_behind=last)
            except ConcurrentWriter:
                tries += 1
                continue
            if part is drop:
                return True
            dropped = True
        raise ConcurrentWriter(thread_id)

    async def delete_idle(self, thread_id: str, before: str) -> None:
        """Delete the thread. Raises ConcurrentWriter if its last checkpoint is not older than this time.

        Raises ThreadQuarantined: what is parked may be newer, and after a deletion no replay brings it back.
        """
        last, outlines = await self._end_and_outlines(thread_id)
        if last is None or any(outline.ts >= before for outline in outlines):
            raise ConcurrentWriter(thread_id)
        await self.append(thread_id, Delete(), only_behind=last)

    async def _end_and_outlines(self, thread_id: str) -> tuple[int | None, list[Outline]]:
        """Return the id of the thread's last entry, and its checkpoints in Postgres; None if these are not up to it."""

        async def found() -> tuple[int | None, list[Outline]]:
            state, _ = await self.buffer.reads.joined(thread_id)
            last = None if state.operations else state.watermark.applied_id
            return last, await self._store.outlines(thread_id)

        return await self.buffer.reads.same_postgres.within(found)

    async def erase(self, thread_id: str) -> None:
        """Delete the thread, and remove what the log and the quarantine hold of it.

        Raises ThreadQuarantined if Postgres refuses the deletion.
        """
        receipt = await self.append(thread_id, Delete())
        await self.flush(thread_id)
        since = (await self.buffer.ledger.watermark(thread_id)).broken_since
        if since is not None and since <= receipt.thread_seq:
            raise ThreadQuarantined(thread_id, since)
        await self.buffer.eraser.erase({thread_id: receipt.thread_seq})
        await discard_superseded(self.buffer.quarantine, thread_id)

    async def parked_of(self, run_ids: Container[str]) -> ThreadQuarantined | None:
        """Return the error of the first thread with an entry in quarantine that saves a checkpoint of these runs."""
        quarantine, after = self.buffer.quarantine, 0
        while found := await quarantine.page(after=after, limit=_PAGE):
            for info in found:
                after = info.seq
                if info.superseded or info.thread_id is None:
                    continue
                with contextlib.suppress(NotFound):  # discarded or replayed meanwhile
                    item = (await quarantine.show(info.seq)).item
                    if isinstance(item, StoredEntry) and saves_of(item.entry.payload, run_ids):
                        return ThreadQuarantined(info.thread_id, info.seq)
        return None


def _filled(put: Put, whole: Put, changed: Container[str]) -> Put:
    """Return the checkpoint with the values that `whole` has for the channels that the checkpoint does not change."""
    blobs = [blob for blob in whole.blobs if blob.channel not in changed]
    empty = [(channel, version) for channel, version in whole.empty if channel not in changed]
    return Put(put.checkpoint, [*put.blobs, *blobs], [*put.empty, *empty])


def _may_be_first(operation: Operation) -> bool:
    """Whether the operation may be the first one of a new thread: a checkpoint with a parent is not."""
    return not isinstance(operation, Put) or operation.checkpoint.parent is None
