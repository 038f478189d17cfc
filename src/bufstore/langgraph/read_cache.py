"""What this process read last of each thread, so that it can read on while Postgres is away."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import msgspec

from bufstore.buffer.chain import Watermark
from bufstore.langgraph.model import Tables
from bufstore.langgraph.protocol import Part

#: Namespace, and the id of a checkpoint or None for the newest one.
Asked = tuple[str, str | None]


class _Read(msgspec.Struct):
    part: Part
    at: float


class _Thread(msgspec.Struct):
    reads: dict[Asked, _Read]
    #: What told all namespaces that the thread had, without its rows.
    namespaces: _Read | None = None
    size: int = 0

    def all(self) -> Iterator[_Read]:
        yield from self.reads.values()
        if self.namespaces is not None:
            yield self.namespaces


class ReadCache:
    """Parts of threads as they were read last, in at most `bytes_max` bytes; what was used longest ago goes first."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._threads: OrderedDict[str, _Thread] = OrderedDict()
        self._bytes = 0

    def knows_namespaces(self, thread_id: str) -> bool:
        """Whether the thread's namespaces are remembered."""
        thread = self._threads.get(thread_id)
        return thread is not None and thread.namespaces is not None

    def put(self, thread_id: str, asked: Asked, part: Part, at: float) -> None:
        """Remember what was read, beginning at the time `at` (`bufstore.buffer.elapsed`)."""
        thread = self._threads.setdefault(thread_id, _Thread({}))
        self._threads.move_to_end(thread_id)
        before = thread.reads.get(asked)
        if before is not None and before.part.watermark.flushed_seq > part.watermark.flushed_seq:
            return
        self._grow(thread, _size(part) - (_size(before.part) if before is not None else 0))
        thread.reads[asked] = _Read(part, at)
        if part.namespaces is not None:
            self._note_namespaces(thread, _Read(Part(part.watermark, Tables(), part.namespaces), at))
        while self._bytes > self._bytes_max and self._threads:
            self.forget(next(iter(self._threads)))

    def get(self, thread_id: str, asked: Asked) -> tuple[Part, float] | None:
        """What was read, and when; an empty part for a namespace that the thread did not have."""
        thread = self._threads.get(thread_id)
        if thread is None:
            return None
        read = thread.reads.get(asked)
        if read is not None:
            return read.part, read.at
        told = thread.namespaces
        if told is None or told.part.namespaces is None or asked[0] in told.part.namespaces:
            return None
        return Part(told.part.watermark, Tables()), told.at

    def oldest(self, thread_id: str) -> Watermark | None:
        """The watermark that all that is remembered of the thread has at least; None: nothing is."""
        thread = self._threads.get(thread_id)
        if thread is None:
            return None
        self._threads.move_to_end(thread_id)
        return min((read.part.watermark for read in thread.all()), key=lambda w: w.flushed_seq, default=None)

    def forget_oldest(self, thread_id: str) -> None:
        """Forget what has the oldest watermark: the log does not reach back to it any more."""
        watermark, thread = self.oldest(thread_id), self._threads.get(thread_id)
        if watermark is None or thread is None:
            return
        for asked in [a for a, r in thread.reads.items() if r.part.watermark.flushed_seq <= watermark.flushed_seq]:
            self._grow(thread, -_size(thread.reads.pop(asked).part))
        if thread.namespaces is not None and thread.namespaces.part.watermark.flushed_seq <= watermark.flushed_seq:
            self._note_namespaces(thread, None)

    def _note_namespaces(self, thread: _Thread, told: _Read | None) -> None:
        before, thread.namespaces = thread.namespaces, told
        self._grow(thread, sum(_size(read.part) * sign for read, sign in ((told, 1), (before, -1)) if read is not None))

    def forget(self, thread_id: str) -> None:
        """Forget the thread."""
        thread = self._threads.pop(thread_id, None)
        if thread is not None:
            self._bytes -= thread.size

    def _grow(self, thread: _Thread, bytes_: int) -> None:
        thread.size += bytes_
        self._bytes += bytes_


def _size(part: Part) -> int:
    return part.tables.size + sum(map(len, part.namespaces or ()))
