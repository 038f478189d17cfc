"""The read path: rows of Postgres with the thread's tail on top.

A read asks two questions at once: one for its rows, with the watermark of their moment, and one for the tail above the
watermark of another moment. An operation of the tail takes effect if it stands above the rows' own watermark. So the
two answers may be of different moments; only rows older than the tail's beginning are read again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from contextvars import ContextVar

import msgspec

from bufstore import elapsed, newest
from bufstore.buffer.buffer import Buffer
from bufstore.buffer.chain import Watermark
from bufstore.buffer.domain import StateReader
from bufstore.buffer.entry import Malformed, items_of
from bufstore.buffer.read.store_watch import StoreWatch
from bufstore.errors import (
    FlushTimeout,
    LogUnavailable,
    ReadNotFresh,
    StoreMisconfigured,
    StoreUnavailable,
    ThreadQuarantined,
)
from bufstore.home import Home
from bufstore.jetstream.messages import AppendUnknown
from bufstore.langgraph.ancestors import Walk, unknown_blobs
from bufstore.langgraph.domain import CACHE, LOG, STORE, Known, Tail
from bufstore.langgraph.model import (
    BlobKey,
    CheckpointKey,
    CheckpointRow,
    Delete,
    LangGraphChange,
    Put,
    Tables,
    takes_sends,
    versions_of,
)
from bufstore.langgraph.payload import decode_payload
from bufstore.langgraph.protocol import CheckpointStore, Part
from bufstore.langgraph.read_cache import Asked, ReadCache
from bufstore.langgraph.recent import End, Newest, Recent
from bufstore.tasks import end, spawn
from bufstore.types import Consistency

CheckpointBuffer = Buffer[LangGraphChange, Tail, Known]

#: In an outage, a thread with more namespaces than this is read only in those that were read before.
NAMESPACES_MAX = 1000
#: How many times a read is tried. It begins again when a flush or an outage comes between its two questions.
_TRIES = 4
_LOOK_S = 0.1
_RECENT_FOR_S = 60.0
#: How many ancestors are read at a time.
_ANCESTORS = 250

#: The rows that this read has asked for already. With them comes the answer to its first question for the state.
_on_the_way: ContextVar[list[asyncio.Future[Part]] | None] = ContextVar("rows on the way", default=None)


class CachingReader:
    """See `bufstore.buffer.domain.StateReader`. While the store is away it answers from what was read before."""

    def __init__(self, inner: StateReader[Tail], cache: ReadCache) -> None:
        self._inner, self._cache = inner, cache
        #: Knows whether the store answers; None until there is a buffer.
        self.watch: StoreWatch[Tail] | None = None

    def remembered(self, thread_id: str) -> Tail | None:
        """See `bufstore.buffer.domain.Backing.remembered`."""
        if self.watch is None or self.watch.down is None:
            return None
        watermark = self._cache.oldest(thread_id)
        if watermark is None:
            return None
        mark = msgspec.structs.replace(watermark, waits_to=0)  # what waits cannot be asked for now
        return Tail(watermark=mark, base=CACHE, base_seq=mark.flushed_seq)

    async def state(self, thread_id: str) -> Tail:
        remembered = self.remembered(thread_id)
        if remembered is not None:
            return remembered
        if self._cache.oldest(thread_id) is None:
            return await self._told(thread_id)
        asked = spawn(self._told(thread_id))
        try:
            while not (await asyncio.wait([asked], timeout=_LOOK_S))[0]:
                remembered = self.remembered(thread_id)
                if remembered is not None:
                    return remembered
            return asked.result()
        finally:
            await end(asked)

    async def _told(self, thread_id: str) -> Tail:
        """Return what the store answers. A read's first question takes the answer that comes with its rows."""
        rows = _on_the_way.get()
        if not rows:
            return await self._inner.state(thread_id)
        asked = rows.pop()
        await asyncio.wait([asked])  # unlike `await asked`, leaves it alone if this question is given up
        part = asked.result() if not asked.cancelled() else None
        return await self._inner.state(thread_id) if part is None or part.state is None else part.state

    async def answers(self) -> None:
        await self._inner.answers()


class CheckpointReads:
    """Reads single checkpoints."""

    def __init__(self, store: CheckpointStore, buffer: CheckpointBuffer, cache: ReadCache, recent: Recent) -> None:
        self._store, self._buffer, self._cache, self._recent = store, buffer, cache, recent
        self._home = Home()
        #: See `knows_of`.
        self._known: newest.Newest[str, None] = newest.Newest(buffer.config.cached_threads)
        #: After how many seconds Postgres is asked about a thread again. In an outage, the log must reach back to what
        #: Postgres told last; and nobody may go on for ever without having heard of a quarantine.
        self._recent_for_s = min(_RECENT_FOR_S, buffer.config.retain_after_flush_s / 2)
        buffer.log.on_forget(self._let_go)

    def _let_go(self, everything: bool) -> None:
        if everything:
            self._recent.forget(None)
        self._cache.let_go(None if everything else self._head)

    def _head(self, thread_id: str) -> int:
        return self._buffer.log.known_head(self._buffer.subjects.of(thread_id))

    def is_last(self, thread_id: str, position: int) -> bool:
        """Whether nobody has written to the thread behind this position, at which it was read.

        Call this when the log has been seen to its end. A process that has seen all of the log since the read knows.
        Any other knows for half of the failover window after the read, because nobody can have written unseen so soon.
        """
        young = elapsed.now_s() - self._buffer.log.windows.rely_s / 2
        return self._cache.is_last(thread_id, position, self._head(thread_id), young)

    def goes_on(self, thread_id: str, position: int) -> bool:
        """Return `is_last`, for a thread that the log does not show. If it is False, forget what was read there."""
        if self.is_last(thread_id, position):
            return True
        self._cache.forget_read_at(thread_id, position)
        return False

    async def checkpoint(
        self,
        thread_id: str,
        ns: str,
        checkpoint_id: str | None,
        level: Consistency,
        since: CheckpointKey | None = None,
    ) -> tuple[int, tuple[Tables, CheckpointRow] | None]:
        """Return the id of the thread's last entry, and the checkpoint with rows that include its blobs and writes.

        `checkpoint_id`: None for the newest one. `since`: a checkpoint before which the namespace did not exist.

        Raises what `bufstore.buffer.read.reads.Reads.thread` raises.
        """
        self._home.check()
        if level is Consistency.READ_YOUR_WRITES:
            recent = await self._newest(thread_id, ns, checkpoint_id)
            if recent is not None:
                return recent.end.id, (recent.tables, recent.row) if recent.row is not None else None
        try:
            return await self._checkpoint(thread_id, ns, checkpoint_id, level)
        except (StoreUnavailable, StoreMisconfigured, ReadNotFresh):
            told = None
            if self._buffer.reads.store.down is not None and level is not Consistency.STRONG:
                with suppress(LogUnavailable, AppendUnknown, TimeoutError):
                    async with asyncio.timeout(self._buffer.config.read_timeout_s):
                        told = await self._from_log(thread_id, ns, checkpoint_id, since)
            if told is None:
                raise
            return told

    async def _newest(self, thread_id: str, ns: str, checkpoint_id: str | None) -> Newest | None:
        """Return the checkpoint from what this process has read and written, if the thread's last entry is in it."""
        log, subject = self._buffer.log, self._buffer.subjects.of(thread_id)

        def known() -> Newest | None:
            since = elapsed.now_s() - self._recent_for_s
            return self._recent.newest(thread_id, ns, checkpoint_id, since)

        before = known()
        if before is None or log.known_head(subject) != before.end.seq:
            return None
        try:
            last = await log.latest(subject, self._buffer.config.read_timeout_s)
        except (LogUnavailable, AppendUnknown):
            return None
        now = known()  # an entry of ours may have come meanwhile
        return now if now is not None and 0 < last <= now.end.seq else None

    async def _from_log(
        self, thread_id: str, ns: str, checkpoint_id: str | None, since: CheckpointKey | None
    ) -> tuple[int, tuple[Tables, CheckpointRow] | None] | None:
        """Return what the end of the thread's chain in the log tells by itself; None: it does not tell enough.

        The first checkpoint that a process saves on one that it has read carries all values, if they are not too large.
        Which checkpoint is the newest, only the whole thread tells, or one that was saved behind another: a copied one
        may be older than what the log does not show, and so may one by a clock that is behind. (A fork of an older
        checkpoint by such a clock is taken for the newest all the same.)
        """
        log, subject = self._buffer.log, self._buffer.subjects.of(thread_id)
        # A node that is cut off may not show what was acknowledged since; this read may follow one that knew that.
        await log.latest(subject, self._buffer.config.read_timeout_s)
        messages = (await log.seen_after({subject: 0}))[subject]
        tables, last, whole = Tables(), 0, False
        saved = set[CheckpointKey]()
        for item in items_of(messages, thread_id):
            if isinstance(item, Malformed) or item.entry.prev_id != last:
                tables, whole = Tables(), False
            if isinstance(item, Malformed):
                last = 0
                continue
            try:
                operation = decode_payload(item.entry.payload)
                tables.apply(operation)
                # The writer of a self-contained entry knew that there was nothing before it, or was told to take it so.
                whole = whole or isinstance(operation, Delete) or (item.entry.self_contained and not last)
                if isinstance(operation, Put) and "" < (operation.checkpoint.parent or "") < operation.checkpoint.id:
                    saved.add(operation.checkpoint.key)
            except ValueError:
                tables, whole = Tables(), False
            last = item.entry.id
        row = tables.latest(ns) if checkpoint_id is None else tables.checkpoints.get((ns, checkpoint_id))
        younger = since in tables.checkpoints  # the log shows all of the namespace
        if row is None:
            return (last, None) if checkpoint_id is None and younger else None
        newest = checkpoint_id is not None or whole or younger or row.key in saved
        complete = newest and versions_of(row) <= tables.known | tables.untold and not takes_sends(row)
        return (last, (tables, row)) if complete else None

    async def _checkpoint(
        self, thread_id: str, ns: str, checkpoint_id: str | None, level: Consistency
    ) -> tuple[int, tuple[Tables, CheckpointRow] | None]:
        for _ in range(_TRIES):
            at, life = elapsed.now_s(), self._recent.life
            part, state = await self._read(thread_id, (ns, checkpoint_id), level)
            tables = _with_tail(part, state)
            row = tables.latest(ns) if checkpoint_id is None else tables.checkpoints.get((ns, checkpoint_id))
            if checkpoint_id is not None or not _is_hidden(part, tables, ns, row):
                break
            # The tail drops the only checkpoint that Postgres was asked for. After a flush Postgres tells the newest.
            if state.base == CACHE:
                raise StoreUnavailable(f"thread {thread_id!r} cannot be read without Postgres: {self._down}")
            try:
                await self._buffer.force_flush(thread_id)
            except FlushTimeout as e:
                raise ReadNotFresh(
                    f"the deletion of checkpoints of thread {thread_id!r} was not flushed in time; read again"
                ) from e
        else:
            raise ReadNotFresh(
                f"checkpoints of thread {thread_id!r} were deleted during each of {_TRIES} attempts to read them; "
                "read again"
            )
        last = state.watermark.applied_id
        if row is not None:
            await self._complete(thread_id, part, state, tables, row)
        fresh = level is Consistency.READ_YOUR_WRITES and state.base == STORE and life == self._recent.life
        if fresh and state.new and state.watermark == Watermark():
            self._buffer.appender.found_nowhere(thread_id, at)
        if fresh and checkpoint_id is None:
            found = Newest(End(last, state.watermark.flushed_seq), tables, row)
            self._recent.read(thread_id, ns, found, at, whole=state.new)
        return last, (tables, row) if row is not None else None

    def rows_read(self, thread_id: str, ns: str, id_: str) -> Tables | None:
        """Return the rows of a checkpoint as this process has read them, if it remembers them. No I/O."""
        recent = self._recent.newest(thread_id, ns, id_, float("-inf"))
        if recent is not None:
            return recent.tables
        read = (self._cache.get(thread_id, asked) for asked in ((ns, id_), (ns, None)))
        return next((part.tables for part in read if part is not None and (ns, id_) in part.tables.checkpoints), None)

    def knows_of(self, thread_id: str) -> bool:
        """Whether Postgres has told of the thread, or this process has written to it, and not deleted it since.

        The last `cached_threads` of these are remembered. Of writes only those that `wrote` was told of.
        """
        return thread_id in self._known

    def wrote(self, thread_id: str, deleted: bool) -> None:
        """Note an entry of this process. `deleted`: it deletes the thread."""
        if deleted:
            self._known.pop(thread_id, None)
        else:
            self._known[thread_id] = None

    async def ancestors(self, thread_id: str, walk: Walk, level: Consistency) -> None:
        """Walk through a checkpoint's ancestors.

        Raises ReadNotFresh, ThreadQuarantined, and StoreUnavailable, also when Postgres is away and only what is
        remembered could answer.
        """
        while (at := walk.at) is not None:
            walk.on(await self._some_ancestors(thread_id, walk, level))
            if walk.at == at:
                return  # the checkpoint is not there, so the history begins behind it

    async def _some_ancestors(self, thread_id: str, walk: Walk, level: Consistency) -> Tables:
        for _ in range(_TRIES):
            state = await self._buffer.reads.thread(thread_id, level)
            if state.base == CACHE:
                raise StoreUnavailable(f"thread {thread_id!r} cannot be read without Postgres: {self._down}")
            tail = _with_all_of(state, Part(Watermark(), Tables()))
            at = walk.first_beyond(tail)
            if at is None or state.base == LOG:
                part = Part(state.watermark, Tables())
                tables = tail
            else:
                part = await self._store.ancestors(thread_id, walk.ns, at, walk.channels, _ANCESTORS)
                tables = _with_all_of(state, part)
            if part.watermark.flushed_seq < state.base_seq:
                continue
            named = {key for row in tail.checkpoints.values() if row.ns == walk.ns for key in versions_of(row)}
            if state.base == STORE and (keys := [key for key in tail.checkpoints if key[0] == walk.ns]):
                missing = unknown_blobs(tables, named, walk.channels)
                # Writes of a checkpoint may have been flushed before it.
                more = _with_all_of(state, await self._more(thread_id, state, missing, keys))
                tables.blobs |= {key: more.blobs[key] for key in missing if key in more.blobs}
                tables.writes |= {key: write for key, write in more.writes.items() if key[:2] in tail.checkpoints}
            return tables
        raise ReadNotFresh(
            f"thread {thread_id!r} could not be read: a flush interrupted each of {_TRIES} attempts; read again"
        )

    async def _complete(self, thread_id: str, part: Part, state: Tail, tables: Tables, row: CheckpointRow) -> None:
        """Add what the checkpoint names but neither the rows that were read nor the tail have."""
        missing = versions_of(row) - tables.known
        if state.base != STORE:
            missing -= tables.untold
        # A checkpoint that was read has come with what was sent to it.
        read = (row.ns, row.id) in part.tables.checkpoints
        sends = [(row.ns, row.parent)] if takes_sends(row) and not read and row.parent is not None else []
        all_in_log = state.base == LOG and not state.partial
        if not (missing or sends) or all_in_log:
            return
        if state.base != STORE:
            raise StoreUnavailable(f"thread {thread_id!r} cannot be read without Postgres: {self._down}")
        more = _with_tail(await self._more(thread_id, state, sorted(missing), sends), state)
        tables.blobs |= {key: more.blobs[key] for key in missing if key in more.blobs}
        tables.known |= missing
        tables.writes |= {key: write for key, write in more.writes.items() if key[:2] in sends}

    async def _more(
        self, thread_id: str, state: Tail, blobs: Sequence[BlobKey], writes_of: Sequence[CheckpointKey]
    ) -> Part:
        """Return rows that belong to what was read. Raises ReadNotFresh if Postgres has gone back: some may be lost."""
        more = await self._store.rows(thread_id, blobs, writes_of)
        if more.watermark.flushed_seq < state.base_seq:
            raise ReadNotFresh(f"Postgres failed over during the read of thread {thread_id!r}; read it again")
        return more

    @property
    def _down(self) -> str:
        return self._buffer.reads.store.reason

    async def _read(self, thread_id: str, asked: Asked, level: Consistency) -> tuple[Part, Tail]:
        """Return rows, and a tail that begins at or below their watermark."""
        tries = 0
        while tries < _TRIES:
            at = elapsed.now_s()
            rows = spawn(self._rows(thread_id, asked)) if self._buffer.reads.store.down is None else None
            try:
                state = await self._state(thread_id, level, rows)
                if state.base == LOG:
                    part: Part | None = Part(Watermark(), Tables())
                elif state.base == CACHE:
                    part = await self._remembered(thread_id, asked, state)
                else:
                    part = await self._fresh(rows, thread_id, asked, state, at)
            finally:
                await end(rows)
            if part is None:
                tries += state.base != CACHE  # else something outdated was forgotten, and of that there is an end
                continue
            broken = state.watermark.broken_since or (part.watermark.broken_since if state.base == STORE else None)
            if broken and level is not Consistency.EVENTUAL:
                raise ThreadQuarantined(thread_id, broken)
            return part, state
        raise ReadNotFresh(
            f"thread {thread_id!r} could not be read: a flush or a Postgres failure interrupted each of {_TRIES} "
            "attempts; read again"
        )

    async def _state(self, thread_id: str, level: Consistency, rows: asyncio.Future[Part] | None) -> Tail:
        # A strong read asks for the state only after a flush, so the one that comes with these rows is too old.
        shared = [rows] if rows is not None and level is not Consistency.STRONG else []
        before = _on_the_way.set(shared)
        try:
            return await self._buffer.reads.thread(thread_id, level, quarantined="known")
        finally:
            _on_the_way.reset(before)
            shared.clear()  # tasks that live on have this list, too

    async def _fresh(
        self, rows: asyncio.Future[Part] | None, thread_id: str, asked: Asked, state: Tail, at: float
    ) -> Part | None:
        """Return the rows that Postgres has; None: they are older than the tail, or Postgres has failed meanwhile."""
        try:
            part = await (rows if rows is not None else self._rows(thread_id, asked))
        except StoreUnavailable:
            return None
        except StoreMisconfigured:
            if self._buffer.reads.store.down is None:
                raise
            return None
        if part.watermark.flushed_seq < state.base_seq:
            return None
        if elapsed.now_s() - at < self._buffer.log.windows.rely_s / 2:  # else the log may not show what came since
            self._cache.put(thread_id, asked, part, at)
        if part.tables.checkpoints or part.namespaces or part.watermark != Watermark():
            self._known[thread_id] = None
        return part

    async def _rows(self, thread_id: str, asked: Asked) -> Part:
        ns, checkpoint_id = asked
        if checkpoint_id is not None:
            return await self._store.one(thread_id, ns, checkpoint_id)
        limit = -1 if self._cache.knows_namespaces(thread_id) else NAMESPACES_MAX
        return await self._store.latest(thread_id, ns, limit)

    async def _remembered(self, thread_id: str, asked: Asked, state: Tail) -> Part | None:
        """Return the rows as they were read last; None: the log does not reach back to some of what was read.

        Raises StoreUnavailable when they were not read, or when somebody may have written since.
        """
        if state.watermark.broken_since is not None:
            self._cache.forget_read_at(thread_id, state.base_seq)
            return None
        found = self._cache.get(thread_id, asked)
        if found is not None:
            watermark, subject = found.watermark, self._buffer.subjects.of(thread_id)
            last = (await self._buffer.log.last([subject])).get(subject)
            # What the log shows follows what was read without a gap: `state` has found none. It may have forgotten what
            # waits in the ledger, which is not in the rows.
            shown = last is not None and last.seq >= max(watermark.flushed_seq, watermark.waits_to)
            if shown or self.is_last(thread_id, watermark.flushed_seq):
                return found
        raise StoreUnavailable(f"thread {thread_id!r} cannot be read without Postgres: {self._down}")


def _is_hidden(part: Part, tables: Tables, ns: str, row: CheckpointRow | None) -> bool:
    """Whether the newest checkpoint may be older than the one that was read, because the tail drops that one."""
    told = part.tables.latest(ns)
    return (
        told is not None
        and (ns, told.id) not in tables.checkpoints
        and tables.dropped
        and (row is None or row.id < told.id)
    )


def _with_all_of(state: Tail, part: Part) -> Tables:
    """Return the rows with all of the tail on top: Postgres was asked only for what the tail does not have, so
    these rows lack what a flush has moved there since. An operation that is applied twice has the effect of one.
    """
    return _with_tail(Part(Watermark(), part.tables), state)


def _with_tail(part: Part, state: Tail) -> Tables:
    """Return the rows with what the tail has above their own watermark: Postgres was asked for all that it has."""
    tables = part.tables.copy()
    for seq, operation in state.operations:
        if seq > part.watermark.flushed_seq:
            tables.apply(operation)
    return tables
