"""How a group is written to the log, and read back.

A group is one message. Its header has what judging needs, so that it can be read without the body:
``Bufstore-Entry: G1.<checksum>.<base64>`` with the group's random id, the group before it in the log (its id and its
sequence), where the parts of its large entries begin (`bufstore.buffer.groups.oversize`), below which place the log may
be purged by then, and per entry a record: a hash of the thread, the place of the thread's entry before it, the
partition, and where the entry begins in the body. A group without entries has no records.
The body is the entries, each with the thread's id, the entry's own header and its payload. An entry's own header has a
checksum of its own (`bufstore.buffer.entry`), so an entry that is damaged takes no other with it.
"""

from __future__ import annotations

import contextlib
import struct
import zlib
from binascii import a2b_base64, b2a_base64
from collections.abc import Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from bufstore.buffer.groups.oversize import parsed
from bufstore.buffer.places import ENTRIES_MAX, place
from bufstore.errors import InvalidId, MalformedEntry
from bufstore.jetstream.messages import Outgoing, StoredMessage
from bufstore.log_lines import LogLines
from bufstore.types import check_id

_log = LogLines(__name__)

VERSION = "G1"
HASH_BYTES = 16
_HEAD = struct.Struct(">QQQQQ")
_RECORD = struct.Struct(f">{HASH_BYTES}sQIHxx")
_LENGTHS = struct.Struct(">HH")
#: The bit in the length of an entry's own header that says that the payload stands elsewhere.
_ELSEWHERE = 1 << 15
#: How many bytes a message takes in nats-server's file beside subject, headers and body, and its headers take beside
#: their values: version, names, line ends.
_MESSAGE_BYTES = 34 + len("NATS/1.0....Bufstore-Entry: ..Nats-Expected-Last-Subject-Sequence: ..")
#: How many bytes an entry takes beside its thread, own header and payload: its record in base64, and their lengths.
ENTRY_BYTES = (_RECORD.size * 4 + 2) // 3 + _LENGTHS.size
#: How many bytes the headers of the message have beside the records, at most.
HEAD_BYTES_MAX = 256


@lru_cache(maxsize=1 << 16)
def hash_of(thread_id: str) -> bytes:
    """The hash that names the thread in headers. It is cryptographic: nobody can make two threads with one hash."""
    return blake2b(thread_id.encode(), digest_size=HASH_BYTES).digest()


def size_of(message: Outgoing) -> int:
    """How many bytes an entry takes of a group, at most: its subject is longer than its thread's id."""
    return len(message.body) + len(message.subject) + len(message.header or "") + ENTRY_BYTES


class NewEntry(msgspec.Struct, frozen=True, gc=False):
    """An entry that is to go into a group."""

    thread_id: str
    partition: int
    #: The place of the thread's entry before this one, 0 for none; `in_group` for an entry of the same group.
    prev: int
    #: The entry's own header, if it has one, and its payload.
    header: str | None
    payload: bytes
    #: Whether the payload only says where its parts stand in the log.
    elsewhere: bool = False


def in_group(number: int) -> int:
    """The `prev` that names the entry with this number in the same group, whose place is not known yet."""
    return number + 1


class Record(msgspec.Struct, frozen=True, gc=False):
    """What the header of a group says of one entry."""

    hash: bytes
    #: The place of the thread's entry before this one; 0 for none.
    prev: int
    begins: int
    partition: int


class Group(msgspec.Struct, frozen=True, gc=False):
    """The header of a group, as it stands in the log."""

    #: Its sequence in the stream.
    seq: int
    #: Random, 63 bit: tells this group, and this attempt to write it, from any other.
    id: int
    #: Id and sequence of the group before it; 0 for none.
    before_id: int
    before: int
    #: The first sequence of the parts that its entries name; 0: they name none.
    parts: int
    #: Everything below this place may be purged: nothing may be built on it.
    purged: int
    records: Sequence[Record]

    def places(self) -> Iterator[tuple[int, Record]]:
        """The place of each entry, with its record."""
        return zip(range(place(self.seq, 0), place(self.seq, 0) + len(self.records)), self.records, strict=True)


class GroupEntry(NamedTuple):
    """One entry of a group."""

    thread_id: str
    header: str | None
    payload: bytes
    elsewhere: bool


class Draft:
    """A group before it is sent: its entries, encoded once, whatever it comes to stand behind."""

    def __init__(self, id_: int, entries: Sequence[NewEntry]) -> None:
        """`entries`: at most `ENTRIES_MAX`."""
        self.id = id_
        self._parts = min((parsed(e.payload).parts[0] for e in entries if e.elsewhere), default=0)
        self.records: list[Record] = []
        parts: list[bytes] = []
        packed: list[bytes] = []
        begins = 0
        for entry in entries:
            thread_id, payload, prev, partition = entry.thread_id, entry.payload, entry.prev, entry.partition
            thread, hash_ = thread_id.encode(), hash_of(thread_id)
            head = entry.header.encode("ascii") if entry.header is not None else b""
            lengths = _LENGTHS.pack(len(thread), len(head) | _ELSEWHERE if entry.elsewhere else len(head))
            self.records.append(Record(hash_, prev, begins, partition))
            packed.append(_RECORD.pack(hash_, prev, begins, partition))
            parts += (lengths, thread, head, payload)
            begins += len(lengths) + len(thread) + len(head) + len(payload)
        self._packed = b"".join(packed)
        self.body = b"".join(parts)

    def stored(self, seq: int, before_id: int, before: int, purged: int) -> Group:
        """The group once it has this sequence."""
        return Group(seq, self.id, before_id, before, self._parts, purged, _placed(self.records, seq))

    def header(self, before_id: int, before: int, purged: int) -> str:
        """The header of the group when it is to stand behind this one. `purged`: see `Group`."""
        text = b2a_base64(_HEAD.pack(self.id, before_id, before, self._parts, purged) + self._packed, newline=False)
        return f"{VERSION}.{zlib.crc32(text):08x}.{text.decode('ascii')}"


def decode_header(message: StoredMessage) -> Group:
    """The header of a group.

    Raises MalformedEntry, and nothing else, for anything that is not the header of a group.
    """
    if message.header is None:
        raise MalformedEntry("no header")
    version, _, rest = message.header.partition(".")
    if version != VERSION:
        raise MalformedEntry(f"group version {version[:20]!r}; this release reads version {VERSION}")
    crc, _, text = rest.partition(".")
    try:
        if int(crc, 16) != zlib.crc32(text.encode()):
            raise MalformedEntry("checksum mismatch")
        data = a2b_base64(text, strict_mode=True)
        id_, before_id, before, parts, purged = _HEAD.unpack_from(data)
        records = [Record(*found) for found in _RECORD.iter_unpack(memoryview(data)[_HEAD.size :])]
    except (ValueError, struct.error) as e:
        raise MalformedEntry(f"undecodable header: {type(e).__name__}") from e
    if len(records) > ENTRIES_MAX:
        raise MalformedEntry(f"a group of {len(records)} entries")
    if max(before, parts) >= message.seq or purged > place(message.seq, 0):
        raise MalformedEntry("a group before its predecessor")
    return Group(message.seq, id_, before_id, before, parts, purged, _placed(records, message.seq))


def group_in(message: StoredMessage) -> Group | None:
    """The group that a message of the log is; None if it is no group."""
    try:
        return decode_header(message)
    except MalformedEntry as e:
        _log.error("message %d of the log is not a group: %s", message.seq, e, extra={"action": "group_malformed"})
        return None


def _placed(records: Sequence[Record], seq: int) -> list[Record]:
    """The records, with the places of those entries before them that stand in the same group."""
    return [msgspec.structs.replace(r, prev=place(seq, r.prev - 1)) if 0 < r.prev < ENTRIES_MAX else r for r in records]


def stored_bytes(group: Group, message: StoredMessage) -> int:
    """About how many bytes the log takes for a group, which this message is, and the parts of its large entries."""
    body = message.body
    size = _MESSAGE_BYTES + len(message.subject) + len(message.header or "") + len(str(group.before)) + len(body)
    for number in range(len(group.records)) if group.parts else ():
        with contextlib.suppress(MalformedEntry):
            entry = decode_entry(group, number, body)
            size += parsed(entry.payload).size if entry.elsewhere else 0
    return size


def body_of(group: Group, number: int, body: bytes) -> bytes:
    """The entry's part of the group's body, as the group's header says."""
    end = group.records[number + 1].begins if number + 1 < len(group.records) else len(body)
    return body[group.records[number].begins : end]


def decode_entry(group: Group, number: int, body: bytes) -> GroupEntry:
    """One entry of a group, from the group's body. Raises MalformedEntry when it cannot be found there."""
    record = group.records[number]
    end = group.records[number + 1].begins if number + 1 < len(group.records) else len(body)
    try:
        threads, heads = _LENGTHS.unpack_from(body, record.begins)
        elsewhere, heads = bool(heads & _ELSEWHERE), heads & ~_ELSEWHERE
        at = record.begins + _LENGTHS.size
        thread_id = body[at : at + threads].decode()
        header = body[at + threads : at + threads + heads].decode("ascii")
    except (ValueError, struct.error) as e:
        raise MalformedEntry(f"undecodable entry: {type(e).__name__}") from e
    if at + threads + heads > end or hash_of(thread_id) != record.hash:
        raise MalformedEntry("an entry is not where the header of its group says")
    try:
        # No writer of ours makes such an entry, and no database could take it, not even among those that wait.
        check_id(thread_id, "the thread's id")
    except InvalidId as e:
        raise MalformedEntry(str(e)) from None
    return GroupEntry(thread_id, header or None, body[at + threads + heads : end], elsewhere)
