"""Writes a task's rows, in a Python worker, in order within a thread: as any writer does, or past the log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple

import msgspec

from bufstore.buffer import producers
from bufstore.config import BufferConfig
from bufstore.errors import BufstoreError, InvalidId, LogFull, Rejected
from bufstore.spark.config import SinkConfig
from bufstore.spark.process_loop import loop
from bufstore.spark.sink.backfill import BackfillWriter, NeedLog, Prepared, prepare
from bufstore.spark.sink.checkpoint_rows import CheckpointRow, checkpoint_of, number_of
from bufstore.spark.sink.spark_ledger import SparkLedger
from bufstore.spark.task import Counts
from bufstore.threads.buffered import BufferedThreadStore
from bufstore.threads.bulk import BulkCheckpoint
from bufstore.types import ProducerSequence, check_id

_POOL = 4
#: No user waits for a task, so its writes may take long, within the log's failover window.
_APPEND_TIMEOUT_S = 30.0

Row = Mapping[str, Any]


class RowCounts(Counts):
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


def write_rows(config: SinkConfig, batch_id: int | None, parts: Iterable[Sequence[Row]]) -> RowCounts:
    """Write rows that are sorted by thread, part by part.

    `batch_id`: the rows are numbered by it; without one, a repeat is not recognized. Raises BufstoreError when it is
    not the rows' fault: Spark tries the task again.
    """
    task = _Task(config, batch_id)
    for part in parts:
        if part:
            loop().run(task.write(part))
    return task.outcome


class _Task:
    """One task's rows on their way."""

    def __init__(self, config: SinkConfig, batch_id: int | None) -> None:
        self.outcome = RowCounts()
        self._config = config
        self._batch_id = batch_id
        self._in_flight = _InFlight(config.in_flight)
        #: How many rows of the last thread there were: its rows may go on in the next part.
        self._ranks: dict[str, int] = {}
        #: Threads of which a row is bad, when that fails the batch.
        self._failed: set[str] = set()
        #: Threads that were written through the log: it may not show them at once.
        self._logged: set[str] = set()

    async def write(self, rows: Sequence[Row]) -> None:
        opened = await _opened(self._config)
        threads: dict[str, list[_Line]] = {}
        for row in rows:
            lines = threads.setdefault(row["thread_id"], [])
            lines.append(_line(self._ranks.get(row["thread_id"], 0) + len(lines), row))
        through_log = threads
        if self._config.mode == "postgres":
            remaining = await self._write_direct(opened, threads)
            through_log = {t: lines for t, lines in threads.items() if t in remaining}
        self._logged.update(through_log)
        await self._write_logged(opened, through_log)
        last = next(reversed(threads))
        self._ranks = {last: threads[last][-1].rank + 1}

    async def _write_logged(self, opened: _Opened, threads: Mapping[str, Sequence[_Line]]) -> None:
        bulk = opened.store.bulk
        wanted = (line.wanted for lines in threads.values() for line in lines)
        await bulk.claim(one.run for one in wanted if isinstance(one, CheckpointRow))
        await bulk.learn_new([t for t in threads if _is_id(t)])
        try:
            async with asyncio.TaskGroup() as group:
                for thread_id, lines in threads.items():
                    group.create_task(self._write_thread(opened, thread_id, lines))
        except* BufstoreError as e:
            raise e.exceptions[0] from None  # one error says enough, and Spark shows it

    async def _write_thread(self, opened: _Opened, thread_id: str, lines: Sequence[_Line]) -> None:
        # In order: if rows behind a refused row were written, a repeat of the batch would take that row for written.
        todo = lines
        while todo:
            if thread_id in self._failed:
                self.outcome.behind += len(todo)
                return
            some = todo[: self._in_flight.share]
            async with self._in_flight.taken(len(some)):
                done = await self._write_series(opened, thread_id, some)
            todo = todo[done:]

    async def _write_series(self, opened: _Opened, thread_id: str, lines: Sequence[_Line]) -> int:
        """Write rows up to and including the first bad one. Returns how many that are."""
        steps: list[BulkCheckpoint] = []
        error: BufstoreError | None = None
        for line in lines:
            wanted = line.wanted
            if isinstance(wanted, Rejected):
                error = wanted
                break
            steps.append(BulkCheckpoint(wanted.messages, wanted.run, wanted.whole, self._mark(line.rank)))
        series = await opened.store.bulk.write(thread_id, steps)
        done = len(series.receipts)
        repeated = sum(receipt.repeated for receipt in series.receipts)
        self.outcome.written += done - repeated
        self.outcome.repeated += repeated
        error = series.error or error
        if error is None:
            return done
        if not isinstance(error, Rejected) or isinstance(error, LogFull):
            raise error  # no fault of the row
        await self._refuse(opened, lines[done], error)
        return done + 1

    def _mark(self, rank: int) -> ProducerSequence | None:
        return (
            ProducerSequence(self._config.app_id, number_of(self._batch_id, rank))
            if self._batch_id is not None
            else None
        )

    async def _refuse(self, opened: _Opened, line: _Line, error: Rejected) -> None:
        self.outcome.add(RowCounts(bad=1, reasons=[f"thread {line.row['thread_id']!r}: {error}"]))
        if self._config.bad_rows == "fail":
            self._failed.add(line.row["thread_id"])
        else:
            await opened.ledger.quarantine(self._config.app_id, self._batch_id or 0, line.rank, line.row, str(error))

    async def _write_direct(self, opened: _Opened, threads: Mapping[str, Sequence[_Line]]) -> set[str]:
        """Write straight into Postgres what may go there; the threads that remain."""
        direct = opened.direct
        assert direct is not None
        remaining = {t for t in threads if t in self._logged or t in self._failed}
        remaining |= await direct.in_log([t for t in threads if _is_id(t) and t not in remaining])
        prepared: dict[str, list[Prepared]] = {}
        for thread_id, lines in threads.items():
            if thread_id in remaining:
                continue
            try:
                prepared[thread_id] = prepare(thread_id, [self._marked(line) for line in lines])
            except Rejected:
                remaining.add(thread_id)  # the log's checks name the bad row
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

    def _marked(self, line: _Line) -> tuple[CheckpointRow, bytes | None]:
        if isinstance(line.wanted, Rejected):
            raise line.wanted
        return line.wanted, producers.item_of(self._mark(line.rank))


class _Line(NamedTuple):
    """A row, its place among its thread's rows in the batch, and what it asks for (or why that cannot be)."""

    rank: int
    row: Row
    wanted: CheckpointRow | Rejected


def _line(rank: int, row: Row) -> _Line:
    try:
        return _Line(rank, row, checkpoint_of(row))
    except Rejected as e:
        return _Line(rank, row, e)


class _InFlight:
    """Bounds the rows on their way. A thread takes them in portions, so that no thread takes them all."""

    def __init__(self, rows: int) -> None:
        self.share = max(rows // 4, 1)
        self._free = asyncio.Semaphore(rows)
        # Two threads that each hold a part of what they need would wait for each other.
        self._taking = asyncio.Lock()

    @asynccontextmanager
    async def taken(self, rows: int) -> AsyncIterator[None]:
        """Hold this many rows, at most a share, during the block."""
        held = 0
        try:
            async with self._taking:
                while held < rows:
                    await self._free.acquire()
                    held += 1
            yield
        finally:
            for _ in range(held):
                self._free.release()


def _is_id(thread_id: str | None) -> bool:
    with suppress(InvalidId):
        return bool(check_id(thread_id, "thread_id"))
    return False


class _Opened(NamedTuple):
    """What the tasks of a process share."""

    store: BufferedThreadStore
    ledger: SparkLedger
    #: In mode="postgres".
    direct: BackfillWriter | None


async def _opened(config: SinkConfig) -> _Opened:
    async def open_() -> _Opened:
        log = await config.find_log()
        longest = config.append_timeout_s or min(_APPEND_TIMEOUT_S, log.failover_window_s / 2)
        buffer = BufferConfig.fitting(log, flusher=False, append_timeout_s=longest)
        inner = config.store(pool_size=_POOL)
        store = await BufferedThreadStore.open(inner, nats=config.server, config=buffer)
        ledger = SparkLedger(config.postgres, config.schema)
        await ledger.open()
        direct = BackfillWriter(inner, store.buffer) if config.mode == "postgres" else None
        return _Opened(store, ledger, direct)

    c = config
    key = (c.server.servers, c.stream, c.postgres, c.schema, c.append_timeout_s, c.mode)
    return await loop().opened(key, open_)
