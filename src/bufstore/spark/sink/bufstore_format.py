"""``format("bufstore")``: for ``df.write`` and ``df.writeStream``, the declarative twin of the foreachBatch sink.

For ``spark.read``, it reads what the deployment holds: `bufstore.spark.tables`.

A writer of Spark cannot ask for a thread's rows in one task and in order, as the sink does. So tasks only pack and hand
over their rows. Spark calls the commit once, with the rows of the winning attempts, and the commit writes them, sorted,
from one process. There is nothing to abort: before the commit nothing is written, and a repeated commit recognizes its
rows. For batches that do not fit into the driver's memory, use `bufstore.spark.checkpoint_sink`.

Streams (which need ``appId``), and batches with ``appId`` and ``batchId``, are written exactly once. Any other batch is
written once per job that commits.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pyarrow
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamWriter,
    DataSourceWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from bufstore.errors import ConfigError
from bufstore.spark.catalog_options import check_same_columns, of_catalog, schema_of, with_kept
from bufstore.spark.config import SinkConfig
from bufstore.spark.connection_options import connection, named, seconds
from bufstore.spark.option_values import number
from bufstore.spark.sink.app_id import AppId, check_bad
from bufstore.spark.sink.arrow_rows import rows_of
from bufstore.spark.sink.batch import in_passes, write_batch
from bufstore.spark.sink.checkpoint_rows import COLUMNS, check_batch_id, check_columns
from bufstore.spark.sink.parts import Part, sum_of
from bufstore.spark.sink.row_writer import Pass, Written, write_rows
from bufstore.spark.sink.settled import ROW, RowKey, key_of, position_of, summed
from bufstore.spark.sink.spark_ledger import Query
from bufstore.spark.tables.table_options import postgres_of, table_options
from bufstore.spark.tables.table_reader import TableReader
from bufstore.spark.tables.table_rows import TABLES

#: How many bytes of packed rows one task may hand over: all of them pass through the driver.
_TASK_BYTES_MAX = 64 << 20
_AT_ONCE = 1000

#: Option → what it says; these come beside the options of the connection.
NAMES = {
    "postgresUrl": "the database, as URL or key=value; Spark masks it in plans",
    "postgres": "instead of postgresUrl: the same without a password",
    "schema": "of bufstore's tables (default bufstore)",
    "bucket": "the bucket beside the log",
    "appId": "names the query (or job) in every thread that it writes to",
    "batchId": "the number of a batch job's batch; use increasing numbers: each is written once",
    "badRows": "fail or quarantine",
    "outageTimeout": f"seconds that a batch waits for servers (default {SinkConfig.outage_timeout_s:g})",
}


class BufstoreFormat(DataSource):
    """See the module."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        self.options = dict(options)

    @classmethod
    def name(cls) -> str:
        return "bufstore"

    def schema(self) -> StructType:
        kept = of_catalog(self.options)
        options = table_options(self.options if kept is None else kept)
        return schema_of({name: TABLES[options.table][name] for name in options.columns}, kept)

    def reader(self, schema: StructType) -> DataSourceReader:
        options = table_options(with_kept(self.options, schema))
        check_same_columns(options.columns, schema)
        return TableReader(options)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        if overwrite:
            raise ConfigError('checkpoints are appended: use .mode("append")')
        found = named(self.options, NAMES)
        if ("appId" in found) is not ("batchId" in found):
            raise ConfigError("options appId and batchId go together: one alone cannot detect a repeat")
        batch_id = None
        if "batchId" in found:
            batch_id = number("batchId", found["batchId"])
            check_batch_id(batch_id)
        return _BatchWriter(_sink(found, "batch"), schema, batch_id)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        found = named(self.options, NAMES)
        if "appId" not in found or "batchId" in found:
            raise ConfigError("a stream needs option appId, and takes no batchId: Spark numbers its batches")
        return _StreamWriter(_sink(found, ""), schema)


def _sink(found: Mapping[str, str], app_id: str) -> SinkConfig:
    bad_rows: Any = found.get("badRows", "fail")
    return SinkConfig(
        nats=connection(found),
        postgres=postgres_of(found),
        schema=found.get("schema", SinkConfig.schema),
        stream=found.get("stream", SinkConfig.stream),
        bucket=found.get("bucket", SinkConfig.bucket),
        app_id=found.get("appId", app_id),
        bad_rows=bad_rows,
        outage_timeout_s=seconds(found, "outageTimeout", SinkConfig.outage_timeout_s),
    )


@dataclass
class _Rows(WriterCommitMessage):
    """A task's rows, packed."""

    packed: Sequence[bytes]
    query: Query


class _Writes:
    """What both writers have in common."""

    def __init__(self, config: SinkConfig, schema: StructType) -> None:
        check_columns((field.name, field.dataType.simpleString()) for field in schema.fields)
        self.config = config

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> WriterCommitMessage:
        """Pack a task's rows. Raises ConfigError when they are too many."""
        packed, size = [], 0
        for batch in iterator:
            rows = rows_of(batch)
            for at in range(0, len(rows), _AT_ONCE):
                packed.append(zlib.compress(msgspec.msgpack.encode(rows[at : at + _AT_ONCE]), 1))
                size += len(packed[-1])
            if size > _TASK_BYTES_MAX:
                raise ConfigError(
                    f"a task has more than {_TASK_BYTES_MAX >> 20} MiB of rows, which all pass through the driver: use "
                    "bufstore.spark.checkpoint_sink (also for a batch: sink(df, batch_id)), or smaller batches"
                )
        return _Rows(packed, Query.of(TaskContext.get()))

    def _commit(self, messages: Sequence[WriterCommitMessage | None], batch_id: int | None) -> None:
        tasks = [m for m in messages if isinstance(m, _Rows)]
        rows = [row for task in tasks for part in task.packed for row in _unpacked(part)]
        rows.sort(key=_order)
        app = AppId(self.config)
        if batch_id is None:
            app.setup()
            check_bad(self.config, in_passes(_InMemory(self.config, None, rows), Pass(judging=False)).counts)
            return
        write_batch(self.config, app, tasks[0].query, batch_id, _InMemory(self.config, batch_id, rows))


class _InMemory:
    """A batch's rows, sorted."""

    def __init__(self, config: SinkConfig, batch_id: int | None, rows: Sequence[dict[str, Any]]) -> None:
        self._config, self._batch_id = config, batch_id
        self._rows = [row | summed(row) for row in rows]
        self._part = Part(0, 1, sum_of(row[ROW] for row in self._rows))

    def divide(self, of: int | None) -> int:
        return self._part.of

    def sums(self) -> Mapping[int, int]:
        return {self._part.number: self._part.planned}

    def write(self, now: Pass) -> Written:
        return write_rows(self._config, self._batch_id, cut(self._rows, self._config.in_flight_bytes), now, self._part)

    def keys(self) -> Sequence[RowKey]:
        return [key_of(row) for row in self._rows]


def cut(rows: Iterable[dict[str, Any]], bytes_max: int) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows in order, in parts of at most 1000 and about `bytes_max`; a larger row is a part of its own."""
    part: list[dict[str, Any]] = []
    size = 0
    for row in rows:
        more = len(msgspec.msgpack.encode(row))
        if part and (len(part) == _AT_ONCE or size + more > bytes_max):
            yield part
            part, size = [], 0
        part.append(row)
        size += more
    if part:
        yield part


def _unpacked(part: bytes) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = msgspec.msgpack.decode(zlib.decompress(part))
    return rows


def _order(row: Mapping[str, Any]) -> tuple[bool, bytes, bytes, Sequence[bytes]]:
    """Return the key to sort by: thread, position, then all that the row holds. It is the same in every repeat."""
    thread_id = row["thread_id"]
    number = (position_of(row) + (1 << 63)).to_bytes(9)
    rest = [msgspec.json.encode(row.get(name)) for name in COLUMNS if name not in ("thread_id", "position")]
    return (thread_id is not None, (thread_id or "").encode(), number, rest)


class _BatchWriter(_Writes, DataSourceArrowWriter):
    def __init__(self, config: SinkConfig, schema: StructType, batch_id: int | None) -> None:
        super().__init__(config, schema)
        self.batch_id = batch_id

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self._commit(messages, self.batch_id)


class _StreamWriter(_Writes, DataSourceStreamArrowWriter):
    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Write all rows; those that an earlier commit of this batch wrote are recognized."""
        self._commit(messages, batchId)
