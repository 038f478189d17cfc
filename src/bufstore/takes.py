"""What is taken for callers who may be cancelled meanwhile: nothing is taken by half, or for nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from bufstore.errors import BufstoreError
from bufstore.tasks import spawn

T = TypeVar("T")
HandBack = Callable[[Any], Awaitable[object]]

#: Steps have a time of their own; a handler that is cancelled and does not end has none.
_PATIENCE_S = 20.0


class Takes:
    """Whoever has it closes it first: what is handed back needs the connection."""

    def __init__(self) -> None:
        self._ending = set[asyncio.Future[Any]]()

    async def take(self, taking: Coroutine[Any, Any, T], hand_back: HandBack) -> T:
        """What `taking` gives. A cancelled caller leaves at once; `taking` goes on, and what it took is handed back."""
        task = spawn(taking)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self.abandon(task, hand_back)
            raise

    def abandon(self, taking: asyncio.Future[Any], hand_back: HandBack) -> None:
        """Nobody wants what `taking` gives any more: it is handed back."""
        self.leave(spawn(_hand_back(taking, hand_back)))

    def leave(self, ending: asyncio.Future[Any]) -> None:
        """Nobody else may wait for it; `aclose` does."""
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def aclose(self) -> None:
        """Return when all is handed back, or cannot be for so long that it comes back when its time is over."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + _PATIENCE_S
        while self._ending and (left_s := ends_at - loop.time()) > 0:
            await asyncio.wait(self._ending, timeout=left_s)  # who is cancelled here stops none of it


async def _hand_back(taking: asyncio.Future[Any], hand_back: HandBack) -> None:
    with suppress(BufstoreError):  # then it comes back when its time is over
        if (taken := await taking) is not None:
            await hand_back(taken)
