"""What an entry of this domain carries: a checkpoint as a change of the message list, and a run.

A checkpoint is written as a delta: how many messages of its predecessor stay, and what comes after them. So the
bytes in the log do not grow with the thread. Messages and run travel as the bytes they were encoded to: a flush
moves them into the store without looking inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import msgspec

from bufstore.threads.model import RunSave


class Payload(msgspec.Struct, frozen=True, array_like=True, tag_field="kind", tag="checkpoint"):
    """One checkpoint. New fields are appended with defaults, new kinds get tags of their own."""

    #: This many messages of the predecessor stay.
    keep: int
    #: What follows them, each encoded.
    messages: Sequence[bytes]
    #: The run, encoded, and the part of it that the thread's row depends on.
    run: bytes
    save: RunSave


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Payload)


def encode_payload(payload: Payload) -> bytes:
    """The payload as bytes."""
    return _encoder.encode(payload)


def decode_payload(data: bytes) -> Payload:
    """The payload of bytes. Raises ValueError, and nothing else, for what is none."""
    try:
        payload = _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError, MemoryError) as e:
        raise ValueError(f"undecodable payload: {type(e).__name__}") from e
    if payload.keep < 0:
        raise ValueError("negative keep")
    return payload


def content_hash(kind: str, messages: Sequence[bytes], run: bytes) -> bytes:
    """What a call with an idempotency key stands for: the same for the same kind of call, messages and run."""
    digest = blake2b(kind.encode(), digest_size=16)
    for part in (*messages, run):
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.digest()
