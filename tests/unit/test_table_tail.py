"""Which part of the tail that planning has read a task may use, and what the task reads itself."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from bufstore.buffer.groups.oversize import reference
from bufstore.spark.tables.shares import ALL_THREADS
from bufstore.spark.tables.span import Span
from bufstore.spark.tables.tail_pieces import TailEntry, TailPieces, size_of

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


def late(thread_id: str, seq: int = 0, size: int = 0, *, elsewhere: bool = False) -> TailEntry:
    """An entry with a payload of so many bytes; `elsewhere`: they stand in parts."""
    payload = reference(bytes(size), [1]) if elsewhere else bytes(size)
    return TailEntry(thread_id, seq, 0, 0, None, payload, elsewhere=elsewhere)


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 4000), st.booleans())),
    st.integers(1, 5),
    st.integers(1, 40),
    st.integers(0, 20_000),
    st.data(),
)
def test_a_task_has_a_piece_of_its_tail_in_memory_and_the_rest_in_a_file(
    given_: list[tuple[int, int, bool]], tasks: int, buckets: int, bytes_max: int, data: st.DataObject
) -> None:
    """Regression: pieces were as large as entries are on average in the log; the tail's may be a thousand times larger.

    And of small entries only their payloads counted, which take a tenth of the memory.
    """
    share = data.draw(st.sampled_from(ALL_THREADS.divided(tasks)))
    entries = [
        late(f"t-{thread}", seq, size, elsewhere=elsewhere)
        for seq, (thread, size, elsewhere) in enumerate(given_)
        if share.has(f"t-{thread}")
    ]
    with TailPieces(share, buckets, bytes_max) as kept:
        for entry in entries:
            kept.add(entry)
            if buckets > 1:
                assert sum(size_of(e) for some in kept._in_memory for e in some) <= bytes_max
        found = [(piece, list(of_piece)) for piece, of_piece in kept.taken()]
    assert [piece.low for piece, _ in found] == [share.low, *(piece.high for piece, _ in found[:-1])]
    assert found[-1][0].high == share.high
    for piece, of_piece in found:
        assert sorted(of_piece, key=lambda e: e.seq) == [e for e in entries if piece.has(e.thread_id)]
        for thread_id in {e.thread_id for e in of_piece}:
            assert [e for e in of_piece if e.thread_id == thread_id] == [e for e in entries if e.thread_id == thread_id]
        in_buckets = {share.piece_of(e.thread_id, buckets) for e in of_piece}
        assert len(in_buckets) <= 1 or sum(map(size_of, of_piece)) <= bytes_max
    for one, other in pairwise(found):
        assert sum(size_of(e) for e in (*one[1], *other[1])) > bytes_max, "two would have fitted"


def test_all_of_an_entrys_memory_counts() -> None:
    assert size_of(late("t", size=5 << 20, elsewhere=True)) >= 5 << 20
    tracemalloc.start()
    header = "1.00000000."
    some = [TailEntry(f"t-{n}", n << 40, 3, n << 50, f"{header}{n:0140d}", n.to_bytes(48), False) for n in range(1000)]
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken < sum(map(size_of, some)) < 3 * taken
