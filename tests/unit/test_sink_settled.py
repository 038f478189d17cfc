"""What is left out, refused and renumbered when a batch comes again that ended with bad rows; without Spark."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bufstore import ConfigError
from bufstore.spark.sink.settled import NO_POSITION, RowKey, Settled, pack, position_of, settled_after, summed, unpack

keys = st.builds(RowKey, st.integers(0, 3), st.integers(-(1 << 63), (1 << 63) - 1), st.integers(0, 99))


@given(st.lists(keys))
def test_what_is_packed_comes_back(rows: list[RowKey]) -> None:
    assert unpack(pack(rows)) == rows


@given(st.integers(0, 8), st.sets(st.integers(0, 7)), st.integers(0, 4))
def test_rows_that_are_written_are_left_out_and_new_ones_get_the_next_places(
    written: int, removed: set[int], added: int
) -> None:
    settled = Settled(RowKey(1, 100 + n, n) for n in range(written))
    present = [RowKey(1, 100 + n, n) for n in range(written) if n not in removed]
    new = [RowKey(1, 500 + n, written + n) for n in range(added)]
    thread = settled.of(1)
    assert (thread is None) == (written == 0)
    if thread is not None:
        assert [key for key in [*present, *new] if not thread.holds(key)] == new
        assert thread.next_rank == written


def test_a_written_row_that_has_changed_is_refused() -> None:
    def holding(*rows: RowKey) -> list[bool]:
        thread = Settled([RowKey(1, 100, 5), RowKey(1, 101, 6)]).of(1)
        assert thread is not None
        return [thread.holds(row) for row in rows]

    assert holding(RowKey(1, 101, 6), RowKey(1, 102, 7)) == [True, False]
    with pytest.raises(ConfigError, match="not as it was written"):
        holding(RowKey(1, 777, 5))
    with pytest.raises(ConfigError, match="a row at position 6 is written, but a new row now comes before it"):
        holding(RowKey(1, 777, 7), RowKey(1, 101, 6))
    with pytest.raises(ConfigError, match="not as it was written"):
        holding(RowKey(1, 100, NO_POSITION), RowKey(1, 102, NO_POSITION))


@given(st.lists(keys, max_size=8), st.lists(keys, max_size=8), st.data())
def test_what_was_written_stays_written_and_what_was_left_is_not(
    before: list[RowKey], new: list[RowKey], data: st.DataObject
) -> None:
    left = data.draw(st.lists(st.sampled_from(new), max_size=len(new), unique=True)) if new else []
    fresh = [key for key in new if key not in before]
    found = settled_after(before, [*before, *fresh], [key for key in left if key in fresh])
    assert sorted(found) == sorted([*before, *fresh_without(fresh, [key for key in left if key in fresh])])


def fresh_without(rows: list[RowKey], left: list[RowKey]) -> list[RowKey]:
    rest = list(rows)
    for key in left:
        rest.remove(key)
    return rest


def test_a_position_is_a_number_or_a_time() -> None:
    assert position_of({"position": 7}) == 7
    assert position_of({"position": None}) == position_of({}) == NO_POSITION
    assert position_of({"position": datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)}) == 1_000_000
    assert position_of({"position": datetime(1970, 1, 1, 0, 0, 1)}) == 1_000_000  # timestamp_ntz


def test_a_null_is_not_an_empty_text() -> None:
    row = {"thread_id": None, "messages": None, "delta": ["1"]}
    other = {"thread_id": "", "messages": ["1"], "delta": None}
    assert summed(row).keys() == summed(other).keys()
    assert not set(summed(row).values()) & set(summed(other).values())
