"""The log, as the buffer needs it: a stream of entries, by partition and by generation."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from bufstore.buffer.target import Target
from bufstore.buffer.windows import Windows
from bufstore.jetstream.messages import Held, StoredMessage, Stream


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
        """Go on delivering although the bounds are reached: an oversize entry is incomplete."""
        ...

    @property
    def crowded(self) -> bool:
        """Whether half of the messages that may be unacknowledged are: it may soon deliver no more."""
        ...

    async def ack(self, seq: int) -> None:
        """Tell the server that everything up to the message with this sequence is done."""
        ...

    async def close(self) -> None:
        """Stop and remove the consumer."""
        ...


class Generations(Protocol):
    """The log as something that is created, inspected and taken out of service, one generation (epoch) at a time.

    Raises ConfigDrift when it is not as configured, LogUnavailable.
    """

    async def epoch(self, *, checked: bool = True) -> int | None:
        """The stream's epoch; None if there is no stream. `checked`: it must be as configured, and in service."""
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
        """Write down in a log of an earlier release where it is flushed to, and everything else that a new log says.

        Raises LogUnavailable, also when another process changed it at the same time.
        """
        ...

    async def withdraw(self, common: Sequence[int]) -> Sequence[int]:
        """Take the stream out of service: it can be read, and accepts no more entries.

        Remembers `common`, a position per partition; if it was taken out of service before, returns the positions
        remembered then.
        """
        ...

    async def remove(self) -> None:
        """Delete the stream and all that is in it; a no-op if it is gone."""
        ...


class Log(Stream, Generations, Protocol):
    """The stream of entries."""

    @property
    def generation_start(self) -> int:
        """The first position of this generation of the stream; cursors below it belong to an earlier one."""
        ...

    @property
    def windows(self) -> Windows:
        """What flushers and writers must agree on, as the log said at the last look.

        `epoch`, `end` and `fill` look; before the first look, as configured.
        """
        ...

    async def set_windows(self, windows: Windows) -> None:
        """Change what the log says of them. Raises LogUnavailable, also when another process changed it meanwhile."""
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
        """Return once a node has proved that it leads the log, and can write.

        What another node shows may still be old: see `latest`. On a replicated log only; a single server always knows.
        It leaves nothing in the log. Raises AppendUnknown, LogUnavailable.
        """
        ...

    async def barrier(self, timeout_s: float) -> int:
        """The same, with a proof that shows where the log stands, for a log that shows an old end.

        The leader stores a message; the position returned is above everything that was acknowledged
        before. On a replicated log only; a single server always knows (0). Raises AppendUnknown, LogUnavailable.
        """
        ...

    async def latest(self, subject: str, timeout_s: float) -> int:
        """The position of the subject's last message, 0 for none, as of a moment after this was asked.

        `last` and `ends` may be as old as a node that only believes that it leads. A replicated log stores a small
        message for this, one for all who ask meanwhile. Raises LogUnavailable.
        """
        ...

    async def latest_ends(self, filters: Sequence[str], timeout_s: float) -> list[int]:
        """The same for filters with wildcards; a replicated log stores a message for each."""
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
        """Why this process refuses the log (see `refuse`); None when it does not."""
        ...

    def refuse(self, reason: str) -> None:
        """Use the log no more: this is not the one that Postgres knows.

        From now on LogRolledBack is raised by `end` and by all that writes or removes messages: each form of `publish`,
        `purge`, and `erase` where it finds something. So nothing is appended, flushed or purged. Other calls may still
        answer with what the server has; that need not be what was acknowledged. Other processes are not concerned:
        the self-check and repair look at the log as they find it.

        A replicated log may have shown something old: it is looked at again, and accepted once it has come past
        everything that this process has seen in it, holds what this process wrote, and its leader has proved itself.
        """
        ...

    def vouched_by(self, mismatch: Callable[[], Awaitable[str | None]]) -> None:
        """`mismatch` says why a refused log is still not the right one; None when it is."""
        ...
