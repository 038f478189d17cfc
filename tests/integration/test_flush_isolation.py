"""Rows that a real Postgres refuses, locks or takes too long over delay only their own threads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import pytest

from bufstore import Consistency, FlushTimeout, PostgresThreadStore, StoreUnavailable
from bufstore.buffer.chain import Watermark
from bufstore.buffer.ports.ledger import Cursor, Decision, FlushFailed
from bufstore.postgres.ledger.ledger import PostgresLedger
from bufstore.testing.applying import change
from bufstore.threads.model import ThreadChange
from conftest import Deployment
from helpers import eventually, fresh, healthy, query, run_of, said
from transaction_pooler import TransactionPooler

#: These tests measure time or wait for timeouts.
pytestmark = pytest.mark.alone


@asynccontextmanager
async def limited(deployment: Deployment, *settings: str) -> AsyncIterator[str]:
    """The DSN of an ordinary role with these settings, which may use the deployment's tables."""
    dsn, role = deployment.servers.postgres.dsn, f"role_{deployment.name}"
    async with deployment.store(flusher=False):
        pass
    await query(dsn, f"CREATE ROLE {role} LOGIN PASSWORD 'right'")
    await query(dsn, f"GRANT USAGE ON SCHEMA {deployment.name} TO {role}")
    await query(dsn, f"GRANT ALL ON ALL TABLES IN SCHEMA {deployment.name} TO {role}")
    for setting in settings:
        await query(dsn, f"ALTER ROLE {role} SET {setting}")
    yield psycopg.conninfo.make_conninfo(dsn, user=role, password="right")


async def write(store: Any, thread_ids: Sequence[str]) -> None:
    await asyncio.gather(*(store.checkpoint(t, [said(0)], run_of(t)) for t in thread_ids))


async def flushed_within(store: Any, thread_ids: Sequence[str], seconds: float) -> float:
    began = time.monotonic()
    await asyncio.gather(*(store.force_flush(t, timeout_s=seconds) for t in thread_ids))
    return time.monotonic() - began


# --- locks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("table", "limit_s"), [("buffer_threads", 8.0), ("threads", 90.0)])
async def test_two_hundred_locked_rows_delay_nobody_else(deployment: Deployment, table: str, limit_s: float) -> None:
    """Locked rows of our tables are skipped (0.3 s); those of the store are found one by one.

    That takes 2 s on an idle host, and all of it is work for Python and Postgres: beside other processes it takes as
    many times longer as they leave them less. The locks are held until the end: who waited for one would wait for ever.
    """
    dsn = deployment.servers.postgres.dsn
    held, good = [fresh("held") for _ in range(200)], [fresh("good") for _ in range(20)]
    async with deployment.store() as store:
        await write(store, [*held, *good])
        await store.force_flush_all()
        async with await psycopg.AsyncConnection.connect(dsn) as other:
            lock = (
                f"SELECT count(*) FROM (SELECT FROM {deployment.name}.{table} WHERE thread_id = ANY (%s) FOR UPDATE) t"
            )
            await other.execute(lock, (held,))  # type: ignore[call-overload]
            await asyncio.gather(*(store.checkpoint(t, [said(1)], run_of(t, 1)) for t in [*held, *good]))
            seconds = await flushed_within(store, good, limit_s)
            for n in range(2, 5):
                await asyncio.gather(*(store.checkpoint(t, [said(n)], run_of(t, n)) for t in good))
                seconds = max(seconds, await flushed_within(store, good, limit_s))
            print(f"{table}: a good thread waited {seconds:.2f} s at most")
            assert seconds < limit_s
            assert "to wait: " in (await store.health()).flusher
            assert not (await store.statistics()).flusher.stopped
        await store.force_flush_all()
        assert await store.quarantined() == 0


async def test_a_locked_table_of_the_flush_is_named_soon(deployment: Deployment) -> None:
    """As by an ALTER TABLE that waits: a flush does not wait for it longer than for a locked row."""
    async with deployment.store(flush_timeout_s=5.0) as store:
        await write(store, ["t"])
        await store.force_flush_all(timeout_s=30)
        async with await psycopg.AsyncConnection.connect(deployment.servers.postgres.dsn) as other:
            await other.execute(f"LOCK TABLE {deployment.name}.buffer_partitions IN ACCESS EXCLUSIVE MODE")  # type: ignore[call-overload]
            await store.checkpoint("t", [said(1)], run_of("t", 1))

            async def named() -> bool:
                return "lock timeout" in (await store.statistics()).flusher.trouble

            await eventually(named, 10)
            with pytest.raises(FlushTimeout, match="lock timeout"):
                await store.force_flush("t", timeout_s=1)
        await store.force_flush("t", timeout_s=20)


class Slow(PostgresThreadStore):
    """Writes each batch, then waits inside the transaction until it may go on."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.entered, self.go = asyncio.Event(), asyncio.Event()

    async def apply(self, connection: Any, batch: Sequence[ThreadChange]) -> None:
        await super().apply(connection, batch)
        self.entered.set()
        await self.go.wait()


async def _flush(ledger: PostgresLedger, cursor: Cursor, thread_id: str) -> Any:
    def decide(rows: Mapping[str, Watermark]) -> Decision:
        if thread_id not in rows:
            return Decision()
        after = Cursor(cursor.partition, cursor.term, 5, 5)
        return Decision(
            [change(thread_id, 0, [5], run_of(thread_id))], {thread_id: Watermark(5, 5, 1, b"")}, cursors=[after]
        )

    return await ledger.flush([cursor], [thread_id], decide)


@pytest.mark.parametrize(
    "pooled", [pytest.param(False, id="direct", marks=pytest.mark.long), pytest.param(True, id="pooler")]
)
async def test_a_flusher_that_freezes_inside_its_transaction_gives_its_locks_back_within_the_lease(
    deployment: Deployment, pooled: bool
) -> None:
    """This also works behind a pooler in transaction mode: settings end with their transaction."""
    dsn, schema, lease_s = deployment.servers.postgres.dsn, deployment.name, 9
    async with TransactionPooler(dsn, servers=4) as pooler:
        where = pooler.dsn if pooled else dsn
        store, plain = Slow(where, schema=schema, pool_size=2), PostgresThreadStore(where, schema=schema, pool_size=2)
        frozen, other = (PostgresLedger(where, s, schema=schema, lease_s=lease_s) for s in (store, plain))
        async with store, plain:
            await plain.setup()
            for ledger in (frozen, other):
                await ledger.open()
            await frozen.setup()
            thread_id = fresh()
            (cursor,) = await frozen.take([0], "a")
            began = time.monotonic()
            flushing = asyncio.create_task(_flush(frozen, cursor, thread_id))
            await asyncio.wait_for(store.entered.wait(), 10)
            assert await other.take([0], "b") == [], "its row is held, and nobody waits for it"
            (taken,) = await eventually(lambda: other.take([0], "b"))
            seconds = time.monotonic() - began
            print(f"the locks were back after {seconds:.1f} s")
            assert lease_s / 2 < seconds < lease_s + 3
            store.go.set()
            with pytest.raises((StoreUnavailable, FlushFailed)):
                await flushing
            await _flush(other, taken, thread_id)
            assert await plain.load_messages(thread_id) == [5]
            for name in ("idle_in_transaction_session_timeout", "lock_timeout", "tcp_user_timeout"):
                async with other._tables.pool.lend(5) as connection:
                    found = await (await connection.execute(f"SHOW {name}")).fetchone()
                    assert found == ("0",), name
            for ledger in (frozen, other):
                await ledger.aclose()


@pytest.mark.long  # a lease
async def test_a_large_window_may_take_a_busy_machine_longer_than_the_lease(deployment: Deployment) -> None:
    """Decoding takes time. An owner wrongly taken for frozen would start again and again."""
    async with deployment.inner() as store:
        await store.setup()
        ledger = PostgresLedger(deployment.servers.postgres.dsn, store, schema=deployment.name, lease_s=3)
        await ledger.open()
        try:
            await ledger.setup()
            (cursor,) = await ledger.take([0], "a")

            def slowly(rows: Mapping[str, Watermark]) -> Decision:
                time.sleep(3)  # as on a busy processor
                return Decision(cursors=[cursor])

            with pytest.raises((StoreUnavailable, FlushFailed)):
                await ledger.flush([cursor], [], slowly)
            await ledger.flush([cursor], [], slowly, size=20 << 20)
        finally:
            await ledger.aclose()


@pytest.mark.parametrize("lock", ["lock_lineage", "lock_thread"])
async def test_an_edit_of_a_process_that_stops_holds_its_locks_for_seconds(deployment: Deployment, lock: str) -> None:
    async with deployment.inner() as store:
        await store.setup()
        await store.save_thread("t")
        async with store.pool.lend(5) as connection:
            async with connection.transaction():
                await store._sql.on(connection, lock, "t")
                found = await (await connection.execute("SHOW idle_in_transaction_session_timeout")).fetchone()
                assert found == ("10s",)
            found = await (await connection.execute("SHOW idle_in_transaction_session_timeout")).fetchone()
            assert found == ("0",)


async def test_a_role_with_repeatable_read_flushes_as_any_other(deployment: Deployment) -> None:
    settings = ["default_transaction_isolation = 'repeatable read'"]
    async with limited(deployment, *settings) as dsn:
        inner = PostgresThreadStore(dsn, schema=deployment.name, pool_size=4)
        levels = set()

        async def looking(connection: Any, batch: Sequence[ThreadChange]) -> None:
            cursor = await connection.execute("SHOW transaction_isolation")
            levels.add((await cursor.fetchone())[0])
            await apply(connection, batch)

        apply, inner.apply = inner.apply, looking  # type: ignore[method-assign]
        async with deployment.store(inner) as store:
            threads = [fresh() for _ in range(20)]
            for n in range(5):
                await asyncio.gather(*(store.checkpoint(t, [said(n)], run_of(t, n)) for t in threads))
                await store.force_flush_all()
        assert levels == {"read committed"}


# --- refusals ---------------------------------------------------------------------------------------------------

_RAISES = """
CREATE FUNCTION {schema}.refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.thread_id LIKE 'bad%%' THEN RAISE EXCEPTION 'the trigger says no' USING ERRCODE = '{state}'; END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER refuse BEFORE INSERT OR UPDATE ON {schema}.threads FOR EACH ROW EXECUTE FUNCTION {schema}.refuse();
"""
_AT_COMMIT = """
CREATE FUNCTION {schema}.refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.thread_id LIKE 'bad%%' THEN RAISE EXCEPTION 'the trigger says no' USING ERRCODE = '{state}'; END IF;
    RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER refuse AFTER INSERT OR UPDATE ON {schema}.threads DEFERRABLE INITIALLY DEFERRED
FOR EACH ROW EXECUTE FUNCTION {schema}.refuse();
"""
_UNREFUSED = "DROP TRIGGER refuse ON {schema}.threads"
_POLICY = """
ALTER TABLE {schema}.threads ENABLE ROW LEVEL SECURITY;
CREATE POLICY reading ON {schema}.threads FOR SELECT USING (true);
CREATE POLICY writing ON {schema}.threads FOR ALL USING (true) WITH CHECK (thread_id NOT LIKE 'bad%%');
"""
_NO_POLICY = "ALTER TABLE {schema}.threads DISABLE ROW LEVEL SECURITY"


@pytest.mark.parametrize(
    ("state", "breaks", "mends"),
    [
        ("P0001", _RAISES, _UNREFUSED),
        ("P0001", _AT_COMMIT, _UNREFUSED),
        ("42501", _POLICY, _NO_POLICY),
        *(pytest.param(state, _RAISES, _UNREFUSED, marks=pytest.mark.long) for state in ("54000", "XX000", "ZZ123")),
    ],
    ids=["P0001", "at-commit", "row-security", "54000", "XX000", "own-code"],
)
async def test_what_postgres_refuses_to_one_thread_delays_only_that(
    deployment: Deployment, state: str, breaks: str, mends: str
) -> None:
    owner = deployment.servers.postgres.dsn
    async with limited(deployment) as dsn:
        await query(owner, breaks.format(schema=deployment.name, state=state))
        bad, good = fresh("bad"), [fresh("good") for _ in range(50)]
        inner = PostgresThreadStore(dsn, schema=deployment.name, pool_size=4)
        async with deployment.store(inner) as store:
            await write(store, [bad, *good])
            await flushed_within(store, good, 10.0)
            with pytest.raises(FlushTimeout, match=state):
                await store.force_flush(bad, timeout_s=2)
            assert await store.quarantined() == 0
            await query(owner, mends.format(schema=deployment.name))
            await store.force_flush(bad, timeout_s=20)
            assert await store.load_messages(bad, consistency=Consistency.EVENTUAL) == [said(0)]


async def test_a_new_column_that_refuses_everything_parks_nothing(deployment: Deployment) -> None:
    dsn, table = deployment.servers.postgres.dsn, f"{deployment.name}.messages"
    threads = [fresh() for _ in range(300)]
    async with deployment.store() as store:
        await write(store, threads[:10])
        await store.force_flush_all()
        await query(dsn, f"ALTER TABLE {table} ADD COLUMN tenant text NOT NULL DEFAULT 'x'")
        await query(dsn, f"ALTER TABLE {table} ALTER COLUMN tenant DROP DEFAULT")
        await write(store, threads[10:])

        async def said_so() -> bool:
            state = (await store.statistics()).flusher
            return state.stopped and "23502" in state.trouble

        await eventually(said_so)
        with pytest.raises(FlushTimeout, match="23502"):
            await store.force_flush_all(timeout_s=3)
        assert await store.quarantined() == 0
        assert await store.load_messages(threads[-1]) == [said(0)]
        await query(dsn, f"ALTER TABLE {table} ALTER COLUMN tenant SET DEFAULT 'x'")
        await store.force_flush_all(timeout_s=20)
        assert await store.quarantined() == 0
        await healthy(store)


# --- too much ---------------------------------------------------------------------------------------------------


async def test_a_backlog_is_flushed_under_a_short_statement_timeout(deployment: Deployment) -> None:
    """The store's statements take longer the more they write, and the role's timeout cancels them."""
    async with limited(deployment, "statement_timeout = '300ms'") as dsn:
        inner = PostgresThreadStore(dsn, schema=deployment.name, pool_size=4)
        apply, sizes = inner.apply, list[int]()

        async def slow(connection: Any, batch: Sequence[ThreadChange]) -> None:
            sizes.append(len(batch))
            await connection.execute("SELECT pg_sleep(%s)", (0.005 * len(batch),))
            await apply(connection, batch)

        inner.apply = slow  # type: ignore[method-assign]
        threads = [fresh() for _ in range(300)]
        async with deployment.store(flusher=False) as writer:
            await write(writer, threads)
        async with deployment.store(inner) as store:
            await store.force_flush_all(timeout_s=30)
            assert await store.quarantined() == 0
        assert max(sizes) > 60, "more than could be done in time"


@pytest.mark.parametrize("timeout_s", [0.0, 0.001, -1.0, float("nan")])
async def test_a_flush_waits_no_longer_than_it_is_told(deployment: Deployment, timeout_s: float) -> None:
    """The remaining time may be short or negative; that must not count as trouble of the log."""
    async with deployment.store(flusher=False) as store:
        await store.checkpoint(thread_id := fresh(), [said(0)], run_of(thread_id))
        began = time.monotonic()
        with pytest.raises(FlushTimeout):
            await store.force_flush(thread_id, timeout_s=timeout_s)
        with pytest.raises(FlushTimeout):
            await store.force_flush_all(timeout_s=timeout_s)
        assert time.monotonic() - began < 15  # half of what it waits if it is told nothing
