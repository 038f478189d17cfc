"""``mode="postgres"``: rows go past the log, straight into Postgres, under the same guarantee; for backfills.

Each part is one transaction: lock the threads' rows in the ledger, leave out what their sources have written already
(`bufstore.buffer.producers`), fold the rest into one change per thread, write the changes as a flush does, and advance
the ledger's rows. Writes that need the log's own checks go through the log instead: those to threads that the log
shows, because the entries there expect what Postgres has now; those to threads whose chain is broken; those of runs
with a parent; and new messages with ids for a thread that exists.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from bufstore.buffer import producers
from bufstore.buffer.chain import Watermark
from bufstore.buffer.flush.verdict import Verdict
from bufstore.buffer.ports.ledger import Decision, FlushFailed, need_all
from bufstore.errors import BufstoreError, InvalidRecord, StoreUnavailable
from bufstore.spark.sink.checkpoint_rows import CheckpointRow
from bufstore.threads.coalesce import Fold
from bufstore.threads.digests import ids_of
from bufstore.threads.lanes import ThreadBuffer
from bufstore.threads.model import Run, RunSave, ThreadChange, check_run, encode_messages, encode_run
from bufstore.threads.payload import Payload
from bufstore.threads.postgres.store import PostgresThreadStore
from bufstore.threads.write import save_of
from bufstore.types import check_id


class Prepared(msgspec.Struct, frozen=True, gc=False):
    """A row, checked and encoded."""

    #: The source's number of the row; None: a repeat is not recognized.
    mark: bytes | None
    whole: bool
    messages: Sequence[bytes]
    has_ids: bool
    run: bytes
    save: RunSave


class Folded(NamedTuple):
    """What a thread's rows amount to."""

    #: The change that they make; None: the thread has all of them already.
    change: ThreadChange | None
    watermark: Watermark
    written: int
    repeated: int


class NeedLog(Exception):
    """These threads must be written through the log."""

    def __init__(self, threads: Sequence[str]) -> None:
        super().__init__(f"{len(threads)} threads")
        self.threads = threads


def prepare(thread_id: str, wanted: Sequence[tuple[CheckpointRow, bytes | None]]) -> list[Prepared]:
    """Check and encode a thread's rows and their marks. Raises InvalidId, InvalidRecord."""
    check_id(thread_id, "thread_id")
    prepared = []
    run: Run | None = None
    for write, mark in wanted:
        if write.run is not run:
            run = write.run
            check_run(run, thread_id)
            encoded, save = encode_run(run), save_of(run)
        messages = encode_messages(write.messages)
        ids = ids_of(write.messages)
        has_ids = any(ids)
        if has_ids and not write.whole and len(set(present := list(filter(None, ids)))) < len(present):
            raise InvalidRecord(f"thread {thread_id!r}: two of the new messages have the same id")
        prepared.append(Prepared(mark, write.whole, messages, has_ids, encoded, save))
    return prepared


def fold(thread_id: str, watermark: Watermark, version: int, writes: Sequence[Prepared], new_id: int) -> Folded:
    """Return one change that equals `writes` (of one source, in order) without those that the thread has already.

    `version`: how many messages Postgres holds of the thread. Raises NeedLog when only the log can tell what to do.
    """
    if watermark.broken_since is not None:
        raise NeedLog([thread_id])
    folded, written, newest = Fold(thread_id, version), 0, None
    for number, write in enumerate(writes):
        if write.mark is not None:
            if (newest is not None and write.mark <= newest) or producers.holds(watermark.producers, write.mark):
                continue
            newest = write.mark
        if write.save.parent_thread_id is not None or (write.has_ids and not write.whole and version):
            raise NeedLog([thread_id])
        keep = 0 if write.whole else version
        # `number` stands for a position in the log, by which the fold orders runs.
        folded.add(Payload(keep, write.messages, write.run, write.save), number, self_contained=write.whole)
        version = keep + len(write.messages)
        written += 1
    if not written:
        return Folded(None, watermark, 0, len(writes))
    seen = producers.merge(watermark.producers, newest or b"")
    after = msgspec.structs.replace(watermark, applied_id=new_id, version=version, gone=False, producers=seen)
    return Folded(folded.change(), after, written, len(writes) - written)


class BackfillWriter:
    """Writes into one deployment's database."""

    def __init__(self, store: PostgresThreadStore, buffer: ThreadBuffer) -> None:
        """`buffer` is open, and flushes into `store`."""
        self._store = store
        self._log, self._ledger, self._subjects = buffer.log, buffer.ledger, buffer.subjects
        self._appender, self._shared = buffer.appender, buffer.shared

    async def in_log(self, threads: Collection[str]) -> set[str]:
        """Return the threads with entries that may not be applied yet. Raises LogUnavailable, StoreUnavailable."""
        ends = await self._log.ends([self._subjects.of(thread_id) for thread_id in threads])
        # The log is asked first: an entry that has left it is applied, or waits in the ledger.
        waiting = await self._ledger.waiting.among(list(threads))
        return waiting | {thread_id for thread_id, end in zip(threads, ends, strict=True) if end}

    async def write(self, threads: Mapping[str, Sequence[Prepared]]) -> tuple[int, int]:
        """Write all rows in one transaction. Returns how many it wrote, and how many were written before.

        Raises NeedLog, and writes nothing, when threads must go through the log; StoreUnavailable.
        """
        written = repeated = 0
        names, probing = sorted(threads), False
        changed: list[str] = []
        versions = await self._store.versions(list(threads))

        def decide(rows: Mapping[str, Watermark]) -> Decision:
            nonlocal written, repeated, changed
            need_log: list[str] = []
            batch: list[Any] = []
            after: dict[str, Watermark] = {}
            changed = []
            written = repeated = 0
            if probing and len(rows) < len(names):
                # The probe left these threads out. The log's checks say what is wrong with each of their rows.
                raise NeedLog(sorted(set(names) - rows.keys()))
            need_all(names, rows)
            for thread_id, writes in threads.items():
                watermark = rows[thread_id]
                version = watermark.version if watermark.applied_id else versions.get(thread_id, 0)
                try:
                    found = fold(thread_id, watermark, version, writes, int.from_bytes(os.urandom(8)) >> 1 or 1)
                except NeedLog:
                    need_log.append(thread_id)
                    continue
                written += found.written
                repeated += found.repeated
                if watermark.applied_id:  # also for a repeat: the first try may have ended before it told anybody
                    changed.append(thread_id)
                if found.change is not None:
                    batch.append(found.change)
                    after[thread_id] = found.watermark
            if need_log:
                raise NeedLog(need_log)
            return Decision(batch=batch, watermarks=after)

        try:
            try:
                await self._ledger.flush([], names, decide)
            except FlushFailed as e:
                if e.verdict is not Verdict.POISON:
                    raise
                probing = True
                await self._ledger.flush([], names, decide, probe=len(names))
        except FlushFailed as e:
            raise StoreUnavailable(f"Postgres does not accept the backfill now: {e}") from e
        finally:
            # What this process remembers of these threads is out of date now, and the log does not show that.
            for thread_id in names:
                self._appender.forget(thread_id)
        for thread_id in changed:
            # Others remember the thread, too, so they are told, as when an operator changes it.
            with suppress(BufstoreError):  # the write is done, whoever hears of it
                await self._shared.tell_parked(thread_id)
        return written, repeated
