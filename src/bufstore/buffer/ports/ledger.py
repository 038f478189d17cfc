"""The ledger: watermarks, cursors, terms, quarantine and waiting entries, and what a flush transaction writes of them.

Adapters: `bufstore.postgres.ledger.ledger`, `bufstore.memory.ledger`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol

import msgspec

from bufstore.buffer.chain import Parked, Watermark
from bufstore.buffer.domain import Change
from bufstore.buffer.flush.verdict import Verdict
from bufstore.buffer.lanes import Layout
from bufstore.buffer.operate.replay import ParkedEntry, ReplayPlan
from bufstore.buffer.ports.waiting import WaitingEntries, WaitingEntry
from bufstore.buffer.target import Made, Target


@dataclass(frozen=True)
class Cursor:
    """The position up to which everything of a partition is applied, parked or waiting, and the term of its owner."""

    partition: int
    term: int
    seq: int
    id: int


def passed_by_all(cursors: Mapping[int, Cursor], partitions: int) -> int:
    """The position that the cursors of all partitions have passed; 0 while one has none."""
    return min(cursors[p].seq if p in cursors else 0 for p in range(partitions))


@dataclass
class Decision:
    """What one flush transaction writes, decided while the rows are locked."""

    #: One per thread.
    batch: Sequence[Change] = ()
    watermarks: Mapping[str, Watermark] = field(default_factory=dict)
    parked: Sequence[Parked] = ()
    #: The entries that begin to wait. Every earlier entry of their threads above the watermark begins, too, or waits
    #: already.
    waiting: Sequence[WaitingEntry] = ()
    #: By thread, the position up to which its entries wait no more.
    left: Mapping[str, int] = field(default_factory=dict)
    #: The partitions' new cursors.
    cursors: Sequence[Cursor] = ()


class NotOwner(Exception):
    """Another owner has taken the partition: everything in memory for it is void."""

    def __init__(self, partition: int, found: object, ours: object) -> None:
        super().__init__(f"the row of partition {partition} is {found}, not {ours}")
        self.partition = partition


class FlushFailed(Exception):
    """A flush transaction failed and changed nothing (or its outcome is unknown, which a retry finds out)."""

    def __init__(self, message: str, verdict: Verdict, *, cause: str = "", of_batch: bool = True) -> None:
        super().__init__(message)
        self.verdict = verdict
        #: A text that is the same for all entries that are refused for the same reason.
        self.cause = cause or message
        #: Whether the store's write failed, not a write to the buffer's own tables.
        self.of_batch = of_batch


def need_all(threads: Collection[str], watermarks: Mapping[str, Watermark]) -> None:
    """For callers that need all threads: raise FlushFailed unless all threads have a watermark here."""
    held = len(set(threads) - watermarks.keys())
    if held:
        raise FlushFailed(f"other sessions hold the rows of {held} of {len(threads)} threads", Verdict.LOCKED)


@dataclass(frozen=True)
class Flushed:
    """What a flush transaction committed, and which threads it left out, as if they had not been given."""

    decision: Decision
    #: The threads whose rows other sessions hold.
    locked: Set[str] = frozenset()
    #: The threads whose changes the store refuses, and why.
    refused: Mapping[str, FlushFailed] = field(default_factory=dict)
    #: The threads that were not tried, because enough others were refused before.
    untried: Set[str] = frozenset()


class QuarantineFull(Exception):
    """A flush would park more entries than there is space for; nothing was changed."""

    def __init__(self, room: int, limit: int) -> None:
        super().__init__(
            f"the quarantine is full (BufferConfig.quarantine_max = {limit}): replay or discard what is in it, "
            "or raise the limit"
        )
        self.room = room


class QuarantineBusy(QuarantineFull):
    """Another session parks entries and has not committed: the space left is unknown."""

    def __init__(self) -> None:
        Exception.__init__(self, "another flusher puts entries into quarantine and has not committed")
        self.room = 0


class ParkedInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the quarantine's list."""

    seq: int
    #: None when even the subject names no thread.
    thread_id: str | None
    #: None when it could not be decoded.
    entry_id: int | None
    cause: str
    bytes: int
    #: SHA-256 of the kept entry.
    hash: str
    parked_at: datetime
    #: True when the thread has gone on without the entry, which can no longer be replayed.
    superseded: bool


class ParkedEntries(Protocol):
    """The entries in quarantine. Raises what their ledger raises."""

    async def page(self, after: int, thread_id: str | None, limit: int) -> list[ParkedInfo]:
        """Entries above a position (of one thread, if it is given), oldest first."""

    async def entry(self, seq: int) -> ParkedEntry | None:
        """The entry that stood at a position, whole."""

    async def of_thread(self, thread_id: str, start: int) -> list[ParkedEntry]:
        """The thread's entries from a position on, oldest first, whole: only the first ones if there are many."""

    async def present(self, seqs: Sequence[int]) -> set[int]:
        """Those of these positions whose entries are in quarantine."""

    async def threads(self, after: str, limit: int) -> list[str]:
        """Threads behind `after` that have entries in quarantine, in order."""

    async def ends(self) -> dict[str, int]:
        """The position of the last entry in quarantine of each thread that has some."""

    async def replay(
        self, thread_id: str, start: int, decide: Callable[[Watermark, Sequence[ParkedEntry]], Replay]
    ) -> Replay:
        """One transaction: lock the thread's row, `decide` on it and on some of its entries from a position on, write.

        An exception of `decide` rolls back and passes through.
        """

    async def discard(self, seqs: Sequence[int]) -> int:
        """Delete these entries. Returns how many were deleted: an entry that a replay applies meanwhile is not.

        A thread without parked entries is whole again.
        """


@dataclass(frozen=True)
class Replay:
    """What one replay transaction writes."""

    plan: ReplayPlan
    #: The domain's change that equals the applied entries; None if none is.
    change: Change | None


class Ledger(Protocol):
    """Where the truth about flushing lives: watermarks, cursors, terms, quarantine, waiting entries.

    Raises FlushFailed for any error of the database, StoreUnavailable when it cannot be reached.
    """

    async def open(self) -> None:
        """Get ready; the database need not be up."""

    @property
    def connections(self) -> int:
        """How many connections to the database this process has made. Behind a new one may be an older copy of it."""

    @property
    def changes_of_database(self) -> int:
        """How often one that was used led to another database than the last: a copy, or after its server's restart."""

    async def server_run(self) -> str:
        """Which run of which server answers: another one after a restart, and after a failover."""

    async def setup(self, away_s: float | None = None) -> None:
        """Create or migrate the tables. `away_s`: how long to wait for a database that cannot be reached; None: long.

        One that can be reached and is busy (another process migrates) is waited for in any case.
        """

    async def look(self) -> bool:
        """Return whether there are tables. From now on none are made or migrated, whatever is called.

        Raises ConfigError for tables with which this release cannot work as they are: those of an older release, too.
        """

    async def epoch(self) -> int | None:
        """The generation of the stream that the rows belong to; None before the first."""

    async def set_epoch(self, epoch: int) -> None:
        """Remember the generation of the stream before it is created."""

    async def target(self) -> Target | None:
        """The target of the log that this database names; None: not written down yet."""

    async def claim(self, epoch: int, target: Target) -> Target:
        """Write down the target unless one is, and the generation like `set_epoch`. Returns the target that stands."""

    async def layout(self) -> Layout | None:
        """How the log that this database names shares out its threads; None: not written down yet."""

    async def set_layout(self, layout: Layout) -> None:
        """Write down the layout unless one is; the log's generation is known already."""

    async def made(self) -> Made | None:
        """The last log that is known to have existed; None: none is."""

    async def note_made(self, made: Made) -> None:
        """Remember a log that exists, unless a later one or another one of its generation has existed."""

    async def begin_erasure(self, thread_id: str, descendants: Collection[str]) -> list[str]:
        """Remember the threads that go with one that is erased. Returns them with those that are remembered already."""

    async def end_erasure(self, thread_id: str, descendants: Collection[str]) -> None:
        """Forget these descendants: they are erased. Those that were remembered meanwhile stay."""

    async def take(self, partitions: Sequence[int], owner: str) -> list[Cursor]:
        """Raise the terms: from now on only this owner may commit for these partitions.

        Waits for nobody: partitions whose rows other sessions hold are not taken, and are left out. A flush that holds
        them and stands still for longer than it may (`flush`, `size`) is ended, for the next call. Raises
        StoreUnavailable when that is not allowed here.
        """

    async def cursors(self) -> dict[int, Cursor]:
        """All partitions' cursors."""

    async def flushed(self) -> dict[int, int]:
        """Per partition, up to where everything is applied or parked: its cursor, or before the first that waits."""

    async def watermark(self, thread_id: str) -> Watermark:
        """The thread's watermark; an empty one if it has none. With `waits_to`, as of the same moment."""

    async def watermarks(self, thread_ids: Sequence[str]) -> dict[str, tuple[Watermark, int]]:
        """The threads' watermarks, as in `watermark`, each with the position up to which entries were discarded.

        Threads that have neither a row nor entries that wait are left out.
        """

    async def broken(self) -> frozenset[str]:
        """The threads whose chain is broken: at most as many as there are entries in quarantine."""

    async def flush(
        self,
        held: Sequence[Cursor],
        threads: Sequence[str],
        decide: Callable[[Mapping[str, Watermark]], Decision],
        *,
        probe: int = 0,
        size: int = 0,
    ) -> Flushed:
        """One transaction: check terms and cursors, lock the threads' rows, `decide` on those, write, commit.

        `size`: bytes of payload, for which the transaction may take longer; without them it ends within the lease if
        this process stands still.
        A thread whose row another session holds is not waited for: `decide` does not get its watermark. `probe`, if not
        0: find the threads to blame for a batch that cannot be written, and call `decide` again without them. The other
        threads are not tried any more once more threads are refused than written, and `probe` are, or it takes long.

        Raises NotOwner when a partition's row is not as `held` says: another owner has taken it, or Postgres has gone
        back to an earlier state; QuarantineFull. An exception of `decide` rolls back and passes through.
        """

    async def tombstones(self, below: int, after: str, limit: int) -> list[tuple[int, str]]:
        """Watermark and id of deleted threads whose watermark is below a position.

        In the order of the ids, those behind `after`.
        """

    async def bury(self, tombstones: Sequence[tuple[int, str]]) -> None:
        """Remove these rows, except of threads that were written again meanwhile, are in quarantine, or wait."""

    async def archived(self) -> int:
        """The position below which an archive has the log; 0: it has nothing."""

    async def set_archived(self, position: int) -> None:
        """Remember the position, unless a later one is known."""

    async def begin_archiving(self, position: int) -> None:
        """Remember that a run has begun after which an archive has the log below this position."""

    async def may_be_archived(self) -> int:
        """The position below which an archive may have the log: a run has ended there, or has begun, and may have died.

        0: no archive has anything.
        """

    async def quarantined(self) -> int:
        """How many entries are in quarantine."""

    @property
    def parked(self) -> ParkedEntries:
        """The entries in quarantine."""

    @property
    def waiting(self) -> WaitingEntries:
        """The entries that wait for their threads' turn."""

    async def aclose(self) -> None:
        """Release connections."""
