"""Edits written straight to Postgres: the thread's row is locked, the edit decided on what is there, and applied."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from psycopg import AsyncConnection
from psycopg.errors import UniqueViolation

from bufstore.errors import AlreadyExists, OutcomeUnknown
from bufstore.postgres.connection.errors import NoAnswer
from bufstore.postgres.connection.statements import Statements
from bufstore.threads.coalesce import Fold
from bufstore.threads.edits import Known, WantedEdit
from bufstore.threads.lineage import Family, LineageChange, carry_out, check, check_parent, nowhere
from bufstore.threads.model import Run, Thread, ThreadChange
from bufstore.threads.postgres.rows import thread_of, thread_state
from bufstore.types import Receipt

Apply = Callable[[AsyncConnection[Any], Sequence[ThreadChange]], Awaitable[None]]


class DirectEdits:
    """Edits threads, each in one transaction of a few round trips: an edit is rare, a checkpoint is not."""

    def __init__(self, sql: Statements, schema: str, apply: Apply) -> None:
        self._sql, self._schema, self._apply = sql, schema, apply

    async def edit(self, wanted: WantedEdit) -> Receipt:
        """Decide and write. Raises what the decision raises, and OutcomeUnknown (repeating an edit is safe)."""
        try:
            async with self._sql.lend() as connection, connection.transaction():
                return await self._edit_on(connection, wanted)
        except NoAnswer as e:
            raise OutcomeUnknown(wanted.thread_id, secrets.token_hex(8)) from e
        except UniqueViolation:
            raise AlreadyExists(f"run {wanted.run_id!r} belongs to another thread") from None

    async def change(self, wanted: LineageChange) -> Receipt:
        """Check and carry out a change of lineage, in one transaction. Raises what both raise, and OutcomeUnknown."""
        try:
            async with self._sql.lend() as connection, connection.transaction():
                await self._sql.on(connection, "lock_lineage", self._schema)
                family = self._family(connection)
                await check(family, wanted)
                return await carry_out(family, wanted)
        except NoAnswer as e:
            raise OutcomeUnknown(wanted.thread_id, secrets.token_hex(8)) from e

    async def checkpoint(self, connection: AsyncConnection[Any], parameters: Sequence[Any], run: Run) -> list[Any]:
        """Run the checkpoint function in turn with changes of lineage, if there is the parent; return its row.

        Raises LineageError, with nothing stored, if that would give the thread a parent that it cannot have. A write
        that repeats another, or is refused anyhow, gets as far as the function, and no further.
        """
        thread, thread_id, parent = self._family(connection).thread, run.thread_id, run.parent_thread_id
        async with connection.transaction():
            ((there, *_),) = await self._sql.on(connection, "lock_lineage_below", self._schema, parent)
            ((*row,),) = await self._sql.on(connection, "checkpoint", *parameters)
            stored = await thread(thread_id) if row[0] == "stored" else None
            # A thread that has got another parent meanwhile keeps it.
            if stored is not None and parent is not None and parent in (stored.parent_thread_id, thread_id):
                if not there:
                    raise nowhere(thread_id, parent)
                await check_parent(thread, thread_id, parent)
        return row

    async def _edit_on(self, connection: AsyncConnection[Any], wanted: WantedEdit) -> Receipt:
        """Decide and write in the transaction of the connection."""
        thread_id = wanted.thread_id
        locked: list[tuple[Any, ...]] = []
        # Another session that deletes the thread may hold its row during the lookup; then the row goes: look again.
        while not locked:
            new = await self._sql.on(connection, "lock_new_thread", thread_id)
            locked = await self._sql.on(connection, "lock_thread", thread_id)
        ((saves,),) = locked
        found = thread_state(thread_id, await self._sql.on(connection, "load_state", thread_id, False))
        exists = wanted.run_id is not None and bool(await self._sql.on(connection, "load_run", wanted.run_id))
        payload = wanted.decide(Known(None if new else found.thread, found.messages, exists))
        fold = Fold(thread_id, len(found.messages))
        fold.add(payload, 0, self_contained=False)
        change = fold.change()
        await self._apply(connection, [change])
        receipt = Receipt(thread_id, saves + 1, secrets.randbits(63), change.version)
        await self._sql.on(connection, "count_save", thread_id, receipt.thread_seq, receipt.id)
        return receipt

    def _family(self, connection: AsyncConnection[Any]) -> Family:
        """The threads, on the connection that holds the lock."""

        async def thread(thread_id: str) -> Thread | None:
            rows = await self._sql.on(connection, "load_thread", thread_id)
            return thread_of(thread_id, rows[0]) if rows else None

        async def children(thread_id: str) -> list[str]:
            return [row[0] for row in await self._sql.on(connection, "children", thread_id)]

        async def edit(wanted: WantedEdit) -> Receipt:
            # A savepoint: an edit that is refused leaves no row behind.
            async with connection.transaction():
                return await self._edit_on(connection, wanted)

        return Family(thread, children, edit)
