"""A task's entries of the tail, in pieces that fit into memory: while they come, what does not fit stands in a file.

A group holds entries of many threads, so a task reads the whole tail. It reads it once, puts each entry to the piece of
its thread, and has one piece in memory at a time afterwards (docs/adr/0047).
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
    """For ``with``. The entries of a piece come out in the order in which they came, once."""

    def __init__(self, share: Share, pieces: int, bytes_max: int) -> None:
        """`bytes_max`: of payloads that are in memory while entries come."""
        self.shares = share.divided(pieces)
        self._share, self._bytes_max = share, bytes_max
        self._in_memory: list[list[TailEntry]] = [[] for _ in self.shares]
        self._size = 0
        self._file: IO[bytes] | None = None
        #: Where entries of a piece stand in the file: offset and length.
        self._places: list[list[tuple[int, int]]] = [[] for _ in self.shares]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, entry: TailEntry) -> None:
        """Of a thread of the share."""
        self._in_memory[self._share.piece_of(entry.thread_id, len(self.shares))].append(entry)
        self._size += len(entry.payload)
        if self._size > self._bytes_max and len(self.shares) > 1:
            self._write_all()

    def taken(self, piece: int) -> Iterator[TailEntry]:
        """The entries of a piece."""
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
