"""The end of tasks, for whoever has begun them."""

from __future__ import annotations

import asyncio
from typing import Any


async def end(*tasks: asyncio.Future[Any] | None) -> None:
    """End these tasks, if they have not ended; nobody wants their answers any more."""
    left = [task for task in tasks if task is not None]
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
