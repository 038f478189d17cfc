"""Writes a task's rows in a Python worker, each thread's in order: into the log, as any writer does, or past it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from operator import itemgetter

import msgspec

from bufstore.buffer import producers
from bufstore.errors import (
    BufstoreError,
    ConfigError,
    InvalidId,
    InvalidRecord,
    LineageError,
    LogFull,
    LogUnavailable,
    Rejected,
    StoreUnavailable,
)
from bufstore.log_lines import LogLines
from bufstore.spark.config import SinkConfig
from bufstore.spark.outage import GaveUp, Patience, is_outage
from bufstore.spark.process_loop import loop
from bufstore.spark.sink.backfill import BackfillWriter, NeedLog, Prepared, prepare
from bufstore.spark.sink.checkpoint_rows import CheckpointRow, number_of
from bufstore.spark.sink.in_flight import InFlight
from bufstore.spark.sink.lines import Line, Row, SetAside, line_of
from bufstore.spark.sink.open_sink import OpenSink, open_sink
from bufstore.spark.sink.parts import Part
from bufstore.spark.sink.settled import ROW, THREAD, RowKey, Settled, SettledThread, key_of
from bufstore.spark.sink.spark_ledger import row_key
from bufstore.spark.task import Counts
from bufstore.tasks import together
from bufstore.threads.bulk import BulkCheckpoint
from bufstore.threads.edits import WantedEdit
from bufstore.threads.lanes import ThreadBuffer
from bufstore.threads.lineage import LineageChange
from bufstore.types import ProducerSequence, check_id

_log = LogLines(__name__)

_PING_S = 2.0


class RowCounts(Counts):
    """What became of rows."""

    written: int = 0
    #: Rows that an earlier try had written or set aside.
    repeated: int = 0
    #: Rows that cannot become checkpoints.
    bad: int = 0
    #: Rows that were not tried, because a row before them in their thread is bad and the batch fails.
    behind: int = 0
    #: The milliseconds in which nothing got through, of all tasks together.
    waited_ms: int = 0
    #: What is wrong with the first bad rows.
    reasons: list[str] = msgspec.field(default_factory=list)


@dataclass
class Written:
    """What a task did."""

    counts: RowCounts = field(default_factory=RowCounts)
    #: Threads whose rows wait for a parent that another task may write, each with the place of its first such row.
    deferred: dict[str, int] = field(default_factory=dict)
    #: Bad rows that fail the batch, and those behind them.
    left: list[RowKey] = field(default_factory=list)
    #: For each part that has rows, a sum over them.
    sums: dict[int, int] = field(default_factory=dict)
    #: The outage because of which the task ended before its last row; None: it did not.
    gave_up: GaveUp | None = None

    def add(self, other: Written) -> None:
        """Add what another task, or another pass, did."""
        self.counts.add(other.counts)
        self.deferred |= other.deferred
        self.left += other.left
        self.sums |= other.sums


@dataclass(frozen=True)
class Pass:
    """Which rows of a batch are written in one pass over it, and how."""

    #: The rows that an earlier try has written; if there are any, all rows have the columns of
    #: `bufstore.spark.sink.settled`.
    settled: Settled = field(default_factory=Settled)
    #: The threads to write, each from this place on, because an earlier pass has dealt with the rows before; None: all.
    only: Mapping[str, int] | None = None
    #: Whether a row is bad when its thread cannot have the parent that it names; else the thread is deferred.
    judging: bool = True
    #: Whether a part is noted before its first row is written.
    noting: bool = False
    #: Whether an earlier try may have set rows aside; only Postgres knows which, so the part is noted in any case.
    again: bool = False


_JUDGED = Pass()


def write_rows(
    config: SinkConfig,
    batch_id: int | None,
    portions: Iterable[Sequence[Row]],
    now: Pass = _JUDGED,
    part: Part | None = None,
) -> Written:
    """Write rows that are sorted by thread, a portion at a time.

    `batch_id`: part of the rows' numbers; without it, a repeat is not recognized. `part`: what these rows are of
    the batch; without it, nothing is noted.

    Waits for servers that are away (`SinkConfig.outage_timeout_s`). Raises BufstoreError when the rows are not at fault
    (Spark tries the task again), ConfigError when they contradict `now.settled` or what was noted of them before.
    """
    task = _Task(config, batch_id, now, part)
    for rows in portions:
        loop().run(task.write(rows))
    loop().run(task.finish())
    return task.outcome()


class _Task:
    """One task's rows on their way."""

    def __init__(self, config: SinkConfig, batch_id: int | None, now: Pass, part: Part | None) -> None:
        self._written = Written(sums={part.number: part.planned} if part is not None else {})
        self._config = config
        self._batch_id = batch_id
        #: What stands for the batch in the keys of its rows.
        self._batch: int | bytes = batch_id if batch_id is not None else os.urandom(16)
        self._now = now
        #: The part that is still to be noted; None: it was noted, or need not be.
        self._to_note = part if now.noting or now.again else None
        #: The keys of rows that an earlier try set aside: people decide whether and how these rows come back.
        self._set_aside: set[bytes] = set()
        self._judging = now.judging
        self._in_flight = InFlight(config.in_flight)
        who = f"batch {batch_id} of {config.app_id}"
        self._patience = Patience(config.outage_timeout_s, who, numbered=batch_id is not None)
        #: How far the last thread's rows have come: the next part may have more of them.
        self._places: dict[str | None, _Place] = {}
        #: Threads with a bad row, when bad rows fail the batch.
        self._failed: set[str] = set()
        #: Threads that were written through the log, which may not show them at once.
        self._logged: set[str] = set()
        #: Rows that wait for a parent, in a batch without a number: only this task knows which rows are written.
        self._kept: dict[str, _Todo] = {}

    def outcome(self) -> Written:
        self._written.counts.waited_ms = round(self._patience.waited_s * 1000)
        return self._written

    async def write(self, rows: Sequence[Row]) -> None:
        opened = await self._patience.until_through(lambda: open_sink(self._config))
        await self._note(opened)
        threads = self._lines_of(rows)
        if not threads:
            return
        through_log = threads
        if self._config.mode == "postgres":
            through_log = await self._write_past_log(opened, threads)
        self._logged.update(through_log)
        await self._write_in_rounds(opened, {thread_id: _Todo(lines) for thread_id, lines in through_log.items()})

    async def _note(self, opened: OpenSink) -> None:
        if self._to_note is None or self._batch_id is None:
            return
        (part, self._to_note), batch_id = (self._to_note, None), self._batch_id

        async def noting() -> tuple[int, Part]:
            found = await opened.ledger.plan(self._config.app_id, batch_id, part, _PING_S)
            self._set_aside = await opened.ledger.set_aside(self._config.app_id, batch_id, _PING_S)
            return found

        try:
            found = await (self._patience.until_through(noting) if self._now.again else noting())
        except StoreUnavailable as e:
            if self._now.again:
                raise
            # As for a batch that begins without Postgres: a running query does not wait for Postgres.
            _log.warning(
                "part %d of batch %d of %s goes on without Postgres: %s", part.number, batch_id, self._config.app_id, e
            )
            return
        if found != (batch_id, part):
            raise ConfigError(
                f"part {part.number} of batch {batch_id} of app id {self._config.app_id!r} was begun before with "
                "other rows, or a later batch was begun: the source cannot be replayed, or the query runs twice"
            )

    def _lines_of(self, rows: Sequence[Row]) -> dict[str, list[Line]]:
        """Return the rows that are to be written, by thread."""
        threads: dict[str, list[Line]] = {}
        line, places, last = self._line if self._set_aside else line_of, self._places, None
        only = self._now.only
        for last, found in groupby(rows, itemgetter("thread_id")):
            if (only is not None and last not in only) or last in self._written.deferred:
                continue
            some: Sequence[Row] = list(found)
            if last in self._kept:
                kept = self._kept[last].lines
                kept += [line_of(rank, row) for rank, row in enumerate(some, kept[-1].rank + 1)]
                continue
            if last not in places:
                settled = self._now.settled.of(some[0][THREAD]) if self._now.settled else None
                places[last] = _Place(settled, settled.next_rank if settled is not None else 0)
            place = places[last]
            if (before := place.before) is not None:
                new = [row for row in some if not before.holds(key_of(row))]
                if only is None:
                    self._written.counts.repeated += len(some) - len(new)
                some = new
            done = max(only[last] - place.next_rank, 0) if only is not None else 0
            if some[done:]:
                lines = (line(rank, row) for rank, row in enumerate(some[done:], place.next_rank + done))
                threads.setdefault(last, []).extend(lines)
            place.next_rank += len(some)
        self._places = {last: places[last]} if last in places else {}
        return threads

    def _line(self, rank: int, row: Row) -> Line:
        if self._key(rank, row) in self._set_aside:
            # A replay may have written the row by now, or the row has become good meanwhile and is replayed later.
            return Line(rank, row, SetAside("an earlier try of the batch has set this row aside"))
        return line_of(rank, row)

    def _key(self, rank: int, row: Row) -> bytes:
        return row_key(self._config.app_id, self._batch, row, rank)

    async def finish(self) -> None:
        """Write the rows that waited for a parent, and judge those that still wait."""
        for judging in (False, True):
            if self._kept:
                self._judging = judging
                kept, self._kept = self._kept, {}
                await self._write_in_rounds(await open_sink(self._config), kept)

    async def _write_in_rounds(self, opened: OpenSink, todo: dict[str, _Todo]) -> None:
        while todo:
            current = _Round(todo)
            await self._patience.until_through(lambda round_=current: self._write_round(opened, round_))  # type: ignore[misc]
            todo = current.deferred
            if not current.settled:
                break
        if self._batch_id is None:
            self._kept |= todo
            return
        # The parents of these threads may be among the rows of other parts and tasks.
        for thread_id, found in todo.items():
            self._written.deferred[thread_id] = found.lines[0].rank
            self._written.counts.add(found.counts)

    async def _write_round(self, opened: OpenSink, round_: _Round) -> None:
        """Write what can be written now. Raises the outage for which the rest waits."""
        threads = list(round_.todo)
        wanted = (line.wanted for todo in round_.todo.values() for line in todo.lines)
        await opened.store.bulk.claim(one.run for one in wanted if isinstance(one, CheckpointRow))
        unknown = await self._learn_new(opened, [t for t in threads if _is_id(t)], round_)
        try:
            async with asyncio.TaskGroup() as group:
                for thread_id in threads:
                    if thread_id not in unknown:
                        group.create_task(self._write_thread(opened, thread_id, round_))
        except* BufstoreError as e:
            raise e.exceptions[0] from None  # one error says enough, and Spark shows it
        if round_.outage is not None:
            outage, round_.outage = round_.outage, None
            raise outage

    async def _learn_new(self, opened: OpenSink, threads: Sequence[str], round_: _Round) -> set[str]:
        """Find out which threads are new. Returns those that must wait, as only Postgres can tell and it is away."""
        lanes = opened.store.lanes
        asked = [t for t in threads if lanes.of(t).appender.tip(t) is None]
        if not asked:
            return set()
        try:
            # Looking up many threads may take long. A ping shows sooner whether Postgres answers.
            await opened.ledger.ping(_PING_S)
            await opened.store.bulk.learn_new(threads)
            return set()
        except StoreUnavailable as e:
            outage = e
        found = await together(_not_in_log(buffer, some) for buffer, some in lanes.shared_out(asked))
        unknown = set[str]().union(*found)
        if unknown:
            round_.outage = outage
        return unknown

    async def _write_thread(self, opened: OpenSink, thread_id: str, round_: _Round) -> None:
        # In order: if rows behind a refused row were written, a repeat of the batch would take that row for written.
        todo = round_.todo[thread_id]
        while todo.lines:
            if thread_id in self._failed:
                todo.counts.behind += len(todo.lines)
                self._leave(todo.lines)
                break
            some = todo.lines[: self._in_flight.share]
            async with self._in_flight.taken(len(some)):
                if isinstance(round_.outage, (LogFull, LogUnavailable)):
                    return  # this thread's write would fail, too
                error = await self._write_series(opened, thread_id, some, todo)
                if isinstance(error, LineageError) and not self._judging:
                    round_.deferred[thread_id] = round_.todo.pop(thread_id)
                    return
                if isinstance(error, Rejected) and not isinstance(error, LogFull):
                    error = await self._refuse(opened, thread_id, todo, error)
            if error is not None:
                if not is_outage(error, numbered=self._batch_id is not None):
                    raise error
                round_.outage = round_.outage or error
                return
            round_.settled = True
            self._patience.progressed()
        del round_.todo[thread_id]
        self._written.counts.add(todo.counts)

    async def _write_series(
        self, opened: OpenSink, thread_id: str, lines: Sequence[Line], todo: _Todo
    ) -> BufstoreError | None:
        """Write rows up to the first one that cannot be written now, or is bad. Returns the error of that row.

        An edit is written alone.
        """
        first = lines[0].wanted
        if isinstance(first, WantedEdit | LineageChange):
            return await self._write_edit(opened, first, todo)
        steps: list[BulkCheckpoint] = []
        error: BufstoreError | None = None
        for line in lines:
            wanted = line.wanted
            if isinstance(wanted, Rejected):
                error = wanted
            if not isinstance(wanted, CheckpointRow):
                break
            steps.append(BulkCheckpoint(wanted.messages, wanted.run, wanted.whole, self._mark(line.rank)))
        series = await opened.store.bulk.write(thread_id, steps)
        done = len(series.receipts)
        repeated = sum(receipt.repeated for receipt in series.receipts)
        todo.counts.written += done - repeated
        todo.counts.repeated += repeated
        todo.lines = todo.lines[done:]
        return series.error or error

    async def _write_edit(
        self, opened: OpenSink, wanted: WantedEdit | LineageChange, todo: _Todo
    ) -> BufstoreError | None:
        bulk, mark = opened.store.bulk, self._mark(todo.lines[0].rank)
        try:
            if isinstance(wanted, LineageChange):
                repeated = await bulk.delete(wanted, mark) is not False  # no such thread: somebody deleted it
            else:
                repeated = (await bulk.edit(wanted, mark)).repeated
        except BufstoreError as e:
            return e
        todo.counts.written += not repeated
        todo.counts.repeated += repeated
        todo.lines = todo.lines[1:]
        return None

    def _mark(self, rank: int) -> ProducerSequence | None:
        return (
            ProducerSequence(self._config.app_id, number_of(self._batch_id, rank))
            if self._batch_id is not None
            else None
        )

    async def _refuse(self, opened: OpenSink, thread_id: str, todo: _Todo, error: Rejected) -> BufstoreError | None:
        """Set the first row aside, or stop its thread there. Returns the outage that prevents setting the row aside."""
        line = todo.lines[0]
        if isinstance(error, SetAside):
            todo.lines = todo.lines[1:]
            todo.counts.repeated += 1
            return None
        if self._config.bad_rows == "fail":
            self._failed.add(thread_id)
            self._leave([line])
        else:
            try:
                name, key = self._config.app_id, self._key(line.rank, line.row)
                await opened.ledger.quarantine(name, self._batch_id, line.rank, line.row, str(error), key)
            except StoreUnavailable as e:
                return e
        todo.lines = todo.lines[1:]
        todo.counts.add(RowCounts(bad=1, reasons=[f"thread {thread_id!r}: {error}"]))
        return None

    def _leave(self, lines: Sequence[Line]) -> None:
        self._written.left += [key_of(line.row) for line in lines if ROW in line.row]

    async def _write_past_log(self, opened: OpenSink, threads: Mapping[str, list[Line]]) -> dict[str, list[Line]]:
        """Write the threads that may go straight into Postgres. Returns the others."""
        remaining = {t for t in threads if not _is_id(t) or t in self._logged or t in self._failed}
        for buffer, some in opened.store.lanes.shared_out(t for t in threads if t not in remaining):
            # Each lane by itself: what one has committed is not written again because another one must wait.
            write = partial(self._write_lane, opened, buffer, {t: threads[t] for t in some})
            remaining |= await self._patience.until_through(write)
        return {t: lines for t, lines in threads.items() if t in remaining}

    async def _write_lane(self, opened: OpenSink, buffer: ThreadBuffer, threads: Mapping[str, list[Line]]) -> set[str]:
        direct = BackfillWriter(opened.tables, buffer)
        remaining = await direct.in_log(threads)
        prepared: dict[str, list[Prepared]] = {}
        for thread_id, lines in threads.items():
            if thread_id in remaining:
                continue
            try:
                prepared[thread_id] = prepare(thread_id, [self._marked(line) for line in lines])
            except Rejected:
                remaining.add(thread_id)  # the log's checks name the bad row
        refused = False
        while prepared:
            try:
                written, repeated = await direct.write(prepared)
            except NeedLog as e:
                refused = True
                for thread_id in e.threads:
                    del prepared[thread_id]
                    remaining.add(thread_id)
                continue
            self._written.counts.written += written
            self._written.counts.repeated += repeated
            break
        if refused:
            # The reason may be a run id that a thread that was written has, too. The log's checks ask whose id it is.
            wanted = (line.wanted for thread_id in prepared for line in threads[thread_id])
            await opened.store.bulk.claim(one.run for one in wanted if isinstance(one, CheckpointRow))
        return remaining

    def _marked(self, line: Line) -> tuple[CheckpointRow, bytes | None]:
        if not isinstance(line.wanted, CheckpointRow):
            raise line.wanted if isinstance(line.wanted, Rejected) else InvalidRecord("an edit goes through the log")
        if self._batch_id is None:
            return line.wanted, None
        return line.wanted, producers.item(self._config.app_id, number_of(self._batch_id, line.rank))


async def _not_in_log(buffer: ThreadBuffer, threads: Sequence[str]) -> set[str]:
    """Return those of these threads of which the log shows nothing."""
    subjects = {buffer.subjects.of(thread_id): thread_id for thread_id in threads}
    found = await buffer.log.last(list(subjects))
    return {thread_id for subject, thread_id in subjects.items() if subject not in found}


@dataclass
class _Place:
    """How far the rows of a thread have come."""

    #: The thread's rows that an earlier try has written; None: none.
    before: SettledThread | None
    next_rank: int


@dataclass
class _Todo:
    """What remains of a thread's rows, and what became of the others."""

    lines: list[Line]
    counts: RowCounts = field(default_factory=RowCounts)


@dataclass
class _Round:
    """One try of all threads that have rows left."""

    todo: MutableMapping[str, _Todo]
    deferred: dict[str, _Todo] = field(default_factory=dict)
    #: The outage for which some rows wait; None: none waits.
    outage: BufstoreError | None = None
    #: Whether any row was written or refused.
    settled: bool = False


def _is_id(thread_id: str | None) -> bool:
    with suppress(InvalidId):
        return bool(check_id(thread_id, "thread_id"))
    return False
