"""Reads a job's rows as checkpoints: which columns there are, and what a row asks for. No Spark in here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

import msgspec

from bufstore.errors import ConfigError, InvalidRecord
from bufstore.threads import edits
from bufstore.threads.edits import WantedEdit
from bufstore.threads.lineage import Children, LineageChange, deletion
from bufstore.threads.model import Run, RunStatus, ThreadMetadata
from bufstore.types import Message

#: Column → the types it may have (Spark's simple strings), and whether it must be there.
COLUMNS: Mapping[str, tuple[Sequence[str], bool]] = {
    "thread_id": (("string",), True),
    "run_id": (("string",), True),
    #: The thread's whole list of messages, or the messages to append, each as JSON. In a row, one of the two is null.
    "messages": (("array<string>",), False),
    "delta": (("array<string>",), False),
    #: The order of a thread's rows within a batch. Without it, rows of one thread go in the order of their contents.
    "position": (("bigint", "int", "timestamp", "timestamp_ntz"), False),
    "agent_id": (("string",), False),
    "status": (("string",), False),
    "parent_thread_id": (("string",), False),
    #: Any other fields of the run, as a JSON object.
    "run": (("string",), False),
    #: In place of messages and delta: an edit of the thread, as the JSON of an `EditRow`.
    "edit": (("string",), False),
}
#: The column, beside a checkpoint's, that says why a row cannot be read.
UNREADABLE = "bufstore_unreadable"
#: A row that comes as JSON, whose types Spark has not checked.
_JsonRow = msgspec.defstruct(
    "_JsonRow",
    [
        (name, list[str] | None if types[0] == "array<string>" else str | None, None)
        for name, (types, _) in COLUMNS.items()
        if name != "position"  # it only orders the rows of a batch
    ],
)
#: How many rows of one thread a batch may have: a row's place is the lower 24 bits of the source's number.
ROWS_MAX = 1 << 24
#: How many batches a source may have: the batch is the upper 39 of the number's 63 bits.
BATCHES_MAX = 1 << 39


def check_columns(found: Iterable[tuple[str, str]]) -> None:
    """Raise ConfigError, naming the column, unless these names and types can become checkpoints."""
    types = dict(found)
    for name, (wanted, needed) in COLUMNS.items():
        if name not in types:
            if needed:
                raise ConfigError(f"column {name} is missing: {wanted[0]}")
        elif types[name] not in wanted:
            raise ConfigError(f"column {name} is {types[name]} but must be {' or '.join(wanted)}")
    if unknown := types.keys() - COLUMNS.keys():
        raise ConfigError(f"column {min(unknown)} is not a column of a checkpoint: {', '.join(COLUMNS)}")
    if not types.keys() & {"messages", "delta", "edit"}:
        raise ConfigError("column messages or delta is missing: array<string>, each message as JSON")


def row_of_json(row: str) -> dict[str, Any]:
    """Return the row of a JSON object. Raises InvalidRecord, naming the column, when a type is not as in COLUMNS."""
    found: Any = None
    with suppress(msgspec.MsgspecError, RecursionError, UnicodeEncodeError):
        found = msgspec.json.decode(row)
    if not isinstance(found, dict) or "thread_id" not in found or "run_id" not in found:
        raise InvalidRecord("a row is a JSON object with thread_id, run_id, and messages, delta or edit")
    try:
        msgspec.convert(found, _JsonRow)
    except msgspec.ValidationError as e:
        raise InvalidRecord(f"a column of a row has the wrong type (messages, run, edit: JSON in text): {e}") from e
    return found


class CheckpointRow(msgspec.Struct, frozen=True, gc=False):
    """What one row asks for."""

    thread_id: str
    whole: bool
    messages: list[Message]
    run: Run


class _Metadata(ThreadMetadata, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """As `ThreadMetadata`, which passes over what it does not know, because a later release may have written it."""


class EditRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The column ``edit``: exactly one of these fields."""

    #: The thread's new metadata. The thread is made if it does not exist.
    metadata: _Metadata | None = None
    #: The ids of messages to delete.
    delete_messages: list[str] | None = None
    #: Deletes the thread, if it exists; the value says what happens to its children.
    delete_thread: Children | None = None

    def wanted(self, thread_id: str) -> WantedEdit | LineageChange:
        """Return the edit of this thread. Raises InvalidRecord, InvalidId."""
        if sum(one is not None for one in (self.metadata, self.delete_messages, self.delete_thread)) != 1:
            raise InvalidRecord("an edit has one of metadata, delete_messages and delete_thread")
        if self.metadata is not None:
            return edits.save_thread(thread_id, self.metadata)
        if self.delete_thread is not None:
            return deletion(thread_id, self.delete_thread)
        return edits.delete_messages(thread_id, self.delete_messages)


def wanted_of(row: Mapping[str, Any]) -> CheckpointRow | WantedEdit | LineageChange:
    """Return what a row asks for. Raises InvalidRecord, InvalidId."""
    if UNREADABLE in row:
        raise InvalidRecord(f"a row of thread {row['thread_id']!r} is unreadable: {row[UNREADABLE]}")
    edit = row.get("edit")
    if edit is None:
        return checkpoint_of(row)
    if row.get("messages") is not None or row.get("delta") is not None:
        raise InvalidRecord("a row with an edit has neither messages nor delta")
    try:
        return msgspec.json.decode(edit, type=EditRow).wanted(row["thread_id"])
    except (msgspec.MsgspecError, RecursionError) as e:
        raise InvalidRecord(f"the edit of a row of thread {row['thread_id']!r} is unreadable: {e}") from e


def checkpoint_of(row: Mapping[str, Any]) -> CheckpointRow:
    """Return a row's checkpoint. Raises InvalidRecord, saying why, for a row that has none; the store checks ids."""
    whole, delta = row.get("messages"), row.get("delta")
    if (whole is None) == (delta is None):
        raise InvalidRecord("a row needs either messages or delta, not both")
    texts = whole if whole is not None else delta
    assert texts is not None
    try:
        messages = [_decode(text) for text in texts]
        run = _run_of_row(row)
    except RecursionError as e:
        raise InvalidRecord(f"a row of thread {row['thread_id']!r} is nested too deeply") from e
    except (msgspec.MsgspecError, TypeError, ValueError) as e:
        raise InvalidRecord(f"a row of thread {row['thread_id']!r} is unreadable: {e}") from e
    return CheckpointRow(row["thread_id"], whole is not None, messages, run)


#: The longest JSON of a run that is remembered: longer JSON mostly differs from row to row.
_REMEMBERED_CHARS = 4096
_decode = msgspec.json.Decoder().decode


def _run_of_row(row: Mapping[str, Any]) -> Run:
    rest = row.get("run")
    find = _run_of if rest is None or len(rest) <= _REMEMBERED_CHARS else _run_of.__wrapped__
    return find(
        row["run_id"], row["thread_id"], row.get("agent_id"), row.get("status"), row.get("parent_thread_id"), rest
    )


# A thread's rows mostly say the same about their run.
@lru_cache(maxsize=1024)
def _run_of(
    run_id: Any, thread_id: Any, agent_id: str | None, status: str | None, parent: str | None, rest: str | None
) -> Run:
    fields = msgspec.json.decode(rest, type=dict[str, Any]) if rest is not None else {}
    if unknown := fields.keys() - Run.__struct_fields__:
        raise ValueError(f"a run has no field {min(unknown)!r}")
    if agent_id is not None:
        fields["agent_id"] = agent_id
    if parent is not None:
        fields["parent_thread_id"] = parent
    if status is not None:
        fields["status"] = RunStatus(status)
    return msgspec.convert(fields | {"run_id": run_id, "thread_id": thread_id}, Run)


def check_batch_id(batch_id: int) -> None:
    """Raise ConfigError for a batch number from which no row numbers can be made."""
    if not 0 <= batch_id < BATCHES_MAX:
        raise ConfigError(
            f"a batch's number is at least 0 and below {BATCHES_MAX}, and this is {batch_id}: count batches, or take "
            "seconds instead of milliseconds (yyyymmddHHMM instead of yyyymmddHHMMSS)"
        )


def number_of(batch_id: int, rank: int) -> int:
    """Return the source's number of a row: its batch, and its place among its thread's rows in the batch."""
    if not 0 <= rank < ROWS_MAX:
        raise InvalidRecord(f"a batch has more than {ROWS_MAX} rows of one thread")
    return batch_id << 24 | rank
