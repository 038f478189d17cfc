"""One event loop for all that a process does, in a thread of its own, and the objects that are opened on it.

A driver needs it because a notebook's own loop is already running. A Python worker of Spark keeps it between tasks.
Spark ends idle workers without notice. So everything a task writes is durable before the task ends, and nothing is lost
with the open objects.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Hashable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar, cast

from bufstore.at_exit import exit_came, held_at_exit
from bufstore.errors import Closed
from bufstore.tasks import outlasted, spawn

T = TypeVar("T")

#: How often, in seconds, a waiting caller looks whether the interpreter ends.
_LOOKS_S = 1.0


class Loop:
    """An event loop in a thread of its own, and the objects that were opened on it.

    `bufstore.blocking` has a class of its own: most of the code there ends a loop and the calls that still run on it,
    but this loop ends with the process. All that both could share is how a caller waits for its call.
    """

    def __init__(self) -> None:
        self._loop = _new_loop()
        self._opened: dict[Hashable, asyncio.Task[Any]] = {}
        threading.Thread(target=self._serve, name="bufstore-spark", daemon=True).start()

    def _serve(self) -> None:
        with held_at_exit(self._loop):
            self._loop.run_forever()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the loop, and return its result. Raises Closed when the interpreter ends."""
        running = self.start(work)
        try:
            while not running.done():
                with suppress(TimeoutError):
                    running.exception(_LOOKS_S)
                if exit_came() and not running.done():
                    raise Closed("the interpreter is shutting down")
            return cast(T, running.result())
        except BaseException:  # also Ctrl-C
            running.cancel()
            raise

    def start(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run `work` on the loop beside the caller. Raises Closed when the interpreter ends."""
        if exit_came():
            work.close()
            raise Closed("the interpreter is shutting down")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def each(self, found: AsyncGenerator[T]) -> Iterator[T]:
        """Yield what the generator yields, and close it, also when the caller takes no more."""

        async def next_() -> T:
            return await anext(found)

        try:
            with suppress(StopAsyncIteration):
                while True:
                    yield self.run(next_())
        finally:
            with suppress(Closed):
                self.run(found.aclose())

    async def opened(self, key: Hashable, open_: Callable[[], Awaitable[T]]) -> T:
        """Return the object that `open_` made for this key, now or for an earlier task of this process."""
        task = self._opened.get(key)
        if task is None or (task.done() and task.exception() is not None):

            async def opening() -> T:
                return await open_()

            task = self._opened[key] = spawn(opening())
        return cast(T, await outlasted(task))


_lock = threading.Lock()
#: The loop of each process, by process id: a fork must not use its parent's loop.
_loops: dict[int, Loop] = {}


def loop() -> Loop:
    with _lock:
        found = _loops.get(os.getpid())
        if found is None:
            found = _loops[os.getpid()] = Loop()
        return found


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ModuleNotFoundError:
        return asyncio.new_event_loop()
    found: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return found
