"""What this process has read of threads, to be read on from: most of a long thread is the same at each read.

A state is that of the store at a watermark, with the entries that the log held behind it. It is still true when the
watermark of now is the same, or that of one of these entries: an entry is applied only when the one that it is chained
to is. So a small row certifies what would be read again (docs/adr/0051). Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Generic, NamedTuple

from bufstore.buffer.chain import Watermark
from bufstore.buffer.domain import S
from bufstore.buffer.entry import Base, Item, StoredEntry

#: A state is read anew from the store this many seconds after it was, at the latest: then changes past the buffer show.
ASKED_FOR_S = 60.0


class Link(NamedTuple):
    """An entry that a state includes."""

    seq: int
    id: int
    #: It may stand behind an entry that is parked, and heals the chain.
    self_contained: bool


class Kept(NamedTuple, Generic[S]):
    """A state that was read, with what makes it true."""

    state: S
    #: The position of the thread's last entry in the log; 0: the log shows none.
    last: int
    #: When the store was asked (`bufstore.buffer.elapsed`).
    asked_at: float
    #: The position and the id of the store's watermark then, or since.
    anchor: tuple[int, int]
    #: The entries behind that.
    behind: Sequence[Link]
    #: About how many bytes it takes.
    size: int

    def anchored(self, row: Watermark, new: Sequence[Link] | None, last: int) -> Kept[S] | None:
        """The same with the watermark of now as its anchor; None if the thread may be another by now.

        `new`: what the log holds behind what is kept (`links_of`), up to at least `last`, the position of the thread's
        last entry there; 0: the log shows none.
        """
        if new is None or row.gone or row.waits_to or row.broken_since is not None:
            return None
        up_to = new[-1].seq if new else self.last
        behind = _behind((row.flushed_seq, row.applied_id), self.anchor, [*self.behind, *new])
        # What is purged is flushed: nothing may be left behind the watermark then.
        if behind is None or (not self.last <= last <= up_to if last else behind):
            return None
        return self._replace(anchor=(row.flushed_seq, row.applied_id), behind=behind, last=up_to if last else 0)


def _behind(at: tuple[int, int], anchor: tuple[int, int], links: Sequence[Link]) -> Sequence[Link] | None:
    """The links behind a watermark; None if it does not tell that all before it were applied."""
    if at == anchor:
        return links
    for number, link in enumerate(links):
        if link.self_contained:
            return None  # what stands before it may have been parked, and it healed that
        if (link.seq, link.id) == at:
            return links[number + 1 :]
    return None


def links_of(items: Iterable[Item]) -> list[Link] | None:
    """Entries of the log as links; None if only the store's row tells which of them count."""
    links: list[Link] = []
    for item in items:
        if not isinstance(item, StoredEntry) or item.entry.base is not Base.CHAINED:
            return None
        links.append(Link(item.seq, item.entry.id, item.entry.self_contained))
    return links


class RecentStates(Generic[S]):
    """The states that were read last, in at most `bytes_max` bytes; what was read longest ago goes first."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._kept: OrderedDict[str, Kept[S]] = OrderedDict()
        self.bytes = 0

    def get(self, thread_id: str, now: float) -> Kept[S] | None:
        """What is kept of a thread, unless the store must be asked again."""
        kept = self._kept.get(thread_id)
        return kept if kept is not None and now - kept.asked_at <= ASKED_FOR_S else None

    def keep(self, thread_id: str, read: Kept[S]) -> None:
        """Note what was read."""
        self.forget(thread_id)
        if not 0 < read.size <= self._bytes_max:
            return
        self._kept[thread_id] = read
        self.bytes += read.size
        while self.bytes > self._bytes_max:
            self.forget(next(iter(self._kept)))

    def forget(self, thread_id: str) -> None:
        """Read the thread from the store the next time."""
        kept = self._kept.pop(thread_id, None)
        if kept is not None:
            self.bytes -= kept.size

    def forget_all(self) -> None:
        """The log is another."""
        self._kept.clear()
        self.bytes = 0
