"""What this process read last of each thread, so that it can go on reading while Postgres is away."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from bufstore.buffer.chain import Watermark
from bufstore.langgraph.model import Tables
from bufstore.langgraph.protocol import Part

#: Namespace, and the id of a checkpoint or None for the newest one.
Asked = tuple[str, str | None]

#: For how many threads, those used last, it is looked up now and then whether anybody has written to them.
_FOLLOWED_MAX = 5000


class _Read(msgspec.Struct):
    part: Part
    at: float
    size: int
    #: Whether this process would have seen it if anybody had written to the thread since.
    followed: bool = True

    @property
    def position(self) -> int:
        return self.part.watermark.flushed_seq

    @property
    def reaches(self) -> int:
        """The thread's last entry in Postgres. Above `position`, it waits in the ledger and is not in the rows."""
        return max(self.position, self.part.watermark.waits_to)


class _Thread(msgspec.Struct):
    #: By what was asked. None: the last read that told all namespaces of the thread, without its rows.
    reads: dict[Asked | None, _Read]
    #: Whether any of these reads is followed.
    followed: bool = True


class ReadCache:
    """Parts of threads as they were read last, in at most `bytes_max` bytes; what was used longest ago goes first."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._threads: OrderedDict[str, _Thread] = OrderedDict()
        self._bytes = 0

    def knows_namespaces(self, thread_id: str) -> bool:
        """Whether the thread's namespaces are remembered."""
        thread = self._threads.get(thread_id)
        return thread is not None and None in thread.reads

    def put(self, thread_id: str, asked: Asked, part: Part, at: float) -> None:
        """Remember what a read has found that began at the time `at` (`bufstore.elapsed`)."""
        thread = self._threads.setdefault(thread_id, _Thread({}))
        self._threads.move_to_end(thread_id)
        before = thread.reads.get(asked)
        if before is not None and before.position > part.watermark.flushed_seq:
            return
        self._note(thread, asked, part, at)
        if part.namespaces is not None:
            self._note(thread, None, Part(part.watermark, Tables(), part.namespaces), at)
        while self._bytes > self._bytes_max and self._threads:
            self.forget(next(iter(self._threads)))

    def get(self, thread_id: str, asked: Asked) -> Part | None:
        """Return what was read; an empty part for a namespace that the thread did not have; None: not known."""
        thread = self._threads.get(thread_id)
        if thread is None:
            return None
        read = thread.reads.get(asked)
        if read is not None:
            return read.part
        told = thread.reads.get(None)
        if told is None or told.part.namespaces is None or asked[0] in told.part.namespaces:
            return None
        return Part(told.part.watermark, Tables())

    def oldest(self, thread_id: str) -> Watermark | None:
        """Return the lowest watermark of what is remembered of the thread; None: nothing is remembered."""
        thread = self._threads.get(thread_id)
        if thread is None:
            return None
        self._threads.move_to_end(thread_id)
        return min((read.part.watermark for read in thread.reads.values()), key=lambda w: w.flushed_seq, default=None)

    def is_last(self, thread_id: str, position: int, head: int, since: float) -> bool:
        """Whether it is known that nobody has written to the thread behind a position at which it was read.

        `head`: the thread's last entry as this process has seen the log. `since`: a read that began later than this
        counts even if it is not followed.
        """
        thread = self._threads.get(thread_id)
        if thread is None or head > position:
            return False
        reads = [read for read in thread.reads.values() if read.reaches == position]
        return any(read.followed or read.at > since for read in reads)

    def let_go(self, head: Callable[[str], int] | None) -> None:
        """Follow no more the threads that were written to: the log is about to forget their heads.

        `head`: tells the head that the log still knows of a thread; None: it knows none. Most threads that are read are
        written to afterwards, and need not be looked at again.
        """
        left = _FOLLOWED_MAX
        for thread_id, thread in reversed(self._threads.items()):
            if thread.followed:
                last = head(thread_id) if head is not None and left else sys.maxsize
                left -= left > 0
                for read in thread.reads.values():
                    read.followed = read.followed and last <= read.position
                thread.followed = any(read.followed for read in thread.reads.values())

    def forget_read_at(self, thread_id: str, position: int) -> None:
        """Forget what was read at this position or an earlier one: the log does not reach back to it any more."""
        thread = self._threads.get(thread_id)
        if thread is None:
            return
        for asked in [asked for asked, read in thread.reads.items() if read.position <= position]:
            self._bytes -= thread.reads.pop(asked).size

    def forget(self, thread_id: str) -> None:
        """Forget the thread."""
        thread = self._threads.pop(thread_id, None)
        if thread is not None:
            self._bytes -= sum(read.size for read in thread.reads.values())

    def _note(self, thread: _Thread, asked: Asked | None, part: Part, at: float) -> None:
        before = thread.reads.get(asked)
        size = part.tables.size + sum(map(len, part.namespaces or ()))
        self._bytes += size - (before.size if before is not None else 0)
        thread.reads[asked] = _Read(part, at, size)
        thread.followed = True
