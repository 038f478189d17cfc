"""The smallest domain: a counter for each key. Each entry adds a number to it, or sets it (which needs no base)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from bufstore.buffer.append.tip import Draft, NeedBase, Prepare, Tip
from bufstore.buffer.buffer import Buffer
from bufstore.buffer.chain import Watermark
from bufstore.buffer.domain import Backing, Inapplicable, State
from bufstore.buffer.entry import StoredEntry
from bufstore.buffer.target import Kind
from bufstore.config import BufferConfig
from bufstore.errors import AlreadyExists
from bufstore.memory import MemoryNats
from bufstore.memory.ledger import MemoryLedger


class Add(msgspec.Struct, frozen=True):
    """The content of an entry: it adds `amount` to the counter, or (self-contained) sets it to `amount`."""

    amount: int
    sets: bool = False


class CounterChange(msgspec.Struct, frozen=True):
    """What a flush writes of one counter."""

    thread_id: str
    amount: int
    sets: bool
    gone: bool = False

    @property
    def whole(self) -> bool:
        return self.sets


class Counter(State, frozen=True, kw_only=True):
    """A counter as a read shows it."""

    value: int = 0


class Known(msgspec.Struct):
    """What a writer remembers of a counter."""

    value: int
    weight: int = 1


_encode, _decode = msgspec.json.Encoder().encode, msgspec.json.Decoder(Add).decode


class Counters:
    """See `bufstore.buffer.domain.Domain`."""

    def coalesce(self, thread_id: str, version: int, entries: Sequence[StoredEntry]) -> CounterChange:
        amount, sets = 0, False
        for stored in entries:
            try:
                add = _decode(stored.entry.payload)
            except msgspec.MsgspecError as e:
                raise Inapplicable(stored.entry.id, str(e)) from e
            amount, sets = (add.amount, True) if add.sets else (amount + add.amount, sets)
        return CounterChange(thread_id, amount, sets)

    def empty(self, thread_id: str, watermark: Watermark) -> Counter:
        return Counter(watermark=watermark)

    def overlay(self, state: Counter, thread_id: str, change: CounterChange, watermark: Watermark) -> Counter:
        return Counter(watermark=watermark, value=change.amount + (0 if change.sets else state.value))

    def nothing(self) -> Known:
        return Known(0)

    def size(self, state: Counter) -> int:
        return 8

    def remember(self, state: Counter) -> Known:
        return Known(state.value)

    def observe(self, memory: Known, entry: StoredEntry) -> None:
        add = _decode(entry.entry.payload)
        memory.value = add.amount + (0 if add.sets else memory.value)


class CounterStore:
    """A store in memory that refuses some values."""

    def __init__(self) -> None:
        self.values: dict[str, int] = {}
        self.refused: set[int] = set()
        self.ledger = MemoryLedger(self)

    async def apply(self, connection: Any, batch: Sequence[CounterChange]) -> None:
        after = {c.thread_id: c.amount + (0 if c.sets else self.values.get(c.thread_id, 0)) for c in batch}
        if wrong := self.refused.intersection(after.values()):
            raise AlreadyExists(f"{wrong} cannot be held")
        self.values |= after

    async def state(self, thread_id: str) -> Counter:
        return Counter(watermark=await self.ledger.watermark(thread_id), value=self.values.get(thread_id, 0))

    async def answers(self) -> None:
        pass

    def buffer(self, nats: MemoryNats, config: BufferConfig) -> Buffer[CounterChange, Counter, Known]:
        """A buffer in front of this store."""
        return Buffer(Counters(), nats.session(config), self.ledger, Backing(Kind("counters", "test"), self), config)


def adding(amount: int) -> Prepare[Known]:
    """An entry that adds to the counter; its writer must know the counter's value."""

    def draft(tip: Tip[Known]) -> Draft[Known]:
        if tip.memory is None:
            raise NeedBase
        return _draft(tip, tip.memory, Add(amount))

    return draft


def setting(amount: int) -> Prepare[Known]:
    """An entry that needs no base."""
    return lambda tip: _draft(tip, tip.memory or Known(0), Add(amount, sets=True))


def _draft(tip: Tip[Known], memory: Known, add: Add) -> Draft[Known]:
    before = memory.value
    memory.value = add.amount + (0 if add.sets else before)
    undo: Callable[[], object] = lambda: setattr(memory, "value", before)  # noqa: E731
    return Draft(_encode(add), add.sets, tip.version + 1, memory, undo)
