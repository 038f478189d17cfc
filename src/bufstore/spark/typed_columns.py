"""Runs and messages as typed columns that people query: what all our tables have in common. No I/O."""

from __future__ import annotations

from typing import Any

from bufstore.spark.source.log_columns import NUMBER, TEXT, TIME, as_json
from bufstore.threads.model import Run

#: The times that Python holds, in seconds of Unix time, without those that a time zone could move out of them.
_EARLIEST_S, _LATEST_S = -62_135_510_400, 253_402_214_400

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
    #: The whole run, as JSON.
    "json": TEXT,
}
MESSAGE = {
    #: The message's index in the thread, from 0. (Not named `index`, which is a method of Spark's rows.)
    "number": NUMBER,
    "id": TEXT,
    "role": TEXT,
    "name": TEXT,
    #: The message's plain text; null when it is not known.
    "text": TEXT,
    #: The whole message, as JSON.
    "json": TEXT,
}


def run_columns(run: Run) -> dict[str, Any]:
    found = {name: getattr(run, name) for name in RUN if name != "json"}
    times = {name: microseconds(value) for name, value in found.items() if RUN[name] is TIME}
    numbers = {name: _bigint(value) for name, value in found.items() if RUN[name] is NUMBER}
    return found | times | numbers | {"status": run.status.value, "json": as_json(run)}


def _bigint(number: int | None) -> int | None:
    """Return the number; None when it does not fit into Spark's bigint."""
    return number if number is not None and -(1 << 63) <= number < 1 << 63 else None


def microseconds(seconds: float | None) -> int | None:
    """Return the time in microseconds; None when Spark cannot hold it, or Python not read it from Spark."""
    if seconds is None or not _EARLIEST_S < seconds < _LATEST_S:
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
    """Return the text of a message's content, which is text or, as model providers write it, a list of parts."""
    if not isinstance(content, list):
        return _text_of(content)
    parts = [part.get("text") if isinstance(part, dict) else part for part in content]
    texts = [part for part in parts if isinstance(part, str)]
    return "\n".join(texts) if texts else None
