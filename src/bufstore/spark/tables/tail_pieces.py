"""Divides a task's entries of the tail into pieces that fit into memory; entries that do not fit go into a file.

A group holds entries of many threads, so a task reads the whole tail. It reads the tail once, puts each entry beside
those of the same thread, and afterwards has one piece in memory at a time (docs/adr/0047).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain
from types import TracebackType
from typing import IO, Self

import msgspec

from bufstore.buffer.groups.oversize import parsed
from bufstore.errors import MalformedEntry
from bufstore.spark.local_files import local_file
from bufstore.spark.tables.shares import Share

#: About how many bytes an entry takes beside its texts and its payload.
_ENTRY_BYTES = 300


class TailEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An entry as it stands in a group."""

    thread_id: str
    seq: int
    partition: int
    stored_at_ns: int
    header: str | None
    payload: bytes
    #: Whether the payload only says where its parts stand.
    elsewhere: bool


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[TailEntry])


def pack(entries: Sequence[TailEntry]) -> bytes:
    return _encoder.encode(entries)


def unpack(packed: bytes) -> list[TailEntry]:
    return _decoder.decode(packed)


def size_of(entry: TailEntry) -> int:
    """Return about how many bytes of memory the entry takes, with all of its payload."""
    size = len(entry.payload)
    if entry.elsewhere:
        with suppress(MalformedEntry):
            size = parsed(entry.payload).size
    return _ENTRY_BYTES + len(entry.thread_id) + len(entry.header or "") + size


class TailPieces:
    """For ``with``. Entries are added, and then come out once, piece by piece.

    How large a piece becomes shows only when all entries are there. So they are divided into many small buckets, and a
    piece is as many neighbours of them as fit.
    """

    def __init__(self, share: Share, buckets: int, bytes_max: int) -> None:
        """`bytes_max`: about how many bytes may be in memory while entries are added, and how many a piece has."""
        self._share, self._bytes_max = share, bytes_max
        self._buckets = share.divided(buckets)
        self._in_memory: list[list[TailEntry]] = [[] for _ in self._buckets]
        self._size = 0
        self._sizes = [0] * buckets
        self._file: IO[bytes] | None = None
        #: Where the entries of each bucket stand in the file: offset and length.
        self._places: list[list[tuple[int, int]]] = [[] for _ in self._buckets]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, entry: TailEntry) -> None:
        """Add an entry of a thread of the share."""
        bucket, size = self._share.piece_of(entry.thread_id, len(self._buckets)), size_of(entry)
        self._in_memory[bucket].append(entry)
        self._sizes[bucket] += size
        self._size += size
        if self._size > self._bytes_max and len(self._buckets) > 1:
            self._write_all()

    def taken(self) -> Iterator[tuple[Share, Iterator[TailEntry]]]:
        """Yield the pieces: which threads, and their entries, those of a thread in the order in which they came.

        Take a piece's entries before you take the next piece.
        """
        first = size = 0
        for number, more in enumerate(self._sizes):
            if size and size + more > self._bytes_max:
                yield self._piece(first, number)
                first, size = number, 0
            size += more
        yield self._piece(first, len(self._sizes))

    def _piece(self, first: int, end: int) -> tuple[Share, Iterator[TailEntry]]:
        share = Share(self._buckets[first].low, self._buckets[end - 1].high)
        return share, chain.from_iterable(map(self._entries_of, range(first, end)))

    def _entries_of(self, bucket: int) -> Iterator[TailEntry]:
        for offset, length in self._places[bucket]:
            assert self._file is not None
            self._file.seek(offset)
            yield from unpack(self._file.read(length))
        found, self._in_memory[bucket] = self._in_memory[bucket], []
        yield from found

    def _write_all(self) -> None:
        self._file = file = self._file or local_file()
        for number, entries in enumerate(self._in_memory):
            if entries:
                self._places[number].append((file.tell(), file.write(pack(entries))))
                entries.clear()
        self._size = 0
