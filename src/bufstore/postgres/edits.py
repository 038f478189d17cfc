"""Edits written straight to Postgres: the thread's row is locked, the edit decided on what is there, and applied."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, LiteralString

from psycopg import AsyncConnection
from psycopg.errors import UniqueViolation

from bufstore.errors import AlreadyExists, OutcomeUnknown
from bufstore.postgres import columns
from bufstore.postgres.errors import NoAnswer
from bufstore.postgres.pool import Pool
from bufstore.postgres.rows import thread_rows
from bufstore.threads.coalesce import Fold
from bufstore.threads.edits import Change, Known
from bufstore.threads.model import ThreadChange
from bufstore.types import Receipt

Apply = Callable[[AsyncConnection[Any], Sequence[ThreadChange]], Awaitable[None]]


class DirectEdits:
    """Edits threads, each in one transaction of a few round trips: an edit is rare, a checkpoint is not."""

    def __init__(self, pool: Pool, sql: Mapping[str, LiteralString], timeout_s: float, apply: Apply) -> None:
        self._pool = pool
        self._sql = sql
        self._timeout_s = timeout_s
        self._apply = apply

    async def edit(self, wanted: Change) -> Receipt:
        """Decide and write. Raises what the decision raises, and OutcomeUnknown (repeating an edit is safe)."""
        try:
            async with self._pool.lend(self._timeout_s) as connection, connection.transaction():
                return await self._edit(connection, wanted)
        except NoAnswer as e:
            raise OutcomeUnknown(wanted.thread_id, secrets.token_hex(8)) from e
        except UniqueViolation:
            raise AlreadyExists(f"run {wanted.run_id!r} belongs to another thread") from None

    async def _edit(self, connection: AsyncConnection[Any], wanted: Change) -> Receipt:
        thread_id = wanted.thread_id
        new = await self._run(connection, "lock_new_thread", thread_id)
        ((saves,),) = await self._run(connection, "lock_thread", thread_id)
        rows = thread_rows(thread_id, await self._run(connection, "load_rows", thread_id))
        assert rows is not None
        exists = wanted.run_id is not None and bool(await self._run(connection, "load_run", wanted.run_id))
        payload = wanted.decide(Known(None if new else rows.thread, rows.messages, exists))
        fold = Fold(thread_id, len(rows.messages))
        fold.add(payload, 0, self_contained=False)
        change = fold.change()
        await self._apply(connection, [change])
        receipt = Receipt(thread_id, saves + 1, secrets.randbits(63), change.version)
        await self._run(connection, "count_save", thread_id, receipt.thread_seq, receipt.id)
        return receipt

    async def _run(self, connection: AsyncConnection[Any], name: str, *parameters: Any) -> list[tuple[Any, ...]]:
        cursor = columns.Cursor(connection)
        await cursor.execute(self._sql[name], parameters, binary=True)
        return await cursor.fetchall() if cursor.description else []
