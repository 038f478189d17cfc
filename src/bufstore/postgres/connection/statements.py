"""Named statements (`bufstore.postgres.connection.migrate.queries`) on the connections of a pool."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, LiteralString, TypeVar

from psycopg import AsyncConnection

from bufstore.postgres.connection import arrays
from bufstore.postgres.connection.errors import NoAnswer, NoSession
from bufstore.postgres.connection.pool import Pool

R = TypeVar("R")

#: Who asks whether Postgres answers waits for two seconds: why it cannot be reached is said before that.
_REASON_S = 1.5


class Statements:
    """What a store asks Postgres, by name. Each call ends after `timeout_s`, and raises what `Pool.lend` raises."""

    def __init__(self, pool: Pool, texts: Mapping[str, LiteralString], timeout_s: float) -> None:
        self.pool, self.texts, self.timeout_s = pool, texts, timeout_s

    def lend(
        self, away_s: float | None = None, timeout_s: float | None = None
    ) -> AbstractAsyncContextManager[AsyncConnection[Any]]:
        """See `Pool.lend`. `timeout_s`: None for that of these statements."""
        return self.pool.lend(self.timeout_s if timeout_s is None else timeout_s, away_s)

    async def on(self, connection: AsyncConnection[Any], name: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Return the rows of a statement on this connection."""
        return await arrays.rows_of(connection, self.texts[name], parameters)

    async def send(self, connection: AsyncConnection[Any], name: str, *parameters: Any) -> arrays.ArrayCursor:
        """Execute a statement. In a pipeline its rows come later, through the cursor."""
        cursor = arrays.ArrayCursor(connection)
        await cursor.execute(self.texts[name], parameters, binary=True)
        return cursor

    async def run(self, name: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Return the rows of a statement. It is tried once: without an answer it may have been carried out."""
        async with self.lend() as connection:
            return await self.on(connection, name, *parameters)

    async def first(self, name: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Return the rows of a small statement on which many wait: it gets its connection before others."""
        async with self.lend(away_s=self.timeout_s) as connection:  # who says how long it waits comes first
            return await self.on(connection, name, *parameters)

    async def read(self, name: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Return the rows of a statement that only reads. It is tried again if a connection was lost."""
        return await self.answered(lambda connection: self.on(connection, name, *parameters))

    async def ping(self, name: str, *parameters: Any) -> None:
        """Carry out a statement that only reads; as `read`, but say soon why Postgres cannot be reached."""
        await self.answered(lambda connection: self.on(connection, name, *parameters), _REASON_S)

    async def answered(self, read: Callable[[AsyncConnection[Any]], Awaitable[R]], away_s: float | None = None) -> R:
        """Return what `read` finds. It reads once more if a connection was lost, or a pooler had no session for it.

        `away_s`: see `Pool.lend`. Who gives it wants to know soon why there is none: a pooler has said it.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.timeout_s
        again = False
        while True:
            try:
                async with self.lend(away_s, deadline - loop.time()) as connection:
                    return await read(connection)
            except (NoAnswer, NoSession) as e:
                said = isinstance(e, NoSession) and away_s is not None
                if again or said or loop.time() >= deadline:
                    raise
                again = True
