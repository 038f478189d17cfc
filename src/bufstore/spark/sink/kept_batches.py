"""Keeps a task's rows until all of them are there: the sum over the rows is noted before one of them is written.

Rows are kept in memory up to a bound, and the rest in a file. The file is gone with the task, however the task ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import IO, TYPE_CHECKING

from bufstore.spark.local_files import local_file
from bufstore.spark.sink.parts import sum_of
from bufstore.spark.sink.settled import ROW
from bufstore.spark.slices import slices_of

if TYPE_CHECKING:
    import pyarrow


class KeptBatches:
    """Batches of Arrow, in order, which can be taken out once."""

    def __init__(self, batches: Iterable[pyarrow.RecordBatch], bytes_max: int) -> None:
        """Take in all `batches`. `bytes_max`: how many bytes of them stay in memory."""
        self._in_memory: list[pyarrow.RecordBatch] = []
        self._file: IO[bytes] | None = None
        #: A sum over all rows.
        self.planned = 0
        self.empty = True
        size, writer = 0, None
        for batch in batches:
            if not batch.num_rows:
                continue
            self.empty = False
            self.planned = sum_of([self.planned, *batch.column(ROW).to_pylist()])
            size += batch.nbytes
            if size <= bytes_max:
                self._in_memory.append(batch)
                continue
            if writer is None:
                writer = self._new_file(batch.schema)
            for piece in slices_of(batch, bytes_max):  # the pieces are read back one by one
                writer.write_batch(piece)
        if writer is not None:
            writer.close()

    def __iter__(self) -> Iterator[pyarrow.RecordBatch]:
        import pyarrow

        while self._in_memory:
            yield self._in_memory.pop(0)
        if self._file is not None:
            self._file.seek(0)
            with self._file, pyarrow.ipc.open_stream(self._file) as reader:
                yield from reader

    def _new_file(self, schema: pyarrow.Schema) -> pyarrow.RecordBatchStreamWriter:
        import pyarrow

        self._file = local_file()
        return pyarrow.ipc.new_stream(self._file, schema)
