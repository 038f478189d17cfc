"""What the tasks of all jobs share in Spark's Python workers, and how their results get to the driver and add up."""

from __future__ import annotations

import gc
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import msgspec

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql import DataFrame

T = TypeVar("T")

#: With Python's default of 700, a third of a task's time goes into collections that look through rows still in use.
_OBJECTS_BETWEEN_COLLECTIONS = 20_000
#: How many items of a list, such as reasons, a report has room for.
_SHOWN = 10


class Counts(msgspec.Struct):
    """What became of a task's items; a job's report adds up its tasks' counts. Fields are numbers and lists."""

    def add(self, other: Counts) -> None:
        """Add what became of other items. Each list keeps its first ten items."""
        for name in other.__struct_fields__:
            both = getattr(self, name) + getattr(other, name)
            setattr(self, name, both[:_SHOWN] if isinstance(both, list) else both)


@contextmanager
def in_task() -> Iterator[None]:
    """Collect garbage less often during the block, the work of one task: a Python worker has one task at a time."""
    before = gc.get_threshold()
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def outcomes(rows: DataFrame, task: Callable[[Iterator[pyarrow.RecordBatch]], Iterator[T]], kind: type[T]) -> list[T]:
    """Run `task` on each partition of the rows, and return what the tasks yield: values of `kind`, by msgspec."""
    found = rows.mapInArrow(partial(_packed, task), "outcome binary").collect()
    return [msgspec.msgpack.decode(zlib.decompress(packed), type=kind) for (packed,) in found]


def _packed(
    task: Callable[[Iterator[pyarrow.RecordBatch]], Iterator[object]], batches: Iterator[pyarrow.RecordBatch]
) -> Iterator[pyarrow.RecordBatch]:
    import pyarrow

    with in_task():
        for found in task(batches):
            packed = zlib.compress(msgspec.msgpack.encode(found), 1)
            yield pyarrow.RecordBatch.from_pydict({"outcome": [packed]})
