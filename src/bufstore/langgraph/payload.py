"""What an entry of this domain carries: one operation, with the rows exactly as Postgres gets them.

A release that does not know a kind cannot apply it: it quarantines the entry, and what follows in the thread.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Sequence
from itertools import chain
from typing import Any

import msgspec

from bufstore.langgraph.model import (
    BlobKey,
    BlobRow,
    CheckpointRow,
    Delete,
    Drop,
    Operation,
    Put,
    Rows,
    WriteRow,
    Writes,
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Operation] = msgspec.msgpack.Decoder(Operation)


class _Run(msgspec.Struct, gc=False):
    """What the metadata of a checkpoint say about the run that saved it."""

    run_id: str | None = None


_run_id = msgspec.json.Decoder(_Run).decode
_skim = msgspec.json.Decoder(msgspec.Raw).decode
#: An escaped NUL, which stands behind an even number of backslashes. A jsonb cannot hold it.
_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")
_INT4 = 1 << 31


def encode_payload(operation: Operation) -> bytes:
    return _encoder.encode(operation)


def decode_payload(data: bytes) -> Operation:
    """Return the operation. Raises ValueError, and nothing else, for bytes that hold none, or one no table can hold."""
    try:
        operation = _decoder.decode(data)
        _check(operation)
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError) as e:
        raise ValueError(f"undecodable payload: {type(e).__name__}") from e
    return operation


def kind_of(operation: Operation) -> str:
    """Return the name of the kind of an operation."""
    return str(type(operation).__struct_config__.tag)


def shown(operation: Operation) -> dict[str, Any]:
    """Return what an operation does, for people and as JSON can hold it, without the serialized values.

    Raises ValueError for JSON that Python cannot hold.
    """
    content: dict[str, Any] = {"kind": kind_of(operation)}
    match operation:
        case Put(row, blobs, _):
            content |= {"checkpoints": [_checkpoint(row)], "channels": [_channel(b.key) for b in blobs]}
        case Writes(rows, upsert):
            content |= {"writes": [_write(row) for row in rows], "upsert": upsert}
        case Rows(checkpoints, blobs, writes):
            content |= {
                "checkpoints": [_checkpoint(row) for row in checkpoints],
                "channels": [_channel(b.key) for b in blobs],
                "writes": [_write(row) for row in writes],
            }
        case Drop(keys, namespaces, dropped):
            content |= {
                "checkpoints": [{"namespace": ns, "checkpoint_id": id_} for ns, id_ in keys],
                "namespaces": list(namespaces),
                "channels": [_channel(key) for key in dropped],
            }
        case Delete():
            pass
    return content


def _checkpoint(row: CheckpointRow) -> dict[str, Any]:
    return {
        "namespace": row.ns,
        "checkpoint_id": row.id,
        "parent_checkpoint_id": row.parent,
        "checkpoint": msgspec.json.decode(row.checkpoint),
        "metadata": msgspec.json.decode(row.metadata),
    }


def _channel(key: BlobKey) -> dict[str, str]:
    ns, channel, version = key
    return {"namespace": ns, "channel": channel, "version": version}


def _write(row: WriteRow) -> dict[str, Any]:
    return {
        "namespace": row.ns,
        "checkpoint_id": row.checkpoint_id,
        "task_id": row.task_id,
        "idx": row.idx,
        "channel": row.channel,
    }


def saves_of(data: bytes, run_ids: Container[str]) -> bool:
    """Whether a payload has a checkpoint that one of these runs has saved. False if it cannot be decoded."""
    try:
        operation = decode_payload(data)
    except ValueError:
        return False
    match operation:
        case Put(row, _, _):
            rows: Sequence[CheckpointRow] = [row]
        case Rows(rows, _, _):
            pass
        case _:
            return False
    return any(_run_of(row.metadata) in run_ids for row in rows)


def _run_of(metadata: bytes) -> str | None:
    """Return the run that has saved a checkpoint; None: its metadata do not say."""
    try:
        return _run_id(metadata).run_id
    except msgspec.MsgspecError:
        return None


def holds_nul(json: bytes) -> bool:
    """Whether JSON text holds a NUL, which Postgres refuses."""
    return b"\\u0000" in json and _NUL.search(json) is not None


def _check(operation: Operation) -> None:
    """Raise ValueError for what Postgres would refuse: found here, the entry to blame is known at once."""
    match operation:
        case Put(checkpoint, blobs, _):
            _check_rows([checkpoint], blobs, ())
        case Writes(rows, _):
            _check_rows((), (), rows)
        case Rows(checkpoints, blobs, writes):
            _check_rows(checkpoints, blobs, writes)
        case Drop(checkpoints, namespaces, keys):
            _check_texts([*chain.from_iterable(checkpoints), *namespaces, *chain.from_iterable(keys)])
        case Delete():
            pass


def _check_rows(checkpoints: Sequence[CheckpointRow], blobs: Sequence[BlobRow], writes: Sequence[WriteRow]) -> None:
    texts: list[str] = []
    for row in checkpoints:
        texts += (row.ns, row.id, row.parent or "")
        for json in (row.checkpoint, row.metadata):
            _skim(json)
            if holds_nul(json):
                raise ValueError("a NUL in JSON")
    for blob in blobs:
        texts += (blob.ns, blob.channel, blob.version, blob.type)
    for write in writes:
        texts += (write.ns, write.checkpoint_id, write.task_id, write.channel, write.type, write.task_path)
        if not -_INT4 <= write.idx < _INT4:
            raise ValueError("an index that is no int4")
    _check_texts(texts)


def _check_texts(texts: Iterable[str]) -> None:
    if "\0" in "".join(texts):
        raise ValueError("a NUL in a text")
