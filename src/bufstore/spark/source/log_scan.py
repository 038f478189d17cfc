"""Reading a range of the log in a Python worker: messages from the server, entries of them, rows of those."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import TypeVar

import pyarrow
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from bufstore.buffer.entry import Assembler, Malformed, decode
from bufstore.errors import DataLoss, LogUnavailable, MalformedEntry
from bufstore.nats.ranges import LogReader, LogState, Read, filters_of
from bufstore.spark.process_loop import loop
from bufstore.spark.source.log_columns import LogItem, entry_rows, message_rows
from bufstore.spark.source.offsets import Holes, Offset, Range
from bufstore.spark.source.options import ReadOptions

#: How long a streaming query waits for a server that is away.
_PATIENCE_S = 30.0

T = TypeVar("T")


async def reader_of(options: ReadOptions) -> LogReader:
    """A reader of the log, kept in this process."""

    async def open_() -> LogReader:
        reader = LogReader(options.nats, options.stream)
        await reader.open()
        return reader

    c = options.nats
    return await loop().opened((c.servers, c.credentials, c.user, c.token, c.domain, options.stream), open_)


async def patiently(call: Callable[[], Awaitable[T]]) -> T:
    """The result of `call`; a server that is away for a while ends no streaming query. Raises LogUnavailable."""
    async for attempt in AsyncRetrying(
        wait=wait_random_exponential(multiplier=0.1, max=5),
        stop=stop_after_delay(_PATIENCE_S),
        retry=retry_if_exception_type(LogUnavailable),
        reraise=True,
    ):
        with attempt:
            return await call()
    raise AssertionError("tenacity raises or returns")


async def look(options: ReadOptions) -> LogState:
    """The log as it is now."""

    async def once() -> LogState:
        return await (await reader_of(options)).look()

    return await patiently(once)


async def whole_from(options: ReadOptions, log: LogState) -> int:
    """From where on nothing was purged."""
    return await (await reader_of(options)).whole_from(log)


async def check_first(options: ReadOptions, log: LogState, start: Offset) -> None:
    """Raise DataLoss when what is gone at the log's beginning had not been read, and was not erased."""
    at = max(start.position, start.whole_from)
    if log.first > at:
        holes = Holes(Range(start=at, end=log.first, created=log.created, whole_from=0))
        holes.passed([log.first])
        if await _lost(await reader_of(options), log, holes) is not None:
            raise DataLoss(f"the log begins at position {log.first}, but the reader has only reached {start.position}")


async def _lost(reader: LogReader, log: LogState, holes: Holes) -> int | None:
    if not holes.found:
        return None
    # Asked now: what made the holes was written before.
    return holes.lost(
        await reader.erased(holes.found[0][0]), await reader.proofs_gone(log), await reader.whole_from(log)
    )


async def at_time(options: ReadOptions, log: LogState, time_ns: int) -> int:
    """The position of the first message that was stored then or later."""
    return await (await reader_of(options)).at_time(time_ns, log)


async def within_bytes(options: ReadOptions, log: LogState, start: int, end: int) -> int:
    """The position that `start` and so many bytes of bodies lead to; at least one message further."""
    assert options.max_bytes is not None
    reader, left, at = await reader_of(options), options.max_bytes, None
    filters = filters_of(log, options.threads, options.partitions)
    async with aclosing(reader.read(start, end, filters, headers_only=True)) as parts:
        async for part in parts:
            for read in part:
                left -= read.size
                if left < 0 and at is not None:
                    return at
                at = read.message.seq + 1
    return end


async def batches(options: ReadOptions, part: Range) -> AsyncGenerator[pyarrow.RecordBatch]:
    """The rows of a range. Raises DataLoss when some of it was purged since the reader began."""
    reader = await reader_of(options)
    log = await reader.look()
    if log.created != part.created:
        # The same numbers, other messages: whether that may be is decided when the query plans again.
        raise DataLoss(f"the stream was replaced by a new one ({log.created}) while it was read ({part.created})")
    filters = filters_of(log, options.threads, options.partitions)
    entries = _Entries(log, part) if options.form == "entries" else None
    beside, holes = log.subjects.beside, Holes(part)
    async with aclosing(reader.read(part.start, part.end, filters)) as found:
        async for reads in found:
            holes.passed([r.message.seq for r in reads])
            reads = [r for r in reads if r.message.subject not in beside]
            if entries is None:
                yield message_rows(options.columns, reads)
                continue
            if reads and entries.fresh:
                entries.begin([r async for r in _before(reader, reads[0], filters)])
            yield entry_rows(options.columns, list(entries.of(reads)))
    holes.passed([part.end])
    looked_at_all = not (options.threads or options.partitions)
    if looked_at_all and options.fail_on_data_loss and (lost := await _lost(reader, log, holes)) is not None:
        raise DataLoss(f"position {lost} was purged before it was read: retention is shorter than this read took")


async def _before(reader: LogReader, first: Read, filters: Sequence[str]) -> AsyncIterator[Read]:
    """The messages of the same entry before this one: an oversize entry's stand side by side."""
    try:
        _, chunk, _ = decode(first.message)
    except MalformedEntry:
        return
    seq = first.message.seq
    async with aclosing(reader.read(seq - chunk, seq, filters)) as found:
        async for reads in found:
            for read in reads:
                yield read


class _Entries:
    """The entries of a range: those whose last message lies in it."""

    def __init__(self, log: LogState, part: Range) -> None:
        self._subjects = log.subjects
        self._part = part
        self._assembler = Assembler()
        self.fresh = True

    def begin(self, before: Sequence[Read]) -> None:
        """What stands before the range and belongs to its first entry."""
        self.fresh = False
        for read in before:
            list(self._items(read))

    def of(self, reads: Sequence[Read]) -> Iterator[LogItem]:
        """What is complete with these messages."""
        for read in reads:
            for item in self._items(read):
                cut = isinstance(item.what, Malformed) and "without its start" in item.what.cause
                # The rest of an entry whose beginning was purged after its flush is no entry any more.
                if not (cut and item.what.seq < self._part.whole_from):
                    yield item

    def _items(self, read: Read) -> Iterator[LogItem]:
        message = read.message
        partition = int(word) if (word := message.subject.split(".")[1]).isdigit() else -1
        try:
            thread_id = self._subjects.thread_id(message.subject)
        except MalformedEntry as e:
            none = Malformed(message.subject, message.seq, (message,), str(e))
            yield LogItem(none, read.stored_at_ns, partition)
            return
        for what in self._assembler.feed(message, thread_id):
            yield LogItem(what, read.stored_at_ns, partition)
