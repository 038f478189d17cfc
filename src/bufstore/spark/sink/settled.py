"""Which rows of a batch are written, when it ended with bad rows: somebody corrects these, and it comes again changed.

A row's number in the store is its batch and its place among its thread's rows (docs/adr/0014). Places shift when rows
in front of it are taken away at the source, and then a new row would be taken for a repeat. So a batch that comes again
after it ended with bad rows is compared row by row: what is written is left out, and what is new gets the next places.
"""

from __future__ import annotations

import zlib
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec

from bufstore.errors import ConfigError

#: Columns beside those of a checkpoint: sums over the thread's id and over the row.
THREAD, ROW = "bufstore_thread", "bufstore_row"

#: Where no position is given.
NO_POSITION = -(1 << 63)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class RowKey(NamedTuple):
    """What tells a row from others, in three numbers."""

    thread: int
    row: int
    position: int


def key_of(row: Mapping[str, Any]) -> RowKey:
    """Of a row with the columns THREAD and ROW."""
    return RowKey(row[THREAD], row[ROW], position_of(row))


def position_of(row: Mapping[str, Any]) -> int:
    """The row's position as a number; of a time, microseconds since 1970."""
    found = row.get("position")
    if found is None:
        return NO_POSITION
    if isinstance(found, datetime):
        moment = found if found.tzinfo is not None else found.replace(tzinfo=UTC)
        return (moment - _EPOCH) // timedelta(microseconds=1)
    return int(found)


def summed(row: Mapping[str, Any]) -> dict[str, int]:
    """The columns THREAD and ROW, where Spark does not compute them."""
    return {THREAD: _sum(row.get("thread_id")), ROW: _sum(row)}


def _sum(value: Any) -> int:
    return int.from_bytes(blake2b(msgspec.json.encode(value), digest_size=8).digest(), signed=True)


def pack(rows: Iterable[RowKey]) -> bytes:
    return zlib.compress(array("q", (number for row in rows for number in row)).tobytes(), 1)


def unpack(packed: bytes) -> list[RowKey]:
    numbers = array("q")
    numbers.frombytes(zlib.decompress(packed))
    return [RowKey(*numbers[at : at + 3]) for at in range(0, len(numbers), 3)]


def settled_after(before: Iterable[RowKey], present: Iterable[RowKey], left: Iterable[RowKey]) -> list[RowKey]:
    """What is written after a try: what was `before`, and what was `present` without what was `left`."""
    written = Counter(present)
    written.subtract(left)
    return list((Counter(before) | +written).elements())


class SettledThread:
    """The written rows of one thread, while its present rows go by in order."""

    def __init__(self, rows: Iterable[RowKey]) -> None:
        found = list(rows)
        self._left = Counter(row.row for row in found)
        self._last = max((row.position for row in found), default=NO_POSITION)
        #: The place of the next row that is new.
        self.next_rank = len(found)
        self._new = False

    def holds(self, key: RowKey) -> bool:
        """Whether the row is written. Raises ConfigError for a row that cannot be new, and is not what was written."""
        if self._left[key.row] > 0:
            if self._new:
                raise self._changed(key, "has come before one that is written")
            self._left[key.row] -= 1
            return True
        if not self._new and self._left.total() and (key.position == NO_POSITION or key.position <= self._last):
            raise self._changed(key, "is not as it was written")
        self._new = True
        return False

    @staticmethod
    def _changed(key: RowKey, what: str) -> ConfigError:
        where = f" at position {key.position}" if key.position != NO_POSITION else ""
        return ConfigError(
            f"a row{where} {what}. The batch has ended with bad rows before: correct those, and leave the rows in "
            "front of them in their threads as they are, or take them away"
        )


class Settled:
    """The written rows of a batch."""

    def __init__(self, rows: Iterable[RowKey] = ()) -> None:
        self._threads: dict[int, list[RowKey]] = {}
        for row in rows:
            self._threads.setdefault(row.thread, []).append(row)

    def __bool__(self) -> bool:
        return bool(self._threads)

    def of(self, thread: int) -> SettledThread | None:
        """Of a thread, by the sum over its id; None when nothing of it is written."""
        found = self._threads.get(thread)
        return SettledThread(found) if found is not None else None

    def check(self, present: Iterable[RowKey]) -> None:
        """Raise ConfigError for a row that cannot be new, and is not what was written. `present`: threads in order."""
        threads = {thread: SettledThread(rows) for thread, rows in self._threads.items()}
        for key in present:
            if key.thread in threads:
                threads[key.thread].holds(key)
