"""Connections to Postgres for the baselines: a fixed number, lent in turn, with as little overhead as possible."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from psycopg import AsyncConnection


class Connections:
    """`size` connections in autocommit that prepare statements at their first use."""

    def __init__(self) -> None:
        self._all: list[AsyncConnection[Any]] = []
        self._idle: list[AsyncConnection[Any]] = []
        self._waiting: deque[asyncio.Future[AsyncConnection[Any]]] = deque()

    @classmethod
    async def open(cls, dsn: str, size: int) -> Connections:
        """Connect."""
        self = cls()
        for _ in range(size):
            connection = await AsyncConnection.connect(dsn, autocommit=True, prepare_threshold=0)
            self._all.append(connection)
            self._idle.append(connection)
        return self

    async def close(self) -> None:
        """Disconnect."""
        for connection in self._all:
            await connection.close()

    async def execute(self, sql: str, parameters: Any = ()) -> list[tuple[Any, ...]]:
        """Run one statement on the next free connection, in its own transaction, and return its rows."""
        if self._idle:
            connection = self._idle.pop()
        else:
            turn: asyncio.Future[AsyncConnection[Any]] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            connection = await turn
        try:
            cursor = connection.cursor(binary=True)
            await cursor.execute(sql, parameters)
            return await cursor.fetchall() if cursor.description else []
        finally:
            # To the caller that waits longest: one that comes back at once must not overtake the others.
            if self._waiting:
                self._waiting.popleft().set_result(connection)
            else:
                self._idle.append(connection)
