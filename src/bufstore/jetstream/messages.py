"""The messages of a stream, as they are read and as they are to be written, and what becomes of a write."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import msgspec

#: The one header that is written and read on fast paths.
HEADER = "Bufstore-Entry"
#: The headers of one message never take more bytes than this: those of an entry have recent keys (16 x 12 bytes in
#: base64), producers (8 x 16) and numbers.
HEADER_BYTES_MAX = 1024
#: The server's limit for an atomic batch.
BATCH_MESSAGES_MAX = 1000


class StoredMessage(msgspec.Struct, frozen=True, gc=False):
    """One message of a stream, as an adapter hands it over."""

    subject: str
    seq: int
    #: Value of the entry header; None when the message has none.
    header: str | None
    body: bytes


class Part(NamedTuple):
    """Some messages of a subject, as one replica has them."""

    #: In order, without a hole.
    messages: list[StoredMessage]
    #: The number of messages that stood behind these at that moment, at least.
    more: int


class Held(NamedTuple):
    """What a log holds at one moment, roughly: it may be written to meanwhile."""

    #: The bytes that the log holds, and those that it may hold.
    bytes: int
    limit: int
    #: The number of entries above the position that was asked about, by partition; and about how many bytes all these
    #: take.
    above: Counter[int]
    above_bytes: int
    #: The number of entries that this process has seen in the log, flushed and purged ones included.
    seen: int


class Outgoing(msgspec.Struct, frozen=True, gc=False):
    """One message to be written."""

    subject: str
    body: bytes
    #: Value of the entry header; None when the message has none.
    header: str | None = None
    #: The subject's last sequence that the write requires; None requires nothing.
    expected: int | None = None
    #: The subject that `expected` is about, if not this message's own.
    expected_of: str | None = None
    #: Seconds after which the server removes the message; 0 keeps it.
    ttl_s: int = 0


class Conflict(Exception):
    """A subject's last message is not the expected one. Nothing of the batch was stored."""

    def __init__(self, reason: str = "", last: StoredMessage | None = None) -> None:
        super().__init__(reason)
        #: The subject's last message, if whoever met the conflict has read it; else None.
        self.last = last


class BatchRefused(Exception):
    """The server accepts no batch, or not this one, now. Nothing was stored; single messages may still go through."""


class AppendUnknown(Exception):
    """The message was sent, and no answer came: it may or may not be stored."""
