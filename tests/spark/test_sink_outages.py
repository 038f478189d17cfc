"""The sink waits during outages and for a full log, and asks Postgres only for what it cannot know otherwise."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pytest
from pyspark import TaskContext

from bufstore import LogFull, LogUnavailable, OutcomeUnknown, StoreUnavailable
from bufstore.embedded import Servers
from bufstore.spark import SinkConfig, checkpoint_sink
from bufstore.spark.job_description import context_of
from bufstore.spark.progress import ProgressListener, QueryProgress
from bufstore.spark.sink import app_id, foreach_batch
from bufstore.spark.sink.app_id import AppId
from bufstore.spark.sink.bufstore_format import BufstoreFormat
from bufstore.spark.sink.parked_rows import ParkedRows
from bufstore.spark.sink.parts import Part
from bufstore.spark.sink.row_writer import Pass, RowCounts, write_rows
from bufstore.spark.sink.settled import summed
from bufstore.spark.sink.spark_ledger import Query, SparkLedger
from conftest import Deployment
from helpers import eventually, fresh, query, run_of, said
from spark.jobs import ended, environment, frame, held, job, prepared, put, rows_of, settings_of, stream, write_options
from thorough import seldom


def sink(deployment: Deployment, **options: Any) -> SinkConfig:
    # Shorter than the default, so that a failing test ends; a try may take ten seconds, and servers some to start.
    return SinkConfig(app_id=fresh("app"), **settings_of(deployment), **({"outage_timeout_s": 60.0} | options))


async def it_waits(caplog: pytest.LogCaptureFixture) -> None:
    """Wait until a sink of this process logs that it waits."""

    async def said() -> bool:
        return "waits, and fails in" in caplog.text

    await eventually(said, 60)


@pytest.mark.long
async def test_a_full_log_is_waited_for(deploy: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "bufstore.spark")
    deployment = deploy(max_bytes=1 << 20, failover_window_s=8.0)
    async with deployment.store(flusher=False, append_timeout_s=0.5) as store:
        for size in (20_000, 2_000, 100):  # fill the log to the last byte
            with pytest.raises(LogFull):
                for n in range(200):
                    with suppress(OutcomeUnknown, LogUnavailable):  # the server stood still
                        await store.checkpoint("full", [said(n, size)], run_of("full"))
    threads = [fresh() for _ in range(3)]
    config, rows = sink(deployment, append_timeout_s=4.0), sorted_rows(threads, range(4))
    with pytest.raises(LogFull) as over:
        await asyncio.to_thread(write_rows, replace(config, outage_timeout_s=0.5), 0, [rows])
    assert "outage_timeout_s" in over.value.__notes__[0]
    caplog.clear()
    writing = asyncio.create_task(asyncio.to_thread(write_rows, config, 0, [rows]))

    await it_waits(caplog)
    async with deployment.store(retain_after_flush_s=8.0):
        found = (await writing).counts
    assert (found.written + found.repeated, found.bad) == (12, 0)
    assert found.waited_ms > 0
    assert "goes on after" in caplog.text
    assert await held(deployment, threads) == {t: list(range(4)) for t in threads}


@pytest.mark.long
async def test_a_deletion_waits_until_somebody_flushes(
    deployment: Deployment, caplog: pytest.LogCaptureFixture
) -> None:
    """Only Postgres knows a thread's children: when it cannot be read, that is an outage and no bad row."""
    caplog.set_level(logging.INFO, "bufstore.spark")
    await prepared(deployment)
    thread = fresh()
    async with deployment.store(flusher=False) as store:
        await store.checkpoint(thread, [said(0)], run_of(thread))
    deleted = {"thread_id": thread, "run_id": "", "position": 0, "edit": '{"delete_thread": "reject"}'}
    writing = asyncio.create_task(asyncio.to_thread(write_rows, sink(deployment), 0, [[deleted]]))

    await it_waits(caplog)
    async with deployment.store() as store:
        found = (await writing).counts
        assert (found.written, found.bad) == (1, 0)
        assert found.waited_ms > 0
        assert await store.load_thread(thread) is None


def sorted_rows(threads: list[str], steps: range) -> list[dict[str, Any]]:
    return sorted(rows_of(threads, steps), key=lambda row: (row["thread_id"], row["position"]))


@pytest.mark.long  # fifteen seconds
async def test_only_threads_that_nobody_knows_wait_for_postgres(
    own_servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = Deployment(own_servers)
    known, new = [fresh() for _ in range(3)], [fresh() for _ in range(3)]
    config = sink(deployment)
    app = AppId(config)
    await prepared(deployment)
    of = Query("query", "run")
    await asyncio.to_thread(app.begin, of, 0)
    await asyncio.to_thread(write_rows, config, 0, [sorted_rows(known, range(2))])
    await asyncio.to_thread(app.done, 0, 11, RowCounts(written=6))
    both = [*sorted_rows(known, range(4, 6)), *sorted_rows(new, range(2))]
    async with deployment.store(flusher=False) as store:
        log, subjects = store.buffer.log, [store.buffer.subjects.of(t) for t in known]
        own_servers.postgres.stop()
        async with asyncio.timeout(50):  # nothing of this waits until `outage_timeout_s` is over
            await asyncio.to_thread(app.begin, of, 1)
            assert app.away
            found = await asyncio.to_thread(write_rows, config, 1, [sorted_rows(known, range(2, 4))])
            await asyncio.to_thread(app.done, 1, 12, RowCounts(written=6))
        assert found.counts == RowCounts(written=6)
        before = {s: m.seq for s, m in (await log.last(subjects)).items()}

        async def written() -> bool:
            return all(m.seq > before[s] for s, m in (await log.last(subjects)).items())

        writing = asyncio.create_task(
            asyncio.to_thread(write_rows, config, 2, [both], Pass(noting=True), Part(0, 1, 13))
        )
        await eventually(written)
        assert not writing.done()
        with pytest.raises(StoreUnavailable):  # another run must ask Postgres who has the app id
            await asyncio.to_thread(AppId(replace(config, outage_timeout_s=0.0)).begin, of, 2)
        await asyncio.to_thread(app.begin, of, 2)
        assert app.away
        own_servers.postgres.start()
        counts = (await writing).counts
        assert counts.written == 12
        monkeypatch.setattr(app_id, "_AWAY_S", 8.0)  # Postgres is back; this process may stand still for a moment
        await asyncio.to_thread(app.done, 2, 13, counts)
    # The batch's beginning was not noted, but its end was: another run recognises the batch.
    again = await asyncio.to_thread(AppId(config).begin, of._replace(run_id="next"), 2)
    assert (again.batch_id, again.planned, again.done) == (2, 13, True)
    noted = f'SELECT batch_id, rows, waited_ms > 0 FROM "{config.schema}".spark_sources WHERE app_id = %s'
    assert await query(own_servers.postgres.dsn, noted, config.app_id) == [(2, 12, True)]
    assert await held(deployment, [*known, *new]) == {t: list(range(6)) for t in known} | {t: [0, 1] for t in new}


async def test_a_bad_row_waits_for_postgres_and_is_set_aside_once(
    own_servers: Servers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Postgres may store the row and be lost before it answers. No later row of the thread is written before."""
    caplog.set_level(logging.INFO, "bufstore.spark")
    deployment = Deployment(own_servers)
    await prepared(deployment)
    bad, good = sorted([fresh(), fresh()])
    config = sink(deployment, bad_rows="quarantine")
    await asyncio.to_thread(AppId(config).setup)
    await asyncio.to_thread(write_rows, config, 0, [sorted_rows([bad, good], range(2))])
    rows = sorted_rows([bad, good], range(2, 6))
    rows[1] |= {"delta": ["{"]}
    quarantine, answered = SparkLedger.quarantine, 0

    async def without_an_answer(self: SparkLedger, *row: Any) -> None:
        nonlocal answered
        await quarantine(self, *row)
        answered += 1
        if answered == 1:
            raise StoreUnavailable("Postgres went away")

    monkeypatch.setattr(SparkLedger, "quarantine", without_an_answer)
    monkeypatch.setitem(SparkLedger._fetch.__kwdefaults__, "timeout_s", 1.0)
    async with deployment.store(flusher=False) as store:
        own_servers.postgres.stop()
        writing = asyncio.create_task(asyncio.to_thread(write_rows, config, 1, [rows]))

        await it_waits(caplog)
        stored = {t: len(await store.buffer.log.after(store.buffer.subjects.of(t), 0)) for t in (bad, good)}
        assert stored == {bad: 3, good: 6}
        assert not writing.done()
        own_servers.postgres.start()
        found = (await writing).counts
    assert (found.written, found.repeated, found.bad, answered) == (7, 0, 1, 2)
    assert found.waited_ms > 0
    again = (await asyncio.to_thread(write_rows, config, 1, [rows])).counts
    assert (again.written, again.repeated + again.bad) == (0, 8)
    parked = await query(own_servers.postgres.dsn, f'SELECT thread_id, row FROM "{deployment.name}".spark_quarantine')
    assert [(t, json.loads(row)["position"]) for t, row in parked] == [(bad, 3)]
    assert await held(deployment, [bad, good]) == {bad: [0, 1, 2, 4, 5], good: list(range(6))}


@pytest.mark.long
@pytest.mark.parametrize("begun_away", [True, *seldom(False)])
async def test_a_task_that_begins_anew_waits_to_hear_which_rows_were_set_aside(
    own_servers: Servers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, begun_away: bool
) -> None:
    """Postgres was lost after the first try. A row that this try had quarantined was replayed meanwhile."""
    caplog.set_level(logging.INFO, "bufstore.spark")
    deployment = Deployment(own_servers)
    await prepared(deployment)
    orphan, parent = fresh(), fresh("parent")
    config = sink(deployment, bad_rows="quarantine")
    await asyncio.to_thread(AppId(config).begin, Query("query", "run"), 0)
    rows = [row | {"parent_thread_id": parent} for row in rows_of([orphan], range(1))]

    def attempt(number: int) -> RowCounts:
        """Run an attempt of the task as Spark does."""
        context = SimpleNamespace(partitionId=lambda: 0, attemptNumber=lambda: number, stageId=lambda: 7)
        monkeypatch.setattr(TaskContext, "get", lambda: context)
        batch = pyarrow.RecordBatch.from_pylist([row | summed(row) for row in rows])
        (written,) = foreach_batch._task(config, 0, 1, Pass(noting=not begun_away), iter([batch]))
        return written.counts

    assert (await asyncio.to_thread(attempt, 0)).bad == 1
    async with deployment.store() as store:
        await store.checkpoint(parent, [], run_of(parent))
        async with ParkedRows(own_servers.postgres.dsn, deployment.name) as parked:
            assert [replay.refused for replay in await parked.replay(store, orphan, None)] == [None]
    own_servers.postgres.stop()
    writing = asyncio.create_task(asyncio.to_thread(attempt, 1))

    await it_waits(caplog)
    own_servers.postgres.start()
    found = await writing
    assert (found.written, found.repeated, found.bad) == (0, 1, 0)
    assert await held(deployment, [orphan]) == {orphan: [0]}


@pytest.mark.long  # the worker retries for half a minute before it reports that it waits
async def test_a_worker_process_that_starts_in_an_outage_waits_for_postgres(
    own_servers: Servers, tmp_path: Path
) -> None:
    """The process that knows the threads goes on meanwhile."""
    deployment = Deployment(own_servers)
    await prepared(deployment)
    threads, told = [fresh() for _ in range(3)], tmp_path / "waits"
    config = sink(deployment)
    await asyncio.to_thread(write_rows, config, 0, [sorted_rows(threads, range(2))])
    await held(deployment, threads)
    given = {"app_id": config.app_id, "outage_timeout_s": 100.0, "append_timeout_s": 4.0}
    settings: dict[str, Any] = {"sink": settings_of(deployment) | given}
    settings |= {"batch": 2, "rows": sorted_rows(threads, range(3, 5)), "told": str(told)}
    own_servers.postgres.stop()
    await asyncio.to_thread(write_rows, config, 1, [sorted_rows(threads, range(2, 3))])
    writing = asyncio.create_task(job("rows", environment(), **settings))

    async def waits() -> bool:
        return told.exists() or writing.done()

    await eventually(waits, 60)
    assert not writing.done(), writing.result()
    own_servers.postgres.start()
    code, found = await writing
    assert (code, found["written"], found["repeated"]) == (0, 6, 0)
    assert found["waited_ms"] > 0
    assert await held(deployment, threads) == {t: list(range(5)) for t in threads}


async def test_nats_is_waited_for(own_servers: Servers, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "bufstore.spark")
    deployment = Deployment(own_servers)
    await prepared(deployment)
    threads, config = [fresh() for _ in range(3)], sink(deployment, append_timeout_s=1.0)
    await asyncio.to_thread(write_rows, config, 0, [sorted_rows(threads, range(2))])
    own_servers.nats.stop()
    writing = asyncio.create_task(asyncio.to_thread(write_rows, config, 1, [sorted_rows(threads, range(2, 4))]))

    await it_waits(caplog)
    own_servers.nats.start()
    found = (await writing).counts
    assert (found.written + found.repeated, found.bad) == (6, 0)
    assert found.waited_ms > 0
    assert await held(deployment, threads) == {t: list(range(4)) for t in threads}


@pytest.mark.long  # its own servers, and tries that fail
async def test_a_batch_waits_once_and_not_in_each_try_of_each_task(spark: Any, own_servers: Servers) -> None:
    """Spark would start a failing task four times (`local[2,4]`), and runs only two at a time."""
    deployment = Deployment(own_servers)
    await prepared(deployment)
    threads = [fresh() for _ in range(12)]
    config = sink(deployment, append_timeout_s=1.0, tasks=6)
    write, hasty = checkpoint_sink(config), checkpoint_sink(replace(config, outage_timeout_s=2.0))
    await asyncio.to_thread(write, frame(spark, rows_of(threads, range(2))), 0)
    own_servers.nats.stop()
    tracker = spark.sparkContext.statusTracker()
    with pytest.raises(LogUnavailable, match="outage_timeout_s is 2 s") as over:
        await asyncio.to_thread(hasty, frame(spark, rows_of(threads, range(2, 4))), 1)
    assert "waited" in str(over.value)
    spark.sparkContext._jsc.sc().listenerBus().waitUntilEmpty()  # the tracker hears of jobs from there
    (job, *_) = sorted(tracker.getJobIdsForGroup(None), reverse=True)
    stages = [tracker.getStageInfo(stage) for stage in tracker.getJobInfo(job).stageIds]
    assert [stage.numFailedTasks for stage in stages if stage is not None] == [0] * len(stages)
    own_servers.nats.start()
    await asyncio.to_thread(write, frame(spark, rows_of(threads, range(2, 4))), 1)
    assert await held(deployment, threads) == {t: list(range(4)) for t in threads}


@pytest.mark.long  # tries that fail
async def test_a_commit_waits_as_long_as_its_option_says(
    spark: Any, own_servers: Servers, caplog: pytest.LogCaptureFixture
) -> None:
    """The option of `format("bufstore")`, which needs Postgres for each batch."""
    caplog.set_level(logging.INFO, "bufstore.spark")
    deployment = Deployment(own_servers)
    await prepared(deployment)
    threads = [fresh() for _ in range(3)]
    rows = rows_of(threads, range(2))
    schema, batch = frame(spark, rows).schema, pyarrow.RecordBatch.from_pylist(rows)

    def commit(outage_timeout_s: float) -> None:
        options = write_options(deployment, appId="app", batchId=0, outageTimeout=outage_timeout_s)
        writer: Any = BufstoreFormat(options).writer(schema, False)
        writer.commit([writer.write(iter([batch]))])

    own_servers.postgres.stop()
    with pytest.raises(StoreUnavailable) as over:
        await asyncio.to_thread(commit, 1.0)
    assert "outage_timeout_s is 1 s" in over.value.__notes__[0]
    caplog.clear()
    writing = asyncio.create_task(asyncio.to_thread(commit, 60.0))

    await it_waits(caplog)
    own_servers.postgres.start()
    await writing
    assert await held(deployment, threads) == {t: [0, 1] for t in threads}


@pytest.mark.long  # three tries that fail
async def test_a_query_that_waits_for_postgres_can_be_stopped(
    spark: Any, own_servers: Servers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    deployment = Deployment(own_servers)
    await prepared(deployment)
    threads = [fresh()]
    put(tmp_path / "in", "0.json", rows_of(threads, range(2)))
    own_servers.postgres.stop()
    write = checkpoint_sink(sink(deployment, outage_timeout_s=100.0))
    query = stream(spark, tmp_path / "in", tmp_path / "ck", write)

    await it_waits(caplog)
    async with asyncio.timeout(30):
        await asyncio.to_thread(query.stop)
    own_servers.postgres.start()
    await ended(stream(spark, tmp_path / "in", tmp_path / "ck", write))
    assert write.last is not None
    assert await held(deployment, threads) == {threads[0]: [0, 1]}


async def test_a_query_of_another_session_is_seen_to_stop(spark: Any, tmp_path: Path) -> None:
    """Regression: a sink that waited for a server went on waiting, for up to an hour. Notebooks share a context so."""
    began, enough, seen = threading.Event(), threading.Event(), []

    def wait(df: Any, _: int) -> None:
        stopped = foreach_batch._stopped(df, Query.of(context_of(df)))
        seen.append(stopped())
        began.set()
        while not stopped() and not enough.wait(0.05):
            pass
        seen.append(stopped())

    read = spark.newSession().readStream.format("rate").load()
    query = read.writeStream.foreachBatch(wait).option("checkpointLocation", str(tmp_path / "ck")).start()
    assert await asyncio.to_thread(began.wait, 60)
    stopping = asyncio.create_task(asyncio.to_thread(query.stop))

    async def noticed() -> bool:
        return len(seen) > 1

    try:
        await eventually(noticed, 15)
    finally:
        enough.set()
        await stopping
    assert seen == [False, True]


@pytest.mark.long  # Postgres stops and starts
async def test_the_progress_of_a_query_tells_how_long_its_sink_waited(
    spark: Any, own_servers: Servers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    deployment = Deployment(own_servers)
    await prepared(deployment)
    threads = [fresh()]
    for batch in range(2):
        put(tmp_path / "in", f"{batch}.json", rows_of(threads, range(batch, batch + 1)))
    told: dict[int, QueryProgress] = {}
    loop, all_told = asyncio.get_running_loop(), asyncio.Event()

    def tell(progress: QueryProgress) -> None:
        told[progress.batch_id] = progress
        if len(told) == 2:
            loop.call_soon_threadsafe(all_told.set)

    listener = ProgressListener(tell)
    spark.streams.addListener(listener)
    try:
        own_servers.postgres.stop()  # a query's first batch needs Postgres
        query = stream(spark, tmp_path / "in", tmp_path / "ck", checkpoint_sink(sink(deployment)))
        await it_waits(caplog)
        own_servers.postgres.start()
        await ended(query)
        async with asyncio.timeout(60):
            await all_told.wait()
    finally:
        spark.streams.removeListener(listener)
    first, second = told[0].sink, told[1].sink
    assert first is not None
    assert second is not None
    assert (first.written, second.written) == (1, 1)
    assert first.waited_ms > 0
    assert second.waited_ms == 0
