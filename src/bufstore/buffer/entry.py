"""The envelope: how an entry is written to the log, and read back.

An entry is one JetStream message (an oversize one: several). What the buffer needs to know stands in one header,
``Bufstore-Entry: <version>.<checksum>.<base64 of msgpack>``; the message body is the domain's
payload and nothing else. So an entry whose body cannot be decoded any more still has its place in the chain.

The checksum covers body and header fields: what was written is what is read, or it is a MalformedEntry.
"""

from __future__ import annotations

import enum
import zlib
from binascii import a2b_base64, b2a_base64
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from bufstore.errors import MalformedEntry
from bufstore.jetstream.messages import HEADER, HEADER_BYTES_MAX, StoredMessage

VERSION = 1


class Base(enum.IntEnum):
    """What the writer knew about the thread before this entry."""

    #: The entry named by ``prev_id``, which is the thread's entry before this one in the log.
    CHAINED = 0
    #: The log shows nothing and Postgres shows nothing: a new thread.
    NONE = 1
    #: The log shows nothing; Postgres was not asked (only self-contained entries may say so), or has the tombstone of a
    #: deleted thread, or had it a moment ago: the entry builds on nothing.
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
    #: For entries that expect nothing in the log: a position at or above everything purged from it by then.
    seen: int
    #: The thread's version after this entry.
    version: int
    #: True when the payload needs no predecessor (a snapshot): it heals a broken chain.
    self_contained: bool
    #: The thread's last idempotency keys, this entry's included (see `bufstore.buffer.recent_keys`).
    keys: bytes
    #: False while earlier keys may be missing, because the writer did not ask Postgres.
    keys_complete: bool = True
    #: The highest numbers of the thread's producers (see `bufstore.buffer.producers`); None: there are none, or the
    #: writer did not know them.
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
    chunk: int
    chunks: int
    keys_complete: bool = True


class _MetaWithSources(_Meta, array_like=True, frozen=True, gc=False):
    """The same, of an entry that carries producers' numbers."""

    producers: bytes | None = None


class StoredEntry(msgspec.Struct, frozen=True, gc=False):
    """An entry together with where it stands in the log."""

    thread_id: str
    #: `thread_seq`: the sequence of its (last) message.
    seq: int
    entry: Entry


_meta_encoder = msgspec.msgpack.Encoder()
_meta_decoder = msgspec.msgpack.Decoder(_MetaWithSources)
_BASES = dict(enumerate(Base))


def encode(entry: Entry, message_bytes_max: int) -> list[tuple[str, bytes]]:
    """The messages that carry `entry`: (header value, body) each, in order.

    `message_bytes_max` is the server's max_payload, which counts headers and body: a larger message does not fail, it
    closes the connection.
    """
    room = message_bytes_max - HEADER_BYTES_MAX
    payload = entry.payload
    if len(payload) <= room:
        return [(_header(entry, payload, 0, 1), payload)]
    pieces = [payload[i : i + room] for i in range(0, len(payload), room)]
    return [(_header(entry, piece, i, len(pieces)), piece) for i, piece in enumerate(pieces)]


def _header(entry: Entry, body: bytes, chunk: int, chunks: int) -> str:
    fields: tuple[Any, ...] = (
        entry.id,
        entry.prev_id,
        entry.base,
        entry.seen,
        entry.version,
        entry.self_contained,
        entry.keys,
        chunk,
        chunks,
        entry.keys_complete,
    )
    # As `_Meta` (and `_MetaWithSources`) is encoded, without making one.
    meta = _meta_encoder.encode((*fields, entry.producers) if entry.producers else fields)
    text = b2a_base64(meta, newline=False)
    return f"{VERSION}.{zlib.crc32(body, zlib.crc32(text)):08x}.{text.decode()}"


def decode(message: StoredMessage) -> tuple[Entry, int, int]:
    """The entry (or piece of one) that a message carries, its chunk number and the number of chunks.

    Raises MalformedEntry, and nothing else, for any bytes that `encode` of a known version did not make.
    """
    if message.header is None:
        raise MalformedEntry(f"no {HEADER} header")
    version, _, rest = message.header.partition(".")
    if version != str(VERSION):
        raise MalformedEntry(f"envelope version {version[:20]!r}; this release reads version {VERSION}")
    crc, _, text = rest.partition(".")
    try:
        if int(crc, 16) != zlib.crc32(message.body, zlib.crc32(text.encode())):
            raise MalformedEntry("checksum mismatch")
        meta = _meta_decoder.decode(a2b_base64(text, strict_mode=True))
        base = _BASES[meta.base]
    # msgspec raises more than its own error (RecursionError, UnicodeError, OverflowError …); a flusher that let
    # one of them pass would meet the same bytes again after each restart.
    except (msgspec.MsgspecError, LookupError, ValueError, TypeError, OverflowError, RecursionError) as e:
        raise MalformedEntry(f"undecodable header: {type(e).__name__}") from e
    if not 0 <= meta.chunk < meta.chunks:
        raise MalformedEntry(f"chunk {meta.chunk} of {meta.chunks}")
    if meta.id >> 63 or meta.prev_id >> 63 or meta.seen >> 63 or meta.version >> 63:
        raise MalformedEntry("a number out of range")
    entry = Entry(
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
    return entry, meta.chunk, meta.chunks


def entry_id(message: StoredMessage) -> int:
    """The id of the entry that a message carries, or carries a piece of; 0 if there is none."""
    try:
        return decode(message)[0].id
    except MalformedEntry:
        return 0


class Malformed(msgspec.Struct, frozen=True, gc=False):
    """Messages of the log that are not an entry: they go to quarantine byte for byte."""

    subject: str
    seq: int
    messages: tuple[StoredMessage, ...]
    cause: str
    #: None when even the subject names no thread.
    thread_id: str | None = None


#: What `Assembler` makes of the log's messages.
Item = StoredEntry | Malformed


class Assembler:
    """Joins the messages of oversize entries. Feed it one subject's or one partition's messages in order.

    The chunks of an entry are written in one atomic batch, so they are neighbours in the log; a message that does
    not go on where the last one stopped makes what was begun malformed (or, before anything was begun, is the end
    of an entry whose beginning has been purged).
    """

    def __init__(self) -> None:
        self._pieces: list[tuple[StoredMessage, Entry]] = []
        #: The thread of what was begun.
        self._thread_id = ""
        self._chunks = 0

    @property
    def pending_from(self) -> int | None:
        """The sequence of the first piece of an unfinished entry: nothing may pass it."""
        return self._pieces[0][0].seq if self._pieces else None

    def feed(self, message: StoredMessage, thread_id: str) -> Iterator[Item]:
        """What is complete once `message` is added."""
        try:
            entry, chunk, chunks = decode(message)
        except MalformedEntry as e:
            yield from self.abandon()
            yield Malformed(message.subject, message.seq, (message,), str(e), thread_id)
            return
        if chunks == 1:
            yield from self.abandon()
            yield StoredEntry(thread_id, message.seq, entry)
            return
        fits = len(self._pieces) == chunk and (
            chunk == 0
            or (
                self._chunks == chunks
                and self._pieces[-1][1].id == entry.id
                and self._pieces[-1][0].subject == message.subject
            )
        )
        if not fits:
            yield from self.abandon()
            if chunk != 0:
                yield Malformed(message.subject, message.seq, (message,), f"chunk {chunk} without its start", thread_id)
                return
        self._pieces.append((message, entry))
        self._thread_id, self._chunks = thread_id, chunks
        if chunk == chunks - 1:
            payload = b"".join(piece.body for piece, _ in self._pieces)
            self._pieces = []
            yield StoredEntry(thread_id, message.seq, msgspec.structs.replace(entry, payload=payload))

    def abandon(self) -> Iterator[Malformed]:
        """What was begun, as the fragment that it is if nothing goes on with it."""
        # Blame the thread in which it was begun: the message that ends it may be another thread's, and sound.
        if self._pieces:
            messages = tuple(m for m, _ in self._pieces)
            self._pieces = []
            yield Malformed(messages[-1].subject, messages[-1].seq, messages, "chunk missing", self._thread_id)


def assemble(messages: Sequence[StoredMessage], thread_id: str) -> list[Item]:
    """The entries that the messages of one thread carry, oldest first; a beginning cut off is left out.

    Retention may purge the first chunks of an applied entry and keep its last; such a rest is not an entry any more.
    """
    assembler = Assembler()
    found = [item for message in messages for item in assembler.feed(message, thread_id)]
    while found and isinstance(found[0], Malformed) and "without its start" in found[0].cause:
        found.pop(0)
    return found
