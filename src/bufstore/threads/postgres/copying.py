"""Messages as the bytes that COPY takes: PostgreSQL's binary format (its manual, on COPY)."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

from psycopg import AsyncConnection

from bufstore.threads.model import ThreadChange
from bufstore.threads.postgres.columns import id_hash

#: From this many messages on, COPY saves more than its two round trips cost.
COPY_FROM = 200
#: About how many bytes are handed over at once.
_BLOCK_BYTES = 1 << 20

_BEGIN = b"PGCOPY\n\xff\r\n\0" + bytes(8)  # no flags, no extension
_END = struct.pack("!h", -1)
_FIRST = struct.Struct("!hi").pack  # number of columns, size of the first
_SEQ = struct.Struct("!iii").pack  # size and value, size of the payload
_HASH = struct.Struct("!iq").pack
_NO_HASH = struct.pack("!i", -1)


def copied(changes: Iterable[ThreadChange]) -> Iterator[bytes]:
    """The messages of `changes`, for ``copy_messages``. Raises what
    `bufstore.postgres.connection.arrays.unstorable` maps.
    """
    parts, size = [_BEGIN], 0
    for change in changes:
        thread_id = change.thread_id.encode()
        first = _FIRST(4, len(thread_id)) + thread_id
        for seq, payload in enumerate(change.messages, change.keep):
            hashed = id_hash(payload)
            parts += (first, _SEQ(4, seq, len(payload)), payload, _NO_HASH if hashed is None else _HASH(8, hashed))
            size += len(first) + len(payload)
            if size >= _BLOCK_BYTES:
                yield b"".join(parts)
                parts, size = [], 0
    parts.append(_END)
    yield b"".join(parts)


async def copy(connection: AsyncConnection, statement: str, blocks: Iterable[bytes]) -> None:
    async with connection.cursor() as cursor, cursor.copy(statement) as writing:
        for block in blocks:
            await writing.write(block)
