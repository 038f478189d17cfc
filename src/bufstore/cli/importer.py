"""The importing itself: many threads at once, a bounded number of lines in memory."""

from __future__ import annotations

import logging
from array import array
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from hashlib import blake2b

from bufstore.cli.concurrent import Room, each, read_ahead
from bufstore.cli.database import existing
from bufstore.cli.lines import BadLine, Line
from bufstore.cli.verify import Expected
from bufstore.cli.writing import ConversationWriter, Written
from bufstore.threads.buffered import BufferedThreadStore
from bufstore.threads.postgres.store import PostgresThreadStore

_log = logging.getLogger(__name__)

#: Threads that are written at the same time.
_AT_ONCE = 64
#: Lines, and their bytes, that are in memory at the same time.
_LINES_HELD = 256
_BYTES_HELD = 64 << 20
#: Threads that are looked up in Postgres with one statement.
_LOOKED_UP = 128


class Journal:
    """What was imported, in some 100 bytes a thread: for millions of threads it is all that grows."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._lines = array("q")
        self._acknowledged = array("q")
        self._superseded = array("q")
        self._seqs = array("q")

    def begin(self, thread_id: str) -> bool:
        """Note the thread; false if it is there already."""
        known = len(self._places)
        return self._places.setdefault(_hash(thread_id), known) == known and self._grow()

    def _grow(self) -> bool:
        for column in (self._lines, self._acknowledged, self._superseded, self._seqs):
            column.append(0)
        return True

    def end(self, line: Line, written: Written) -> None:
        """Note what came of a line; a later line of the same thread takes its place."""
        if written.acknowledged:
            place = self._places[_hash(line.thread_id)]
            self._lines[place] = line.number
            self._superseded[place] += self._acknowledged[place]
            self._acknowledged[place] = written.acknowledged
            self._seqs[place] = written.thread_seq

    def find(self, line: Line) -> Expected | None:
        """What Postgres must show of a line; None if nothing, or if that is up to a later line."""
        place = self._places.get(_hash(line.thread_id))
        if place is None or self._lines[place] != line.number:
            return None
        return Expected(
            line.thread_id,
            line.messages,
            acknowledged=self._acknowledged[place],
            thread_seq=self._seqs[place],
            superseded=self._superseded[place],
        )


def _hash(thread_id: str) -> int:
    # 64 bits: among ten million threads two share a hash once in 400,000 files, and then one is reported as repeated.
    return int.from_bytes(blake2b(thread_id.encode(), digest_size=8).digest())


class Importer:
    """Writes the threads of an input. `report` is told of each line that is not imported, and why."""

    def __init__(
        self,
        store: BufferedThreadStore,
        plain: PostgresThreadStore,
        *,
        overwrite: bool,
        report: Callable[[int, str], None],
    ) -> None:
        self._store = store
        self._plain = plain
        self._overwrite = overwrite
        self._report = report
        self._room = Room(_LINES_HELD, _BYTES_HELD)
        #: Lines of a thread that is being written, to follow in order.
        self._following: dict[str, deque[Line]] = {}
        self.writer = ConversationWriter(store)
        self.journal = Journal()
        self.threads = 0
        #: True when something that should have been imported was not, for another reason than a bad line.
        self.incomplete = False

    async def run(self, lines: Iterable[Line | BadLine]) -> None:
        """Write all threads. Returns when every checkpoint is acknowledged or reported."""
        if not self._overwrite:
            # From here on Postgres alone can tell which threads there were before.
            await self._store.force_flush_all()
        await each(self._admitted(lines), self._write, at_once=_AT_ONCE)

    async def _admitted(self, lines: Iterable[Line | BadLine]) -> AsyncIterator[Line]:
        """The lines to be written, each the first one of its thread that is not done yet."""
        async for batch in read_ahead(lines, self._room, lambda line: line.size, _LOOKED_UP):
            taken = await self._taken(batch)
            for line in batch:
                reason = self._why_not(line, taken)
                if isinstance(line, BadLine) or reason:
                    self._report(line.number, reason)
                    await self._room.leave(line.size)
                elif line.thread_id in self._following:
                    self._following[line.thread_id].append(line)
                else:
                    self._following[line.thread_id] = deque()
                    yield line

    async def _taken(self, batch: Iterable[Line | BadLine]) -> set[str]:
        ids = [line.thread_id for line in batch if isinstance(line, Line)]
        return await existing(self._plain, ids) if ids and not self._overwrite else set()

    def _why_not(self, line: Line | BadLine, taken: set[str]) -> str:
        if isinstance(line, BadLine):
            self.incomplete |= line.end
            return line.reason
        first = self.journal.begin(line.thread_id)
        if self._overwrite or (first and line.thread_id not in taken):
            return ""
        self.incomplete = True
        where = "exists" if first else "stands in an earlier line"
        return f"thread {line.thread_id!r} {where} (--overwrite replaces it)"

    async def _write(self, line: Line) -> None:
        """Write a line, and what follows it on the same thread."""
        following = self._following[line.thread_id]
        while True:
            written = await self.writer.write(line.thread_id, line.messages)
            self.journal.end(line, written)
            self.threads += 1
            if written.refused is not None:
                self.incomplete = True
                self._report(line.number, f"refused after {written.acknowledged} checkpoints: {written.refused}")
            _log.info(
                "line %d: thread %r, %d checkpoints acknowledged", line.number, line.thread_id, written.acknowledged,
                extra={"action": "thread_imported"},
            )  # fmt: skip
            await self._room.leave(line.size)
            if not following:
                break
            line = following.popleft()
        del self._following[line.thread_id]
