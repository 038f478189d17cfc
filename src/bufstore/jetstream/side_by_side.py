"""Messages that are sent with one write and answered each for itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from bufstore.jetstream.questions import Doubt


class SideBySide:
    """Which of them have ended, and which a node refused that may not lead any more. On one event loop."""

    def __init__(self, count: int, ended: Callable[[int, bytes | Exception], None], doubt: Doubt | None) -> None:
        """`ended` gets the number of each, once, and its answer or the error; `doubt`: see `Connection.write_each`."""
        self._ended = ended
        self._doubt = doubt
        self._left = set(range(count))
        self._refused: dict[int, bytes] = {}
        self._news = asyncio.Event()

    def heard(self, number: int, outcome: bytes | Exception) -> bool:
        """An answer to one, or why there is none. Returns whether another answer may come and be the right one."""
        if number not in self._left:
            return False
        if self._doubt is not None and isinstance(outcome, bytes) and self._doubt.refused(outcome):
            self._refused.setdefault(number, outcome)
            self._news.set()
            return True
        self._end(number, outcome)
        return False

    async def all_ended(self, prove: Callable[[Doubt], Awaitable[None]]) -> None:
        """Wait for the answers. What is refused has ended when no other answer has come by the time of a proof.

        To be called when all have been sent: a proof is of what was sent before. Raises what `prove` raises; what is
        refused has not ended then.
        """
        while self._left:
            await self._news.wait()
            self._news.clear()
            if self._refused and self._doubt is not None:
                refused, self._refused = self._refused, {}
                await prove(self._doubt)
                for number in self._left & refused.keys():
                    self._end(number, refused[number])

    def _end(self, number: int, outcome: bytes | Exception) -> None:
        self._left.discard(number)
        self._ended(number, outcome)
        if not self._left:
            self._news.set()
