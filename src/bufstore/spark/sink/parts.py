"""The parts of a batch, and a sum over the rows of each: what tells that a batch came again with other rows.

A part is what one task has: the threads of one value of a hash. Its sum does not depend on the order of its rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

#: A sum fits into a bigint.
_BITS = (1 << 63) - 1


class Part(NamedTuple):
    """One part of a batch."""

    number: int
    #: How many parts the batch has.
    of: int
    #: A sum over its rows.
    planned: int


def sum_of(rows: Iterable[int]) -> int:
    """A sum over rows, of a number for each; also over a batch, of the sums of its parts."""
    return sum(rows) & _BITS


def differ(noted: Iterable[Part], present: Mapping[int, int], of: int) -> bool:
    """Whether parts that were begun are others now. `present`: the sums of all `of` parts; without rows it is 0."""
    return any(part.of != of or present.get(part.number, 0) != part.planned for part in noted)
