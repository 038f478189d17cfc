"""Fixtures for tests with Spark: one session for all tests of a run."""

from __future__ import annotations

import asyncio
import json
import os
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import nats
import nats.errors
import pytest

from bench.three_servers import three_servers
from bufstore.embedded import Servers
from bufstore.spark import SinkConfig, process_loop, session
from bufstore.spark.sink.open_sink import OpenSink
from conftest import Deployment
from helpers import eventually
from spark.jobs import QUICK, settings_of
from thorough import seldom


@contextmanager
def _environment_as_it_was() -> Iterator[None]:
    """Restore the environment: a start of Spark sets variables that tell its processes where Java and Python are."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def _same_environment() -> Iterator[None]:
    with _environment_as_it_was():
        yield


@pytest.fixture(autouse=True)
def _nothing_stays_open() -> Iterator[None]:
    """Close what a job opened: a process keeps it for the job's next task, but each test is another job. Together the
    tests would take all connections of Postgres, and the next test would wait for a minute.
    """
    yield
    process_loop.loop().run(_close_all())


async def _close_all() -> None:
    opened = process_loop.loop()._opened
    found = [task.result() for task in opened.values() if task.done() and task.exception() is None]
    opened.clear()
    for one in found:
        for part in (one.store, one.ledger) if isinstance(one, OpenSink) else (one,):
            await part.aclose()


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A session with two cores, four attempts per task, and a JVM that starts quickly."""
    tables = {"spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("tables"))}
    with _environment_as_it_was(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = session("bufstore tests", "local[2,4]", **QUICK, **tables)
        found.sparkContext.setLogLevel("OFF")
    yield found
    found.stop()


@pytest.fixture
def config(deployment: Deployment) -> SinkConfig:
    """A sink into the test's deployment."""
    return SinkConfig(app_id="query", **settings_of(deployment))


@pytest.fixture(scope="session")
def _cluster_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with three_servers(tmp_path_factory.mktemp("cluster")) as running:
        url = f"nats://all:all@127.0.0.1:{running[0].port}"
        with ThreadPoolExecutor(1) as pool:  # its own event loop, because the tests' loop is running
            pool.submit(asyncio.run, _whole(url)).result(90)
        yield url


async def _whole(url: str) -> None:
    """Wait until all three servers take part, so that a stream of three replicas can be made."""

    async def made() -> bool:
        try:
            client = await nats.connect(url, allow_reconnect=False)
        except (nats.errors.Error, OSError):
            return False
        try:
            wanted = json.dumps({"name": "probe", "subjects": ["probe"], "num_replicas": 3})
            found = await client.request("$JS.API.STREAM.CREATE.probe", wanted.encode(), timeout=5)
            await client.request("$JS.API.STREAM.DELETE.probe", timeout=5)
        except nats.errors.Error:
            return False
        finally:
            await client.close()
        return "error" not in json.loads(found.data)

    await eventually(made, 60)


@pytest.fixture
def replicated(servers: Servers, _cluster_url: str) -> Deployment:
    """A deployment whose log has three replicas."""
    elsewhere: Any = SimpleNamespace(nats=SimpleNamespace(url=_cluster_url), postgres=servers.postgres)
    return Deployment(elsewhere, replicas=3)


@pytest.fixture(params=["deployment", *seldom("replicated")])
def either(request: pytest.FixtureRequest) -> Deployment:
    """A deployment on one server, and one on three."""
    found: Deployment = request.getfixturevalue(request.param)
    return found
