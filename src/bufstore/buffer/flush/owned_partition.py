"""An owner's memory of one partition: what has arrived, what of it is settled, and which threads wait in the ledger."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence, Set
from dataclasses import dataclass

from bufstore.buffer.entry import Item, Malformed, StoredEntry, item_of
from bufstore.buffer.flush.passed import Passed
from bufstore.buffer.ports.ledger import Cursor
from bufstore.buffer.ports.log import Feed
from bufstore.buffer.ports.waiting import Queue, WaitingEntry
from bufstore.buffer.subjects import Subjects
from bufstore.errors import MalformedEntry
from bufstore.jetstream.messages import StoredMessage

#: The possible cursor positions are pruned when this many more than the open entries have gathered.
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
        """`queues`: what waits of the partition in the ledger."""
        self.cursor = cursor
        self.feed = feed
        self._subjects = subjects
        #: What has arrived and is neither settled nor in the ledger, in order of the log (as far as one thread goes).
        self.pending: dict[int, Item] = {}
        self.pending_bytes = 0
        #: Threads of which entries wait in the ledger. As nobody else writes there, this is exact.
        self.queues = {q.thread_id: Queued(q.entries, q.bytes + q.entries * _OVERHEAD, q.reason) for q in queues}
        self.queued_bytes = sum(q.bytes for q in self.queues.values())
        #: Up to where entries of these threads were waiting when the partition was taken over. The cursor may stand
        #: before them, and then the log delivers them once more.
        self._waits_to = {q.thread_id: q.last for q in queues}
        #: What was read of them, to be settled.
        self.recalled: dict[int, Item] = {}
        #: (position, entry id) of what arrived and is not passed by the cursor yet: all that is open, and at least the
        #: last settled one before each of these.
        self._order: deque[tuple[int, int]] = deque()
        #: The position of the last entry that the feed delivered.
        self.delivered = cursor.seq
        #: What retention counts from.
        self.passed = Passed()
        #: Why the memory of the partition can no longer be trusted; None while it can.
        self.doubt: str | None = None

    def collect(self) -> None:
        """Take what the feed delivered."""
        arrived = self.feed.take()
        try:
            for message in arrived:
                item = self._item(message)
                self._order.append((item.seq, _id(item)))
                if item.thread_id is not None and item.seq <= self._waits_to.get(item.thread_id, 0):
                    continue
                self.pending[item.seq] = item
                self.pending_bytes += size_of(item)
        except Exception as e:
            # The cursor would pass what is lost here.
            self.doubt = f"unexpected {type(e).__name__} in what arrived"
            raise
        if arrived:
            self.delivered = arrived[-1].seq

    @property
    def unsettled(self) -> int:
        """How many entries have arrived and are not settled, those that wait in the ledger included."""
        return len(self.pending) + sum(q.entries for q in self.queues.values())

    def recall(self, items: Iterable[Item]) -> None:
        """Note what was read of the entries that wait in the ledger."""
        self.recalled.update((item.seq, item) for item in items)

    # --- what a commit changes --------------------------------------------------------------------------------

    def cursor_after(self, passed: Collection[int]) -> Cursor:
        """The cursor once the entries at these positions are settled, or wait in the ledger.

        It stands before the first entry that is open; so everything up to it is applied, parked or waiting.
        """
        position = (self.cursor.seq, self.cursor.id)
        for seq, id_ in self._order:
            if seq in self.pending and seq not in passed:
                break
            position = (seq, id_)
        # A commit that does not move the cursor raises the term: each one shows in the row, so that a Postgres which
        # has lost one in a failover is noticed by it.
        changes = not (self.pending.keys().isdisjoint(passed) and self.recalled.keys().isdisjoint(passed))
        unmoved = changes and position[0] == self.cursor.seq
        return Cursor(self.cursor.partition, self.cursor.term + unmoved, *position)

    def settle(self, settled: Set[int], cursor: Cursor, now: float) -> None:
        """Forget what a commit has settled. Most of that may be of other partitions."""
        for seq in self.pending.keys() & settled:
            self._forget(seq)
        for seq in self.recalled.keys() & settled:
            item = self.recalled.pop(seq)
            if item.thread_id is not None:
                self._leave(item.thread_id, item)
        self._move(cursor, now)

    def queue(self, waiting: Sequence[WaitingEntry], cursor: Cursor, now: float) -> None:
        """Forget what a commit has written into the ledger to wait there, except that it waits."""
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
        # What a takeover has read of the sizes is not exact.
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
        """Of neighbours that are settled, the cursor can stand on the last only: forget the others."""
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


def _id(item: Item) -> int:
    return item.entry.id if isinstance(item, StoredEntry) else 0


#: What an entry costs besides its payload is more than the payload of a small one.
_OVERHEAD = 512


def size_of(item: Item) -> int:
    """About what an entry takes of memory, or of the ledger."""
    size = len(item.entry.payload) if isinstance(item, StoredEntry) else sum(len(m.body) for m in item.messages)
    return size + _OVERHEAD
