"""Entries that are too large for one message: their parts are stored first, and the group only names them.

The parts have a subject of their own, without an expectation: they count for nothing until a group names them.
A part stays in the log as long as a group that names it. A part whose group never came is purged with everything
around it, once a group follows it (`bufstore.buffer.groups.purging`). Until its group is stored, a part stays
only because it is younger than what is purged.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from bufstore.errors import MalformedEntry
from bufstore.jetstream.messages import Outgoing, StoredMessage

#: The size and the checksum of the whole payload; the sequence of each part follows.
_WHOLE = struct.Struct(">QI")
_SEQ = struct.Struct(">Q")


def parts_of(subject: str, payload: bytes, bytes_max: int) -> list[Outgoing]:
    """The messages that hold the payload, in order."""
    return [Outgoing(subject, payload[i : i + bytes_max]) for i in range(0, len(payload), bytes_max)]


def reference(payload: bytes, seqs: Sequence[int]) -> bytes:
    """What the group holds instead of the payload, whose parts have these sequences."""
    return _WHOLE.pack(len(payload), zlib.crc32(payload)) + b"".join(map(_SEQ.pack, seqs))


def reference_bytes(size: int, bytes_max: int) -> int:
    """How many bytes the reference to a payload of this size has, if its parts have `bytes_max` bytes."""
    return _WHOLE.size + -(-size // bytes_max) * _SEQ.size


def payload_max(reference_max: int, bytes_max: int) -> int:
    """How many bytes a payload may have whose reference may have so many, if its parts have `bytes_max` bytes."""
    return max(0, reference_max - _WHOLE.size) // _SEQ.size * bytes_max


class Reference(NamedTuple):
    """What a reference says."""

    #: The size and the checksum of the whole payload.
    size: int
    checksum: int
    #: The sequences of its parts, in order.
    parts: list[int]


def parsed(reference_: bytes) -> Reference:
    """Read a reference. Raises MalformedEntry."""
    try:
        size, checksum = _WHOLE.unpack_from(reference_)
        parts = [seq for (seq,) in _SEQ.iter_unpack(reference_[_WHOLE.size :])]
    except struct.error as e:
        raise MalformedEntry("undecodable reference to the parts of a large entry") from e
    if any(seq >> 63 for seq in parts):
        raise MalformedEntry("a number out of range")
    return Reference(size, checksum, parts)


def whole(reference_: bytes, parts: Sequence[bytes]) -> bytes:
    """Join the parts to the payload that a reference names. Raises MalformedEntry if they are not what was stored."""
    wanted, payload = parsed(reference_), b"".join(parts)
    if len(payload) != wanted.size or zlib.crc32(payload) != wanted.checksum:
        raise MalformedEntry("the parts of a large entry are not what was stored")
    return payload


async def joined(reference_: bytes, read: Callable[[int], Awaitable[StoredMessage | None]]) -> bytes:
    """Read the payload that a reference names. Raises MalformedEntry if a part is missing or not what was stored."""
    parts = []
    for seq in parsed(reference_).parts:
        part = await read(seq)
        if part is None:
            raise MalformedEntry(f"part {seq} of a large entry is missing")
        parts.append(part.body)
    return whole(reference_, parts)


def in_front_of(
    group: int, read: Callable[[int], Awaitable[StoredMessage | None]]
) -> Callable[[int], Awaitable[StoredMessage | None]]:
    """Return a `read` for `joined` that asks for no part behind the group at this sequence: there never was one."""

    async def part(seq: int) -> StoredMessage | None:
        return await read(seq) if 0 < seq < group else None

    return part
