"""What a streaming query of the log answers while the log is away, without Spark."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from bufstore.errors import LogUnavailable, NoLog
from bufstore.spark.source import threadlog_format
from bufstore.spark.source.options import read_options
from bufstore.spark.source.threadlog_format import _Stream

START: dict[str, Any] = {"created": "then", "position": 5}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    now = [100.0]
    monkeypatch.setattr(threadlog_format.time, "monotonic", lambda: now[0])
    yield now


@pytest.mark.parametrize("error", [NoLog("S"), LogUnavailable("no answer")])
def test_a_log_that_is_away_or_not_there_yet_is_nothing_new_for_a_while(clock: list[float], error: Exception) -> None:
    """Regression: a query ended while the log of a repair was not made yet."""

    async def fails(*_: Any) -> Any:
        raise error

    stream = _Stream(read_options({"nats": "nats://h"}, outage_timeout_s=60.0))
    stream._latest = fails  # type: ignore[method-assign]
    stream._look = fails  # type: ignore[method-assign]
    assert stream.reportLatestOffset() is None
    for at in (100.0, 159.0):
        clock[0] = at
        assert stream.latestOffset(START, ReadAllAvailable()) == START
    clock[0] = 160.0
    with pytest.raises(type(error)):
        stream.latestOffset(START, ReadAllAvailable())
