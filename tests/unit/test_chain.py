"""The rules of the chain, one by one: which entries may be applied."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bufstore.buffer import recent_keys
from bufstore.buffer.chain import Watermark, counts, plan, superseded
from bufstore.buffer.entry import Base, Entry, Item, Malformed, StoredEntry
from thorough import examples


def at(
    seq: int, id_: int, prev: int = 0, base: Base = Base.CHAINED, *, whole: bool = False, seen: int = 0
) -> StoredEntry:
    key = recent_keys.item_of(id_)
    entry = Entry(id=id_, prev_id=prev, base=base, seen=seen, version=seq, self_contained=whole, keys=key, payload=b"")
    return StoredEntry("t", seq, entry)


def malformed(seq: int) -> Malformed:
    return Malformed("s", seq, (), "damage", "t")


ROW = Watermark(flushed_seq=10, applied_id=100, version=3)


def applied(todo: object) -> list[int]:
    return [e.seq for e in todo.apply]  # type: ignore[attr-defined]


def parked(todo: object) -> list[int]:
    return [p.item.seq for p in todo.park]  # type: ignore[attr-defined]


def test_a_chain_is_applied_in_order_whatever_the_order_it_came_in() -> None:
    todo = plan(ROW, [at(14, 103, 102), at(12, 101, 100), at(13, 102, 101), at(12, 101, 100)], complete=False)
    assert applied(todo) == [12, 13, 14]
    assert (todo.watermark.flushed_seq, todo.watermark.applied_id) == (14, 103)


def test_what_is_at_or_below_the_watermark_is_nothing_new() -> None:
    todo = plan(ROW, [at(10, 100, 99), at(9, 99, 98), malformed(8)], complete=False)
    assert (applied(todo), parked(todo), todo.watermark) == ([], [], ROW)


def test_a_missing_predecessor_is_a_gap_even_behind_entries_that_fit() -> None:
    todo = plan(ROW, [at(11, 101, 100), at(13, 103, 102)], complete=False)
    assert todo.gap_before == 13


@pytest.mark.parametrize("whole", [True, False])
def test_a_gap_is_looked_for_before_a_snapshot_too(whole: bool) -> None:
    assert plan(ROW, [at(13, 103, 102, whole=whole)], complete=False).gap_before == 13


def test_a_predecessor_that_is_nowhere_parks_what_builds_on_it() -> None:
    todo = plan(ROW, [at(13, 103, 102), at(14, 104, 103)], complete=True)
    assert (applied(todo), parked(todo)) == ([], [13, 14])
    assert todo.watermark == Watermark(flushed_seq=14, applied_id=100, version=3, broken_since=13)


def test_a_snapshot_heals() -> None:
    todo = plan(ROW, [malformed(11), at(12, 102, 999), at(13, 103, 102, whole=True), at(14, 104, 103)], complete=True)
    assert (applied(todo), parked(todo)) == ([13, 14], [11, 12])
    assert todo.watermark.broken_since is None


def test_while_broken_the_first_position_is_remembered() -> None:
    todo = plan(ROW, [malformed(11), malformed(12)], complete=False)
    assert todo.watermark.broken_since == 11
    assert plan(todo.watermark, [malformed(15)], complete=False).watermark.broken_since == 11


def test_poison_parks_alone_and_takes_what_builds_on_it_along() -> None:
    items = [at(11, 101, 100), at(12, 102, 101), at(13, 103, 102), at(14, 104, 103, whole=True)]
    todo = plan(ROW, items, complete=True, poison={102: "poison"})
    assert (applied(todo), parked(todo)) == ([11, 14], [12, 13])
    assert todo.watermark.broken_since is None


def test_a_snapshot_that_is_poison_does_not_heal() -> None:
    todo = plan(ROW, [at(11, 101, 100, whole=True)], complete=True, poison={101: "poison"})
    assert (parked(todo), todo.watermark.broken_since, todo.watermark.applied_id) == ([11], 11, 100)


@pytest.mark.parametrize("base", [Base.NONE, Base.UNKNOWN, Base.STORED])
@pytest.mark.parametrize(("flushed", "late"), [(0, False), (10, False), (11, True)])
def test_an_entry_that_expected_nothing_is_superseded_once_the_thread_moved_on(
    base: Base, flushed: int, late: bool
) -> None:
    watermark = Watermark(flushed_seq=flushed, applied_id=7 if flushed else 0)
    late = late or (base is Base.NONE and flushed > 0)
    entry = at(20, 5, 7 if base is Base.STORED and flushed else 0, base, whole=base is Base.UNKNOWN, seen=10)
    assert superseded(entry, watermark) is late
    todo = plan(watermark, [entry], complete=True)
    assert applied(todo) == ([] if late else [20])
    assert todo.watermark.flushed_seq == 20
    assert todo.park == []
    parking = plan(watermark, [entry], complete=True, poison={5: "poison"})
    for before_or_after in (watermark, todo.watermark, parking.watermark):
        assert counts(entry, before_or_after, None) is not late


@pytest.mark.parametrize(("seen", "late"), [(10, False), (9, True)])
def test_a_thread_is_made_anew_on_a_tombstone_that_was_buried_and_is_there_again(seen: int, late: bool) -> None:
    """Postgres fails over to a copy from before the burial; the writer found no row, and says so."""
    tombstone = Watermark(flushed_seq=10, applied_id=7, gone=True)
    items = [at(20, 8, 0, Base.NONE, seen=seen), at(21, 9, 8)]
    todo = plan(tombstone, items, complete=False)
    assert (applied(todo), parked(todo)) == (([], [21]) if late else ([20, 21], []))
    assert superseded(items[0], tombstone) is late
    assert counts(items[0], tombstone, None) is not late


def test_a_chained_entry_is_never_superseded() -> None:
    assert not superseded(at(20, 5, 7), Watermark(flushed_seq=15, applied_id=8))


def test_a_snapshot_on_a_superseded_entry_is_applied_and_a_delta_on_it_is_not() -> None:
    late = at(20, 5, 0, Base.UNKNOWN, whole=True, seen=3)
    assert applied(plan(ROW, [late, at(21, 6, 5, whole=True)], complete=False)) == [21]
    todo = plan(ROW, [late, at(21, 6, 5)], complete=False)
    assert (applied(todo), parked(todo)) == ([], [21])
    assert applied(plan(ROW, [late, at(21, 6, 100)], complete=False)) == [21], "a delta on what Postgres holds is"


def test_what_is_parked_behind_something_parked_is_not_said_to_have_been_passed_over() -> None:
    """Regression: the writer of a whole list that is in quarantine was told that nothing is stored."""
    broken = plan(ROW, [malformed(15)], complete=True).watermark
    entry = at(20, 101, 100, Base.STORED, whole=True, seen=15)
    todo = plan(broken, [entry], complete=True, poison={101: "poison"})
    assert (parked(todo), todo.watermark.broken_since) == ([20], 15)
    assert counts(entry, todo.watermark, None) is None
    late = at(20, 101, 100, Base.STORED, whole=True, seen=14)
    assert counts(late, plan(broken, [late], complete=True).watermark, None) is False


@st.composite
def logs(draw: st.DrawFn) -> tuple[list[Item], set[int]]:
    """A thread's items in the log's order, and the ids of those that are poison."""
    items: list[Item] = []
    for n in range(1, draw(st.integers(1, 6)) + 1):
        base = draw(st.sampled_from([*Base, None]))
        if base is None:
            items.append(malformed(10 * n))
            continue
        prev, seen = draw(st.integers(0, n - 1)), draw(st.integers(0, 10 * n - 1))
        items.append(at(10 * n, n, prev, base, whole=draw(st.booleans()), seen=seen))
    return items, draw(st.sets(st.integers(1, 6)))


@examples(300)
@given(logs())
def test_a_writer_is_told_what_a_flush_makes_of_its_entry(log: tuple[list[Item], set[int]]) -> None:
    """At each flush from the one on that is before the entry: what expects nothing lands behind what is flushed."""
    items, poison = log
    known = dict.fromkeys(poison, "poison")
    todo = plan(Watermark(), items, complete=True, poison=known)
    stored = {*applied(todo), *parked(todo)}
    for n, entry in enumerate(items):
        if isinstance(entry, Malformed):
            continue
        behind = items[n + 1] if n + 1 < len(items) else None
        for flushed in range(n, len(items) + 1):
            row = plan(Watermark(), items[:flushed], complete=True, poison=known).watermark
            said = counts(entry, row, behind)
            assert said is None or said is (entry.seq in stored)
            assert said is not None or flushed > n, "what is not flushed can be told"
