"""What the tasks of all jobs share in Spark's Python workers, and how their results add up."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import pyarrow

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


def outcome(**values: int | Sequence[str]) -> pyarrow.RecordBatch:
    """Return the one row in which a task reports its results to the driver: numbers, and lists of texts."""
    import pyarrow

    types = [
        (name, pyarrow.int64() if isinstance(value, int) else pyarrow.list_(pyarrow.string()))
        for name, value in values.items()
    ]
    return pyarrow.RecordBatch.from_pylist([values], pyarrow.schema(types))
