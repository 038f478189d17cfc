"""Removes consumers that this process made and no longer follows.

A consumer that nobody uses goes by itself after a minute, but each election of its leader begins that
minute again. Where leaders are elected often, abandoned consumers pile up, and each of them holds elections of its own:
the consumers that are needed get their leaders later. So a removal is tried until the server has answered, and for some
seconds longer, because a request to make the consumer may still be on its way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from bufstore.errors import BufstoreError, LogUnavailable
from bufstore.jetstream.errors import ConsumerMissing, StreamMissing
from bufstore.tasks import end, spawn

_PAUSE_S = 2.0
_LATE_S = 10.0


class Leftovers:
    """The consumers that are still to be removed."""

    def __init__(self, remove: Callable[[str], Awaitable[object]]) -> None:
        self._remove = remove
        #: By consumer: the time until which a late request may make it once more.
        self._names: dict[str, float] = {}
        self._task: asyncio.Task[None] | None = None

    def add(self, name: str) -> None:
        """Remove this consumer as soon as that is possible. Nobody may make a consumer of this name again."""
        self._names[name] = asyncio.get_running_loop().time() + _LATE_S
        if self._task is None or self._task.done():
            self._task = spawn(self._remove_all(), name="bufstore-leftover-consumers")

    async def aclose(self) -> None:
        """Remove no more consumers; the server removes the rest, in its time."""
        await end(self._task)

    async def _remove_all(self) -> None:
        while True:
            for name, until in list(self._names.items()):
                if await self._answered(name) and asyncio.get_running_loop().time() >= until:
                    del self._names[name]
            if not self._names:
                return
            await asyncio.sleep(_PAUSE_S)

    async def _answered(self, name: str) -> bool:
        try:
            await self._remove(name)
        except (ConsumerMissing, StreamMissing):
            return True
        except LogUnavailable:
            return False
        except BufstoreError:  # the removal is not permitted, or JetStream is switched off
            return True
        return True
