"""One JetStream stream, seen as subjects to write to and read from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec

#: The one header that is written and read on fast paths.
HEADER = "Bufstore-Entry"
#: Headers of one message never exceed this many bytes: recent keys (16 x 12 bytes in base64), producers (8 x 16),
#: numbers, batch headers.
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


class Stream(Protocol):
    """One JetStream stream, seen as a writer and reader of subjects.

    Writes raise Conflict, BatchRefused, AppendUnknown, LogFull or LogUnavailable (certainly not stored).
    """

    @property
    def message_bytes_max(self) -> int:
        """The server's max_payload: headers and body of one message."""
        ...

    async def publish(self, message: Outgoing, timeout_s: float) -> int:
        """Store one message durably. Returns its sequence."""
        ...

    async def publish_each(
        self, messages: Sequence[Outgoing], timeout_s: float, ended: Callable[[int, int | Exception], None]
    ) -> None:
        """Store the messages one by one, side by side; return when all have ended.

        `ended` is called for each with its number and its sequence, or the error that `publish` would raise. Raises
        only a BufstoreError, when nothing was sent.
        """
        ...

    async def publish_batch(self, messages: Sequence[Outgoing], timeout_s: float) -> int:
        """Store all messages or none, as neighbours. Returns the last sequence."""
        ...

    async def last(self, subjects: Sequence[str], timeout_s: float) -> dict[str, StoredMessage]:
        """Return the last message of each subject (wildcards allowed); subjects without one are left out."""
        ...

    async def after(self, subject: str, seq: int, timeout_s: float, limit: int = 0) -> list[StoredMessage]:
        """Return the subject's messages above `seq`, in order; at most `limit` of them if it is not 0."""
        ...
