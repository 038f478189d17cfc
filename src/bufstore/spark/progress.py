"""Metrics of streaming queries: what Spark tells of each micro-batch, as numbers that a monitoring system takes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from pyspark.sql.streaming.listener import StreamingQueryListener

from bufstore.spark.sink.last_batches import last_batch
from bufstore.spark.sink.row_writer import RowCounts

__all__ = ["ProgressListener", "QueryProgress"]

_log = logging.getLogger(__name__)


class QueryProgress(msgspec.Struct, frozen=True, kw_only=True):
    """One micro-batch of one query."""

    query: str
    batch_id: int
    rows: int
    rows_per_second: float
    seconds: float
    #: Messages of the stream between what was read and its end; None when the source is another one.
    lag: int | None
    #: About how many bytes these are, and when the oldest of them was stored (ISO 8601; None: all is read).
    lag_bytes: int | None = None
    unread_since: str | None = None
    #: Messages that retention may still remove before it takes one that was not read: at 0, the next is lost.
    headroom: int | None = None
    #: What the query's own ``df.observe(name, …)`` counted: name → column → value.
    observed: Mapping[str, Mapping[str, Any]] = {}
    #: What `checkpoint_sink` made of the rows, and how long it waited for servers (``waited_ms``); None where another
    #: sink writes them, or ours does so in another process (Connect).
    sink: RowCounts | None = None


class ProgressListener(StreamingQueryListener):
    """``spark.streams.addListener(ProgressListener(report))``; without `report` each batch is a line of the log."""

    def __init__(self, report: Callable[[QueryProgress], None] | None = None) -> None:
        self._report = report or _say

    def onQueryStarted(self, event: Any) -> None:
        """Nothing to say."""

    def onQueryProgress(self, event: Any) -> None:
        """A micro-batch is done."""
        found = event.progress
        offsets = [(source.endOffset, source.latestOffset) for source in found.sources]
        behind = [log for _, newest in offsets if (log := _log_of(newest))]
        written = last_batch(str(found.id))
        self._report(
            QueryProgress(
                query=found.name or str(found.id),
                batch_id=found.batchId,
                rows=found.numInputRows,
                rows_per_second=round(found.processedRowsPerSecond or 0.0, 3),
                seconds=found.batchDuration / 1000,
                lag=lag_of(offsets),
                lag_bytes=sum(log["bytesBehind"] for log in behind) if behind else None,
                unread_since=min((log["unreadSince"] for log in behind if log["unreadSince"]), default=None),
                headroom=min((log["headroom"] for log in behind), default=None),
                observed={name: row.asDict() for name, row in found.observedMetrics.items()},
                sink=written.counts if written is not None and written.batch_id == found.batchId else None,
            )
        )

    def onQueryIdle(self, event: Any) -> None:
        """Nothing to say."""

    def onQueryTerminated(self, event: Any) -> None:
        """A query that failed says so itself."""


def lag_of(offsets: list[tuple[str | None, str | None]]) -> int | None:
    """How far the sources' offsets (as text: read, newest) are behind; None if no source is a log."""
    total = None
    for read, newest in offsets:
        try:
            behind = _position(newest) - _position(read)
        except (msgspec.MsgspecError, KeyError, TypeError):
            continue
        total = (total or 0) + max(0, behind)
    return total


def _position(offset: str | None) -> int:
    return int(msgspec.json.decode(offset or "null", type=dict[str, Any])["position"])


def _log_of(newest: str | None) -> Mapping[str, Any] | None:
    """What the source `threadlog` adds to its newest offset."""
    try:
        found = msgspec.json.decode(newest or "null", type=dict[str, Any])
    except msgspec.MsgspecError:
        return None
    return found if "bytesBehind" in found else None


def _say(progress: QueryProgress) -> None:
    _log.info("%s", progress, extra={"action": "spark_progress"})
