"""Which of the units that wait make the next group, and which have been overtaken. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from bufstore.buffer.groups.group import HEAD_BYTES_MAX, NewEntry, hash_of, in_group, size_of
from bufstore.buffer.groups.heads import Heads
from bufstore.buffer.groups.oversize import payload_max, reference_bytes
from bufstore.buffer.places import ENTRIES_MAX
from bufstore.buffer.subjects import Subjects
from bufstore.errors import BufstoreError, LogUnavailable, TooLarge
from bufstore.jetstream.group_commit import AppendUnit
from bufstore.jetstream.messages import Outgoing

#: How many bytes a group has at most: larger ones gain nothing, and a reader of one entry reads its whole group.
BYTES_MAX = 256 << 10


# The collector has to see a queued unit: an error's frames hold it, and its writes' futures hold the error.
class Queued(msgspec.Struct, frozen=True, eq=False):
    """A unit that waits, or is on its way."""

    unit: AppendUnit
    #: The last group that was seen when the unit came.
    seen: int
    #: The `Heads.life` in which the unit came.
    life: int
    #: The unit's entries as they are written; a large one only says where its parts stand.
    messages: Sequence[Outgoing]
    #: How many bytes the entries take of a group, at most.
    size: int
    #: The numbers of the entries that only say where their parts stand.
    elsewhere: frozenset[int] = frozenset()
    #: A time before the first of their parts was stored (`bufstore.elapsed`); infinite: there are no parts.
    parts_at: float = float("inf")


class Chosen(NamedTuple):
    """Which units go out together."""

    units: list[Queued]
    #: The units whose entries would not stand where they expect to.
    moved: list[Queued]
    entries: list[NewEntry]


def choose(units: Iterable[Queued], heads: Heads, subjects: Subjects) -> Chosen:
    """Decide which of these units can follow what was seen of the log, and as which entries."""
    chosen: list[Queued] = []
    moved: list[Queued] = []
    entries: list[NewEntry] = []
    #: The number in the group of each thread's last entry in it.
    here: dict[str, int] = {}
    for queued in units:
        begin = len(entries)
        of_all = queued.unit.thread_id
        for number, message in enumerate(queued.messages):
            thread_id = of_all if of_all is not None else subjects.thread_id(message.subject)
            before, expected = here.get(thread_id), message.expected
            hash_ = hash_of(thread_id)
            if expected is None:
                prev = in_group(before) if before is not None else heads.head(hash_)
            elif before is None and queued.life == heads.life and heads.admits(hash_, expected):
                prev = expected
            else:
                moved.append(queued)
                if number:  # the entries before it in its unit are not chosen either
                    del entries[begin:]
                    here = {entry.thread_id: at for at, entry in enumerate(entries)}
                break
            here[thread_id] = len(entries)
            partition = subjects.partition(thread_id)
            elsewhere = number in queued.elsewhere
            entries.append(NewEntry(thread_id, partition, prev, message.header, message.body, elsewhere))
        else:  # also a unit without entries, which only wants a group to be stored
            chosen.append(queued)
    return Chosen(chosen, moved, entries)


def too_large(messages: Sequence[Outgoing], room: int) -> frozenset[int] | None:
    """Which of a unit's entries must go into parts so that the rest fits into one message; None: it cannot."""
    size = sum(map(size_of, messages))
    chosen = set[int]()
    for number in sorted(range(len(messages)), key=lambda n: -len(messages[n].body)):
        if size <= room:
            break
        size -= len(messages[number].body) - reference_bytes(len(messages[number].body), room)
        chosen.add(number)
    return frozenset(chosen) if size <= room and len(messages) <= ENTRIES_MAX else None


def unfit(messages: Sequence[Outgoing], room: int) -> BufstoreError:
    """Return the error for a unit of which `too_large` is None: there may be room for its entries one by one.

    A single entry has more parts than one message can name.
    """
    if len(messages) > 1:
        return LogUnavailable(f"{len(messages)} entries do not fit into one message of this server")
    size = len(messages[0].body)
    return TooLarge(size, payload_max(room - size_of(messages[0]) + size, room), "max_payload of nats-server")


def count_fitting(units: Iterable[Queued], message_bytes_max: int) -> int:
    """How many of the first units, at least one, fit into a group."""
    room = min(BYTES_MAX, message_bytes_max - HEAD_BYTES_MAX)
    count = entries = size = 0
    for queued in units:
        entries += len(queued.messages)
        size += queued.size
        if count and (entries > ENTRIES_MAX or size > room):
            break
        count += 1
    return count
