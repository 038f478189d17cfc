"""What a streaming query of the log answers: while the log is away, to its end, and while it waits for rows.

Without Spark and servers.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from bufstore.buffer.target import Target
from bufstore.config import LogConfig
from bufstore.errors import LogUnavailable, NoLog
from bufstore.nats.ranges import LogState
from bufstore.spark import DataLoss
from bufstore.spark.source import log_scan, threadlog_format
from bufstore.spark.source.offsets import Holes, Range
from bufstore.spark.source.options import read_options
from bufstore.spark.source.threadlog_format import _Stream

ALL = ReadAllAvailable()
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
        assert stream.latestOffset(START, ALL) == START
    clock[0] = 160.0
    with pytest.raises(type(error)):
        stream.latestOffset(START, ALL)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[LogState]:
    """The log as it is now, which tests replace. Every message is one row. A second state: what later looks show."""
    now = [log_at(5)]

    async def look(*_: Any, fresh: bool = False, reached: int = 0) -> LogState:
        return now[-1 if fresh or reached else 0]

    async def rows_between(_: Any, log: LogState, start: int, end: int) -> int:
        return max(0, end - max(start, log.first))

    monkeypatch.setattr(threadlog_format.log_scan, "look", look)
    monkeypatch.setattr(threadlog_format.log_scan, "rows_between", rows_between)
    return now


def log_at(end: int, first: int = 1, created: str = "then") -> LogState:
    return LogState(LogConfig(), created, 1, first, end, 0, Target("threads", "postgres", "there"))


def stream_of(**more: str) -> _Stream:
    return _Stream(read_options({"nats": "nats://h", "failOnDataLoss": "false"} | more))


def test_a_query_that_ends_by_itself_reads_a_stream_that_was_made_anew_to_its_end(log: list[LogState]) -> None:
    """Regression: it went to the old stream's end, so the next query left out what the new stream had below that."""
    log[0] = log_at(60)
    stream = stream_of()
    stream.prepareForTriggerAvailableNow()
    assert stream.latestOffset(START, ALL) == {"created": "then", "position": 60}
    log[0] = log_at(9, created="anew")
    end = stream.latestOffset(START, ALL)
    assert end == {"created": "anew", "position": 9}
    log[0] = log_at(20, created="anew")
    assert stream.latestOffset(end, ALL) == end, "what is written while it runs does not keep it going"


def test_a_query_that_ends_by_itself_reads_what_a_node_that_leads_no_more_lacks(log: list[LogState]) -> None:
    """Regression: it ended where such a node told that the log ended before."""
    stream = stream_of()
    stream.prepareForTriggerAvailableNow()
    log[:] = log_at(5), log_at(9)
    end = stream.latestOffset(START, ALL)
    assert end == {"created": "then", "position": 9}
    log[:] = log_at(5), log_at(20)
    assert stream.latestOffset(end, ALL) == end, "what is written while it runs does not keep it going"


def test_a_query_that_ends_by_itself_looks_for_a_loss_before_it_stores_a_proof(
    log: list[LogState], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof may stand where a message was that the log has lost."""
    look = threadlog_format.log_scan.look

    async def proving(*_: Any, fresh: bool = False, reached: int = 0) -> LogState:
        if fresh:
            log[0] = log_at(log[0].end + 1)
        return await look(*_, fresh=fresh, reached=reached)

    monkeypatch.setattr(threadlog_format.log_scan, "look", proving)
    log[0] = log_at(4)
    for _ in range(2):
        stream = stream_of(failOnDataLoss="true")
        stream.prepareForTriggerAvailableNow()
        with pytest.raises(DataLoss, match="went back"):
            stream.latestOffset(START, ALL)
    assert log[0].end == 4


def test_a_micro_batch_waits_no_longer_when_retention_moves_on(clock: list[float], log: list[LogState]) -> None:
    """Regression: the wait began anew whenever unread messages were purged, so a batch waited for ever."""
    stream = stream_of(minMessagesPerTrigger="100", maxTriggerDelay="60s")
    log[0] = log_at(6)
    start = stream.latestOffset(START, ALL)
    assert start["position"] == 6, "what a query finds when it starts does not wait"
    for at in (0.0, 59.0):
        clock[0] = 100.0 + at
        log[0] = log_at(20 + int(at), first=10 + int(at))
        assert stream.latestOffset(start, ALL) == start
    clock[0] = 160.0
    assert stream.latestOffset(start, ALL) == {"created": "then", "position": 79}


def test_a_query_that_starts_with_nothing_to_read_waits_for_rows(clock: list[float], log: list[LogState]) -> None:
    """Regression: its first micro-batch had one row, whatever minMessagesPerTrigger said."""
    stream = stream_of(minMessagesPerTrigger="3", maxTriggerDelay="60s")
    assert stream.latestOffset(START, ALL) == START, "nothing is there"
    clock[0] = 1000.0
    log[0] = log_at(6)
    assert stream.latestOffset(START, ALL) == START, "the wait begins when something is"
    log[0] = log_at(8)
    assert stream.latestOffset(START, ALL) == {"created": "then", "position": 8}


def test_a_node_that_leads_no_more_shows_a_stream_no_loss(log: list[LogState]) -> None:
    """Regression: a query ended with DataLoss when a node that had been cut off told where the log ended before."""
    stream = stream_of(failOnDataLoss="true")
    end = stream.latestOffset(START, ALL)
    log[:] = log_at(3), log_at(7)
    assert stream.latestOffset(end, ALL) == {"created": "then", "position": 7}, "another node says more"
    assert [part.value.end for part in stream.partitions(START, end)] == [5]
    log[:] = log_at(3), log_at(4)
    with pytest.raises(DataLoss, match="went back"):
        stream.latestOffset(end, ALL)
    log[:] = [log_at(7)]
    assert stream.latestOffset(end, ALL) == {"created": "then", "position": 7}


@pytest.mark.parametrize("fails", ["true", "false"])
def test_a_stream_that_a_repair_has_replaced_is_not_gone_back_to(log: list[LogState], fails: str) -> None:
    """Regression: a node that was cut off during a repair told of the stream before, and the query ended with DataLoss.

    Where that may be lost, it read that stream once more, and then the present one.
    """
    stream, later = stream_of(failOnDataLoss=fails), log_at(1009, first=1000, created="anew")
    start: dict[str, Any] = {"created": "anew", "position": 1005}
    log[:] = log_at(60), later
    end = stream.latestOffset(start, ALL)
    assert end == {"created": "anew", "position": 1009}
    parts = [part.value for part in stream.partitions(start, end)]
    assert (parts[0].start, parts[-1].end, {part.created for part in parts}) == (1005, 1009, {"anew"})
    ending = stream_of(failOnDataLoss=fails)
    ending.prepareForTriggerAvailableNow()
    assert ending.latestOffset(start, ALL) == end
    log[:] = [log_at(60)]
    if fails == "true":
        with pytest.raises(DataLoss, match="replaced by a new one"):
            stream.latestOffset(start, ALL)


async def test_a_task_reads_the_stream_that_was_planned_whichever_node_answers() -> None:
    """Regression: such a node made a task end with DataLoss: the stream was replaced while it was read."""
    later, part = log_at(1009, first=1000, created="anew"), Range(start=1005, end=1005, created="anew")

    async def look(*, reached: int = 0) -> LogState:
        return later if reached else log_at(60)

    async def read(*_: Any, **__: Any) -> AsyncGenerator[Any]:
        yield []

    reader: Any = SimpleNamespace(look=look, read=read)
    found = log_scan.messages(reader, later, part, Holes(part.start), fails=False)
    assert [reads async for reads in found] == [[]]


async def test_a_task_that_begins_in_an_outage_waits_for_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a worker that had no connection yet failed at once."""
    part, tries = Range(start=60, end=60, created="then"), 0

    async def look(**_: Any) -> LogState:
        return log_at(60)

    async def read(*_: Any, **__: Any) -> AsyncGenerator[Any]:
        for nothing in ():
            yield nothing

    async def reader_of(*_: Any) -> Any:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise LogUnavailable("cannot reach NATS")
        return SimpleNamespace(look=look, read=read)

    monkeypatch.setattr(log_scan, "reader_of", reader_of)
    options = read_options({"nats": "nats://h"}, outage_timeout_s=60.0)
    assert [rows async for rows in log_scan.batches(options, part)] == []
    assert tries >= 3
