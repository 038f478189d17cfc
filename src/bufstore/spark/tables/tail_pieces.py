"""Divides a task's entries of the tail into pieces that fit into memory; entries that do not fit go into a file.

A group holds entries of many threads, so a task reads the whole tail. It reads the tail once, puts each entry into the
piece of the entry's thread, and afterwards has one piece in memory at a time (docs/adr/0047).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import IO, Self

import msgspec

from bufstore.spark.local_files import local_file
from bufstore.spark.tables.shares import Share


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


class TailPieces:
    """For ``with``. The entries of a piece come out once, in the order in which they were added."""

    def __init__(self, share: Share, pieces: int, bytes_max: int) -> None:
        """`bytes_max`: how many bytes of payloads may be in memory while entries are added."""
        self.shares = share.divided(pieces)
        self._share, self._bytes_max = share, bytes_max
        self._in_memory: list[list[TailEntry]] = [[] for _ in self.shares]
        self._size = 0
        self._file: IO[bytes] | None = None
        #: Where the entries of each piece stand in the file: offset and length.
        self._places: list[list[tuple[int, int]]] = [[] for _ in self.shares]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, entry: TailEntry) -> None:
        """Add an entry of a thread of the share."""
        self._in_memory[self._share.piece_of(entry.thread_id, len(self.shares))].append(entry)
        self._size += len(entry.payload)
        if self._size > self._bytes_max and len(self.shares) > 1:
            self._write_all()

    def taken(self, piece: int) -> Iterator[TailEntry]:
        """Yield the entries of a piece."""
        for offset, length in self._places[piece]:
            assert self._file is not None
            self._file.seek(offset)
            yield from unpack(self._file.read(length))
        found, self._in_memory[piece] = self._in_memory[piece], []
        yield from found

    def _write_all(self) -> None:
        self._file = file = self._file or local_file()
        for number, entries in enumerate(self._in_memory):
            if entries:
                self._places[number].append((file.tell(), file.write(pack(entries))))
                entries.clear()
        self._size = 0
