"""`bufstore log entries`: what is in the log, entry by entry. A message of the stream holds many entries."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection
from contextlib import AsyncExitStack, aclosing
from datetime import datetime
from typing import Any, NamedTuple

import click
import msgspec

from bufstore.buffer.entry import decode
from bufstore.buffer.groups.group import Group, decode_entry, decode_header, hash_of
from bufstore.buffer.groups.oversize import in_front_of, joined
from bufstore.buffer.places import first_place, group_of, number_of
from bufstore.cli.connect import Endpoints, Options, connects
from bufstore.cli.operate.content import content_of, kind_of
from bufstore.cli.output import say, show_json
from bufstore.cli.running import COUNT, POSITION, Time
from bufstore.errors import MalformedEntry
from bufstore.jetstream.messages import StoredMessage
from bufstore.nats.ranges import LogReader, LogState, Read
from bufstore.unix_time import moment, us_of

_AT_ONCE = 256
_FOLLOW_S = 0.5
#: Without --after, the end of the log is read. As long as that holds too few entries, it is read again, each time from
#: this many times as far back.
_WIDEN = 8


class LogEntry(msgspec.Struct, kw_only=True):
    """An entry, and a line of ``bufstore log entries --follow --json``."""

    #: The entry's position.
    seq: int
    stored_at: datetime
    partition: int
    #: The entry's thread; None: it cannot be read.
    thread_id: str | None
    #: snapshot, append, edit or removal; for LangGraph's checkpoints put, writes, rows, drop or delete; unknown:
    #: another release's, or of an app's own domain; damaged: see `trouble`.
    kind: str
    #: The thread's version after the entry.
    version: int | None = None
    entry_id: int | None = None
    #: The size of the payload.
    bytes: int
    trouble: str | None = None
    #: With --payload: what the payload says, as in ``bufstore quarantine show``.
    payload: dict[str, Any] | None = None


class LogEntries(msgspec.Struct, kw_only=True):
    """The fields of ``bufstore log entries --json``."""

    entries: list[LogEntry]


class Wanted(NamedTuple):
    """Which entries are asked for; a field that is empty or None excludes none."""

    threads: Collection[str]
    partitions: Collection[int]
    after: int | datetime | None
    before: int | datetime | None
    payload: bool

    def holds(self, place: int, stored_at: datetime) -> bool:
        """Whether an entry at `place`, stored at `stored_at`, is in the range."""
        after, before = self.after, self.before
        return not (
            (isinstance(after, int) and place <= after)
            or (isinstance(after, datetime) and stored_at < after)
            or (isinstance(before, int) and place >= before)
            or (isinstance(before, datetime) and stored_at >= before)
        )


class Where(Time):
    """A position of the log, or a time."""

    name = "position|time"
    _what = "neither a position nor a time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value.isascii() and value.isdecimal():
            return POSITION.convert(value, param, ctx)
        return super().convert(value, param, ctx)


@click.command()
@click.option("--thread", "threads", metavar="THREAD", multiple=True, help="Only entries of this thread (repeatable).")
@click.option("--partition", "partitions", type=click.IntRange(min=0), multiple=True, help="Only of this partition.")
@click.option("--after", type=Where(), help="Only entries after this position, or stored from this time on.")
@click.option("--before", type=Where(), help="Only entries before this position, or stored before this time.")
@click.option("--limit", type=COUNT, default=20, show_default=True,
              help="At most this many: the first ones with --after, else the last ones.")  # fmt: skip
@click.option("--follow", is_flag=True, help="Keep showing new entries until interrupted.")
@click.option("--payload", is_flag=True, help="Show what the entries say, too: messages and run.")
@connects()
def entries(options: Options, limit: int, follow: bool, **wanted: Any) -> None:
    """Show the log's entries, oldest first.

    Reads without disturbing anybody. With --json and --follow: one object a line.
    """
    if follow and wanted["before"] is not None:
        raise click.UsageError("--follow has no end: leave out --before.")
    asked = Wanted(**wanted)
    found: list[LogEntry] = []
    show = (show_json if options.as_json else _show) if follow else found.append

    async def work(target: Endpoints) -> None:
        async with AsyncExitStack() as stack:
            reader = LogReader(target.nats, target.stream, target.bucket)
            stack.push_async_callback(reader.aclose)
            await reader.open()
            await _EntryReader(reader, asked).show(limit, show, follow=follow)

    options.run(work)
    if not follow:
        options.answer(LogEntries(entries=found), _show_all)


class _EntryReader:
    def __init__(self, reader: LogReader, wanted: Wanted) -> None:
        self._reader, self._wanted = reader, wanted
        self._hashes = {hash_of(thread_id) for thread_id in wanted.threads}

    async def show(self, limit: int, show: Callable[[LogEntry], None], *, follow: bool) -> None:
        log = await self._reader.look()
        for entry in await self._some(log, limit):
            show(entry)
        at, created = log.end, log.created
        while follow:
            await asyncio.sleep(_FOLLOW_S)
            log = await self._reader.look(reached=at)
            if log.created != created:
                at, created = log.first, log.created
            async for entry in self._range(log, at, log.end):
                show(entry)
            at = log.end

    async def _some(self, log: LogState, limit: int) -> Collection[LogEntry]:
        """Return the first of the wanted entries if --after says where to begin, else the last ones."""
        end = await self._sequence(log, self._wanted.before, log.end, above=True)
        if self._wanted.after is not None:
            found: deque[LogEntry] = deque()
            start = await self._sequence(log, self._wanted.after, log.first, above=False)
            async with aclosing(self._range(log, start, end)) as some:
                async for entry in some:
                    found.append(entry)
                    if len(found) == limit:
                        break
            return found
        back = limit
        while True:
            start = max(log.first, end - back)
            last = deque([entry async for entry in self._range(log, start, end)], maxlen=limit)
            if len(last) == limit or start == log.first:
                return last
            back *= _WIDEN

    async def _sequence(self, log: LogState, where: int | datetime | None, default: int, *, above: bool) -> int:
        if where is None:
            return default
        if isinstance(where, int):
            return min(max(group_of(where) + above, log.first), log.end)
        return await self._reader.at_time(us_of(where) * 1000, log)

    async def _range(self, log: LogState, start: int, end: int) -> AsyncGenerator[LogEntry]:
        reading = self._reader.read(start, end, [log.subjects.groups], at_once=_AT_ONCE)
        async with aclosing(reading) as parts:
            async for part in parts:
                for read in part:
                    async for entry in self._of(read):
                        yield entry

    async def _of(self, read: Read) -> AsyncIterator[LogEntry]:
        message = read.message
        # Rounded down, as --after and --before are: an entry belongs to the window that begins with its time.
        stored_at = moment(read.stored_at_ns // 1000)
        try:
            group = decode_header(message)
        except MalformedEntry as e:
            if not (self._hashes or self._wanted.partitions) and self._wanted.holds(
                first_place(message.seq), stored_at
            ):
                yield LogEntry(
                    seq=first_place(message.seq), stored_at=stored_at, partition=0, thread_id=None,
                    kind="damaged", bytes=read.size, trouble=f"not a group of entries: {e}",
                )  # fmt: skip
            return
        for place, record in group.places():
            if (
                self._wanted.holds(place, stored_at)
                and (not self._hashes or record.hash in self._hashes)
                and (not self._wanted.partitions or record.partition in self._wanted.partitions)
            ):
                yield await self._entry(group, number_of(place), place, stored_at, message)

    async def _entry(
        self, group: Group, number: int, place: int, stored_at: datetime, message: StoredMessage
    ) -> LogEntry:
        entry = LogEntry(
            seq=place,
            stored_at=stored_at,
            partition=group.records[number].partition,
            thread_id=None,
            kind="damaged",
            bytes=0,
        )
        try:
            found = decode_entry(group, number, message.body)
            entry.thread_id, entry.bytes = found.thread_id, len(found.payload)
            payload = found.payload
            if found.elsewhere:
                payload = await joined(payload, in_front_of(group.seq, self._reader.message))
            entry.bytes = len(payload)
            said = decode(StoredMessage(message.subject, place, found.header, payload))
        except MalformedEntry as e:
            entry.trouble = str(e)
            return entry
        entry.version, entry.entry_id = said.version, said.id
        entry.kind = kind_of(payload, self_contained=said.self_contained)
        if self._wanted.payload:
            entry.payload = content_of(payload)
        return entry


def _show_all(report: LogEntries) -> None:
    for entry in report.entries:
        _show(entry)


def _show(entry: LogEntry) -> None:
    version = "-" if entry.version is None else f"v{entry.version}"
    say(
        f"{entry.seq:>20}  {entry.stored_at.astimezone():%Y-%m-%d %H:%M:%S.%f}  {entry.partition:>3}  {entry.kind:<8}  "
        f"{version:>7}  {entry.bytes:>9,} B  {entry.thread_id or '-'}"
        + (f"  {entry.trouble}" if entry.trouble is not None else "")
    )
    if entry.payload is not None:
        say(f"    {msgspec.json.encode(entry.payload).decode()}")
