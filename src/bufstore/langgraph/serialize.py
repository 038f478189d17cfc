"""LangGraph's objects as rows, and rows as LangGraph's objects: byte for byte what its own saver for Postgres does."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from typing import Any

import msgspec
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    WRITES_IDX_MAP,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    DeltaChannelHistory,
    get_serializable_checkpoint_metadata,
)
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.types import _DeltaSnapshot

from bufstore.errors import InvalidId, InvalidRecord
from bufstore.langgraph.ancestors import Walk
from bufstore.langgraph.model import TASKS, BlobRow, CheckpointRow, Put, Tables, WriteRow, Writes, takes_sends
from bufstore.langgraph.payload import holds_nul
from bufstore.types import check_id

#: Without a check for circles: a value that refers to itself fails as too deep, and need not fail earlier.
_JSON = json.JSONEncoder(ensure_ascii=False, check_circular=False, allow_nan=False, separators=(",", ":"))
_STR = frozenset((str,))
#: The most bytes of a row's key: all of it is in one index entry of Postgres, which holds 2704 bytes at most.
_KEY_BYTES = 2600
#: How deep a value may be nested. Python's decoder goes as deep on the stack of whoever reads it, which may end sooner
#: than the writer's.
_DEPTH_MAX = 200


#: What a config names: thread, namespace, checkpoint.
Place = tuple[str, str, str | None]


def place(config: Mapping[str, Any]) -> Place:
    """Return the thread, namespace and checkpoint that a config names. Raises InvalidId."""
    configurable = config["configurable"]
    ns = configurable.get("checkpoint_ns") or ""
    if ns:
        _check_text(ns)
    return id_of(configurable["thread_id"], "thread_id"), ns, id_in(config)


def id_of(value: object, what: str) -> str:
    """Return the id of a thread or run as text: LangGraph takes anything that has one. Raises InvalidId.

    None is no id. As text it would be one and the same for all who have none. A member of an enum of str stands for its
    text, as in LangGraph's own saver.
    """
    if value is None:
        raise InvalidId(f"{what} is None")
    return check_id(str.__str__(value) if isinstance(value, str) else str(value), what)


def thread_of(thread_id: object) -> str:
    """Return the id of a thread as text. Raises InvalidId."""
    return id_of(thread_id, "thread_id")


def id_in(config: Mapping[str, Any]) -> str | None:
    """Return the id of the checkpoint that a config names, or None. Raises InvalidId if no row could have the id."""
    checkpoint_id: str | None = config["configurable"].get("checkpoint_id") or None
    if checkpoint_id is not None:
        _check_text(checkpoint_id)
    return checkpoint_id


def put_of(
    serde: SerializerProtocol,
    at: Place,
    config: RunnableConfig,
    checkpoint: Checkpoint,
    metadata: CheckpointMetadata,
    new_versions: ChannelVersions,
    *,
    carry_bytes: int = 0,
    read: Tables | None = None,
) -> Put:
    """Return the rows of a checkpoint; afterwards the caller may change its objects. `at`: the place of `config`.

    `carry_bytes`: the values of channels that are not in `new_versions` come, too, if they are not larger than this:
    as they stand in `read`, or else serialized anew. This process may lack a class, and have a value that was made
    without it.

    None, str, int, float and bool stand in the checkpoint's row, other values in blobs. Raises InvalidId,
    InvalidRecord (what Postgres would refuse), and what the serializer raises.
    """
    thread_id, ns, parent = at
    inline: dict[str, Any] = {}
    blobs: list[BlobRow] = []
    others: list[BlobRow] = []
    versions = checkpoint["channel_versions"]
    for channel, value in checkpoint["channel_values"].items():
        if value is None or isinstance(value, (str, int, float, bool)):
            inline[channel] = _as_stored(value) if isinstance(value, float) else value
        else:
            if isinstance(value, _DeltaSnapshot):
                inline[channel] = True
            if channel in new_versions:
                blobs.append(BlobRow(ns, channel, str(new_versions[channel]), *_dumped(serde, value)))
            elif isinstance(value, _DeltaSnapshot):
                carry_bytes = 0  # a snapshot stands in the history, so nothing is carried
            elif carry_bytes and channel in versions:
                key = ns, channel, str(versions[channel])
                kept = read.value(key) if read is not None else None
                others.append(kept or BlobRow(*key, *_dumped(serde, value)))
    told = new_versions
    if carry_bytes and sum(len(blob.blob or b"") for blob in others) <= carry_bytes:
        blobs, told = [*blobs, *others], {**versions, **new_versions}
    carried = {blob.channel for blob in blobs}
    empty: list[tuple[str, str]] = []
    untold: list[tuple[str, str]] = []
    for channel, version in told.items():
        if channel not in carried:
            # A graph that does not have the channel any more gives no value, though the thread may have one.
            given = channel in new_versions or channel in inline
            (empty if given else untold).append((channel, str(version)))
    about = get_serializable_checkpoint_metadata(config, metadata)
    row = CheckpointRow(
        ns,
        checkpoint["id"],
        parent,
        _row_json({**checkpoint, "channel_values": inline}, "the checkpoint", inline, "the value of channel"),
        _row_json(about, "the checkpoint's metadata", about, "metadata"),
    )
    if not _surely_fit([thread_id, ns, row.id, *told, *map(str, told.values()), *(blob.type for blob in blobs)]):
        for blob in blobs:
            _check_text(blob.type)
        base = _check_key(thread_id, ns)
        _check_key(row.id, beside=base)
        for channel, version in told.items():
            _check_key(channel, str(version), beside=base)
    return Put(row, blobs, empty, untold)


class Making(msgspec.Struct, gc=False):
    """Makes the rows of a checkpoint by `put_of`, once it is known what the checkpoint carries.

    Many of these wait for the log at a time. One that the garbage collector need not look at is cheaper than a closure,
    of which it looks at every cell.
    """

    serde: SerializerProtocol
    #: Returns the rows of the checkpoint at a place as this process has read them, if it remembers them.
    rows_read: Callable[[str, str, str], Tables | None]
    at: Place
    config: RunnableConfig
    checkpoint: Checkpoint
    metadata: CheckpointMetadata
    new_versions: ChannelVersions

    def __call__(self, carry_bytes: int) -> Put:
        """Return the rows. `carry_bytes`: see `put_of`."""
        thread_id, ns, parent = self.at
        read = self.rows_read(thread_id, ns, parent) if carry_bytes and parent is not None else None
        return put_of(
            self.serde,
            self.at,
            self.config,
            self.checkpoint,
            self.metadata,
            self.new_versions,
            carry_bytes=carry_bytes,
            read=read,
        )


def writes_of(
    serde: SerializerProtocol,
    at: Place,
    writes: Sequence[tuple[str, Any]],
    task_id: str,
    task_path: str,
) -> Writes:
    """Return the rows of what a task has written on top of the checkpoint at this place. Raises like `put_of`."""
    thread_id, ns, checkpoint_id = at
    if checkpoint_id is None:
        raise InvalidId("writes need the id of a checkpoint")
    # A member of an enum of str stands for its text, as in LangGraph's own saver.
    channels = [str.__str__(channel) if isinstance(channel, str) else channel for channel, _ in writes]
    rows = []
    for i, (channel, (_, value)) in enumerate(zip(channels, writes, strict=True)):
        type_, blob = _dumped(serde, value)
        index = WRITES_IDX_MAP.get(channel, i)
        rows.append(WriteRow(ns, checkpoint_id, task_id, index, channel, type_, blob, task_path))
    types = [row.type for row in rows]
    if not _surely_fit([thread_id, ns, checkpoint_id, task_id, task_path, *channels, *types]):
        _check_key(thread_id, ns, checkpoint_id, task_id)
        for text in (*channels, task_path, *types):
            _check_text(text)
    return Writes(rows, WRITES_IDX_MAP.keys() >= set(channels))


def _as_stored(value: float) -> float:
    """Return what a jsonb gives back, so that a flush changes nothing: an int from 1e16 on, and 0.0 for -0.0."""
    return int(Decimal(float.__repr__(value))) if 1e16 <= abs(value) < math.inf else value + 0.0


def _dumped(serde: SerializerProtocol, value: Any) -> tuple[str, bytes]:
    type_, blob = serde.dumps_typed(value)
    return type_, bytes(blob)  # LangGraph's serializer passes a bytearray on, and the caller may change it


def tuple_of(
    serde: SerializerProtocol, next_version: Any, thread_id: str, tables: Tables, row: CheckpointRow
) -> CheckpointTuple:
    """Return what LangGraph reads: the checkpoint of a row, with the values and writes that `tables` has for it.

    `next_version`: the saver's `get_next_version`.
    """
    checkpoint = json.loads(row.checkpoint)
    versions: dict[str, Any] = checkpoint.get("channel_versions") or {}
    values: dict[str, Any] = dict(checkpoint.get("channel_values") or {})
    for channel, version in versions.items():
        blob = tables.blobs.get((row.ns, channel, str(version)))
        if blob is not None and blob.type != "empty":
            values[channel] = serde.loads_typed((blob.type, blob.blob or b""))
    if takes_sends(row) and row.parent is not None:
        sends = [w for w in tables.writes_of(row.ns, row.parent) if w.channel == TASKS]
        if sends:
            values[TASKS] = [serde.loads_typed((w.type, w.blob)) for w in sends]
            sent = max(versions.values()) if versions else next_version(None, None)
            checkpoint["channel_versions"] = {**versions, TASKS: sent}
    return CheckpointTuple(
        config_of(thread_id, row.ns, row.id),
        {**checkpoint, "channel_values": values},  # type: ignore[typeddict-item]
        json.loads(row.metadata),
        config_of(thread_id, row.ns, row.parent) if row.parent else None,
        [(w.task_id, w.channel, serde.loads_typed((w.type, w.blob))) for w in tables.writes_of(row.ns, row.id)],
    )


def history_of(serde: SerializerProtocol, walk: Walk, channel: str) -> DeltaChannelHistory:
    """Return what a walk has found of a channel, as LangGraph reads it: the writes, oldest first, and their base."""
    writes = [(w.task_id, w.channel, serde.loads_typed((w.type, w.blob))) for w in reversed(walk.writes[channel])]
    blob = walk.blobs.get(channel)
    if blob is not None:
        return {"writes": writes, "seed": serde.loads_typed((blob.type, blob.blob or b""))}
    return {"writes": writes, "seed": walk.inline[channel]} if channel in walk.inline else {"writes": writes}


def config_of(thread_id: str, ns: str, checkpoint_id: str) -> RunnableConfig:
    """Return the config that names a checkpoint."""
    return {"configurable": {"thread_id": thread_id, "checkpoint_ns": ns, "checkpoint_id": checkpoint_id}}


def _encoder() -> Callable[[Any], str]:
    """Return a function like `_JSON.encode` that uses one encoder in C for all texts, not a new one for each."""
    make: Any = getattr(json.encoder, "c_make_encoder", None)
    try:
        encode = make(None, _JSON.default, json.encoder.encode_basestring, None, ":", ",", False, False, False)
    except TypeError:  # this Python has no such encoder, or another one
        return _JSON.encode
    return lambda value: "".join(encode(value, 0))


_encode = _encoder()


def json_of(value: Any, what: str) -> bytes:
    """Return the value as JSON that a jsonb column takes. Raises InvalidRecord, which names it as `what`."""
    try:
        text = _encode(value).encode()
    except UnicodeEncodeError:
        raise InvalidRecord(f"{what} has a lone surrogate, which Postgres cannot hold") from None
    except (TypeError, ValueError, RecursionError) as e:
        raise InvalidRecord(f"{what} cannot be written as JSON: {e}") from e
    if holds_nul(text):
        raise InvalidRecord(f"{what} has a NUL character, which Postgres cannot hold")
    if text.count(b"[") + text.count(b"{") > _DEPTH_MAX and _is_too_deep(value):
        raise InvalidRecord(f"{what} is nested deeper than {_DEPTH_MAX}")
    return text


def _row_json(row: Any, what: str, parts: Mapping[str, Any], part: str) -> bytes:
    """Return `json_of(row, what)`. An error names the one of these parts of it that is to blame, if one is."""
    with suppress(InvalidRecord):
        return json_of(row, what)
    for name, value in parts.items():
        json_of(value, f"{part} {name!r}")
    return json_of(row, what)


def _is_too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_DEPTH_MAX + 1):
        level = [each for each in level if isinstance(each, dict | list | tuple)]
        if not level:
            return False
        level = [each for held in level for each in (held.values() if isinstance(held, dict) else held)]
    return True


def _surely_fit(texts: Sequence[str]) -> bool:
    """Whether these texts surely fit into one key together. They almost always do; then none is checked alone."""
    if not _STR.issuperset(map(type, texts)):
        return False
    text = "".join(texts)
    return len(text) <= _KEY_BYTES and text.isascii() and "\0" not in text


def _check_key(*parts: str, beside: int = 0) -> int:
    """Return how many bytes these parts of a row's key have, plus `beside`.

    Raises InvalidId for a key that Postgres would refuse.
    """
    size = beside
    for part in parts:
        _check_text(part)
        size += len(part) if part.isascii() else len(part.encode())
    if size > _KEY_BYTES:
        raise InvalidId(
            f"the key of a row (thread id, namespace and so on) has {size} bytes; the limit is {_KEY_BYTES}"
        )
    return size


def _check_text(text: str) -> None:
    if type(text) is not str:
        raise InvalidId(f"each id and name in a checkpoint row must be a str, not {type(text).__name__}")
    if "\0" in text:
        raise InvalidId(f"{text!r} has a NUL character")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidId(f"{text!r} has a lone surrogate") from None
