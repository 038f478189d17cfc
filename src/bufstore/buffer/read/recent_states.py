"""The thread states that this process has read, to continue from: most of a long thread is the same at each read.

A kept state is the store's state at a watermark, with the entries that the log held behind it. It is still true if the
present watermark is the same, or stands at one of these entries: an entry is applied only if the entry that it is
chained to is applied. So one small row certifies what would otherwise be read again (docs/adr/0051). Pure: no I/O, no
clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Generic, NamedTuple

from bufstore.buffer.chain import Watermark
from bufstore.buffer.domain import S
from bufstore.buffer.entry import Base, Item, StoredEntry

#: A state is read anew from the store after this many seconds, so that changes made without the buffer show.
ASKED_FOR_S = 60.0


class Link(NamedTuple):
    """An entry that a state includes."""

    seq: int
    id: int
    #: True when the entry heals the chain: it may stand behind an entry that is parked.
    self_contained: bool


class Kept(NamedTuple, Generic[S]):
    """A state that was read, with the evidence that it is true."""

    state: S
    #: The position of the thread's last entry in the log; 0: the log shows none.
    last: int
    #: When the store was asked, in seconds (`bufstore.elapsed`).
    asked_at: float
    #: The position and the entry id of the store's watermark, at that time or later.
    anchor: tuple[int, int]
    #: The entries behind the anchor.
    behind: Sequence[Link]
    #: About how many bytes the state takes; 0: it must not be kept.
    size: int

    def anchored(self, row: Watermark, new: Sequence[Link] | None, last: int) -> Kept[S] | None:
        """Return this state anchored at the present watermark, `row`; None if the thread's content may be another now.

        `new`: the log's entries behind those that are kept (`links_of`). They reach at least to `last`, the position of
        the thread's last entry in the log; 0: the log shows none.
        """
        if new is None or row.gone or row.waits_to or row.broken_since is not None:
            return None
        up_to = new[-1].seq if new else self.last
        behind = _behind((row.flushed_seq, row.applied_id), self.anchor, [*self.behind, *new])
        # If the log shows nothing, all entries were purged, so they are flushed: none may be left behind the watermark.
        if behind is None or (not self.last <= last <= up_to if last else behind):
            return None
        return self._replace(anchor=(row.flushed_seq, row.applied_id), behind=behind, last=up_to if last else 0)


def _behind(at: tuple[int, int], anchor: tuple[int, int], links: Sequence[Link]) -> Sequence[Link] | None:
    """Return the links behind the watermark `at`; None if it does not prove that all links before it were applied."""
    if at == anchor:
        return links
    for number, link in enumerate(links):
        if link.self_contained:
            return None  # the entries before this one may have been parked, and this one has healed the chain
        if (link.seq, link.id) == at:
            return links[number + 1 :]
    return None


def links_of(items: Iterable[Item]) -> list[Link] | None:
    """Return entries of the log as links; None if only the store's row tells which of them count."""
    links: list[Link] = []
    for item in items:
        if not isinstance(item, StoredEntry) or item.entry.base is not Base.CHAINED:
            return None
        links.append(Link(item.seq, item.entry.id, item.entry.self_contained))
    return links


class RecentStates(Generic[S]):
    """The states that were read last, in at most `bytes_max` bytes; the one that was read longest ago goes first."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._kept: OrderedDict[str, Kept[S]] = OrderedDict()
        self.bytes = 0

    def get(self, thread_id: str, now: float) -> Kept[S] | None:
        """Return what is kept of a thread; None if nothing is, or the store must be asked again."""
        kept = self._kept.get(thread_id)
        return kept if kept is not None and now - kept.asked_at <= ASKED_FOR_S else None

    def keep(self, thread_id: str, read: Kept[S]) -> None:
        """Keep a state that was read, if its size allows."""
        self.forget(thread_id)
        if not 0 < read.size <= self._bytes_max:
            return
        self._kept[thread_id] = read
        self.bytes += read.size
        while self.bytes > self._bytes_max:
            self.forget(next(iter(self._kept)))

    def forget(self, thread_id: str) -> None:
        """Forget the thread, so that the next read asks the store."""
        kept = self._kept.pop(thread_id, None)
        if kept is not None:
            self.bytes -= kept.size

    def forget_all(self) -> None:
        """Forget all threads: the log is another one."""
        self._kept.clear()
        self.bytes = 0
