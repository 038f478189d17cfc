"""Where a thread lives in the log: partition and subject; and where a generation of the log begins."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import lru_cache

from bufstore.buffer.places import first_place
from bufstore.errors import MalformedEntry
from bufstore.jetstream.subject_tokens import token, untoken

#: Each generation of the stream starts at sequence epoch x 2^40, so positions grow from one generation to the next.
_EPOCH_BITS = 40


def first_sequence(epoch: int) -> int:
    """Return the first sequence of a generation of the stream."""
    return max(1, epoch << _EPOCH_BITS)


def first_position(epoch: int) -> int:
    """Return the first position of a generation of the log."""
    return first_place(first_sequence(epoch))


#: How many threads' subjects are remembered.
_REMEMBERED = 1 << 14
#: The threads of subjects that were made or decoded lately, by prefix, number of partitions and subject.
_threads: dict[tuple[str, int, str], str] = {}


@lru_cache(maxsize=_REMEMBERED)
def _of(prefix: str, partitions: int, thread_id: str) -> str:
    subject = f"{prefix}.{zlib.crc32(thread_id.encode()) % partitions}.{token(thread_id)}"
    _remember((prefix, partitions, subject), thread_id)  # whoever looks for a thread soon asks whose the subject is
    return subject


def _remember(key: tuple[str, int, str], thread_id: str) -> None:
    if len(_threads) >= _REMEMBERED:
        _threads.clear()
    _threads[key] = thread_id


@dataclass(frozen=True)
class Subjects:
    """The subjects of one log: ``<prefix>.<partition>.<token>``."""

    prefix: str
    partitions: int

    def partition(self, thread_id: str) -> int:
        """Return the thread's partition, which is the same in every process and release."""
        return zlib.crc32(thread_id.encode()) % self.partitions

    def of(self, thread_id: str) -> str:
        """Return the subject that holds all entries of the thread."""
        return _of(self.prefix, self.partitions, thread_id)

    @property
    def stored(self) -> tuple[str, ...]:
        """All subjects that the stream listens on, and no others: a write of an earlier release must not be acked."""
        return (self.groups, self.parts, self.proof, self.erased, self.unused)

    @property
    def proof(self) -> str:
        """Where a message is stored, rarely: its position shows whether the log is still the same."""
        return f"{self.prefix}.proof.0"

    @property
    def groups(self) -> str:
        """Where the groups of entries are written (`bufstore.buffer.groups`)."""
        return f"{self.prefix}.groups.0"

    @property
    def writers(self) -> str:
        """Where writers tell each other what they have written and want to write; the stream does not store this."""
        return f"{self.prefix}-writers"

    @property
    def refused(self) -> str:
        """Where a writer tells the others that one of them was faster; the stream does not store this."""
        return f"{self.prefix}-refused"

    @property
    def parts(self) -> str:
        """Where entries that are too large for one message are written, in parts."""
        return f"{self.prefix}.parts.0"

    @property
    def unused(self) -> str:
        """A subject of the stream on which nothing is ever written."""
        return f"{self.prefix}.unused.0"

    @property
    def erased(self) -> str:
        """Where the erased positions are written, as decimal numbers separated by commas, before they are erased."""
        return f"{self.prefix}.erased.0"

    @property
    def beside(self) -> frozenset[str]:
        """The subjects of messages that are not entries and belong to no thread."""
        return frozenset((self.proof, self.erased))

    def thread_id(self, subject: str) -> str:
        """Return the thread of a subject. Raises MalformedEntry when no thread has that subject."""
        key = self.prefix, self.partitions, subject
        found = _threads.get(key)
        if found is None:
            found = _thread_id(*key)
            _remember(key, found)
        return found

    def thread_of(self, subject: str) -> str | None:
        """Return the thread of a subject; None when no thread has that subject."""
        try:
            return self.thread_id(subject)
        except MalformedEntry:
            return None


def _thread_id(prefix: str, partitions: int, subject: str) -> str:
    words = subject.split(".")
    if len(words) != 3 or words[0] != prefix:
        raise MalformedEntry(f"not a subject of this log: {subject[:80]!r}")
    thread_id = untoken(words[2])
    if not thread_id or words[1] != str(zlib.crc32(thread_id.encode()) % partitions):
        raise MalformedEntry(f"wrong partition in subject {subject[:80]!r}")
    return thread_id
