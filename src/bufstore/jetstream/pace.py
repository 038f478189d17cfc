"""How long to wait for answers while a large write is on its way.

A write that gets no answer in time costs the connection, together with what may still wait in its buffers. On a slow
network that time may be over before the bytes have left. So as long as bytes of a large write leave, the connection is
alive, and everybody who waits for the answer to a write on it waits anew; callers have deadlines of their own.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

#: How many bytes may be on their way unseen, with a margin: in buffers of the system, here and at the other end.
_UNSEEN_BYTES = 16 << 20
#: Buffers on the way free space in steps: for this long nothing may move although all is well.
_STEP_S = 8.0
_LOOK_S = 1.0


class _Client(Protocol):
    def heard(self) -> None: ...


class Pace:
    """The pace of the writes on one connection."""

    def __init__(self) -> None:
        #: By token: each waiter for an answer, its deadline, and how long it waits while nothing moves.
        self._limits: dict[str, tuple[asyncio.Timeout, float]] = {}
        self._alive_until = 0.0
        self._keeper: asyncio.TimerHandle | None = None

    def begin(self, token: str, limit: asyncio.Timeout, timeout_s: float) -> None:
        """Somebody waits for an answer, in this block."""
        self._limits[token] = limit, timeout_s
        until = self._alive_until + timeout_s  # behind what is on its way
        if until > (limit.when() or 0.0):
            limit.reschedule(until)

    def end(self, token: str) -> None:
        """The waiter is gone."""
        self._limits.pop(token, None)

    def moved(self, client: _Client, patience_s: float = _STEP_S) -> None:
        """Bytes of a large write have left: wait anew, and that much longer."""
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
        """A large write was answered: it has arrived, and so has everything before it."""
        now = asyncio.get_running_loop().time()
        self.lost()
        for limit, timeout_s in self._limits.values():
            if not limit.expired() and (limit.when() or 0.0) > now + timeout_s:
                limit.reschedule(now + timeout_s)

    def _keep(self, client: _Client, loop: asyncio.AbstractEventLoop) -> None:
        """The time until which a silent client counts as alive."""
        client.heard()
        again = loop.time() < self._alive_until
        self._keeper = loop.call_later(_LOOK_S, self._keep, client, loop) if again else None

    def lost(self) -> None:
        """The connection is gone."""
        if self._keeper is not None:
            self._keeper.cancel()
        self._keeper, self._alive_until = None, 0.0


class Watch:
    """How one write leaves."""

    def __init__(self, pace: Pace, client: _Client) -> None:
        self._pace = pace
        self._client = client
        self._size = 0
        self._began = 0.0

    def moved(self, size: int) -> None:
        """This many waiting bytes of a large write have left."""
        now = asyncio.get_running_loop().time()
        self._began = self._began or now
        self._size += size
        self._pace.moved(self._client)

    def sent(self) -> None:
        """All of it has left."""
        if self._size:
            seconds = asyncio.get_running_loop().time() - self._began
            unseen = min(self._size, _UNSEEN_BYTES)  # takes as long as the rest did
            self._pace.moved(self._client, max(unseen * seconds / self._size, _STEP_S))

    def answered(self) -> None:
        """It has arrived."""
        if self._size:
            self._pace.arrived()
