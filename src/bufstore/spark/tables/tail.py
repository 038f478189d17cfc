"""Reads the tail, which is what the logs hold above Postgres, once: planning a read takes it apart for the tasks.

A group holds entries of many threads, so a reader of some of them reads the whole group. A task gets the entries of its
threads from planning, and itself reads what was written since (docs/adr/0044). The driver should not hold a large tail:
each task reads it itself, once, and takes it apart in turn (docs/adr/0047).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing

import msgspec

from bufstore.errors import DataLoss
from bufstore.jetstream.messages import StoredMessage
from bufstore.spark.group_entries import EntryMessage
from bufstore.spark.source.log_entries import LogEntries
from bufstore.spark.source.log_scan import messages
from bufstore.spark.source.offsets import Holes, Range
from bufstore.spark.tables.lane_logs import LaneLog, LaneLogs
from bufstore.spark.tables.overlaid import Late
from bufstore.spark.tables.shares import ALL_THREADS, HASHES, Share
from bufstore.spark.tables.span import Span
from bufstore.spark.tables.table_options import TableOptions
from bufstore.spark.tables.tail_pieces import TailEntry, TailPieces, pack, size_of, unpack

#: The largest tail, in bytes, that planning takes apart: such a tail passes through the driver.
_HANDED_BYTES = 32 << 20
#: About how many bytes of a larger tail a task has in memory; one thread may have more.
_PIECE_BYTES = 64 << 20
#: Into how many buckets so many bytes of the log are divided: a piece is made of whole ones.
_BUCKETS = 4


class Handed(msgspec.Struct, frozen=True):
    """What planning has read of the threads of a task, of a lane."""

    span: Span
    #: `TailEntry`s, packed.
    entries: bytes


async def taken_apart(options: TableOptions, logs: LaneLogs, shares: Sequence[Share]) -> list[dict[int, Handed]] | None:
    """Return the tail by share and lane; None: it is too large for that, or there is only one task."""
    sizes = (one.state.bytes_between(one.tail.start, one.tail.end) for one in logs.by_lane.values())
    if len(shares) < 2 or sum(sizes) > _HANDED_BYTES:
        return None
    handed: list[dict[int, Handed]] = [{} for _ in shares]
    size = 0
    for lane, one in logs.by_lane.items():
        found: list[list[TailEntry]] = [[] for _ in shares]
        async with aclosing(_entries(one, one.tail, options.narrowing.has_thread)) as entries:
            async for entry in entries:
                found[ALL_THREADS.piece_of(entry.thread_id, len(shares))].append(entry)
                size += size_of(entry)
                if size > _HANDED_BYTES:
                    return None
        for of_share, some in zip(handed, found, strict=True):
            of_share[lane] = Handed(one.tail, pack(some))
    return handed


async def tail_of(
    options: TableOptions, share: Share, logs: LaneLogs, handed: Mapping[int, Handed]
) -> AsyncGenerator[tuple[Share, dict[str, list[Late]]]]:
    """Yield, for each piece of the share, what the logs hold of its threads above the cursors of their partitions.

    Raises DataLoss, LogUnavailable.
    """
    rests = {lane: one.tail.behind(_span_of(handed.get(lane))) for lane, one in logs.by_lane.items()}
    # Messages of the tail may be larger than the log's others: it has at most all of the log's bytes.
    size = sum(one.state.bytes for one in logs.by_lane.values()) * (share.high - share.low) // HASHES
    with TailPieces(share, 1 + _BUCKETS * size // _PIECE_BYTES, _PIECE_BYTES) as pieces:
        for lane, one in logs.by_lane.items():
            await _add_all(pieces, options, share, one, handed.get(lane), rests[lane])
        known = {lane: _log_entries(one, one.tail) for lane, one in logs.by_lane.items()}
        for piece, entries in pieces.taken():
            found: dict[str, list[Late]] = {}
            for entry in entries:
                lane = logs.lane_of(entry.thread_id)
                subject = logs.by_lane[lane].state.subjects.of(entry.thread_id)
                message = StoredMessage(subject, entry.seq, entry.header, entry.payload)
                item = await known[lane].item(EntryMessage(entry.thread_id, message, entry.elsewhere))
                if item is not None:
                    found.setdefault(entry.thread_id, []).append(Late(item, entry.stored_at_ns // 1000))
            yield piece, found


async def _add_all(
    pieces: TailPieces, options: TableOptions, share: Share, one: LaneLog, handed: Handed | None, rest: Span
) -> None:
    """Add what a lane's log holds of the threads of the share: what planning has read, then the rest."""

    def has(thread_id: str) -> bool:
        return options.narrowing.has_thread(thread_id) and share.has(thread_id)

    def is_late(entry: TailEntry) -> bool:
        return one.ledger.cursors.get(entry.partition, 0) < entry.seq < one.until

    if handed is not None and handed.span.serves(one.tail):
        for entry in filter(is_late, unpack(handed.entries)):
            pieces.add(entry)
    async with aclosing(_entries(one, rest, has)) as entries:
        async for entry in entries:
            if is_late(entry):
                pieces.add(entry)


def _span_of(handed: Handed | None) -> Span | None:
    return handed.span if handed is not None else None


def _log_entries(one: LaneLog, span: Span) -> LogEntries:
    return LogEntries(one.reader, one.state, one.options, _range(span, one.until))


def _range(span: Span, until: int) -> Range:
    return Range(start=span.start, end=span.end, created=span.created, until=until)


async def _entries(one: LaneLog, span: Span, has: Callable[[str], bool]) -> AsyncGenerator[TailEntry]:
    log = one.state
    if span.whole_from < span.end <= log.first:
        raise DataLoss(f"the log begins at message {log.first}: what Postgres did not have then is gone from it")
    if span.start >= span.end:
        return
    known = _log_entries(one, span)
    found = messages(one.reader, log, _range(span, one.until), Holes(span.whole_from), fails=True)
    async with aclosing(found) as parts:
        async for reads in parts:
            for read in reads:
                for partition, what in known.taken(read):
                    if isinstance(what, EntryMessage) and has(what.thread_id):
                        m = what.message
                        yield TailEntry(
                            what.thread_id, m.seq, partition, read.stored_at_ns, m.header, m.body, what.elsewhere
                        )
