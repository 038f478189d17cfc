"""The position of a reader of the log, the ranges that its tasks read, and what is missing in them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bufstore import ConfigError
from bufstore.buffer.places import ENTRIES_MAX, place
from bufstore.spark import DataLoss
from bufstore.spark.source import log_scan
from bufstore.spark.source.offsets import Holes, Offset, Range, begin_at, check, offset_of, parts_of, split


@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(1, 50))
def test_ranges_cover_all_of_it_once(start: int, length: int, parts: int) -> None:
    whole = Range(start=start, end=start + length, created="then", since=4, until=5)
    found = split(whole, parts)
    assert len(found) <= parts
    assert [p for part in found for p in range(part.start, part.end)] == list(range(start, start + length))
    assert all(part.start < part.end for part in found)
    assert all((part.created, part.since, part.until) == ("then", 4, 5) for part in found)


def test_a_range_is_divided_by_its_size_unless_it_is_said() -> None:
    assert [parts_of(size, exactly=None, at_least=4) for size in (0, 256 << 20, (256 << 20) + 1)] == [4, 4, 5]
    assert parts_of(1 << 40, exactly=3, at_least=4) == 3


@given(st.data())
def test_what_is_lost_is_told_from_what_has_gone(data: st.DataObject) -> None:
    """Groups, parts, proofs and garbage; some were erased, old proofs removed, and the front of the log purged.

    Regression: a message among the groups that is none, behind unread ones that were purged, hid their loss.
    """
    kind_of = st.sampled_from(["group", "part", "proof", "garbage"])
    kinds: list[str] = data.draw(st.lists(kind_of, min_size=1, max_size=20))
    log = dict(enumerate(kinds, 1))
    groups = [n for n, kind in log.items() if kind in ("group", "garbage")]
    # A group names whatever stands before it among the groups; garbage names nothing.
    before = {n: max((g for g in groups if g < n), default=0) if log[n] == "group" else None for n in groups}
    start = data.draw(st.integers(1, len(log) + 1))
    end = data.draw(st.integers(start, len(log) + 1))
    gone = {n for n, kind in log.items() if kind == "proof" and data.draw(st.booleans())}
    erased = set(data.draw(st.lists(st.sampled_from(groups[:-1]), unique=True))) if groups[1:] else set()
    purged = data.draw(st.integers(0, groups[-1] if groups else 0))  # the last group stays
    there = [n for n in log if n not in gone and n not in erased and n >= purged]
    holes = Holes(start)
    for n in there:
        if start <= n < end:
            holes.passed(n)
            if n in before:
                holes.group(n, before[n] if holes.open else 0)
    holes.passed(end)
    behind = next((n for n in there if n in before and n >= end), None)
    if holes.open:
        holes.ended(end, before[behind] if behind is not None else None)
    lost = [n for n in groups if start <= n < end and n not in there and n not in erased]
    first = min(there, default=len(log) + 1)
    found = holes.lost(erased, first)
    assert (found is not None) >= bool(lost), "what is gone is never missed"
    assert lost or found is None or found < first, "and in vain at most where retention overtook the reader"


@given(st.integers(0, 5000), st.integers(0, 5000))
def test_entries_of_a_range_stand_between_its_positions(first: int, last: int) -> None:
    """For a position within a group, the group is read, and entries before the position are left out."""
    start, since = begin_at(str(first), 1, 9, "entries")
    end, until = begin_at(str(last), 1, 9, "entries")
    part = Range(start=start, end=end + bool(until), created="then", since=since, until=until)
    groups = {seq: [place(seq, n) for n in range(ENTRIES_MAX)] for seq in range(1, 6)}
    read = [p for seq in range(part.start, part.end) for p in groups.get(seq, ()) if part.holds(p)]
    assert read == [p for places in groups.values() for p in places if first <= p < last]


def test_a_reader_whose_place_is_gone_is_told() -> None:
    start = Offset(created="then", position=50)
    assert offset_of(start.as_dict()) == start
    within = Offset(created="then", position=50, since=place(50, 3))
    assert offset_of(within.as_dict()) == within
    check(start, "then", 60)
    check(start, "then", 50)
    for created, end, match in (
        ("now", 60, "replaced by a new one"),
        ("then", 49, "position 51200 of .* or startingPosition"),
    ):
        with pytest.raises(DataLoss, match=match):
            check(start, created, end)
    earlier = {"created": "then", "position": 50, "whole_from": 20}
    assert offset_of(earlier) == start, "as earlier versions wrote it"
    with pytest.raises(ConfigError):
        offset_of({"seq": 1})


def test_positions_by_name_and_number() -> None:
    for form in ("entries", "messages"):
        assert [begin_at(w, 3, 9, form) for w in ("earliest", "latest", "0")] == [(3, 0), (9, 0), (1, 0)]
    assert begin_at("7", 3, 9, "messages") == (7, 0)
    assert begin_at(str(place(7, 0)), 3, 9, "entries") == (7, 0)
    assert begin_at(str(place(7, 2)), 3, 9, "entries") == (7, place(7, 2))


@pytest.mark.parametrize(("known", "lost"), [({3}, None), (set(), 3)])
async def test_what_an_old_leader_does_not_know_to_be_erased_is_no_loss(known: set[int], lost: int | None) -> None:
    """Regression: a group that is gone counted as lost when the node that was asked had not heard of its erasure."""

    async def erased(start: int, *, fresh: bool = False) -> set[int]:
        return {start} & known if fresh else set()

    async def look() -> Any:
        return SimpleNamespace(first=1)

    reader: Any = SimpleNamespace(erased=erased, look=look)
    log: Any = SimpleNamespace(first=1)
    holes = Holes(1)
    for sequence, before in (1, 0), (2, 1), (4, 3):
        holes.passed(sequence)
        holes.group(sequence, before)
    assert await log_scan._lost(reader, log, holes, 5) == lost


async def test_an_old_leader_hides_no_loss_by_where_the_log_began_before() -> None:
    """Regression: the last of several looks alone counted, whichever node answered it."""
    firsts = iter([9, 1])

    async def erased(_: int, *, fresh: bool = False) -> set[int]:
        return set()

    async def look() -> Any:
        return SimpleNamespace(first=next(firsts))

    reader: Any = SimpleNamespace(erased=erased, look=look, first_of=nothing)
    holes = Holes(1)
    assert (
        await log_scan._lost(
            reader, cast(Any, SimpleNamespace(first=1, subjects=SimpleNamespace(groups="g"))), holes, 9
        )
        == 1
    )


async def nothing(*_: object) -> None:
    """Nothing stands behind the range."""
