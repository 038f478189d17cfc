"""Runs and messages as columns with types, as people query them: what all tables of ours have in common. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow

from bufstore.spark.source.log_columns import as_json
from bufstore.threads.model import Run

TEXT, NUMBER, TIME = pyarrow.string(), pyarrow.int64(), pyarrow.timestamp("us", tz="UTC")
RUN = {
    "run_id": TEXT,
    "agent_id": TEXT,
    "status": TEXT,
    "parent_run_id": TEXT,
    "termination_reason": TEXT,
    "created_at": TIME,
    "started_at": TIME,
    "finished_at": TIME,
    "updated_at": TIME,
    "steps": NUMBER,
    "input_tokens": NUMBER,
    "output_tokens": NUMBER,
    #: All of the run.
    "json": TEXT,
}
MESSAGE = {
    #: Its place in the thread, from 0. (`index` is a method of Spark's rows.)
    "number": NUMBER,
    "id": TEXT,
    "role": TEXT,
    "name": TEXT,
    #: What it says in plain text; null where that is not known.
    "text": TEXT,
    #: All of the message.
    "json": TEXT,
}
_DDL = {TEXT: "string", NUMBER: "bigint", TIME: "timestamp", pyarrow.int32(): "int", pyarrow.date32(): "date"}


def ddl_of(columns: Mapping[str, Any]) -> str:
    """Columns of these types, as Spark writes them."""
    return ", ".join(f"{name} {_ddl(type_)}" for name, type_ in columns.items())


def _ddl(type_: Any) -> str:
    if pyarrow.types.is_list(type_):
        return f"array<{_ddl(type_.value_type)}>"
    if pyarrow.types.is_struct(type_):
        return f"struct<{', '.join(f'{field.name}: {_ddl(field.type)}' for field in type_)}>"
    return _DDL[type_]


def run_columns(run: Run) -> dict[str, Any]:
    found = {name: getattr(run, name) for name in RUN if name != "json"}
    times = {name: microseconds(value) for name, value in found.items() if RUN[name] is TIME}
    numbers = {name: _bigint(value) for name, value in found.items() if RUN[name] is NUMBER}
    return found | times | numbers | {"status": run.status.value, "json": as_json(run)}


def _bigint(number: int | None) -> int | None:
    """A number that Spark can hold."""
    return number if number is not None and -(1 << 63) <= number < 1 << 63 else None


def microseconds(seconds: float | None) -> int | None:
    """Microseconds, of a time that Spark can hold."""
    if seconds is None or not abs(seconds) < 2e11:
        return None
    return round(seconds * 1e6)


def message_columns(number: int, message: Any) -> dict[str, Any]:
    said = message if isinstance(message, dict) else {"content": message}
    return {
        "number": number,
        "id": _text_of(said.get("id")),
        "role": _text_of(said.get("role") or said.get("type")),
        "name": _text_of(said.get("name")),
        "text": _said(said.get("content")),
        "json": as_json(message),
    }


def _text_of(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _said(content: Any) -> str | None:
    """The text of a message's content: as such, or in parts, as providers of models write it."""
    if not isinstance(content, list):
        return _text_of(content)
    parts = [part.get("text") if isinstance(part, dict) else part for part in content]
    texts = [part for part in parts if isinstance(part, str)]
    return "\n".join(texts) if texts else None
