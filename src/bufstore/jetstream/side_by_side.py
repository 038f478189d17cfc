"""Messages that are sent with one write and answered one by one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from bufstore.jetstream.questions import Doubt

#: Gets each message's number, once, and its answer or the error that says why there is none.
Ended = Callable[[int, bytes | Exception], None]


class SideBySide:
    """Which messages have ended, and which were refused by a node that may no longer lead. On one event loop."""

    def __init__(self, count: int, ended: Ended, doubt: Doubt | None) -> None:
        """`doubt`: see `Connection.write`."""
        self._ended = ended
        self._doubt = doubt
        self._left = set(range(count))
        self._refused: dict[int, bytes] = {}
        self._news = asyncio.Event()

    def heard(self, number: int, outcome: bytes | Exception) -> bool:
        """Note an answer to one message, or why there is none. Returns whether another, right answer may still come."""
        if number not in self._left:
            return False
        if self._doubt is not None and isinstance(outcome, bytes) and self._doubt.refused(outcome):
            self._refused.setdefault(number, outcome)
            self._news.set()
            return True
        self._end(number, outcome)
        return False

    @property
    def ended(self) -> bool:
        """Whether all messages have ended."""
        return not self._left

    async def all_ended(self, prove: Callable[[Doubt], Awaitable[None]]) -> None:
        """Wait for the answers. A refused message has ended when no other answer has come by the time of a proof.

        Call this when all have been sent: a proof covers what was sent before it. Raises what `prove` raises; the
        refused messages have not ended then.
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
