"""The writes whose callers wait, and their deadlines."""

from __future__ import annotations

import asyncio
from typing import Generic

from bufstore.buffer.append.lane import Write
from bufstore.buffer.domain import M
from bufstore.errors import Closed
from bufstore.jetstream.messages import AppendUnknown
from bufstore.tasks import BEHIND_TURNS, LATE_S, settle

#: How much longer a write may take, in seconds, where the loop stood still when its time was over; all times together.
_MORE_MAX_S = 10.0


class Outstanding(Generic[M]):
    """Fails each write with TimeoutError when its time is over."""

    def __init__(self) -> None:
        #: The writes in order of arrival, so that the first one is the first to give up; and how many more seconds each
        #: may be given. A loop that stands still again and again must not keep them for ever.
        self._writes: dict[Write[M], float] = {}
        self._timer: asyncio.Handle | None = None
        #: The loop's time when the timer is due.
        self._next = float("inf")
        self._loop = asyncio.get_running_loop()

    def enter(self, write: Write[M]) -> None:
        """Note that the write's caller waits from now on."""
        self._writes[write] = _MORE_MAX_S
        if self._timer is None or write.deadline < self._next:
            self._expire_at(write.deadline)

    def leave(self, write: Write[M]) -> None:
        """Note that the write's caller has its answer, or has gone."""
        del self._writes[write]

    async def ended(self, timeout_s: float) -> None:
        """Return when all writes that wait now have ended, or after `timeout_s`."""
        if self._writes:
            await asyncio.wait([write.done for write in self._writes], timeout=timeout_s)

    def close(self) -> None:
        """Fail the writes that still wait."""
        for write in self._writes:
            settle(
                write.done, AppendUnknown("closed") if write.maybe_behind is not None else Closed("the store is closed")
            )
        if self._timer is not None:
            self._timer.cancel()

    def _expire_at(self, deadline: float) -> None:
        # One timer for all: a timer per write costs a seventh of a write.
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._next = self._loop.call_at(deadline, self._expire), deadline

    def _expire(self, turns: int = BEHIND_TURNS) -> None:
        """Fail the writes whose time is over, and schedule the next look."""
        self._timer = None
        now = self._loop.time()
        if turns == BEHIND_TURNS and (late_s := now - self._next) >= LATE_S:
            self._prolong(now, late_s)
        if turns and any(write.deadline <= now for write in self._writes):  # what has arrived is read first
            self._timer = self._loop.call_soon(self._expire, turns - 1)
            return
        next_ = None
        for write in self._writes:
            if write.done.done():
                continue
            if write.deadline <= now:
                write.done.set_exception(TimeoutError())
            elif next_ is None or write.deadline < next_:
                next_ = write.deadline
        if next_ is not None:
            self._expire_at(next_)

    def _prolong(self, now: float, late_s: float) -> None:
        """Give the writes more time: the loop stood still, and none of them went on."""
        for write, left_s in self._writes.items():
            until = now + min(late_s, left_s)
            if write.deadline < until:
                self._writes[write] = left_s - (until - max(write.deadline, now))
                write.deadline = until
