"""What the sinks of this process did last, by Spark's id of their query: for who listens to the queries' progress.

Spark's own progress has nothing of what a foreachBatch function did, and no place for it.
"""

from __future__ import annotations

from bufstore.spark.sink.batch import BatchReport

#: A query's last batch only: as many as the process has had queries.
_last: dict[str, BatchReport] = {}


def note(query_id: str, report: BatchReport) -> None:
    """A batch is done."""
    if query_id:
        _last[query_id] = report


def last_batch(query_id: str) -> BatchReport | None:
    """The query's last batch; None if no sink of this process has written one."""
    return _last.get(query_id)
