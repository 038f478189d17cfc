"""What is left out, refused and renumbered when a batch comes again that ended with bad rows; without Spark."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bufstore import ConfigError
from bufstore.spark.sink.checkpoint_rows import UNREADABLE
from bufstore.spark.sink.settled import (
    NO_POSITION,
    ROW,
    THREAD,
    RowKey,
    Settled,
    pack,
    position_of,
    settled_after,
    summed,
    unpack,
)
from bufstore.spark.sink.spark_ledger import row_key

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


def test_a_row_that_cannot_be_read_is_never_taken_for_another_threads() -> None:
    """Regression: what is shown of an id's bad bytes may be another thread's id, whose rows were then skipped."""
    good: dict[str, Any] = {"thread_id": r"k\xff", THREAD: b"1", ROW: b"a"}
    bad = [good | {THREAD: thread, UNREADABLE: "not UTF-8"} for thread in (b"2", b"3")]
    keys = [row_key("app", 1, row, 0) for row in (good, *bad)]
    assert len(set(keys)) == 3
    assert keys == [row_key("app", 1, row, 0) for row in (good, *bad)]
