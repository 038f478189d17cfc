"""Which ranges of an archive are merged, which ones count, and which may be removed."""

from __future__ import annotations

from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bufstore.spark.log_archive.manifests import VERSION, Manifest, counting, overlapping, whole
from bufstore.spark.log_archive.small_ranges import removable, to_merge
from bufstore.spark.log_archive.tables_job import _remove


def manifest(start: int, end: int, count: int | None = None, *, created: str = "then", attempt: str = "") -> Manifest:
    return Manifest(
        version=VERSION, stream="s", created=created, epoch=0, subject="t", partitions=8, start=start, end=end,
        count=end - start if count is None else count, checksum="", attempt=attempt,
    )  # fmt: skip


def made_of(run: list[Manifest], at: int) -> Manifest:
    made = manifest(run[0].start, max(m.end for m in run), sum(m.count for m in run), created=run[0].created)
    attempt, merged = f"m{at}-{run[0].name}", tuple(m.name for m in run)
    return msgspec.structs.replace(made, attempt=attempt, merged=merged, merged_us=at)


RANGES = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9), st.sampled_from(["a", "b"])), max_size=8)


@given(RANGES, st.integers(1, 30), st.integers(1, 4), st.randoms())
def test_merging_changes_nothing_that_counts_and_what_it_replaced_may_go_in_any_run(
    ranges: list[tuple[int, int, str]], messages: int, rounds: int, random: Any
) -> None:
    there = [
        manifest(start, start + length, created=created, attempt=str(n))
        for n, (start, length, created) in enumerate(ranges)
    ]

    def held() -> set[tuple[str, int]]:
        return {(m.created, n) for m in counting(there) for n in range(m.start, m.end)}

    everything = held()
    for at in range(1, rounds + 1):
        before = counting(there)
        for run in to_merge(before, messages):
            assert len(run) > 1
            assert sum(m.count for m in run) <= messages
            assert len({m.created for m in run}) == 1
            whole(run)
            there.append(made_of(run, at))
        assert held() == everything
        assert len(counting(there)) <= len(before)
        gone = removable(there, random.randint(0, at))
        for m in gone[: random.randint(0, len(gone))]:  # a removal may be interrupted
            there.remove(m)
            assert held() == everything


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 30), st.integers(0, 9), st.randoms())
def test_what_is_old_goes_with_all_that_it_was_made_of(
    lengths: list[int], messages: int, before_us: int, random: Any
) -> None:
    ends = list(accumulate(lengths, initial=0))
    there = [
        msgspec.structs.replace(manifest(start, end, attempt=str(n)), newest_us=n + 1)
        for n, (start, end) in enumerate(pairwise(ends))
    ]
    for at in (1, 2):
        runs = to_merge(counting(there), messages)
        there += [msgspec.structs.replace(made_of(run, at), newest_us=max(m.newest_us for m in run)) for run in runs]
    was = {n for m in counting(there) for n in range(m.start, m.end)}
    for m in removable(there, random.randint(0, 3), before_us):
        there.remove(m)
    left = counting(there)
    whole(left)
    assert {n for m in left for n in range(m.start, m.end)} <= was
    assert max(m.end for m in left) == ends[-1]
    last = max(left, key=lambda m: (m.end, m.start))
    assert all(m.newest_us >= before_us for m in left if m is not last)


def test_small_neighbours_are_merged_and_others_are_not() -> None:
    a, b, c = manifest(1, 5), manifest(5, 9), manifest(9, 12)
    assert to_merge([c, a, b], 100) == [[a, b, c]]
    assert to_merge([a, b, c], 8) == [[a, b]]
    assert to_merge([a, b, c], 4) == [], "each is as large as it may be, or alone"
    assert to_merge([a, c], 100) == [], "something stands between them"
    assert to_merge([a, manifest(5, 9, created="later")], 100) == []
    assert to_merge([a, msgspec.structs.replace(b, version=2)], 100) == [], "it holds messages of another kind"
    assert to_merge([manifest(1, 9), manifest(3, 5)], 100) == [[manifest(1, 9), manifest(3, 5)]]


@pytest.mark.parametrize("pairs", [[], [(1, 5)], [(1, 5), (5, 9)], [(1, 5), (5, 5), (5, 9)], [(1, 5), (3, 3), (5, 9)]])
def test_what_follows_one_another_does_not_overlap(pairs: list[tuple[int, int]]) -> None:
    assert not overlapping([manifest(*pair) for pair in pairs])


@given(RANGES)
def test_overlapping_is_that_any_two_hold_the_same_sequence(ranges: list[tuple[int, int, str]]) -> None:
    found = [manifest(start, start + length, created=created) for start, length, created in ranges]
    held = [(m.created, n) for m in found for n in range(m.start, m.end)]
    assert overlapping(found) == (len(held) != len(set(held)))


def test_ranges_that_the_table_still_needs_stay() -> None:
    """Regression: the table had a hole, and the entries behind it were shown as parked."""
    there = [msgspec.structs.replace(manifest(n, n + 10), newest_us=1, read_us=1) for n in (0, 10, 20, 30)]
    assert [m.start for m in removable(there, 0, 5)] == [0, 10, 20], "the last stays"
    assert [m.start for m in removable(there, 0, 5, 10)] == [0]
    assert [m.start for m in removable(there, 0, 5, 25)] == [0, 10]


def test_ranges_with_parts_of_entries_that_may_be_in_what_stays_stay() -> None:
    """Regression: an archive was made between a large entry's parts and its group; the entry was in no table then."""
    there = [msgspec.structs.replace(manifest(n, n + 10), newest_us=n + 5, read_us=n + 6) for n in (0, 10, 20, 30, 40)]
    with_parts = [msgspec.structs.replace(m, newest_part_us=m.newest_us - 1, parts_for_us=7) for m in there]
    kept = there[:1] + with_parts[1:2] + there[2:]
    assert [m.start for m in removable(kept, 0, 100)] == [0, 10, 20, 30], "14 + 7 is before 35"
    assert [m.start for m in removable(kept, 0, 100, 30)] == [0, 10, 20], "and before 25"
    assert [m.start for m in removable(kept, 0, 100, 20)] == [0], "but not before 15"
    assert [m.start for m in removable(with_parts, 0, 100)] == [0, 10, 20], "the last that would go keeps its parts"


def test_what_the_file_system_does_not_remove_ends_the_removal() -> None:
    """A store that says no, and raises nothing: manifests stayed, and their ranges went."""
    there = {"a", "b"}

    class Files:
        def delete(self, path: str, recursive: bool) -> bool:
            return path == "c"

        def exists(self, path: str) -> bool:
            return path in there

    path = SimpleNamespace(getFileSystem=lambda _: Files())
    made = SimpleNamespace(Path=lambda text: _Path(text, path))
    hadoop = SimpleNamespace(fs=made)
    context = SimpleNamespace(
        _jvm=SimpleNamespace(org=SimpleNamespace(apache=SimpleNamespace(hadoop=hadoop))),
        _jsc=SimpleNamespace(hadoopConfiguration=lambda: None),
    )
    with pytest.raises(PermissionError, match="cannot remove a"):
        _remove(context, "a")
    _remove(context, "c")
    _remove(context, "gone already")


class _Path(str):
    def __new__(cls, text: str, path: Any) -> _Path:
        made = super().__new__(cls, text)
        made.getFileSystem = path.getFileSystem  # type: ignore[attr-defined]
        return made
