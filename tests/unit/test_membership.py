"""Which member owns which partition."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bufstore.buffer.flush.membership import Pulse, owned, owners

MEMBERS = st.lists(st.text("0123456789abcdef", min_size=16, max_size=16), unique=True, max_size=8)


@given(members=MEMBERS, partitions=st.integers(1, 64))
def test_every_partition_has_exactly_one_owner(members: list[str], partitions: int) -> None:
    shares = [owned(m, members, partitions) for m in members]
    assert sum(map(len, shares)) == (partitions if members else 0)
    assert frozenset().union(*shares) == (frozenset(range(partitions)) if members else frozenset())


@given(members=MEMBERS, data=st.data())
def test_the_order_of_the_list_does_not_matter(members: list[str], data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(members))
    assert owners(members, 16) == owners(shuffled, 16)


@given(members=MEMBERS.filter(bool), partitions=st.integers(1, 64))
def test_nobody_has_more_than_his_share(members: list[str], partitions: int) -> None:
    share = -(-partitions // len(members))
    assert all(len(owned(m, members, partitions)) <= share for m in members)


def test_who_is_not_a_member_owns_nothing() -> None:
    assert owned("me", [], 8) == frozenset()
    assert owned("me", ["you"], 8) == frozenset()
    assert owners([], 8) == {}


def test_a_new_member_moves_few_partitions() -> None:
    members = [f"{n:016x}" for n in range(4)]
    before, after = owners(members, 256), owners([*members, "f" * 16], 256)
    assert sum(before[p] != after[p] for p in range(256)) < 128


def test_who_does_not_renew_his_record_is_not_alive_however_long_the_server_keeps_it() -> None:
    pulse, now = Pulse(3.0, 0.75), 10.0
    assert pulse.look({"a": 1, "b": 2}, now) == (["a", "b"], [])
    for number in (3, 4):
        assert pulse.look({"a": number, "b": 2}, now := now + 0.75) == (["a", "b"], [])
    assert pulse.look({"a": 5, "b": 2}, now := now + 0.75) == (["a"], []), "it holds by now, if it lives"
    for number in range(6, 11):
        assert pulse.look({"a": number, "b": 2}, now := now + 0.75) == (["a"], [])
    assert pulse.look({"a": 11, "b": 2}, now := now + 0.75) == (["a"], ["b"])
    assert pulse.look({"a": 12, "b": 9}, now := now + 0.75) == (["a", "b"], []), "it is back"


@given(st.lists(st.floats(0.0, 20.0), max_size=12))
def test_who_could_not_look_gives_others_the_time_to_renew(pauses: list[float]) -> None:
    """After an outage of the shared state all members look at once, before any of them has renewed its record."""
    pulse, now = Pulse(3.0, 0.75), 10.0
    for looks, pause in enumerate([0.0, *pauses]):
        alive, dead = pulse.look({"b": 1}, now := now + pause)
        assert alive or looks >= 3, "three intervals are the least"
        assert not dead or looks > 8
        if looks >= 3 and min(pauses[:looks]) >= 0.75:
            assert not alive, "and the most, of one who can look"
