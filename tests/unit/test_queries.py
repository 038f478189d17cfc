"""Queries and cursors: decisions without a store."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bufstore.errors import InvalidQuery
from bufstore.threads.message_pages import check_range
from bufstore.threads.queries import (
    MessageQuery,
    Order,
    RunQuery,
    ThreadQuery,
    Visibility,
    new_cursor,
    prefix_end,
    read_cursor,
    read_position,
)

IDS = st.none() | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=3)
QUERIES = (
    st.builds(
        MessageQuery,
        after=st.none() | st.integers(0, 3),
        order=st.sampled_from(Order),
        visibility=st.sampled_from(Visibility),
        run_id=IDS,
    )
    | st.builds(RunQuery, thread_id=IDS, id_prefix=IDS)
    | st.builds(ThreadQuery, resource_id=IDS, parent_thread_id=IDS, id_prefix=IDS)
)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)


@given(first=QUERIES, second=QUERIES, scope=TEXT, other_scope=TEXT, seq=st.integers(0, 2**31))
def test_a_cursor_is_good_for_its_own_query_only(
    first: MessageQuery, second: MessageQuery, scope: str, other_scope: str, seq: int
) -> None:
    cursor = new_cursor(first, scope, seq)
    assert read_cursor(cursor, first, scope, int) == seq
    if (first, scope) != (second, other_scope):
        with pytest.raises(InvalidQuery):
            read_cursor(cursor, second, other_scope, int)


@given(text=st.text(max_size=40))
def test_garbage_is_no_cursor(text: str) -> None:
    with pytest.raises(InvalidQuery):
        read_cursor(text, MessageQuery(), "t", int)


@pytest.mark.parametrize("position", [(-1, "x"), (2**60, "x"), (1, "nul\0"), ("x", 1), [1], 7])
def test_a_forged_position_is_refused(position: object) -> None:
    with pytest.raises(InvalidQuery):
        read_position(new_cursor(RunQuery(), "", position), RunQuery())


@given(prefix=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=4), text=TEXT)
def test_what_has_a_prefix_lies_between_it_and_its_end(prefix: str, text: str) -> None:
    end = prefix_end(prefix)
    for candidate in (text, prefix + text):
        assert candidate.startswith(prefix) == (candidate >= prefix and (end is None or candidate < end))
    if end is not None:
        end.encode()


@pytest.mark.parametrize(("first", "last", "wrong"), [(-1, 5, "first"), (1, 2**31, "last")])
def test_a_range_that_is_none_is_told_by_the_callers_own_words(first: int, last: int, wrong: str) -> None:
    """Regression: the error named "after" or "before", which `load_message_range` does not have."""
    with pytest.raises(InvalidQuery, match=f"^{wrong} must be a position"):
        check_range(first, last)
