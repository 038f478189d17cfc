"""Taking things for callers that may be cancelled meanwhile: nothing stays half taken, or taken for nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from bufstore.errors import BufstoreError
from bufstore.tasks import outlasted, spawn

T = TypeVar("T")
HandBack = Callable[[Any], Awaitable[object]]

#: How long `aclose` waits, in seconds. Steps have bounds of their own; a cancelled handler that does not end has none.
_PATIENCE_S = 20.0


class Takes:
    """What is being taken and handed back. Close it before the connection, which handing back needs."""

    def __init__(self) -> None:
        self._ending = set[asyncio.Future[Any]]()

    async def take(self, taking: Coroutine[Any, Any, T], hand_back: HandBack) -> T:
        """Return what `taking` gives. A cancelled caller leaves at once; `taking` goes on, and its result goes back."""
        task = spawn(taking)
        try:
            return await outlasted(task)
        except asyncio.CancelledError:
            self.abandon(task, hand_back)
            raise

    def abandon(self, taking: asyncio.Future[Any], hand_back: HandBack) -> None:
        """Hand back what `taking` gives: its caller does not want it any more."""
        self.leave(spawn(_hand_back(taking, hand_back)))

    def leave(self, ending: asyncio.Future[Any]) -> None:
        """Have `aclose` wait for `ending`, because nobody else may."""
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def to_the_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result. It goes on to its end however often the caller is cancelled; `aclose` waits for it."""
        task = spawn(work)
        self.leave(task)
        return await outlasted(task)

    async def aclose(self) -> None:
        """Return when all is handed back, or after a time: the rest comes back by itself when its time is over."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + _PATIENCE_S
        while self._ending and (left_s := ends_at - loop.time()) > 0:
            await asyncio.wait(self._ending, timeout=left_s)  # a caller that is cancelled here stops none of them


async def _hand_back(taking: asyncio.Future[Any], hand_back: HandBack) -> None:
    with suppress(BufstoreError):  # what is not handed back comes back when its time is over
        if (taken := await taking) is not None:
            await hand_back(taken)
