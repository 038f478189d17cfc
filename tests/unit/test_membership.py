"""Who owns which partition."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from bufstore.buffer.membership import owned, owner

MEMBERS = st.lists(st.text("0123456789abcdef", min_size=16, max_size=16), unique=True, max_size=8)


@given(members=MEMBERS, partitions=st.integers(1, 64))
def test_every_partition_has_exactly_one_owner(members: list[str], partitions: int) -> None:
    shares = [owned(m, members, partitions) for m in members]
    assert sum(map(len, shares)) == (partitions if members else 0)
    assert frozenset().union(*shares) == (frozenset(range(partitions)) if members else frozenset())


@given(members=MEMBERS, data=st.data())
def test_the_order_of_the_list_does_not_matter(members: list[str], data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(members))
    assert [owner(p, members) for p in range(16)] == [owner(p, shuffled) for p in range(16)]


@given(members=MEMBERS.filter(lambda m: len(m) > 1))
def test_a_member_that_leaves_moves_only_its_own_partitions(members: list[str]) -> None:
    left = members[1:]
    for p in range(64):
        before = owner(p, members)
        assert before == members[0] or owner(p, left) == before


def test_who_is_not_a_member_owns_nothing() -> None:
    assert owned("me", [], 8) == frozenset()
    assert owned("me", ["you"], 8) == frozenset()
    assert owner(0, []) is None


def test_shares_are_about_even() -> None:
    chance = random.Random(1)
    members = [f"{chance.getrandbits(64):016x}" for _ in range(4)]
    shares = [len(owned(m, members, 256)) for m in members]
    assert min(shares) > 32, shares
