"""Where a reader of the log stands, which ranges its tasks read, and what is missing in them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bufstore import ConfigError
from bufstore.spark import DataLoss
from bufstore.spark.source.offsets import Holes, Offset, Range, begin_at, check, offset_of, split


@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(1, 50))
def test_ranges_cover_all_of_it_once(start: int, length: int, parts: int) -> None:
    found = split(start, start + length, parts, created="then", whole_from=3)
    assert len(found) <= parts
    assert [p for part in found for p in range(part.start, part.end)] == list(range(start, start + length))
    assert all(part.start < part.end and part.whole_from == 3 and part.created == "then" for part in found)


@given(st.sets(st.integers(10, 40)), st.integers(10, 40), st.integers(1, 7))
def test_holes_are_found_however_the_messages_come(gone: set[int], whole_from: int, size: int) -> None:
    part = Range(start=10, end=41, created="then", whole_from=whole_from)
    there = [p for p in range(10, 41) if p not in gone]
    holes = Holes(part)
    for i in range(0, len(there), size):
        holes.passed(there[i : i + size])
    holes.passed([part.end])
    missed = sorted(p for p in gone if p >= whole_from)
    assert [p for start, end in holes.found for p in range(start, end)] == missed
    assert holes.lost((), 0, 0) == min(missed, default=None), "without barriers each hole is a loss"
    assert holes.lost(missed[:2], 0, 0) == (missed[2:] or [None])[0], "what was erased is none"


@given(st.data())
def test_holes_of_barriers_are_told_from_those_of_a_purge(data: st.DataObject) -> None:
    """Partitions get their messages when they like, and are purged up to a place of their own."""
    subjects: list[Any] = data.draw(st.lists(st.sampled_from([0, 1, 2, "barrier"]), min_size=1, max_size=20))
    old = data.draw(st.booleans())  # whether barriers were written
    log = {n: s for n, s in enumerate(subjects, 1) if old or s != "barrier"}
    log = dict(enumerate(log.values(), 1))
    barriers = [n for n, s in log.items() if s == "barrier"]
    begun_at = data.draw(st.integers(1, len(log) + 1))
    purged = {}
    for p in data.draw(st.sets(st.sampled_from([p for p in log.values() if p != "barrier"] or [0]))):
        # What a purge is up to stays, so each partition that was purged holds something.
        purged[p] = data.draw(st.sampled_from([n for n, s in log.items() if s == p] or [0]))
    there = {n: s for n, s in log.items() if (n == barriers[-1] if s == "barrier" else n >= purged.get(s, 0))}
    firsts = [min((n for n, s in there.items() if s == p), default=0) for p in range(3)]
    holes = Holes(Range(start=begun_at, end=len(log) + 1, created="then", whole_from=0))
    holes.passed([*(n for n in there if n >= begun_at), len(log) + 1])
    found = holes.lost((), max(barriers, default=0), max(firsts))
    lost = [n for n in log if n >= begun_at and n not in there and log[n] != "barrier"]
    if not old:
        assert found == min(lost, default=None), "nothing but what was removed leaves a hole"
    else:
        assert (found is not None) >= bool(lost), "what is gone is never missed"
        assert found is None or found < max(firsts) or found in lost


def test_a_reader_whose_place_is_gone_is_told() -> None:
    start = Offset(created="then", position=50, whole_from=20)
    assert offset_of(start.as_dict()) == start
    check(start, "then", 60)
    check(start, "then", 50)
    for created, end, match in (("now", 60, "replaced by a new one"), ("then", 49, "went back")):
        with pytest.raises(DataLoss, match=match):
            check(start, created, end)
    with pytest.raises(ConfigError):
        offset_of({"seq": 1})


def test_positions_by_name_and_number() -> None:
    assert [begin_at(w, 3, 9) for w in ("earliest", "latest", "7")] == [3, 9, 7]
    with pytest.raises(ConfigError):
        begin_at("soon", 3, 9)
