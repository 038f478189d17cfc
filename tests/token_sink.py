"""A sink for exclusive work: a Postgres table that refuses tokens older than it has seen (as in docs/TOKENS.md)."""

from __future__ import annotations

import psycopg


async def create(dsn: str, table: str) -> None:
    """Create the table, which holds each key's last value and token."""
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        await connection.execute(f"CREATE TABLE {table} (key text PRIMARY KEY, token bigint NOT NULL, value text)")


async def write(dsn: str, table: str, key: str, token: int, value: str) -> bool:
    """Write under a token; False if a later holder has already written."""
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        cursor = await connection.execute(
            f"INSERT INTO {table} AS t VALUES (%s, %s, %s) ON CONFLICT (key) DO UPDATE"
            " SET token = excluded.token, value = excluded.value WHERE t.token <= excluded.token",
            (key, token, value),
        )
        return cursor.rowcount == 1
