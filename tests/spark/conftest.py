"""One Spark session for all tests of a run."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from bufstore.spark import SinkConfig, session
from conftest import Deployment
from spark.jobs import QUICK, settings_of


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    """Two cores, four attempts of a task, a JVM that starts quickly."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = session("bufstore tests", "local[2,4]", **QUICK)
        found.sparkContext.setLogLevel("OFF")
    yield found
    found.stop()


@pytest.fixture
def config(deployment: Deployment) -> SinkConfig:
    """A sink into the test's deployment."""
    return SinkConfig(app_id="query", **settings_of(deployment))
