"""An owner's memory of one partition: what has arrived, and what of it is settled.

Entries of a thread that has to wait can be *set aside*: they leave memory, and are read again from the log, in parts,
when the thread's turn comes. The cursor stays before the first of them until all are settled, so it is enough to
remember where they begin and end, however many there are.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from bufstore.buffer.entry import Assembler, Item, Malformed, StoredEntry
from bufstore.buffer.flush.passed import Passed
from bufstore.buffer.ports.ledger import Cursor
from bufstore.buffer.ports.log import Feed
from bufstore.buffer.subjects import Subjects
from bufstore.errors import MalformedEntry
from bufstore.jetstream.messages import StoredMessage

#: The possible cursor positions are pruned when this many more than the open entries have gathered.
_ORDER_SLACK = 1000


@dataclass
class Aside:
    """The entries of one thread that are not settled and not kept in memory."""

    #: The position of the first: the cursor stays before it until all are settled.
    first: int
    #: Everything of the thread up to here is settled: it is read again from behind here.
    read_to: int
    #: Position and id of the last.
    last: int
    last_id: int
    #: About how many there are, and their bytes.
    entries: int = 0
    bytes: int = 0
    #: How many of them are back in memory, to be settled.
    recalled: int = 0


class OwnedPartition:
    """One owned partition, from takeover until it is lost or given up."""

    def __init__(self, cursor: Cursor, feed: Feed, subjects: Subjects) -> None:
        self.cursor = cursor
        self.feed = feed
        self._subjects = subjects
        self._assembler = Assembler()
        #: What has arrived and is not settled, in order of the log (as far as one thread goes).
        self.pending: dict[int, Item] = {}
        self.pending_bytes = 0
        #: Threads whose entries are set aside; what arrives of them is not kept either.
        self.aside: dict[str, Aside] = {}
        #: (position, entry id) of what arrived and is not passed by the cursor yet: all that is open (of a thread set
        #: aside, the first), and at least the last settled one before each of these.
        self._order: deque[tuple[int, int]] = deque()
        #: Where the entries of several messages that are pending begin.
        self._begins: dict[int, int] = {}
        #: The last that arrived.
        self._arrived = cursor.seq
        #: The position of the last message that the feed delivered, of a whole entry or not.
        self.delivered = cursor.seq
        #: What retention counts from.
        self.passed = Passed()
        #: Why the memory of the partition can no longer be trusted; None while it can.
        self.doubt: str | None = None

    def collect(self) -> bool:
        """Take what the feed delivered; True while its last entry is incomplete."""
        arrived = self.feed.take()
        try:
            for message in arrived:
                begins = self._assembler.pending_from
                for item in self._items(message):
                    self._add(item, begins)
        except Exception as e:
            # The cursor would pass what is lost here.
            self.doubt = f"unexpected {type(e).__name__} in what arrived"
            raise
        if arrived:
            self.delivered = arrived[-1].seq
        return self._assembler.pending_from is not None

    def _add(self, item: Item, begins: int | None) -> None:
        self._arrived = seq = item.seq
        if self.aside and item.thread_id in self.aside:
            _append(self.aside[item.thread_id], item)
            return
        self._keep(item)
        self._order.append((seq, _id(item)))
        if begins is not None and begins < seq:
            self._begins[seq] = begins

    def _keep(self, item: Item) -> None:
        self.pending[item.seq] = item
        self.pending_bytes += _size(item)

    def _forget(self, seq: int) -> Item | None:
        item = self.pending.pop(seq, None)
        if item is not None:
            self.pending_bytes -= _size(item)
            self._begins.pop(seq, None)
        return item

    @property
    def unsettled(self) -> int:
        """How many entries have arrived and are not settled."""
        return len(self.pending) + sum(a.entries - a.recalled for a in self.aside.values())

    # --- what is set aside ------------------------------------------------------------------------------------

    def set_aside(self, thread_ids: Collection[str | None]) -> None:
        """Let go of what is pending of these threads; `recall` brings it back."""
        gone: set[int] = set()
        for item in [i for i in self.pending.values() if i.thread_id in thread_ids]:
            if item.thread_id is None:  # not on a subject of ours: it could not be found again
                continue
            begins = self._begins.get(item.seq, item.seq)
            self._forget(item.seq)
            aside = self.aside.get(item.thread_id)
            if aside is None:
                aside = self.aside[item.thread_id] = Aside(item.seq, begins - 1, item.seq, _id(item))
            elif aside.recalled:
                aside.recalled -= 1
                continue
            else:
                gone.add(item.seq)
            _append(aside, item)
        if gone:
            self._order = deque(entry for entry in self._order if entry[0] not in gone)

    def recall(self, thread_id: str, items: Sequence[Item]) -> None:
        """Take entries of a thread that is set aside back into memory: those next behind `Aside.read_to`, in order."""
        aside = self.aside[thread_id]
        aside.recalled = len(items)
        aside.entries = max(aside.entries, len(items))
        for item in items:
            self._keep(item)

    @property
    def passable(self) -> int:
        """Everything up to here is settled or set aside."""
        first = min((seq for seq, item in self.pending.items() if item.thread_id not in self.aside), default=None)
        return self._arrived if first is None else first - 1

    # --- what is settled --------------------------------------------------------------------------------------

    def cursor_after(self, settled: Collection[int]) -> Cursor:
        """The cursor once the entries at these positions are settled too.

        It stands before the first entry that is not; so everything up to it is applied or parked.
        """
        position = (self.cursor.seq, self.cursor.id)
        open_ = {a.first for a in self.aside.values() if a.last not in settled}
        first_open = None
        for seq, id_ in self._order:
            if seq in open_ or (seq in self.pending and seq not in settled):
                first_open = seq
                break
            position = (seq, id_)
        for aside in self._settled_whole(settled):
            if first_open is None or aside.last < first_open:
                position = max(position, (aside.last, aside.last_id))
        # A commit that does not move the cursor raises the term: each one shows in the row, so that a Postgres which
        # has lost one in a failover is noticed by it.
        unmoved = position[0] == self.cursor.seq and not self.pending.keys().isdisjoint(settled)
        return Cursor(self.cursor.partition, self.cursor.term + unmoved, *position)

    def _settled_whole(self, settled: Collection[int]) -> Iterator[Aside]:
        return (a for a in self.aside.values() if a.last in settled)

    def settle(self, settled: Iterable[int], cursor: Cursor, now: float) -> None:
        """Forget what a commit has settled."""
        for seq in settled:
            item = self._forget(seq)
            if item is not None and item.thread_id is not None and item.thread_id in self.aside:
                self._settle_aside(item.thread_id, item)
        while self._order and self._order[0][0] <= cursor.seq:
            self._order.popleft()
        self._shorten()
        if cursor.seq > self.cursor.seq:
            self.passed.note(now, cursor.seq)
        self.cursor = cursor

    def _settle_aside(self, thread_id: str, item: Item) -> None:
        aside = self.aside[thread_id]
        aside.read_to = max(aside.read_to, item.seq)
        aside.entries = max(aside.entries - 1, 0)
        aside.recalled = max(aside.recalled - 1, 0)
        aside.bytes = max(aside.bytes - _size(item), 0)
        if item.seq == aside.last:
            del self.aside[thread_id]
            if aside.last != aside.first:
                insort(self._order, (aside.last, aside.last_id))

    def _shorten(self) -> None:
        """Of neighbours that are settled, the cursor can stand on the last only: forget the others."""
        open_ = len(self.pending) + len(self.aside)
        if len(self._order) <= 2 * open_ + _ORDER_SLACK:
            return
        firsts = {a.first for a in self.aside.values()}
        kept: deque[tuple[int, int]] = deque()
        settled = False
        for entry in self._order:
            if settled and entry[0] not in self.pending and entry[0] not in firsts:
                kept.pop()
            settled = entry[0] not in self.pending and entry[0] not in firsts
            kept.append(entry)
        self._order = kept

    def _items(self, message: StoredMessage) -> Iterable[Item]:
        try:
            thread_id = self._subjects.thread_id(message.subject)
        except MalformedEntry as e:
            return (Malformed(message.subject, message.seq, (message,), str(e)),)
        return self._assembler.feed(message, thread_id)


def _append(aside: Aside, item: Item) -> None:
    aside.last, aside.last_id = item.seq, _id(item)
    aside.entries += 1
    aside.bytes += _size(item)


def _id(item: Item) -> int:
    return item.entry.id if isinstance(item, StoredEntry) else 0


def _size(item: Item) -> int:
    # What an entry costs besides its payload is more than the payload of a small one.
    size = len(item.entry.payload) if isinstance(item, StoredEntry) else sum(len(m.body) for m in item.messages)
    return size + 512
