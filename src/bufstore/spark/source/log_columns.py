"""What a reader of the log gets: columns of entries (decoded) or of messages (byte for byte). No Spark in here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import pyarrow

from bufstore.buffer.entry import Item, Malformed, StoredEntry, bytes_of
from bufstore.nats.ranges import Read
from bufstore.threads.model import decode_message, decode_metadata, decode_run
from bufstore.threads.payload import AnyPayload, Edit, Payload, Removal, decode_payload

TEXT, NUMBER, TIME, BYTES = pyarrow.string(), pyarrow.int64(), pyarrow.timestamp("us", tz="UTC"), pyarrow.binary()
#: An entry's columns, in order. An entry that cannot be decoded has cause and body, and null where nothing is known.
ENTRY_COLUMNS: Mapping[str, Any] = {
    #: The entry's place in the log (`bufstore.buffer.places`), by which entries are ordered, and which cursors count.
    "position": NUMBER,
    "stored_at": TIME,
    "thread_id": TEXT,
    "partition": pyarrow.int32(),
    "entry_id": NUMBER,
    "prev_id": NUMBER,
    #: checkpoint, edit or removal.
    "kind": TEXT,
    #: How many messages the thread has after the entry, and how many of those before it the entry keeps.
    "version": NUMBER,
    "keep": NUMBER,
    #: The messages that follow the kept ones, each as JSON.
    "messages": pyarrow.list_(TEXT),
    "run_id": TEXT,
    #: These three are JSON.
    "run": TEXT,
    "metadata": TEXT,
    "state": TEXT,
    #: For a checkpoint, the parent that its run names; for an edit, the new parent ("" for none).
    "parent_thread_id": TEXT,
    #: The size of the payload.
    "bytes": NUMBER,
    #: Why the entry could not be decoded; null: it was decoded.
    "cause": TEXT,
    "body": BYTES,
}
MESSAGE_COLUMNS: Mapping[str, Any] = {
    #: The message's sequence in the stream.
    "position": NUMBER,
    "stored_at": TIME,
    "subject": TEXT,
    "header": TEXT,
    "body": BYTES,
}


def types_of(columns: Sequence[str]) -> dict[str, Any]:
    types = {**MESSAGE_COLUMNS, **ENTRY_COLUMNS}
    return {name: types[name] for name in columns}


class LogItem(msgspec.Struct, frozen=True):
    """An entry, or messages that are not one, and when its group was stored."""

    what: Item
    stored_at_ns: int
    #: The entry's partition; -1 when it is not known.
    partition: int


def message_rows(columns: Sequence[str], reads: Sequence[Read]) -> pyarrow.RecordBatch:
    found: dict[str, list[Any]] = {
        "position": [r.message.seq for r in reads],
        "stored_at": [r.stored_at_ns // 1000 for r in reads],
        "subject": [r.message.subject for r in reads],
        "header": [r.message.header for r in reads],
        "body": [r.message.body for r in reads],
    }
    return _batch(columns, found)


def entry_rows(columns: Sequence[str], items: Sequence[LogItem]) -> pyarrow.RecordBatch:
    """Return entries as rows, decoded only as far as the columns need it."""
    decoding = not _UNDECODED.issuperset(columns)
    payloads = [payload_of(item.what) if decoding else None for item in items]
    rows = list(zip(items, payloads, strict=True))
    try:
        found = {name: [_OF[name](i, p) for i, p in rows] for name in columns}
    except UNDECODABLE:
        by_row = [_values(columns, item, payload) for item, payload in rows]
        found = {name: [values[name] for values in by_row] for name in columns}
    return _batch(columns, found)


def _values(columns: Sequence[str], item: LogItem, payload: Any) -> dict[str, Any]:
    try:
        return values_of(columns, item, payload)
    except UNDECODABLE as e:
        return values_of(columns, item, cause_of(e))


def values_of(columns: Sequence[str], item: LogItem, payload: AnyPayload | str) -> dict[str, Any]:
    """Return an entry's columns. Raises UNDECODABLE; `cause_of` then stands for the payload."""
    return {name: _OF[name](item, payload) for name in columns}


def _batch(columns: Sequence[str], values: Mapping[str, Sequence[Any]]) -> pyarrow.RecordBatch:
    types = types_of(columns)
    arrays = [pyarrow.array(values[name], types[name]) for name in columns]
    return pyarrow.RecordBatch.from_arrays(arrays, names=list(columns))


def payload_of(what: Item) -> AnyPayload | str:
    """Return the payload, or why it cannot be decoded."""
    if isinstance(what, Malformed):
        return what.cause
    try:
        return decode_payload(what.entry.payload)
    except ValueError as e:
        return str(e)


#: The errors that decoding a message or run may raise, if no writer of ours has made it.
UNDECODABLE = (ValueError, TypeError, msgspec.MsgspecError)


def cause_of(error: Exception) -> str:
    """Return why an entry's content has no columns."""
    return f"undecodable payload: {type(error).__name__}"


def as_json(value: Any) -> str:
    """Return a value of a message or run as JSON: bytes become base64, and what JSON lacks becomes null.

    Keys that are not text, like null and true, become text.
    """
    try:
        return msgspec.json.encode(value).decode()
    except TypeError:
        return msgspec.json.encode(_with_texts(value)).decode()


def _with_texts(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        value = msgspec.structs.asdict(value)
    if isinstance(value, dict):
        return {k if isinstance(k, str) else as_json(k).strip('"'): _with_texts(v) for k, v in value.items()}
    if isinstance(value, msgspec.msgpack.Ext):
        return None
    return [_with_texts(v) for v in value] if isinstance(value, list) else value


Get = Callable[[LogItem, Any], Any]


def _of_entry(get: Callable[[StoredEntry], Any]) -> Get:
    return lambda item, _: get(item.what) if isinstance(item.what, StoredEntry) else None


def _of_payload(get: Callable[[Any], Any], *kinds: type) -> Get:
    return lambda _, payload: get(payload) if isinstance(payload, kinds) else None


def _run_id(payload: Payload | Edit) -> str | None:
    return payload.save.run_id if isinstance(payload, Payload) else payload.run_id


def _parent(payload: Payload | Edit) -> str | None:
    if isinstance(payload, Payload):
        return payload.save.parent_thread_id
    return (payload.parent[0] or "") if payload.parent is not None else None


def _body(item: LogItem, payload: Any) -> bytes | None:
    if not isinstance(payload, str):
        return None
    what = item.what
    return what.entry.payload if isinstance(what, StoredEntry) else b"".join(m.body for m in what.messages)


def _size(item: LogItem, _: Any) -> int:
    return bytes_of(item.what)


_KINDS = {"Payload": "checkpoint", "Edit": "edit", "Removal": "removal"}
_OF: Mapping[str, Get] = {
    "position": lambda item, _: item.what.seq,
    "stored_at": lambda item, _: item.stored_at_ns // 1000,
    "thread_id": lambda item, _: item.what.thread_id,
    "partition": lambda item, _: item.partition,
    "entry_id": _of_entry(lambda stored: stored.entry.id),
    "prev_id": _of_entry(lambda stored: stored.entry.prev_id),
    "kind": lambda _, payload: _KINDS.get(type(payload).__name__),
    "version": _of_entry(lambda stored: stored.entry.version),
    "keep": _of_payload(lambda payload: payload.keep, Payload, Edit, Removal),
    "messages": _of_payload(
        lambda payload: [as_json(decode_message(m)) for m in payload.messages], Payload, Edit, Removal
    ),
    "run_id": _of_payload(_run_id, Payload, Edit),
    "run": _of_payload(lambda p: as_json(decode_run(p.run)) if p.run is not None else None, Payload, Edit),
    "metadata": _of_payload(lambda p: as_json(decode_metadata(p.metadata)) if p.metadata is not None else None, Edit),
    "state": _of_payload(lambda p: as_json(decode_message(p.state)) if p.state is not None else None, Edit),
    "parent_thread_id": _of_payload(_parent, Payload, Edit),
    "bytes": _size,
    "cause": lambda _, payload: payload if isinstance(payload, str) else None,
    "body": _body,
}
#: The columns that are known without decoding the payload.
_UNDECODED = {"position", "stored_at", "thread_id", "partition", "entry_id", "prev_id", "version", "bytes"}
