"""Converts Arrow's rows to Python's, even rows with text that is not UTF-8, or with times that Python does not have."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

from bufstore.spark.sink.checkpoint_rows import UNREADABLE
from bufstore.unix_time import moment

if TYPE_CHECKING:
    import pyarrow


def rows_of(batch: pyarrow.RecordBatch) -> list[dict[str, Any]]:
    """Return the rows, each with its position as a number or a UTC time; mark those with text that is not UTF-8."""
    import pyarrow

    at = batch.schema.get_field_index("position")
    timed = at >= 0 and pyarrow.types.is_timestamp(batch.schema.field(at).type)
    if timed:  # as numbers: Python may not know the session's time zone, in which Python's first year may begin late
        batch = batch.set_column(at, "position", batch.column(at).cast(pyarrow.int64()))
    try:
        rows: list[dict[str, Any]] = batch.to_pylist()
    except UnicodeDecodeError:
        raw = [column.cast(_raw(column.type)) for column in batch.columns]
        rows = [_decoded(row) for row in pyarrow.RecordBatch.from_arrays(raw, batch.schema.names).to_pylist()]
    if timed:
        for row in rows:
            row["position"] = _moment(row["position"])
    return rows


def _moment(us: int | None) -> datetime | int | None:
    """Return the time; if Python does not have it, return the microseconds since 1970."""
    try:
        return moment(us) if us is not None else None
    except OverflowError:
        return us


def _raw(kind: pyarrow.DataType) -> pyarrow.DataType:
    import pyarrow

    if pyarrow.types.is_list(kind):
        return pyarrow.list_(kind.value_field.with_type(_raw(kind.value_type)))
    if pyarrow.types.is_large_string(kind):
        return pyarrow.large_binary()
    return pyarrow.binary() if pyarrow.types.is_string(kind) else kind


def _decoded(row: dict[str, Any]) -> dict[str, Any]:
    found = {name: _text(value, "strict") for name, value in row.items()}
    wrong = [name for name, value in row.items() if value is not None and found[name] is None]
    if not wrong:
        return found
    # Show the bytes, do not replace them: else two ids could become one, and a replay could write what nobody sent.
    shown = {name: _text(row[name], "backslashreplace") for name in wrong}
    return found | shown | {UNREADABLE: f"not UTF-8 in {' and '.join(wrong)} (the bad bytes are shown as \\x…)"}


def _text(value: Any, errors: str) -> Any:
    """Return bytes, or a list of them, as text; None when they are not text."""
    try:
        if isinstance(value, list):
            return [one.decode(errors=errors) if one is not None else None for one in value]
        return value.decode(errors=errors) if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        return None
