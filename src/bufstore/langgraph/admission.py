"""Bounds how many reads are under way at the same time: later ones wait for a turn before their time begins."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from types import TracebackType


class Admission:
    """Lets reads in, a number of them at once, first come, first served: a context manager around each read.

    While reads succeed, a turn comes. Once one finds that a server does not answer, all that wait go on at once, so
    that each ends within the time of a read, too (docs/adr/0061).
    """

    def __init__(self, at_once: int, is_outage: Callable[[Exception], bool]) -> None:
        """`is_outage`: whether a read ended with this error because a server does not answer anybody."""
        self._at_once, self._inside, self._is_outage = at_once, 0, is_outage
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def __aenter__(self) -> None:
        if self._inside < self._at_once:
            self._inside += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except BaseException:
            if not turn.cancel() and not turn.cancelled():  # its turn had come
                self._leave()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and self._is_outage(error):
            while self._admit_next():
                self._inside += 1
        self._leave()

    def _leave(self) -> None:
        """Give up a place, or hand it on."""
        if self._inside > self._at_once or not self._admit_next():
            self._inside -= 1

    def _admit_next(self) -> bool:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return True
        return False
