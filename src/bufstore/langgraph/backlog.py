"""How much may wait for the log at the same time: whoever comes later waits for room, before it is serialized."""

from __future__ import annotations

import asyncio
from collections import deque

from bufstore.errors import Closed, LogUnavailable

#: What a write costs besides its payload.
_EACH_BYTES = 4096


class Backlog:
    """Counts the bytes of the writes that wait for the log, and lets others wait for room, first come, first served.

    A write that has room may be larger than the room that is left, so there is one write more than `bytes_max` allows.
    """

    def __init__(self, bytes_max: int, timeout_s: float) -> None:
        self.bytes_max, self._timeout_s = bytes_max, timeout_s
        self.bytes = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        #: One that waited has been told to go on, and has not yet said how large it is.
        self._one_goes_on = False
        self._closed = False

    @property
    def full(self) -> bool:
        """Whether one has to wait for room."""
        return self.bytes >= self.bytes_max or bool(self._waiting) or self._one_goes_on

    async def room(self) -> None:
        """Wait for room. What comes next, without a pause in between, is `enter`.

        Raises LogUnavailable (nothing was stored) when there is none in time, Closed.
        """
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
                f"{self.bytes} bytes wait for the log, and it took none of them in time; nothing was stored; retry"
            ) from None
        finally:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._one_goes_on = False
            elif turn in self._waiting:
                self._waiting.remove(turn)
            loop.call_soon(self._wake)  # once it has said how large it is

    def enter(self, size: int) -> int:
        """Count a write with a payload of this size; what to `leave` with."""
        cost = size + _EACH_BYTES
        self.bytes += cost
        return cost

    def leave(self, cost: int) -> None:
        """The write has ended."""
        self.bytes -= cost
        if self._waiting:
            self._wake()

    def close(self) -> None:
        """Whoever waits is told that nothing comes any more."""
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
