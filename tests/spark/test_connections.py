"""The number of connections to Postgres that a job's processes take, for which operators plan."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from psycopg.conninfo import make_conninfo

from bufstore import BufferedThreadStore
from bufstore.postgres.connection.pool import Pool
from bufstore.spark import SinkConfig
from bufstore.spark.sink.bufstore_format import BufstoreFormat
from bufstore.spark.sink.row_writer import write_rows
from conftest import Deployment
from helpers import eventually, fresh, query, run_of
from spark.jobs import prepared, read_options, rows_of, settings_of


def named(deployment: Deployment) -> str:
    """Return the DSN with an application name that identifies its connections."""
    return make_conninfo(deployment.servers.postgres.dsn, application_name=deployment.name)


async def connections(deployment: Deployment) -> int:
    there = "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s"
    return int((await query(deployment.servers.postgres.dsn, there, deployment.name))[0][0])


@pytest.mark.parametrize(("mode", "lanes"), [("log", 1), ("postgres", 1), ("log", 2)])
async def test_a_worker_process_takes_no_more_connections_than_is_said(
    deploy: Any, monkeypatch: pytest.MonkeyPatch, mode: Any, lanes: int
) -> None:
    deployment = deploy(lanes=lanes, max_bytes=64 << 20)
    await prepared(deployment)
    sizes: list[int] = []
    opening = Pool.open

    async def noticed(pool: Pool, *arguments: Any, **more: Any) -> None:
        sizes.append(pool.max_size)
        await opening(pool, *arguments, **more)

    opening_store = BufferedThreadStore.open

    async def tried(*arguments: Any, **more: Any) -> BufferedThreadStore:
        sizes.clear()  # of a try that came to nothing
        return await opening_store(*arguments, **more)

    monkeypatch.setattr(Pool, "open", noticed)
    monkeypatch.setattr(BufferedThreadStore, "open", tried)
    settings = settings_of(deployment) | {"postgres": named(deployment)}
    config = SinkConfig(app_id="query", mode=mode, **settings)
    threads = sorted(fresh() for _ in range(500))
    found = await asyncio.to_thread(write_rows, config, 0, [rows_of(threads, range(1))])
    assert found.counts.written == len(threads)
    assert sum(sizes) == 5 + 3 * lanes, "each at its largest"
    assert 0 < await connections(deployment) <= sum(sizes)


async def test_a_task_that_reads_a_table_takes_one_connection(deployment: Deployment) -> None:
    threads = [fresh() for _ in range(3)]
    async with deployment.store() as store:
        for thread in threads:
            await store.checkpoint(thread, [{"n": n} for n in range(2000)], run_of(thread))
        await store.force_flush_all()
    options = read_options(deployment, postgresUrl=named(deployment), schema=deployment.name, table="messages")
    source = BufstoreFormat(options | {"numPartitions": "1"})
    reader = source.reader(source.schema())
    (part,) = await asyncio.to_thread(reader.partitions)

    async def planning_is_over() -> bool:
        return await connections(deployment) == 0

    await eventually(planning_is_over)
    found = reader.read(part)
    await asyncio.to_thread(next, found)
    assert await connections(deployment) == 1
    await asyncio.to_thread(found.close)
