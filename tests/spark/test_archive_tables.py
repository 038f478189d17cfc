"""The table of an archive holds each written entry once, with and without the log behind it."""

from __future__ import annotations

import asyncio
import secrets
import shutil
from collections import Counter
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyspark.sql.types import TimestampType

from bufstore import ConfigError, Run, RunStatus
from bufstore.buffer.subjects import Subjects
from bufstore.spark import archive, restore
from bufstore.spark.analytics import activity, entries, messages, runs, threads
from bufstore.spark.log_archive import archive_job, tables_job
from bufstore.spark.log_archive.manifests import messages_of
from bufstore.spark.log_archive.tables_job import compact, expire, tabulate
from conftest import Deployment
from helpers import fresh, run_of
from spark.jobs import in_postgres, purge, read_options, where, write, write_together


async def collected(df: Any) -> list[Any]:
    found: list[Any] = await asyncio.to_thread(df.collect)
    return found


async def rows(spark: Any, path: str, deployment: Deployment | None = None) -> list[Any]:
    found = await asyncio.to_thread(entries, spark, path, where(deployment) if deployment is not None else None)
    return sorted(await collected(found), key=lambda row: row.position)


@pytest.mark.long  # many jobs
async def test_archive_and_log_are_one_table(spark: Any, deployment: Deployment, tmp_path: Path) -> None:
    path, several, big = str(tmp_path / "archive"), [fresh() for _ in range(5)], fresh()
    with pytest.raises(ConfigError, match="no archive"):
        await asyncio.to_thread(entries, spark, path, where(deployment))
    with pytest.raises(ConfigError, match="no archive"):  # a mistyped path
        await asyncio.to_thread(tabulate, spark, path)
    await write_together(deployment, several, range(3))
    await asyncio.to_thread(archive, spark, where(deployment), path)
    done = await asyncio.to_thread(tabulate, spark, path)
    assert (done.rows, done.parts) == (15, 1)
    assert (await asyncio.to_thread(tabulate, spark, path)).rows == 0

    text = secrets.token_hex(1_000_000)  # stored in parts
    async with deployment.store() as store:
        await store.checkpoint(big, [{"n": 0, "role": "user", "content": text}], run_of(big))
        done_run = Run(run_id="last", thread_id=several[0], agent_id="other", status=RunStatus.DONE, steps=4)
        await store.checkpoint(several[0], [{"n": 0}, {"n": 9}], done_run)
        await store.delete_thread(several[1])
    await asyncio.to_thread(archive, spark, where(deployment), path)
    await write(deployment, several[2:3], range(3, 5))  # not archived yet

    async def check() -> None:
        both = (await asyncio.to_thread(entries, spark, path, where(deployment))).cache()
        one = sorted(await collected(both), key=lambda row: row.position)
        log = spark.read.format("threadlog").options(**read_options(deployment, columns="position")).load()
        assert [r.position for r in one] == sorted(r.position for r in await collected(log)), "each entry once"
        assert {r.effect for r in one} == {"applied"}
        found = await collected(messages(both))
        said = Counter((m.thread_id, m.effect) for m in found)
        assert (said[several[0], "applied"], said[several[0], "replaced"] >= 2) == (2, True)
        assert (said[several[1], "applied"], said[several[1], "replaced"]) == (0, 3)
        assert (said[several[2], "applied"], said[big, "applied"]) == (5, 1)
        assert [m.text for m in found if m.role == "user"] == [text]
        of = {t.thread_id: t for t in await collected(threads(both))}
        assert (of[several[0]].messages, of[several[0]].run_id, of[several[0]].status) == (2, "last", "done")
        assert [of[t].removed for t in several] == [False, True, False, False, False]
        (last,) = await collected(runs(both).where("run_id = 'last'"))
        assert (last.agent_id, last.steps, last.writes) == ("other", 4, 1)
        assert sum(r.checkpoints for r in await collected(activity(both))) == 19
        both.unpersist()

    await check()
    done = await asyncio.to_thread(tabulate, spark, path)
    assert done.rows == 3
    await check()

    # Neighbours become one part and one range, and their sources are removed.
    before = await rows(spark, path)
    done = await asyncio.to_thread(compact, spark, path)
    assert (done.parts, done.ranges) == (1, 1)
    done = await asyncio.to_thread(compact, spark, path)
    assert (done.parts, done.ranges) == (0, 0)
    assert [r.asDict() | {"part": ""} for r in await rows(spark, path)] == [r.asDict() | {"part": ""} for r in before]
    folder = tmp_path / "archive" / "tables" / "entries"
    assert await asyncio.to_thread(expire, spark, path) == 0, "somebody may be reading"
    assert await asyncio.to_thread(partial(expire, grace=timedelta(0)), spark, path) == 2 + 2
    assert len(list(folder.glob("part=*"))) == len(list((tmp_path / "archive" / "ranges").iterdir())) == 1
    assert len(await rows(spark, path)) == len(before)


@pytest.mark.long  # several archives and restores
async def test_only_what_a_manifest_names_counts_and_only_once(
    spark: Any, deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, several = str(tmp_path / "archive"), [fresh() for _ in range(3)]
    await write_together(deployment, several, range(2))
    await asyncio.to_thread(archive, spark, where(deployment), path)
    parts_of = tables_job._parts_of
    await asyncio.to_thread(tabulate, spark, path)
    before = await rows(spark, path)
    assert len(before) == 6
    # A run that began at the same time, and a run that died before its manifest.
    monkeypatch.setattr(tables_job, "_parts_of", lambda *_: [])
    await write_together(deployment, several, range(2, 3))
    await asyncio.to_thread(archive, spark, where(deployment), path)
    await asyncio.to_thread(tabulate, spark, path)
    monkeypatch.setattr(tables_job, "_parts_of", parts_of)
    folder = tmp_path / "archive" / "tables" / "entries"
    first = min(folder.glob("part=*"))
    shutil.copytree(first, folder / (first.name[:-4] + "dead"))
    assert len(list(folder.glob("part=*"))) == 3
    found = await rows(spark, path)
    assert len(found) == 9
    assert len({r.position for r in found}) == 9
    await write_together(deployment, several, range(3, 4))
    found = await rows(spark, path, deployment)
    assert len({r.position for r in found}) == len(found) == 12, "with the log"
    assert {r.effect for r in found} == {"applied"}
    assert sorted(m.number for r in found for m in r.messages) == [n for n in range(4) for _ in several]


@pytest.mark.long  # many jobs
async def test_what_is_old_expires_and_nothing_else(spark: Any, deployment: Deployment, tmp_path: Path) -> None:
    deployment.verified = False
    path, several = str(tmp_path / "archive"), [fresh() for _ in range(3)]
    await write_together(deployment, several, range(2))
    first = await asyncio.to_thread(archive, spark, where(deployment), path)
    await asyncio.to_thread(tabulate, spark, path)
    early = datetime.now(UTC)
    await write_together(deployment, several, range(2, 4))
    await asyncio.to_thread(archive, spark, where(deployment), path)
    await asyncio.to_thread(tabulate, spark, path)
    assert await asyncio.to_thread(partial(expire, before=early), spark, path) == 1
    assert len(await rows(spark, path)) == 6
    assert (await asyncio.to_thread(tabulate, spark, path)).rows == 0, "what has expired is not made again"
    elsewhere = Deployment(deployment.servers)
    report = await asyncio.to_thread(restore, spark, path, where(elsewhere))
    assert await in_postgres(elsewhere, several) == {t: [0, 1, 2, 3] for t in several}
    assert report.applied == 12
    late = datetime.now(UTC)
    assert await asyncio.to_thread(partial(expire, before=late, ranges=True), spark, path) == 1
    assert len(await rows(spark, path)) == 6, "the last part and the last range stay"
    assert not list((tmp_path / "archive" / "ranges").glob(f"{first.start:020d}-*"))
    # The archive grows. Then the log loses entries that are in neither, which must be noticed.
    await write_together(deployment, several, range(4, 6))
    assert len(await rows(spark, path, deployment)) == 12
    await purge(deployment, (await asyncio.to_thread(tabulate, spark, path)).end + 1)
    with pytest.raises(Exception, match="begins at message"):
        await rows(spark, path, deployment)


@pytest.mark.long  # several jobs
async def test_a_large_entry_that_two_archives_share_outlives_the_older_one(
    spark: Any, deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An archive ends wherever the log does, maybe between an entry's parts and its group."""
    path, thread, big = str(tmp_path / "archive"), fresh(), fresh()
    await write_together(deployment, [thread], range(2))
    async with deployment.store() as store:
        await store.checkpoint(big, [{"n": 0, "content": secrets.token_hex(1_500_000)}], run_of(big))
    messages = spark.read.format("threadlog").options(**read_options(deployment, form="messages")).load()
    parts = Subjects(deployment.log.subject, deployment.log.partitions).parts
    behind_parts = 1 + max(r.position for r in await collected(messages) if r.subject == parts)
    log_of = archive_job.log_of

    async def cut(to: Any, reached: int) -> Any:
        return msgspec.structs.replace(await log_of(to, reached), end=behind_parts)

    monkeypatch.setattr(archive_job, "log_of", cut)
    await asyncio.to_thread(archive, spark, where(deployment), path)
    monkeypatch.undo()
    await asyncio.to_thread(tabulate, spark, path)
    await asyncio.to_thread(archive, spark, where(deployment), path)
    late = datetime.now(UTC)
    assert await asyncio.to_thread(partial(expire, before=late, ranges=True), spark, path) == 0
    await asyncio.to_thread(tabulate, spark, path)
    assert [(r.thread_id, r.effect) for r in await rows(spark, path)] == [(thread, "applied")] * 2 + [(big, "applied")]


def test_a_restores_times_do_not_follow_a_setting_of_the_session(spark: Any) -> None:
    """With it, `until` was compared with times of no zone, and another point in time was restored."""
    spark.conf.set("spark.sql.timestampType", "TIMESTAMP_NTZ")
    try:
        assert messages_of(spark).schema["stored_at"].dataType == TimestampType()
    finally:
        spark.conf.unset("spark.sql.timestampType")
