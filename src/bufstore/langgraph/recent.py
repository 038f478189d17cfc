"""What this process knows of the threads that it goes on with: their newest rows, up to the thread's last entry.

A graph reads a thread when a run begins, writes to it, and reads it again when the next run begins. What the process
has read, and has written after that, equals what Postgres and the log's tail would show, as long as the last entry of
these is the thread's last entry in the log (docs/adr/0045). Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from bufstore.langgraph.model import (
    CheckpointRow,
    Delete,
    Drop,
    Operation,
    Put,
    Rows,
    Tables,
    Writes,
    takes_sends,
    versions_of,
)

#: Written operations are applied when they are read, or once there are this many of them, or this many bytes.
_COUNT, _BYTES = 64, 256 << 10


class End(NamedTuple):
    """The last entry of a thread: its id, and its position in the log."""

    id: int
    seq: int


class Newest(NamedTuple):
    """The newest checkpoint of a namespace, if there is one, with rows that include its blobs and writes."""

    end: End
    tables: Tables
    row: CheckpointRow | None


class _Thread:
    """Rows of one thread, as of its entry `end`, and what this process has written since."""

    def __init__(self, end: End) -> None:
        self.end = end
        #: When the store last told of the thread (`bufstore.elapsed`).
        self.at = 0.0
        self.tables = Tables()
        #: The namespaces whose newest checkpoint is here, with all that is written on top of it and of later ones.
        self.namespaces: set[str] = set()
        #: Whether the thread has no other namespaces.
        self.whole = False
        #: Namespaces whose newest checkpoint needs more than is here.
        self.partial: set[str] = set()
        #: The operations that were written and are not applied yet, and their bytes; `end` is the last of them.
        self.behind: list[Operation] = []
        self.behind_bytes = 0
        self.size = 0

    def add(self, ns: str, tables: Tables, *, whole: bool) -> None:
        """Add what was read: the newest rows of a namespace; `whole`: all rows of the thread."""
        here = self.tables
        self.tables = added = tables.copy()
        added.checkpoints |= here.checkpoints
        added.blobs |= here.blobs
        added.writes |= here.writes
        added.known |= here.known
        self.whole = self.whole or whole
        self.namespaces.add(ns)
        if whole:
            self.namespaces |= {ns for ns, _ in added.checkpoints} | {write.ns for write in added.writes.values()}
        self._keep_newest()

    def fold(self) -> bool:
        """Apply what was written. False: the result is not known here; the thread must be read again."""
        behind, self.behind, self.behind_bytes = self.behind, [], 0
        for operation in behind:
            match operation:
                case Put(row, _, _):
                    namespaces = {row.ns}
                case Writes(rows, _):
                    namespaces = {row.ns for row in rows}
                case Delete():
                    namespaces, self.namespaces, self.whole = set[str](), set(), True
                case Drop() | Rows():  # rare, and about rows that are not here
                    return False
            if self.whole:
                self.namespaces |= namespaces
            self.tables.apply(operation)  # rows of namespaces that are not known do not stay
        if behind:
            self._keep_newest()
        return True

    def _keep_newest(self) -> None:
        """Forget rows that the newest checkpoints do not need."""
        before, self.tables, self.partial = self.tables, Tables(), set()
        first = dict.fromkeys(self.namespaces, "")
        for ns, id_ in before.checkpoints:
            if ns in first:
                first[ns] = max(first[ns], id_)
        for ns, id_ in first.items():
            newest = before.checkpoints.get((ns, id_))
            if newest is None:
                continue
            named = versions_of(newest)
            self.tables.checkpoints[ns, newest.id] = newest
            self.tables.blobs |= {key: before.blobs[key] for key in named if key in before.blobs}
            self.tables.known |= named & before.known
            if takes_sends(newest) or not named <= before.known:
                self.partial.add(ns)
        self.tables.writes = {k: w for k, w in before.writes.items() if k[0] in first and k[1] >= first[k[0]]}
        self.size = self.tables.size


class Recent:
    """The newest rows of threads, in at most `bytes_max` bytes; what was used longest ago goes first."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._threads: OrderedDict[str, _Thread] = OrderedDict()
        self.bytes = 0
        #: Grows when something other than entries may have changed a thread. A read that began before is not noted.
        self.life = 0

    def newest(self, thread_id: str, ns: str, id_: str | None, since: float) -> Newest | None:
        """Return a namespace's newest checkpoint; None: it must be read, or its id is not `id_`.

        `since`: the store must have told of the thread at this time or later.
        """
        thread = self._threads.get(thread_id)
        if thread is None or thread.at < since or not self._fold(thread_id, thread):
            return None
        if ns in thread.partial or not (thread.whole or ns in thread.namespaces):
            return None
        self._threads.move_to_end(thread_id)
        row = thread.tables.latest(ns)
        return Newest(thread.end, thread.tables, row) if id_ is None or (row is not None and row.id == id_) else None

    def read(self, thread_id: str, ns: str, found: Newest, at: float, *, whole: bool) -> None:
        """Note what was read of a namespace, beginning at the time `at`. `whole`: the rows are all of the thread."""
        thread = self._threads.get(thread_id)
        if thread is None or thread.end != found.end or thread.behind:
            self._drop(thread_id)
            thread = self._threads[thread_id] = _Thread(found.end)
        self.bytes -= thread.size
        thread.at = at
        thread.add(ns, found.tables, whole=whole)
        self.bytes += thread.size
        self._make_room(thread_id)

    def __contains__(self, thread_id: str) -> bool:
        """Whether anything is known of the thread."""
        return thread_id in self._threads

    def wrote(self, thread_id: str, behind: int | None, end: End, operation: Operation | None, size: int) -> None:
        """Note an entry of this process. `behind`: the id of the entry that it was drafted on, if it was.

        `operation`: what the entry does, in `size` bytes; None if nothing was known of the thread when it was made.
        """
        thread = self._threads.get(thread_id)
        if thread is None:
            return
        if thread.end.id != behind or operation is None:  # others have written, or an answer was lost
            self._drop(thread_id)
            return
        thread.end = end
        thread.behind.append(operation)
        thread.behind_bytes += size
        thread.size += size
        self.bytes += size
        if len(thread.behind) >= _COUNT or thread.behind_bytes >= _BYTES:
            self._fold(thread_id, thread)
        self._make_room(thread_id)

    def forget(self, thread_id: str | None) -> None:
        """Forget the thread (None: all), because something other than entries may have changed it."""
        self.life += 1
        if thread_id is not None:
            self._drop(thread_id)
        else:
            self._threads.clear()
            self.bytes = 0

    def _fold(self, thread_id: str, thread: _Thread) -> bool:
        before = thread.size
        if not thread.fold():
            self._drop(thread_id)
            return False
        self.bytes += thread.size - before
        return True

    def _make_room(self, thread_id: str) -> None:
        if thread_id in self._threads:
            self._threads.move_to_end(thread_id)
        while self.bytes > self._bytes_max:
            self._drop(next(iter(self._threads)))

    def _drop(self, thread_id: str) -> None:
        thread = self._threads.pop(thread_id, None)
        if thread is not None:
            self.bytes -= thread.size
