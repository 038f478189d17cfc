"""*upsert*: one bare single-row upsert per checkpoint, autocommit: the least that any Postgres store could do.

It does less than a checkpoint: no run, no history, no version, no detection of repeats.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from bench.baselines.connections import Connections
from bench.contestant import Contestant, body, closed_loop


class Upsert(Contestant):
    """A table of id and body, and a pool of 16 connections."""

    server = "postgres"

    def __init__(self, place: Any, pool: int = 16) -> None:
        super().__init__(place)
        self._size = pool
        self._table = f"upsert_{place.name}"
        self._sql = f"INSERT INTO {self._table} VALUES (%s, %b) ON CONFLICT (id) DO UPDATE SET body = excluded.body"

    async def open(self) -> None:
        self._connections = await Connections.open(self.place.dsn, self._size)
        await self._connections.execute(f"CREATE TABLE IF NOT EXISTS {self._table} (id text PRIMARY KEY, body bytea)")

    async def close(self) -> None:
        await self._connections.close()

    async def step(self, thread: str, number: int) -> None:
        await self._connections.execute(self._sql, [thread, body(number)])

    async def load_many(self, callers: int, seconds: float, threads: int, label: str) -> dict[str, float]:
        """Run `load` with callers that go through `threads` threads in turn."""
        names = [f"{label}-{i}" for i in range(threads)]

        def step(who: int, number: int) -> Any:
            return self.step(names[(who + number * callers) % threads], number)

        return await closed_loop(step, callers, seconds, self.server_pids())

    async def replay(self, conversations: Sequence[Sequence[Any]], slots: int) -> float:
        """Upsert the whole state at every step of the conversations, `slots` conversations at a time."""
        waiting = list(enumerate(conversations))
        began = time.perf_counter()

        async def slot() -> None:
            while waiting:
                number, messages = waiting.pop()
                for end in range(1, len(messages) + 1):
                    state = msgspec.msgpack.encode(messages[:end])
                    await self._connections.execute(self._sql, [f"conversation-{number}", state])

        await asyncio.gather(*(slot() for _ in range(slots)))
        return time.perf_counter() - began
