"""Bounds how many rows of a task are on their way at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class InFlight:
    """Bounds the rows on their way. A thread takes at most `share` rows at a time, so that no thread takes them all."""

    def __init__(self, rows: int) -> None:
        self.share = max(rows // 4, 1)
        self._free = asyncio.Semaphore(rows)
        # Without this lock, two threads that each hold a part of what they need would wait for each other.
        self._taking = asyncio.Lock()

    @asynccontextmanager
    async def taken(self, rows: int) -> AsyncIterator[None]:
        """Hold this many rows, at most a share, during the block."""
        held = 0
        try:
            async with self._taking:
                while held < rows:
                    await self._free.acquire()
                    held += 1
            yield
        finally:
            for _ in range(held):
                self._free.release()
