"""What is told of each micro-batch: how far a streaming query is behind, and what the sink made of the rows."""

from __future__ import annotations

from types import SimpleNamespace

from bufstore.spark.progress import ProgressListener, QueryProgress, lag_of
from bufstore.spark.sink.batch import REMEMBERED_BATCHES, BatchReport, note_report
from bufstore.spark.sink.row_writer import RowCounts
from bufstore.spark.sink.spark_ledger import Query


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
