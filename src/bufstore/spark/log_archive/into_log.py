"""Restores an archive into a log, or into the lanes' logs, from which flushers move it on: for a deployment with a
store of its own, or to replay elsewhere what happened.

A thread continues behind the last entry that the log, or else Postgres, has of it: that entry is found in the archive
by its id, and the entries behind it are written. So you may repeat a restore, or stop it and continue later.
Compare-and-set guards each thread: where somebody else has written, or writes meanwhile, the restore writes nothing.

The entries get new positions, and entries without effect may be missing between them. So each one is chained to the
last entry before it that took effect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from bufstore.buffer import producers, recent_keys
from bufstore.buffer.append.tip import Tip, tip_of_row
from bufstore.buffer.chain import Watermark
from bufstore.buffer.entry import Base, Entry, Item, StoredEntry, encode, entry_id, id_of, items_of
from bufstore.buffer.lanes import lane_logs, lane_of
from bufstore.buffer.target import check_proof, check_same
from bufstore.config import BufferConfig, LogConfig
from bufstore.errors import ConfigError, LogUnavailable
from bufstore.jetstream.messages import HEADER_BYTES_MAX, AppendUnknown, Conflict, Outgoing, StoredMessage
from bufstore.spark.config import Deployment
from bufstore.spark.log_archive.applicable import RestoreCounts, applicable, is_removal
from bufstore.spark.log_archive.archive_job import log_of
from bufstore.threads.behind import buffer_of
from bufstore.threads.postgres.store import PostgresThreadStore

_TIMEOUT_S = 30.0
#: How many bytes a unit has at most. A unit goes into one group and does not fill it, so that many threads share one.
_UNIT_BYTES = 128 << 10
_AT_ONCE = 256


class Wanted(NamedTuple):
    """What a restore writes of a thread."""

    entries: Sequence[Entry]
    present: int = 0
    refused: int = 0
    reason: str = ""


class _Shown(NamedTuple):
    """What the log and Postgres have of some threads."""

    last: Mapping[str, StoredMessage]
    log_end: int
    rows: Mapping[str, Watermark]
    versions: Mapping[str, int]


def wanted(
    thread_id: str, row: Watermark, version: int, held: Sequence[int], items: Sequence[Item], log_end: int
) -> Wanted:
    """Return the part of the archive's `items` that the thread lacks.

    `row` and `version`: the thread's in Postgres. `held`: the ids of its entries that the log shows (at least that of
    the last), oldest first. `log_end`: the position behind everything that the log has.
    """
    ids = [id_of(item) for item in items]
    last = held[-1] if held else row.applied_id
    if ids[-1] and ids[-1] in held:
        return Wanted([], present=len(items))
    if held and not last:
        reason = f"the last entry of thread {thread_id!r} in the log cannot be read"
        return Wanted([], refused=len(items), reason=reason)
    if row.broken_since is not None:
        return Wanted([], refused=len(items), reason=f"thread {thread_id!r} is in quarantine")
    if row.waits_to and not held:
        reason = f"entries of thread {thread_id!r} wait to be flushed: see `bufstore status`"
        return Wanted([], refused=len(items), reason=reason)
    if last and last not in ids:
        where = "the log" if held else "Postgres"
        reason = f"the last entry of thread {thread_id!r} in {where} is not among the archived entries to restore"
        return Wanted([], refused=len(items), reason=reason)
    if not held and row.flushed_seq >= log_end:
        return Wanted([], refused=len(items), reason=f"thread {thread_id!r}: Postgres is ahead of this log")
    at = ids.index(last) + 1 if last else 0
    base = Watermark()
    if at:
        before = items[at - 1]
        assert isinstance(before, StoredEntry)
        base = Watermark(flushed_seq=before.seq, applied_id=last, version=before.entry.version, gone=is_removal(before))
    found = applicable(thread_id, base, version, items[at:])
    there: Sequence[StoredEntry] = []
    if held:
        # Where the archive begins behind the thread's first entry, nothing before is known to have taken effect.
        there = applicable(thread_id, Watermark(), 0, items[:at]).plan.apply or _entries(items[at - 1 : at])
    tip: Tip[Any] | None = None if held else tip_of_row(row, log_end, 0.0, None)
    entries = _chained(_remembering(there, found.plan.apply), last, tip)
    return Wanted(entries, at, found.refused, found.reason)


def _entries(items: Sequence[Item]) -> list[StoredEntry]:
    return [item for item in items if isinstance(item, StoredEntry)]


def _remembering(there: Sequence[StoredEntry], wanted: Sequence[StoredEntry]) -> list[Entry]:
    """Return the wanted entries with the keys and producers of all before them, which are in the log or are wanted.

    An entry that expected nothing in the log is chained here. A writer then looks for no keys before it that later
    entries, of writers that did not know them, lack.
    """
    keys, marks = b"", None
    entries: list[Entry] = []
    for stored in (*there, *wanted):
        entry = stored.entry
        keys = recent_keys.merge(keys, entry.keys)
        if entry.producers is not None:
            marks = producers.merge(marks or b"", entry.producers)
        entries.append(msgspec.structs.replace(entry, keys=keys, producers=marks))
    return entries[len(there) :]


def _chained(entries: Sequence[Entry], last: int, tip: Tip[Any] | None) -> list[Entry]:
    """Return the entries, each chained to the one before it; `tip`: what the first builds on if not on the log."""
    chained: list[Entry] = []
    for entry in entries:
        base, seen = (tip.base, tip.seen) if tip is not None else (Base.CHAINED, 0)
        chained.append(msgspec.structs.replace(entry, prev_id=last, base=base, seen=seen))
        last, tip = entry.id, None
    return chained


class IntoLog:
    """Writes into one deployment's logs, which a BufferedThreadStore has made: each thread into its lane."""

    def __init__(self, deployment: Deployment, log: LogConfig, *, dry_run: bool) -> None:
        """`log`: the settings of the first lane's log."""
        self._first = log
        store = deployment.store(pool_size=1)
        deployments = [replace(deployment, stream=one.stream, bucket=one.bucket) for one in lane_logs(log)]
        self._lanes = [_IntoLane(of_lane, store, dry_run=dry_run) for of_lane in deployments]
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> IntoLog:
        for lane in self._lanes:  # an open store takes no further buffers
            await lane.find()
        async with AsyncExitStack() as stack:
            for lane in self._lanes:
                await stack.enter_async_context(lane)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def setup(self) -> None:
        """Raise ConfigError unless Postgres and each of the logs go together."""
        for lane in self._lanes:
            await lane.check()

    async def apply(self, threads: Mapping[str, Sequence[Item]]) -> RestoreCounts:
        """Write what these threads lack. Returns the counts: threads; entries written, present and refused, and why."""
        counts = RestoreCounts()
        of_lanes: list[dict[str, Sequence[Item]]] = [{} for _ in self._lanes]
        for thread_id, items in threads.items():
            of_lanes[lane_of(thread_id, self._first)][thread_id] = items
        for lane, mine in zip(self._lanes, of_lanes, strict=True):
            if mine:
                counts.add(await lane.apply(mine))
        return counts


class _IntoLane:
    """Writes into the log of one lane."""

    def __init__(self, deployment: Deployment, store: PostgresThreadStore, *, dry_run: bool) -> None:
        """`store`: the threads' tables, which the first lane opens and closes."""
        self._deployment, self._store = deployment, store
        self._dry_run = dry_run
        self._stack = AsyncExitStack()

    async def find(self) -> None:
        """Find the log. Raises NoLog, LogUnavailable."""
        log, named = await self._deployment.look()
        config, store = BufferConfig.fitting(log, flusher=False), self._store
        name, server = "bufstore-restore", self._deployment.server
        buffer = buffer_of(store, server, config, name=name, opens_store=not log.lane)
        # If the app has a store of its own, only that store's watermark of a thread is known.
        self._held = store.versions if named is None or named.kind == buffer.backing.kind else None
        self._log, self._ledger, self._subjects = buffer.log, buffer.ledger, buffer.subjects
        self._writer, self._buffer = self._log.writer, buffer
        self._at_once = asyncio.Semaphore(_AT_ONCE)

    async def __aenter__(self) -> _IntoLane:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._buffer.connected())
            self._writer.start()
            stack.push_async_callback(self._writer.aclose)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def check(self) -> None:
        """Raise ConfigError unless Postgres and the log go together."""
        log, noted = await log_of(self._deployment), await self._ledger.target()
        check_same(self._deployment.stream, log.target, noted)
        check_proof(self._deployment.stream, log.target, proven=noted is not None)
        known = await self._ledger.epoch()
        if known is not None and known != log.epoch:
            raise ConfigError(
                f"the log has epoch {log.epoch}, but Postgres belongs to epoch {known}: open a BufferedThreadStore, "
                "whose error says what happened to them"
            )

    async def apply(self, threads: Mapping[str, Sequence[Item]]) -> RestoreCounts:
        """See `IntoLog.apply`."""
        shown = await self._look(list(threads))
        counts = RestoreCounts(threads=len(threads))

        async def one(thread_id: str, items: Sequence[Item]) -> None:
            counts.add(await self._bring(thread_id, items, shown))

        async with asyncio.TaskGroup() as group:
            for thread_id, items in threads.items():
                group.create_task(one(thread_id, items))
        return counts

    async def _look(self, thread_ids: Sequence[str]) -> _Shown:
        names = {self._subjects.of(thread_id): thread_id for thread_id in thread_ids}
        last = {names[s]: m for s, m in (await self._log.last(list(names))).items()}
        end = 1 + await self._log.end(_TIMEOUT_S)
        rows = await self._ledger.watermarks(thread_ids)
        versions = await self._held(thread_ids) if self._held is not None else {}
        return _Shown(last, end, {thread_id: row[0] for thread_id, row in rows.items()}, versions)

    async def _wanted(self, thread_id: str, items: Sequence[Item], shown: _Shown) -> Wanted:
        held = [entry_id(shown.last[thread_id])] if thread_id in shown.last else []
        if held and held[-1] not in {i.entry.id for i in items if isinstance(i, StoredEntry)}:
            held = await self._ids(thread_id)
        row = shown.rows.get(thread_id, Watermark())
        return wanted(thread_id, row, shown.versions.get(thread_id, 0), held, items, shown.log_end)

    async def _bring(self, thread_id: str, items: Sequence[Item], shown: _Shown) -> RestoreCounts:
        todo = await self._wanted(thread_id, items, shown)
        if self._dry_run:
            return _counts(todo, len(todo.entries))
        async with self._at_once:
            return await self._write_all(thread_id, items, shown, todo)

    async def _write_all(self, thread_id: str, items: Sequence[Item], shown: _Shown, todo: Wanted) -> RestoreCounts:
        """Write what is wanted, even when another attempt at this restore is faster and writes before this one."""
        applied = 0
        while True:
            behind = shown.last[thread_id].seq if thread_id in shown.last else 0
            written = await self._write(thread_id, todo.entries, behind)
            applied += written
            if written == len(todo.entries):
                return _counts(todo, applied)
            shown = await self._look([thread_id])
            again = await self._wanted(thread_id, items, shown)
            if again.present <= todo.present + applied:
                refused = todo.refused + len(todo.entries) - written
                reason = f"thread {thread_id!r}: somebody writes to it now"
                return _counts(todo._replace(refused=refused, reason=reason), applied)
            todo = again._replace(present=again.present - applied)

    async def _ids(self, thread_id: str) -> list[int]:
        messages = await self._log.after(self._subjects.of(thread_id), 0)
        return [id_of(item) for item in items_of(messages, thread_id)]

    async def _write(self, thread_id: str, entries: Sequence[Entry], behind: int) -> int:
        """Write the entries. Returns how many were written: not all if somebody was faster."""
        written = 0
        for unit in _units(self._subjects.of(thread_id), entries):
            unit[0] = msgspec.structs.replace(unit[0], expected=behind)
            try:
                behind = await self._writer.submit(unit)
            except Conflict:
                break
            except AppendUnknown as e:
                raise LogUnavailable(
                    f"it is not known whether all entries were written ({e}): repeat the restore to find out"
                ) from e
            written += len(unit)
        return written


def _counts(todo: Wanted, applied: int) -> RestoreCounts:
    reasons = [todo.reason] if todo.reason else []
    return RestoreCounts(applied=applied, present=todo.present, refused=todo.refused, reasons=reasons)


def _units(subject: str, entries: Sequence[Entry]) -> list[list[Outgoing]]:
    """Return the entries as they are written, in units; the entries of a unit are stored as neighbours."""
    units: list[list[Outgoing]] = []
    size = 0
    for entry in entries:
        header, body = encode(entry)
        size += HEADER_BYTES_MAX + len(body)
        if not units or size > _UNIT_BYTES:
            units.append([])
            size = HEADER_BYTES_MAX + len(body)
        units[-1].append(Outgoing(subject, body, header))
    return units
