"""Writing a task's rows, in a Python worker, in order within a thread: as any writer does, or past the log."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from bufstore.buffer import sources
from bufstore.config import BufferConfig
from bufstore.errors import BufstoreError, InvalidId, LogFull, Rejected
from bufstore.postgres.store import PostgresThreadStore
from bufstore.spark.config import SinkConfig
from bufstore.spark.direct import DirectWriter, NeedLog, Prepared, prepare
from bufstore.spark.ledger import SparkLedger
from bufstore.spark.rows import number_of, write_of
from bufstore.spark.worker import loop
from bufstore.threads.buffered import BufferedThreadStore
from bufstore.types import SourceMark, check_id

_POOL = 4
_SHOWN = 10

Row = Mapping[str, Any]


class Outcome(msgspec.Struct):
    """What became of rows."""

    written: int = 0
    #: Were there already, from an earlier try.
    repeated: int = 0
    #: Cannot become checkpoints.
    bad: int = 0
    #: Not tried, because a row before them in their thread is bad and the batch fails.
    behind: int = 0
    #: What is wrong with the first of the bad ones.
    reasons: list[str] = msgspec.field(default_factory=list)

    def add(self, other: Outcome) -> None:
        """Add what became of other rows."""
        self.written += other.written
        self.repeated += other.repeated
        self.bad += other.bad
        self.behind += other.behind
        self.reasons = (self.reasons + other.reasons)[:_SHOWN]

    def refuse(self, row: Row, error: Rejected) -> None:
        """Count a bad row."""
        self.bad += 1
        if len(self.reasons) < _SHOWN:
            self.reasons.append(f"thread {row['thread_id']!r}: {error}")


def write_rows(config: SinkConfig, batch_id: int | None, parts: Iterable[Sequence[Row]]) -> Outcome:
    """Write rows that are sorted by thread, part by part.

    `batch_id`: the rows are numbered by it; without one, a repeat is not recognized. Raises BufstoreError when it is
    not the rows' fault: the task is to be tried again.
    """
    task = _Task(config, batch_id)
    for part in parts:
        if part:
            loop().run(task.write(part))
    return task.outcome


class _Task:
    """One task's rows on their way."""

    def __init__(self, config: SinkConfig, batch_id: int | None) -> None:
        self.outcome = Outcome()
        self._config = config
        self._batch_id = batch_id
        self._room = asyncio.Semaphore(config.in_flight)
        #: How many rows of the last thread there were: its rows may go on in the next part.
        self._ranks: dict[str, int] = {}
        #: Threads of which a row is bad, when that fails the batch.
        self._failed: set[str] = set()
        #: Threads that were written through the log: it may not show them at once.
        self._logged: set[str] = set()

    async def write(self, rows: Sequence[Row]) -> None:
        """Write the next part."""
        opened = await _opened(self._config)
        threads: dict[str, list[Row]] = {}
        for row in rows:
            threads.setdefault(row["thread_id"], []).append(row)
        through_log = set(threads)
        if self._config.mode == "postgres":
            through_log = await self._write_direct(opened, threads)
        self._logged |= through_log
        await opened.store.learn_new([t for t in through_log if _is_id(t)])
        try:
            async with asyncio.TaskGroup() as group:
                for thread_id in threads:
                    if thread_id in through_log:
                        group.create_task(self._write_thread(opened, thread_id, threads[thread_id]))
        except* BufstoreError as e:
            raise e.exceptions[0] from None  # one says enough, and Spark shows it
        last = next(reversed(threads))
        self._ranks = {last: self._ranks.get(last, 0) + len(threads[last])}

    async def _write_thread(self, opened: _Opened, thread_id: str, rows: Sequence[Row]) -> None:
        # One after the other: a row that is refused must not be passed by those behind it, or a repeat of the batch
        # would take it for one that is there.
        for rank, row in enumerate(rows, self._ranks.get(thread_id, 0)):
            if thread_id in self._failed:
                self.outcome.behind += 1
                continue
            async with self._room:
                try:
                    await self._write_row(opened.store, rank, row)
                except LogFull:
                    raise  # no fault of the row
                except Rejected as e:
                    await self._refuse(opened, rank, row, e)

    async def _write_row(self, store: BufferedThreadStore, rank: int, row: Row) -> None:
        wanted = write_of(row)
        call = store.checkpoint if wanted.whole else store.checkpoint_append
        receipt = await call(wanted.thread_id, wanted.messages, wanted.run, source=self._mark(rank))
        self.outcome.written += not receipt.repeated
        self.outcome.repeated += receipt.repeated

    def _mark(self, rank: int) -> SourceMark | None:
        return SourceMark(self._config.app_id, number_of(self._batch_id, rank)) if self._batch_id is not None else None

    async def _refuse(self, opened: _Opened, rank: int, row: Row, error: Rejected) -> None:
        self.outcome.refuse(row, error)
        if self._config.bad_rows == "fail":
            self._failed.add(row["thread_id"])
        else:
            await opened.ledger.quarantine(self._config.app_id, self._batch_id or 0, rank, row, str(error))

    async def _write_direct(self, opened: _Opened, threads: Mapping[str, Sequence[Row]]) -> set[str]:
        """Write straight into Postgres what may go there; the threads that remain."""
        direct = opened.direct
        assert direct is not None
        remaining = {t for t in threads if t in self._logged or t in self._failed}
        remaining |= await direct.in_log([t for t in threads if _is_id(t) and t not in remaining])
        prepared: dict[str, list[Prepared]] = {}
        for thread_id, rows in threads.items():
            if thread_id in remaining:
                continue
            try:
                prepared[thread_id] = [
                    self._prepared(rank, row) for rank, row in enumerate(rows, self._ranks.get(thread_id, 0))
                ]
            except Rejected:
                remaining.add(thread_id)  # there it is said row by row
        while prepared:
            try:
                written, repeated = await direct.write(prepared)
            except NeedLog as e:
                for thread_id in e.threads:
                    del prepared[thread_id]
                    remaining.add(thread_id)
                continue
            self.outcome.written += written
            self.outcome.repeated += repeated
            break
        return remaining

    def _prepared(self, rank: int, row: Row) -> Prepared:
        mark = self._mark(rank)
        return prepare(write_of(row), sources.item(mark.name, mark.number) if mark is not None else None)


def _is_id(thread_id: str | None) -> bool:
    with suppress(InvalidId):
        return bool(check_id(thread_id, "thread_id"))
    return False


class _Opened(NamedTuple):
    """What the tasks of a process share."""

    store: BufferedThreadStore
    ledger: SparkLedger
    #: In mode="postgres".
    direct: DirectWriter | None


async def _opened(config: SinkConfig) -> _Opened:
    async def open_() -> _Opened:
        log = await config.find_log()
        buffer = BufferConfig(
            log=log,
            flusher=False,
            append_timeout_s=config.append_timeout_s,
            failover_window_s=max(BufferConfig.failover_window_s, 2 * config.append_timeout_s),
        )
        inner = PostgresThreadStore(config.postgres, schema=config.schema, pool_size=_POOL)
        store = await BufferedThreadStore.open(inner, nats=config.server, config=buffer)
        ledger = SparkLedger(config.postgres, config.schema)
        await ledger.open()
        direct = DirectWriter(config, log) if config.mode == "postgres" else None
        if direct is not None:
            await direct.open()
        return _Opened(store, ledger, direct)

    c = config
    key = (c.server.servers, c.stream, c.postgres, c.schema, c.append_timeout_s, c.mode)
    return await loop().opened(key, open_)
