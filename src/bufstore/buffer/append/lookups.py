"""Looking up something of many threads in one request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Generic, TypeVar

V = TypeVar("V")


class Lookups(Generic[V]):
    """Joins the lookups of one turn of the event loop into one request."""

    def __init__(self, ask: Callable[[list[str]], Awaitable[Mapping[str, V]]]) -> None:
        self._ask = ask
        self._waiting: dict[str, asyncio.Future[V | None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def of(self, key: str) -> V | None:
        """What was found, if anything was. Raises what the request raises."""
        future = self._waiting.get(key)
        if future is None:
            if not self._waiting:
                task = asyncio.create_task(self._look())
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            future = self._waiting[key] = asyncio.get_running_loop().create_future()
        return await asyncio.shield(future)

    async def _look(self) -> None:
        waiting, self._waiting = self._waiting, {}
        try:
            found = await self._ask(list(waiting))
        except Exception as e:
            for future in waiting.values():
                future.set_exception(e)
                future.exception()
        else:
            for key, future in waiting.items():
                future.set_result(found.get(key))
