"""Metrics of streaming queries: what Spark reports of each micro-batch, as numbers for a monitoring system."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from pyspark.sql.streaming.listener import StreamingQueryListener

from bufstore.log_lines import LogLines
from bufstore.spark.sink.batch import report_of
from bufstore.spark.sink.row_writer import RowCounts
from bufstore.spark.source.offsets import Offset

__all__ = ["ProgressListener", "QueryProgress"]

_log = LogLines(__name__)


class QueryProgress(msgspec.Struct, frozen=True, kw_only=True):
    """One micro-batch of one query."""

    query: str
    batch_id: int
    rows: int
    rows_per_second: float
    seconds: float
    #: The number of messages of the stream that are not read yet; None when no source is a log.
    lag: int | None
    #: About how many bytes these messages have; None when the source does not say.
    lag_bytes: int | None = None
    #: When the oldest of these messages was stored (ISO 8601); None when all are read, or the source does not say.
    unread_since: str | None = None
    #: How many messages retention may still remove before it removes an unread one: at 0, it loses the next one.
    headroom: int | None = None
    #: The values that the query's own ``df.observe(name, …)`` counted: name → column → value.
    observed: Mapping[str, Mapping[str, Any]] = {}
    #: What `checkpoint_sink` made of the rows, and how long it waited for servers (``waited_ms``); None when another
    #: sink writes the rows, ours writes them in another process (Connect), or a hundred batches were done since.
    sink: RowCounts | None = None


class ProgressListener(StreamingQueryListener):
    """``spark.streams.addListener(ProgressListener(report))``; without `report`, each batch is logged as a line."""

    def __init__(self, report: Callable[[QueryProgress], None] | None = None) -> None:
        self._report = report or _say

    def onQueryStarted(self, event: Any) -> None:
        """Do nothing."""

    def onQueryProgress(self, event: Any) -> None:
        """Report the micro-batch that is done."""
        found = event.progress
        offsets = [(source.endOffset, source.latestOffset) for source in found.sources]
        behind = [log for _, newest in offsets if (log := _log_of(newest))]
        written = report_of(str(found.id), found.batchId)
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
                sink=None if written is None else written.counts,
            )
        )

    def onQueryIdle(self, event: Any) -> None:
        """Do nothing."""

    def onQueryTerminated(self, event: Any) -> None:
        """Do nothing: a query that failed says so itself."""


def lag_of(offsets: list[tuple[str | None, str | None]]) -> int | None:
    """Return how many messages the sources are behind, by their offsets (as text: read, newest).

    None when no source is a log.
    """
    total = None
    for read, newest in offsets:
        try:
            behind = _position(newest) - _position(read)
        except msgspec.MsgspecError:
            continue
        total = (total or 0) + max(0, behind)
    return total


def _position(offset: str | None) -> int:
    return msgspec.json.decode(offset or "null", type=Offset).position


def _log_of(newest: str | None) -> Mapping[str, Any] | None:
    """Return what the source `threadlog` adds to its newest offset; None for another source."""
    try:
        found = msgspec.json.decode(newest or "null", type=dict[str, Any])
    except msgspec.MsgspecError:
        return None
    return found if "bytesBehind" in found else None


def _say(progress: QueryProgress) -> None:
    _log.info("%s", progress, extra={"action": "spark_progress"})
