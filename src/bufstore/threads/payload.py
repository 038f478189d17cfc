"""What an entry of this domain carries: a checkpoint, an edit, or a removal.

A checkpoint is written as a delta: how many messages of its predecessor stay, and what comes after them. So the
bytes in the log do not grow with the thread. Messages and run travel as the bytes they were encoded to: a flush
moves them into the store without looking inside.

A release that does not know a kind cannot apply it: it quarantines the entry (and what builds on it) and goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import msgspec

from bufstore.errors import InvalidId
from bufstore.threads.model import RunSave, decode_metadata, decode_run
from bufstore.types import check_id


class Payload(msgspec.Struct, frozen=True, array_like=True, gc=False, tag_field="kind", tag="checkpoint"):
    """One checkpoint. New fields are appended with defaults, new kinds get tags of their own."""

    #: How many messages of the predecessor stay.
    keep: int
    #: The messages that follow those, each encoded.
    messages: Sequence[bytes]
    #: The run, encoded, and the part of it that the thread's row depends on.
    run: bytes
    save: RunSave


class Edit(msgspec.Struct, frozen=True, array_like=True, tag_field="kind", tag="edit"):
    """Any change of one thread other than a checkpoint. New fields are appended with defaults."""

    keep: int
    messages: Sequence[bytes] = ()
    #: A run saved on its own (the thread's row does not change with it), and its id.
    run: bytes | None = None
    run_id: str | None = None
    #: The new metadata and state, encoded; None: unchanged.
    metadata: bytes | None = None
    state: bytes | None = None
    #: The new parent, or no parent, in a tuple; None: unchanged.
    parent: tuple[str | None] | None = None


class Removal(msgspec.Struct, frozen=True, array_like=True, tag_field="kind", tag="removal"):
    """The thread is deleted, with its messages, runs, metadata and state."""

    keep: int = 0
    messages: Sequence[bytes] = ()


AnyPayload = Payload | Edit | Removal

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyPayload)
#: Skips to the end of a value without building it.
_skim = msgspec.msgpack.Decoder(msgspec.Raw).decode


def encode_payload(payload: AnyPayload) -> bytes:
    return _encoder.encode(payload)


def decode_payload(data: bytes) -> AnyPayload:
    """Decode a payload. Raises ValueError, and nothing else, for bytes that are not a payload.

    A MemoryError says nothing about the bytes: msgspec takes no memory for what is not there.
    """
    try:
        payload: AnyPayload = _decoder.decode(data)
        _check_parts(payload)
    except InvalidId as e:
        raise ValueError(f"undecodable payload: {e}") from e
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError) as e:
        raise ValueError(f"undecodable payload: {type(e).__name__}") from e
    if payload.keep < 0:
        raise ValueError("negative keep")
    if (payload.keep + len(payload.messages)) >> 63:
        raise ValueError("keep out of range")
    if isinstance(payload, Edit) and (payload.run is None) is not (payload.run_id is None):
        raise ValueError("a run without its id, or an id without its run")
    if isinstance(payload, Removal) and (payload.keep or payload.messages):
        raise ValueError("a removal that keeps messages")
    return payload


def _check_parts(payload: AnyPayload) -> None:
    """Raise InvalidId, or an error of msgspec, for content that no store could take or no reader could read.

    A fault that is found here has one entry to blame. The store could only refuse a whole batch, and would have to be
    tried again and again to find the entry.
    """
    for message in payload.messages:
        _skim(message)
    if isinstance(payload, Removal):
        return
    if payload.run is not None:
        decode_run(payload.run)
    if isinstance(payload, Payload):
        ids: tuple[str | None, ...] = (payload.save.run_id, payload.save.parent_thread_id)
    else:
        ids = (payload.run_id, *(payload.parent or ()))
        if payload.metadata is not None:
            decode_metadata(payload.metadata)
        if payload.state is not None:
            _skim(payload.state)
    for id_ in ids:
        if id_ is not None:
            check_id(id_, "an id")


def content_hash(kind: str, messages: Sequence[bytes], run: bytes) -> bytes:
    """The hash of what a call with an idempotency key stands for: the kind of call, the messages and the run."""
    digest = blake2b(kind.encode(), digest_size=16)
    for part in (*messages, run):
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.digest()
