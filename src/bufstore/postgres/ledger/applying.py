"""Has the wrapped store write a batch, and says what its errors mean."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import AsyncConnection
from psycopg.pq import TransactionStatus

from bufstore.buffer.domain import Applies
from bufstore.buffer.flush.verdict import verdict, verdict_of_app
from bufstore.buffer.ports.ledger import FlushFailed
from bufstore.errors import StoreMisconfigured, StoreUnavailable
from bufstore.postgres.connection.errors import is_lost, said
from bufstore.tasks import own_cancels_only

#: Seconds after which a probe ends that finds more to refuse than to write.
_PROBE_S = 2.0


@contextmanager
def flush_errors(*, of_batch: bool = False) -> Iterator[None]:
    """Raise FlushFailed with its verdict for Postgres' errors; the pool's edge maps a lost connection."""
    try:
        yield
    except psycopg.Error as e:
        if e.sqlstate is None:
            raise
        raise _refusal(e, of_batch) from e


async def apply_batch(target: Applies[Any], connection: AsyncConnection[Any], batch: Sequence[Any]) -> None:
    """Have the store write the batch. Raises FlushFailed, and StoreMisconfigured if it ends the transaction."""
    try:
        with flush_errors(of_batch=True), own_cancels_only():
            await target.apply(connection, batch)
    except (StoreUnavailable, FlushFailed) as e:
        _check_transaction(connection, e)
        raise
    except Exception as e:
        if is_lost(e):
            raise
        _check_transaction(connection, e)
        # The app's own code failed, or psycopg refuses a value: that may delay only the threads that it fails on.
        raise FlushFailed(f"the store's apply() raised {type(e).__name__}", verdict_of_app(e)) from e
    _check_transaction(connection, None)


def _check_transaction(connection: AsyncConnection[Any], cause: Exception | None) -> None:
    """Raise StoreMisconfigured if no transaction is open."""
    if connection.info.transaction_status is TransactionStatus.IDLE:
        raise transaction_ended() from cause


def transaction_ended() -> StoreMisconfigured:
    """The error for a store that has ended the flush's transaction.

    What follows would be committed alone: the watermarks, without the rows that were rolled back.
    """
    return StoreMisconfigured(
        "the store's apply() has ended the flush's transaction, by COMMIT or ROLLBACK as SQL: use savepoints there"
    )


async def probe_batch(
    target: Applies[Any], connection: AsyncConnection[Any], batch: Sequence[Any], limit: int
) -> tuple[dict[str, FlushFailed], set[str]]:
    """Have the store write the batch in parts, as far as it takes them; return what it refuses, by thread.

    Also return the threads that were not tried, because enough were refused (`Ledger.flush`, `probe`). The parts are
    savepoints in one transaction: a transaction for each part would cost a sync of the disk each. Raises FlushFailed
    for an error that is not about a thread.
    """
    refused: dict[str, FlushFailed] = {}
    written = 0
    parts = [list(batch)]
    loop = asyncio.get_running_loop()
    until = loop.time() + _PROBE_S
    while parts:
        if limit < len(batch) and len(refused) > written and (len(refused) >= limit or loop.time() > until):
            break
        part = parts.pop()
        try:
            async with connection.transaction():
                await apply_batch(target, connection, part)
            written += len(part)
        except FlushFailed as e:
            if not e.verdict.of_statement:
                raise
            if len(part) > 1:
                parts += [part[len(part) // 2 :], part[: len(part) // 2]]
            else:
                refused[part[0].thread_id] = e
    return refused, {change.thread_id for part in parts for change in part}


def _refusal(error: psycopg.Error, of_batch: bool) -> FlushFailed:
    state, diag = error.sqlstate, error.diag
    assert state is not None
    place = diag.constraint_name or ".".join(n for n in (diag.table_name, diag.column_name) if n)
    return FlushFailed(said(error), verdict(state), cause=f"{state} {place}", of_batch=of_batch)
