"""A thread's tip: its last entry as a writer knows it, and what the next entry is drafted from."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic

import msgspec

from bufstore.buffer.chain import Watermark
from bufstore.buffer.domain import M
from bufstore.buffer.entry import Base, StoredEntry, decode
from bufstore.errors import MalformedEntry
from bufstore.jetstream.messages import StoredMessage


# No tip is part of a cycle. Every write makes one and ten thousand threads keep one, so spare the collector the work.
class Tip(msgspec.Struct, Generic[M], gc=False, eq=False):
    """A thread's last entry, as a writer knows it; what the next entry builds on."""

    #: The expected last sequence of the subject; 0: the log shows nothing.
    seq: int
    id: int
    base: Base
    seen: int
    version: int
    keys: bytes
    #: None when the content is unknown here: only a self-contained entry can follow, unless the tip is `judged`.
    memory: M | None
    #: The position since which the thread's chain is broken, so that only a self-contained entry can be applied; 0: it
    #: is not.
    broken_since: int = 0
    keys_complete: bool = True
    #: The highest numbers of the thread's producers; None while they are unknown.
    producers: bytes | None = None
    #: The position that a read must reach to see what this tip stands for; 0: that is `seq`, or there is nothing.
    flushed_seq: int = 0
    #: When the log was asked (`bufstore.elapsed`) if it shows nothing of the thread; else 0.
    asked_at: float = 0.0
    #: True when everything up to this entry is applied, as Postgres has said, or will be, as the log shows: a draft
    #: that needs no more than the thread's version can follow.
    judged: bool = False
    #: The entry itself (without its payload) when it expected nothing in the log: only the watermark in Postgres tells
    #: whether it counts (`bufstore.buffer.chain.counts`), so its keys and producers are not used.
    first: StoredEntry | None = None

    @property
    def goes_on(self) -> bool:
        """Whether the entries that others append behind this tip suffice to make the next one: nothing is looked up."""
        return self.memory is not None or self.judged


class NeedBase(Exception):
    """Raised by `prepare`: this write cannot be built without the thread's content."""


class NeedVersion(Exception):
    """Raised by `prepare`: this write cannot be built behind a tip that is not `judged` and whose content is unknown.

    Behind a tip that is judged, or whose content is known, `prepare` must not raise it.
    """


class Draft(msgspec.Struct, Generic[M], frozen=True, gc=False, eq=False):
    """What `prepare` makes of a tip."""

    payload: bytes
    self_contained: bool
    version: int
    memory: M | None
    #: Undoes what `prepare` changed in the memory.
    undo: Callable[[], object]


Prepare = Callable[[Tip[M]], Draft[M]]


def tip_of_message(last: StoredMessage) -> Tip[M]:
    """The tip that a thread's last message in the log makes; its content is not known.

    An entry that expected nothing there may be superseded, and then its keys were never used: only a writer that has
    asked Postgres may pass them on.
    """
    try:
        entry = decode(last)
    except MalformedEntry:
        return Tip(last.seq, 0, Base.CHAINED, 0, 0, b"", None, broken_since=last.seq, keys_complete=False)
    if entry.base is not Base.CHAINED:
        first = StoredEntry("", last.seq, msgspec.structs.replace(entry, payload=b""))
        return Tip(last.seq, entry.id, Base.CHAINED, 0, entry.version, b"", None, keys_complete=False, first=first)
    return Tip(
        last.seq,
        entry.id,
        Base.CHAINED,
        0,
        entry.version,
        entry.keys,
        None,
        keys_complete=entry.keys_complete,
        producers=entry.producers,
    )


def tip_in_log(seq: int, watermark: Watermark, memory: M | None) -> Tip[M]:
    """The tip of a thread whose last entry in the log stands at `seq`; `watermark`: that of all entries up to there."""
    return Tip(
        seq=seq,
        id=watermark.applied_id,
        base=Base.CHAINED,
        seen=0,
        version=watermark.version,
        keys=watermark.keys,
        memory=memory,
        broken_since=watermark.broken_since or 0,
        producers=watermark.producers,
    )


def tip_of_row(watermark: Watermark, seen: int, asked_at: float, memory: M | None) -> Tip[M]:
    """The tip of a thread that the log does not show, from what Postgres holds.

    The row of a deleted thread may be removed at any time: an entry that expects its predecessor there would not find
    it. So the entry expects nothing, like one whose writer did not look.
    """
    base = Base.STORED if watermark.flushed_seq else Base.NONE
    return Tip(
        seq=0,
        id=watermark.applied_id,
        base=Base.UNKNOWN if watermark.gone else base,
        seen=max(seen, watermark.flushed_seq),
        version=watermark.version,
        keys=watermark.keys,
        memory=memory,
        broken_since=watermark.broken_since or 0,
        producers=watermark.producers,
        flushed_seq=watermark.flushed_seq,
        asked_at=asked_at,
    )


def tip_of_judged(watermark: Watermark, last: int, seen: int, asked_at: float) -> Tip[M] | None:
    """The tip, without content, if the watermark covers all that the log shows of the thread; None if it does not.

    `watermark`: as Postgres has it, or will have it once the log is flushed. `last`: the position of the thread's last
    entry in the log, read before the watermark; 0: the log shows none.
    """
    if watermark.gone or watermark.waits_to or watermark.broken_since is not None or not watermark.applied_id:
        return None
    if last and last != watermark.flushed_seq:
        return None
    tip: Tip[M] = tip_in_log(last, watermark, None) if last else tip_of_row(watermark, seen, asked_at, None)
    tip.judged = True
    return tip


def tip_unknown(seen: int, asked_at: float) -> Tip[M]:
    """The tip of a thread that the log does not show, when Postgres was not asked."""
    return Tip(0, 0, Base.UNKNOWN, seen, version=0, keys=b"", memory=None, keys_complete=False, asked_at=asked_at)


class TipCache(Generic[M]):
    """The tips of the threads written last: at most `threads`, and at most `weight` remembered items in all."""

    def __init__(self, threads: int, weight: int) -> None:
        self._threads_max = threads
        self._weight_max = weight
        # The weight is kept beside the tip: the memory grows with the next draft, before anybody counts it again.
        self._tips: OrderedDict[str, tuple[Tip[M], int]] = OrderedDict()
        self._weight = 0

    def get(self, thread_id: str) -> Tip[M] | None:
        """The thread's tip, if it is remembered."""
        found = self._tips.get(thread_id)
        return found[0] if found is not None else None

    def all(self) -> list[tuple[str, Tip[M]]]:
        """Every thread that is remembered, with its tip."""
        return [(thread_id, tip) for thread_id, (tip, _) in self._tips.items()]

    def put(self, thread_id: str, tip: Tip[M]) -> None:
        """Remember the tip. Beyond the limits, forget the threads that were written longest ago."""
        tips, weight = self._tips, tip.memory.weight if tip.memory is not None else 1
        if (before := tips.get(thread_id)) is not None:
            tips.move_to_end(thread_id)
            self._weight -= before[1]
        tips[thread_id] = tip, weight
        self._weight += weight
        while len(tips) > self._threads_max or self._weight > self._weight_max:
            self.drop(next(iter(tips)))

    def drop(self, thread_id: str) -> None:
        """Forget the thread's tip."""
        found = self._tips.pop(thread_id, None)
        if found is not None:
            self._weight -= found[1]
