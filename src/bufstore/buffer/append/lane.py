"""The writes of one thread on their way into the log: what the appender keeps of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Generic

import msgspec

from bufstore.buffer.append.next_unit import Drafted, Taken
from bufstore.buffer.append.tip import Draft, Prepare, Tip
from bufstore.buffer.domain import M
from bufstore.jetstream import group_commit
from bufstore.jetstream.messages import Outgoing
from bufstore.tasks import settle
from bufstore.types import Receipt


def _nothing() -> None:
    pass


_NOT_DRAFTED: Draft[Any] = Draft(b"", False, 0, None, _nothing)


# The collector has to see a write: the error in its future may lead back to it.
class Write(msgspec.Struct, Generic[M], eq=False):
    """One caller's write; see `bufstore.buffer.append.next_unit.QueuedWrite`."""

    prepare: Prepare[M]
    item: bytes
    keyed: bool
    mark: bytes | None
    id: int
    done: asyncio.Future[Receipt]
    #: When the caller gives up.
    deadline: float
    after: Write[M] | None = None
    #: The draft that stands for the write in its unit.
    draft: Draft[M] = _NOT_DRAFTED
    #: The position behind which the first send of unknown outcome was made; None: no such send.
    maybe_behind: int | None = None

    @property
    def ended(self) -> bool:
        """Whether the caller has an answer, or gave up."""
        return self.done.done()

    @property
    def failed(self) -> bool:
        """Whether the write ended and is not known to be stored."""
        return self.done.done() and (self.done.cancelled() or self.done.exception() is not None)


class Unit(group_commit.AppendUnit, Generic[M], kw_only=True, eq=False):
    """Writes of one thread on their way, and what is undone if they fail."""

    lane: Lane[M]
    writes: list[Write[M]]
    before: Tip[M]
    #: The tip once the unit is stored.
    after: Tip[M]
    on_end: Callable[[Unit[M], int | Exception], None]
    #: The loop's time when the unit went out, and how often the log had begun anew by then.
    drafted_at: float = 0.0
    drafted_in: int = 0

    @property
    def given_up(self) -> bool:
        """Whether a caller has given up. It was told that nothing is stored, so the other writes are drafted anew."""
        for write in self.writes:  # noqa: SIM110 - any() of a generator takes four times as long
            if write.done.done():
                return True
        return False

    def sent(self) -> None:
        for write in self.writes:
            write.maybe_behind = self.before.seq

    def refused(self) -> None:
        for write in self.writes:
            write.maybe_behind = None

    def ended(self, outcome: int | Exception) -> None:
        self.on_end(self, outcome)

    def undo(self) -> None:
        """Take the drafts back, the last first."""
        for write in reversed(self.writes):
            write.draft.undo()


class Lane(msgspec.Struct, Generic[M], eq=False):
    """What waits to be written to one thread: one unit of it is on its way at a time."""

    thread_id: str
    queue: list[Write[M]]
    #: Set when the base of the writes on their way, or what is being looked up, can no longer be trusted.
    stale: bool = False
    #: The position of the thread's last entry when the log forgot heads after a lookup began: the lookup must not find
    #: an older one. 0: nothing was forgotten.
    forgotten: int = 0
    #: Whether the store is being asked about the thread, before its next write can be judged.
    asks_store: bool = False
    #: How often in succession another writer was faster.
    conflicts: int = 0
    #: How many of the queue's first writes had come when the last lookup began.
    asking: int = 0

    def drop(self, write: Write[M]) -> bool:
        """Take a write off the queue. Returns whether it was there."""
        for number, queued in enumerate(self.queue):
            if queued is write:
                del self.queue[number]
                self.asking -= number < self.asking
                return True
        return False

    def take(
        self, taken: Taken[M], before: Tip[M], on_end: Callable[[Unit[M], int | Exception], None]
    ) -> Unit[M] | None:
        """Take the first writes off the queue as decided. Returns the unit of those that go out; answers the others."""
        writes: list[Write[M]] = []
        messages: list[Outgoing] = []
        size, after = 0, before
        for write, outcome in zip(self.queue, taken.outcomes, strict=False):
            if isinstance(outcome, Drafted):
                write.draft = outcome.draft
                writes.append(write)
                messages.append(outcome.message)
                size += outcome.size
                after = outcome.after
            elif outcome is not None:
                settle(write.done, outcome)
        del self.queue[: len(taken.outcomes)]
        if not writes:
            return None
        return Unit(messages, self.thread_id, size, lane=self, writes=writes, before=before, after=after, on_end=on_end)
