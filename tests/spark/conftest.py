"""One Spark session for all tests of a run."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from bufstore.spark import SinkConfig, session
from conftest import Deployment


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    """Two cores, four attempts of a task, a JVM that starts quickly."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = session(
            "bufstore tests",
            "local[2,4]",
            **{
                "spark.sql.shuffle.partitions": "2",
                "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
                "spark.sql.streaming.stopTimeout": "30s",
                "spark.sql.session.timeZone": "UTC",
            },
        )
        found.sparkContext.setLogLevel("OFF")
    yield found
    found.stop()


@pytest.fixture
def config(deployment: Deployment) -> SinkConfig:
    """A sink into the test's deployment."""
    servers = deployment.servers
    return SinkConfig(
        app_id="query",
        nats=servers.nats.url,
        postgres=servers.postgres.dsn,
        schema=deployment.name,
        stream=deployment.log.stream,
        bucket=deployment.log.bucket,
    )
