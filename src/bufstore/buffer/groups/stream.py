"""What the log of groups needs of the stream that holds them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Protocol

from bufstore.buffer.groups.delivery import StreamFeed
from bufstore.buffer.groups.others import Announcements
from bufstore.buffer.ports.log import Altered, Generations
from bufstore.buffer.windows import Windows
from bufstore.errors import LogRolledBack
from bufstore.jetstream.messages import Outgoing, Part, StoredMessage

#: How long a read of the stream may take.
READ_S = 5.0
#: How many messages are read at a time where all are read.
_AT_ONCE = 32


class OnItsWay(Protocol):
    """A message that was sent, whose answer has not come."""

    def cancel(self) -> object:
        """Tell nobody how it ended."""


class GroupsInStream(Generations, Announcements, Protocol):
    """The stream that holds the groups.

    Writes raise Conflict, AppendUnknown, LogFull or LogUnavailable (certainly not stored).
    """

    @property
    def message_bytes_max(self) -> int:
        """The server's max_payload: headers and body of one message."""

    @property
    def connections(self) -> int:
        """A number that changes when the process connects again: then the log may have gone back."""

    async def publish(self, message: Outgoing, timeout_s: float) -> int:
        """Store one message durably. Returns its sequence."""

    @property
    def posts(self) -> bool:
        """Whether `post` is possible now, for a small message."""

    def post(self, message: Outgoing, timeout_s: float, ended: Callable[[int | Exception], None]) -> OnItsWay | None:
        """Send one message before this returns; None if that is not possible, and `publish` has to be awaited.

        `ended` is called once, later, with its sequence, or the error that `publish` would raise.
        """

    async def last(self, subjects: Sequence[str], timeout_s: float) -> dict[str, StoredMessage]:
        """The last message of each subject; subjects that have none are left out."""

    async def after(self, subject: str, seq: int, timeout_s: float, limit: int = 0) -> list[StoredMessage]:
        """The subject's messages above `seq`, in order; at most `limit` of them if it is not 0."""

    @property
    def generation_start(self) -> int:
        """The first sequence of this generation of the stream."""

    @property
    def windows(self) -> Windows:
        """See `bufstore.buffer.ports.log.Log`, also for what follows."""

    async def set_windows(self, windows: Windows) -> None: ...
    async def end(self, timeout_s: float) -> int: ...
    async def identity(self, seq: int) -> StoredMessage | None: ...

    async def held(self, seq: int) -> StoredMessage | None:
        """The message at exactly this sequence, which was there once; None: it is gone, whichever node answers."""

    async def prove_leader(self, timeout_s: float) -> None: ...

    async def fresh_end(self, timeout_s: float) -> int:
        """The last group's sequence, as of a moment after the call; 0 where every read is as fresh as that."""

    @property
    def may_lag(self) -> bool:
        """Whether a read may show less than the log has: one of several replicas answers it."""

    async def part(self, subject: str, seq: int, timeout_s: float, limit: int, bytes_max: int = 0) -> Part:
        """The subject's first messages above `seq`, as any replica has them, which may lag.

        At most `limit`, and no more once they have `bytes_max` bytes; fewer when the time is over before all of them
        have come. Raises LogUnavailable when none has come.
        """

    async def barrier(self, timeout_s: float) -> int: ...
    async def fill(self) -> tuple[int, int]: ...

    @property
    def altered(self) -> Altered: ...

    @property
    def refused(self) -> LogRolledBack | None: ...
    def refuse(self, why: LogRolledBack) -> None: ...
    def vouched_by(self, mismatch: Callable[[], Awaitable[object]]) -> None: ...

    async def follow(self, name: str, subject: str, start: int, wake: Callable[[], None]) -> StreamFeed:
        """Deliver the messages of a subject from sequence `start` on; `name` is this follower's alone."""

    async def purge_below(self, seq: int) -> None:
        """Remove everything below a sequence."""

    async def overwrite(self, seq: int) -> None:
        """Remove one message, and overwrite it on disk; a no-op if it is gone."""


async def last_on(stream: GroupsInStream, subject: str, timeout_s: float = READ_S) -> StoredMessage | None:
    """The last message on a subject."""
    return (await stream.last([subject], timeout_s)).get(subject)


async def messages_on(stream: GroupsInStream, subject: str, above: int = 0) -> AsyncIterator[StoredMessage]:
    """Yield the messages on a subject above a sequence; a few are read at a time."""
    while messages := await stream.after(subject, above, READ_S, limit=_AT_ONCE):
        for message in messages:
            yield message
        above = messages[-1].seq
