"""How long to wait for answers while a large write is on its way.

When a write gets no answer in time, its connection is thrown away, together with what still waits in the connection's
buffers. On a slow network that time may be over before the bytes have left. So while bytes of a large write leave, the
connection is alive, and every wait for the answer to a write on it starts over. Callers have deadlines of their own.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

#: How many bytes may be on their way unseen, with a margin: in the system's buffers, here and at the other end.
_UNSEEN_BYTES = 16 << 20
#: Seconds in which nothing may move although all is well: buffers on the way free space in steps.
_STEP_S = 8.0
_LOOK_S = 1.0


class _Client(Protocol):
    def heard(self) -> None: ...


class Limit(Protocol):
    """When a wait is over: an `asyncio.Timeout`, for one."""

    def when(self) -> float | None: ...
    def expired(self) -> bool: ...
    def reschedule(self, when: float | None) -> None: ...


class Pace:
    """The pace of the writes on one connection."""

    def __init__(self) -> None:
        #: By token: each waiter for an answer, its deadline, and how long it waits while nothing moves.
        self._limits: dict[str, tuple[Limit, float]] = {}
        self._alive_until = 0.0
        self._keeper: asyncio.TimerHandle | None = None

    def begin(self, token: str, limit: Limit, timeout_s: float) -> None:
        """Note that a caller waits for an answer in the block of `limit`."""
        self._limits[token] = limit, timeout_s
        until = self._alive_until + timeout_s  # the answer comes behind what is on its way
        if until > (limit.when() or 0.0):
            limit.reschedule(until)

    def end(self, token: str) -> None:
        """Forget a waiter that is gone."""
        self._limits.pop(token, None)

    def moved(self, client: _Client, patience_s: float = _STEP_S) -> None:
        """Note that bytes of a large write have left: every waiter waits anew, and `patience_s` longer."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._alive_until = max(self._alive_until, now + patience_s)
        if self._keeper is None:
            self._keep(client, loop)
        for limit, timeout_s in self._limits.values():
            until = now + timeout_s + patience_s
            if not limit.expired() and (limit.when() or 0.0) < until:
                limit.reschedule(until)

    def arrived(self) -> None:
        """Note that a large write was answered: it has arrived, and so has everything before it."""
        now = asyncio.get_running_loop().time()
        self.lost()
        for limit, timeout_s in self._limits.values():
            if not limit.expired() and (limit.when() or 0.0) > now + timeout_s:
                limit.reschedule(now + timeout_s)

    def _keep(self, client: _Client, loop: asyncio.AbstractEventLoop) -> None:
        """Have a silent client count as alive, until no more bytes can be on their way."""
        client.heard()
        again = loop.time() < self._alive_until
        self._keeper = loop.call_later(_LOOK_S, self._keep, client, loop) if again else None

    def lost(self) -> None:
        """Stop counting a silent client as alive: its connection is gone, or nothing is on its way."""
        if self._keeper is not None:
            self._keeper.cancel()
        self._keeper, self._alive_until = None, 0.0


class Watch:
    """Watches how one write leaves."""

    def __init__(self, pace: Pace, client: _Client) -> None:
        self._pace = pace
        self._client = client
        self._size = 0
        self._began = 0.0

    def moved(self, size: int) -> None:
        """Note that this many waiting bytes of a large write have left."""
        now = asyncio.get_running_loop().time()
        self._began = self._began or now
        self._size += size
        self._pace.moved(self._client)

    def sent(self) -> None:
        """Note that all bytes of the write have left."""
        if self._size:
            seconds = asyncio.get_running_loop().time() - self._began
            unseen = min(self._size, _UNSEEN_BYTES)  # these take as long as the rest did
            self._pace.moved(self._client, max(unseen * seconds / self._size, _STEP_S))

    def answered(self) -> None:
        """Note that the write has arrived."""
        if self._size:
            self._pace.arrived()
