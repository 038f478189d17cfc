"""The parts of a batch, and a sum over each part's rows, which shows when a batch comes again with other rows.

A part is the rows of one task: those of the threads with one value of a hash. Its sum does not depend on their order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

#: The bits that a sum keeps, so that it fits into a bigint.
_BITS = (1 << 63) - 1


class Part(NamedTuple):
    """One part of a batch."""

    number: int
    #: How many parts the batch has.
    of: int
    #: A sum over the part's rows.
    planned: int


def sum_of(rows: Iterable[int]) -> int:
    """Return the sum over rows, given a number for each; or over a batch, given the sums of its parts."""
    return sum(rows) & _BITS


def differ(noted: Iterable[Part], present: Mapping[int, int], of: int) -> bool:
    """Return whether parts that were begun are others now. `present`: the sums of the `of` parts; without rows, 0."""
    return any(part.of != of or present.get(part.number, 0) != part.planned for part in noted)
