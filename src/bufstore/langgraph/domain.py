"""What the entries of a log of LangGraph checkpoints mean: see `bufstore.buffer.domain.Domain`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from bufstore.buffer.chain import Watermark
from bufstore.buffer.domain import Inapplicable, State
from bufstore.buffer.entry import StoredEntry
from bufstore.langgraph.model import LangGraphChange, Operation
from bufstore.langgraph.payload import decode_payload

#: The domain's name, which the log keeps.
DOMAIN = "langgraph"

#: Where the rows come from that a tail stands on: see `Tail.base`.
STORE, LOG, CACHE = "store", "log", "cache"


class Tail(State, frozen=True, kw_only=True):
    """What the log holds of a thread above what a store has.

    A thread with all of its history is too large to be read whole. So a state of this domain has no rows: a read puts
    the operations on the rows that it asked for (`bufstore.langgraph.reads`).
    """

    operations: tuple[tuple[int, Operation], ...] = ()
    #: What the operations stand on: the store's rows, nothing (they are all that there is), or rows read earlier.
    base: str = LOG
    #: The position that those rows have reached at least.
    base_seq: int = 0
    #: True when the store has nothing of the thread, and never had anything that came from this log.
    new: bool = False

    @property
    def remembered(self) -> bool:
        """See `State.remembered`."""
        return self.base == CACHE


def stored_tail(watermark: Watermark, *, there: bool) -> Tail:
    """Return the state that a store answers with. `there`: it has rows of the thread, whoever has written them."""
    new = not there and (watermark.gone or not watermark.flushed_seq) and not watermark.waits_to
    return Tail(watermark=watermark, base=STORE, base_seq=watermark.flushed_seq, new=new)


_new_life = itertools.count().__next__


class Known(msgspec.Struct, gc=False):
    """What a writer remembers of a thread: that it was looked at."""

    #: True when the thread is known only from an earlier read, because the store is away.
    cached: bool = False
    #: True when there is nothing of the thread anywhere.
    new: bool = False
    #: True when the thread's last entry is one of this process.
    own: bool = False
    #: A number that changes whenever somebody else may have written to the thread.
    life: int = msgspec.field(default_factory=_new_life)
    weight: int = 1


class LangGraphDomain:
    """Threads of checkpoints, blobs and writes."""

    def coalesce(self, thread_id: str, version: int, entries: Sequence[StoredEntry]) -> LangGraphChange:
        operations: list[tuple[int, Operation]] = []
        for stored in entries:
            try:
                operation = decode_payload(stored.entry.payload)
            except ValueError as e:
                raise Inapplicable(stored.entry.id, str(e)) from e
            operations.append((stored.seq, operation))
        return LangGraphChange(thread_id, tuple(operations))

    def empty(self, thread_id: str, watermark: Watermark) -> Tail:
        return Tail(watermark=watermark)

    def overlay(self, state: Tail, thread_id: str, change: LangGraphChange, watermark: Watermark) -> Tail:
        return msgspec.structs.replace(state, watermark=watermark, operations=(*state.operations, *change.operations))

    def nothing(self) -> Known:
        return Known(new=True)

    def size(self, state: Tail) -> int:
        return 0  # a state is only the tail; `bufstore.langgraph.recent` keeps the rows below it

    def remember(self, state: Tail) -> Known:
        return Known(cached=state.base == CACHE, new=state.new and not state.operations)

    def observe(self, memory: Known, entry: StoredEntry) -> None:
        memory.cached = memory.new = memory.own = False
        memory.life = _new_life()


LANGGRAPH = LangGraphDomain()
