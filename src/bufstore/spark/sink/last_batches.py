"""The last batches of this process's sinks, by Spark's id of the query, for listeners to the queries' progress.

Spark's own progress says nothing of what a foreachBatch function did, and has no place for it.
"""

from __future__ import annotations

from bufstore.spark.sink.batch import BatchReport

#: The last batch of each query that this process has had.
_last: dict[str, BatchReport] = {}


def note(query_id: str, report: BatchReport) -> None:
    """Note that a batch is done."""
    if query_id:
        _last[query_id] = report


def last_batch(query_id: str) -> BatchReport | None:
    """Return the query's last batch; None if no sink of this process has written one."""
    return _last.get(query_id)
