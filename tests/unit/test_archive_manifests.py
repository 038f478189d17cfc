"""What an archive holds: gaps, overlaps, and the log that it belongs to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from bufstore import ConfigError, LogConfig, NatsConfig
from bufstore.buffer.places import first_place
from bufstore.buffer.subjects import first_position, first_sequence
from bufstore.buffer.target import Target
from bufstore.nats.ranges import LogState
from bufstore.spark import ArchiveOvertaken, DataLoss, Deployment
from bufstore.spark.connection_options import connection_options
from bufstore.spark.log_archive import archive_job
from bufstore.spark.log_archive.manifests import Manifest, check_alone, check_begin, check_numbers, expired, whole
from bufstore.spark.log_archive.restore_job import epoch_after


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


def test_a_log_that_ends_before_its_archive_has_lost_something() -> None:
    """Regression: archiving waited for the positions to come anew; what got them meanwhile was never archived."""
    manifests = [manifest(1, 5), manifest(5, 9)]

    def log(end: int, created: str = "then") -> LogState:
        return LogState(LogConfig(), created, 0, 1, end, 0, Target("threads", "postgres", "x"))

    assert archive_job._begin(manifests, log(9), 0) == archive_job._begin(manifests, log(12), 0) == 9
    with pytest.raises(DataLoss, match="lost its end"):
        archive_job._begin(manifests, log(8), 0)
    with pytest.raises(DataLoss, match="no longer exists"):
        archive_job._begin(manifests, msgspec.structs.replace(log(20, "later"), first=10), 0)


def test_an_archive_begins_anew_only_where_nothing_that_another_has_is_gone() -> None:
    """Regression: where the folder was not mounted, an archive began anew, and what it took over was then purged."""

    def log(first: int, epoch: int = 0) -> LogState:
        return LogState(LogConfig(), "then", epoch, first, first + 9, 0, Target("threads", "postgres", "x"))

    assert archive_job._begin([], log(7), 0) == archive_job._begin([], log(7), first_place(6)) == 7, "nobody has it"
    assert archive_job._begin([], log(1), first_place(8)) == 1, "all is there still"
    begun_anew = first_sequence(2)
    assert archive_job._begin([], log(begun_anew, 2), first_place(begun_anew + 3)) == begun_anew
    for archived in (first_place(7), first_place(9)):
        with pytest.raises(ConfigError, match=r"is it mounted.*start=7"):
            archive_job._begin([], log(7), archived)


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


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9), st.sampled_from(["a", "b", "c"])), max_size=6),
    st.integers(0, 30),
)
def test_two_streams_in_one_archive_have_no_number_in_common(ranges: list[tuple[int, int, str]], begin: int) -> None:
    found = [manifest(start, start + length, created=created) for start, length, created in ranges]
    owners: dict[int, set[str]] = {}
    for m in found:
        for number in range(m.start, m.end):
            owners.setdefault(number, set()).add(m.created)
    if all(len(streams) == 1 for streams in owners.values()):
        check_numbers(found)
    else:
        with pytest.raises(DataLoss, match="two streams"):
            check_numbers(found)
    if any(begin <= number for number, streams in owners.items() if streams != {"a"}):
        with pytest.raises(ConfigError, match="another folder"):
            check_begin(found, "a", begin)
    else:
        check_begin(found, "a", begin)


def stored_by(manifest_: Manifest, newest_us: int) -> Manifest:
    return msgspec.structs.replace(manifest_, newest_us=newest_us)


RANGES = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9), st.integers(0, 5)), min_size=1, max_size=6)


@given(RANGES, st.integers(0, 6))
def test_what_stays_of_an_archive_is_whole_and_ends_where_it_ended(
    ranges: list[tuple[int, int, int]], before_us: int
) -> None:
    found = [stored_by(manifest(start, start + length), newest) for start, length, newest in ranges]
    try:
        whole(found)
    except DataLoss:
        reject()
    gone = expired(found, before_us)
    assert all(0 < m.newest_us < before_us for m in gone)
    left = list(found)
    for m in gone:
        left.remove(m)
    assert max(m.end for m in left) == max(m.end for m in found)
    whole(left)


def test_a_range_within_a_larger_one_expires_before_it() -> None:
    larger, within = stored_by(manifest(1, 9), 5), stored_by(manifest(3, 5), 5)
    assert expired([larger, within], 6) == [within]
    assert expired([larger, within], 5) == []
    read_later = msgspec.structs.replace(within, read_us=7)
    assert expired([larger, read_later], 7) == []
    assert expired([larger, read_later], 8) == [read_later]
    assert expired([stored_by(manifest(1, 9), 0), stored_by(manifest(9, 12), 1), manifest(12, 13)], 6) == []


def test_a_range_without_messages_keeps_none_behind_it() -> None:
    """Such a range comes from an hour in which only proofs of leadership were written to the log."""
    nothing = msgspec.structs.replace(manifest(9, 12), count=0)
    old, newer, last = stored_by(manifest(1, 9), 5), stored_by(manifest(12, 15), 5), stored_by(manifest(15, 16), 5)
    assert expired([old, nothing, newer, last], 6) == [old, nothing, newer]


def test_a_run_is_overtaken_by_what_was_not_there_when_it_began() -> None:
    mine = manifest(5, 9)
    for other in (manifest(5, 9), manifest(1, 6), manifest(8, 20), manifest(6, 7)):
        check_alone([other], [other], mine)
        with pytest.raises(ArchiveOvertaken):
            check_alone([], [other], mine)
    for other in (manifest(1, 5), manifest(9, 20), manifest(5, 9, created="later")):
        check_alone([], [other], mine)


def test_the_job_that_archives_reaches_the_log_as_its_deployment_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each core of the cluster reads a part, however many cores the driver's machine has."""
    given: dict[str, str] = {}

    class Reader:
        def format(self, name: str) -> Reader:
            assert name == "threadlog"
            return self

        def options(self, **options: str) -> Reader:
            given.update(options)
            return self

        def load(self) -> None: ...

    server = NatsConfig(servers=("tls://h:4222",), api_prefix="$JS.other.API", tls_hostname="nats.example", token="t")
    deployment = Deployment(nats=server, postgres="postgresql://h/db", stream="S")
    monkeypatch.setattr(archive_job, "cores_of", lambda spark: 96)
    spark: Any = SimpleNamespace(read=Reader())
    archive_job._read(spark, deployment, manifest(5, 9), earliest=False, given=False, tasks=None)
    assert connection_options(server).items() <= given.items()
    assert given["apiPrefix"] == "$JS.other.API"
    assert given["tlsHostname"] == "nats.example"
    assert {name: given.get(name) for name in ("stream", "startingPosition", "endingPosition", "minPartitions")} == {
        "stream": "S", "startingPosition": "5", "endingPosition": "9", "minPartitions": "96",
    }  # fmt: skip
