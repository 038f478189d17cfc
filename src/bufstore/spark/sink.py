"""The foreachBatch sink: a stream's rows become checkpoints, each exactly once.

A batch may be done again, in part or whole, at any time: a task that failed after it wrote, a copy that speculation
started, a driver that was killed before Spark noted the batch. So each row carries a number (its batch, and its place
among its thread's rows in it), and the store knows for each thread how far this source has come
(`bufstore.buffer.sources`); there is no window of time. For that a row must get the same number again: the batch is the
same rows (Spark's part, with a source that can be replayed), and they are sorted by what they hold.

One task owns a thread in a batch, so its rows go in order and nobody competes for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from psycopg import AsyncConnection

from bufstore.errors import ConfigError, InvalidRecord
from bufstore.postgres import columns
from bufstore.postgres.migrate import migrate, queries
from bufstore.postgres.pool import new_pool
from bufstore.spark.config import SinkConfig
from bufstore.spark.rows import COLUMNS, check_columns
from bufstore.spark.worker import write_rows

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql import DataFrame

_FOLDER = files("bufstore.spark") / "sql"
_OUTCOME = "written bigint, repeated bigint, bad array<string>"
_SHOWN = 10
_TIMEOUT_S = 30.0


def checkpoint_sink(config: SinkConfig) -> CheckpointSink:
    """What ``df.writeStream.foreachBatch(checkpoint_sink(config))`` takes. Columns: `bufstore.spark.rows.COLUMNS`."""
    return CheckpointSink(config)


class CheckpointSink:
    """Holds the configuration and nothing else: it goes to wherever Spark runs it."""

    def __init__(self, config: SinkConfig) -> None:
        self.config = config

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.config!r})"

    def __call__(self, df: DataFrame, batch_id: int) -> None:
        """Write a batch; on return all of it is durable in the log.

        Raises ConfigError for a column that is missing or of another type, or when another query has the app id;
        InvalidRecord for rows that cannot become checkpoints (``bad_rows="fail"``), when all others are written.
        """
        check_columns(df.dtypes)
        asyncio.run(self._begin(_query_id(df), batch_id))
        config = self.config
        session = df.sparkSession
        tasks = config.tasks or int(session.conf.get("spark.sql.shuffle.partitions") or 1)
        # The place of a row must be the same in a repeat: by position where there is one, then by everything it holds.
        order = [name for name in COLUMNS if name in df.columns]
        order.sort(key=lambda name: (name != "thread_id", name != "position"))
        sorted_ = df.repartition(tasks, "thread_id").sortWithinPartitions(*order)
        outcomes = sorted_.mapInArrow(partial(_task, config, batch_id), _OUTCOME).collect()
        bad = [what for outcome in outcomes for what in outcome["bad"]]
        if bad and config.bad_rows == "fail":
            raise InvalidRecord(
                f"{len(bad)} rows of batch {batch_id} cannot become checkpoints, the others are written: "
                f"{'; '.join(bad[:_SHOWN])}"
            )

    async def _begin(self, query_id: str, batch_id: int) -> None:
        config = self.config
        pool = new_pool(config.postgres, size=1)
        await pool.open(wait=False)
        try:
            async with pool.lend(_TIMEOUT_S) as connection:
                await migrate(connection, config.schema, _FOLDER, "spark")
                holder, last = await _taken(connection, config, query_id, batch_id)
        finally:
            await pool.close()
        if holder != query_id or batch_id < last:
            raise ConfigError(
                f"app id {config.app_id!r} has written batch {last} of query {holder or '(unknown)'}, and this is batch "
                f"{batch_id} of query {query_id or '(unknown)'}: its rows would be taken for repeats. Either go on with "
                "the checkpoint folder of that query, or give this one an app id of its own."
            )


async def _taken(
    connection: AsyncConnection[Any], config: SinkConfig, query_id: str, batch_id: int
) -> tuple[str, int]:
    cursor = columns.Cursor(connection)
    sql = queries(_FOLDER, config.schema)["begin"]
    await cursor.execute(sql, [config.app_id, query_id, batch_id], binary=True)
    row = await cursor.fetchone()
    assert row is not None
    return row[0], row[1]


def _query_id(df: DataFrame) -> str:
    """Spark's id of the streaming query; empty on Connect, which does not tell."""
    try:
        return df.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId") or ""
    except Exception:  # Connect's session has no context, and says so with errors of its own
        return ""


def _task(config: SinkConfig, batch_id: int, batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
    import pyarrow

    rows: list[dict[str, Any]] = []
    for batch in batches:
        rows += batch.to_pylist()
    written, repeated, bad = write_rows(config, batch_id, rows) if rows else (0, 0, _NONE)
    yield pyarrow.RecordBatch.from_arrays(
        [
            pyarrow.array([written], pyarrow.int64()),
            pyarrow.array([repeated], pyarrow.int64()),
            pyarrow.array([list(bad)], pyarrow.list_(pyarrow.string())),
        ],
        names=["written", "repeated", "bad"],
    )


_NONE: Sequence[str] = ()
