"""Which flushes count as frozen."""

from __future__ import annotations

import pytest

from bufstore.postgres.ledger.frozen import OpenFlush, StandingStill, idle_max, is_frozen, may_be_frozen


@pytest.mark.parametrize(
    ("still_s", "held_s", "frozen", "may_be"),
    [
        (4.1, 0.0, True, False),
        (3.9, 60.0, False, False),  # it stands still, but not for long enough
        (0.0, 60.0, False, False),  # it makes progress
        (None, 3.9, False, False),
        (None, 4.1, False, True),  # a flush of another role, which may also be working
    ],
)
def test_a_flush_is_frozen_that_stands_still_for_longer_than_it_may(
    still_s: float | None, held_s: float, frozen: bool, may_be: bool
) -> None:
    flush = OpenFlush(1, "2/3", "app", 4.0, still_s)
    assert (is_frozen(flush), may_be_frozen(flush, held_s)) == (frozen, may_be)


def test_a_large_window_may_stand_still_for_longer() -> None:
    assert idle_max(6) == 4000
    assert idle_max(6, 64 << 20) == 20_000


def test_a_flush_that_stands_still_while_postgres_clock_is_set_back_is_timed_by_the_observer() -> None:
    standing = StandingStill()

    def at(now: float, still_s: float | None, statement: str = "10:00:00", slow_s: float = 0.0) -> list[bool]:
        flush = OpenFlush(1, "2/3", "app", 4.0, still_s, statement)
        return [is_frozen(f) for f in standing.timed([flush], now, now + slow_s)]

    assert at(100.0, -3600.0) == [False]
    assert at(103.9, -3596.0) == [False]
    assert at(104.1, -3595.9) == [True]
    assert at(104.2, -3599.9, "10:00:05") == [False], "another statement"
    assert at(108.0, 0.0, "10:00:05") == [False], "it went on"
    assert at(108.3, -3599.9, "10:00:05") == [False], "and stands still from now on"
    assert at(108.3, 4.1, "10:00:06") == [True], "for longer than it was looked at"
    assert at(200.0, None, "") == [False]
    assert at(300.0, -3599.7, "10:00:07", slow_s=4.4) == [False], "the first answer came late"
    assert at(304.5, -3595.2, "10:00:07") == [False], "it may have begun just before that answer"
    assert at(308.5, -3591.2, "10:00:07") == [True]
