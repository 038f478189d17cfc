"""What a buffered saver does with logs and store, below LangGraph's own objects: over all lanes."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import compress
from typing import Self, TypeVar

from bufstore.buffer.lanes import lane_configs, lane_of
from bufstore.buffer.side_by_side import Lanes
from bufstore.config import BufferConfig, LogConfig
from bufstore.errors import ConcurrentWriter, ConfigError, ThreadQuarantined
from bufstore.langgraph.lane import CheckpointLane, NewThreads, OnConflict
from bufstore.langgraph.model import BlobKey, BlobRow, CheckpointKey, CheckpointRow, Drop, Rows, Tables, WriteRow
from bufstore.langgraph.outlines import all_but_latest, drop_of
from bufstore.langgraph.protocol import CheckpointStore, Cursor, Outline, Query
from bufstore.langgraph.reads import CheckpointBuffer
from bufstore.nats.session import Nats
from bufstore.tasks import together
from bufstore.types import Consistency, check_choice

T = TypeVar("T")

#: Where the log is, unless a configuration says otherwise.
DEFAULT_LOG = LogConfig(stream="LANGGRAPH", bucket="langgraph-hot", subject="langgraph")

_PAGE = 100
#: How many threads are changed at a time by a call for many: fewer than the pool has connections, which others need.
_AT_ONCE = 8
#: How many bytes may wait for the logs in one process: more than ever wait while they answer.
_BACKLOG_BYTES = 64 << 20
#: About how many bytes an entry of a copied thread has.
_COPY_BYTES = 4 << 20
#: About how many bytes a row takes there besides its values.
_ROW_BYTES = 200


class CheckpointEngine:
    """The buffers in front of a `CheckpointStore`, one for each lane. Nothing is connected before `open`."""

    def __init__(
        self,
        store: CheckpointStore,
        nats: Nats,
        config: BufferConfig,
        *,
        consistency: Consistency = Consistency.READ_YOUR_WRITES,
        new_threads: NewThreads = "ask",
        on_conflict: OnConflict = "allow",
        cache_bytes: int = 64 << 20,
        name: str = "bufstore-langgraph",
    ) -> None:
        """`config`: one for all lanes. `name`: the prefix of the name by which NATS knows this process."""
        check_choice(consistency, Consistency, "consistency", ConfigError)
        check_choice(new_threads, NewThreads, "new_threads", ConfigError)
        check_choice(on_conflict, OnConflict, "on_conflict", ConfigError)
        if type(cache_bytes) is not int or cache_bytes < 0:
            raise ConfigError(f"cache_bytes must be an int, 0 or more, not {cache_bytes!r}")
        self._store, self._consistency = store, consistency
        name = f"{name}-{secrets.token_hex(8)}"
        configs = lane_configs(config)
        #: The lanes, in order.
        self.all = [
            CheckpointLane(
                store,
                nats,
                each,
                name=name,
                backlog_bytes=_BACKLOG_BYTES // len(configs),
                consistency=consistency,
                new_threads=new_threads,
                on_conflict=on_conflict,
                cache_bytes=cache_bytes // len(configs),
            )
            for each in configs
        ]
        self._only = self.all[0] if len(self.all) == 1 else None
        self._log = config.log
        #: The buffers of the lanes.
        self.lanes = Lanes([lane.buffer for lane in self.all])

    @property
    def buffer(self) -> CheckpointBuffer:
        """The buffer, or that of the first lane if there are several; for bufstore's own tools."""
        return self.lanes.first

    def of(self, thread_id: str) -> CheckpointLane:
        """The lane of a thread."""
        return self._only or self.all[lane_of(thread_id, self._log)]

    async def open(self) -> Self:
        """See `bufstore.buffer.buffer.Buffer.open`."""
        await self.lanes.open()
        try:
            for lane in self.all:
                await lane.watch_quarantine()
        except BaseException:
            await self.lanes.aclose()
            raise
        return self

    async def aclose(self) -> None:
        """See `bufstore.buffer.buffer.Buffer.aclose`."""
        if self.lanes.first.closes_here():
            for lane in self.all:
                lane.backlog.close()
            await self.lanes.aclose()

    async def pages(self, query: Query, limit: int | None) -> AsyncIterator[tuple[str, Tables]]:
        """Yield the checkpoints of a list, newest first, each with its thread, blobs and writes.

        A list cannot be overlaid with the tails of all threads and stay a page: what it covers is flushed first.
        Raises FlushTimeout, StoreUnavailable, LogUnavailable, and ThreadQuarantined when the list is of one thread.
        """
        async for found in self._pages(query, limit, settled=self._consistency is not Consistency.EVENTUAL):
            yield found

    async def _settle(self, thread_id: str | None) -> None:
        """Flush everything (of the thread); raise ThreadQuarantined if Postgres still lacks entries of the thread."""
        await self.flush(thread_id)
        if thread_id is not None:
            await self.of(thread_id).check_not_parked(thread_id)

    async def _pages(self, query: Query, limit: int | None, *, settled: bool) -> AsyncIterator[tuple[str, Tables]]:
        """See `pages`. `settled`: each page shows at least what is acknowledged now."""
        postgres = self.lanes.same_postgres
        run = postgres.last or await postgres.now() if settled else ""
        if settled:
            await self._settle(query.thread_id)
        after: Cursor | None = None
        left = limit
        while left is None or left > 0:
            wanted = _PAGE if left is None else min(_PAGE, left)
            found = await self._store.page(query, after, wanted)
            if settled and (now := await postgres.now()) != run:
                run = now
                await self._settle(query.thread_id)
                continue
            for thread_id, tables in found:
                (row,) = tables.checkpoints.values()
                after = row.id, thread_id, row.ns
                yield thread_id, tables
            if len(found) < wanted:
                return
            left = left - len(found) if left is not None else None

    async def flush(self, thread_id: str | None, *, timeout_s: float | None = None) -> None:
        """Return once everything (of the thread) that is acknowledged now is in Postgres. Raises FlushTimeout."""
        await self.lanes.force_flush(thread_id, timeout_s=timeout_s)
        for lane in self.all if thread_id is None else [self.of(thread_id)]:
            lane.flushed(thread_id)

    async def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Delete what these runs have saved in any thread. Raises like `pages` and `CheckpointLane.append`.

        Raises ThreadQuarantined once all else is deleted: for a thread in quarantine, and for a checkpoint of these
        runs whose entry is in quarantine, because a replay would bring it back.
        """
        if not run_ids:
            return

        async def saved() -> tuple[list[ThreadQuarantined | None], list[tuple[str, str, str]]]:
            await self.flush(None)
            # The store last: a replay moves an entry from quarantine into the store, and must not do so in between.
            refused = [await lane.parked_of(frozenset(run_ids)) for lane in self.all]
            return refused, await self._store.of_runs(run_ids)

        refused, found = await self.lanes.same_postgres.within(saved)
        gone: dict[str, set[tuple[str, str]]] = {}
        for thread_id, ns, id_ in found:
            gone.setdefault(thread_id, set()).add((ns, id_))

        async def drop(thread_id: str) -> ThreadQuarantined | None:
            try:
                await self.of(thread_id).drop(thread_id, partial(_these, gone[thread_id]))
            except ThreadQuarantined as e:
                return e
            return None

        for error in filter(None, [*await _of_each(list(gone), drop), *refused]):
            raise error

    async def prune(self, thread_ids: Sequence[str]) -> None:
        """Delete all checkpoints of the threads but the newest of each namespace. Raises like `delete_for_runs`.

        Raises NotImplementedError for a thread with a DeltaChannel.
        """
        await _of_each(thread_ids, lambda thread_id: self.of(thread_id).drop(thread_id, partial(_prune, thread_id)))

    async def delete(self, thread_ids: Sequence[str]) -> None:
        """Delete the threads. Raises like `CheckpointLane.append`."""
        await _of_each(thread_ids, lambda thread_id: self.of(thread_id).delete(thread_id))

    async def prune_idle(self, idle_for: timedelta, *, delete: bool) -> list[str]:
        """Prune or delete the threads whose last checkpoint is older than `idle_for`. Returns those changed."""
        await self.flush(None)
        # A clock that is ahead must not make live threads old.
        before = (min(datetime.now(UTC), await self._store.now()) - idle_for).isoformat()

        async def changed(thread_id: str) -> bool:
            lane = self.of(thread_id)
            # The thread is not idle any more, or stopped until somebody decides about what is parked.
            with contextlib.suppress(ConcurrentWriter, ThreadQuarantined):
                if not delete:
                    return await lane.drop(thread_id, partial(_prune_idle, before))
                await lane.delete_idle(thread_id, before)
                return True
            return False

        idle = await self._store.idle(before)
        return list(compress(idle, await _of_each(idle, changed)))

    async def copy(self, source: str, target: str) -> None:
        """Copy all checkpoints of a thread, with their blobs and writes. Raises like `delete_for_runs`.

        A large thread takes several entries, the newest checkpoints first, each behind its values and writes. Raises
        ConcurrentWriter if somebody writes to the target, or deletes it, between these.
        """
        lane = self.of(target)
        behind: int | None = None
        copied: set[BlobKey] = set()
        bytes_max = min(_COPY_BYTES, self._log.entry_bytes_max // 2)
        rows: list[CheckpointRow | BlobRow | WriteRow] = []
        size = 0
        async for _, tables in self._pages(Query(thread_id=source), None, settled=True):
            (checkpoint,) = tables.checkpoints.values()
            blobs = [blob for key, blob in tables.blobs.items() if key not in copied]
            copied.update(tables.blobs)
            writes = tables.writes_of(checkpoint.ns, checkpoint.id)
            parts: list[CheckpointRow | BlobRow | WriteRow] = [*blobs, *writes, checkpoint]
            for row in parts:
                added = _bytes_of(row)
                if rows and size + added > bytes_max:
                    behind = (await lane.append(target, _copied(rows), only_behind=behind)).id
                    rows, size = [], 0
                rows.append(row)
                size += added
        if rows:
            await lane.append(target, _copied(rows), only_behind=behind)


async def _of_each(thread_ids: Sequence[str], change: Callable[[str], Awaitable[T]]) -> list[T]:
    """Change some threads at a time. Returns the results; raises the first error once those begun have ended."""
    found: list[T] = []
    for at in range(0, len(thread_ids), _AT_ONCE):
        found += await together(map(change, thread_ids[at : at + _AT_ONCE]))
    return found


def _copied(rows: Sequence[CheckpointRow | BlobRow | WriteRow]) -> Rows:
    return Rows(
        [row for row in rows if isinstance(row, CheckpointRow)],
        [row for row in rows if isinstance(row, BlobRow)],
        [row for row in rows if isinstance(row, WriteRow)],
    )


def _bytes_of(row: CheckpointRow | BlobRow | WriteRow) -> int:
    """About how many bytes a row takes in an entry."""
    if isinstance(row, CheckpointRow):
        return _ROW_BYTES + len(row.checkpoint) + len(row.metadata)
    return _ROW_BYTES + len(row.blob or b"")


def _prune(thread_id: str, outlines: list[Outline]) -> Drop | None:
    if any(outline.delta for outline in outlines):
        raise NotImplementedError(f"thread {thread_id!r} has a DeltaChannel, which needs its earlier checkpoints")
    return all_but_latest(outlines)


def _prune_idle(before: str, outlines: list[Outline]) -> Drop | None:
    if any(outline.delta or outline.ts >= before for outline in outlines):
        return None
    return all_but_latest(outlines)


def _these(keys: Container[CheckpointKey], outlines: list[Outline]) -> Drop | None:
    """Return the drop of those of a thread's checkpoints that `keys` names; None: there are none."""
    return drop_of([o for o in outlines if (o.ns, o.id) in keys], outlines)
