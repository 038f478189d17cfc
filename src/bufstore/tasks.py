"""Tasks and calls side by side, for whoever has begun them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Any, TypeVar

from bufstore.errors import ConfigError

T = TypeVar("T")


def check_loop(home: asyncio.AbstractEventLoop | None) -> None:
    """Raise ConfigError on another loop than `home`: what is kept for later calls belongs there, and would break."""
    if asyncio.get_running_loop() is not home:
        raise ConfigError("this store was opened on another event loop: use it there, or a blocking one")


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
