"""Whose group goes next."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from bufstore.buffer.groups.turns import NEEDS_MAX_S, Pace, Turns, Usual

_MINE_S = 0.001
_NEAR, _FAR = Pace(_MINE_S, 2 * _MINE_S), Pace(0.2, 0.4)
_WRITERS = st.integers(1, 6)
_EVENTS = st.lists(st.tuples(st.sampled_from(["wants", "wrote", "passes"]), _WRITERS, st.floats(0, 1)), max_size=40)


def told(me: int, events: list[tuple[str, int, float]]) -> tuple[Turns, float]:
    """What a writer knows that has heard all of this, and when that was."""
    turns, now = Turns(me), 0.0
    turns.wrote(1, _NEAR, now)
    for what, writer, number in events:
        if what == "wants":
            turns.wants(writer, Pace(_MINE_S, number), now)
        elif what == "passes":
            turns.passes(writer)
        else:
            now += number
            turns.wrote(writer, _NEAR, now)
    return turns, now


@given(_EVENTS)
# One whose own place counts for more than others think of it leaves at another time than they believe.
@example([("wants", 3, 1.0), ("wrote", 2, 0.0), ("wants", 1, 1.0), ("wrote", 2, 1.0), ("wrote", 1, 1.0)])
def test_of_those_who_heard_the_same_one_goes_at_once(events: list[tuple[str, int, float]]) -> None:
    heard = {me: told(me, events) for me in range(1, 7)}
    waits = {me: turns.wait_s(now, _MINE_S) for me, (turns, now) in heard.items() if turns.knows(me)}
    assert not waits or min(waits.values()) <= 0


@given(_EVENTS, _WRITERS)
def test_nobody_is_waited_for_long(events: list[tuple[str, int, float]], me: int) -> None:
    turns, now = told(me, events)
    wait_s = turns.wait_s(now, _MINE_S)
    assert wait_s <= 6 * max(NEEDS_MAX_S, _MINE_S)
    # Whatever was heard, it is over when nothing more is heard.
    assert turns.wait_s(now + max(wait_s, 0), _MINE_S) <= 1e-9


@given(_EVENTS, _WRITERS)
def test_who_wants_to_write_is_next_after_all_who_wait_longer(events: list[tuple[str, int, float]], me: int) -> None:
    turns, now = told(me, events)
    turns.wants(me, _NEAR, now)
    for _ in range(12):
        first = next(other for other in range(1, 7) if turns.is_first(other))
        if first == me:
            return
        now += 1
        turns.wrote(first, _NEAR, now)
    raise AssertionError("it never was its turn")


def test_who_lets_his_turn_pass_is_not_waited_for_again() -> None:
    turns, now = told(3, [("wrote", 1, 0), ("wrote", 2, 0), ("wrote", 3, 0)])
    assert turns.wait_s(now, _MINE_S) > _MINE_S
    turns.wrote(2, _NEAR, now + 1)  # before 1, whose turn it was
    assert not turns.knows(1)
    assert turns.is_first(3)


def test_who_is_not_waited_for_keeps_its_place_until_its_time_has_passed() -> None:
    turns = Turns(3)
    turns.wrote(1, _NEAR, 0)
    turns.wrote(2, _FAR, 0)
    for number in range(1, 200):
        now = _MINE_S * number
        if turns.is_first(2):
            break
        turns.wrote(1, _NEAR, now)
    assert 140 < number < 160, "who is far away rests for most of a turn of its own"
    turns.wrote(3, _NEAR, now)
    assert turns.is_first(2)
    turns.wrote(1, _NEAR, now + _FAR.needs_s)
    assert not turns.knows(2)


def test_those_who_never_write_are_waited_for_a_share_of_the_time_only() -> None:
    turns, now, stranger = Turns(1), 0.0, 10
    turns.wrote(1, _NEAR, now)
    turns.wrote(2, _NEAR, now)
    waited = 0.0
    while now < 100:
        for _ in range(3):
            stranger += 1
            turns.wants(stranger, Pace(0.08, 0.25), now)
        wait_s = max(turns.wait_s(now, _MINE_S), 0.0)
        waited += wait_s
        now += wait_s + 0.05
        turns.wrote(1, _NEAR, now)
    assert waited < 20


def test_what_is_usual_follows_what_happens() -> None:
    usual = Usual()
    assert not usual.at_most_s
    for _ in range(100):
        usual.note(0.002)
    assert 0.002 <= usual.at_most_s < 0.0021
    for number in range(100):
        usual.note(0.004 if number % 2 else 0.002)
    assert 0.004 < usual.at_most_s < 0.01
