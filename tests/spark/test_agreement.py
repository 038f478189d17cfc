"""Jobs follow the log's settings: where it is flushed to, and what may be purged."""

from __future__ import annotations

import asyncio
import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest

from bufstore import ConfigDrift, ConfigError, PostgresThreadStore
from bufstore.spark import SinkConfig, archive, bulk_drain
from bufstore.spark.sink.row_writer import write_rows
from conftest import Deployment
from helpers import eventually, fresh, run_of
from spark.jobs import rows_of, settings_of, where
from thorough import seldom


def sink(deployment: Deployment, **options: Any) -> SinkConfig:
    return SinkConfig(app_id=fresh("app"), **settings_of(deployment), **options)


@pytest.mark.long  # thirty seconds
@pytest.mark.parametrize("archiving", [True, *seldom(False)])
async def test_a_drain_keeps_and_purges_what_the_log_says(spark: Any, deploy: Any, *, archiving: bool) -> None:
    """The log is nearly full, and a thread's row is locked while the drain waits for it."""
    deployment = deploy(max_bytes=1 << 20, archive=archiving)
    held_up = fresh("held")
    async with deployment.store() as store:
        await store.checkpoint(held_up, ["first"], run_of(held_up))
        await store.force_flush(held_up)
    async with deployment.store(flusher=False) as store:
        for n in range(80):
            await store.checkpoint(f"t{n % 20}", [f"{n}" + "x" * 10_000], run_of(f"t{n % 20}", n))
        await store.checkpoint(held_up, ["second"], run_of(held_up))
    # Only now, because a write may then take half a second only.
    await deployment.change(failover_window_s=1.0)
    async with deployment.store(flusher=False) as store:
        before = (await store.statistics()).log_bytes
        assert before > 0.7 * (1 << 20)
        row = f"SELECT FROM {deployment.name}.buffer_threads WHERE thread_id = %s FOR UPDATE"
        async with await psycopg.AsyncConnection.connect(deployment.servers.postgres.dsn) as connection:
            await connection.execute(row, [held_up])
            drain = asyncio.create_task(asyncio.to_thread(bulk_drain, spark, where(deployment), tasks=1))

            async def purged() -> bool:
                return (await store.statistics()).log_bytes < before

            async def flushed() -> bool:
                return sum(lag > 0 for lag in (await store.lag()).values()) <= 1

            await eventually(flushed, 60)
            # Long enough for two checks of the retention, and for the failover window.
            if archiving:
                await asyncio.sleep(3)
                assert not await purged()
            else:
                await eventually(purged, 60)
        await drain


@pytest.mark.long
async def test_a_job_takes_a_log_only_that_it_can_flush_and_keeps_to_its_window(
    spark: Any, deploy: Any, tmp_path: Path
) -> None:
    deployment = deploy(failover_window_s=20.0)
    inner = PostgresThreadStore(deployment.servers.postgres.dsn, schema=deployment.name)
    inner.store_kind = "mine"
    async with deployment.store(inner, flusher=False) as store:
        await store.checkpoint("t", [1], run_of("t"))
    for job in (partial(bulk_drain, spark, where(deployment)), partial(write_rows, sink(deployment), 0, [[{}]])):
        with pytest.raises(ConfigDrift, match="in a process that opens that store"):
            await asyncio.to_thread(job)
    elsewhere = dataclasses.replace(where(deployment), schema=fresh("empty"))
    with pytest.raises(ConfigDrift, match="database is"):
        await asyncio.to_thread(archive, spark, elsewhere, str(tmp_path))
    fitting = deploy(failover_window_s=20.0)
    async with fitting.store(flusher=False):
        pass
    rows = rows_of(["t"], range(1))
    with pytest.raises(ConfigError, match=r"at most half of the log's failover_window_s \(20 s\)"):
        await asyncio.to_thread(write_rows, sink(fitting, append_timeout_s=30.0), 0, [rows])
    assert (await asyncio.to_thread(write_rows, sink(fitting), 0, [rows])).counts.written == 1
