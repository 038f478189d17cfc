"""A schema that was renamed, or a renamed copy of one, while the schema of the old name is there (again).

`ALTER SCHEMA … RENAME` leaves the texts of functions as they are, so these name the other schema.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from bufstore import ConfigError, PostgresThreadStore
from bufstore.buffer.ports.waiting import WaitingEntry
from bufstore.embedded import Servers
from bufstore.mailbox import PostgresMailboxStore
from bufstore.postgres.connection.migrate import migrate, newest
from bufstore.postgres.ledger.ledger import PostgresLedger
from bufstore.spark.tables.moment import Moment
from bufstore.testing.ledger import decides, moved, parked
from command_line import Result, bufstore_cli, where
from conftest import Deployment
from helpers import fresh, query, run_of, said
from integration.test_postgres_store import FirstRelease
from integration.test_upgrades import FOLDERS, upgrade
from unit.counters import CounterStore

_BODIES = """
SELECT p.proname, p.prosrc, p.xmin::text FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace
WHERE n.nspname = %s ORDER BY 1
"""


async def rename(dsn: str, old: str, new: str) -> None:
    statement = sql.SQL("ALTER SCHEMA {} RENAME TO {}").format(sql.Identifier(old), sql.Identifier(new))
    await query(dsn, statement.as_string().replace("%", "%%"))


async def bodies(dsn: str, schema: str) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = await query(dsn, _BODIES, schema)
    return found


async def strange(dsn: str, schema: str, other: str) -> list[str]:
    """Return the functions of a schema that name the other one."""
    named = sql.Identifier(other).as_string()
    return [name for name, body, _ in await bodies(dsn, schema) if named in body]


def names() -> tuple[str, str]:
    return fresh("prod")[:20], fresh("staging")[:20]


def odd_names() -> tuple[str, str]:
    """Return two names; that of the first, in quotation marks, ends with that of the second."""
    second = fresh("100% of {schema}.")[:30]
    return f'a "{second}', second


@asynccontextmanager
async def a_store(dsn: str, schema: str, *, set_up: bool = True) -> AsyncIterator[PostgresThreadStore]:
    async with PostgresThreadStore(dsn, schema=schema, pool_size=2) as store:
        if set_up:
            await store.setup()
        yield store


async def copy_of(dsn: str, old: str, new: str) -> None:
    """Make a schema with a thread, rename it, and make the schema of the old name again with another state of it."""
    async with a_store(dsn, old) as store:
        await store.checkpoint("t", [said(1)], run_of("t"))
    await rename(dsn, old, new)
    async with a_store(dsn, old) as store:
        await store.checkpoint("t", [said(1), said(2)], run_of("t"))


@pytest.mark.parametrize("set_up", [True, False])
@pytest.mark.parametrize("named", [names, odd_names])
async def test_a_renamed_schema_reads_and_writes_itself(servers: Servers, named: Any, set_up: bool) -> None:
    dsn, (old, new) = servers.postgres.dsn, named()
    await copy_of(dsn, old, new)
    async with a_store(dsn, new, set_up=set_up) as store:
        assert await store.load_messages("t") == [said(1)]
        await store.checkpoint("t", [said(3)], run_of("t"))
        assert await store.load_messages("t") == [said(3)]
    async with a_store(dsn, old) as store:
        assert await store.load_messages("t") == [said(1), said(2)]
    assert await strange(dsn, new, old) == [], "also those that only other releases call"


async def test_a_store_whose_first_call_writes_writes_into_its_own_schema(servers: Servers) -> None:
    dsn, (old, new) = servers.postgres.dsn, names()
    await copy_of(dsn, old, new)
    async with a_store(dsn, new, set_up=False) as store:
        await asyncio.gather(*(store.checkpoint(f"t{i}", [said(3)], run_of(f"t{i}")) for i in range(8)))
    async with a_store(dsn, old) as store:
        assert [thread.thread_id for thread in (await store.query_threads()).threads] == ["t"]


async def test_functions_that_name_their_schema_are_left_alone(servers: Servers) -> None:
    """So a role that may only read the tables opens them, and nobody waits for a lock."""
    dsn, (schema, _) = servers.postgres.dsn, names()
    async with a_store(dsn, schema):
        pass
    before = await bodies(dsn, schema)
    async with a_store(dsn, schema), a_store(dsn, schema, set_up=False) as store:
        await store.load_messages("t")
    assert await bodies(dsn, schema) == before


async def test_a_renamed_mailbox_keeps_to_itself(servers: Servers) -> None:
    dsn, (old, new) = servers.postgres.dsn, names()
    async with PostgresMailboxStore(dsn, schema=old):
        pass
    await rename(dsn, old, new)
    async with PostgresMailboxStore(dsn, schema=old), PostgresMailboxStore(dsn, schema=new) as mailbox:
        await mailbox.enqueue("t", b"work", dispatch_id="d")
        assert await mailbox.load_dispatch("t", "d") is not None
    async with PostgresMailboxStore(dsn, schema=old) as mailbox:
        assert await mailbox.load_dispatch("t", "d") is None
    assert await strange(dsn, new, old) == []
    # The function that a later migration has replaced is the later one.
    ((body,),) = [body for name, *body, _ in await bodies(dsn, new) if name == "mailbox_write_v1"]
    assert "claim = NULL" in body


async def a_ledger(dsn: str, schema: str) -> PostgresLedger:
    ledger = PostgresLedger(dsn, CounterStore(), schema=schema)
    await ledger.open()
    await ledger.setup()
    return ledger


async def test_a_renamed_ledger_sees_what_waits_in_it(servers: Servers) -> None:
    """Only its trigger names the schema: it keeps an earlier release off partitions in which entries wait."""
    dsn, (old, new) = servers.postgres.dsn, names()
    ledger = await a_ledger(dsn, old)
    held = await ledger.take([1], "me")
    waiting = [WaitingEntry(parked(7, "t").item, 1, "its row is held")]
    await ledger.flush(held, [], decides(waiting=waiting, cursors=[moved(held[0], 7)]))
    await ledger.aclose()
    await rename(dsn, old, new)
    for schema in (old, new):
        await (await a_ledger(dsn, schema)).aclose()
    earlier = f"UPDATE \"{new}\".buffer_partitions SET owner = 'earlier' RETURNING partition"
    assert await query(dsn, earlier) == []


async def test_tables_of_the_first_release_that_were_renamed_are_upgraded(servers: Servers) -> None:
    dsn, (old, new) = servers.postgres.dsn, names()
    release: Any = FirstRelease()
    async with a_store(dsn, old, set_up=False) as store, store.pool.lend(10) as connection:
        await migrate(connection, old, release, "threads")
    await rename(dsn, old, new)
    async with a_store(dsn, old), a_store(dsn, new) as store:
        await store.checkpoint("t", [said(1)], run_of("t"))
        assert await store.load_messages("t") == [said(1)]
    assert await strange(dsn, new, old) == []


async def test_a_newer_release_makes_its_own_functions(servers: Servers) -> None:
    """This one does not know how they are now."""
    dsn, (old, new) = servers.postgres.dsn, names()
    await copy_of(dsn, old, new)
    await upgrade(servers, old, "threads", works_with=newest(FOLDERS["threads"]))
    await rename(dsn, old, f"{old}-2")
    for set_up in (True, False):
        with pytest.raises(ConfigError, match=r"checkpoint_v1, .* newer release .* open it once with that release"):
            async with a_store(dsn, f"{old}-2", set_up=set_up) as store:
                await store.load_messages("t")


async def test_a_copy_without_the_record_of_its_migrations_is_not_read(servers: Servers) -> None:
    dsn, (old, new) = servers.postgres.dsn, names()
    await copy_of(dsn, old, new)
    await query(dsn, f'DROP TABLE "{new}".bufstore_migrations')
    async with a_store(dsn, new, set_up=False) as store:
        with pytest.raises(ConfigError, match="No migration of it is recorded"):
            await store.load_messages("t")


@pytest.fixture
async def app(servers: Servers) -> AsyncIterator[str]:
    """The address for a role that may use tables and owns none."""
    role = fresh("app")
    await query(servers.postgres.dsn, f"CREATE ROLE \"{role}\" LOGIN PASSWORD 'app'")
    yield make_conninfo(servers.postgres.dsn, user=role, password="app")
    await query(servers.postgres.dsn, f'DROP OWNED BY "{role}"')
    await query(servers.postgres.dsn, f'DROP ROLE "{role}"')


async def grant(dsn: str, app: str, schema: str) -> None:
    role = psycopg.conninfo.conninfo_to_dict(app)["user"]
    await query(dsn, f'GRANT USAGE ON SCHEMA "{schema}" TO "{role}"')
    await query(dsn, f'GRANT ALL ON ALL TABLES IN SCHEMA "{schema}" TO "{role}"')


async def test_who_may_not_mend_a_renamed_schema_is_told_who_may_and_what_to_run(servers: Servers, app: str) -> None:
    dsn, (old, new) = servers.postgres.dsn, names()
    async with PostgresMailboxStore(dsn, schema=old):
        pass
    await copy_of(dsn, old, new)
    await grant(dsn, app, old)
    await grant(dsn, app, new)
    for set_up in (True, False):
        with pytest.raises(ConfigError, match=r"thread_row_v2 in schema .* `bufstore setup --grant ROLE` with their"):
            async with a_store(app, new, set_up=set_up) as store:
                await store.checkpoint("t", [said(3)], run_of("t"))
    with pytest.raises(ConfigError, match="`bufstore setup --mailbox --grant ROLE` with their owner's rights"):
        async with PostgresMailboxStore(app, schema=new):
            pass
    with pytest.raises(ConfigError, match="`bufstore setup`"):
        async with Moment(app, new):
            pass
    async with a_store(dsn, old) as store:
        assert await store.load_messages("t") == [said(1), said(2)]


async def test_doctor_and_setup_say_that_a_schema_was_renamed(deployment: Deployment) -> None:
    dsn, name = deployment.servers.postgres.dsn, deployment.name
    old = f"{name}-before"
    async with a_store(dsn, old):
        await (await a_ledger(dsn, old)).aclose()
    await rename(dsn, old, name)

    async def cli(*arguments: str) -> Result:
        return await asyncio.to_thread(bufstore_cli, *arguments, **where(deployment))

    told = await cli("doctor")
    assert told.code == 2
    assert "buffer_knows_waiting" in told.out
    assert len(await strange(dsn, name, old)) == 4, "the doctor only reads"
    script = (await cli("setup", "--sql")).out
    assert script.count("CREATE OR REPLACE FUNCTION") == 4
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        await connection.execute(script)  # type: ignore[call-overload]
    assert await strange(dsn, name, old) == []
    assert "renamed" not in (await cli("doctor")).out
    assert "Nothing is missing" in (await cli("setup", "--sql")).out
