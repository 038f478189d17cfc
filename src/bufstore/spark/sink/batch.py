"""One batch, from the app id to the note that it is done; the same for both ways into the sink."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol

from bufstore.errors import ConfigError
from bufstore.spark.config import SinkConfig
from bufstore.spark.sink.app_id import AppId, check_bad
from bufstore.spark.sink.row_writer import RowCounts, Written
from bufstore.spark.sink.settled import RowKey, Settled, pack, settled_after, unpack
from bufstore.spark.sink.spark_ledger import Query

_log = logging.getLogger(__name__)


class Rows(Protocol):
    """The rows of a batch, the same each time they are asked for."""

    def total(self) -> int:
        """A sum over all rows."""
        ...

    def write(self, settled: Settled, only: Collection[str] | None, *, judging: bool) -> Written:
        """See `bufstore.spark.sink.row_writer.write_rows`."""
        ...

    def keys(self) -> Sequence[RowKey]:
        """Of all rows."""
        ...


class BatchReport(NamedTuple):
    """What became of a batch."""

    batch_id: int
    counts: RowCounts
    #: It had been done before.
    repeated: bool


def write_batch(
    config: SinkConfig,
    app: AppId,
    query: Query,
    batch_id: int,
    rows: Rows,
    stopped: Callable[[], bool] = lambda: False,
) -> BatchReport:
    """Write what is not written of a batch; on return all of it is durable.

    Raises ConfigError when the batch may not be written under the app id, or is not the one that it was; InvalidRecord
    for bad rows that fail it.
    """
    app.waited_s = 0.0
    planned = rows.total()
    holder = app.begin(query, batch_id, planned, stopped)
    if holder.done:
        return BatchReport(batch_id, RowCounts(), repeated=True)
    before = unpack(holder.settled) if holder.settled is not None else []
    if before:
        Settled(before).check(rows.keys())
    app.plan(batch_id, planned)
    found = in_passes(rows, Settled(before))
    counts = found.counts
    counts.waited_ms += round(app.waited_s * 1000)
    _log.info("batch %d of %s: %s", batch_id, config.app_id, counts, extra={"action": "spark_batch"})
    if counts.bad and config.bad_rows == "fail":
        app.stopped(batch_id, pack(settled_after(before, rows.keys(), found.left)), stopped)
        check_bad(config, counts)
    app.done(batch_id, planned, counts)
    return BatchReport(batch_id, counts, repeated=False)


def in_passes(rows: Rows, settled: Settled) -> Written:
    """Write all rows; those that wait for a parent among the rows of other tasks in passes of their own.

    When a pass brings nothing further, the rows that still wait have no parent, and are bad.
    """
    whole = Written()
    only: Collection[str] | None = None
    judging = False
    ahead = 0
    while True:
        found = rows.write(settled, only, judging=judging)
        whole.counts.add(found.counts)
        whole.left += found.left
        if not found.deferred:
            # What earlier passes wrote of deferred threads, the last one has found there.
            whole.counts.written += ahead
            whole.counts.repeated -= ahead
            return whole
        if judging:
            raise ConfigError("the rows of the batch have changed while it was written: the source cannot be replayed")
        ahead += found.ahead
        judging = found.ahead == 0 and only is not None and len(found.deferred) == len(only)
        only = found.deferred
