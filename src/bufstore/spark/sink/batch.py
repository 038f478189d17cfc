"""Writes one batch, from taking the app id to noting that it is done; the same code for both ways into the sink."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from bufstore.errors import ConfigError
from bufstore.log_lines import LogLines
from bufstore.newest import Newest
from bufstore.spark.config import SinkConfig
from bufstore.spark.sink.app_id import AppId, check_bad, check_rows
from bufstore.spark.sink.parts import sum_of
from bufstore.spark.sink.row_writer import Pass, RowCounts, Written
from bufstore.spark.sink.settled import RowKey, Settled, pack, settled_after, unpack
from bufstore.spark.sink.spark_ledger import Query

_log = LogLines(__name__)


class Rows(Protocol):
    """The rows of a batch, the same each time they are asked for."""

    def divide(self, of: int | None) -> int:
        """Divide into `of` parts, as when the batch was begun (None: it was not). Returns how many parts there are."""

    def sums(self) -> Mapping[int, int]:
        """Return, for each part that has rows, a sum over them."""

    def write(self, now: Pass) -> Written:
        """See `bufstore.spark.sink.row_writer.write_rows`."""

    def keys(self) -> Sequence[RowKey]:
        """Return the keys of all rows."""


class BatchReport(NamedTuple):
    """What became of a batch."""

    batch_id: int
    counts: RowCounts
    #: Whether the batch had been done before.
    repeated: bool


#: How many batches of a query `report_of` remembers, because a listener may hear of a batch when others are done: as
#: many as Spark keeps the progress of (``spark.sql.streaming.numRecentProgressUpdates``).
REMEMBERED_BATCHES = 100

#: What became of the newest batches of each query, by Spark's id of the query and the batch's number. Spark's own
#: progress has no place for what a foreachBatch function did, so listeners to it ask here.
_reports: dict[str, Newest[int, BatchReport]] = {}


def note_report(query: Query, report: BatchReport) -> None:
    """Note that a batch of a query is done."""
    if query.query_id:
        _reports.setdefault(query.query_id, Newest(REMEMBERED_BATCHES))[report.batch_id] = report


def report_of(query_id: str, batch_id: int) -> BatchReport | None:
    """Return what became of a batch; None if no sink of this process has written it, or long ago."""
    reports = _reports.get(query_id)
    return reports.get(batch_id) if reports is not None else None


def write_batch(
    config: SinkConfig,
    app: AppId,
    query: Query,
    batch_id: int,
    rows: Rows,
    stopped: Callable[[], bool] = lambda: False,
) -> BatchReport:
    """Write the rows of a batch that are not written yet; on return the whole batch is durable.

    Raises ConfigError when the batch may not be written under the app id, or has other rows than before; InvalidRecord
    for bad rows that fail the batch.
    """
    holder = app.begin(query, batch_id, stopped)
    of = rows.divide(holder.parts[0].of if holder.parts else None)
    if holder.planned is not None or holder.parts:
        check_rows(holder, config.app_id, rows.sums(), of)
    if holder.done:
        return BatchReport(batch_id, RowCounts(), repeated=True)
    before = unpack(holder.settled) if holder.settled is not None else []
    if before:
        Settled(before).check(rows.keys())
    found = in_passes(rows, Pass(Settled(before), judging=False, noting=not app.away, again=app.again))
    counts = found.counts
    counts.waited_ms += round(app.waited_s * 1000)
    _log.info("batch %d of %s: %s", batch_id, config.app_id, counts, extra={"action": "spark_batch"})
    if counts.bad and config.bad_rows == "fail":
        keys = rows.keys()
        if sum_of(key.row for key in keys) != sum_of(found.sums.values()):
            raise _changed()
        app.stopped(batch_id, pack(settled_after(before, keys, found.left)))
        check_bad(config, counts)
    app.done(batch_id, sum_of(found.sums.values()), counts)
    return BatchReport(batch_id, counts, repeated=False)


def in_passes(rows: Rows, now: Pass) -> Written:
    """Write all rows. Those that wait for a parent among the rows of other tasks are written in passes of their own.

    When a pass makes no progress, the rows that still wait have no parent, and are bad.
    """
    whole = Written()
    while True:
        found = rows.write(now)
        if found.sums != (whole.sums or found.sums):
            raise _changed()
        whole.add(found)
        if not found.deferred:
            return whole
        if now.judging:
            raise _changed()
        now = replace(now, only=found.deferred, judging=found.deferred == now.only)


def _changed() -> ConfigError:
    return ConfigError("the rows of the batch have changed while it was written: the source cannot be replayed")
