"""A thread's tip: its last entry as a writer knows it, and what the next entry is drafted from."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import msgspec

from bufstore.buffer.chain import Watermark
from bufstore.buffer.entry import Base, StoredEntry, decode
from bufstore.errors import MalformedEntry
from bufstore.jetstream.messages import StoredMessage


class Memory(Protocol):
    """What a domain remembers of a thread's content, to write deltas against."""

    @property
    def weight(self) -> int:
        """About how many items it holds."""
        ...


M = TypeVar("M", bound=Memory)


# Neither is part of a cycle: of what each write makes, and of ten thousand threads is kept, Python need not look at it.
class Tip(msgspec.Struct, Generic[M], gc=False, eq=False):
    """A thread's last entry, as a writer knows it; what the next entry builds on."""

    #: The expected last sequence of the subject; 0: the log shows nothing.
    seq: int
    id: int
    base: Base
    seen: int
    version: int
    keys: bytes
    #: None when the content is not known here: only a self-contained entry can follow.
    memory: M | None
    #: True when the thread's chain is broken: only a self-contained entry can be applied.
    broken: bool = False
    keys_complete: bool = True
    #: The highest numbers of the thread's sources; None while they are not known.
    producers: bytes | None = None
    #: Where a read must have got to see what this tip stands for, when that is not `seq`.
    flushed_seq: int = 0
    #: Of a thread of which the log shows nothing: when it was asked (`bufstore.buffer.elapsed`).
    asked_at: float = 0.0
    #: The entry itself (without its payload) when it expected nothing in the log: whether it counts only Postgres' row
    #: tells (`bufstore.buffer.chain.counts`), so `ring` and `sources` are not taken from it.
    first: StoredEntry | None = None


class NeedBase(Exception):
    """Raised by `prepare`: this write cannot be built without the thread's content."""


class Draft(msgspec.Struct, Generic[M], gc=False, eq=False):
    """What `prepare` makes of a tip."""

    payload: bytes
    self_contained: bool
    version: int
    memory: M | None
    #: Takes back what `prepare` changed in the memory.
    undo: Callable[[], object]


Prepare = Callable[[Tip[M]], Draft[M]]


def tip_of_message(last: StoredMessage) -> Tip[M]:
    """The tip that a thread's last message in the log makes; its content is not known.

    One that expected nothing there may be superseded, and then no key in it was used: nobody may pass its keys on
    who has not asked Postgres.
    """
    try:
        entry, _, _ = decode(last)
    except MalformedEntry:
        return Tip(last.seq, 0, Base.CHAINED, 0, 0, b"", None, broken=True, keys_complete=False)
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


def tip_of_row(watermark: Watermark, seen: int, asked_at: float, memory: M | None) -> Tip[M]:
    """The tip of a thread of which the log shows nothing, from what Postgres holds.

    The row of a deleted thread may be removed at any time: an entry that asked for its predecessor there would not find
    it. So it asks for nothing, as one that did not look.
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
        broken=watermark.broken_since is not None,
        producers=watermark.producers,
        flushed_seq=watermark.flushed_seq,
        asked_at=asked_at,
    )


def tip_unknown(seen: int, asked_at: float) -> Tip[M]:
    """The tip of a thread of which the log shows nothing, and Postgres was not asked."""
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

    def put(self, thread_id: str, tip: Tip[M]) -> None:
        """Remember the tip, forget what was written longest ago."""
        weight = tip.memory.weight if tip.memory is not None else 1
        before = self._tips.get(thread_id)
        self._tips[thread_id] = tip, weight
        if before is not None:
            self._tips.move_to_end(thread_id)
            weight -= before[1]
        self._weight += weight
        while len(self._tips) > self._threads_max or self._weight > self._weight_max:
            self.drop(next(iter(self._tips)))

    def drop(self, thread_id: str) -> None:
        """Forget the thread's tip."""
        found = self._tips.pop(thread_id, None)
        if found is not None:
            self._weight -= found[1]
