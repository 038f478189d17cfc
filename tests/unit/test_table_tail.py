"""Which part of the tail that planning has read a task may use, and what the task reads itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bufstore.spark.tables.shares import ALL_THREADS
from bufstore.spark.tables.span import Span
from bufstore.spark.tables.tail_pieces import TailEntry, TailPieces

numbers = st.integers(1, 20)
#: Spans of one stream and, rarely, of another; whole from their beginning, or from the next message on.
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
        # Planning has looked for holes in what it read; from there on the task does.
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
    assert ALL_THREADS.divided(tasks)[ALL_THREADS.piece_of(thread_id, tasks)].has(thread_id)


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 40))),
    st.integers(1, 5),
    st.integers(1, 6),
    st.integers(0, 200),
    st.data(),
)
def test_a_task_has_a_piece_of_its_tail_in_memory_and_the_rest_in_a_file(
    given_: list[tuple[int, int]], tasks: int, pieces: int, bytes_max: int, data: st.DataObject
) -> None:
    share = data.draw(st.sampled_from(ALL_THREADS.divided(tasks)))
    entries = [
        TailEntry(f"t-{thread}", seq, 0, 0, None, bytes(size), elsewhere=False)
        for seq, (thread, size) in enumerate(given_)
        if share.has(f"t-{thread}")
    ]
    with TailPieces(share, pieces, bytes_max) as kept:
        for entry in entries:
            kept.add(entry)
            if pieces > 1:
                assert sum(len(e.payload) for some in kept._in_memory for e in some) <= bytes_max
        found = [list(kept.taken(number)) for number in range(pieces)]
    for piece, of_piece in zip(share.divided(pieces), found, strict=True):
        assert of_piece == [entry for entry in entries if piece.has(entry.thread_id)]
    assert sum(map(len, found)) == len(entries)
