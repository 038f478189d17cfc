"""Which entries may leave the log, and when: decided by commit times, confirmations and fill alone."""

from __future__ import annotations

from bisect import bisect_right

from hypothesis import given
from hypothesis import strategies as st

from bufstore.buffer.flush.passed import Passed, purgeable, share_to_go
from thorough import examples

NEVER = float("-inf")
GAPS = st.lists(st.floats(0.001, 30), min_size=1, max_size=400)


def passed_at(gaps: list[float]) -> tuple[Passed, list[float]]:
    """Commits with these gaps between them; the one that passed position n was made at times[n - 1]."""
    passed, times = Passed(), [sum(gaps[: i + 1]) for i in range(len(gaps))]
    for n, time in enumerate(times, 1):
        passed.note(time, n)
    return passed, times


@examples(200)
@given(
    gaps=GAPS,
    window=st.floats(1, 600),
    asked_ago=st.floats(0, 2000),
    waited=st.floats(0, 2000),
    retain=st.floats(1, 2000),
    to_go=st.floats(0, 1),
    purged=st.integers(0, 400),
    archived=st.none() | st.integers(0, 400),
)
def test_nothing_goes_that_a_postgres_which_was_asked_then_may_lose(
    gaps: list[float], window: float, asked_ago: float, waited: float, retain: float, to_go: float, purged: int,
    archived: int | None,
) -> None:  # fmt: skip
    """However full the log is, and however long ago Postgres was asked, no such entry goes."""
    passed, times = passed_at(gaps)
    passed.gone(min(purged, len(times)))
    now = times[-1] + waited
    confirmed = now - asked_ago - window
    below = purgeable(passed, confirmed=confirmed, wished=now - retain, to_go=to_go, archived=archived)
    if below is None:
        return
    assert times[below - 1] <= confirmed, "committed too shortly before Postgres was seen last"
    assert archived is None or below <= archived
    assert below > min(purged, len(times))


@examples(100)
@given(gaps=GAPS, wait=st.floats(0, 1000))
def test_what_is_old_enough_goes_when_it_is_wished_or_needed(gaps: list[float], wait: float) -> None:
    passed, times = passed_at(gaps)
    end = len(times)
    at = times[-1] + wait
    assert purgeable(passed, confirmed=at, wished=at, to_go=0) == end
    assert purgeable(passed, confirmed=at, wished=NEVER, to_go=1) == end
    assert purgeable(passed, confirmed=at, wished=NEVER, to_go=0) is None, "there is room"
    assert purgeable(passed, confirmed=NEVER, wished=at, to_go=1) is None, "Postgres was not asked"
    passed.gone(end)
    assert purgeable(passed, confirmed=at, wished=at, to_go=1) is None
    assert len(passed) == 0


def test_of_what_can_go_the_oldest_part_goes() -> None:
    passed, times = passed_at([1.0] * 50)
    passed.gone(10)
    assert purgeable(passed, confirmed=times[-1], wished=NEVER, to_go=0.25) == 20
    whole = purgeable(passed, confirmed=times[-1], wished=NEVER, to_go=0.25, unit=20)
    assert whole == 30, "a part of a group would stay, and count as gone"
    assert purgeable(passed, confirmed=times[-1], wished=times[29], to_go=0.25) == 30, "the wish goes further"


@examples(100)
@given(used=st.floats(0, 1), reserve=st.floats(0.01, 0.99))
def test_what_must_go_brings_the_log_below_its_bound_if_it_can(used: float, reserve: float) -> None:
    limit = 1 << 40
    held, rounds = int(used * limit), 0
    while (part := share_to_go(held, limit, reserve)) > 0:
        assert part <= 1
        held, rounds = int(held * (1 - part)), rounds + 1
    assert held <= (1 - reserve) * limit
    assert rounds <= 1, "when all of it is flushed, one look is enough"


def test_half_of_what_is_in_the_log_cannot_go_and_the_rest_goes_in_a_few_looks() -> None:
    limit, unflushed, flushed = 1000, 400, 400
    for _ in range(5):
        flushed = int(flushed * (1 - share_to_go(unflushed + flushed, limit, 0.75)))
    assert flushed < 10


@examples(50)
@given(gaps=GAPS.filter(lambda gaps: len(gaps) > 100), asked=st.lists(st.floats(0, 1), max_size=20))
def test_a_commit_that_is_not_told_from_others_counts_from_a_later_one_but_not_from_a_much_later_one(
    gaps: list[float], asked: list[float]
) -> None:
    passed, times = passed_at(gaps)
    now = times[-1]
    assert passed.before(now) == len(times), "the newest is always known"
    for time in (part * now for part in asked):
        passed_then = bisect_right(times, time)
        found = passed.before(time)
        assert found <= passed_then
        late = time - 0.05 * (now - time) - 3 * max(gaps)
        assert found >= bisect_right(times, late), "kept much longer than it must be"


def test_a_day_of_commits_is_remembered_in_bounded_space() -> None:
    passed = Passed()
    for n in range(200_000):
        passed.note(n * 0.5, n + 1)
    assert len(passed) <= 1500, "a day of two commits a second"
