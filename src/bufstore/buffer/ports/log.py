"""The log, as the buffer needs it: a stream of entries, by partition and by generation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

from bufstore.buffer.target import Target
from bufstore.buffer.windows import Windows
from bufstore.errors import LogRolledBack
from bufstore.jetstream.group_commit import AppendUnit
from bufstore.jetstream.messages import Held, Outgoing, StoredMessage


class Floor(NamedTuple):
    """The positions below which a partition's part of the log is no longer needed."""

    #: Everything below is in Postgres for good (`bufstore.buffer.flush.passed`).
    settled: int
    #: Everything below may leave the log.
    purgeable: int

    def raised(self, other: Floor) -> Floor:
        """The higher of both, in each respect."""
        return Floor(max(self.settled, other.settled), max(self.purgeable, other.purgeable))


class GroupSizes(NamedTuple):
    """How large the last groups of entries are, all together."""

    groups: int
    entries: int
    bytes: int


class Writes(NamedTuple):
    """How many groups a process has written, and how often one went out again because another process was first."""

    groups: int
    refused: int


class Altered(NamedTuple):
    """What somebody has changed of a log's settings beside the processes that use it. Empty: nothing."""

    why: str = ""
    #: Whether the log takes no writes because of that, or answers no reads.
    stops_writes: bool = False
    stops_reads: bool = False


UNALTERED = Altered()


class Ending(NamedTuple):
    """The last entry of a partition, as a process has seen it before it went."""

    seq: int
    #: The entry; None if the process does not have it any more, or cannot read it.
    entry: StoredMessage | None


class Remains(NamedTuple):
    """What a log holds of some threads that can be erased."""

    #: How many entries.
    entries: int
    #: The sequences of the messages that hold them, and of the parts that large ones consist of.
    groups: Sequence[int]
    parts: Sequence[int]
    #: The messages may go once everything below this position is settled; 0: there are no messages.
    settled_from: int
    #: Whether one of the groups is the last of the log, which never goes: then something must be written behind it.
    ends_log: bool


class Feed(Protocol):
    """The messages of one partition from a position on, in order, without a hole, until it is lost."""

    @property
    def lost(self) -> str | None:
        """Why the feed can deliver no more (a hole, a lost connection, a deleted consumer), or None."""

    def take(self) -> list[StoredMessage]:
        """What has arrived since the last call."""

    @property
    def through(self) -> StoredMessage | None:
        """The last entry that was delivered, of any partition; None if one of this partition is still to be taken.

        So the partition has nothing up to there that was not taken. What is delivered may also stand for a group
        without entries, which `Log.identity` finds, too.
        """

    @property
    def crowded(self) -> bool:
        """Whether half as many messages are unacknowledged as may be: the feed may soon deliver no more."""

    def passed(self, seq: int) -> None:
        """Note that everything up to this position is done.

        Call this for all partitions that were committed together before the first `ack`; else the others seem late.
        """

    async def ack(self, seq: int) -> None:
        """Do the same as `passed`, and tell the server."""

    def doubt(self, reason: str) -> None:
        """Declare this feed, and all feeds of the same consumer, lost: nothing arrives although the log goes on."""

    async def close(self) -> None:
        """Stop and remove the consumer."""


class Writer(Protocol):
    """Writes units to the log, many at a time."""

    def start(self) -> None:
        """Begin to send; needs a running event loop."""

    async def aclose(self) -> None:
        """Stop. What is still waiting fails with Closed; what is on its way with AppendUnknown."""

    def submit(self, messages: Sequence[Outgoing]) -> asyncio.Future[int]:
        """Queue a unit. The future gives the sequence of its last message once it is durable.

        It fails with Conflict, LogFull, LogUnavailable (nothing stored), or AppendUnknown. Cancelling the future
        takes the unit back if it was not sent yet.
        """

    def add(self, unit: AppendUnit) -> None:
        """Queue a unit, whose `ended` is called later: see `submit`."""

    def gave_up(self) -> None:
        """Note that the caller of some unit gave up, so that units without a caller do not wait for ever."""


class Generations(Protocol):
    """The log as something that is created, inspected and taken out of service, one generation (epoch) at a time.

    Raises ConfigDrift when it is not as configured, LogUnavailable.
    """

    async def epoch(self, *, checked: bool = True) -> int | None:
        """The stream's epoch; None if there is no stream.

        `checked`: it must be in service, and as configured when this process meets this generation for the first time.
        Raises LogRolledBack, ConfigDrift.
        """

    async def bounds(self) -> tuple[int, int]:
        """The first sequence that is (or will be) in the log, and the last."""

    async def create(self, epoch: int, target: Target) -> None:
        """Create the stream as generation `epoch`, to be flushed to `target`; a no-op if another process was faster."""

    @property
    def target(self) -> Target | None:
        """Where the log is flushed to, as it said when `epoch` looked; None: there was no log."""

    async def withdraw(self, common: Sequence[int]) -> Sequence[int]:
        """Take the stream out of service: it can be read, and accepts no more entries.

        Remembers `common`, a position per partition; if it was taken out of service before, returns the positions
        remembered then.
        """

    async def remove(self) -> None:
        """Delete the stream that was taken out of service, and all that is in it.

        A no-op if there is no such stream: one that is in service is a new generation, which another process has begun.
        """


class Log(Generations, Protocol):
    """The stream of entries.

    Writes raise Conflict, AppendUnknown, LogFull or LogUnavailable (certainly not stored).
    """

    async def purged_to(self) -> int:
        """The first position of which entries are left in a purged log; 0: no entry is gone, or none is left.

        Messages that stood beside the entries do not count.
        """

    async def publish(self, message: Outgoing, timeout_s: float) -> int:
        """Store one entry durably. Returns its position."""

    async def publish_batch(self, messages: Sequence[Outgoing], timeout_s: float) -> int:
        """Store all entries or none, as neighbours. Returns the position of the last."""

    async def last(self, subjects: Sequence[str]) -> dict[str, StoredMessage]:
        """The last entry of each of these threads (by subject).

        Threads of which nothing stands above the log's floor are left out.
        """

    async def after(self, subject: str, seq: int, limit: int = 0) -> list[StoredMessage]:
        """The thread's entries above `seq`, in order; at most `limit` of them if it is not 0."""

    async def seen_after(self, above: Mapping[str, int]) -> Mapping[str, list[StoredMessage]]:
        """The entries of each of these threads (by subject) above a position, as far as this process has seen the log.
        It has seen whatever caused a conflict, and everything up to what `latest` or `ends` returned."""

    @property
    def unit_bytes_max(self) -> int:
        """How many bytes of entries fit into one message of the log's server, as it was last known."""

    @property
    def writer(self) -> Writer:
        """The writer of units to this log."""

    @property
    def generation_start(self) -> int:
        """The first position of this generation of the stream; cursors below it belong to an earlier one."""

    @property
    def floor(self) -> int:
        """Below this position this object may show no entries, because owners have said that those are settled."""

    @property
    def windows(self) -> Windows:
        """What flushers and writers must agree on, as the log said at the last look.

        `epoch`, `end` and `fill` look; before the first look, as configured.
        """

    async def set_windows(self, windows: Windows) -> None:
        """Change the windows that the log says. Raises LogUnavailable, also if another process changed it meanwhile."""

    async def end(self, timeout_s: float) -> int:
        """The last position of the log, asked now."""

    async def ends(self, subjects: Sequence[str]) -> list[int]:
        """The position of the last entry of each of these threads, as any node shows it; 0 for none.

        It may show nothing that stands below the log's floor. `latest` asks the leader.
        """

    async def partition_ends(self) -> list[int]:
        """The same of all partitions, in order. `latest_partition_ends` asks the leader."""

    async def feed(self, partition: int, start: int, wake: Callable[[], None]) -> Feed:
        """Deliver the partition from position `start` on; `wake` is called when something arrived or was lost."""

    async def prove_leader(self, timeout_s: float) -> None:
        """Return once a node has proved that it leads the log, and can write.

        What another node shows may still be old: see `latest`. On a replicated log only; a single server always knows.
        It leaves nothing in the log. Raises AppendUnknown, LogUnavailable.
        """

    async def barrier(self, timeout_s: float) -> int:
        """Do as `prove_leader`, with a proof that shows where the log stands; for a log that shows an old end.

        The leader stores a message; the position returned is above everything that was acknowledged
        before. On a replicated log only; a single server always knows (0). Raises AppendUnknown, LogUnavailable.
        """

    async def latest(self, subject: str, timeout_s: float) -> int:
        """The position of the thread's last entry, 0 for none, as of a moment after the call.

        `last` and `ends` may be as old as what a node shows that only believes that it leads. A replicated log stores
        a small message for this, one for all calls that come meanwhile. Raises LogUnavailable.
        """

    async def latest_partition_ends(self, timeout_s: float) -> list[int]:
        """The same of all partitions, in order."""

    async def fill(self) -> tuple[int, int]:
        """Bytes the log holds, and may hold."""

    async def held(self, positions: Mapping[int, int]) -> Held:
        """What the log holds in all, and above a position in each partition (left out: all above the floor).

        Positions below the floor count as the floor: everything below it is flushed.
        """

    async def let_go(self, floors: Mapping[int, Floor], reached: int | None = None) -> int:
        """Say what is no longer needed of these partitions; forget and remove what no partition needs.

        Returns the position below which that was removed. Call it now and then, without partitions too, because other
        processes say it as well. `reached`: the position up to which Postgres has all partitions. Nothing above it
        goes, whatever was said: a Postgres that was restored from a backup lacks what the one before it had.
        """

    async def fence(self, below: int) -> None:
        """Return once nobody can write what builds on an entry below this position; such entries were let go of.

        Raises AppendUnknown, LogFull, LogUnavailable.
        """

    def on_forget(self, callback: Callable[[bool], None]) -> None:
        """Call back before this object forgets who wrote to which thread (True: it forgets that of all threads).

        A callback that remembers the last entry of a thread keeps it only if `known_head` does not name another.
        """

    def known_head(self, subject: str) -> int:
        """The position of the thread's last entry, as far as this process has seen the log; 0: it knows of none."""

    def scan(
        self,
        above: int = 0,
        *,
        partitions: Collection[int] | None = None,
        threads: Collection[str] | None = None,
        last_up_to: int | None = None,
    ) -> AsyncIterator[tuple[int, StoredMessage]]:
        """Yield each entry above a position, in order, with its partition: all, or those of some partitions or threads.

        `last_up_to`: leave out an entry if its thread is known to have another behind it, up to this position.

        It reads the log from `above` to its end, a little at a time: for repair, the self-check and people. What
        belongs to no thread counts as partition 0.
        """

    async def last_groups(self) -> GroupSizes:
        """How large the last groups are, whoever wrote them."""

    @property
    def writes(self) -> Writes:
        """What this process has written so far."""

    @property
    def trouble(self) -> str:
        """Why the log takes no writes of this process: not connected, or writes are not answered. Empty: it takes them.

        As far as this process knows without asking.
        """

    @property
    def altered(self) -> Altered:
        """How the log's settings differed from what they must be when this process last looked at them."""

    async def settled(self) -> int:
        """The position below which everything is in Postgres for good, as the owners have said by now."""

    async def remains(self, below: Mapping[str, int]) -> Remains:
        """What the log still holds of these threads below a position each. Reads the whole log."""

    async def erase(self, remains: Remains) -> None:
        """Remove what was found, and overwrite it on disk. Other threads' entries in the same groups go as well.

        Raises LogUnavailable unless everything below `settled_from` is settled. Safe to repeat.
        """

    async def erased(self) -> int:
        """Everything that was erased stood at or below this position, which every cursor had passed; 0: nothing was."""

    async def identity(self, seq: int) -> StoredMessage | None:
        """The entry at exactly this position, if it is still there."""

    async def held_at(self, seq: int) -> StoredMessage | None:
        """The same of a position that the log has certainly reached, whichever node answers. Raises LogUnavailable."""

    @property
    def refused(self) -> LogRolledBack | None:
        """Why this process refuses the log (see `refuse`); None when it does not."""

    def refuse(self, why: LogRolledBack) -> None:
        """Use the log no more: it is not the one that Postgres knows.

        From now on LogRolledBack is raised by `end` and by all that writes or removes messages: each form of `publish`,
        `let_go`, and `erase` where it has something to remove. So nothing is appended, flushed or purged. Other calls
        may still answer with what the server has; that need not be what was acknowledged. Other processes are not
        affected: the self-check and repair look at the log as they find it.

        A replicated log may have shown an old state. So it is looked at again, and accepted once it has come past
        everything that this process has seen in it, holds what this process wrote, and its leader has proved itself.
        """

    def vouched_by(
        self,
        mismatch: Callable[[], Awaitable[object]],
        flushed: Callable[[Mapping[int, Ending], int], Awaitable[bool]],
    ) -> None:
        """Have `mismatch` say why a refused log is still not the right one; None when the log is right again.

        `flushed` is asked when the log has lost its end: whether these partitions are flushed up to these entries, of
        which none is above the given position. If they are not, the log is refused. Raises StoreUnavailable.
        """
