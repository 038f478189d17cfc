"""Who owns which partition."""

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
    pulse = Pulse(3.0)
    assert pulse.look({"a": 1, "b": 2}, 10.0) == (["a", "b"], [])
    assert pulse.look({"a": 3, "b": 2}, 12.0) == (["a", "b"], [])
    assert pulse.look({"a": 4, "b": 2}, 13.5) == (["a"], [])
    assert pulse.look({"a": 5, "b": 2}, 16.5) == (["a"], ["b"])
    assert pulse.look({"a": 6, "b": 9}, 17.0) == (["a", "b"], []), "it is back"
    assert pulse.look({"a": 6}, 30.0) == ([], ["a"])
