"""An owner's memory of one partition: what has arrived, and what of it is settled."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable

from bufstore.buffer.entry import Assembler, Malformed, StoredEntry, StoredMessage
from bufstore.buffer.passed import Passed
from bufstore.buffer.ports import Cursor, Feed
from bufstore.buffer.subjects import Subjects
from bufstore.errors import MalformedEntry

Item = StoredEntry | Malformed


class Share:
    """One owned partition, from takeover until it is lost or given up."""

    def __init__(self, cursor: Cursor, feed: Feed, subjects: Subjects) -> None:
        self.cursor = cursor
        self.feed = feed
        self._subjects = subjects
        self._assembler = Assembler()
        #: What has arrived and is not settled, in order of the log.
        self.pending: dict[int, Item] = {}
        self.pending_bytes = 0
        #: (position, entry id) of all that arrived and is not passed by the cursor yet.
        self._order: deque[tuple[int, int]] = deque()
        #: What retention counts from.
        self.passed = Passed()
        #: Why what is known of the partition is not to be relied on any more, if it is not.
        self.doubt: str | None = None

    def collect(self) -> bool:
        """Take over what the feed delivered; True while the last entry of it is incomplete."""
        arrived = self.feed.take()
        try:
            for message in arrived:
                for item in self._items(message):
                    self.pending[item.seq] = item
                    self.pending_bytes += _size(item)
                    self._order.append((item.seq, _id(item)))
        except Exception as e:
            # The cursor would pass what got lost here.
            self.doubt = f"unexpected {type(e).__name__} in what arrived"
            raise
        return self._assembler.pending_from is not None

    def cursor_after(self, settled: Collection[int]) -> Cursor:
        """The cursor once the entries at these positions are settled too.

        It stands before the first entry that is not; so everything up to it is applied or parked.
        """
        position = (self.cursor.seq, self.cursor.id)
        for seq, id_ in self._order:
            if seq in self.pending and seq not in settled:
                break
            position = (seq, id_)
        return Cursor(self.cursor.partition, self.cursor.term, *position)

    def settle(self, settled: Iterable[int], cursor: Cursor, now: float) -> None:
        """Forget what a commit has settled."""
        for seq in settled:
            item = self.pending.pop(seq, None)
            if item is not None:
                self.pending_bytes -= _size(item)
        while self._order and self._order[0][0] <= cursor.seq:
            self._order.popleft()
        if cursor.seq > self.cursor.seq:
            self.passed.note(now, cursor.seq)
        self.cursor = cursor

    def _items(self, message: StoredMessage) -> Iterable[Item]:
        try:
            thread_id = self._subjects.thread_id(message.subject)
        except MalformedEntry as e:
            return (Malformed(message.subject, message.seq, (message,), str(e)),)
        return self._assembler.feed(message, thread_id)


def _id(item: Item) -> int:
    return item.entry.id if isinstance(item, StoredEntry) else 0


def _size(item: Item) -> int:
    # What an entry costs besides its payload is more than the payload of a small one.
    size = len(item.entry.payload) if isinstance(item, StoredEntry) else sum(len(m.body) for m in item.messages)
    return size + 512
