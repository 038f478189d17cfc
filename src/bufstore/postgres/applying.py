"""Having the wrapped store write a batch, and what its errors mean."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import psycopg
from psycopg import AsyncConnection

from bufstore.buffer.ports import FlushFailed
from bufstore.buffer.verdict import Verdict, verdict
from bufstore.errors import BufstoreError


class Applies(Protocol):
    """The part of a store that a flush needs."""

    async def apply(self, connection: Any, batch: Sequence[Any]) -> None:
        """Write the batch on the connection; see `bufstore.threads.protocol.WrappableStore`."""
        ...


@contextmanager
def flush_errors() -> Iterator[None]:
    """Raise FlushFailed with its verdict for what Postgres says; a lost connection is mapped at the pool's edge."""
    try:
        yield
    except psycopg.Error as e:
        if e.sqlstate is None:
            raise
        raise _refusal(e) from e


async def apply_batch(target: Applies, connection: AsyncConnection[Any], batch: Sequence[Any]) -> None:
    """Have the store write the batch."""
    try:
        await target.apply(connection, batch)
    except (psycopg.Error, BufstoreError, OSError):
        raise
    except Exception as e:
        # The app's own code: nobody knows what it means, so it may delay only the threads that it fails on.
        raise FlushFailed(f"the store's apply() raised {type(e).__name__}", Verdict.SUSPECT) from e


async def probe_batch(target: Applies, connection: AsyncConnection[Any], batch: Sequence[Any]) -> None:
    """Have the store write the batch in parts, to find what it refuses: FlushFailed then names the threads.

    Savepoints in one transaction: a transaction of its own for each part would cost a sync of the disk each.
    """
    culprits: dict[str, str] = {}
    parts = [list(batch)]
    while parts:
        part = parts.pop()
        try:
            async with connection.transaction():
                await apply_batch(target, connection, part)
        except psycopg.Error as e:
            if e.sqlstate is None or verdict(e.sqlstate) is not Verdict.POISON:
                raise
            if len(part) > 1:
                parts += [part[len(part) // 2 :], part[: len(part) // 2]]
            else:
                culprits[part[0].thread_id] = str(_refusal(e))
    if culprits:
        raise FlushFailed(f"the store refuses {len(culprits)} threads", Verdict.POISON, culprits)


def _refusal(error: psycopg.Error) -> FlushFailed:
    assert error.sqlstate is not None
    text = error.diag.message_primary or type(error).__name__
    return FlushFailed(f"Postgres says: {text} (SQLSTATE {error.sqlstate})", verdict(error.sqlstate))
