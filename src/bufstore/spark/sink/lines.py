"""A row of a job on its way: its place among its thread's rows, and what it asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from bufstore.errors import InvalidRecord, Rejected
from bufstore.spark.sink.checkpoint_rows import CheckpointRow, wanted_of
from bufstore.spark.sink.settled import ROW, THREAD
from bufstore.threads.edits import WantedEdit
from bufstore.threads.lineage import LineageChange

Row = Mapping[str, Any]


class SetAside(InvalidRecord):
    """A row that was set aside, so people decide about it, whatever it says by now."""


class Line(msgspec.Struct, frozen=True, gc=False):
    """A row, its place among its thread's rows in the batch, and what it asks for (or why that cannot be)."""

    rank: int
    row: Row
    wanted: CheckpointRow | WantedEdit | LineageChange | Rejected


def shown(row: Row) -> Row:
    """Return the row without our own columns, but with what made it unreadable: no replay may write it as shown."""
    return {name: value for name, value in row.items() if name not in (THREAD, ROW)}


def line_of(rank: int, row: Row) -> Line:
    try:
        return Line(rank, row, wanted_of(row))
    except Rejected as e:
        return Line(rank, row, e)
