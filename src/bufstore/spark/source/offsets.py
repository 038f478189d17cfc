"""Where a reader of the log stands, and what it reads next: decisions, without I/O."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from bufstore.buffer.places import first_place, group_of, number_of
from bufstore.errors import ConfigError, DataLoss

#: How many bytes one task reads, unless the number of tasks is given: they take it some seconds.
_PART_BYTES = 64 << 20


class Offset(msgspec.Struct, frozen=True, kw_only=True):
    """Where a reader stands. Written to Spark's checkpoint folder; its fields keep their order and meaning.

    It stands between two messages of the stream, so a group of entries is read either whole or not yet.
    """

    #: When the stream was created: a stream that was created again is another one, whatever its name.
    created: str
    #: The sequence of the message that is read next.
    position: int
    #: The position of the first entry that is read of the first group; 0: all of its entries are read.
    since: int = 0
    #: The end of a query's first micro-batch: where that begins. Spark does not note it, but asks anew where the query
    #: begins when that batch comes again. None: any other offset, and those of earlier releases.
    began: Offset | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the offset as Spark wants it, which compares offsets by their text."""
        found: dict[str, Any] = {"created": self.created, "position": self.position}
        found |= {"since": self.since} if self.since else {}
        return found | ({"began": self.began.as_dict()} if self.began is not None else {})


def offset_of(found: Mapping[str, Any]) -> Offset:
    """Return the offset that Spark gives back. Raises ConfigError for anything else."""
    try:
        return msgspec.convert(found, Offset)
    except msgspec.ValidationError:
        raise ConfigError(f"the checkpoint folder holds {found!r}, which is not an offset of a log") from None


class Range(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the log that one task reads: the messages of the stream from `start` to before `end`."""

    start: int
    end: int
    #: When the stream on which the range was planned was created, as in `Offset`.
    created: str
    #: Only entries from position `since` to before position `until` are read; 0: no bound.
    since: int = 0
    until: int = 0

    def holds(self, position: int) -> bool:
        """Return whether an entry at this position is in the range."""
        return position >= self.since and (not self.until or position < self.until)


def begin_at(wanted: str, first: int, end: int, form: str) -> tuple[int, int]:
    """Return the message to begin at, and the position of the entry in it, if other entries stand before that (else 0).

    `wanted`: "earliest" (the message `first`), "latest" (`end`) or a number: for messages a sequence, for entries a
    position.
    """
    if wanted == "earliest":
        return first, 0
    if wanted == "latest":
        return end, 0
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
        raise DataLoss(
            f"the log ends before message {end}, but the reader was at {start.position}, which is position "
            f"{first_place(start.position)} of entries: the log went back, or startingPosition is one that it never had"
        )


def parts_of(size: int, *, exactly: int | None, at_least: int) -> int:
    """Return in how many parts a range of `size` bytes is read."""
    return exactly or max(at_least, -(-size // _PART_BYTES))


def split(whole: Range, parts: int) -> list[Range]:
    """Return the range as at most `parts` non-empty ranges of about the same length."""
    size = max(1, -(-(whole.end - whole.start) // max(parts, 1)))
    return [
        msgspec.structs.replace(whole, start=at, end=min(at + size, whole.end))
        for at in range(whole.start, whole.end, size)
    ]


class Holes:
    """The holes of a range: sequences that do not come, where groups of entries may be missing.

    The log loses messages at its front, by a purge, and single ones that were erased, or that proved a read. Each group
    names the one before it. If a group names the last one that came, no group is missing between the two. If it names a
    later one, that one is missing, and others may be missing before it.
    """

    def __init__(self, start: int) -> None:
        self._at = start
        #: The last group that came; before the first, it stands below the range.
        self._group = start - 1
        #: The holes behind that group: each from its first sequence to before its end.
        self._open: list[tuple[int, int]] = []
        #: The holes in which groups may be missing, and the sequences of groups that are missing.
        self.found: list[tuple[int, int]] = []
        self._missing: set[int] = set()

    @property
    def open(self) -> bool:
        """Whether the next group must tell which group it names as the one before it."""
        return bool(self._open)

    def passed(self, sequence: int) -> None:
        """Note that the message with this sequence came, or that the range ends there."""
        if sequence > self._at:
            self._open.append((self._at, sequence))
        self._at = max(self._at, sequence + 1)

    def group(self, sequence: int, before: int | None) -> None:
        """Note a group behind all that `passed`, and which group it names as the one before it; None: it names none."""
        if before is None:
            return
        if before > self._group:
            self._found(before)
            self._missing.add(before)
        self._open.clear()
        self._group = sequence

    def ended(self, end: int, before: int | None) -> None:
        """Note that the range ends, and which group the first one behind it names; None: none does."""
        if before is not None and before < end:
            self.group(end, before)
        else:
            self._found(end - 1)

    def _found(self, last: int) -> None:
        self.found += [(first, min(end, last + 1)) for first, end in self._open if first <= last]

    def lost(self, erased: Collection[int], first: int) -> int | None:
        """Return the first sequence whose group was lost, as far as can be told; None if none was.

        `first`: where the log begins. Any message that is gone below it may have been a group; above it, only a group
        that another one names was lost. A group that was `erased` was not lost.
        """
        for start, end in self.found:
            for sequence in range(start, end):
                if sequence not in erased and (sequence < first or sequence in self._missing):
                    return sequence
        return None
