"""The foreachBatch sink: a stream's rows become checkpoints, each exactly once.

A batch may be written again, in part or as a whole, at any time: when a task failed after it wrote, when speculation
started a copy of it, or when the driver was killed before Spark noted the batch. So each row carries a number (its
batch, and its place among its thread's rows in the batch), and the store knows for each thread how far this source has
come (`bufstore.buffer.producers`, docs/adr/0014); there is no window of time. A repeated row must get the same number.
For that, a repeated batch must have the same rows: this is Spark's part, with a source that can be replayed, and a sum
over a task's rows, noted before the first one is written, shows when they are others. And rows are sorted by content.

One task owns a thread in a batch, so the thread's rows go in order and no other task competes for the thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from bufstore.errors import BufstoreError
from bufstore.spark.config import SinkConfig
from bufstore.spark.job_description import context_of, described
from bufstore.spark.outage import GaveUp, is_outage
from bufstore.spark.sink.app_id import AppId
from bufstore.spark.sink.arrow_rows import rows_of
from bufstore.spark.sink.batch import BatchReport, note_report, write_batch
from bufstore.spark.sink.checkpoint_rows import COLUMNS, check_batch_id, check_columns
from bufstore.spark.sink.kept_batches import KeptBatches
from bufstore.spark.sink.lines import Row
from bufstore.spark.sink.parts import Part, sum_of
from bufstore.spark.sink.row_writer import Pass, Written, write_rows
from bufstore.spark.sink.settled import ROW, THREAD, RowKey, key_of
from bufstore.spark.sink.spark_ledger import Query
from bufstore.spark.slices import slices_of
from bufstore.spark.task import outcomes

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql import DataFrame

#: The stage in which a task of this process has waited as long as it may; None: there is none.
_gave_up_in: int | None = None
#: The columns in which a row may name a thread that it waits for.
_WAITING = {"parent_thread_id", "run", "edit"}
#: A task keeps this many times `SinkConfig.in_flight_bytes` of its rows in memory, as Arrow has them: fewer bytes than
#: one portion takes once it is decoded.
_KEPT = 4


def checkpoint_sink(config: SinkConfig) -> CheckpointSink:
    """Make the sink for ``df.writeStream.foreachBatch(checkpoint_sink(config))``.

    Columns: `bufstore.spark.sink.checkpoint_rows.COLUMNS`.
    """
    return CheckpointSink(config)


class CheckpointSink:
    """Writes batches. Only its configuration is pickled, for Spark to run it elsewhere (on Connect, on the server)."""

    def __init__(self, config: SinkConfig) -> None:
        self.config = config
        #: What became of the last batch; None before the first batch, and when the sink runs in another process.
        self.last: BatchReport | None = None
        self._app = AppId(config)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.config!r})"

    def __reduce__(self) -> tuple[type[CheckpointSink], tuple[SinkConfig]]:
        return type(self), (self.config,)

    def __call__(self, df: DataFrame, batch_id: int) -> None:
        """Write a batch; on return all of it is durable, in the log or (``mode="postgres"``) in Postgres.

        Waits for servers that are away and for a full log (`SinkConfig.outage_timeout_s`). Raises ConfigError when the
        batch's number is negative or at least 2**39, when a column is missing or has another type, when another query
        has the app id, or when the batch came before with other rows; InvalidRecord, after all other threads are
        written, when rows cannot become checkpoints (``bad_rows="fail"``); LogFull, LogUnavailable or StoreUnavailable
        after it has waited as long as it may: then the same batch may come again.
        """
        check_batch_id(batch_id)
        check_columns(df.dtypes)
        query = Query.of(context_of(df))
        with described(df, f"bufstore: batch {batch_id} of {self.config.app_id}"):
            rows = _Rows(self.config, batch_id, df)
            try:
                self.last = write_batch(self.config, self._app, query, batch_id, rows, _stopped(df, query))
                note_report(query, self.last)
            finally:
                rows.forget()


class _Rows:
    """A batch's rows, each thread's in one task and in order."""

    def __init__(self, config: SinkConfig, batch_id: int, df: DataFrame) -> None:
        from pyspark.sql import functions as F

        self._config, self._batch_id = config, batch_id
        order = _order(df)
        # A null leaves the hash as it is, so the hash also takes in which columns are null.
        row = F.xxhash64(*order, *(F.isnull(name) for name in order))
        self._order, self._given = order, df.withColumns({THREAD: F.xxhash64("thread_id"), ROW: row})
        self._of = config.tasks or int(df.sparkSession.conf.get("spark.sql.shuffle.partitions") or 1)
        self._owned = self._divided()

    def _divided(self) -> DataFrame:
        owned = self._given.repartition(self._of, "thread_id").sortWithinPartitions(*self._order)
        # Only rows that may wait for others are written in several passes.
        return owned.persist() if _WAITING & set(self._order) else owned

    def divide(self, of: int | None) -> int:
        if of is not None and of != self._of:
            self.forget()
            self._of = of
            self._owned = self._divided()
        return self._of

    def sums(self) -> Mapping[int, int]:
        from pyspark.sql import functions as F

        # A sum of decimals does not overflow.
        numbered = self._owned.select(F.spark_partition_id().alias("part"), F.col(ROW).cast("decimal(38,0)"))
        return {part: sum_of([int(found)]) for part, found in numbered.groupBy("part").agg(F.sum(ROW)).collect()}

    def write(self, now: Pass) -> Written:
        whole = Written()
        for found in outcomes(self._owned, partial(_task, self._config, self._batch_id, self._of, now), Written):
            if found.gave_up is not None:
                raise found.gave_up.as_error()
            whole.add(found)
        return whole

    def keys(self) -> Sequence[RowKey]:
        return [key for keys in outcomes(self._owned, _key_task, list[RowKey]) for key in keys]

    def forget(self) -> None:
        # Spark itself forgets the rows of a query that was stopped, and the error that ends the batch says more. On
        # Connect, the error of a call that fails is another one, and a client of Connect has no Py4J.
        with suppress(Exception):
            self._owned.unpersist()


def _order(df: DataFrame) -> list[str]:
    """Return the sort columns: thread, position if there is one, all others. A repeated row gets the same place."""
    order = [name for name in COLUMNS if name in df.columns]
    return sorted(order, key=lambda name: (name != "thread_id", name != "position"))


def _stopped(df: DataFrame, query: Query) -> Callable[[], bool]:
    """Return a function that says whether somebody has stopped the query, so that it waits for the batch no longer."""
    if not query.query_id:
        return lambda: False
    # The session of a batch is a copy that knows no queries, and does not know whose copy it is. What all sessions of a
    # context share knows the queries of each.
    session: Any = df.sparkSession
    running = session._jsparkSession.sharedState().activeStreamingQueries()
    id_ = session._jvm.java.util.UUID.fromString(query.query_id)

    def stopped() -> bool:
        found = running.get(id_)
        return found is not None and not found.isActive()

    return stopped


def _task(
    config: SinkConfig, batch_id: int, of: int, now: Pass, batches: Iterator[pyarrow.RecordBatch]
) -> Iterator[Written]:
    from pyspark import TaskContext

    kept = KeptBatches(batches, _KEPT * config.in_flight_bytes)
    if kept.empty:
        return
    context = TaskContext.get()
    assert context is not None
    part = Part(context.partitionId(), of, kept.planned)
    now = replace(now, again=now.again or context.attemptNumber() > 0)
    yield _written(context.stageId(), config, batch_id, parts_of(kept, config.in_flight_bytes), now, part)


def _written(
    stage: int, config: SinkConfig, batch_id: int, parts: Iterator[Sequence[Row]], now: Pass, part: Part
) -> Written:
    """Return what a task of a stage wrote. Once one gave up, the stage's next tasks in this process do not wait."""
    global _gave_up_in
    if stage == _gave_up_in:
        config = replace(config, outage_timeout_s=0.0)
    try:
        return write_rows(config, batch_id, parts, now, part)
    except BufstoreError as e:
        if not is_outage(e, numbered=True):
            raise
        _gave_up_in = stage
        return Written(gave_up=GaveUp.of(e))


def _key_task(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[list[RowKey]]:
    for batch in batches:
        names = [name for name in (THREAD, ROW, "position") if name in batch.schema.names]
        yield [key_of(row) for row in rows_of(batch.select(names))]


def parts_of(batches: Iterable[pyarrow.RecordBatch], bytes_max: int) -> Iterator[Sequence[Row]]:
    """Yield the rows in order, in parts of at most `bytes_max` as Arrow counts; a larger row is a part of its own."""
    for batch in batches:
        for piece in slices_of(batch, bytes_max):
            yield rows_of(piece)
