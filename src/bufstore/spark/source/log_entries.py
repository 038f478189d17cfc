"""Reads a job's entries from the log: takes them out of groups, and fetches the parts of large ones."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from functools import partial

from bufstore.buffer.entry import Item, Malformed, item_of
from bufstore.buffer.groups.group import Record, decode_header, hash_of
from bufstore.buffer.groups.oversize import in_front_of, joined
from bufstore.buffer.places import first_place, group_of
from bufstore.buffer.subjects import Subjects
from bufstore.errors import DataLoss, MalformedEntry
from bufstore.jetstream.messages import StoredMessage
from bufstore.nats.ranges import LogReader, LogState, Read
from bufstore.spark.group_entries import EntryMessage, Taken, entries_of
from bufstore.spark.outage import Patience
from bufstore.spark.source.log_columns import LogItem
from bufstore.spark.source.offsets import Range
from bufstore.spark.source.options import ReadOptions


class Wanted:
    """Which entries and messages a job asks for."""

    def __init__(self, subjects: Subjects, options: ReadOptions) -> None:
        self._subjects = subjects
        self._form = options.form
        self._hashes = {hash_of(thread_id) for thread_id in options.threads}
        self._partitions = frozenset(options.partitions)
        self.all = not (self._hashes or self._partitions)

    def record(self, record: Record) -> bool:
        """Return whether the job asks for the entry that this record of a group's header describes."""
        return self.all or record.hash in self._hashes or record.partition in self._partitions

    def rows(self, message: StoredMessage) -> int:
        """Return how many rows this message becomes at most; its header is enough to tell."""
        if message.subject in self._subjects.beside:
            return 0
        if self._form == "messages":
            return 1
        if message.subject == self._subjects.groups:
            try:
                return sum(map(self.record, decode_header(message).records))
            except MalformedEntry:
                return 1
        return int(self.all and message.subject != self._subjects.parts)


class LogEntries:
    """The entries of a range of the log."""

    def __init__(self, reader: LogReader, log: LogState, options: ReadOptions, part: Range) -> None:
        self._reader = reader
        self._subjects = log.subjects
        self._wanted = Wanted(log.subjects, options)
        self._fails = options.fail_on_data_loss
        self._part = part
        self._patiently = Patience(options.outage_timeout_s, "a read of a large entry", numbered=True).until_through

    async def of(self, read: Read) -> AsyncIterator[LogItem]:
        """Yield what the job asks for of a message. Raises DataLoss when a part of an entry is gone."""
        message = read.message
        if message.subject == self._subjects.groups:
            for partition, what in self.taken(read):
                item = what if isinstance(what, Malformed) else await self.item(what)
                if item is not None:
                    yield LogItem(item, read.stored_at_ns, partition)
        elif self._wanted.rows(message):  # anybody may publish such a message
            none = Malformed(message.subject, first_place(message.seq), (message,), "not a group of entries")
            yield LogItem(none, read.stored_at_ns, -1)

    def taken(self, read: Read) -> Iterator[Taken]:
        """Yield what the job asks for of a group; of any other message, nothing."""
        if read.message.subject == self._subjects.groups:
            yield from entries_of(read.message, self._subjects, self._in_range)

    def _in_range(self, position: int, record: Record) -> bool:
        return self._part.holds(position) and self._wanted.record(record)

    async def item(self, found: EntryMessage) -> Item | None:
        """Return the entry with its payload; None: it is being erased. Raises DataLoss when a part of it is gone."""
        thread_id, message, elsewhere = found
        if not elsewhere:
            return item_of(message, thread_id)
        missing: list[int] = []

        async def held(sequence: int) -> StoredMessage | None:
            stored = await self._patiently(partial(self._reader.message, sequence))
            if stored is None:
                missing.append(sequence)
            return stored

        try:
            payload = await joined(message.body, in_front_of(group_of(message.seq), held))
        except MalformedEntry as e:
            if missing and missing[0] in await self._patiently(partial(self._reader.erased, missing[0], fresh=True)):
                return None
            if missing and self._fails:  # parts stay as long as their group
                raise DataLoss(f"message {missing[0]} was purged before entry {message.seq} was read") from e
            return Malformed(message.subject, message.seq, (message,), str(e), thread_id)
        return item_of(StoredMessage(message.subject, message.seq, message.header, payload), thread_id)
