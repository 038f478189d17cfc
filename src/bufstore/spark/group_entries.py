"""Takes the entries out of a group of the log, each as a message of its thread. No I/O, no Spark in here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from bufstore.buffer.entry import Malformed
from bufstore.buffer.groups.group import Record, decode_entry, decode_header
from bufstore.buffer.places import first_place, place
from bufstore.buffer.subjects import Subjects
from bufstore.errors import MalformedEntry
from bufstore.jetstream.messages import StoredMessage


class EntryMessage(NamedTuple):
    """An entry of a group, as a message of its thread."""

    thread_id: str
    #: The thread's subject, and the position, header and payload of the entry.
    message: StoredMessage
    #: Whether the message has, instead of the payload, a reference to the payload's parts.
    elsewhere: bool


class Taken(NamedTuple):
    """What stands at one place of a group."""

    #: The partition; -1 when it is not known.
    partition: int
    what: EntryMessage | Malformed


def entries_of(
    message: StoredMessage, subjects: Subjects, wanted: Callable[[int, Record], bool] | None = None
) -> Iterator[Taken]:
    """Yield the entries of a group that are `wanted` (position, record), as Malformed when they cannot be decoded.

    A group whose header cannot be decoded may hold anything, so it is yielded in any case.
    """
    try:
        group = decode_header(message)
    except MalformedEntry as e:
        yield Taken(-1, Malformed(message.subject, first_place(message.seq), (message,), str(e)))
        return
    for number, record in enumerate(group.records):
        at = place(message.seq, number)
        if wanted is not None and not wanted(at, record):
            continue
        try:
            entry = decode_entry(group, number, message.body)
        except MalformedEntry as e:
            behind = group.records[number + 1].begins if number + 1 < len(group.records) else None
            there = StoredMessage(message.subject, at, None, message.body[record.begins : behind])
            yield Taken(record.partition, Malformed(message.subject, at, (there,), str(e)))
            continue
        stored = StoredMessage(subjects.of(entry.thread_id), at, entry.header, entry.payload)
        yield Taken(record.partition, EntryMessage(entry.thread_id, stored, entry.elsewhere))
