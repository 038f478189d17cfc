"""Reads a range of the log in a Python worker: messages from the server, their entries, and the entries' rows."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import TypeVar

import pyarrow

from bufstore.buffer.groups.group import decode_header
from bufstore.errors import DataLoss, MalformedEntry
from bufstore.jetstream.messages import StoredMessage
from bufstore.nats.ranges import LogReader, LogState, Read
from bufstore.spark.outage import Patience
from bufstore.spark.process_loop import loop
from bufstore.spark.source.log_columns import entry_rows, message_rows
from bufstore.spark.source.log_entries import LogEntries, Wanted
from bufstore.spark.source.offsets import Holes, Offset, Range
from bufstore.spark.source.options import PATIENCE_S, ReadOptions

T = TypeVar("T")


async def reader_of(options: ReadOptions) -> LogReader:
    """Return a reader of the log, which this process keeps."""

    async def open_() -> LogReader:
        reader = LogReader(options.nats, options.stream)
        await reader.open()
        return reader

    return await loop().opened((options.nats, options.stream), open_)


async def patiently(call: Callable[[], Awaitable[T]], timeout_s: float = PATIENCE_S) -> T:
    """Return the result of `call`, which may be repeated. Raises LogUnavailable if none succeeds for `timeout_s`."""
    return await Patience(timeout_s, "a read of the log", numbered=True).until_through(call)


async def look(options: ReadOptions, *, fresh: bool = False, reached: int = 0) -> LogState:
    """Return the log as it is now; `fresh` and `reached`: see `LogReader.look`."""
    return await (await reader_of(options)).look(fresh=fresh, reached=reached)


async def check_first(options: ReadOptions, log: LogState, start: Offset) -> None:
    """Raise DataLoss when groups are gone at the log's beginning that had not been read, and were not erased."""
    at = start.position
    if log.first > at and await _lost(await reader_of(options), log, Holes(at), log.first) is not None:
        raise DataLoss(f"the log begins at message {log.first}, but the reader has only reached {at}")


async def _lost(reader: LogReader, log: LogState, holes: Holes, end: int) -> int | None:
    """Return the first sequence that was lost of a range that was read to its end; None if none was."""
    holes.passed(end)
    if holes.open:
        behind = await reader.first_of(log.subjects.groups, end)
        holes.ended(end, _before(behind) if behind is not None else None)
    lost, first = None, log.first
    if holes.found:
        # These are asked only now: whatever made the holes was written before. The node that answers may lag.
        for fresh in False, True:
            erased = await reader.erased(holes.found[0][0], fresh=fresh)
            first = max(first, (await reader.look()).first)
            lost = holes.lost(erased, first)
            if lost is None:
                break
    return lost


def _before(message: StoredMessage) -> int | None:
    """Return the group before this one; None for a message that is no group, which does not tell."""
    try:
        return decode_header(message).before
    except MalformedEntry:
        return None


async def at_time(options: ReadOptions, log: LogState, time_us: int) -> int:
    """Return the sequence of the first message that was stored then or later; the log's end if none was."""
    return await (await reader_of(options)).at_time(time_us * 1000, log)


async def within(options: ReadOptions, log: LogState, start: int, end: int) -> int:
    """Return how far a micro-batch gets from `start` with as many rows and bytes of bodies as it may have.

    It gets at least over one message, and never ends within one. Reads headers only.
    """
    reader, rows, size, at = await reader_of(options), 0, 0, start
    wanted = Wanted(log.subjects, options)
    async with aclosing(reader.read(start, end, log.subjects.stored, headers_only=True)) as parts:
        async for part in parts:
            for read in part:
                rows += wanted.rows(read.message)
                size += read.size
                full = (options.max_messages is not None and rows > options.max_messages) or (
                    options.max_bytes is not None and size > options.max_bytes
                )
                if full and at > start:
                    return at
                at = read.message.seq + 1
    return end


async def rows_between(options: ReadOptions, log: LogState, start: int, end: int) -> int:
    """Return how many rows these messages become at most. Reads headers only."""
    wanted, rows = Wanted(log.subjects, options), 0
    found = (await reader_of(options)).read(start, end, log.subjects.stored, headers_only=True)
    async with aclosing(found) as parts:
        async for part in parts:
            rows += sum(wanted.rows(read.message) for read in part)
    return rows


async def stored_at_ns(options: ReadOptions, log: LogState, start: int) -> int | None:
    """Return when the first message from this sequence on was stored; None if there is none."""
    return await (await reader_of(options)).stored_at_ns(start, log)


async def batches(options: ReadOptions, part: Range) -> AsyncGenerator[pyarrow.RecordBatch]:
    """Yield the rows of a range. Raises DataLoss when some of it was purged since the reader began."""
    timeout_s = options.outage_timeout_s
    log = await patiently(partial(look, options, reached=part.start), timeout_s)  # connecting waits, too
    reader = await reader_of(options)
    entries = LogEntries(reader, log, options, part)
    found = messages(reader, log, part, Holes(part.start), fails=options.fail_on_data_loss, timeout_s=timeout_s)
    async with aclosing(found) as parts:
        async for reads in parts:
            yield await _rows(options, log, entries, reads)


async def messages(
    reader: LogReader, log: LogState, part: Range, holes: Holes, *, fails: bool, timeout_s: float = PATIENCE_S
) -> AsyncGenerator[Sequence[Read]]:
    """Yield the messages of a range. Waits for servers that are away.

    Raises DataLoss when the stream is another one, or (with `fails`) when groups of the range are gone; LogUnavailable.
    """
    _check_same(log, part)
    # All messages are read, because a group holds entries of many threads, and to find out whether any is missing.
    read = reader.read(part.start, part.end, log.subjects.stored, silence_s=timeout_s)
    async with aclosing(read) as found:
        async for reads in found:
            for message in (read.message for read in reads):
                holes.passed(message.seq)
                if message.subject == log.subjects.groups:
                    holes.group(message.seq, _before(message) if holes.open else 0)
            yield reads
    _check_same(await patiently(partial(reader.look, reached=part.start), timeout_s), part)
    if fails and (lost := await patiently(partial(_lost, reader, log, holes, part.end), timeout_s)) is not None:
        raise DataLoss(
            f"message {lost} was purged before it was read: retention is shorter than the time since the read was "
            "planned (a DataFrame, or view, keeps the range of its first action: load it anew)"
        )


def _check_same(log: LogState, part: Range) -> None:
    if log.created != part.created:
        # The same numbers name other messages now. Whether that may be is decided when the query plans again.
        raise DataLoss(f"the stream was replaced by a new one ({log.created}) while it was read ({part.created})")


async def _rows(options: ReadOptions, log: LogState, entries: LogEntries, reads: Sequence[Read]) -> pyarrow.RecordBatch:
    if options.form == "entries":
        return entry_rows(options.columns, [item for read in reads async for item in entries.of(read)])
    beside = log.subjects.beside
    return message_rows(options.columns, [r for r in reads if r.message.subject not in beside])
