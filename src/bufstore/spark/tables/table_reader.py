"""What Spark calls to read threads, runs or messages: plans and tasks of `bufstore.spark.tables.table_scan`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow
from pyspark.sql.datasource import DataSourceReader, InputPartition

from bufstore.spark.process_loop import loop
from bufstore.spark.tables import table_scan
from bufstore.spark.tables.narrowing import narrowed_by
from bufstore.spark.tables.table_options import TableOptions
from bufstore.spark.tables.table_rows import TABLES

if TYPE_CHECKING:
    from pyspark.sql.datasource import Filter

#: The module in which Spark plans a read whose filters it pushes down.
_PUSHING = "pyspark.sql.worker.data_source_pushdown_filters"


def reader_of(options: TableOptions) -> DataSourceReader:
    """Return the reader for these options."""
    # While `spark.sql.python.filterPushdown.enabled` is off, which is Spark's default, Spark refuses a reader that
    # takes filters. While it is on, Spark asks for a reader from that module.
    return PushedTableReader(options) if _PUSHING in sys.modules else TableReader(options)


class TableReader(DataSourceReader):
    """See the module."""

    def __init__(self, options: TableOptions) -> None:
        self.options = options

    def partitions(self) -> Sequence[InputPartition]:
        return [InputPartition(task) for task in loop().run(table_scan.planned(self.options))]

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        """Return the rows of a share of the threads, as batches of Arrow."""
        return loop().each(table_scan.batches(self.options, partition.value))


class PushedTableReader(TableReader):
    """The same, for a query whose filters are pushed down."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Narrow the read by the filters. Spark checks all rows again."""
        narrowed = narrowed_by(filters, TABLES[self.options.table])
        self.options = replace(self.options, narrowing=self.options.narrowing.and_(narrowed))
        return filters
