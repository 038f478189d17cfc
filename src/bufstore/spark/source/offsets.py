"""Where a reader of the log stands, and what it reads next: decisions, without I/O."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from bufstore.buffer.places import group_of, number_of
from bufstore.errors import ConfigError, DataLoss


class Offset(msgspec.Struct, frozen=True, kw_only=True):
    """Where a reader stands. Written to Spark's checkpoint folder; its fields keep their order and meaning.

    It stands between two messages of the stream, so that a group of entries is read whole, or not yet.
    """

    #: When the stream was created: a stream that was created again is another one, whatever its name.
    created: str
    #: The sequence of the message that is read next.
    position: int
    #: Of the first group, only entries from this position on are read; 0: all of them.
    since: int = 0

    def as_dict(self) -> dict[str, Any]:
        """For Spark, which compares the text of two offsets."""
        found: dict[str, Any] = {"created": self.created, "position": self.position}
        return found | ({"since": self.since} if self.since else {})


def offset_of(found: Mapping[str, Any]) -> Offset:
    """The offset that Spark gives back. Raises ConfigError for anything else."""
    try:
        return msgspec.convert(found, Offset)
    except msgspec.ValidationError:
        raise ConfigError(f"the checkpoint folder holds {found!r}, which is not an offset of a log") from None


class Range(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the log that one task reads: the messages of the stream from `start` to before `end`."""

    start: int
    end: int
    #: Of the stream that it was planned on, as in `Offset`.
    created: str
    #: Only entries from this position on, and up to before that one; 0: no bound.
    since: int = 0
    until: int = 0

    def holds(self, position: int) -> bool:
        """Whether an entry at this position is in it."""
        return position >= self.since and (not self.until or position < self.until)


def begin_at(wanted: str, first: int, end: int, form: str) -> tuple[int, int]:
    """The message at which to begin, and the position of the entry in it, if others stand before that (else 0).

    `wanted`: "earliest" (the message `first`), "latest" (`end`) or a number: of messages a sequence, of entries a
    position. Raises ConfigError.
    """
    if wanted == "earliest":
        return first, 0
    if wanted == "latest":
        return end, 0
    if not (wanted.isascii() and wanted.isdigit()):
        raise ConfigError(f"a position is 'earliest', 'latest' or a number of at least 0, not {wanted!r}")
    number = int(wanted)
    if form == "messages":
        return max(number, 1), 0
    return max(group_of(number), 1), number if number_of(number) else 0


def check(start: Offset, created: str, end: int) -> None:
    """Raise DataLoss unless `start` is in this log, which ends before message `end`."""
    if start.created != created:
        raise DataLoss(
            f"the stream was replaced by a new one ({created}; the reader began on that of {start.created}): "
            "unread entries may be gone with the old one"
        )
    if start.position > end:
        raise DataLoss(f"the log ends before message {end}, but the reader was at {start.position}: the log went back")


def split(whole: Range, parts: int) -> list[Range]:
    """The range in at most `parts` non-empty ones of about the same length."""
    size = max(1, -(-(whole.end - whole.start) // max(parts, 1)))
    return [
        msgspec.structs.replace(whole, start=at, end=min(at + size, whole.end))
        for at in range(whole.start, whole.end, size)
    ]


class Holes:
    """The sequences of a range that do not come. The stream is purged from its front only."""

    def __init__(self, part: Range) -> None:
        self._at = part.start
        #: Each from its first sequence to before its end.
        self.found: list[tuple[int, int]] = []

    def passed(self, sequences: Sequence[int]) -> None:
        """These came, in order; with the range's end as last one all of it was looked at."""
        for sequence in sequences:
            if sequence > self._at:
                self.found.append((self._at, sequence))
            self._at = max(self._at, sequence + 1)

    def lost(self, erased: Collection[int]) -> int | None:
        """The first sequence whose message was purged, and not `erased`; None if there is none."""
        return next((s for start, end in self.found for s in range(start, end) if s not in erased), None)
