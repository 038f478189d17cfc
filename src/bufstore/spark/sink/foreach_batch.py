"""The foreachBatch sink: a stream's rows become checkpoints, each exactly once.

A batch may be done again, in part or whole, at any time: a task that failed after it wrote, a copy that speculation
started, a driver that was killed before Spark noted the batch. So each row carries a number (its batch, and its place
among its thread's rows in it), and the store knows for each thread how far this source has come
(`bufstore.buffer.producers`, docs/adr/0014); there is no window of time. For that a row must get the same number again:
the batch is the same rows (Spark's part, with a source that can be replayed; a sum over the rows tells when it is not),
and they are sorted by what they hold.

One task owns a thread in a batch, so its rows go in order and no other task competes for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from bufstore.spark.config import SinkConfig
from bufstore.spark.job_description import context_of, described
from bufstore.spark.sink.app_id import begin, end, was_done
from bufstore.spark.sink.checkpoint_rows import COLUMNS, check_columns
from bufstore.spark.sink.row_writer import RowCounts, write_rows
from bufstore.spark.task import in_task, outcome

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql import DataFrame

_OUTCOME = "written bigint, repeated bigint, bad bigint, behind bigint, reasons array<string>, fingerprint bigint"
_FINGERPRINT = "bufstore_fingerprint"
_MASK = (1 << 63) - 1


def checkpoint_sink(config: SinkConfig) -> CheckpointSink:
    """What ``df.writeStream.foreachBatch(checkpoint_sink(config))`` takes.

    Columns: `bufstore.spark.sink.checkpoint_rows.COLUMNS`.
    """
    return CheckpointSink(config)


class CheckpointSink:
    """Holds only the configuration: Spark runs it elsewhere (on Connect, on the server)."""

    def __init__(self, config: SinkConfig) -> None:
        self.config = config

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.config!r})"

    def __call__(self, df: DataFrame, batch_id: int) -> None:
        """Write a batch; on return all of it is durable in the log.

        Raises ConfigError for a column that is missing or of another type, when another query has the app id, or when
        the batch came before with other rows; InvalidRecord for rows that cannot become checkpoints
        (``bad_rows="fail"``), when all other threads are written.
        """
        check_columns(df.dtypes)
        holder = begin(self.config, _query_id(df), batch_id)
        with described(df, f"bufstore: batch {batch_id} of {self.config.app_id}"):
            if was_done(self.config, holder, batch_id, lambda: _fingerprint(df)):
                return
            outcome, fingerprint = self._write(df, batch_id)
        end(self.config, batch_id, outcome, fingerprint)

    def _write(self, df: DataFrame, batch_id: int) -> tuple[RowCounts, int]:
        from pyspark.sql import functions as F

        config = self.config
        tasks = config.tasks or int(df.sparkSession.conf.get("spark.sql.shuffle.partitions") or 1)
        order = _order(df)
        owned = df.repartition(tasks, "thread_id").sortWithinPartitions(*order)
        summed = owned.withColumn(_FINGERPRINT, F.xxhash64(*order))
        whole, fingerprint = RowCounts(), 0
        for *counts, part in summed.mapInArrow(partial(_task, config, batch_id), _OUTCOME).collect():
            whole.add(RowCounts(*counts))
            fingerprint = (fingerprint + part) & _MASK
        return whole, fingerprint


def _order(df: DataFrame) -> list[str]:
    """The place of a row must be the same in a repeat: by position where there is one, then by everything it holds."""
    order = [name for name in COLUMNS if name in df.columns]
    return sorted(order, key=lambda name: (name != "thread_id", name != "position"))


def _fingerprint(df: DataFrame) -> int:
    """What the tasks of `CheckpointSink` sum up while they write."""
    from pyspark.sql import functions as F

    # As decimals the sum does not overflow.
    found = df.agg(F.sum(F.xxhash64(*_order(df)).cast("decimal(38,0)"))).first()
    return int((found[0] if found is not None else 0) or 0) & _MASK


def _query_id(df: DataFrame) -> str:
    """Spark's id of the streaming query; empty on Connect, which does not tell, and outside of a query."""
    context = context_of(df)
    return (context.getLocalProperty("sql.streaming.queryId") or "") if context is not None else ""


def _task(config: SinkConfig, batch_id: int, batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
    fingerprint = 0

    def parts() -> Iterator[list[dict[str, Any]]]:
        nonlocal fingerprint
        for batch in batches:
            fingerprint = (fingerprint + sum(batch.column(_FINGERPRINT).to_pylist())) & _MASK
            yield batch.drop_columns([_FINGERPRINT]).to_pylist()

    with in_task():
        found = write_rows(config, batch_id, parts())
    yield outcome(**msgspec.structs.asdict(found), fingerprint=fingerprint)
