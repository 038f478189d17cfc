"""Tasks and calls side by side, for whoever has begun them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


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
