"""One call for everybody who asks at about the same time; it begins after the last of them asked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from bufstore.errors import Closed
from bufstore.tasks import end, see_error, spawn, unless_closed

T = TypeVar("T")


class SharedCall(Generic[T]):
    """A caller that asks while a call runs gets the next call's answer: the running one began before it asked."""

    def __init__(self, call: Callable[[], Awaitable[T]]) -> None:
        self._call = call
        self._running: asyncio.Task[T] | None = None
        self._next: asyncio.Task[T] | None = None
        self.closed = False

    async def __call__(self) -> T:
        """Return the answer of a call that begins after this one.

        Raises what that call raises, Closed, and LogUnavailable when somebody cancels it.
        """
        if self.closed:
            raise Closed("the store is closed")
        if self._next is None or self._next.done():  # done: it was ended before it began
            self._next = spawn(self._run(self._running), name="bufstore-shared-call", apart=True)
            self._next.add_done_callback(see_error)
        return await unless_closed(self._next, lambda: self.closed)

    async def aclose(self) -> None:
        """End the calls; a caller that waits for one gets Closed."""
        self.closed = True
        await end(self._running, self._next)

    async def _run(self, before: asyncio.Task[T] | None) -> T:
        if before is not None:
            await asyncio.wait([before])
        self._running, self._next = self._next, None
        return await self._call()
