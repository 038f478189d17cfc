"""Draining, archiving and restoring lose and repeat nothing, whatever else works on the same log."""

from __future__ import annotations

import asyncio
import secrets
import time
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest

from bufstore import BufferedThreadStore, FlushTimeout, LogUnavailable, NoLog
from bufstore.buffer.entry import Base
from bufstore.buffer.places import place
from bufstore.embedded import Servers
from bufstore.jetstream.stream import NatsStream
from bufstore.postgres.ledger.ledger import PostgresLedger
from bufstore.spark import (
    ArchiveOvertaken,
    DataLoss,
    SinkConfig,
    archive,
    bulk_drain,
    checkpoint_sink,
    drain,
    restore,
    tabulate,
)
from bufstore.spark.analytics import COLUMNS, activity, coalescing, entries, hot_threads, lag
from bufstore.spark.log_archive import archive_job
from bufstore.spark.log_archive.into_postgres import IntoPostgres
from conftest import Deployment
from helpers import eventually, fresh, query, run_of
from spark.jobs import (
    frame,
    held,
    in_postgres,
    prepared,
    read_options,
    rows_of,
    settings_of,
    where,
    write,
    write_together,
)
from unit.test_restore_decisions import stored


async def test_a_drain_flushes_all_that_is_there_beside_a_flusher_and_another_drain(
    spark: Any, deployment: Deployment
) -> None:
    threads = [fresh() for _ in range(20)]
    await write(deployment, threads, range(10))
    report = await asyncio.to_thread(bulk_drain, spark, where(deployment), tasks=2)
    assert (report.entries, report.parked, report.tasks) == (200, 0, 2)
    assert await in_postgres(deployment, threads) == {t: list(range(10)) for t in threads}
    await write(deployment, threads, range(10, 20))
    lags: list[int] = []
    async with deployment.store():  # the store's flusher gives its partitions away, and takes them back
        both = (
            asyncio.to_thread(bulk_drain, spark, where(deployment), tasks=1, on_lag=lags.append),
            asyncio.to_thread(bulk_drain, spark, where(deployment), tasks=1),
        )
        reports = await asyncio.gather(*both)
    assert lags
    assert sum(r.entries for r in reports) <= 200
    assert await held(deployment, threads) == {t: list(range(20)) for t in threads}


async def test_what_is_archived_comes_back_into_an_empty_postgres(
    spark: Any, either: Deployment, tmp_path: Path
) -> None:
    path, threads = str(tmp_path / "archive"), [fresh() for _ in range(6)]
    await write(either, threads, range(4))
    first = await asyncio.to_thread(archive, spark, where(either), path)
    assert first.count == 24
    assert (await asyncio.to_thread(archive, spark, where(either), path)).count == 0
    await write(either, threads, range(4, 7))
    second = await asyncio.to_thread(archive, spark, where(either), path)
    assert (second.count, second.start) == (18, first.end)

    elsewhere = Deployment(either.servers, replicas=either.log.replicas)
    dry = await asyncio.to_thread(restore, spark, path, where(elsewhere), dry_run=True)
    assert (dry.applied, dry.present, dry.refused, dry.threads) == (42, 0, 0, 6)
    assert await in_postgres(elsewhere, threads) == dict.fromkeys(threads)
    report = await asyncio.to_thread(restore, spark, path, where(elsewhere))
    assert (report.applied, report.present, report.refused) == (42, 0, 0)
    again = await asyncio.to_thread(restore, spark, path, where(elsewhere))
    assert (again.applied, again.present, again.refused) == (0, 42, 0)
    assert await in_postgres(elsewhere, threads) == {t: list(range(7)) for t in threads}
    # A new log begins above every position that the restored rows name.
    await write(elsewhere, threads, range(7, 9))
    assert await held(elsewhere, threads) == {t: list(range(9)) for t in threads}


async def test_a_run_that_archives_meanwhile_is_no_loss(
    spark: Any, deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the log seemed to have lost its end, because the archive went beyond an earlier look at it."""
    path, thread = str(tmp_path / "archive"), fresh()
    await write(deployment, [thread], range(2))
    await asyncio.to_thread(archive, spark, where(deployment), path)
    checked = archive_job._archived

    async def meanwhile(*arguments: Any) -> int:
        monkeypatch.undo()
        noted = await checked(*arguments)
        await write(deployment, [thread], range(2, 4))
        await asyncio.to_thread(archive, spark, where(deployment), path)
        return noted

    await write(deployment, [thread], range(4, 6))
    monkeypatch.setattr(archive_job, "_archived", meanwhile)
    with pytest.raises(ArchiveOvertaken):
        await asyncio.to_thread(archive, spark, where(deployment), path)
    report = await asyncio.to_thread(archive, spark, where(deployment), path)
    assert report.count == 0


@pytest.mark.parametrize("told", [{}, {"created": "2020-01-01T00:00:00Z"}], ids=["end", "stream"])
async def test_a_node_that_leads_no_more_shows_an_archive_no_loss(
    spark: Any, replicated: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: dict[str, str]
) -> None:
    """Regression: the log seemed to have lost its end where a node that had been cut off told where it ended before.

    The same for a node that tells of the stream before a repair.
    """
    path, thread, info = str(tmp_path / "archive"), fresh(), NatsStream.info
    await write(replicated, [thread], range(2))
    before = (await archive_job.log_of(where(replicated))).end
    await write(replicated, [thread], range(2, 4))
    first = await asyncio.to_thread(archive, spark, where(replicated), path)
    assert first.end > before

    answers = 0

    async def old(self: NatsStream, timeout_s: float = 5.0) -> dict[str, Any]:
        nonlocal answers
        answer, answers = await info(self, timeout_s), answers + 1
        if answers >= 4:
            return answer
        return answer | told | {"state": answer["state"] | {"last_seq": before - 1}}

    monkeypatch.setattr(NatsStream, "info", old)
    second = await asyncio.to_thread(archive, spark, where(replicated), path)
    assert (second.start, second.end, second.count) == (first.end, first.end, 0), "nothing is stored to find out"


async def test_a_thread_that_postgres_refuses_is_left_out_alone(
    spark: Any, deployment: Deployment, tmp_path: Path
) -> None:
    """Regression: one entry that Postgres refuses made the whole restore fail, each time, as if Postgres were away."""
    path, threads = str(tmp_path / "archive"), [fresh() for _ in range(6)]
    await write(deployment, threads, range(2))
    await asyncio.to_thread(archive, spark, where(deployment), path)
    elsewhere = Deployment(deployment.servers)
    await asyncio.to_thread(restore, spark, path, where(elsewhere), dry_run=True)  # makes the tables
    schema, refused = elsewhere.name, threads[2]
    await query(elsewhere.servers.postgres.dsn, f"ALTER TABLE {schema}.threads ADD CHECK (thread_id <> '{refused}')")
    report = await asyncio.to_thread(restore, spark, path, where(elsewhere), tasks=1)
    assert (report.applied, report.refused, report.threads) == (10, 2, 6)
    first, second = report.reasons
    assert first.startswith(f"thread {refused!r}, position "), first
    assert "Postgres refuses it: " in first and "23514" in first
    assert second.startswith(f"thread {refused!r}, position "), second
    assert await in_postgres(elsewhere, threads) == {t: [0, 1] if t != refused else None for t in threads}


async def test_an_entry_that_postgres_refuses_is_left_out_as_a_flush_would_have_parked_it(
    deployment: Deployment,
) -> None:
    """Regression: its whole thread was left out, or another thread whose earlier entry it excludes."""
    async with IntoPostgres(where(deployment), deployment.log, dry_run=False) as into:
        await into.setup(0, None)
        of_a, of_b = partial(stored, thread_id="a", run_id="a"), partial(stored, thread_id="b", run_id="b")
        a = [
            of_a(5, 11, "a0", base=Base.NONE),
            of_a(20, 12, "takes the run of b", keep=1, prev_id=11, run_id="b"),
            of_a(25, 13, "behind it", keep=2, prev_id=12),
            of_a(30, 14, "whole", prev_id=13, self_contained=True),
            of_a(40, 15, "more", keep=1, prev_id=14),
        ]
        b = [of_b(10, 21, "b0", base=Base.NONE), of_b(50, 22, "b1", keep=1, prev_id=21)]
        counts = await into.apply({"a": a, "b": b})
    assert (counts.threads, counts.applied, counts.refused) == (2, 5, 2)
    assert counts.reasons[0].startswith("thread 'a', position 20: Postgres refuses it: ")
    async with deployment.inner() as store:
        assert await store.load_messages("a") == ["whole", "more"]
        assert await store.load_messages("b") == ["b0", "b1"]


@pytest.mark.parametrize("dry_run", [True, False])
async def test_a_thread_in_portions_goes_on_behind_one_that_is_refused(deployment: Deployment, dry_run: bool) -> None:
    """Regression: a dry run counted otherwise, because it forgot what it would have applied before."""
    async with IntoPostgres(where(deployment), deployment.log, dry_run=dry_run) as into:
        await into.setup(0, None)
        found = [
            await into.apply({"t": [item]})
            for item in (
                stored(10, 1, "a", base=Base.NONE),
                stored(20, 9, "of another chain", keep=1, prev_id=8),
                stored(30, 2, "b", keep=1, prev_id=1),
            )
        ]
    assert [(counts.applied, counts.refused) for counts in found] == [(1, 0), (0, 1), (1, 0)]


@pytest.mark.long
async def test_an_archive_with_a_gap_or_a_changed_file_is_not_restored(
    spark: Any, deployment: Deployment, tmp_path: Path
) -> None:
    path, thread = tmp_path / "archive", fresh()
    for step in range(3):
        await write(deployment, [thread], range(step, step + 1))
        await asyncio.to_thread(archive, spark, where(deployment), str(path))
    manifests = sorted((path / "manifests").iterdir())
    elsewhere = where(Deployment(deployment.servers))
    hidden = manifests[1].rename(path / "hidden")
    with pytest.raises(DataLoss, match="gap"):
        await asyncio.to_thread(restore, spark, str(path), elsewhere)
    hidden.rename(manifests[1])
    next((path / "ranges" / manifests[0].name).rglob("*.parquet")).unlink()
    with pytest.raises(DataLoss, match="changed"):
        await asyncio.to_thread(restore, spark, str(path), elsewhere)


async def test_nothing_leaves_the_log_before_it_is_archived(spark: Any, deployment: Deployment, tmp_path: Path) -> None:
    deployment.verified = False  # the log would be purged during the verification
    threads = [fresh() for _ in range(3)]
    await write(deployment, threads, range(4))
    await deployment.change(failover_window_s=1.0, archive=True)
    async with deployment.store(retain_after_flush_s=1.0) as store:
        await store.force_flush_all(timeout_s=30)
        before = (await store.statistics()).log_bytes
        report = await asyncio.to_thread(archive, spark, where(deployment), str(tmp_path / "archive"))
        assert report.count == 12, "all of it was still there, long after it might have been purged"

        async def purged() -> bool:
            return (await store.statistics()).log_bytes < before

        await eventually(purged)


@pytest.mark.long
async def test_analytics_of_a_log(spark: Any, deployment: Deployment) -> None:
    left_s = 3600 - time.time() % 3600
    if left_s < 60:
        await asyncio.sleep(left_s)  # what is written below belongs to one hour
    threads = [fresh() for _ in range(3)]
    await write(deployment, threads, range(3))
    await write(deployment, threads[:1], range(3, 9))
    options = read_options(deployment, columns=f"{COLUMNS},partition")
    entries = spark.read.format("threadlog").options(**options).load().cache()
    (hour,) = await asyncio.to_thread(activity(entries).collect)
    assert (hour.agent_id, hour.checkpoints, hour.threads, hour.messages) == ("planner", 15, 3, 15)
    assert hour.tokens > 0
    hottest = await asyncio.to_thread(hot_threads(entries, 1).collect)
    assert [(r.thread_id, r.checkpoints) for r in hottest] == [(threads[0], 9)]
    (folded,) = await asyncio.to_thread(coalescing(entries, 3600).collect)
    assert (folded.entries, folded.changes) == (15, 3)
    none = spark.createDataFrame([], "partition int, position bigint")
    behind = await asyncio.to_thread(lag(entries, none).collect)
    assert sum(r.entries for r in behind) == 15
    for by, expected in (("agent_id", {"planner": 15}), ("thread_id", dict(zip(threads, (9, 3, 3), strict=True)))):
        behind = await asyncio.to_thread(lag(entries, none, by).collect)
        assert {r[by]: r.entries for r in behind} == expected
    assert [r.hour for r in await asyncio.to_thread(lag(entries, none, "hour").collect)] == [hour.hour]
    async with deployment.store() as store:
        await store.force_flush_all()
    cursors = f'SELECT partition, cursor_seq FROM "{deployment.name}".buffer_partitions'
    found = await query(deployment.servers.postgres.dsn, cursors)
    flushed = spark.createDataFrame(found, "partition int, position bigint")
    assert await asyncio.to_thread(lag(entries, flushed).collect) == []


async def test_what_belongs_to_no_partition_is_no_lag(spark: Any) -> None:
    """Regression: a message that is no group, which nobody flushes, stood among what Postgres lacks for good."""
    now = datetime.now(UTC)
    rows = [(place(2, 0), now, -1), (place(3, 0), now, 0), (place(4, 0), now, 0)]
    entries = spark.createDataFrame(rows, "position long, stored_at timestamp, partition int")
    flushed = spark.createDataFrame([(0, place(3, 0))], "partition int, position long")
    found = await asyncio.to_thread(lag(entries, flushed).collect)
    assert [(r.partition, r.entries) for r in found] == [(0, 1)]


@pytest.mark.long  # fifteen seconds
async def test_an_archive_comes_back_into_a_log(spark: Any, deployment: Deployment, tmp_path: Path) -> None:
    path, threads = str(tmp_path / "archive"), [fresh() for _ in range(6)]
    await write(deployment, threads, range(4))
    await asyncio.to_thread(archive, spark, where(deployment), path)
    elsewhere = Deployment(deployment.servers)
    with pytest.raises(NoLog):
        await asyncio.to_thread(restore, spark, path, where(elsewhere), into="log")
    await write(elsewhere, threads[:1], range(1))  # makes the log, with another thread of this id
    dry = await asyncio.to_thread(restore, spark, path, where(elsewhere), into="log", dry_run=True)
    assert (dry.applied, dry.present, dry.refused, dry.threads) == (20, 0, 4, 6)
    assert "in the log is not among the archived entries" in dry.reasons[0]
    for expected in ((20, 0, 4), (0, 20, 4)):
        report = await asyncio.to_thread(restore, spark, path, where(elsewhere), into="log")
        assert (report.applied, report.present, report.refused) == expected
    found = await held(elsewhere, threads)
    assert found == {t: list(range(4)) for t in threads} | {threads[0]: [0]}
    # More is archived, and restored behind the entries that Postgres has by now.
    await write(deployment, threads, range(4, 7))
    await asyncio.to_thread(archive, spark, where(deployment), path)
    await asyncio.to_thread(bulk_drain, spark, where(elsewhere), tasks=2)
    report = await asyncio.to_thread(restore, spark, path, where(elsewhere), into="log")
    assert (report.applied, report.present, report.refused) == (15, 20, 7)
    await write(elsewhere, threads, range(7, 8))
    report = await asyncio.to_thread(restore, spark, path, where(elsewhere), into="log")
    assert (report.applied, report.present, report.refused) == (0, 35, 7), "what was written since stays"
    assert await held(elsewhere, threads[1:]) == {t: list(range(8)) for t in threads[1:]}


@pytest.mark.long  # several archives and restores
async def test_an_archive_whose_ranges_end_within_a_large_entry_comes_back(
    spark: Any, deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts are stored before their group, and many threads share a group."""
    path, threads, big = str(tmp_path / "archive"), [fresh() for _ in range(30)], fresh()
    text = secrets.token_hex(1_500_000)
    await write_together(deployment, threads, range(2))
    async with deployment.store(flusher=False) as store:
        await store.checkpoint(big, [{"n": 0, "text": text}], run_of(big))
    await write_together(deployment, [*threads, big], range(2, 3))
    raw = spark.read.format("threadlog").options(**read_options(deployment, form="messages")).load()
    stored = await asyncio.to_thread(raw.collect)
    parts = sorted(m.position for m in stored if m.subject.endswith(".parts.0"))
    assert len(parts) > 1
    assert sum(m.subject.endswith(".groups.0") for m in stored) < 61
    log_of = archive_job.log_of

    async def ending_within(deployment: Any, reached: int) -> Any:
        found = await log_of(deployment, reached)
        return msgspec.structs.replace(found, end=parts[1])

    monkeypatch.setattr(archive_job, "log_of", ending_within)
    first = await asyncio.to_thread(archive, spark, where(deployment), path)
    await asyncio.to_thread(tabulate, spark, path)
    await asyncio.to_thread(archive, spark, where(deployment), path, start=parts[0])  # the first part is archived twice
    monkeypatch.setattr(archive_job, "log_of", log_of)
    second = await asyncio.to_thread(archive, spark, where(deployment), path)
    assert (first.end, first.count + second.count) == (parts[1], len(stored))

    into_postgres, into_log = Deployment(deployment.servers), Deployment(deployment.servers)
    await prepared(into_log)
    for elsewhere, into in ((into_postgres, "postgres"), (into_log, "log")):
        report = await asyncio.to_thread(restore, spark, path, where(elsewhere), into=into)
        assert (report.applied, report.refused, report.threads) == (92, 0, 31), report.reasons
        assert await held(elsewhere, [*threads, big]) == {t: [0, 1, 2] for t in threads} | {big: [0, 2]}
        async with elsewhere.inner() as store:
            (whole, _) = await store.load_messages(big) or []
        assert whole["text"] == text
    await asyncio.to_thread(tabulate, spark, path)
    of_big = entries(spark, path).where(f"thread_id = '{big}'").orderBy("position")
    rows = await asyncio.to_thread(of_big.collect)
    assert [(row.effect, row.version) for row in rows] == [("applied", 1), ("applied", 2)]
    assert text in rows[0].messages[0].json


@pytest.mark.long  # several archives and restores
async def test_what_was_restored_into_postgres_goes_on_in_a_log(
    spark: Any, deployment: Deployment, tmp_path: Path
) -> None:
    path, threads = str(tmp_path / "archive"), [fresh() for _ in range(3)]
    await write(deployment, threads, range(3))
    await asyncio.to_thread(archive, spark, where(deployment), path)
    elsewhere = Deployment(deployment.servers)
    await asyncio.to_thread(restore, spark, path, where(elsewhere))
    await write(deployment, threads, range(3, 5))
    await asyncio.to_thread(archive, spark, where(deployment), path)
    async with elsewhere.store():  # the new log begins above all restored positions
        report = await asyncio.to_thread(restore, spark, path, where(elsewhere), into="log")
    assert (report.applied, report.present, report.refused) == (6, 9, 0)
    assert await held(elsewhere, threads) == {t: list(range(5)) for t in threads}
    assert await in_postgres(elsewhere, threads) == {t: list(range(5)) for t in threads}


async def test_a_drain_counts_what_its_flusher_hears_of_late(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Postgres shows a flush before the flusher that made it has its answer."""
    await write(deployment, [fresh() for _ in range(3)], range(4))
    flush, force, shown = PostgresLedger.flush, BufferedThreadStore.force_flush_all, asyncio.Event()

    async def late(*arguments: Any, **options: Any) -> Any:
        answer = await flush(*arguments, **options)
        await shown.wait()
        return answer

    async def forced(*arguments: Any, **options: Any) -> None:
        await force(*arguments, **options)
        shown.set()

    monkeypatch.setattr(PostgresLedger, "flush", late)
    monkeypatch.setattr(BufferedThreadStore, "force_flush_all", forced)
    found = await drain._flush(where(deployment), 20.0)
    assert (found.entries, found.changes, found.parked, found.late) == (12, 3, 0, [])


async def test_a_drain_that_takes_too_long_says_so_once(spark: Any, deployment: Deployment) -> None:
    """Otherwise Spark would repeat the task, each time for as long."""
    await write(deployment, [fresh()], range(1))
    async with await psycopg.AsyncConnection.connect(deployment.servers.postgres.dsn) as somebody:
        await somebody.execute(f'LOCK TABLE "{deployment.name}".threads')
        with pytest.raises(FlushTimeout):
            await asyncio.to_thread(bulk_drain, spark, where(deployment), tasks=1, timeout_s=2.0)


@pytest.mark.long  # servers of its own
async def test_a_drain_whose_log_goes_away_says_so(
    spark: Any, own_servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: it raised an error of Spark's, unless the log was away when the drain began."""
    deployment = Deployment(own_servers)
    deployment.verified = False
    await write(deployment, [fresh()], range(1))
    described = drain.described

    def then_away(*arguments: Any) -> Any:
        own_servers.nats.stop()
        return described(*arguments)

    monkeypatch.setattr(drain, "described", then_away)
    with pytest.raises(LogUnavailable):
        await asyncio.to_thread(bulk_drain, spark, where(deployment), tasks=1)


@pytest.mark.long  # ten seconds
async def test_jobs_are_named_in_sparks_ui(spark: Any, deployment: Deployment, tmp_path: Path) -> None:
    await prepared(deployment)
    archived = tmp_path / "ranges" / "archive"  # another folder in the path has a job's name too
    path, app_id, stream = str(archived), fresh("app"), deployment.log.stream
    sink = checkpoint_sink(SinkConfig(app_id=app_id, **settings_of(deployment)))
    context = spark.sparkContext

    def all_jobs() -> list[str]:
        """Return the names of all jobs, and the description that this thread's next job would get."""
        context.setJobDescription("of the app")
        sink(frame(spark, rows_of([fresh()], range(3))), 5)
        archive(spark, where(deployment), path)
        tabulate(spark, path)
        restore(spark, path, where(deployment), dry_run=True)
        bulk_drain(spark, where(deployment), tasks=1)
        seen = context._jsc.sc()
        seen.listenerBus().waitUntilEmpty()
        jobs = seen.statusStore().jobsList(None)
        found = [jobs.apply(n).description() for n in range(jobs.size())]
        return [*(name.get() for name in found if name.isDefined()), context.getLocalProperty("spark.job.description")]

    *names, after = await asyncio.to_thread(all_jobs)
    (part,) = (archived / "tables" / "entries").glob("part=*")
    for name in (
        f"bufstore: batch 5 of {app_id}",
        f"bufstore: archive {stream} ",
        f"bufstore: table {part.name.removeprefix('part=')}",
        f"bufstore: restore {path} into postgres",
        f"bufstore: drain {stream}",
    ):
        assert any(found.startswith(name) for found in names), name
    assert after == "of the app"
