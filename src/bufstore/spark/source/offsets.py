"""Where a reader of the log stands, and what it reads next: decisions, without I/O."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from bufstore.buffer.places import group_of, number_of
from bufstore.errors import ConfigError, DataLoss

#: Of a range that one task reads, unless it is said how many there shall be: some seconds.
_PART_BYTES = 64 << 20


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


def parts_of(size: int, *, exactly: int | None, at_least: int) -> int:
    """How many parts a range of so many bytes is read in."""
    return exactly or max(at_least, -(-size // _PART_BYTES))


def split(whole: Range, parts: int) -> list[Range]:
    """The range in at most `parts` non-empty ones of about the same length."""
    size = max(1, -(-(whole.end - whole.start) // max(parts, 1)))
    return [
        msgspec.structs.replace(whole, start=at, end=min(at + size, whole.end))
        for at in range(whole.start, whole.end, size)
    ]


class Holes:
    """The sequences of a range that do not come, as far as groups of entries may be missing there.

    The log loses messages at its front, by a purge, and single ones that were erased, or that proved a read. Each group
    names the one before it. So behind a group that came, everything up to the group that is named next is there, or was
    lost.
    """

    def __init__(self, start: int) -> None:
        self._at = start
        #: The last group that came; before the first, it stands below the range.
        self._group = start - 1
        #: What did not come behind it: each from its first sequence to before its end.
        self._open: list[tuple[int, int]] = []
        #: Where groups may be missing, and groups that are.
        self.found: list[tuple[int, int]] = []
        self._missing: set[int] = set()

    @property
    def open(self) -> bool:
        """Whether the next group must tell what it names as the one before."""
        return bool(self._open)

    def passed(self, sequence: int) -> None:
        """This one came, or is the end of the range."""
        if sequence > self._at:
            self._open.append((self._at, sequence))
        self._at = max(self._at, sequence + 1)

    def group(self, sequence: int, before: int) -> None:
        """This one is a group behind all that `passed`, and names that before it."""
        if before > self._group:
            self._found(before)
            self._missing.add(before)
        self._open.clear()
        self._group = sequence

    def ended(self, end: int, before: int | None) -> None:
        """The range ends, and the first group behind it names this one before it; None: there is no group."""
        if before is not None and before < end:
            self.group(end, before)
        else:
            self._found(end - 1)

    def _found(self, last: int) -> None:
        self.found += [(first, min(end, last + 1)) for first, end in self._open if first <= last]

    def lost(self, erased: Collection[int], first: int) -> int | None:
        """The first sequence whose group was lost, as far as can be told; None if none was.

        `first`: where the log begins. What stood below that may have been a group; above it, only a group that another
        names was lost. What was `erased` was not.
        """
        for start, end in self.found:
            for sequence in range(start, end):
                if sequence not in erased and (sequence < first or sequence in self._missing):
                    return sequence
        return None
