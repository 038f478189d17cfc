"""Helpers for tests of jobs: rows, files that a stream reads, queries, and the final contents of a deployment."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nats

from bufstore import Consistency, Run
from bufstore.spark import Deployment as Where
from conftest import Deployment
from helpers import JAVA_OPTIONS

SCHEMA = "thread_id string, run_id string, delta array<string>, position bigint"


def rows_of(threads: list[str], steps: range) -> list[dict[str, Any]]:
    """Return a row per step and thread, each with one message that names both."""
    return [
        {"thread_id": t, "run_id": f"run-{t}", "delta": [json.dumps({"n": n, "thread": t})], "position": n}
        for n in steps
        for t in threads
    ]


def frame(spark: Any, rows: list[dict[str, Any]]) -> Any:
    """Return the rows as a DataFrame."""
    return spark.createDataFrame([tuple(row.values()) for row in rows], SCHEMA)


def put(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    """Write a file that a stream reads."""
    folder.mkdir(exist_ok=True)
    file = folder / name
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    # Spark reads files in the order of their modification times.
    os.utime(file, (1e9 + len(list(folder.iterdir())),) * 2)


def stream(spark: Any, folder: Path, checkpoints: Path, write: Callable[[Any, int], None]) -> Any:
    """Start a query over all existing files, one file per batch; it ends by itself."""
    df = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).json(str(folder))
    return (
        df.writeStream.foreachBatch(write)
        .option("checkpointLocation", str(checkpoints))
        .trigger(availableNow=True)
        .start()
    )


async def ended(query: Any) -> None:
    """Wait for the end of a query. Raises its error."""
    assert await asyncio.to_thread(query.awaitTermination, 180)


def uncommit(checkpoints: Path, batch: int) -> None:
    """Remove Spark's commit of a batch, as if killed before it: the batch comes again with the same id."""
    (checkpoints / "commits" / str(batch)).unlink()
    (checkpoints / "commits" / f".{batch}.crc").unlink(missing_ok=True)


async def prepared(deployment: Deployment) -> None:
    """Make the log."""
    async with deployment.store():
        pass


async def held(deployment: Deployment, threads: list[str]) -> dict[str, list[Any]]:
    """Flush everything, and return the numbers of each thread's messages in Postgres."""
    async with deployment.store() as store:
        await store.force_flush_all()
        return {
            t: [m["n"] for m in await store.load_messages(t, consistency=Consistency.EVENTUAL) or []] for t in threads
        }


def settings_of(deployment: Deployment) -> dict[str, Any]:
    """Return the settings of a SinkConfig as JSON values."""
    servers = deployment.servers
    return {
        "nats": servers.nats.url,
        "postgres": servers.postgres.dsn,
        "schema": deployment.name,
        "stream": deployment.log.stream,
        "bucket": deployment.log.bucket,
    }


def where(deployment: Deployment) -> Where:
    """Return the deployment as jobs take it."""
    return Where(**settings_of(deployment))


async def write(deployment: Deployment, threads: list[str], steps: range) -> None:
    """Write to the log only."""
    async with deployment.store(flusher=False) as store:
        for row in rows_of(threads, steps):
            run = Run(run_id=row["run_id"], thread_id=row["thread_id"], agent_id="planner")
            await store.checkpoint_append(row["thread_id"], [json.loads(m) for m in row["delta"]], run)


async def write_together(deployment: Deployment, threads: list[str], steps: range) -> None:
    """Write all threads at the same time, so that a group holds entries of many."""
    async with deployment.store(flusher=False) as store:
        for n in steps:
            runs = [Run(run_id=f"run-{t}", thread_id=t) for t in threads]
            await asyncio.gather(*(store.checkpoint_append(run.thread_id, [{"n": n}], run) for run in runs))


async def purge(deployment: Deployment, below: int) -> None:
    """Purge the log below this sequence, as flushers do, but without asking them."""
    await _ask(deployment, "PURGE", {"seq": below})


async def delete(deployment: Deployment, sequence: int) -> None:
    """Remove one message of the log without telling any process."""
    await _ask(deployment, "MSG.DELETE", {"seq": sequence})


async def _ask(deployment: Deployment, verb: str, body: dict[str, Any]) -> None:
    client = await nats.connect(deployment.servers.nats.url)
    asked = f"$JS.API.STREAM.{verb}.{deployment.log.stream}"
    answer = await client.request(asked, json.dumps(body).encode(), timeout=5)
    await client.close()
    assert "error" not in json.loads(answer.data), answer.data


async def in_postgres(deployment: Deployment, threads: list[str]) -> dict[str, list[int] | None]:
    """Return the numbers of each thread's messages in Postgres now."""
    async with deployment.inner() as store:
        found = {t: await store.load_messages(t) for t in threads}
    return {t: [m["n"] for m in messages] if messages is not None else None for t, messages in found.items()}


def read_options(deployment: Deployment, **more: Any) -> dict[str, str]:
    """Return options of format("threadlog")."""
    return read_options_of(settings_of(deployment), **more)


def read_options_of(settings: dict[str, Any], **more: Any) -> dict[str, str]:
    """Return the same options for settings."""
    found = {"natsUrl": settings["nats"], "stream": settings["stream"], "numPartitions": 2} | more
    return {name: str(value) for name, value in found.items()}


def write_options(deployment: Deployment, **more: Any) -> dict[str, str]:
    """Return options of format("bufstore") for writing."""
    found = settings_of(deployment)
    masked = {"natsUrl": found.pop("nats"), "postgresUrl": found.pop("postgres")}
    return masked | found | {name: str(value) for name, value in more.items()}


#: Settings of a JVM that starts quickly and logs little.
QUICK = {
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.extraJavaOptions": JAVA_OPTIONS,
    "spark.sql.streaming.stopTimeout": "30s",
    "spark.sql.session.timeZone": "UTC",
    "spark.ui.enabled": "false",
}
_TIMEOUT_S = 400


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a process with Spark, in which every Java starts quickly."""
    tests = Path(__file__).parents[1]
    paths = [str(tests), *[p for p in sys.path if p and Path(p).is_dir()]]
    ours = {"PYTHONPATH": os.pathsep.join(paths), "SPARK_LOCAL_IP": "127.0.0.1", "JDK_JAVA_OPTIONS": JAVA_OPTIONS}
    return dict(os.environ) | ours | more


async def job(what: str, env: dict[str, str], **settings: Any) -> tuple[int, dict[str, Any]]:
    """Run a job in a process of its own; return its exit code and the JSON it printed last."""
    command = [sys.executable, "-m", "spark.job_process", what, json.dumps({"spark": QUICK} | settings)]
    process = await asyncio.create_subprocess_exec(
        *command, env=env, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(_TIMEOUT_S):
        out, err = await process.communicate()
    lines = [line for line in out.decode().splitlines() if line.startswith("{")]
    assert process.returncode is not None
    assert lines or process.returncode < 0, err.decode()[-3000:]
    return process.returncode, json.loads(lines[-1]) if lines else {}
