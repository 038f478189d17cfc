"""Whose group goes next."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bufstore.buffer.groups.turns import NEEDS_MAX_S, Turns, Usual

_MINE_S = 0.001
_WRITERS = st.integers(1, 6)
_EVENTS = st.lists(st.tuples(st.sampled_from(["wants", "wrote", "passes"]), _WRITERS, st.floats(0, 1)), max_size=40)


def told(me: int, events: list[tuple[str, int, float]]) -> tuple[Turns, float]:
    """What a writer knows that has heard all of this, and when that was."""
    turns, now = Turns(me), 0.0
    turns.wrote(1, now)
    for what, writer, number in events:
        if what == "wants":
            turns.wants(writer, number, now)
        elif what == "passes":
            turns.passes(writer)
        else:
            now += number
            turns.wrote(writer, now)
    return turns, now


@given(_EVENTS)
def test_of_those_who_heard_the_same_one_goes_at_once_and_the_others_one_after_another(
    events: list[tuple[str, int, float]],
) -> None:
    heard = {me: told(me, events) for me in range(1, 7)}
    waits = {me: turns.wait_s(now, _MINE_S) for me, (turns, now) in heard.items() if turns.knows(me)}
    assert len(set(waits.values())) == len(waits), "no two at the same time"
    assert [me for me, wait_s in waits.items() if wait_s <= 0] == [me for me in waits if heard[me][0].is_first(me)]
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
    turns.wants(me, _MINE_S, now)
    for _ in range(6):
        first = next(other for other in range(1, 7) if turns.is_first(other))
        if first == me:
            return
        now += 1
        turns.wrote(first, now)
    raise AssertionError("it never was its turn")


def test_who_lets_his_turn_pass_is_not_waited_for_again() -> None:
    turns, now = told(3, [("wrote", 1, 1), ("wrote", 2, 1), ("wrote", 3, 1)])
    assert turns.wait_s(now, _MINE_S) > _MINE_S
    turns.wrote(2, now + 1)  # before 1, whose turn it was
    assert not turns.knows(1)
    assert turns.is_first(3)


def test_what_is_usual_follows_what_happens() -> None:
    usual = Usual()
    assert not usual.at_most_s
    for _ in range(100):
        usual.note(0.002)
    assert 0.002 <= usual.at_most_s < 0.0021
    for number in range(100):
        usual.note(0.004 if number % 2 else 0.002)
    assert 0.004 < usual.at_most_s < 0.01
