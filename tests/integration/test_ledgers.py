"""The conformance suite of ledgers, on Postgres and in memory."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import psycopg
import pytest

from bufstore import InvalidRecord
from bufstore.buffer.ports.ledger import Cursor, Decision, Ledger, NotOwner
from bufstore.embedded import Servers
from bufstore.memory.ledger import MemoryLedger
from bufstore.postgres.ledger.ledger import PostgresLedger
from bufstore.testing import LEDGER_CHECKS, Check, Ledgers
from bufstore.testing.ledger import QUARANTINE_MAX, RAISES, REFUSED, LedgerChange
from helpers import query


class PostgresValues:
    """A store with one table."""

    def __init__(self, schema: str) -> None:
        self.schema = schema

    async def apply(self, connection: psycopg.AsyncConnection[Any], batch: Sequence[LedgerChange]) -> None:
        assert batch
        if any(change.value == RAISES for change in batch):
            raise ArithmeticError
        for change in batch:
            statement = f"INSERT INTO {self.schema}.stored SELECT %s, %s, 1 / (CASE WHEN %s THEN 0 ELSE 1 END) "
            await connection.execute(
                statement + "ON CONFLICT (thread_id) DO UPDATE SET value = excluded.value",
                (change.thread_id, change.value, change.value == REFUSED),
            )


class MemoryValues(dict[str, str]):
    """The same values in memory."""

    async def apply(self, connection: Any, batch: Sequence[LedgerChange]) -> None:
        assert batch
        if any(change.value == RAISES for change in batch):
            raise ArithmeticError
        if any(change.value == REFUSED for change in batch):
            raise InvalidRecord(REFUSED)
        self.update({change.thread_id: change.value for change in batch})


@asynccontextmanager
async def in_postgres(dsn: str) -> AsyncIterator[Ledgers]:
    schema = f"t{secrets.token_hex(5)}"
    async with AsyncExitStack() as stack:
        own = await psycopg.AsyncConnection.connect(dsn, autocommit=True)
        stack.push_async_callback(own.close)
        await own.execute(f"CREATE SCHEMA {schema}")
        await own.execute(f"CREATE TABLE {schema}.stored (thread_id text PRIMARY KEY, value text, one int)")

        async def open_() -> Ledger:
            ledger = PostgresLedger(dsn, PostgresValues(schema), schema=schema, quarantine_max=QUARANTINE_MAX)
            await ledger.open()
            stack.push_async_callback(ledger.aclose)
            await ledger.setup()
            return ledger

        async def stored() -> dict[str, str]:
            rows = await (await own.execute(f"SELECT thread_id, value FROM {schema}.stored")).fetchall()
            return dict(rows)

        @asynccontextmanager
        async def hold(thread_id: str) -> AsyncIterator[None]:
            async with own.transaction():
                found = await own.execute(
                    f"SELECT FROM {schema}.buffer_threads WHERE thread_id = %s FOR UPDATE", (thread_id,)
                )
                assert found.rowcount == 1
                yield

        yield Ledgers(open_, stored, hold)


@asynccontextmanager
async def in_memory() -> AsyncIterator[Ledgers]:
    values = MemoryValues()
    ledger = MemoryLedger(values, quarantine_max=QUARANTINE_MAX)

    async def open_() -> Ledger:
        return ledger

    async def stored() -> dict[str, str]:
        return dict(values)

    @asynccontextmanager
    async def hold(thread_id: str) -> AsyncIterator[None]:
        ledger.locked.add(thread_id)
        yield
        ledger.locked.discard(thread_id)

    yield Ledgers(open_, stored, hold)


@pytest.mark.parametrize("check", LEDGER_CHECKS, ids=str)
async def test_postgres(servers: Servers, check: Check) -> None:
    async with in_postgres(servers.postgres.dsn) as ledgers:
        await check(ledgers)


@pytest.mark.parametrize("check", LEDGER_CHECKS, ids=str)
async def test_memory(check: Check) -> None:
    async with in_memory() as ledgers:
        await check(ledgers)


async def test_of_two_owners_with_the_same_term_one_is_refused(servers: Servers) -> None:
    """Postgres failed over to a copy without the first owner's takeover, and the second owner has flushed since."""
    async with in_postgres(servers.postgres.dsn) as ledgers:
        old, new = await ledgers.open(), await ledgers.open()
        (held,) = await old.take([0], "old")
        assert isinstance(old, PostgresLedger)
        await query(servers.postgres.dsn, f"DELETE FROM {old.schema}.buffer_partitions")
        assert await new.take([0], "new") == [held]

        def moves(_: Any) -> Decision:
            return Decision(cursors=[Cursor(0, held.term, 7, 7)])

        with pytest.raises(NotOwner):
            await old.flush([held], [], moves)
        await new.flush([held], [], moves)
        assert await old.cursors() == {0: Cursor(0, held.term, 7, 7)}


async def test_a_run_of_the_server_is_the_same_in_every_time_zone(servers: Servers) -> None:
    """Regression: a list was read again whenever the sessions of two connections had different time zones."""
    runs = set[str]()
    for zone in ("UTC", "Asia/Tokyo"):
        dsn = psycopg.conninfo.make_conninfo(servers.postgres.dsn, options=f"-c timezone={zone}")
        ledger = PostgresLedger(dsn, PostgresValues("unused"), schema="unused")
        await ledger.open()
        try:
            runs.add(await ledger.server_run())
        finally:
            await ledger.aclose()
    assert len(runs) == 1
