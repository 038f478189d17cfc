"""Bounds what waits for the log at the same time: a later write waits for room before it is serialized."""

from __future__ import annotations

import asyncio
from collections import deque

from bufstore.errors import Closed, LogUnavailable
from bufstore.home import Home

#: How many bytes a write costs besides its payload.
_EACH_BYTES = 4096


class Backlog:
    """Counts the bytes of the writes that wait for the log, and lets others wait for room, first come, first served.

    A write may be larger than the room that is left, so one write more than `bytes_max` allows may wait for the log.
    """

    def __init__(self, bytes_max: int, timeout_s: float) -> None:
        self.bytes_max, self._timeout_s = bytes_max, timeout_s
        self.bytes = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        #: Whether a write that waited has been told to go on and has not said yet how large it is.
        self._one_goes_on = False
        self._closed, self._home = False, Home()

    @property
    def full(self) -> bool:
        """Whether a write has to wait for room."""
        return self.bytes >= self.bytes_max or bool(self._waiting) or self._one_goes_on

    async def room(self) -> None:
        """Wait for room. The caller must call `enter` next, without a pause in between.

        Raises LogUnavailable (nothing was stored) when there is no room in time, and Closed.
        """
        self._home.check()  # on another loop it would not hear of its turn, and hold up those behind it
        if self._closed:
            raise Closed("the saver is closed")
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append(turn)
        self._wake()
        try:
            async with asyncio.timeout(self._timeout_s):
                await turn
        except TimeoutError:
            raise LogUnavailable(
                f"{self.bytes} bytes are already waiting for the log, and no space became free in time; this write was "
                "not stored; retry"
            ) from None
        finally:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._one_goes_on = False
            elif turn in self._waiting:
                self._waiting.remove(turn)
            loop.call_soon(self._wake)  # once this write has said how large it is

    def enter(self, size: int) -> int:
        """Count a write with a payload of this size. Returns what to `leave` with."""
        cost = size + _EACH_BYTES
        self.bytes += cost
        return cost

    def leave(self, cost: int) -> None:
        """Note that a write has ended."""
        self.bytes -= cost
        if self._waiting:
            self._wake()

    def close(self) -> None:
        """Let every write that waits for room fail with Closed, and later ones, too."""
        self._closed = True
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_exception(Closed("the saver is closed"))

    def _wake(self) -> None:
        while self._waiting and self.bytes < self.bytes_max and not self._one_goes_on:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                self._one_goes_on = True
