"""The buffers in front of one store: one, or one for each lane (`bufstore.buffer.lanes`)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Generic, TypeVar

from bufstore.buffer.buffer import Buffer
from bufstore.buffer.domain import C, M, S
from bufstore.buffer.lanes import lane_of
from bufstore.home import Home
from bufstore.tasks import Closing, spawn, together

T = TypeVar("T")


class Lanes(Generic[C, S, M]):
    """Finds the buffer of a thread, and asks all buffers what concerns every thread."""

    def __init__(self, buffers: Sequence[Buffer[C, S, M]]) -> None:
        """`buffers`: in the order of their lanes."""
        self.all = tuple(buffers)
        #: The first lane's buffer. It keeps what exists once for all threads, like the record of changes of lineage.
        self.first = self.all[0]
        self.config = self.first.config
        #: All lanes have their ledgers in one database.
        self.same_postgres = self.first.reads.same_postgres
        self._only = self.first if len(self.all) == 1 else None
        self._home = Home()
        self._closing = Closing()

    def of(self, name: str) -> Buffer[C, S, M]:
        """The buffer of a thread, or the one whose shared state has a record of this name (a run's id, say)."""
        return self._only or self.all[lane_of(name, self.config.log)]

    def shared_out(self, thread_ids: Iterable[str]) -> list[tuple[Buffer[C, S, M], list[str]]]:
        """Group these threads by their buffers; buffers that have none of them are left out."""
        found: dict[Buffer[C, S, M], list[str]] = {}
        for thread_id in thread_ids:
            found.setdefault(self.of(thread_id), []).append(thread_id)
        return list(found.items())

    async def each(self, ask: Callable[[Buffer[C, S, M]], Awaitable[T]]) -> list[T]:
        """Ask all buffers, and return their answers in order. If any fails, raises the first error once all ended."""
        self._home.check()
        return await together(ask(buffer) for buffer in self.all)

    async def open(self) -> None:
        """Open all, or none. Raises as `Buffer.open`."""
        opened: list[Buffer[C, S, M]] = []

        async def begin(buffer: Buffer[C, S, M], away: bool = False) -> None:
            await buffer.open(away=away)
            opened.append(buffer)

        try:
            await begin(self.first)  # this opens the store, and makes its tables
            await together(begin(buffer, self.first.began_away) for buffer in self.all[1:])
        except BaseException:
            await self._closing(lambda: self._release(opened))
            raise

    async def _release(self, opened: Sequence[Buffer[C, S, M]]) -> None:
        """Release the first buffer, and the store with it, after the others."""
        try:
            await together(buffer.release() for buffer in opened if buffer is not self.first)
        finally:
            if self.first in opened:
                await self.first.release()

    async def aclose(self) -> None:
        """Close all. Idempotent. In a process that was forked off it does nothing: the buffers are the parent's."""
        if self._home.closes_here():
            await self._closing(self._close)

    async def _close(self) -> None:
        """Close all at once; the first buffer closes the store, once the others are closed."""
        others = spawn(together(buffer.aclose() for buffer in self.all[1:]), name="bufstore-close-others")

        async def closed() -> None:
            await asyncio.wait([others])

        try:
            await self.first.aclose(before_store=closed)
        finally:
            await others

    async def force_flush(self, thread_id: str | None, *, timeout_s: float | None = None) -> None:
        """See `Buffer.force_flush`. None: everything that all buffers have acknowledged now."""
        if thread_id is not None:
            await self.of(thread_id).force_flush(thread_id, timeout_s=timeout_s)
        else:
            await self.each(lambda buffer: buffer.force_flush_all(timeout_s=timeout_s))

    async def force_flush_all(self, *, timeout_s: float | None = None) -> None:
        """See `Buffer.force_flush_all`; covers what all buffers have acknowledged now."""
        await self.force_flush(None, timeout_s=timeout_s)

    async def broken(self) -> frozenset[str]:
        """See `Ledger.broken`."""
        return frozenset[str]().union(*await self.each(lambda buffer: buffer.ledger.broken()))
