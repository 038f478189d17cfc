"""Reads the tail, which is what the log holds above Postgres, once: planning a read takes it apart for the tasks.

A group holds entries of many threads, so a reader of some of them reads the whole group. A task gets the entries of its
threads from planning, and itself reads what was written since (docs/adr/0044). The driver should not hold a large tail:
each task reads it itself, once, and takes it apart in turn (docs/adr/0047).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

import msgspec

from bufstore.buffer.places import group_of, number_of
from bufstore.errors import DataLoss
from bufstore.jetstream.messages import StoredMessage
from bufstore.nats.ranges import LogReader, LogState
from bufstore.spark.group_entries import EntryMessage
from bufstore.spark.source.log_entries import LogEntries
from bufstore.spark.source.log_scan import messages
from bufstore.spark.source.offsets import Holes, Range
from bufstore.spark.tables.moment import Ledger
from bufstore.spark.tables.overlaid import Late
from bufstore.spark.tables.shares import ALL_THREADS, HASHES, Share
from bufstore.spark.tables.span import Span
from bufstore.spark.tables.table_options import TableOptions
from bufstore.spark.tables.tail_pieces import TailEntry, TailPieces, pack, unpack

#: The largest tail, in bytes, that planning takes apart: such a tail passes through the driver.
_HANDED_BYTES = 32 << 20
#: About how many bytes of a larger tail a task has in memory; one thread may have more.
_PIECE_BYTES = 64 << 20


class Handed(msgspec.Struct, frozen=True):
    """What planning has read of the threads of a task."""

    span: Span
    #: `TailEntry`s, packed.
    entries: bytes


def lowest(options: TableOptions, log: LogState, ledger: Ledger) -> int:
    """Return the position up to which all threads that are read are flushed, or wait; 0: it is not known."""
    threads = options.narrowing.threads
    subjects = log.subjects
    partitions = range(subjects.partitions) if threads is None else {subjects.partition(t) for t in threads}
    return min((ledger.cursors.get(p, 0) for p in partitions), default=0)


def span_of(log: LogState, flushed: int, until: int) -> Span:
    """Return the span of the tail: from above `flushed` (see `lowest`) to before position `until`."""
    # If nothing was flushed, nothing was removed, so the log is whole from its beginning on.
    whole_from = group_of(flushed) + 1 if flushed else log.first
    start = max(group_of(flushed), log.first)
    return Span(log.created, start, group_of(until) + bool(number_of(until)), whole_from)


async def taken_apart(
    options: TableOptions, reader: LogReader, log: LogState, span: Span, until: int, shares: Sequence[Share]
) -> list[Handed] | None:
    """Return the tail by share; None: it is too large for that, or there is only one task."""
    if len(shares) < 2 or log.bytes_between(span.start, span.end) > _HANDED_BYTES:
        return None
    found: list[list[TailEntry]] = [[] for _ in shares]
    size = 0
    async with aclosing(_entries(options, reader, log, span, until, options.narrowing.has_thread)) as entries:
        async for entry in entries:
            found[ALL_THREADS.piece_of(entry.thread_id, len(shares))].append(entry)
            size += len(entry.payload)
            if size > _HANDED_BYTES:
                return None
    return [Handed(span, pack(some)) for some in found]


async def tail_of(
    options: TableOptions,
    share: Share,
    reader: LogReader,
    log: LogState,
    ledger: Ledger,
    until: int,
    handed: Handed | None,
) -> AsyncGenerator[tuple[Share, dict[str, list[Late]]]]:
    """Yield, for each piece of the share, what the log holds of its threads above the cursors of their partitions.

    Raises DataLoss, LogUnavailable.
    """
    span = span_of(log, lowest(options, log, ledger), until)
    rest = span.behind(handed.span if handed is not None else None)

    def has(thread_id: str) -> bool:
        return options.narrowing.has_thread(thread_id) and share.has(thread_id)

    def is_late(entry: TailEntry) -> bool:
        return ledger.cursors.get(entry.partition, 0) < entry.seq < until

    size = log.bytes_between(rest.start, rest.end) * (share.high - share.low) // HASHES
    with TailPieces(share, max(1, -(-size // _PIECE_BYTES)), _PIECE_BYTES) as pieces:
        if handed is not None and handed.span.serves(span):
            for entry in filter(is_late, unpack(handed.entries)):
                pieces.add(entry)
        async with aclosing(_entries(options, reader, log, rest, until, has)) as entries:
            async for entry in entries:
                if is_late(entry):
                    pieces.add(entry)
        known = LogEntries(reader, log, options.log, _range(span, until))
        for number, piece in enumerate(pieces.shares):
            found: dict[str, list[Late]] = {}
            for entry in pieces.taken(number):
                message = StoredMessage(log.subjects.of(entry.thread_id), entry.seq, entry.header, entry.payload)
                item = await known.item(EntryMessage(entry.thread_id, message, entry.elsewhere))
                if item is not None:
                    found.setdefault(entry.thread_id, []).append(Late(item, entry.stored_at_ns // 1000))
            yield piece, found


def _range(span: Span, until: int) -> Range:
    return Range(start=span.start, end=span.end, created=span.created, until=until)


async def _entries(
    options: TableOptions, reader: LogReader, log: LogState, span: Span, until: int, has: Callable[[str], bool]
) -> AsyncGenerator[TailEntry]:
    if span.whole_from < span.end <= log.first:
        raise DataLoss(f"the log begins at message {log.first}: what Postgres did not have then is gone from it")
    if span.start >= span.end:
        return
    part = _range(span, until)
    known = LogEntries(reader, log, options.log, part)
    async with aclosing(messages(reader, log, part, Holes(span.whole_from), fails=True)) as parts:
        async for reads in parts:
            for read in reads:
                for partition, what in known.taken(read):
                    if isinstance(what, EntryMessage) and has(what.thread_id):
                        m = what.message
                        yield TailEntry(
                            what.thread_id, m.seq, partition, read.stored_at_ns, m.header, m.body, what.elsewhere
                        )
