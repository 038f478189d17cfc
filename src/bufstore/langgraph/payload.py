"""What an entry of this domain carries: one operation, with the rows exactly as Postgres gets them.

A release that does not know a kind cannot apply it: it quarantines the entry, and what follows in the thread.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from bufstore.langgraph.model import CheckpointRow, Delete, Drop, Operation, Put, Rows, Writes

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Operation] = msgspec.msgpack.Decoder(Operation)
_skim = msgspec.json.Decoder(msgspec.Raw).decode
#: An escaped NUL: behind an even number of backslashes. A jsonb cannot hold it.
_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")
_INT4 = 1 << 31


def encode_payload(operation: Operation) -> bytes:
    return _encoder.encode(operation)


def decode_payload(data: bytes) -> Operation:
    """The operation of bytes. Raises ValueError, and nothing else, for what is none or what no table could hold."""
    try:
        operation = _decoder.decode(data)
        _check(operation)
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError, MemoryError) as e:
        raise ValueError(f"undecodable payload: {type(e).__name__}") from e
    return operation


def holds_nul(json: bytes) -> bool:
    """Whether JSON text holds a NUL, which Postgres refuses."""
    return b"\\u0000" in json and _NUL.search(json) is not None


def _check(operation: Operation) -> None:
    """Raise ValueError for what Postgres would refuse: found here, the fault is one entry's at once."""
    for text in _texts(operation):
        if text is not None and "\0" in text:
            raise ValueError("a NUL in a text")
    writes = (
        operation.rows if isinstance(operation, Writes) else operation.writes if isinstance(operation, Rows) else ()
    )
    if any(not -_INT4 <= write.idx < _INT4 for write in writes):
        raise ValueError("an index that is no int4")
    for row in _checkpoints(operation):
        for json in (row.checkpoint, row.metadata):
            _skim(json)
            if holds_nul(json):
                raise ValueError("a NUL in JSON")


def _checkpoints(operation: Operation) -> Iterator[CheckpointRow]:
    if isinstance(operation, Put):
        yield operation.checkpoint
    elif isinstance(operation, Rows):
        yield from operation.checkpoints


def _texts(operation: Operation) -> Iterator[str | None]:
    for row in _checkpoints(operation):
        yield from (row.ns, row.id, row.parent)
    match operation:
        case Put(_, blobs, _) | Rows(_, blobs, _):
            for blob in blobs:
                yield from (*blob.key, blob.type)
        case Drop(checkpoints, namespaces, keys):
            for key in (*checkpoints, *keys):
                yield from key
            yield from namespaces
        case Delete() | Writes():
            pass
    writes = (
        operation.rows if isinstance(operation, Writes) else operation.writes if isinstance(operation, Rows) else ()
    )
    for write in writes:
        yield from (write.ns, write.checkpoint_id, *write.order[:2], write.channel, write.type)
