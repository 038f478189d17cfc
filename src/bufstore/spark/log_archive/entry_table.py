"""The rows that people query of an archive: its entries, with runs and messages as typed columns; no I/O.

What a flush makes of an entry follows from the entries before it in its thread (`bufstore.buffer.chain`). So a thread's
rows are made in order, from what is known of the thread so far.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
import pyarrow

from bufstore.buffer.chain import Watermark, plan, superseded
from bufstore.buffer.entry import Base, Item, StoredEntry
from bufstore.spark.source.log_columns import (
    NUMBER,
    TEXT,
    TIME,
    UNDECODABLE,
    LogItem,
    cause_of,
    payload_of,
    values_of,
)
from bufstore.spark.typed_columns import MESSAGE, RUN, message_columns, run_columns
from bufstore.threads.model import decode_message, decode_run
from bufstore.threads.payload import AnyPayload, Removal

#: What a flush makes of an entry, as far as the log alone tells: the entry is applied; it came too late and does
#: nothing; or the entry, or one that it builds on, cannot be applied.
APPLIED, SUPERSEDED, PARKED = "applied", "superseded", "parked"

#: These columns are those of `bufstore.spark.source.log_columns`.
_AS_READ = (
    "position", "partition", "entry_id", "prev_id", "kind", "version", "keep", "metadata", "state", "parent_thread_id",
)  # fmt: skip
#: An entry's columns, in order.
TABLE: Mapping[str, Any] = {
    "position": NUMBER,
    "stored_at": TIME,
    "thread_id": TEXT,
    "partition": pyarrow.int32(),
    "entry_id": NUMBER,
    "prev_id": NUMBER,
    "kind": TEXT,
    "effect": TEXT,
    "version": NUMBER,
    "keep": NUMBER,
    "messages": pyarrow.list_(pyarrow.struct(list(MESSAGE.items()))),
    "run": pyarrow.struct(list(RUN.items())),
    "metadata": TEXT,
    "state": TEXT,
    "parent_thread_id": TEXT,
    "bytes": NUMBER,
    "cause": TEXT,
    "date": pyarrow.date32(),
}
SCHEMA = pyarrow.schema(list(TABLE.items()))


class Known(msgspec.Struct, frozen=True):
    """What became of the earlier entries of a thread."""

    #: The position of the last of them, whatever became of it.
    position: int
    #: The id of the last one that was applied (0: none was), and how many messages the thread has after it.
    applied_id: int
    version: int
    #: Whether that one deleted the thread.
    gone: bool


def known_of(position: int, applied: Mapping[str, Any] | None) -> Known:
    """Return what is known from rows whose last position is `position`; `applied`: the last applied one, if any."""
    if applied is None:
        return Known(position, 0, 0, False)
    return Known(position, applied["entry_id"], applied["version"], applied["kind"] == "removal")


def thread_rows(
    thread_id: str, partition: int, known: Known | None, items: Iterator[tuple[Item, datetime]]
) -> Iterator[dict[str, Any]]:
    """Yield a row for each entry, in the order of the log."""
    for item, stored_at in items:
        payload, read, undecodable = payload_of(item), LogItem(item, 0, partition), None
        try:
            columns = _columns(read, payload)
        except UNDECODABLE as error:  # a flush does not look into messages
            undecodable = cause_of(error)
            columns = _columns(read, undecodable)
        effect, cause, known = _effect(known, item, payload)
        yield columns | {
            "thread_id": thread_id,
            "stored_at": stored_at,
            "date": stored_at.astimezone(UTC).date(),  # `stored_at` comes in the time zone of Spark's session
            "effect": effect,
            "bytes": len(item.entry.payload) if isinstance(item, StoredEntry) else None,
            "cause": cause or undecodable,
        }


def _effect(known: Known | None, item: Item, payload: AnyPayload | str) -> tuple[str, str | None, Known]:
    """Return what becomes of the entry, why if it is parked, and what is known of its thread then."""
    row = Watermark()
    if known is not None:
        row = Watermark(known.position, known.applied_id, known.version, gone=known.gone)
    trusted = known is None
    if isinstance(item, StoredEntry) and item.entry.base is Base.STORED and not superseded(item, row):
        trusted = True  # its writer saw in Postgres what the log does not show, as after a backfill
    if trusted and isinstance(item, StoredEntry):
        row = msgspec.structs.replace(row, applied_id=item.entry.prev_id)
    poison: dict[int, str] = {}
    if isinstance(item, StoredEntry):
        if isinstance(payload, str):
            poison[item.entry.id] = payload
        elif payload.keep + len(payload.messages) != item.entry.version:
            poison[item.entry.id] = "its messages do not add up to its version"
        elif payload.keep > row.version and not trusted and item.entry.prev_id == row.applied_id:
            poison[item.entry.id] = f"keeps {payload.keep} of {row.version} messages"
    found = plan(row, [item], complete=True, poison=poison)
    if found.apply:
        mark = found.watermark
        return APPLIED, None, Known(item.seq, mark.applied_id, mark.version, isinstance(payload, Removal))
    after = known_of(item.seq, None) if known is None else msgspec.structs.replace(known, position=item.seq)
    if found.park:
        return PARKED, found.park[0].cause, after
    return SUPERSEDED, None, after


def _columns(item: LogItem, payload: AnyPayload | str) -> dict[str, Any]:
    """Return the columns that the entry alone tells; of a payload that is only a cause, most are null."""
    found = dict.fromkeys(TABLE) | values_of(_AS_READ, item, payload)
    if not isinstance(payload, str):
        found["messages"] = [
            message_columns(payload.keep + n, decode_message(m)) for n, m in enumerate(payload.messages)
        ]
        run = None if isinstance(payload, Removal) else payload.run
        found["run"] = run_columns(decode_run(run)) if run is not None else None
    return found
