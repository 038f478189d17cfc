"""The place of an entry: the sequence of its group in the stream, and its number in the group, as one number.

A generation of the stream begins at epoch x 2^40 (`bufstore.buffer.subjects.first_position`), so a place has 12 bits of
epoch, 40 of sequence and 10 of number: 62 bits, which a bigint of Postgres holds. That is 4096 generations, each good
for three years at ten thousand groups a second.
"""

from __future__ import annotations

_NUMBER_BITS = 10
#: How many entries a group can hold.
ENTRIES_MAX = 1 << _NUMBER_BITS


def place(seq: int, number: int) -> int:
    """Return the place of the entry with this number, counted from 0, in the group with sequence `seq`."""
    return seq << _NUMBER_BITS | number


def first_place(seq: int) -> int:
    """Return the first place in the message with this sequence."""
    return seq << _NUMBER_BITS


def last_place(seq: int) -> int:
    """Return the highest possible place in the message with this sequence: a cursor there has passed all of it."""
    return (seq + 1 << _NUMBER_BITS) - 1


def group_of(place_: int) -> int:
    """Return the sequence of the message that the place is in."""
    return place_ >> _NUMBER_BITS


def number_of(place_: int) -> int:
    """Return the number of the place's entry in its group."""
    return place_ & ENTRIES_MAX - 1
