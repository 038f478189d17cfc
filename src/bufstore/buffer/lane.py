"""The writes of one thread on their way into the log: what the appender keeps of them."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Generic

from bufstore.buffer.ports import Outgoing
from bufstore.buffer.tip import Draft, M, Prepare, Tip
from bufstore.types import Receipt


@dataclass(eq=False)
class Write(Generic[M]):
    """One caller's write."""

    prepare: Prepare[M]
    item: bytes
    keyed: bool
    id: int
    done: asyncio.Future[Receipt]
    started: float
    #: From the first send whose outcome is not known (yet): the position it was sent behind.
    maybe_behind: int | None = None


@dataclass(eq=False)
class Unit(Generic[M]):
    """Writes of one thread on their way, and what is undone if they fail."""

    writes: list[tuple[Write[M], int]] = field(default_factory=list)  # with the number of messages
    messages: list[Outgoing] = field(default_factory=list)
    drafts: list[Draft[M]] = field(default_factory=list)
    before: Tip[M] | None = None
    after: Tip[M] | None = None

    @property
    def before_seq(self) -> int:
        """The position it builds on; 0: it expects nothing in the log."""
        return self.before.seq if self.before is not None else 0

    def undo(self) -> None:
        """Take the drafts back, the last first."""
        for draft in reversed(self.drafts):
            draft.undo()
        self.drafts.clear()


@dataclass(eq=False)
class Lane(Generic[M]):
    """What waits to be written to one thread: one unit of it is on its way at a time."""

    thread_id: str
    queue: deque[Write[M]] = field(default_factory=deque)
    #: Set when what the writes on their way build on is not to be relied on any more.
    stale: bool = False
    #: How often in a row another writer was faster.
    conflicts: int = 0
