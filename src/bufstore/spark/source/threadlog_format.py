"""The log as a source of Spark: ``spark.read.format("threadlog")`` and ``spark.readStream.format("threadlog")``.

Spark finds it by itself (`pyspark_threadlog`). An offset is a sequence of the stream together with the stream's
identity, so a batch that is read again has the same entries, and it ends at a group's end. Tasks read ranges with
consumers of their own (`bufstore.nats.ranges`); they never touch the flusher's consumers, and ack nothing.
Options: `bufstore.spark.source.options`.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

import msgspec
import pyarrow
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from bufstore.errors import ConfigError, LogUnavailable, NoLog
from bufstore.nats.ranges import LogState
from bufstore.spark.catalog_options import check_same_columns, of_catalog, schema_of, with_kept
from bufstore.spark.process_loop import loop
from bufstore.spark.source import log_scan
from bufstore.spark.source.log_columns import types_of
from bufstore.spark.source.offsets import Offset, Range, begin_at, check, offset_of, parts_of, split
from bufstore.spark.source.options import PATIENCE_S, ReadOptions, read_options

T = TypeVar("T")

#: How long a stream waits for a server that is away, in seconds: as long as the sink does.
_OUTAGE_S = 3600.0


class ThreadLogSource(DataSource):
    """See the module."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        self.options = dict(options)

    @classmethod
    def name(cls) -> str:
        return "threadlog"

    def schema(self) -> StructType:
        kept = of_catalog(self.options)
        options = read_options(self.options if kept is None else kept)
        return schema_of(types_of(options.columns), kept)

    def reader(self, schema: StructType) -> DataSourceReader:
        return _Batch(self._read_options(schema, PATIENCE_S))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        options = self._read_options(schema, _OUTAGE_S)
        if options.ending_position not in (None, "latest") or options.ending_timestamp_us is not None:
            raise ConfigError("endingPosition and endingTimestamp are for a batch: a stream goes on for good")
        return _Stream(options)

    def _read_options(self, schema: StructType, outage_timeout_s: float) -> ReadOptions:
        options = read_options(with_kept(self.options, schema), outage_timeout_s=outage_timeout_s)
        check_same_columns(options.columns, schema)
        return options


class _Reads:
    """What a batch and a stream have in common."""

    def __init__(self, options: ReadOptions) -> None:
        self.options = options

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        """Return the entries of a range, as batches of Arrow."""
        return loop().each(log_scan.batches(self.options, partition.value))

    def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        return loop().run(log_scan.patiently(call, self.options.outage_timeout_s))

    async def _look(self, known: Offset | None = None) -> LogState:
        """Return the log as it is now. Where it seems older than `known`, the node that answered may lag."""
        log = await log_scan.look(self.options)
        if known is None or known.position <= log.end:
            return log
        if known.created == log.created and not self.options.fail_on_data_loss:
            return log  # what may be lost is not waited for
        return await log_scan.look(self.options, reached=known.position)

    async def _start(self, log: LogState, default: str) -> Offset:
        options = self.options
        at, since = await _place(options, log, options.starting_position, options.starting_timestamp_us, default)
        return Offset(created=log.created, position=at, since=since)


class _Batch(_Reads, DataSourceReader):
    def partitions(self) -> Sequence[InputPartition]:
        return self._patiently(self._parts)

    async def _parts(self) -> list[InputPartition]:
        options = self.options
        to_its_end = options.ending_position in (None, "latest")
        log = await log_scan.look(options, fresh=to_its_end)
        end, until = await _place(options, log, options.ending_position, options.ending_timestamp_us, "latest")
        if not to_its_end and end + bool(until) > log.end:  # the node that answered may lag
            log = await log_scan.look(options, fresh=True)
        start = await self._start(log, "earliest")
        return await _planned(options, log, start, min(end + bool(until), log.end), until)


class _Stream(_Reads, DataSourceStreamReader, SupportsTriggerAvailableNow):
    #: Whether the query has availableNow, and the log to whose end it reads then.
    _ends = False
    #: Where the query begins, if it has no micro-batch yet.
    _initial: Offset | None = None
    _target: LogState | None = None
    #: The sequence up to which micro-batches were planned.
    _reached = 0
    #: Whether no micro-batch was asked for yet, and the one that waits for rows.
    _first = True
    _waiting: _Waiting | None = None
    #: Since when the log cannot be read (by the monotonic clock, and in Unix time), and the last report about the log.
    _away: tuple[float, float] | None = None
    _told: dict[str, Any] | None = None

    def initialOffset(self) -> dict[str, Any]:
        async def found() -> Offset:
            return await self._start(await self._look(), "latest")

        self._initial = self._patiently(found)
        return self._initial.as_dict()

    def prepareForTriggerAvailableNow(self) -> None:
        self._ends = True

    def getDefaultReadLimit(self) -> ReadLimit:
        # Spark takes one limit; `latestOffset` keeps to both, unless Spark wants everything in one batch.
        if self.options.max_messages is not None:
            return ReadMaxRows(self.options.max_messages)
        return ReadMaxBytes(self.options.max_bytes) if self.options.max_bytes is not None else ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        latest = partial(self._latest, start, limit)
        if self._ends:  # an answer of nothing new would end the query
            return self._patiently(latest)
        try:
            found = loop().run(latest())
        except (LogUnavailable, NoLog):  # a log that was repaired is not there until a store opens
            # Answer that nothing is new, and do not wait: so Spark can report progress, stop the query, and ask again.
            now = time.monotonic()
            since, _ = self._away = self._away or (now, time.time())
            if now - since >= self.options.outage_timeout_s:
                raise
            return start
        self._away = None
        return found

    async def _latest(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        options, before = self.options, offset_of(start)
        log = await self._look(before)
        if options.fail_on_data_loss:
            await _check(options, log, before)
        if self._ends and (self._target is None or self._target.created != log.created):
            # Of another stream, the end says nothing of this one. The proof of the end is stored only after the check:
            # it may stand where a message was that the log has lost.
            self._target = log = await log_scan.look(options, fresh=True)
        begin = _begin(log, before)
        end = max((self._target or log).end, begin)
        self._reached = begin
        if await self._waits(log, before, begin, end):
            return start
        if not isinstance(limit, ReadAllAvailable) and begin < end:
            end = await log_scan.within(options, log, begin, end)
        self._reached = end
        began = before if before == self._initial else None
        if end == begin and log.created == before.created:
            return start if began is None else msgspec.structs.replace(before, began=began).as_dict()
        return Offset(created=log.created, position=end, began=began).as_dict()

    async def _waits(self, log: LogState, start: Offset, begin: int, end: int) -> bool:
        """Return whether the micro-batch still waits for rows."""
        wanted = self.options.min_messages
        first, self._first = self._first, False  # rows that a query finds when it starts do not wait
        if first or wanted is None or self._target is not None or begin == end:
            return False
        waiting, after = self._waiting, (log.created, start)
        if waiting is None or waiting.after != after:
            waiting = self._waiting = _Waiting(after, begin)
        waiting.rows += await log_scan.rows_between(self.options, log, waiting.counted, end)
        waiting.counted = end
        return waiting.rows < wanted and time.monotonic() - waiting.since < self.options.max_trigger_delay_s

    def reportLatestOffset(self) -> dict[str, Any] | None:
        if self._away is None:
            with suppress(LogUnavailable, NoLog):
                self._told = loop().run(self._behind())
        away = {"unavailableSince": _iso(self._away[1])} if self._away is not None else {}
        return self._told and self._told | away

    async def _behind(self) -> dict[str, Any]:
        log, at = await self._look(), self._reached
        unread = await log_scan.stored_at_ns(self.options, log, at) if at < log.end else None
        return Offset(created=log.created, position=log.end).as_dict() | {
            "headroom": max(0, at - log.first),
            "messagesBehind": max(0, log.end - at),
            "bytesBehind": log.bytes_between(at, log.end),
            "unreadSince": _iso(unread / 1e9) if unread is not None else None,
        }

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        async def found() -> list[InputPartition]:
            until = offset_of(end)
            before = until.began or offset_of(start)
            log = await self._look(until)
            if until.created == log.created:
                return await _planned(self.options, log, before, until.position)
            if self.options.fail_on_data_loss:
                check(until, log.created, log.end)
            # The stream on which the batch was planned is gone. The new stream may have the number of the batch's end,
            # too, but the next batch reads the new stream, from its first message on.
            return await _planned(self.options, log, before, _begin(log, before))

        return self._patiently(found)


class _Waiting:
    """A micro-batch that waits for rows."""

    def __init__(self, after: tuple[str, Offset], begin: int) -> None:
        #: The stream, and where the micro-batch before it ended: retention may move its beginning on meanwhile.
        self.after = after
        self.since = time.monotonic()
        #: The sequence up to which its rows were counted.
        self.counted = begin
        self.rows = 0


async def _planned(
    options: ReadOptions, log: LogState, start: Offset, end: int, until: int = 0
) -> list[InputPartition]:
    if options.fail_on_data_loss:
        await _check(options, log, start)
    begin = _begin(log, start)
    since = start.since if start.created == log.created else 0
    whole = Range(start=begin, end=end, created=log.created, since=since, until=until)
    # For a batch without parts, Spark makes one of its own, which `read` does not know.
    parts = parts_of(log.bytes_between(begin, end), exactly=options.tasks, at_least=options.min_tasks)
    return [InputPartition(part) for part in split(whole, parts) or [whole]]


async def _check(options: ReadOptions, log: LogState, start: Offset) -> None:
    """Raise DataLoss unless everything from `start` on is still in the log, as far as its ends tell."""
    check(start, log.created, log.end)
    await log_scan.check_first(options, log, start)


def _begin(log: LogState, start: Offset) -> int:
    """Return the first message that there can be; the new stream's first, if the stream was (and may be) replaced."""
    return max(start.position, log.first) if start.created == log.created else log.first


async def _place(
    options: ReadOptions, log: LogState, position: str | None, timestamp_us: int | None, default: str
) -> tuple[int, int]:
    """See `begin_at`."""
    if timestamp_us is not None:
        return await log_scan.at_time(options, log, timestamp_us), 0
    return begin_at(position or default, log.first, log.end, options.form)


def _iso(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat()
