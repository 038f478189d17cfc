"""Tasks and calls side by side, for whoever has begun them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from bufstore.errors import ConfigError

T = TypeVar("T")


class StrayCancelledError(Exception):
    """Something that this task awaits was cancelled, and not this task."""


@contextmanager
def own_cancels_only() -> Iterator[None]:
    """Raise StrayCancelledError for a CancelledError of something else: it is an error as any other, and ends no loop.

    An app's code may await what another part of the app cancels.
    """
    try:
        yield
    except asyncio.CancelledError as e:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise StrayCancelledError("something that was awaited was cancelled") from e


def check_loop(home: asyncio.AbstractEventLoop | None) -> None:
    """Raise ConfigError on another loop than `home`: what is kept for later calls belongs there, and would break."""
    if asyncio.get_running_loop() is not home:
        raise ConfigError("this store was opened on another event loop: use it there, or a blocking one")


def spawn(work: Awaitable[T], *, name: str | None = None) -> asyncio.Task[T]:
    """A task that begins one turn of the loop later, also where an app has made the tasks of its loop eager.

    Who keeps a task must have it before its work begins, or has even ended.
    """
    loop = asyncio.get_running_loop()
    coroutine = work if asyncio.iscoroutine(work) else _result(work)
    # asyncio tells nobody whether a factory makes them eager (`asyncio.eager_task_factory`, from Python 3.12 on).
    if "eager_task_factory" in getattr(loop.get_task_factory(), "__qualname__", ""):
        return asyncio.Task(coroutine, loop=loop, name=name)
    return loop.create_task(coroutine, name=name)


async def _result(work: Awaitable[T]) -> T:
    return await work


async def end(*tasks: asyncio.Future[Any] | None) -> None:
    """End these tasks, if they have not ended; nobody wants their answers any more."""
    left = [task for task in tasks if task is not None]
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


async def together(calls: Iterable[Awaitable[T]]) -> list[T]:
    """The results, in order; the first error once all have ended."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    found: list[T] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        found.append(result)
    return found
