"""Killed processes, attempts that both write, and other ways to run Spark: each row is written once."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
import sys
import tarfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bufstore import ConfigError
from bufstore.spark import SinkConfig, checkpoint_sink, ensure_java
from conftest import Deployment
from helpers import fresh
from spark.jobs import ended, environment, frame, held, job, prepared, put, rows_of, settings_of, stream


@pytest.mark.long  # two Javas
async def test_a_driver_killed_between_the_sink_and_sparks_commit(
    spark: Any, deployment: Deployment, config: SinkConfig, tmp_path: Path
) -> None:
    await prepared(deployment)
    threads = [fresh() for _ in range(4)]
    for batch in range(3):
        put(tmp_path / "in", f"{batch}.json", rows_of(threads, range(3 * batch, 3 * batch + 3)))
    settings = {"sink": settings_of(deployment) | {"app_id": "query"}}
    places = {"input": str(tmp_path / "in"), "checkpoints": str(tmp_path / "ck")}
    code, _ = await job("killed", environment(), **settings, **places)
    assert code == -signal.SIGKILL
    assert sorted(p.name for p in (tmp_path / "ck" / "commits").glob("?")) == ["0"]
    assert await held(deployment, threads) == {t: list(range(6)) for t in threads}, "batch 1 is there"
    await ended(stream(spark, tmp_path / "in", tmp_path / "ck", checkpoint_sink(config)))
    assert await held(deployment, threads) == {t: list(range(9)) for t in threads}


@pytest.mark.long  # two Javas
async def test_of_a_batch_within_which_the_driver_was_killed_no_changed_row_is_swallowed(
    spark: Any, deployment: Deployment, config: SinkConfig, tmp_path: Path
) -> None:
    """One of two tasks has written one of its rows. Its part must come again unchanged; the other part may change."""
    await prepared(deployment)
    several = frame(spark, rows_of([fresh() for _ in range(40)], range(1)))
    placed = several.selectExpr("thread_id", "pmod(hash(thread_id), 2)").orderBy("thread_id").collect()
    begun, later = ([thread for thread, part in placed if part == number][:2] for number in (0, 1))
    threads = [*begun, *later]
    rows = rows_of(threads, range(2, 4))
    put(tmp_path / "in", "0.json", rows_of(threads, range(2)))
    put(tmp_path / "in", "1.json", rows)
    settings = {"sink": settings_of(deployment) | {"app_id": "query"}}
    places = {"input": str(tmp_path / "in"), "checkpoints": str(tmp_path / "ck")}
    code, _ = await job("killed_within", environment(), **settings, **places)
    assert code == -signal.SIGKILL
    before = {t: [0, 1] for t in threads} | {begun[0]: [0, 1, 2]}
    assert await held(deployment, threads) == before
    again = checkpoint_sink(replace(config, tasks=3))

    def put_changed(thread: str) -> None:
        """Change the message of the thread's first row in the batch."""
        other = [json.dumps({"n": 100, "thread": thread})]
        first = [row | {"delta": other} if (row["thread_id"], row["position"]) == (thread, 2) else row for row in rows]
        put(tmp_path / "in", "1.json", first)

    put_changed(begun[0])
    with pytest.raises(Exception, match="begun before with other rows and not finished"):
        await ended(stream(spark, tmp_path / "in", tmp_path / "ck", again))
    assert await held(deployment, threads) == before, "nothing of the batch was written"
    put_changed(later[0])
    await ended(stream(spark, tmp_path / "in", tmp_path / "ck", again))
    assert await held(deployment, threads) == {t: [0, 1, 2, 3] for t in threads} | {later[0]: [0, 1, 100, 3]}


@pytest.mark.long  # two Javas
async def test_on_spark_connect(deployment: Deployment, tmp_path: Path) -> None:
    await prepared(deployment)
    threads = [fresh() for _ in range(3)]
    for batch in range(2):
        put(tmp_path / "input", f"{batch}.json", rows_of(threads, range(2 * batch, 2 * batch + 2)))
    settings = {"sink": settings_of(deployment) | {"app_id": "query"}}
    places = {name: str(tmp_path / name) for name in ("input", "checkpoints", "archive")}
    code, found = await job("connect", environment(), **settings, **places)
    assert code == 0
    assert "Connect cannot remove files" in found.pop("expire")
    assert found == {
        "entries": 12, "refused": True, "archived": True, "rows": 12, "both": 12, "drained": 12, "messages": 12,
        "present": 12, "merged": 0,
    }  # fmt: skip
    assert await held(deployment, threads) == {t: list(range(4)) for t in threads}


def test_the_home_of_a_java_that_a_script_starts_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Regression: with a script on the PATH, as jenv and asdf put it there, Spark did not start."""
    java = tmp_path / "shims" / "java"
    java.parent.mkdir()
    java.write_text(f'#!/bin/sh\nexec "{ensure_java()}/bin/java" "$@"\n')
    java.chmod(0o755)
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setenv("PATH", str(java.parent), prepend=os.pathsep)
    assert (ensure_java() / "lib" / "modules").exists()


def test_where_no_java_can_be_put_the_error_says_what_to_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="set XDG_CACHE_HOME"):
        ensure_java()


def test_a_java_home_that_works_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ours = ensure_java()
    monkeypatch.setenv("JAVA_HOME", str(ours))
    assert ensure_java() == ours
    old = tmp_path / "old" / "bin" / "java"
    old.parent.mkdir(parents=True)
    old.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\"' >&2\n")
    old.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "old"))
    assert ensure_java() != tmp_path / "old", "too old is as good as none"


@asynccontextmanager
async def standalone(folder: Path) -> AsyncIterator[str]:
    """Start a standalone cluster of a master and two workers on different hosts; yields its URL."""
    import pyspark

    start = Path(pyspark.__file__).parent / "bin" / "spark-class"
    env = environment(JAVA_HOME=str(ensure_java()), SPARK_NO_DAEMONIZE="1", PYSPARK_PYTHON=sys.executable)
    running: list[asyncio.subprocess.Process] = []

    async def begin(*arguments: str, ready: str) -> str:
        process = await asyncio.create_subprocess_exec(
            start, *arguments, env=env, cwd=folder, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
        )
        running.append(process)
        assert process.stderr is not None
        async with asyncio.timeout(60):
            while line := (await process.stderr.readline()).decode():
                if found := re.search(ready, line):
                    drains.append(asyncio.create_task(_drained(process.stderr)))
                    return found[0]
        raise AssertionError(f"{arguments} ended")

    drains: list[asyncio.Task[None]] = []
    deploy = "org.apache.spark.deploy"
    try:
        master = await begin(
            f"{deploy}.master.Master", "--host", "127.0.0.1", "--port", "0", "--webui-port", "0",
            ready=r"spark://127\.0\.0\.1:\d+",
        )  # fmt: skip
        for host in ("127.0.0.1", "127.0.0.2"):
            await begin(
                f"{deploy}.worker.Worker", "--host", host, "--webui-port", "0", "--cores", "1", "--memory", "1g",
                "--work-dir", str(folder), master, ready="Successfully registered",
            )  # fmt: skip
        yield master
    finally:
        for process in running:
            process.terminate()
        await asyncio.gather(*(process.wait() for process in running), *drains)


async def _drained(stream: asyncio.StreamReader) -> None:
    while await stream.readline():
        pass


@pytest.mark.long  # six Javas
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs a second loopback address")
async def test_two_attempts_that_both_write_everything(deployment: Deployment, tmp_path: Path) -> None:
    await prepared(deployment)
    threads = [fresh() for _ in range(8)]
    async with standalone(tmp_path) as master:
        quick = {
            "spark.speculation": "true",
            "spark.speculation.interval": "100ms",
            "spark.speculation.minTaskRuntime": "500ms",
            "spark.speculation.multiplier": "1.1",
            "spark.speculation.quantile": "0.5",
            "spark.executor.memory": "512m",
            "spark.sql.shuffle.partitions": "2",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.ui.enabled": "false",
        }
        code, found = await job(
            "speculating",
            environment(),
            sink=settings_of(deployment) | {"app_id": "query"},
            master=master,
            slow=str(tmp_path / "slow"),
            threads=threads,
            spark=quick,
        )
        assert (code, found) == (0, {"attempts": [0, 1]}), "both have written everything"
    assert await held(deployment, threads) == {t: list(range(5)) for t in threads}


@pytest.mark.long  # five Javas
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs a second loopback address")
async def test_the_command_for_a_standalone_cluster(deployment: Deployment, tmp_path: Path) -> None:
    import pyspark

    await prepared(deployment)
    threads = [fresh() for _ in range(4)]
    text = (Path(__file__).parents[2] / "docs" / "SPARK.md").read_text()
    found = re.search(r"spark-submit --master spark://host:7077.*?job\.py", text, re.DOTALL)
    assert found is not None
    (tmp_path / "bin").mkdir()
    packed = tmp_path / "bin" / "python"
    packed.write_text(f'#!/bin/sh\ntouch {tmp_path}/used\nexec {sys.executable} "$@"\n')
    packed.chmod(0o755)
    with tarfile.open(tmp_path / "env.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "bin", "bin")
    settings = {"sink": settings_of(deployment) | {"app_id": "query"}, "threads": threads}
    (tmp_path / "job.py").write_text(
        f"from spark.job_process import submitted\nimport json\nsubmitted(json.loads({json.dumps(settings)!r}))\n"
    )
    async with standalone(tmp_path) as master:
        command = shlex.split(found[0].replace("spark://host:7077", master).replace("\\\n", " "))
        command[0] = str(Path(pyspark.__file__).parent / "bin" / command[0])
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        env = environment(JAVA_HOME=str(ensure_java()), PATH=path)
        process = await asyncio.create_subprocess_exec(
            *command, cwd=tmp_path, env=env, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        async with asyncio.timeout(300):
            printed, _ = await process.communicate()
    assert process.returncode == 0, printed.decode()[-3000:]
    assert (tmp_path / "used").exists()
    assert await held(deployment, threads) == {t: [0, 1, 2] for t in threads}
