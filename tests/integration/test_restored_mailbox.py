"""A mailbox in a Postgres that went back to an earlier state: no number that it gave comes again."""

from __future__ import annotations

import asyncio
import time

import psycopg
import pytest

from bufstore.mailbox import PostgresMailboxStore, StaleClaim
from bufstore.threads.postgres.tables import grants
from helpers import eventually, query
from mailboxes import Mailboxes

#: How long before the restore the sequence stood where it stands afterwards.
_WENT_BACK_US = 2_000_000


async def _keep(box: Mailboxes) -> None:
    """Keep the tables as they are, for `_restore`."""
    for table in ("mailbox_threads", "mailbox_dispatches"):
        await query(box.servers.postgres.dsn, f"CREATE TABLE {box.name}.kept_{table} AS TABLE {box.name}.{table}")


async def _restore(box: Mailboxes) -> None:
    """Put the tables back, and the sequence to where it was a while before."""
    for table in ("mailbox_threads", "mailbox_dispatches"):
        await query(box.servers.postgres.dsn, f"DELETE FROM {box.name}.{table}")
        await query(box.servers.postgres.dsn, f"INSERT INTO {box.name}.{table} TABLE {box.name}.kept_{table}")
    await _set_back(box)


async def _set_back(box: Mailboxes) -> None:
    numbers = f"{box.name}.mailbox_numbers"
    back = f"SELECT setval('{numbers}', greatest(1, last_value - {_WENT_BACK_US})) FROM {numbers}"
    await query(box.servers.postgres.dsn, back)


async def _seen_waiting(box: Mailboxes, function: str) -> None:
    """Return when a statement that calls the function waits for a lock."""
    waits = "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE %s"
    await eventually(lambda: query(box.servers.postgres.dsn, waits, f"%{box.name}%{function}%"))


async def test_a_claim_after_a_restore_has_a_higher_token_than_any_before(on_postgres: Mailboxes) -> None:
    async with on_postgres.open(2) as (a, b):
        await a.enqueue("t", b"charge", dispatch_id="d")
        await _keep(on_postgres)
        before = await a.claim("t", "worker-a")
        assert before is not None
        await _restore(on_postgres)
        after = await b.claim("t", "worker-b")
        assert after is not None
        assert before.token < after.token < 2**53
        for step in (a.extend_lease, a.ack):
            with pytest.raises(StaleClaim):
                await step(before)
        assert (await b.ack(after)).dispatch_id == "d"


async def test_numbers_that_many_take_after_a_restore_are_all_new(on_postgres: Mailboxes) -> None:
    given: list[int] = []
    async with on_postgres.open(3) as stores:
        for turn in range(10):
            ids = [f"{turn}-{n}" for n in range(30)]
            enqueued = [stores[n % 3].enqueue(name, b"", dispatch_id=name) for n, name in enumerate(ids)]
            now = [d.position for d in await asyncio.gather(*enqueued)]
            assert min(now) > max(given, default=0)
            given += now
            await _set_back(on_postgres)
    assert len(set(given)) == len(given)


async def test_who_waits_for_a_thread_keeps_nobody_else_from_numbers(on_postgres: Mailboxes) -> None:
    dsn, threads = on_postgres.servers.postgres.dsn, f"{on_postgres.name}.mailbox_threads"
    async with on_postgres.open(2) as (a, b), await psycopg.AsyncConnection.connect(dsn) as holder:
        await a.enqueue("t", b"", dispatch_id="first")
        await holder.execute(f"SELECT FROM {threads} WHERE thread_id = 't' FOR UPDATE")  # type: ignore[arg-type]
        await _set_back(on_postgres)
        waiting = asyncio.create_task(a.enqueue("t", b"", dispatch_id="second"))
        await _seen_waiting(on_postgres, "mailbox_add_v1")
        await _set_back(on_postgres)
        async with asyncio.timeout(5):
            await b.enqueue("u", b"", dispatch_id="d")
        assert not waiting.done()
        await holder.rollback()
        await waiting


async def test_a_raise_takes_back_nothing_that_was_given_meanwhile(on_postgres: Mailboxes) -> None:
    dsn, numbers = on_postgres.servers.postgres.dsn, f"{on_postgres.name}.mailbox_numbers"
    lock = f"SELECT pg_advisory_lock(hashtextextended('bufstore mailbox numbers ' || '{numbers}'::regclass::oid, 0))"
    async with on_postgres.open(1) as (store,), await psycopg.AsyncConnection.connect(dsn, autocommit=True) as raiser:
        await raiser.execute(lock)  # type: ignore[arg-type]
        waiting = asyncio.create_task(store.enqueue("t", b""))
        await _seen_waiting(on_postgres, "mailbox_add_v1")
        ahead = time.time_ns() // 1000 + 60_000_000  # what another one raised to, and gave since
        await raiser.execute(f"SELECT setval('{numbers}', {ahead})")  # type: ignore[arg-type]
        await raiser.execute("SELECT pg_advisory_unlock_all()")
        assert (await waiting).position > ahead


async def test_an_app_that_may_only_take_numbers_has_them_raised(on_postgres: Mailboxes) -> None:
    dsn = on_postgres.servers.postgres.dsn
    role, owner = f"app_{on_postgres.name}", f"owner_{on_postgres.name}"
    numbers = f"{on_postgres.name}.mailbox_numbers"
    async with on_postgres.open(1):
        pass  # as the owner, who makes the tables
    await query(dsn, f"CREATE ROLE {role} LOGIN PASSWORD 'app'")
    for statement in grants(on_postgres.name, role):
        await query(dsn, statement.as_string())
    assert await query(dsn, "SELECT has_sequence_privilege(%s, %s, 'UPDATE')", role, numbers) == [(False,)]
    as_app = psycopg.conninfo.make_conninfo(dsn, user=role, password="app")
    async with PostgresMailboxStore(as_app, schema=on_postgres.name) as app:
        now_us = time.time_ns() // 1000
        assert (await app.enqueue("t", b"")).position > now_us - 1_000_000
        # The functions' owner is not the sequence's any more, and may not set it: numbers go on as they are.
        await query(dsn, f"CREATE ROLE {owner}")
        await query(dsn, f"GRANT CREATE, USAGE ON SCHEMA {on_postgres.name} TO {owner}")
        await query(dsn, f"ALTER FUNCTION {on_postgres.name}.mailbox_raise_v1() OWNER TO {owner}")
        await query(dsn, f"SELECT setval('{numbers}', 10000)")
        assert (await app.enqueue("t", b"")).position == 10004
    await query(dsn, f"DROP SCHEMA {on_postgres.name} CASCADE")
    await query(dsn, f"DROP ROLE {role}, {owner}")
