"""What the buffer needs of the outside: a log, a hot state, a ledger; and what it needs of its domain.

Adapters: `bufstore.nats` (log, hot state), `bufstore.postgres.ledger`, `bufstore.memory`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple, Protocol

import msgspec

from bufstore.buffer.chain import Parked, Row
from bufstore.buffer.entry import StoredEntry, StoredMessage
from bufstore.buffer.replay import ParkedEntry, ReplayPlan
from bufstore.buffer.target import Target
from bufstore.buffer.verdict import Verdict
from bufstore.buffer.windows import Windows

#: How long a run's id is kept in the hot state: to find the run until Postgres has it, and to refuse its id to others.
RUN_TTL_S = 7 * 24 * 3600


class Outgoing(msgspec.Struct, frozen=True, gc=False):
    """One message to be written."""

    subject: str
    body: bytes
    #: Value of the entry header, if it carries one.
    header: str | None = None
    #: The subject's last sequence that the write requires; None requires nothing.
    expected: int | None = None
    #: The subject that `expected` is about, if it is not its own.
    expected_of: str | None = None
    #: Seconds after which the server removes it; 0 keeps it.
    ttl_s: int = 0


class Conflict(Exception):
    """A subject has another last message than expected. Nothing of the batch was stored."""


class BatchRefused(Exception):
    """The server takes no (such) batch now. Nothing was stored; single messages may still go through."""


class AppendUnknown(Exception):
    """Sent, and no answer: it may be stored or not."""


class BegunBatch(NamedTuple):
    """A batch whose first message was sent already."""

    id: str
    #: The connection that it was sent on: the rest must follow there.
    client: object


class Stream(Protocol):
    """One JetStream stream, seen as a writer and reader of subjects.

    Writes raise Conflict, BatchRefused, AppendUnknown, LogFull or LogUnavailable (certainly not stored).
    """

    @property
    def message_bytes_max(self) -> int:
        """The server's max_payload: headers and body of one message."""
        ...

    async def publish(self, message: Outgoing, timeout_s: float) -> int:
        """Store one message durably; its sequence."""
        ...

    async def publish_each(
        self, messages: Sequence[Outgoing], timeout_s: float, ended: Callable[[int, int | Exception], None]
    ) -> None:
        """Store the messages one by one, side by side; returns when all have ended.

        `ended` is called with the number and the sequence, or the error that `publish` would raise, of each. Raises
        nothing else than a BufstoreError, when nothing was sent.
        """
        ...

    def begin_batch(self, first: Outgoing) -> BegunBatch | None:
        """Send the first message of a batch already, if that is possible now; the rest must follow soon.

        The server makes room for a batch when its first message arrives. Never followed by a rest, it is forgotten.
        """
        ...

    async def publish_batch(
        self, messages: Sequence[Outgoing], timeout_s: float, begun: BegunBatch | None = None
    ) -> int:
        """Store all messages or none, as neighbours; the sequence of the last. `begun`: with the first of them."""
        ...

    async def last(self, subjects: Sequence[str], timeout_s: float) -> dict[str, StoredMessage]:
        """The last message of each subject (wildcards allowed); subjects that have none are left out."""
        ...

    async def after(self, subject: str, seq: int, timeout_s: float, limit: int = 0) -> list[StoredMessage]:
        """The subject's messages above `seq`, in order; at most `limit` of them if it is not 0."""
        ...


class Feed(Protocol):
    """The messages of one partition from a position on, in order, without a hole, until it is lost."""

    @property
    def lost(self) -> str | None:
        """Why the feed can deliver no more (a hole, a lost connection, a deleted consumer), or None."""
        ...

    def take(self) -> list[StoredMessage]:
        """What has arrived since the last call."""
        ...

    async def more(self) -> None:
        """Deliver on although the bounds are reached: what was delivered is the beginning of an oversize entry."""
        ...

    @property
    def crowded(self) -> bool:
        """Whether half of what may be delivered and not acknowledged is: see `go_on`."""
        ...

    async def go_on(self, seq: int) -> None:
        """Deliver on although what stands up to this sequence is not acknowledged: it is not kept in memory.

        Raises LogUnavailable, ConfigError; then nothing has changed.
        """
        ...

    async def ack(self, seq: int) -> None:
        """Tell the server that everything up to the message with this sequence is done."""
        ...

    async def close(self) -> None:
        """Stop and remove the consumer."""
        ...


class Held(NamedTuple):
    """What a log holds at one moment, roughly: it may be written to meanwhile."""

    #: Bytes it holds, and may hold.
    bytes: int
    limit: int
    #: How many messages that are, and how many of them stand above the positions that were asked about.
    messages: int
    above: int
    #: The last position.
    end: int


class Generations(Protocol):
    """The log as something that is made, looked at and taken out of service, one generation (epoch) at a time.

    Raises ConfigDrift when it is not as configured, LogUnavailable.
    """

    async def epoch(self, *, checked: bool = True) -> int | None:
        """The stream's epoch; None if there is no stream. `checked`: it must be as it is configured, and in service."""
        ...

    async def bounds(self) -> tuple[int, int]:
        """The first sequence that is (or will be) in the log, and the last."""
        ...

    async def create(self, epoch: int, target: Target) -> None:
        """Create the stream as generation `epoch`, to be flushed there; a no-op if another process was faster."""
        ...

    @property
    def target(self) -> Target | None:
        """Where the log is flushed to, as it said when `epoch` looked; None: it does not say."""
        ...

    async def set_target(self, target: Target) -> None:
        """Make a log of before say where it is flushed to, and all else that a new one says.

        Raises LogUnavailable, also when somebody changed it at the same time.
        """
        ...

    async def withdraw(self, common: Sequence[int]) -> Sequence[int]:
        """Take the stream out of service: it can be read, and takes no more entries.

        Remembers `common`, a position per partition; if it was taken out of service before, those of then are returned.
        """
        ...

    async def remove(self) -> None:
        """Delete the stream and all that is in it; a no-op if it is gone."""
        ...


class Log(Stream, Generations, Protocol):
    """The stream of entries."""

    @property
    def generation_start(self) -> int:
        """The first position of this generation of the stream; cursors below it speak of an earlier one."""
        ...

    @property
    def windows(self) -> Windows:
        """What flushers and writers must agree on, as the log said when it was looked at last.

        It is looked at by `epoch`, `end` and `fill`; before that, as it is configured.
        """
        ...

    async def set_windows(self, windows: Windows) -> None:
        """Change what the log says of them. Raises LogUnavailable, also when somebody changed it at the same time."""
        ...

    async def end(self, timeout_s: float) -> int:
        """The last sequence of the log, asked now."""
        ...

    async def ends(self, filters: Sequence[str], timeout_s: float) -> list[int]:
        """The last sequence that matches each filter (wildcards allowed), from the leader; 0 for none."""
        ...

    async def feed(self, partition: int, term: int, start: int, wake: Callable[[], None]) -> Feed:
        """Deliver the partition from sequence `start`; `wake` is called when something arrived or was lost."""
        ...

    async def prove_leader(self, timeout_s: float) -> None:
        """Return once the log's leader has proved that it leads: what it shows from now on is not old.

        On a replicated log only; a single server always knows. It leaves nothing in the log. Raises AppendUnknown,
        LogUnavailable.
        """
        ...

    async def barrier(self, timeout_s: float) -> int:
        """The same, with a proof that says where the log stands, for one that shows an old end.

        It has proved it by storing something: at the position returned, which is above all that was acknowledged
        before. On a replicated log only; a single server always knows (0). Raises AppendUnknown, LogUnavailable.
        """
        ...

    async def latest(self, subject: str, timeout_s: float) -> int:
        """The position of the subject's last message, 0 for none, as of a moment after this was asked.

        On a replicated log that has to be proved; `last` is as old as the one may be who takes himself for the leader.
        Raises LogUnavailable; the caller bounds the time.
        """
        ...

    async def fill(self) -> tuple[int, int]:
        """Bytes the log holds, and may hold."""
        ...

    async def held(self, positions: Mapping[int, int]) -> Held:
        """What the log holds, and above a position in each partition; of partitions left out, all."""
        ...

    async def purge(self, partition: int, below: int) -> None:
        """Remove the partition's messages below a sequence."""
        ...

    async def erase(self, subject: str, below: int) -> int:
        """Remove the subject's messages below a sequence and overwrite them on disk; how many there were."""
        ...

    async def subjects(self, filter_: str, offset: int) -> list[str]:
        """Some of the subjects that match and have messages, those behind the first `offset`; empty: no more."""
        ...

    async def acked(self, partition: int, term: int) -> int | None:
        """Up to where the partition's consumer of this term is acknowledged; None if there is no such consumer."""
        ...

    async def identity(self, seq: int) -> StoredMessage | None:
        """The message at exactly this sequence, if it is still there."""
        ...

    @property
    def refused(self) -> str | None:
        """Why every call of this process raises LogRolledBack; None when none does."""
        ...

    def refuse(self, reason: str) -> None:
        """From now on every call of this process raises LogRolledBack: this is not the log that Postgres speaks of.

        A replicated log may have shown something old: it is looked at again, and accepted once it has come past all
        that this process has seen in it, holds what this process wrote, and is vouched for.
        """
        ...

    def vouched_by(self, mismatch: Callable[[], Awaitable[str | None]]) -> None:
        """`mismatch` says why a log that was refused still is not the right one; None when it is."""
        ...


class HotState(Protocol):
    """Small shared facts that may be lost: run → thread, members, progress, and calls to the owner of a partition."""

    async def setup(self) -> None:
        """Create what is needed, or check what is there; get ready."""
        ...

    async def claim_run(self, run_id: str, thread_id: str, timeout_s: float) -> str:
        """Make `run_id` known as a run of `thread_id`; the thread that it belongs to (maybe another one)."""
        ...

    async def thread_of_run(self, run_id: str, timeout_s: float) -> str | None:
        """The thread of a run, if it is known here."""
        ...

    async def lineage(self, timeout_s: float) -> tuple[int, bytes]:
        """The sequence and the content of the one record of changes of lineage; (0, empty) if there is none."""
        ...

    async def put_lineage(self, record: bytes, expected: int, timeout_s: float) -> int:
        """Replace it if it still has this sequence; its new one. Raises Conflict, AppendUnknown, LogUnavailable."""
        ...

    async def renew_member(self, member: str, ttl_s: int, trouble: str = "") -> None:
        """Keep `member` in the list of live flushers for `ttl_s` more seconds; `trouble`: why it does not flush."""
        ...

    async def troubles(self) -> dict[str, str]:
        """What keeps flushers from flushing, as they say themselves, of those that say something."""
        ...

    async def leave(self, member: str) -> None:
        """Take `member` off the list."""
        ...

    async def announce(self) -> None:
        """Tell the other flushers that the list has changed."""
        ...

    async def members(self) -> dict[str, int]:
        """The flushers with a record, and a number of each that changes whenever it is renewed.

        Most are alive; a server that crashed may have lost when a record was to go (see `membership.Pulse`).
        """
        ...

    async def report(self, progress: Mapping[int, int]) -> None:
        """Publish, per partition, up to which sequence everything is flushed."""
        ...

    async def progress(self) -> dict[int, int]:
        """The last reports."""
        ...

    async def on_progress(self, callback: Callable[[int, int], None]) -> None:
        """Call back with (partition, sequence) for every report of any flusher, from now on."""
        ...

    async def tell_parked(self, thread_id: str) -> None:
        """Tell every writer that the thread's chain is broken."""
        ...

    async def on_parked(self, callback: Callable[[str], None]) -> None:
        """Call back with the thread whenever somebody tells that its chain is broken."""
        ...

    async def call_owner(self, partition: int) -> None:
        """Ask whoever owns the partition to flush now."""
        ...

    async def on_call(self, callback: Callable[[int], None]) -> None:
        """Call back with the partition whenever somebody asks for a flush, or -1 when members changed."""
        ...


class Link(Protocol):
    """One instance's way to the server that holds log and hot state."""

    @property
    def log(self) -> Log:
        """The log."""
        ...

    @property
    def hot(self) -> HotState:
        """The hot state."""
        ...

    @property
    def traffic(self) -> tuple[int, int]:
        """Messages sent and received since the start."""
        ...

    async def open(self) -> None:
        """Connect. Raises ConfigError, LogUnavailable."""
        ...

    async def aclose(self) -> None:
        """Release everything: log and hot state can be used no more."""
        ...


@dataclass(frozen=True)
class Cursor:
    """Up to where a partition is done, and the term of its owner."""

    partition: int
    term: int
    seq: int
    id: int


@dataclass
class Decision:
    """What one flush transaction writes, decided while the rows are locked."""

    #: The domain's changes, one per thread, each with its `thread_id`, and `gone` if nothing of the thread is left.
    batch: Sequence[Any] = ()
    rows: Mapping[str, Row] = field(default_factory=dict)
    parked: Sequence[Parked] = ()
    #: The partitions' cursors as they shall be.
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
        #: What is the same for all that is refused for the same reason.
        self.cause = cause or message
        #: Whether it was the store's write that failed, not one of the buffer's own tables.
        self.of_batch = of_batch


def need_all(threads: Collection[str], rows: Mapping[str, Row]) -> None:
    """For who has no use for a part of the threads: raise FlushFailed unless there are rows of all."""
    held = len(set(threads) - rows.keys())
    if held:
        raise FlushFailed(f"{held} of {len(threads)} threads are held by others", Verdict.LOCKED)


@dataclass(frozen=True)
class Flushed:
    """What a flush transaction committed, and which threads it left out, as if they had not been given."""

    decision: Decision
    #: Their rows are held by somebody else.
    locked: Set[str] = frozenset()
    #: The store does not take what was decided for them.
    refused: Mapping[str, FlushFailed] = field(default_factory=dict)
    #: Enough were refused before these were looked at.
    untried: Set[str] = frozenset()


class QuarantineFull(Exception):
    """A flush would park more entries than there is room for; nothing was changed."""

    def __init__(self, room: int, limit: int) -> None:
        super().__init__(
            f"the quarantine is full (BufferConfig.quarantine_max = {limit}): replay or discard what is in it, "
            "or raise the limit"
        )
        self.room = room


class QuarantineBusy(QuarantineFull):
    """Somebody else parks entries, and has not committed: how much room there is, is not known."""

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
    #: SHA-256 of what is kept.
    hash: str
    parked_at: datetime
    #: True when the thread has gone on without it: it cannot be replayed any more.
    superseded: bool


class ParkedEntries(Protocol):
    """The entries that wait in quarantine. Raises what the ledger raises that they belong to."""

    async def page(self, after: int, thread_id: str | None, limit: int) -> list[ParkedInfo]:
        """Entries above a position (of one thread, if it is given), oldest first."""
        ...

    async def entry(self, seq: int) -> ParkedEntry | None:
        """The entry that stood at a position, whole."""
        ...

    async def present(self, seqs: Sequence[int]) -> set[int]:
        """Those of the positions whose entries are here."""
        ...

    async def threads(self, after: str, limit: int) -> list[str]:
        """Threads that have entries here and come after one, in order."""
        ...

    async def replay(
        self, thread_id: str, start: int, decide: Callable[[Row, Sequence[ParkedEntry]], Replay]
    ) -> Replay:
        """One transaction: lock the thread's row, `decide` on it and on some of its entries from a position on, write.

        An exception of `decide` rolls back and passes through.
        """
        ...

    async def discard(self, seqs: Sequence[int]) -> int:
        """Delete these entries; how many there were. A thread of which none wait any more is whole again."""
        ...


@dataclass(frozen=True)
class Replay:
    """What one replay transaction writes."""

    plan: ReplayPlan
    #: The domain's change that equals the applied entries; None if none is.
    change: Any


class Ledger(Protocol):
    """Where the truth about flushing lives: watermarks, cursors, terms, quarantine.

    Raises FlushFailed for anything the database says, StoreUnavailable when it cannot be reached.
    """

    async def open(self) -> None:
        """Get ready; the database need not be up."""
        ...

    async def setup(self) -> None:
        """Create or migrate the tables."""
        ...

    async def epoch(self) -> int | None:
        """The generation of the stream that the rows belong to; None before the first."""
        ...

    async def set_epoch(self, epoch: int) -> None:
        """Remember the generation of the stream before it is created."""
        ...

    async def target(self) -> Target | None:
        """Where the log is flushed to: here, by this name; None: not put down yet."""
        ...

    async def claim(self, epoch: int, target: Target) -> Target:
        """Put it down, unless it is, and remember the generation of the stream as `set_epoch`; what stands there."""
        ...

    async def take(self, partitions: Sequence[int], owner: str) -> list[Cursor]:
        """Raise the terms: from now on only this owner may commit for these partitions.

        Waits for nobody: partitions whose rows are held by somebody else are not taken, and left out.
        """
        ...

    async def cursors(self) -> dict[int, Cursor]:
        """All partitions' cursors."""
        ...

    async def row(self, thread_id: str) -> Row:
        """The thread's row; an empty one if it has none."""
        ...

    async def rows(self, thread_ids: Sequence[str]) -> dict[str, tuple[Row, int]]:
        """The threads' rows, and up to where entries of them were discarded; threads without one are left out."""
        ...

    async def broken(self) -> frozenset[str]:
        """The threads whose chain is broken: no more than entries wait in quarantine."""
        ...

    async def flush(
        self,
        held: Sequence[Cursor],
        threads: Sequence[str],
        decide: Callable[[Mapping[str, Row]], Decision],
        *,
        probe: int = 0,
        size: int = 0,
    ) -> Flushed:
        """One transaction: check terms and cursors, lock the threads' rows, `decide` on those, write, commit.

        `size`: bytes of payload, for which the transaction may take its time; without them it ends within the lease if
        this process stands still.
        A thread whose row is held by somebody else is not waited for: `decide` does not get its row. `probe`: find the
        threads that are to blame for a batch that cannot be written; `decide` is called again without them. When so
        many are refused, and more than are written, or it takes long, the others are not tried.

        Raises NotOwner when a partition's row is not as `held` says: another owner has taken it, or Postgres has gone
        back to a state of before; QuarantineFull. An exception of `decide` rolls back and passes through.
        """
        ...

    async def tombstones(self, below: int, after: str, limit: int) -> list[tuple[int, str]]:
        """Watermark and id of threads that are gone and whose watermark is below a position.

        In the order of the ids, those behind `after`.
        """
        ...

    async def bury(self, tombstones: Sequence[tuple[int, str]]) -> None:
        """Remove these rows, but not of a thread that was written again meanwhile or that quarantine names."""
        ...

    async def archived(self) -> int:
        """The position up to which an archive has the log, not included; 0: nothing."""
        ...

    async def set_archived(self, position: int) -> None:
        """Remember it, unless it is known to be further already."""
        ...

    async def quarantined(self) -> int:
        """How many entries wait in quarantine."""
        ...

    async def erase_set_aside(self, thread_ids: Sequence[str]) -> int:
        """Delete the rows of these threads that pipelines have set aside as unfit; how many there were."""
        ...

    @property
    def parked(self) -> ParkedEntries:
        """The entries that wait in quarantine."""
        ...

    async def aclose(self) -> None:
        """Release connections."""
        ...


class Inapplicable(Exception):
    """An entry cannot be applied, on whatever base: it is poison."""

    def __init__(self, entry_id: int, cause: str) -> None:
        super().__init__(cause)
        self.entry_id = entry_id


#: What the entries of this log mean: one change that equals the entries in order, on a thread of a version.
#: Raises Inapplicable.
Coalesce = Callable[[str, int, Sequence[StoredEntry]], Any]
