"""Where a thread lives in the log: partition, token, subject; and where a generation of the log begins.

A raw id never reaches a subject, key or header: `token` maps ids injectively into ``[A-Za-z0-9_-]``, so that no id
can be a wildcard, end a protocol line, or meet another id.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from dataclasses import dataclass
from functools import lru_cache

from bufstore.errors import MalformedEntry

#: Each generation of the stream starts at epoch x 2^40, so that a position is one growing number.
_EPOCH_BITS = 40


def first_position(epoch: int) -> int:
    """The first position of a generation of the log."""
    return max(1, epoch << _EPOCH_BITS)


def token(id_: str) -> str:
    """The id as base64url of its UTF-8, without padding: injective, at most 1366 characters for 1 KiB."""
    return base64.urlsafe_b64encode(id_.encode()).rstrip(b"=").decode()


def untoken(text: str) -> str:
    """The id of a token. Raises MalformedEntry for anything that `token` does not make."""
    try:
        id_ = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError) as e:
        raise MalformedEntry(f"not a token: {text[:80]!r}") from e
    if token(id_) != text:  # a second spelling of an id would be a second subject for one thread
        raise MalformedEntry(f"not a canonical token: {text[:80]!r}")
    return id_


@lru_cache(maxsize=1 << 14)
def _of(prefix: str, partitions: int, thread_id: str) -> str:
    return f"{prefix}.{zlib.crc32(thread_id.encode()) % partitions}.{token(thread_id)}"


@dataclass(frozen=True)
class Subjects:
    """The subjects of one log: ``<prefix>.<partition>.<token>``."""

    prefix: str
    partitions: int

    def partition(self, thread_id: str) -> int:
        """The thread's share, the same in every process and release."""
        return zlib.crc32(thread_id.encode()) % self.partitions

    def of(self, thread_id: str) -> str:
        """The subject that holds all entries of the thread."""
        return _of(self.prefix, self.partitions, thread_id)

    def of_partition(self, partition: int) -> str:
        """A filter for every entry of the partition."""
        return f"{self.prefix}.{partition}.*"

    @property
    def all(self) -> str:
        """What the stream listens on."""
        return f"{self.prefix}.*.*"

    @property
    def barrier(self) -> str:
        """Where earlier versions wrote to learn who leads: it held one message, and each one before left a hole."""
        return f"{self.prefix}.barrier.0"

    @property
    def proof(self) -> str:
        """Where a message is stored to learn, from its position, whether the log is the one that it was; rarely."""
        return f"{self.prefix}.proof.0"

    @property
    def unused(self) -> str:
        """A subject of the stream on which nothing is ever written."""
        return f"{self.prefix}.unused.0"

    @property
    def erased(self) -> str:
        """Which positions were erased, as decimal numbers with commas in between; written before they go."""
        return f"{self.prefix}.erased.0"

    @property
    def beside(self) -> frozenset[str]:
        """The subjects of messages that are no entries, and of no thread."""
        return frozenset((self.barrier, self.proof, self.erased))

    def thread_id(self, subject: str) -> str:
        """The thread of a subject. Raises MalformedEntry when no thread has that subject."""
        return _thread_id(self.prefix, self.partitions, subject)


@lru_cache(maxsize=1 << 14)
def _thread_id(prefix: str, partitions: int, subject: str) -> str:
    words = subject.split(".")
    if len(words) != 3 or words[0] != prefix:
        raise MalformedEntry(f"not a subject of this log: {subject[:80]!r}")
    thread_id = untoken(words[2])
    if not thread_id or words[1] != str(zlib.crc32(thread_id.encode()) % partitions):
        raise MalformedEntry(f"wrong partition in subject {subject[:80]!r}")
    return thread_id
