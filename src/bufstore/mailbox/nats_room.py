"""Room in a mailbox's bucket: what is new is refused before the bucket is full, so that what waits can leave it.

A claim, an end, a renewal and a sweep write, too; on a full bucket nothing could be worked off, and nothing purged.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from bufstore.errors import LogFull
from bufstore.jetstream.messages import Outgoing
from bufstore.jetstream.stream import NatsStream

#: This part of the bucket is kept for what is there already.
_RESERVED = 8
#: What a message needs besides on its way through the mailbox: marks, a lease's entry, the thread's state.
_ON_ITS_WAY = 300
#: An instance looks again when it has added this part of the reserve: so many instances at once overrun it not.
_LOOKS = 16
#: How long a bucket that was full is taken for full.
_FULL_S = 0.2


def while_full(timeout_s: float) -> AsyncRetrying:
    """Other instances' groups on their way hold room that is free again a moment later, stored or refused.

    Many steps of one process wait for each other, too: one goes after the other, and each that ends makes room.
    """
    return AsyncRetrying(
        retry=retry_if_exception_type(LogFull),
        stop=stop_after_delay(timeout_s),
        wait=wait_random_exponential(multiplier=0.01, max=0.1),
        reraise=True,
    )


class Room:
    """How much a bucket of `limit` bytes (-1: no limit) takes."""

    def __init__(self, limit: int, stream: NatsStream) -> None:
        self._most = limit - limit // _RESERVED if limit >= 0 else None
        self._step = limit // (_RESERVED * _LOOKS)
        self._stream = stream
        self._known: int | None = None
        #: Bytes written since that was known, and on their way.
        self._added = self._flying = 0
        self._asking = asyncio.Lock()
        self._full_until = 0.0

    @asynccontextmanager
    async def taken(self, messages: Sequence[Outgoing]) -> AsyncIterator[None]:
        """Write these within, if there is room for something new of their size. Raises LogFull."""
        if self._most is None:
            yield
            return
        size = sum(len(m.subject) + len(m.body) + _ON_ITS_WAY for m in messages)
        async with self._asking:
            if self._known is None or self._added > self._step or self._is_full(size):
                await self._look()
        if self._is_full(size):
            self._full_until = time.monotonic() + _FULL_S
            raise LogFull(
                f"the mailbox needs {self._known} bytes for what it has, and takes nothing new above {self._most}: the "
                "rest of max_bytes is for the work that waits. Purge finished dispatches, or raise max_bytes."
            )
        self._flying += size
        try:
            yield
        finally:
            self._flying -= size
            self._added += size

    def _is_full(self, size: int) -> bool:
        assert self._most is not None
        return (self._known or 0) + self._added + self._flying + size > self._most

    async def _look(self) -> None:
        if time.monotonic() >= self._full_until:
            before = self._added
            state = (await self._stream.info())["state"]
            self._known = state["bytes"] + state["messages"] * _ON_ITS_WAY
            self._added -= before
