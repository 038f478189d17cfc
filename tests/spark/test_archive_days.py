"""Days in an archive's table: the folders of its rows, and how far back a thread's earlier state is looked up."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bufstore import Run
from bufstore.buffer.entry import Base, Entry, encode
from bufstore.buffer.groups.group import Draft, NewEntry
from bufstore.buffer.subjects import Subjects
from bufstore.spark.analytics import entries
from bufstore.spark.log_archive.manifests import VERSION, Manifest, write_manifest, write_range
from bufstore.spark.log_archive.tables_job import tabulate
from bufstore.threads.model import RunSave, encode_messages, encode_run
from bufstore.threads.payload import Payload, encode_payload

SUBJECTS = Subjects("thread", 4)
NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)
_COLUMNS = "position bigint, stored_at timestamp, subject string, header string, body binary"


class Stored(NamedTuple):
    """An entry in a group of its own."""

    thread_id: str
    at: datetime
    #: The entry's id, and the id of the entry that it builds on.
    id: int
    prev_id: int = 0
    sound: bool = True


def put(spark: Any, path: Path, start: int, stored: Sequence[Stored]) -> None:
    """Write a range of an archive."""
    rows = []
    for seq, one in enumerate(stored, start):
        run = Run(run_id="r", thread_id=one.thread_id)
        payload = encode_payload(
            Payload(0, encode_messages([{"n": seq}]), encode_run(run), RunSave("r", run.status, None))
        )
        entry = Entry(
            id=one.id, prev_id=one.prev_id, base=Base.CHAINED if one.prev_id else Base.NONE, seen=0, version=1,
            self_contained=False, keys=b"", payload=payload if one.sound else b"\xff",
        )  # fmt: skip
        header, body = encode(entry)
        draft = Draft(seq, [NewEntry(one.thread_id, SUBJECTS.partition(one.thread_id), 0, header, body, False)])
        rows.append((seq, one.at, SUBJECTS.groups, draft.header(seq - 1, seq - 1, 0), draft.body))
    manifest = Manifest(
        version=VERSION, stream="threads", created="then", epoch=1, subject=SUBJECTS.prefix, partitions=4,
        start=start, end=start + len(rows), count=0, checksum="", attempt="a",
    )  # fmt: skip
    write_manifest(spark, str(path), write_range(spark.createDataFrame(rows, _COLUMNS), str(path), manifest))


@pytest.fixture
def far_east(spark: Any) -> Iterator[None]:
    """Set the session to a time zone in which it is already tomorrow at noon."""
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "Pacific/Kiritimati")
    yield
    spark.conf.set("spark.sql.session.timeZone", before)


@pytest.mark.long  # several archives
@pytest.mark.usefixtures("far_east")
async def test_a_table_has_a_folder_for_each_day_of_utc(spark: Any, tmp_path: Path) -> None:
    times = [NOON.replace(hour=0), NOON, NOON.replace(hour=23, minute=59), NOON + timedelta(hours=12)]

    def tabulated() -> list[Any]:
        put(spark, tmp_path, 1, [Stored(f"t{n}", at, n + 1) for n, at in enumerate(times)])
        tabulate(spark, str(tmp_path))
        found = entries(spark, str(tmp_path)).where("date = '2026-11-20'")
        return list(found.collect())

    first_day = await asyncio.to_thread(tabulated)
    assert {row.thread_id for row in first_day} == {"t0", "t1", "t2"}
    days = [folder.name for folder in (tmp_path / "tables" / "entries").glob("part=*/date=*")]
    assert sorted(days) == ["date=2026-11-20", "date=2026-11-21"]


@pytest.mark.long
async def test_what_is_known_of_a_thread_is_looked_for_in_seven_days(spark: Any, tmp_path: Path) -> None:
    """Two threads begin with an entry that cannot be applied, followed later by one that builds on it."""
    week = timedelta(days=7)
    earlier = [
        Stored("before", NOON - week - timedelta(seconds=1), 1, sound=False),
        Stored("within", NOON - week, 2, sound=False),
        Stored("newest", NOON, 3),
    ]
    later = [Stored("before", NOON + week, 4, 1), Stored("within", NOON + week, 5, 2)]

    def tabulated() -> list[Any]:
        for start, stored in ((1, earlier), (4, later)):
            put(spark, tmp_path, start, stored)
            tabulate(spark, str(tmp_path))
        return list(entries(spark, str(tmp_path)).orderBy("position").collect())

    found = await asyncio.to_thread(tabulated)
    assert [(row.thread_id, row.effect) for row in found] == [
        ("before", "parked"),
        ("within", "parked"),
        ("newest", "applied"),
        ("before", "applied"),  # as at the beginning of an archive
        ("within", "parked"),
    ]
