"""What is told of a job: how far it is behind, and what the sink made of each micro-batch's rows."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bufstore.spark import drain
from bufstore.spark.progress import ProgressListener, QueryProgress, lag_of
from bufstore.spark.sink.batch import REMEMBERED_BATCHES, BatchReport, note_report
from bufstore.spark.sink.row_writer import RowCounts
from bufstore.spark.sink.spark_ledger import Query
from unit.fake_log import run


def event_of(query_id: str, batch_id: int) -> SimpleNamespace:
    """Return Spark's event of a batch that is done."""
    return SimpleNamespace(
        progress=SimpleNamespace(
            id=query_id,
            name=None,
            batchId=batch_id,
            numInputRows=1,
            processedRowsPerSecond=1.0,
            batchDuration=1,
            sources=[],
            observedMetrics={},
        )
    )


def test_lag_is_told_of_logs_only() -> None:
    def at(position: int) -> str:
        return f'{{"created":"c","position":{position}}}'

    assert lag_of([(at(5), at(9)), ("{}", "{}"), (None, None)]) == 4
    assert lag_of([("0", "5")]) is None
    assert lag_of([('{"position":"a"}', '{"position":"b"}'), (at(5), at(9))]) == 4, "another source may say anything"


def test_a_drain_tells_its_lag_again_after_on_lag_failed(caplog: pytest.LogCaptureFixture) -> None:
    """Regression: the first error of `on_lag` ended all its calls, and nobody heard of it."""
    told: list[int] = []

    async def lag() -> dict[int, int]:
        return {0: 2, 1: 3}

    def on_lag(left: int) -> None:
        told.append(left)
        if len(told) == 1:
            raise ValueError("the progress bar is closed")
        raise asyncio.CancelledError  # the drain is over

    with pytest.raises(asyncio.CancelledError):
        run(drain._watch(cast(Any, SimpleNamespace(lag=lag)), on_lag))
    assert told == [5, 5]
    assert "the progress bar is closed" in caplog.text


def test_a_batch_is_told_of_when_later_ones_are_done_already() -> None:
    told: list[QueryProgress] = []
    listener = ProgressListener(told.append)
    last = REMEMBERED_BATCHES + 2
    for batch_id in range(last + 1):
        note_report(Query("late"), BatchReport(batch_id, RowCounts(written=batch_id), repeated=False))
    note_report(Query(), BatchReport(last, RowCounts(), repeated=False))  # outside of a query

    for batch_id in (2, 3, last):
        listener.onQueryProgress(event_of("late", batch_id))
    listener.onQueryProgress(event_of("another", last))

    assert [progress.sink for progress in told] == [None, RowCounts(written=3), RowCounts(written=last), None]
