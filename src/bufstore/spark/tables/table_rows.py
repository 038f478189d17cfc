"""The tables that show a deployment, and their rows; no I/O, no Spark in here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow

from bufstore.spark.source.log_columns import NUMBER, TEXT, TIME, UNDECODABLE, as_json
from bufstore.spark.typed_columns import MESSAGE, RUN, message_columns, run_columns
from bufstore.threads.model import Run, Thread, decode_message

_COMMON = {
    #: When Postgres last wrote the thread (or run); if the change is not flushed yet, when the log stored it.
    "changed_at": TIME,
    #: The position at which the row is read: it has everything of its thread before this position, and nothing else.
    "as_of": NUMBER,
}
#: Table → column → type, in order.
TABLES: Mapping[str, Mapping[str, Any]] = {
    "threads": {
        "thread_id": TEXT,
        #: The number of messages.
        "version": NUMBER,
        "parent_thread_id": TEXT,
        "latest_run_id": TEXT,
        "active_run_id": TEXT,
        "open_run_id": TEXT,
        #: The agent and the status of the latest run.
        "agent_id": TEXT,
        "status": TEXT,
        "title": TEXT,
        "resource_id": TEXT,
        #: Both are JSON.
        "custom": TEXT,
        "state": TEXT,
        #: The position of the last entry of the log that is in the row; null: none is.
        "position": NUMBER,
        #: The first parked entry's position while the thread's chain is broken: what builds on it is not in the row.
        "quarantined_since": NUMBER,
        **_COMMON,
    },
    "runs": {"thread_id": TEXT, **RUN, **_COMMON},
    "messages": {"thread_id": TEXT, "message": pyarrow.struct(list(MESSAGE.items())), **_COMMON},
}


def batch_of(table: str, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> pyarrow.RecordBatch:
    types = TABLES[table]
    arrays = [pyarrow.array([row[name] for row in rows], types[name]) for name in columns]
    return pyarrow.RecordBatch.from_arrays(arrays, names=list(columns))


def thread_row(
    thread: Thread, run: Run | None, state: bytes | None, *, position: int, broken_since: int | None
) -> dict[str, Any]:
    """Return a row of table threads, without `_COMMON`; `run`: the thread's latest one."""
    metadata = thread.metadata
    return {
        "thread_id": thread.thread_id,
        "version": thread.version,
        "parent_thread_id": thread.parent_thread_id,
        "latest_run_id": thread.latest_run_id,
        "active_run_id": thread.active_run_id,
        "open_run_id": thread.open_run_id,
        "agent_id": run.agent_id if run is not None else None,
        "status": run.status.value if run is not None else None,
        "title": metadata.title,
        "resource_id": metadata.resource_id,
        "custom": as_json(metadata.custom),
        "state": _state(state) if state is not None else None,
        "position": position or None,
        "quarantined_since": broken_since,
    }


def _state(state: bytes) -> str | None:
    """Return the state as JSON; None when it cannot be decoded."""
    try:
        return as_json(decode_message(state))
    except UNDECODABLE:
        return None


def run_row(run: Run) -> dict[str, Any]:
    """Return a row of table runs, without `_COMMON`."""
    return {"thread_id": run.thread_id, **run_columns(run)}


def message_row(thread_id: str, number: int, payload: bytes) -> dict[str, Any]:
    """Return a row of table messages, without `_COMMON`; of a message that cannot be decoded, only its number."""
    try:
        message = message_columns(number, decode_message(payload))
    except UNDECODABLE:
        message = {"number": number}
    return {"thread_id": thread_id, "message": message}
