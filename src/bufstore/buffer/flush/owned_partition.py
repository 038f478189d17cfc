"""An owner's memory of one partition: which entries have arrived or are settled, and which threads have entries in the
ledger.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence, Set
from dataclasses import dataclass

from bufstore.buffer.entry import Item, Malformed, bytes_of, id_of, item_of
from bufstore.buffer.flush.passed import Passed
from bufstore.buffer.ports.ledger import Cursor
from bufstore.buffer.ports.log import Feed
from bufstore.buffer.ports.waiting import Queue, WaitingEntry
from bufstore.buffer.subjects import Subjects
from bufstore.errors import MalformedEntry
from bufstore.jetstream.messages import StoredMessage

#: The possible cursor positions are pruned once they outnumber twice the open entries by this many.
_ORDER_SLACK = 1000


@dataclass
class Queued:
    """How much of one thread waits in the ledger, and why."""

    entries: int
    bytes: int
    reason: str


class OwnedPartition:
    """One owned partition, from takeover until it is lost or given up."""

    def __init__(self, cursor: Cursor, feed: Feed, subjects: Subjects, queues: Sequence[Queue] = ()) -> None:
        """`queues`: the partition's threads that have entries in the ledger."""
        self.cursor = cursor
        self.feed = feed
        self._subjects = subjects
        #: The entries that have arrived and are neither settled nor in the ledger; those of one thread in log order.
        self.pending: dict[int, Item] = {}
        self.pending_bytes = 0
        #: The threads of which entries wait in the ledger. This is exact, because nobody else writes there.
        self.queues = {q.thread_id: Queued(q.entries, q.bytes + q.entries * _OVERHEAD, q.reason) for q in queues}
        self.queued_bytes = sum(q.bytes for q in self.queues.values())
        #: For each of these threads, the position of its last waiting entry when the partition was taken over. If the
        #: cursor stands before such entries, the log delivers them once more.
        self._waits_to = {q.thread_id: q.last for q in queues}
        #: The waiting entries that were read from the ledger to be settled.
        self.recalled: dict[int, Item] = {}
        #: (position, entry id) of entries that arrived and that the cursor has not passed: all open entries, and before
        #: each of them at least the last settled one.
        self._order: deque[tuple[int, int]] = deque()
        #: The position of the last entry that the feed delivered.
        self.delivered = cursor.seq
        #: When the cursor passed which positions; retention counts from these times.
        self.passed = Passed()
        #: Why the memory of the partition can no longer be trusted; None while it can.
        self.doubt: str | None = None

    def collect(self) -> None:
        """Take the messages that the feed has delivered, unless the memory of the partition is in doubt."""
        if self.doubt is not None:
            return
        try:
            arrived = self.feed.take()
            for message in arrived:
                item = self._item(message)
                if item.thread_id is None or item.seq > self._waits_to.get(item.thread_id, 0):
                    self.pending[item.seq] = item
                    self.pending_bytes += size_of(item)
                # Last: the cursor passes what is in order here and not pending.
                self._order.append((item.seq, id_of(item)))
        except BaseException as e:
            # The cursor would pass the entries that are lost here, also when a signal's handler raises.
            self.doubt = f"unexpected {type(e).__name__} while decoding the entries that arrived"
            raise
        if arrived:
            self.delivered = arrived[-1].seq

    @property
    def unsettled(self) -> int:
        """How many entries have arrived and are not settled, including those that wait in the ledger."""
        return len(self.pending) + sum(q.entries for q in self.queues.values())

    def recall(self, items: Iterable[Item]) -> None:
        """Note the waiting entries that were read from the ledger."""
        self.recalled.update((item.seq, item) for item in items)

    # --- what a commit changes --------------------------------------------------------------------------------

    def cursor_after(self, passed: Collection[int]) -> Cursor:
        """Return the cursor as it is once the entries at these positions are settled, or wait in the ledger.

        It stands before the first open entry, so everything up to it is applied, parked or waiting.
        """
        position = (self.cursor.seq, self.cursor.id)
        for seq, id_ in self._order:
            if seq in self.pending and seq not in passed:
                break
            position = (seq, id_)
        # A commit that does not move the cursor raises the term. So each commit shows in the partition's row, and we
        # notice a Postgres that has lost one in a failover.
        changes = not (self.pending.keys().isdisjoint(passed) and self.recalled.keys().isdisjoint(passed))
        unmoved = changes and position[0] == self.cursor.seq
        return Cursor(self.cursor.partition, self.cursor.term + unmoved, *position)

    def settle(self, settled: Set[int], cursor: Cursor, now: float) -> None:
        """Forget the entries that a commit has settled. Most of `settled` may be of other partitions."""
        for seq in self.pending.keys() & settled:
            self._forget(seq)
        for seq in self.recalled.keys() & settled:
            item = self.recalled.pop(seq)
            if item.thread_id is not None:
                self._leave(item.thread_id, item)
        self._move(cursor, now)

    def queue(self, waiting: Sequence[WaitingEntry], cursor: Cursor, now: float) -> None:
        """Forget the entries that a commit has written into the ledger to wait; count them as waiting."""
        for entry in waiting:
            thread_id, size = entry.item.thread_id, size_of(entry.item)
            assert thread_id is not None
            self._forget(entry.item.seq)
            queued = self.queues.setdefault(thread_id, Queued(0, 0, entry.reason))
            queued.entries += 1
            queued.bytes += size
            self.queued_bytes += size
        self._move(cursor, now)

    def _forget(self, seq: int) -> None:
        item = self.pending.pop(seq, None)
        if item is not None:
            self.pending_bytes -= size_of(item)

    def _leave(self, thread_id: str, item: Item) -> None:
        queued = self.queues[thread_id]
        # The sizes that a takeover has read are not exact.
        size = queued.bytes if queued.entries == 1 else min(size_of(item), queued.bytes)
        queued.entries -= 1
        queued.bytes -= size
        self.queued_bytes -= size
        if not queued.entries:
            del self.queues[thread_id]

    def _move(self, cursor: Cursor, now: float) -> None:
        while self._order and self._order[0][0] <= cursor.seq:
            self._order.popleft()
        self._shorten()
        if cursor.seq > self.cursor.seq:
            self.passed.note(now, cursor.seq)
        self.cursor = cursor

    def _shorten(self) -> None:
        """Keep only the last of neighboring settled entries: the cursor can stand on no other of them."""
        if len(self._order) <= 2 * len(self.pending) + _ORDER_SLACK:
            return
        kept: deque[tuple[int, int]] = deque()
        settled = False
        for entry in self._order:
            if settled and entry[0] not in self.pending:
                kept.pop()
            settled = entry[0] not in self.pending
            kept.append(entry)
        self._order = kept

    def _item(self, message: StoredMessage) -> Item:
        try:
            thread_id = self._subjects.thread_id(message.subject)
        except MalformedEntry as e:
            return Malformed(message.subject, message.seq, (message,), str(e))
        return item_of(message, thread_id)


#: About how many bytes an entry takes besides its payload; for a small entry this is more than the payload.
_OVERHEAD = 512


def size_of(item: Item) -> int:
    """Return about how many bytes an entry takes in memory, or in the ledger."""
    return bytes_of(item) + _OVERHEAD
