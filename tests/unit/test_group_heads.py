"""What processes know of the log's groups, whoever wrote them and however late they look (`...groups.heads`)."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bufstore.buffer.groups.group import Draft, Group, NewEntry, hash_of
from bufstore.buffer.groups.heads import Gap, Heads
from bufstore.buffer.places import first_place, group_of, place
from thorough import examples

THREADS = [f"t{n}" for n in range(5)]
PARTITIONS = 3
_ids = itertools.count(1)


def partition_of(thread_id: str) -> int:
    return int(thread_id[1:]) % PARTITIONS


class Oracle:
    """A log of groups that are never purged, and the right answers to all questions about it."""

    def __init__(self, chance: random.Random, groups: int) -> None:
        self.groups: list[Group] = []
        self.entries: list[tuple[int, str]] = []
        seq, before, before_id, purged = 0, 0, 0, 0
        for _ in range(groups):
            seq += chance.choice((1, 1, 1, 2, 5))  # parts and other messages are stored between groups
            threads = [chance.choice(THREADS) for _ in range(chance.choice((0, 1, 2, 4)))]
            if chance.random() < 0.2:
                purged = max(purged, first_place(max(0, seq - chance.randint(3, 9))))
            new = [NewEntry(t, partition_of(t), 0, None, b"") for t in threads]
            group = Draft(next(_ids), new).stored(seq, before_id, before, purged)
            self.groups.append(group)
            self.entries += [(place(seq, n), t) for n, t in enumerate(threads)]
            before, before_id = seq, group.id

    def size(self, seq: int) -> int:
        """The bytes of the group with this sequence."""
        return 100 * seq

    def bytes_of(self, seq: int) -> float:
        """The bytes of each of the group's entries."""
        return self.size(seq) / len(next(g.records for g in self.groups if g.seq == seq))

    def head(self, thread_id: str, up_to: int, floor: int = 0) -> int:
        return max((at for at, t in self.entries if t == thread_id and floor <= at < first_place(up_to + 1)), default=0)

    def end(self, partition: int, up_to: int, floor: int) -> int:
        return max(self.head(t, up_to, floor) for t in THREADS if partition_of(t) == partition)

    def floors(self, up_to: int) -> int:
        return max((g.purged for g in self.groups if g.seq <= up_to), default=0)


def check(heads: Heads, oracle: Oracle) -> None:
    """Check that all answers about entries above the floor are right."""
    floor = max(heads.floor, oracle.floors(heads.seen))
    for thread_id in THREADS:
        hash_, truth = hash_of(thread_id), oracle.head(thread_id, heads.seen)
        assert heads.head(hash_) == (truth if truth >= floor else 0)
        assert heads.admits(hash_, 0) == (not truth or truth < floor)
        assert not heads.admits(hash_, truth + 1 << 12 | first_place(heads.seen + 5))
        for at, t in oracle.entries:
            if at >= first_place(heads.seen + 1):
                continue
            if at >= heads.floor:
                assert heads.admits(hash_, at) == (at == truth and at >= floor)
            elif (t == thread_id and truth >= floor) or at < oracle.floors(heads.seen):
                assert not heads.admits(hash_, at)
    for partition in range(PARTITIONS):
        assert heads.end(partition) == oracle.end(partition, heads.seen, heads.floor)
    above = [at for at, _ in oracle.entries if first_place(heads.seen + 1) > at >= first_place(group_of(heads.floor))]
    assert heads.entries == len(above)
    for position in (0, heads.floor, *above[:3], *above[-2:]):
        # Entries of partition 0 count above the position; those of the other partitions all count.
        counted = [at for at in above if at > position or partition_of(dict(oracle.entries)[at])]
        assert heads.above({0: position}) == (
            Counter(partition_of(dict(oracle.entries)[at]) for at in counted),
            round(sum(oracle.bytes_of(group_of(at)) for at in counted)),
        )


def start_at(oracle: Oracle, floor: int, heads: Heads) -> None:
    """Start as `Tail` does."""
    last = max((g.seq for g in oracle.groups if g.seq < group_of(floor)), default=0)
    known = {g.seq: g.id for g in oracle.groups}
    if oracle.groups and oracle.groups[-1].seq == last:
        heads.start(floor, last, known[last])
    else:
        heads.start(floor, max(group_of(floor) - 1, 0), None)


@given(st.randoms(use_true_random=False), st.integers(0, 14))
@examples(150)
def test_everybody_knows_the_same_however_he_sees_it(chance: random.Random, count: int) -> None:
    oracle = Oracle(chance, count)
    end = oracle.groups[-1].seq if oracle.groups else 0
    heads = Heads()
    for _ in range(3):
        if chance.random() < 0.5:  # else the same process begins anew
            heads = Heads()
        # A process may start at any floor.
        floor = first_place(chance.randint(0, end + 1))
        start_at(oracle, floor, heads)
        for group in oracle.groups:
            if group.seq < group_of(floor):
                continue
            if chance.random() < 0.3:  # a group that was seen comes again
                again = chance.choice([g for g in oracle.groups if g.seq <= max(heads.seen, group.seq)])
                if again.seq <= heads.seen:
                    assert heads.observe(again) is False
            assert heads.observe(group, oracle.size(group.seq)) is True
            heads.purged = max(heads.purged, oracle.floors(group.seq))  # groups below its floor say so, too
            check(heads, oracle)
            if chance.random() < 0.4:
                heads.forget(first_place(chance.randint(0, heads.seen + 1)))
                check(heads, oracle)


@given(st.randoms(use_true_random=False), st.integers(3, 12))
@examples(200)
def test_a_missing_group_is_noticed(chance: random.Random, count: int) -> None:
    oracle = Oracle(chance, count)
    heads = Heads()
    heads.start(0, 0, 0)
    missing = chance.randrange(0, count - 1)
    for number, group in enumerate(oracle.groups):
        if number == missing:
            continue
        if number == missing + 1:
            before = heads.seen, heads.seen_id
            with pytest.raises(Gap):
                heads.observe(group)
            assert (heads.seen, heads.seen_id) == before
            return
        heads.observe(group)


@given(st.randoms(use_true_random=False), st.integers(2, 12))
@examples(200)
def test_a_log_that_went_back_is_noticed(chance: random.Random, count: int) -> None:
    """Others write groups with the same sequences and other ids."""
    oracle = Oracle(chance, count)
    kept = chance.randrange(0, count - 1)
    heads = Heads()
    heads.start(0, 0, 0)
    for group in oracle.groups[: chance.randint(kept + 1, count)]:
        heads.observe(group)
    at = oracle.groups[kept - 1].seq if kept else 0
    before_id = oracle.groups[kept - 1].id if kept else 0
    noticed = False
    for _ in range(40):
        group = Draft(next(_ids), []).stored(at + 1, before_id, at, 0)
        at, before_id = group.seq, group.id
        try:
            noticed = not heads.observe(group) and noticed
        except Gap:
            noticed = True
            break
    assert noticed


def test_what_is_no_group_holds_nothing_and_hides_nothing() -> None:
    heads = Heads()
    heads.start(0, 0, 0)
    first = Draft(11, [NewEntry("t0", 0, 0, None, b"")]).stored(1, 0, 0, 0)
    heads.observe(first)
    heads.skip(2)
    heads.skip(2)
    behind = Draft(12, [NewEntry("t1", 1, 0, None, b"")]).stored(4, 0, 2, 0)
    heads.observe(behind)
    assert (heads.head(hash_of("t0")), heads.head(hash_of("t1"))) == (place(1, 0), place(4, 0))
    with pytest.raises(Gap):
        heads.observe(Draft(13, []).stored(6, 12, 2, 0))
    with pytest.raises(Gap):
        heads.observe(Draft(13, []).stored(6, 11, 4, 0))


@given(st.randoms(use_true_random=False), st.integers(1, 30))
@examples(200)
def test_before_others_writing_is_forgotten_it_is_told(chance: random.Random, count: int) -> None:
    """As in `Forgetting.forget`: a process that drops each memory that is contradicted never builds on an old entry."""
    oracle = Oracle(chance, count)
    heads = Heads()
    heads.start(0, 0, 0)
    remembered: dict[str, int] = {}
    for group in oracle.groups:
        heads.observe(group)
        if chance.random() < 0.5:
            thread_id = chance.choice(THREADS)
            remembered[thread_id] = oracle.head(thread_id, heads.seen)
        if chance.random() < 0.5:
            floor = first_place(chance.randint(0, heads.seen + 1))
            if heads.forgets(floor):
                for thread_id, at in list(remembered.items()):
                    if heads.remembered(hash_of(thread_id)) not in (0, at):
                        del remembered[thread_id]
            heads.forget(floor)
        for thread_id, at in remembered.items():
            if at and heads.admits(hash_of(thread_id), at):
                assert at == oracle.head(thread_id, heads.seen)


@given(st.randoms(use_true_random=False))
@examples(100)
def test_parts_are_needed_as_long_as_groups_that_name_them_stay(chance: random.Random) -> None:
    heads = Heads()
    began = chance.randint(0, 3)
    heads.start(first_place(began + 1), began, None)
    truth: dict[int, int] = {}
    seq, before, before_id = began, began, 0
    for _ in range(chance.randint(0, 12)):
        seq += chance.choice((1, 2, 4))
        parts = chance.choice((0, 0, chance.randint(1, seq)))
        group = Group(seq, seq, before_id, before, parts if parts < seq else 0, 0, [])
        heads.observe(group)
        truth[seq] = group.parts
        before, before_id = seq, seq
    asked = 0
    for _ in range(5):
        asked = max(asked, chance.randint(0, seq + 1))
        if asked <= began:
            assert heads.first_needed(asked) is None
        else:
            assert heads.first_needed(asked) == min([asked, *(p for s, p in truth.items() if s >= asked and p)])


@given(st.randoms(use_true_random=False), st.integers(1, 30))
def test_the_last_entries_between_two_groups_are_known_by_partition(chance: random.Random, count: int) -> None:
    oracle, heads = Oracle(chance, count), Heads()
    heads.start(0, 0, 0)
    for group in oracle.groups:
        heads.observe(group)
    behind, seen = sorted(chance.choices([0, *(group.seq for group in oracle.groups)], k=2))
    ends = {p: oracle.end(p, seen, first_place(behind + 1)) for p in range(PARTITIONS)}
    assert heads.last_between(behind, seen) == {p: at for p, at in ends.items() if at}


def test_counting_asks_of_partitions_not_of_entries() -> None:
    """A statistic must not block the event loop for the time that it takes to look through a large backlog."""
    heads = Heads()
    heads.start(0, 0, 0)
    new = [NewEntry(THREADS[n % 5], partition_of(THREADS[n % 5]), 0, None, b"") for n in range(500)]
    before_id = 0
    for seq in range(1, 21):
        group = Draft(seq, new).stored(seq, before_id, seq - 1, 0)
        heads.observe(group, 500)
        before_id = group.id
    asked = list[int]()

    class Positions(dict[int, int]):
        def get(self, partition: int, default: Any = None) -> Any:
            asked.append(partition)
            return super().get(partition, default)

    count, size = heads.above(Positions({0: place(20, 499)}))
    assert (count, size) == ({1: 4000, 2: 2000}, 6000)
    assert sorted(asked) == list(range(PARTITIONS))


def test_memory_goes_as_the_floor_rises() -> None:
    heads = Heads()
    heads.start(0, 0, 0)
    before_id = 0
    for seq in range(1, 2001):
        group = Draft(seq, [NewEntry(f"t{seq}", 0, 0, None, b"")]).stored(seq, before_id, seq - 1, 0)
        heads.observe(group)
        before_id = group.id
        heads.forget(first_place(max(0, seq - 50)))
    remembered = sum(heads.remembered(hash_of(f"t{n}")) > 0 for n in range(1, 2001))
    assert 50 <= remembered <= 120
    assert heads.entries <= 51
