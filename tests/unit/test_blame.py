"""When refusals are not the fault of single entries."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bufstore.buffer.flush.blame import THREADS_MIN, Blame

THREAD = st.integers(0, 12).map(str)
STEP = st.tuples(st.sampled_from(["refused", "taken", "settled"]), THREAD)


@given(steps=st.lists(STEP, max_size=60))
def test_it_is_everybodys_while_more_are_refused_than_others_are_taken(steps: list[tuple[str, str]]) -> None:
    blame, refused, taken, most = Blame(), set[str](), set[str](), 0
    for what, thread_id in steps:
        if what == "refused":
            blame.refused(thread_id, "cause", 1.0)
            refused.add(thread_id)
            most = max(most, len(refused))
        elif what == "taken":
            blame.taken([thread_id], 1.0)
            if len(taken) < most:
                taken.add(thread_id)
        else:
            blame.settled([thread_id])
            refused.discard(thread_id)
        expected = len(refused) >= THREADS_MIN and len(refused) > len(taken)
        assert blame.everybodys("cause", 1.0) == expected
        assert not blame.everybodys("another", 1.0)


def test_what_was_taken_long_ago_says_nothing_about_now() -> None:
    blame = Blame()
    for n in range(5):
        blame.refused(str(n), "cause", 0.0)
    blame.taken([f"other{n}" for n in range(5)], 0.0)
    assert not blame.everybodys("cause", 10.0)
    assert blame.everybodys("cause", 1000.0)


def test_nothing_is_remembered_of_a_cause_that_is_over() -> None:
    blame = Blame()
    for n in range(1000):
        blame.refused(str(n), f"cause {n}", 0.0)
    blame.settled([str(n) for n in range(1000)])
    blame.taken(["t"], 1000.0)
    assert not blame._cases


def test_what_was_parked_one_by_one_counts_until_others_are_taken() -> None:
    blame = Blame()
    for n in range(10):
        blame.refused(str(n), "cause", float(n))
        assert blame.everybodys("cause", float(n)) == (n >= THREADS_MIN - 1)
        blame.parked(str(n), "cause")
        blame.settled([str(n)])
        assert not blame.everybodys("cause", float(n)), "nothing of it is refused now"
    blame.refused("last", "cause", 20.0)
    blame.taken(["other"], 20.0)
    assert not blame.everybodys("cause", 20.0)
