"""What jobs decide, without Spark: ranges, holes, options, folding rows past the log, what an archive goes with."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bufstore import ConfigError, InvalidRecord, Run
from bufstore.buffer import producers
from bufstore.buffer.chain import Watermark
from bufstore.buffer.subjects import first_position
from bufstore.spark import ArchiveOvertaken, DataLoss
from bufstore.spark.log_archive.manifests import Manifest, check_alone, whole
from bufstore.spark.log_archive.restore_job import epoch_after
from bufstore.spark.progress import lag_of
from bufstore.spark.sink.backfill import NeedLog, Prepared, fold, prepare
from bufstore.spark.sink.checkpoint_rows import CheckpointRow
from bufstore.spark.source.offsets import Holes, Offset, Range, begin_at, check, offset_of, split
from bufstore.spark.source.options import read_options
from bufstore.threads.model import decode_message


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


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"nats": "nats://h:0"},
        {"surprise": "1"},
        {"form": "rows"},
        {"columns": "nothing"},
        {"form": "messages", "columns": "kind"},
        {"startingPosition": "soon"},
        {"endingPosition": "earliest"},
        {"startingPosition": "1", "startingTimestamp": "2026-01-01T00:00:00Z"},
        {"startingTimestamp": "2026-01-01"},
        {"startingTimestamp": "yesterday"},
        {"maxMessagesPerTrigger": "0"},
        {"numPartitions": "-1"},
        {"failOnDataLoss": "perhaps"},
        {"threads": "a,b"},
        {"threads": "[]"},
        {"threads": '["a"]', "partitions": "1"},
        {"partitions": "x"},
        {"stream": "a.b"},
        {"user": "me"},
    ],
)
def test_an_option_that_makes_no_sense_is_refused(given: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        read_options(given if "nats" in given or not given else {"nats": "nats://h:4222"} | given)


def test_options_of_any_case_and_no_secret_in_sight() -> None:
    found = read_options(
        {
            "NATS": "nats://me:hush@a:4222, nats://b:4222",
            "startingtimestamp": "1970-01-01T00:00:01.5+00:00",
            "maxbytespertrigger": "9",
            "PATH": "",
        }
    )
    assert (len(found.nats.servers), found.starting_timestamp_ns, found.max_bytes) == (2, 1_500_000_000, 9)
    assert "hush" not in repr(found)


def prepared(number: int, messages: list[Any], *, whole: bool = False, **run: Any) -> Prepared:
    wanted = CheckpointRow("t", whole, messages, Run(run_id="r", thread_id="t", **run))
    (found,) = prepare("t", [(wanted, producers.item("q", number))])
    return found


@given(
    st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 99), max_size=3)), min_size=1, max_size=12),
    st.lists(st.integers(0, 12), max_size=6),
)
def test_rows_folded_in_parts_and_again_are_as_if_written_one_by_one(
    rows: list[tuple[bool, list[int]]], cuts: list[int]
) -> None:
    wanted: list[int] = []
    for is_whole, messages in rows:
        wanted = [*([] if is_whole else wanted), *messages]
    writes = [prepared(n, messages, whole=is_whole) for n, (is_whole, messages) in enumerate(rows)]
    held: list[int] = []
    row, written = Watermark(), 0
    for cut in [*cuts, len(writes)]:  # each try does all of its part again
        found = fold("t", row, row.version, writes[:cut], new_id=cut + 1)
        assert found.written + found.repeated == min(cut, len(writes))
        written += found.written
        if found.change is None:
            assert found.watermark == row
            continue
        held = [*held[: found.change.keep], *(decode_message(m) for m in found.change.messages)]
        row = found.watermark
        assert row.version == len(held)
    assert (held, written) == (wanted, len(writes))


def test_what_the_log_must_judge_goes_there() -> None:
    with pytest.raises(NeedLog):
        fold("t", Watermark(flushed_seq=5, applied_id=1, broken_since=5), 0, [prepared(0, [1])], 7)
    with pytest.raises(NeedLog):
        fold("t", Watermark(), 0, [prepared(0, [1], parent_thread_id="p")], 7)
    with_id = prepared(1, [{"id": "a"}])
    assert fold("t", Watermark(), 0, [with_id], 7).written == 1
    with pytest.raises(NeedLog):
        fold("t", Watermark(applied_id=1, version=2), 2, [with_id], 7)
    with pytest.raises(InvalidRecord):
        prepared(1, [{"id": "a"}, {"id": "a"}])


def manifest(start: int, end: int, *, created: str = "then", epoch: int = 0) -> Manifest:
    return Manifest(
        version=1, stream="s", created=created, epoch=epoch, subject="t", partitions=8, start=start, end=end,
        count=1, checksum="",
    )  # fmt: skip


def test_an_archive_is_whole_and_goes_with_one_generation() -> None:
    whole([manifest(1, 5), manifest(5, 9), manifest(1 << 40, 1 << 41, created="later", epoch=1)])
    with pytest.raises(DataLoss):
        whole([manifest(1, 5), manifest(6, 9)])
    whole([manifest(1, 9), manifest(3, 5), manifest(7, 12), manifest(9, 11)])
    whole([manifest(1, 9), manifest(2, 3, created="later"), manifest(3, 4, created="later"), manifest(9, 11)])
    with pytest.raises(DataLoss, match="gap"):
        whole([manifest(1, 9), manifest(3, 5), manifest(10, 12)])
    ranges = [manifest(1, 5), manifest(5, 9)]
    assert epoch_after(ranges, None, 0) == 1, "a log that is made later begins above"
    assert epoch_after(ranges, "then", 0) == 0, "it is the one that was archived"
    assert epoch_after(ranges, "later", 1) == 1
    with pytest.raises(ConfigError):
        epoch_after(ranges, "later", 0)
    assert first_position(1) > 9


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), min_size=1, max_size=6), st.randoms())
def test_a_gap_is_found_however_ranges_overlap(ranges: list[tuple[int, int]], random: Any) -> None:
    found = [manifest(start, start + length) for start, length in ranges]
    covered = {p for m in found for p in range(m.start, m.end)}
    random.shuffle(found)
    if covered == set(range(min(covered), max(covered) + 1)):
        whole(found)
    else:
        with pytest.raises(DataLoss, match="gap"):
            whole(found)


def test_a_run_is_overtaken_by_what_was_not_there_when_it_began() -> None:
    mine = manifest(5, 9)
    for other in (manifest(5, 9), manifest(1, 6), manifest(8, 20), manifest(6, 7)):
        check_alone([other], [other], mine)
        with pytest.raises(ArchiveOvertaken):
            check_alone([], [other], mine)
    for other in (manifest(1, 5), manifest(9, 20), manifest(5, 9, created="later")):
        check_alone([], [other], mine)


def test_lag_is_told_of_logs_only() -> None:
    def at(position: int) -> str:
        return f'{{"created":"c","position":{position},"whole_from":0}}'

    assert lag_of([(at(5), at(9)), ("{}", "{}"), (None, None)]) == 4
    assert lag_of([("0", "5")]) is None
