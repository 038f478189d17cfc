"""The envelope: how an entry is written to the log, and read back.

Everything that the buffer needs to know of an entry is in the entry's header,
``<version>.<checksum>.<base64 of msgpack>``; the body is the domain's payload and nothing else. So an entry whose body
can no longer be decoded still has its place in the chain.

The checksum covers body and header fields: a read returns exactly what was written, or raises MalformedEntry.
"""

from __future__ import annotations

import enum
from binascii import a2b_base64, b2a_base64
from collections.abc import Iterable
from zlib import crc32

import msgspec

from bufstore.errors import MalformedEntry
from bufstore.jetstream.messages import HEADER, StoredMessage

VERSION = 1


class Base(enum.IntEnum):
    """What the writer knew about the thread before this entry."""

    #: The entry named by ``prev_id``, which is the thread's entry before this one in the log.
    CHAINED = 0
    #: The log shows nothing and Postgres shows nothing: a new thread.
    NONE = 1
    #: The log shows nothing, and the entry builds on nothing: Postgres was not asked (only self-contained entries may
    #: say so), or has the tombstone of a deleted thread, or had one a moment ago.
    UNKNOWN = 2
    #: The log shows nothing; Postgres holds ``prev_id`` as the thread's last applied entry.
    STORED = 3


class Entry(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One change of one thread."""

    #: Random, 63 bit: tells this entry from any other that could stand in its place.
    id: int
    #: The id of the thread's entry before this one; 0 when there is none or it is not known.
    prev_id: int
    base: Base
    #: For entries that expect nothing in the log: a position at or above everything that was purged from the log when
    #: the writer looked.
    seen: int
    #: The thread's version after this entry.
    version: int
    #: True when the payload needs no predecessor (a snapshot): it heals a broken chain.
    self_contained: bool
    #: The thread's last idempotency keys, this entry's included (see `bufstore.buffer.recent_keys`).
    keys: bytes
    #: False while earlier keys may be missing, because the writer did not ask Postgres.
    keys_complete: bool = True
    #: The highest sequence number of each of the thread's producers (see `bufstore.buffer.producers`); None: there are
    #: no producers, or the writer did not know them.
    producers: bytes | None = None
    payload: bytes


class _Meta(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The header as it is stored. New fields are appended with defaults; older readers skip them."""

    id: int
    prev_id: int
    base: int
    seen: int
    version: int
    self_contained: bool
    keys: bytes
    piece: int
    pieces: int
    keys_complete: bool = True
    producers: bytes | None = None


class StoredEntry(msgspec.Struct, frozen=True, gc=False):
    """An entry together with its thread and its position in the log."""

    thread_id: str
    #: The entry's position (`bufstore.buffer.places`).
    seq: int
    entry: Entry


_encode = msgspec.msgpack.Encoder().encode
_meta_decoder = msgspec.msgpack.Decoder(_Meta)
_BASES = dict(enumerate(Base))
#: The header's `piece` and `pieces`, always these two now: an earlier form of the log split entries into several
#: messages.
_ONE_PIECE = (0, 1)


def encode(entry: Entry) -> tuple[str, bytes]:
    """Return the message that carries `entry`: header value and body."""
    header = header_of(
        entry.id,
        entry.prev_id,
        entry.base,
        entry.seen,
        entry.version,
        entry.self_contained,
        entry.keys,
        entry.keys_complete,
        entry.producers,
        entry.payload,
    )
    return header, entry.payload


def header_of(
    id_: int,
    prev_id: int,
    base: Base,
    seen: int,
    version: int,
    self_contained: bool,
    keys: bytes,
    keys_complete: bool,
    producers: bytes | None,
    payload: bytes,
) -> str:
    """Return the header value of the `Entry` with these fields, for a caller that makes no `Entry`."""
    # This tuple is encoded as a `_Meta` is, one without producers if there are none; 0 and 1 are `_ONE_PIECE`.
    meta = (id_, prev_id, base, seen, version, self_contained, keys, 0, 1, keys_complete)
    text = b2a_base64(_encode((*meta, producers) if producers else meta), newline=False)
    return f"{VERSION}.{crc32(payload, crc32(text)):08x}.{text.decode()}"


def decode(message: StoredMessage) -> Entry:
    """Return the entry that a message carries.

    Raises MalformedEntry, and nothing else, for any bytes that `encode` of a known version did not make.
    """
    if message.header is None:
        raise MalformedEntry(f"no {HEADER} header")
    version, _, rest = message.header.partition(".")
    if version != str(VERSION):
        raise MalformedEntry(f"envelope version {version[:20]!r}; this release reads version {VERSION}")
    crc, _, text = rest.partition(".")
    try:
        if int(crc, 16) != crc32(message.body, crc32(text.encode())):
            raise MalformedEntry("checksum mismatch")
        meta = _meta_decoder.decode(a2b_base64(text, strict_mode=True))
        base = _BASES[meta.base]
    # msgspec raises more than its own error (RecursionError, UnicodeError, OverflowError …). If one of them stopped a
    # flusher, the flusher would meet the same bytes again after each restart.
    except (msgspec.MsgspecError, LookupError, ValueError, TypeError, OverflowError, RecursionError) as e:
        raise MalformedEntry(f"undecodable header: {type(e).__name__}") from e
    if (meta.piece, meta.pieces) != _ONE_PIECE:
        raise MalformedEntry(f"piece {meta.piece} of {meta.pieces}; this release reads whole entries")
    if meta.id >> 63 or meta.prev_id >> 63 or meta.seen >> 63 or meta.version >> 63:
        raise MalformedEntry("a number out of range")
    return Entry(
        id=meta.id,
        prev_id=meta.prev_id,
        base=base,
        seen=meta.seen,
        version=meta.version,
        self_contained=meta.self_contained,
        keys=meta.keys,
        keys_complete=meta.keys_complete,
        producers=meta.producers,
        payload=message.body,
    )


def entry_id(message: StoredMessage) -> int:
    """Return the id of the entry that a message carries; 0 if the message carries none."""
    try:
        return decode(message).id
    except MalformedEntry:
        return 0


class Malformed(msgspec.Struct, frozen=True, gc=False):
    """Messages of the log that are no entry: they go to quarantine byte for byte."""

    subject: str
    seq: int
    messages: tuple[StoredMessage, ...]
    cause: str
    #: None when even the subject names no thread.
    thread_id: str | None = None


#: A message of the log, decoded.
Item = StoredEntry | Malformed


def bytes_of(item: Item) -> int:
    """Return how many bytes the entry's payload has, or what stands in its place."""
    return len(item.entry.payload) if isinstance(item, StoredEntry) else sum(len(m.body) for m in item.messages)


def id_of(item: Item) -> int:
    """Return the id of an entry; 0 if the message is none."""
    return item.entry.id if isinstance(item, StoredEntry) else 0


def item_of(message: StoredMessage, thread_id: str) -> Item:
    """Decode a message of this thread."""
    try:
        return StoredEntry(thread_id, message.seq, decode(message))
    except MalformedEntry as e:
        return Malformed(message.subject, message.seq, (message,), str(e), thread_id)


def items_of(messages: Iterable[StoredMessage], thread_id: str) -> list[Item]:
    """Decode the messages of one thread, in their order."""
    return [item_of(message, thread_id) for message in messages]
