"""Passes columns as parameters: binary arrays, framed once.

psycopg's own arrays look at each value twice and quote text.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, LiteralString

import msgspec
from psycopg import AsyncConnection, AsyncRawCursor
from psycopg.adapt import Dumper
from psycopg.errors import InvalidBinaryRepresentation
from psycopg.pq import ExecStatus, Format
from psycopg.rows import tuple_row

#: About how many bytes one statement takes at most: Postgres holds several copies of them in memory.
STATEMENT_BYTES = 16 << 20

_LENGTH = struct.Struct("!i").pack
_INT8 = struct.Struct("!q").pack
_HEADER = struct.Struct("!iiIii").pack  # dimensions, has nulls, element type, length, lower bound
_NULL = _LENGTH(-1)
#: What a number takes, and a text or a blob at most beside its own bytes.
_VALUE_BYTES = 12


@contextmanager
def unstorable() -> Iterator[None]:
    """Raise Postgres' error for data that it cannot read, for values of which no columns can be made.

    No writer of ours makes such an entry. A foreign entry is at fault itself, not the store.
    """
    try:
        yield
    except (msgspec.MsgspecError, struct.error, UnicodeError, OverflowError, RecursionError) as e:
        raise InvalidBinaryRepresentation(f"{type(e).__name__} in a message or run") from e


class Array:
    """A Postgres array in its binary form."""

    # No subclass of bytes: making one of bytes copies them, and a batch has many.
    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data


class _ArrayDumper(Dumper):
    format = Format.BINARY  # its type is the one that the statement casts the parameter to

    def dump(self, obj: Array) -> bytes:
        return obj.data


async def rows_of(
    connection: AsyncConnection[Any], statement: LiteralString, parameters: Sequence[Any]
) -> list[tuple[Any, ...]]:
    """Return all rows of one of our statements."""
    cursor = ArrayCursor(connection)
    await cursor.execute(statement, parameters, binary=True)
    return await cursor.rows()


class ArrayCursor(AsyncRawCursor[tuple[Any, ...]]):
    """A cursor for our ``.sql`` files: ``$1`` placeholders, and arrays among the parameters."""

    def __init__(self, connection: AsyncConnection[Any]) -> None:
        # Whatever the connection's rows are by default: an app's `apply` may have chosen others for its own.
        super().__init__(connection, row_factory=tuple_row)
        # Registered here and not on the connection, which may be the caller's.
        self.adapters.register_dumper(Array, _ArrayDumper)

    async def rows(self) -> list[tuple[Any, ...]]:
        """Return all rows; none for a statement without a result."""
        result = self.pgresult
        # Not `description`, which makes an object for each column.
        return await self.fetchall() if result is not None and result.status == ExecStatus.TUPLES_OK else []


def chunks(rows: Iterable[tuple[Any, ...]], size_of: Callable[[Any], int]) -> Iterator[list[tuple[Any, ...]]]:
    """Yield the columns for each statement, of at most STATEMENT_BYTES or one row.

    `size_of`: how many bytes a row's texts and blobs have (`row_bytes`); a thread's id is in each of its rows.
    """
    chunk: list[tuple[Any, ...]] = []
    size = 0
    for row in rows:
        bytes_ = size_of(row) + _VALUE_BYTES * len(row)
        if chunk and size + bytes_ > STATEMENT_BYTES:
            yield list(zip(*chunk, strict=True))
            chunk, size = [], 0
        chunk.append(row)
        size += bytes_
    if chunk:
        yield list(zip(*chunk, strict=True))


def row_bytes(row: Iterable[Any]) -> int:
    """Return how many bytes the row's texts (about) and blobs have."""
    return sum(len(value) for value in row if isinstance(value, (str, bytes)))


def texts(values: Iterable[str | None]) -> Array:
    """Return a ``text[]``."""
    return _array(25, [None if v is None else v.encode() for v in values])


def ints(values: Iterable[int]) -> Array:
    """Return an ``int[]``."""
    return _array(23, [_LENGTH(v) for v in values])


def longs(values: Iterable[int | None]) -> Array:
    """Return a ``bigint[]``."""
    return _array(20, [None if v is None else _INT8(v) for v in values])


def blobs(values: Sequence[bytes | None]) -> Array:
    """Return a ``bytea[]``."""
    return _array(17, values)


def _array(element_type: int, values: Sequence[bytes | None]) -> Array:
    if not values:
        return Array(struct.pack("!iiI", 0, 0, element_type))
    parts: list[bytes] = [_HEADER(1, None in values, element_type, len(values), 1)]
    for value in values:
        if value is None:
            parts.append(_NULL)
        else:
            parts.append(_LENGTH(len(value)))
            parts.append(value)
    return Array(b"".join(parts))
