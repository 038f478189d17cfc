"""Which parts of an archive's table count; no I/O.

A part holds the entries of a range of the stream. Parts may overlap, as when two runs worked at once, or when a larger
one was made of small ones. Then each message of the stream is taken from one part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

#: The version of the parts that are written.
VERSION = 1


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the table: all entries that begin in the messages of a range. New fields are added with defaults."""

    version: int
    #: Sequences of the stream from `start` to before `end`.
    start: int
    end: int
    #: Rows, and the sum of a hash over each.
    count: int
    checksum: str
    #: When the newest of its messages was stored, and when the part was made: microseconds of Unix time.
    newest_us: int
    made_us: int
    attempt: str

    @property
    def name(self) -> str:
        """The name of the part's folder and manifest."""
        return f"{self.start:020d}-{self.end:020d}-{self.attempt}"


class Piece(NamedTuple):
    """The piece of a part that counts: from sequence `start` to before `end`."""

    part: Part
    start: int
    end: int


def cover(parts: Sequence[Part]) -> list[Piece]:
    """Return the pieces that count: each sequence once, from the part that reaches furthest."""
    left, found, at = list(parts), list[Piece](), 0
    while left := [p for p in left if p.end > at]:
        begun = [p for p in left if p.start <= at]
        if not begun:
            at = min(p.start for p in left)
            continue
        best = max(begun, key=lambda p: (p.end, -p.start, p.attempt))
        found.append(Piece(best, at, best.end))
        at = best.end
    return found


def newest_us(parts: Sequence[Part], now_us: int) -> int:
    """Return when the newest message of the parts was stored, but no later than now (microseconds of Unix time).

    The server's clock may have been ahead for a moment: what was stored then must not make all else look old.
    """
    return min(max(part.newest_us for part in parts), now_us)


def replaced(parts: Sequence[Part], before_us: int) -> list[Part]:
    """Return the parts that do not count any more, because of others that were made before this time."""
    settled = cover([p for p in parts if p.made_us < before_us])
    counting = {piece.part.name for piece in cover(parts)}
    return [
        p
        for p in parts
        if p.name not in counting
        and any(piece.start <= p.start and p.end <= piece.end and piece.part != p for piece in settled)
    ]


def to_merge(parts: Sequence[Part], rows: int) -> list[tuple[int, int]]:
    """Return ranges of neighbours that each have fewer than `rows`; each range becomes one part of at most so many."""
    found: list[tuple[int, int]] = []
    run: list[Piece] = []
    for piece in cover(parts):
        joins = not run or piece.start == run[-1].end
        if not joins or piece.part.count >= rows or sum(p.part.count for p in run) + piece.part.count > rows:
            found += _merged(run)
            run = []
        if piece.part.count < rows:
            run.append(piece)
    return found + _merged(run)


def _merged(run: Sequence[Piece]) -> list[tuple[int, int]]:
    return [(run[0].start, run[-1].end)] if len(run) > 1 else []
