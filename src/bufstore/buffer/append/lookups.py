"""Looks up something about many threads in one request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Generic, TypeVar

from bufstore.errors import LogUnavailable
from bufstore.tasks import spawn

V = TypeVar("V")


class Lookups(Generic[V]):
    """Joins the lookups of one turn of the event loop into one request."""

    def __init__(self, ask: Callable[[list[str]], Awaitable[Mapping[str, V]]]) -> None:
        self._ask = ask
        #: The callers by key: each has a future of its own, so that one that gives up ends no other.
        self._waiting: dict[str, list[asyncio.Future[V | None]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def of(self, key: str) -> Awaitable[V | None]:
        """What the request finds for the key, or None. Raises what the request raises."""
        if not self._waiting:
            spawn(self._look(), among=self._tasks)
        future: asyncio.Future[V | None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, []).append(future)
        return future

    async def _look(self) -> None:
        waiting, self._waiting = self._waiting, {}
        try:
            found = await self._ask(list(waiting))
        except (Exception, KeyboardInterrupt) as e:
            error = e if isinstance(e, Exception) else LogUnavailable("the look-up was interrupted")
            for callers in waiting.values():
                for future in callers:
                    if not future.done():
                        future.set_exception(error)
                        future.exception()
            if error is not e:
                raise
        else:
            for key, callers in waiting.items():
                for future in callers:
                    if not future.done():
                        future.set_result(found.get(key))
