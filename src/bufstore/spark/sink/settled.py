"""Which rows of a batch that ended with bad rows are written: once these are corrected, the batch comes again changed.

A row's number in the store is its batch and its place among its thread's rows (docs/adr/0014). When somebody takes rows
away at the source, the places behind them shift, and a new row would be taken for a repeat. So a batch that comes again
after it ended with bad rows is compared row by row: written rows are left out, and new rows get the next places.
"""

from __future__ import annotations

import zlib
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec

from bufstore.errors import ConfigError
from bufstore.unix_time import us_of

#: Two columns beside those of a checkpoint: a sum over the thread's id, and a sum over the row.
THREAD, ROW = "bufstore_thread", "bufstore_row"

#: The position of a row that gives none.
NO_POSITION = -(1 << 63)


class RowKey(NamedTuple):
    """Three numbers that tell a row from others."""

    thread: int
    row: int
    position: int


def key_of(row: Mapping[str, Any]) -> RowKey:
    """Return the key of a row that has the columns THREAD and ROW."""
    return RowKey(row[THREAD], row[ROW], position_of(row))


def position_of(row: Mapping[str, Any]) -> int:
    """Return the row's position as a number; a time becomes microseconds since 1970."""
    found = row.get("position")
    if found is None:
        return NO_POSITION
    if isinstance(found, datetime):
        return us_of(found if found.tzinfo is not None else found.replace(tzinfo=UTC))
    return int(found)


def summed(row: Mapping[str, Any]) -> dict[str, int]:
    """Return the columns THREAD and ROW of a row for which Spark does not compute them."""
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
    """Return the rows that are written after a try: those `before`, and those `present` without those `left`."""
    written = Counter(present)
    written.subtract(left)
    return list((Counter(before) | +written).elements())


class SettledThread:
    """The written rows of one thread, to which its present rows are compared in order."""

    def __init__(self, rows: Iterable[RowKey]) -> None:
        found = list(rows)
        self._left = Counter(row.row for row in found)
        self._last = max((row.position for row in found), default=NO_POSITION)
        #: The place that the first new row gets.
        self.next_rank = len(found)
        self._new = False

    def holds(self, key: RowKey) -> bool:
        """Return whether the row is written. Raises ConfigError if it is changed, or written but behind a new row."""
        if self._left[key.row] > 0:
            if self._new:
                raise self._changed(key, "is written, but a new row now comes before it")
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
        """Return the written rows of the thread whose id has this sum; None when there are none."""
        found = self._threads.get(thread)
        return SettledThread(found) if found is not None else None

    def check(self, present: Iterable[RowKey]) -> None:
        """Raise ConfigError as `SettledThread.holds` does. `present`: the rows, each thread's in order."""
        threads = {thread: SettledThread(rows) for thread, rows in self._threads.items()}
        for key in present:
            if key.thread in threads:
                threads[key.thread].holds(key)
