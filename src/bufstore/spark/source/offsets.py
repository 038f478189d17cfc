"""Where a reader of the log stands, and what it reads next: decisions, without I/O."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from bufstore.errors import ConfigError, DataLoss


class Offset(msgspec.Struct, frozen=True, kw_only=True):
    """A place in the log. Written to Spark's checkpoint folder; its fields keep their order and meaning."""

    #: When the stream was created: a stream that was created again is another one, whatever its name.
    created: str
    #: The position that is read next.
    position: int
    #: Up to here messages may be missing: they were purged before the reader began.
    whole_from: int

    def as_dict(self) -> dict[str, Any]:
        """For Spark, which compares the text of two offsets."""
        return {"created": self.created, "position": self.position, "whole_from": self.whole_from}


def offset_of(found: Mapping[str, Any]) -> Offset:
    """The offset that Spark gives back. Raises ConfigError for anything else."""
    try:
        return msgspec.convert(found, Offset)
    except msgspec.ValidationError:
        raise ConfigError(f"the checkpoint folder holds {found!r}, which is not an offset of a log") from None


class Range(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the log that one task reads: entries whose last message lies from `start` to before `end`."""

    start: int
    end: int
    #: Of the stream that it was planned on, as in `Offset`.
    created: str
    whole_from: int


def begin_at(wanted: str, first: int, end: int) -> int:
    """The position that an option names: "earliest", "latest" or a number. Raises ConfigError, DataLoss."""
    if wanted == "earliest":
        return first
    if wanted == "latest":
        return end
    try:
        position = int(wanted)
    except ValueError:
        raise ConfigError(f"a position is 'earliest', 'latest' or a number, not {wanted!r}") from None
    if position < 0:
        raise ConfigError("a position must not be negative")
    return position


def check(start: Offset, created: str, end: int) -> None:
    """Raise DataLoss unless `start` is a place in this log."""
    if start.created != created:
        raise DataLoss(
            f"the stream was replaced by a new one ({created}; the reader began on that of {start.created}): "
            "unread entries may be gone with the old one"
        )
    if start.position > end:
        raise DataLoss(f"the log ends before position {end}, but the reader was at {start.position}: the log went back")


def split(start: int, end: int, parts: int, created: str, whole_from: int) -> list[Range]:
    """`start` to `end` in at most `parts` non-empty ranges of about the same length."""
    size = max(1, -(-(end - start) // max(parts, 1)))
    return [
        Range(start=at, end=min(at + size, end), created=created, whole_from=whole_from)
        for at in range(start, end, size)
    ]


class Holes:
    """The positions of a range that do not come, from where on nothing was purged before the reader began."""

    def __init__(self, part: Range) -> None:
        self._at = max(part.start, part.whole_from)
        #: Each from its first position to before its end.
        self.found: list[tuple[int, int]] = []

    def passed(self, positions: Sequence[int]) -> None:
        """These arrived, in order. If the last is the range's end, the whole range was read."""
        for position in positions:
            if position > self._at:
                self.found.append((self._at, position))
            self._at = max(self._at, position + 1)

    def lost(self, erased: Collection[int], proofs_gone: int, whole_from: int) -> int | None:
        """The first position whose message was lost, as far as can be told; None if nothing was.

        A log has holes only where messages were purged or `erased`. Below `proofs_gone` it has those of messages that
        proved a read, too (0: there are none).
        `whole_from`: from where on nothing was purged; it may lie too high, never too low.
        """
        for start, end in self.found:
            for position in range(start, end):
                if (position > proofs_gone or position < whole_from) and position not in erased:
                    return position
        return None
