"""What a domain implements: what its entries mean. The buffer itself moves ids and bytes.

Three things, and no more. A *change* is what a flush writes of one thread; the domain makes it of many entries
(`Domain.coalesce`), and the store writes it (`Applies`). A *state* is a thread as a read shows it; the store gives it
together with the watermark that says how fresh it is (`StateReader`), and the domain puts changes on top of it
(`Domain.overlay`). A *memory* is what a writer keeps of a thread's content, so that its next entry can be a delta.

`bufstore.threads.domain` is the first one; `tests/unit/counters.py` the smallest.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from bufstore.buffer.chain import Watermark
from bufstore.buffer.entry import StoredEntry
from bufstore.buffer.target import Kind


class Change(Protocol):
    """What a flush writes of one thread."""

    @property
    def thread_id(self) -> str:
        """The thread that changes."""
        ...

    @property
    def gone(self) -> bool:
        """Whether nothing of the thread is left after the change."""
        ...


class Memory(Protocol):
    """What a writer keeps of a thread's content, to write deltas against. `prepare` may change it in place."""

    @property
    def weight(self) -> int:
        """About how many items it holds."""
        ...


class State(msgspec.Struct, frozen=True, kw_only=True):
    """A thread of one moment, as a read shows it, with the watermark that tells which moment. Domains add fields."""

    watermark: Watermark
    #: True when the state comes from the log alone, from a snapshot on: the thread may have earlier content.
    partial: bool = False
    #: True when the state comes from the log alone, from an entry on of which only the store knows whether it counts.
    unjudged: bool = False

    @property
    def whole(self) -> bool:
        """Whether the watermark is all that the store knows."""
        return not self.partial and not self.unjudged


C = TypeVar("C", bound=Change)
S = TypeVar("S", bound=State)
M = TypeVar("M", bound=Memory)
C_contra = TypeVar("C_contra", bound=Change, contravariant=True)
S_co = TypeVar("S_co", bound=State, covariant=True)


class Inapplicable(Exception):
    """An entry cannot be applied on any base: it is poison."""

    def __init__(self, entry_id: int, cause: str) -> None:
        super().__init__(cause)
        self.entry_id = entry_id


#: `Domain.coalesce`, for callers that need only that.
Coalesce = Callable[[str, int, Sequence[StoredEntry]], Change]


class Domain(Protocol[C, S, M]):
    """What the entries of one log mean. Pure: nothing here waits for anything."""

    def coalesce(self, thread_id: str, version: int, entries: Sequence[StoredEntry]) -> C:
        """One change that equals `entries`, in order, on a thread of this version. Raises Inapplicable."""
        ...

    def empty(self, thread_id: str, watermark: Watermark) -> S:
        """The state of a thread without content."""
        ...

    def overlay(self, state: S, thread_id: str, change: C, watermark: Watermark) -> S:
        """`state` once `change` is written, with the watermark that it has then."""
        ...

    def nothing(self) -> M:
        """What to remember of a thread without content."""
        ...

    def remember(self, state: S) -> M:
        """What to remember of a thread that was read."""
        ...

    def size(self, state: S) -> int:
        """About how many bytes a state takes that is kept for the next read; 0: it is not all that a read needs."""
        ...

    def observe(self, memory: M, entry: StoredEntry) -> None:
        """Bring the memory up to date with an entry that another writer appended."""
        ...


class Applies(Protocol[C_contra]):
    """The part of a store that a flush needs."""

    # The connection is the ledger's (of PostgresLedger a psycopg AsyncConnection); no type of ours describes them all.
    async def apply(self, connection: Any, batch: Sequence[C_contra]) -> None:
        """Write the changes, at most one per thread, in the ledger's transaction: all of them or none."""
        ...


class StateReader(Protocol[S_co]):
    """Reads a thread's state and its watermark, both of one moment."""

    async def state(self, thread_id: str) -> S_co:
        """The state; an empty one for a thread that does not exist. Raises StoreUnavailable, ReadNotFresh."""
        ...

    async def answers(self) -> None:
        """Return if the store answers a question that costs it little; raise whatever it raises if not."""
        ...


async def nothing_to_do() -> None:
    """What a store does that needs nothing done."""


#: Of threads: how many messages the store's row names, how many it holds (None: it has no such thread), and so on; see
#: `bufstore.buffer.operate.verify`.
Versions = Callable[[Sequence[str]], Awaitable[Mapping[str, tuple[int, int | None, int]]]]


@dataclass(frozen=True)
class Backing(Generic[S]):
    """What one store puts behind a buffer. A capability that it lacks is None: nobody asks for a store's class."""

    #: What may flush into the store: see `bufstore.buffer.target`.
    kind: Kind
    reader: StateReader[S]
    #: Called in this order when the buffer opens and closes the store with itself.
    open: Callable[[], Awaitable[None]] = nothing_to_do
    setup: Callable[[], Awaitable[None]] = nothing_to_do
    aclose: Callable[[], Awaitable[None]] = nothing_to_do
    #: Which of many threads the store has, in one question.
    held: Callable[[Sequence[str]], Awaitable[Collection[str]]] | None = None
    #: What `verify` compares with.
    versions: Versions | None = None
    #: Deletes the rows of these threads that pipelines set aside as unfit; how many there were.
    erase_set_aside: Callable[[Sequence[str]], Awaitable[int]] | None = None
