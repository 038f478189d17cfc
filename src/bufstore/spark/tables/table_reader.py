"""What Spark calls to read threads, runs or messages: plans and tasks of `bufstore.spark.tables.table_scan`.

The reader takes no filters of a query (`pushFilters`). Spark (4.3) keeps the reader that it narrowed by the filters of
one query in what all queries to the same DataFrame or view share, and reads other queries with it, too: they would lack
rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow
from pyspark.sql.datasource import DataSourceReader, InputPartition

from bufstore.spark.process_loop import loop
from bufstore.spark.tables import table_scan
from bufstore.spark.tables.table_options import TableOptions


class TableReader(DataSourceReader):
    """See the module."""

    def __init__(self, options: TableOptions) -> None:
        self.options = options

    def partitions(self) -> Sequence[InputPartition]:
        return [InputPartition(task) for task in loop().run(table_scan.planned(self.options))]

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        """Return the rows of a share of the threads, as batches of Arrow."""
        return loop().each(table_scan.batches(self.options, partition.value))
