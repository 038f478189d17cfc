"""Bounds how many reads are under way at the same time: later ones wait for a turn before their time begins."""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType

from bufstore.errors import ReadNotFresh, Unavailable


class Admission:
    """Lets reads in, a number of them at once, first come, first served: a context manager around each read.

    While reads succeed, a turn comes. Once one finds that a server does not answer, all that wait go on at once, so
    that each ends within the time of a read, too (docs/adr/0061).
    """

    def __init__(self, at_once: int) -> None:
        self._at_once, self._inside = at_once, 0
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
            if turn.done() and not turn.cancelled():  # its turn had come
                self._leave()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, (Unavailable, ReadNotFresh)):
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
