"""What a domain implements: it defines what its entries mean. The buffer itself moves ids and bytes.

A domain deals with three things, and no more. A *change* is what a flush writes for one thread; the domain folds many
entries into it (`Domain.coalesce`), and the store writes it (`Applies`). A *state* is a thread as a read shows it; the
store returns it together with the watermark that says how fresh it is (`StateReader`), and the domain puts changes on
top of it (`Domain.overlay`). A *memory* is what a writer keeps of a thread's content, so that its next entry can be a
delta.

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
    """What a flush writes for one thread."""

    @property
    def thread_id(self) -> str:
        """The thread that changes."""

    @property
    def gone(self) -> bool:
        """Whether nothing of the thread is left after the change."""

    @property
    def whole(self) -> bool:
        """Whether the change replaces the thread's content, so that its writer need not have known the thread."""


class Memory(Protocol):
    """What a writer keeps of a thread's content, to write deltas against. `prepare` may change it in place."""

    @property
    def weight(self) -> int:
        """About how many items the memory holds."""


class State(msgspec.Struct, frozen=True, kw_only=True):
    """A thread at one moment, as a read shows it, with the watermark that says which moment. Domains add fields."""

    watermark: Watermark
    #: True when the state comes from the log alone, from a snapshot on: the thread may have earlier content.
    partial: bool = False
    #: True when the state comes from the log alone, and only the store knows whether the entry it starts from counts.
    unjudged: bool = False

    @property
    def whole(self) -> bool:
        """Whether the watermark has everything that the store knows of the thread's chain."""
        return not self.partial and not self.unjudged

    @property
    def remembered(self) -> bool:
        """Whether it stands on what the store told once (`Backing.remembered`), not on what it tells now."""
        return False


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
        """Fold `entries`, in order, into one change to a thread of this version. Raises Inapplicable."""

    def empty(self, thread_id: str, watermark: Watermark) -> S:
        """Return the state of a thread without content."""

    def overlay(self, state: S, thread_id: str, change: C, watermark: Watermark) -> S:
        """Return `state` as it is once `change` is written; `watermark` is the new state's watermark."""

    def nothing(self) -> M:
        """Return the memory of a thread without content."""

    def remember(self, state: S) -> M:
        """Return the memory of a thread that was read as `state`."""

    def size(self, state: S) -> int:
        """Return about how many bytes `state` takes if it is kept for the next read; 0: a read needs more than it."""

    def observe(self, memory: M, entry: StoredEntry) -> None:
        """Bring the memory up to date with an entry that another writer appended, maybe not for the first time."""


class Applies(Protocol[C_contra]):
    """The part of a store that a flush needs."""

    # The connection is the ledger's (PostgresLedger has a psycopg AsyncConnection); none of our types covers them all.
    async def apply(self, connection: Any, batch: Sequence[C_contra]) -> None:
        """Write the changes, at most one per thread, in the ledger's transaction: all of them or none."""


class StateReader(Protocol[S_co]):
    """Reads a thread's state and its watermark, both as of one moment."""

    async def state(self, thread_id: str) -> S_co:
        """Return the thread's state; an empty one if it does not exist. Raises StoreUnavailable, ReadNotFresh."""

    async def answers(self) -> None:
        """Return if the store answers a cheap query; otherwise raise whatever the store raises."""


async def nothing_to_do() -> None:
    """Do nothing, for a store that needs nothing done."""


#: Returns for each of these threads the version in the watermark, the version in the store's row (None: the store has
#: no such thread), and how many messages the store has; see `bufstore.buffer.operate.verify`.
Versions = Callable[[Sequence[str]], Awaitable[Mapping[str, tuple[int, int | None, int]]]]


@dataclass(frozen=True)
class Backing(Generic[S]):
    """What one store puts behind a buffer. A capability that it lacks is None: nobody looks at a store's class."""

    #: The domain and the kind of store, which decide which logs may be flushed into it: see `bufstore.buffer.target`.
    kind: Kind
    reader: StateReader[S]
    #: While the store is away, returns the thread's state as it was told last; None: it is not known.
    remembered: Callable[[str], S | None] | None = None
    #: Called in this order as the buffer opens, prepares and closes the store.
    open: Callable[[], Awaitable[None]] = nothing_to_do
    setup: Callable[[], Awaitable[None]] = nothing_to_do
    aclose: Callable[[], Awaitable[None]] = nothing_to_do
    #: Returns which of these threads the store has, in one query.
    held: Callable[[Sequence[str]], Awaitable[Collection[str]]] | None = None
    #: Returns what `verify` compares the watermarks with.
    versions: Versions | None = None
    #: Deletes the rows of these threads that pipelines set aside as unfit; returns how many there were.
    erase_set_aside: Callable[[Sequence[str]], Awaitable[int]] | None = None
