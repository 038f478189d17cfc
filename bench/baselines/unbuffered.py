"""*unbuffered*: our PostgresThreadStore without the buffer, pool of 16, one round trip per checkpoint."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from bench.contestant import Contestant, text
from bufstore import PostgresThreadStore, Run


class Unbuffered(Contestant):
    """Does the whole work of a checkpoint in Postgres, at once."""

    server = "postgres"

    async def open(self) -> None:
        self.store = PostgresThreadStore(self.place.dsn, schema=self.place.name, pool_size=16, timeout_s=60)
        await self.store.open()
        await self.store.setup()

    async def close(self) -> None:
        await self.store.aclose()

    async def step(self, thread: str, number: int) -> None:
        await self.store.checkpoint_append(thread, [text(number)], Run(run_id=f"run-of-{thread}", thread_id=thread))

    async def replay(self, conversations: Sequence[Sequence[Any]], slots: int) -> float:
        """Save every step of the conversations as a checkpoint, `slots` conversations at a time."""
        waiting = list(enumerate(conversations))
        began = time.perf_counter()

        async def slot() -> None:
            while waiting:
                number, messages = waiting.pop()
                await self.converse(f"conversation-{number}", messages)

        await asyncio.gather(*(slot() for _ in range(slots)))
        return time.perf_counter() - began

    async def converse(self, thread: str, messages: Sequence[Any]) -> None:
        """Save each message of a conversation as a step."""
        run = Run(run_id=f"run-of-{thread}", thread_id=thread)
        for message in messages:
            await self.store.checkpoint_append(thread, [message], run)
