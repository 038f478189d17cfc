"""Looks up something about many threads in one request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Generic, TypeAlias, TypeVar

from bufstore.errors import LogUnavailable
from bufstore.tasks import interrupted, spawn

V = TypeVar("V")
_Waiting: TypeAlias = dict[str, list[asyncio.Future[V | None]]]


class Lookups(Generic[V]):
    """Joins the lookups of one turn of the event loop into one request."""

    def __init__(self, ask: Callable[[list[str]], Awaitable[Mapping[str, V]]]) -> None:
        self._ask = ask
        #: The callers by key: each has a future of its own, so that one that gives up ends no other.
        self._waiting: _Waiting[V] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def of(self, key: str) -> Awaitable[V | None]:
        """What the request finds for the key, or None. Raises what the request raises."""
        waiting = self._waiting
        if not waiting:
            spawn(self._look(waiting), among=self._tasks).add_done_callback(partial(self._looked, waiting))
        future: asyncio.Future[V | None] = asyncio.get_running_loop().create_future()
        waiting.setdefault(key, []).append(future)
        return future

    async def _look(self, waiting: _Waiting[V]) -> None:
        self._waiting = {}
        try:
            found = await self._ask(list(waiting))
        except Exception as e:
            _fail(waiting, e)
        else:
            for key, callers in waiting.items():
                for future in callers:
                    if not future.done():
                        future.set_result(found.get(key))

    def _looked(self, waiting: _Waiting[V], task: asyncio.Task[None]) -> None:
        if self._waiting is waiting:  # the task was cancelled before it began
            self._waiting = {}
        if task.cancelled() or interrupted(task):
            _fail(waiting, LogUnavailable("the task that looks things up was cancelled or interrupted; retry"))


def _fail(waiting: _Waiting[V], error: Exception) -> None:
    for callers in waiting.values():
        for future in callers:
            if not future.done():
                future.set_exception(error)
                future.exception()
