"""Which part of a tail that planning has read a task may use, and what it reads itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bufstore.spark.tables.shares import share_of, shares
from bufstore.spark.tables.span import Span

numbers = st.integers(1, 20)
#: Of one stream and, seldom, of another; whole from their beginning, or from the message behind it.
spans = st.builds(
    lambda created, start, length, behind: Span(created, start, start + length, start + behind),
    st.sampled_from(["a", "a", "a", "b"]),
    numbers,
    st.integers(0, 20),
    st.integers(0, 1),
)


@given(spans, spans)
def test_a_task_reads_all_that_planning_has_not_read(planned: Span, wanted: Span) -> None:
    rest = wanted.behind(planned)
    needed = set(range(wanted.whole_from, wanted.end))
    if planned.serves(wanted):
        known = set(range(planned.start, planned.end))
        assert planned.created == wanted.created
        assert needed <= known | set(range(rest.start, rest.end))
        # What planning has read, it has looked at for holes; from there on the task does.
        assert not known & set(range(rest.start, rest.end))
        assert rest.whole_from <= max(wanted.whole_from, planned.end)
    else:
        assert rest == wanted
    assert wanted.behind(None) == wanted


@given(spans)
def test_where_postgres_went_back_planning_has_read_too_little(wanted: Span) -> None:
    planned = Span(wanted.created, wanted.start + 1, wanted.end + 1, wanted.whole_from + 1)
    assert wanted.behind(planned) == wanted


@given(st.integers(1, 50), st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_the_share_of_a_thread_has_it(tasks: int, thread_id: str) -> None:
    assert shares(tasks)[share_of(thread_id, tasks)].has(thread_id)
