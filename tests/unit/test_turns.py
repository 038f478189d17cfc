"""Which writer's group goes next."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import example, given
from hypothesis import strategies as st

from bufstore.buffer.groups.turns import NEEDS_MAX_S, Pace, Turns, Usual

_MINE_S = 0.001
_NEAR, _FAR = Pace(_MINE_S, 2 * _MINE_S), Pace(0.2, 0.4)
_WRITERS = st.integers(1, 6)
_EVENTS = st.lists(st.tuples(st.sampled_from(["wants", "wrote", "passes"]), _WRITERS, st.floats(0, 1)), max_size=40)


def told(
    me: int, events: list[tuple[str, int, float]], begins: int = 0, turns_s: Sequence[float] = (_MINE_S,)
) -> tuple[Turns, float, int]:
    """What a writer knows that has heard all events from number `begins` on, the time, and the number of groups.

    `turns_s`: how long the writers' turns take.
    """
    turns, now, seq = Turns(me), 0.0, 1
    paces = [Pace(turns_s[w % len(turns_s)], 2 * _MINE_S) for w in range(7)]
    if not begins:
        turns.wrote(1, paces[1], seq, now)
    for number, (what, writer, amount) in enumerate(events, start=1):
        if what == "wrote":
            now += amount
            seq += 1
        if number < begins:
            continue
        if what == "wants":
            turns.wants(writer, Pace(_MINE_S, amount), seq, now)
        elif what == "passes":
            turns.passes(writer)
        else:
            turns.wrote(writer, paces[writer], seq, now)
    return turns, now, seq


@given(_EVENTS)
# A writer that gives its own place more weight than others do leaves at another time than they believe.
@example([("wants", 3, 1.0), ("wrote", 2, 0.0), ("wants", 1, 1.0), ("wrote", 2, 1.0), ("wrote", 1, 1.0)])
def test_of_those_who_heard_the_same_one_goes_at_once(events: list[tuple[str, int, float]]) -> None:
    heard = {me: told(me, events) for me in range(1, 7)}
    waits = {me: turns.wait_s(now, _MINE_S) for me, (turns, now, _) in heard.items() if turns.knows(me)}
    assert not waits or min(waits.values()) <= 0


@given(
    st.lists(st.tuples(st.sampled_from(["wants", "wrote", "passes"]), _WRITERS, st.floats(0, 0.001)), max_size=40),
    st.lists(st.integers(1, 41), min_size=6, max_size=6),
    st.permutations(range(1, 7)),
    st.lists(st.floats(0.0005, 0.1), min_size=7, max_size=7),
)
def test_who_began_to_listen_later_knows_the_same_order_once_everybody_has_told_something(
    events: list[tuple[str, int, float]], begins: list[int], last: list[int], turns_s: list[float]
) -> None:
    """Regression: each counted from the first event that it had heard, and all waited until one lost patience."""
    events += [("wrote", writer, 0.0) for writer in last]
    heard = [told(me, events, min(begins[me - 1], len(events) - 5), turns_s)[0] for me in range(1, 7)]
    assert len({tuple(turns._in_order()) for turns in heard}) == 1


def test_a_few_who_are_gone_are_not_waited_for_one_after_the_other() -> None:
    """When the machine of many writers stops, they are all waited for at the same time."""
    turns, now = Turns(9), 0.0
    for writer in range(1, 10):
        turns.wrote(writer, _FAR, writer, now)
    wait_s = turns.wait_s(now, _MINE_S)
    assert 2 * _FAR.needs_s <= wait_s <= 2 * _FAR.needs_s + 8 * _FAR.turn_s
    turns.wrote(9, _FAR, 10, now + wait_s)
    assert not any(turns.knows(writer) for writer in range(1, 9))


@given(_EVENTS, _WRITERS)
def test_nobody_is_waited_for_long(events: list[tuple[str, int, float]], me: int) -> None:
    turns, now, _ = told(me, events)
    wait_s = turns.wait_s(now, _MINE_S)
    assert wait_s <= 6 * max(NEEDS_MAX_S, _MINE_S)
    # Whatever was heard, the wait is over when nothing more is heard.
    assert turns.wait_s(now + max(wait_s, 0), _MINE_S) <= 1e-9


@given(_EVENTS, _WRITERS)
def test_who_wants_to_write_is_next_after_all_who_wait_longer(events: list[tuple[str, int, float]], me: int) -> None:
    turns, now, seq = told(me, events)
    turns.wants(me, _NEAR, seq, now)
    for number in range(1, 13):
        first = next(other for other in range(1, 7) if turns.is_first(other))
        if first == me:
            return
        now += 1
        turns.wrote(first, _NEAR, seq + number, now)
    raise AssertionError("it never was its turn")


def test_who_lets_his_turn_pass_is_not_waited_for_again() -> None:
    turns, now, seq = told(3, [("wrote", 1, 0), ("wrote", 2, 0), ("wrote", 3, 0)])
    assert turns.wait_s(now, _MINE_S) > _MINE_S
    turns.wrote(2, _NEAR, seq + 1, now + 1)  # before writer 1, whose turn it was
    assert not turns.knows(1)
    assert turns.is_first(3)


def test_who_is_not_waited_for_keeps_its_place_until_its_time_has_passed() -> None:
    turns = Turns(3)
    turns.wrote(1, _NEAR, 1, 0)
    turns.wrote(2, _FAR, 2, 0)
    for number in range(1, 200):
        now = _MINE_S * number
        if turns.is_first(2):
            break
        turns.wrote(1, _NEAR, 2 + number, now)
    assert 140 < number < 160, "who is far away rests for most of a turn of its own"
    turns.wrote(3, _NEAR, 2 + number, now)
    assert turns.is_first(2)
    turns.wrote(1, _NEAR, 3 + number, now + _FAR.needs_s)
    assert not turns.knows(2)


def test_those_who_never_write_are_waited_for_a_share_of_the_time_only() -> None:
    turns, now, stranger = Turns(1), 0.0, 10
    turns.wrote(1, _NEAR, 1, now)
    turns.wrote(2, _NEAR, 2, now)
    waited = 0.0
    while now < 100:
        for _ in range(3):
            stranger += 1
            turns.wants(stranger, Pace(0.08, 0.25), stranger // 3, now)
        wait_s = max(turns.wait_s(now, _MINE_S), 0.0)
        waited += wait_s
        now += wait_s + 0.05
        turns.wrote(1, _NEAR, stranger // 3, now)
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
