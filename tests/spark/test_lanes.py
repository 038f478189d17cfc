"""Jobs on a store of several lanes: the sink, a drain and tables use all lanes, readers of a log read one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bufstore import ConfigDrift, ConfigError, NatsConfig, Run, StoreUnavailable
from bufstore.buffer.lanes import lane_logs, lane_of
from bufstore.spark import SinkConfig, archive, bulk_drain, checkpoint_sink, process_loop, restore
from bufstore.spark.sink.backfill import BackfillWriter, Prepared
from bufstore.spark.sink.row_writer import write_rows
from bufstore.spark.tables.table_options import TableOptions
from bufstore.spark.tables.table_scan import planned
from conftest import Deployment
from helpers import fresh, query
from spark.jobs import frame, held, in_postgres, prepared, read_options, rows_of, settings_of, where, write
from thorough import seldom


@pytest.fixture
def laned(deploy: Callable[..., Deployment]) -> Deployment:
    return deploy(lanes=2, max_bytes=64 << 20)


def in_both_lanes(laned: Deployment, count: int) -> list[str]:
    """Return ids of threads of the first lane and of the second, in turn."""
    return [next(t for t in iter(fresh, "") if lane_of(t, laned.log) == n % 2) for n in range(count)]


@pytest.mark.long
async def test_rows_go_to_the_lanes_of_their_threads_once_and_a_drain_flushes_all(
    spark: Any, laned: Deployment, tmp_path: Path
) -> None:
    await prepared(laned)
    config = SinkConfig(app_id="query", **settings_of(laned))
    threads = in_both_lanes(laned, 12)
    lanes = {t: lane_of(t, laned.log) for t in threads}
    assert set(lanes.values()) == {0, 1}
    for _ in range(2):  # the second time nothing is new
        await asyncio.to_thread(checkpoint_sink(config), frame(spark, rows_of(threads, range(3))), 0)
    await asyncio.to_thread(checkpoint_sink(config), frame(spark, rows_of(threads, range(3, 5))), 1)
    assert await held(laned, threads) == {t: list(range(5)) for t in threads}
    tables = spark.read.format("bufstore").options(**read_options(laned), table="threads")
    tables = tables.options(postgresUrl=laned.servers.postgres.dsn, schema=laned.name)
    shown = {row["thread_id"]: row["version"] for row in await asyncio.to_thread(lambda: tables.load().collect())}
    assert shown == dict.fromkeys(threads, 5)

    report = await asyncio.to_thread(bulk_drain, spark, where(laned), tasks=2)
    assert report.parked == 0
    assert await in_postgres(laned, threads) == {t: list(range(5)) for t in threads}

    for lane, log in enumerate(lane_logs(laned.log)):
        of_lane = replace(where(laned), stream=log.stream, bucket=log.bucket)
        mine = {t for t in threads if lanes[t] == lane}
        options = read_options(laned) | {"stream": log.stream}
        rows = await asyncio.to_thread(spark.read.format("threadlog").options(**options).load().collect)
        assert {row["thread_id"] for row in rows} == mine
        archived = await asyncio.to_thread(archive, spark, of_lane, str(tmp_path / log.stream))
        assert archived.count > 0
    # Each lane's ledger has the position of its archive, which its flushers read.
    dsn = laned.servers.postgres.dsn
    for schema in (laned.name, f"{laned.name}_lane1"):
        assert (await query(dsn, f'SELECT position FROM "{schema}".buffer_archive'))[0][0] > 0


async def test_a_backfill_past_the_logs_writes_each_row_once(
    laned: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but the transaction itself knows rows without a number: a lane that must wait makes no other repeat."""
    await prepared(laned)
    past = SinkConfig(app_id="query", mode="postgres", bad_rows="quarantine", **settings_of(laned))
    threads = [next(t for t in iter(fresh, "") if lane_of(t, laned.log) == lane) for lane in (0, 1)]
    refusals, write_past_log = [StoreUnavailable("away for a moment")], BackfillWriter.write

    async def write_(writer: BackfillWriter, rows: Mapping[str, Sequence[Prepared]]) -> tuple[int, int]:
        if threads[1] in rows and refusals:
            raise refusals.pop()
        return await write_past_log(writer, rows)

    monkeypatch.setattr(BackfillWriter, "write", write_)
    found = await asyncio.to_thread(write_rows, past, None, [rows_of(threads, range(3))])
    assert (found.counts.written, found.counts.repeated, refusals) == (6, 0, [])
    assert await in_postgres(laned, threads) == {t: [0, 1, 2] for t in threads}
    async with laned.store() as store:
        for thread_id in threads:
            run = Run(run_id=f"run-{thread_id}", thread_id=thread_id, agent_id="planner")
            await store.checkpoint_append(thread_id, [{"n": 3}], run)
        assert (await store.verify()).ok
    assert await held(laned, threads) == {t: [0, 1, 2, 3] for t in threads}


@pytest.mark.parametrize("log_is_there", [*seldom(True), False])
async def test_the_archives_of_all_lanes_come_back_into_postgres(
    spark: Any, laned: Deployment, tmp_path: Path, log_is_there: bool
) -> None:
    threads = in_both_lanes(laned, 12)
    await write(laned, threads, range(3))
    for log in lane_logs(laned.log):
        of_lane = replace(where(laned), stream=log.stream, bucket=log.bucket)
        await asyncio.to_thread(archive, spark, of_lane, str(tmp_path / log.stream))
    other, dsn = laned, laned.servers.postgres.dsn
    if log_is_there:  # and Postgres is gone
        await query(dsn, f'DROP SCHEMA "{laned.name}" CASCADE')
        await query(dsn, f'DROP SCHEMA "{laned.name}_lane1" CASCADE')
    else:
        other = Deployment(laned.servers, lanes=2, max_bytes=64 << 20)
    second = str(tmp_path / lane_logs(laned.log)[1].stream)
    with pytest.raises(ConfigError, match="restore the first lane's archive first"):
        await asyncio.to_thread(restore, spark, second, where(other), dry_run=True)
    assert not await query(dsn, "SELECT 1 FROM pg_namespace WHERE nspname = %s", f"{other.name}_lane1")
    for _ in range(2):  # the second time all is there
        reports = [
            await asyncio.to_thread(restore, spark, str(tmp_path / log.stream), where(other))
            for log in lane_logs(laned.log)
        ]
        assert [report.refused for report in reports] == [0, 0], [report.reasons for report in reports]
        assert all(report.threads for report in reports)
    assert sum(report.present for report in reports) == 36
    assert await in_postgres(other, threads) == {t: [0, 1, 2] for t in threads}
    if not log_is_there:  # whoever makes the logs must have as many
        fewer = replace(other.log, lanes=1)
        other_lanes = Deployment(laned.servers)
        other_lanes.name, other_lanes.log = other.name, fewer
        with pytest.raises(ConfigDrift, match="lanes"):
            await prepared(other_lanes)
    await write(other, threads, range(3, 5))
    assert await held(other, threads) == {t: list(range(5)) for t in threads}


@pytest.mark.long
async def test_a_lanes_archive_does_not_come_into_a_store_with_other_lanes(
    spark: Any, laned: Deployment, deploy: Callable[..., Deployment], tmp_path: Path
) -> None:
    """Its ledger would be a new one, which knows no thread, so what the threads have since would be replaced."""
    one, threads = deploy(), in_both_lanes(laned, 6)
    for deployment, steps in ((laned, range(3)), (one, range(10, 15))):
        await write(deployment, threads, steps)
    assert await held(one, threads) == {t: list(range(10, 15)) for t in threads}
    second = lane_logs(laned.log)[1]
    path = str(tmp_path / "second")
    await asyncio.to_thread(archive, spark, replace(where(laned), stream=second.stream, bucket=second.bucket), path)
    for stream in (one.log.stream, "forgotten"):
        with pytest.raises((ConfigError, ConfigDrift), match="lanes"):
            await asyncio.to_thread(restore, spark, path, replace(where(one), stream=stream))
    assert await in_postgres(one, threads) == {t: list(range(10, 15)) for t in threads}
    dsn = laned.servers.postgres.dsn
    assert not await query(dsn, "SELECT 1 FROM pg_namespace WHERE nspname = %s", f"{one.name}_lane1")


@pytest.mark.long
async def test_an_archive_comes_back_into_the_logs_of_as_many_lanes_as_there_are(
    spark: Any, laned: Deployment, deploy: Callable[..., Deployment], tmp_path: Path
) -> None:
    """Each thread comes into its lane, wherever it was before."""
    one, path, threads = deploy(), str(tmp_path / "one"), in_both_lanes(laned, 12)
    await write(one, threads, range(3))
    await asyncio.to_thread(archive, spark, where(one), path)
    await prepared(laned)
    with pytest.raises(ConfigError, match=r"1 lanes and .*, this one has 2 and .*into the logs"):
        await asyncio.to_thread(restore, spark, path, where(laned))
    with pytest.raises(ConfigError, match="several lanes"):  # also when the log that would say so is gone
        await asyncio.to_thread(restore, spark, path, replace(where(laned), stream="gone"))
    for applied, present in ((36, 0), (0, 36)):
        report = await asyncio.to_thread(restore, spark, path, where(laned), into="log")
        assert (report.applied, report.present, report.refused, report.threads) == (applied, present, 0, 12)
    assert await held(laned, threads) == {t: [0, 1, 2] for t in threads}

    back = deploy()
    await prepared(back)
    for log in lane_logs(laned.log):
        path = str(tmp_path / log.stream)
        await asyncio.to_thread(archive, spark, replace(where(laned), stream=log.stream, bucket=log.bucket), path)
        report = await asyncio.to_thread(restore, spark, path, where(back), into="log")
        assert (report.refused, report.applied > 0) == (0, True)
    assert await held(back, threads) == {t: [0, 1, 2] for t in threads}


async def test_a_job_on_a_second_lane_says_which_stream_to_name(spark: Any, laned: Deployment) -> None:
    await prepared(laned)
    second = lane_logs(laned.log)[1]
    tables = TableOptions(
        nats=NatsConfig(servers=(laned.servers.nats.url,)),
        postgres=laned.servers.postgres.dsn,
        schema=laned.name,
        stream=second.stream,
        table="threads",
        columns=("thread_id",),
    )
    with pytest.raises(ConfigError, match=r"lane 1 of 2, .*name the first one's stream"):
        await asyncio.to_thread(process_loop.loop().run, planned(tables))
    few = replace(tables, stream=laned.log.stream, ending_positions=[1])
    with pytest.raises(ConfigError, match="endingPosition must have a position for each of the 2 lanes"):
        await asyncio.to_thread(process_loop.loop().run, planned(few))
    one = SinkConfig(app_id="query", **(settings_of(laned) | {"stream": second.stream, "bucket": second.bucket}))
    with pytest.raises(Exception, match="lane 1 of 2"):
        await asyncio.to_thread(checkpoint_sink(one), frame(spark, rows_of([fresh()], range(2))), 0)
