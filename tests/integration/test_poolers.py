"""What a pooler between an app and Postgres says and does of its own."""

from __future__ import annotations

import pytest

from bufstore import PostgresThreadStore, StoreMisconfigured, StoreUnavailable
from bufstore.embedded import Servers
from bufstore.postgres.connection.errors import NoAnswer
from bufstore.postgres.connection.pool import Pool, open_pool
from helpers import fresh, query, run_of, said
from transaction_pooler import TransactionPooler


@pytest.mark.parametrize("piped", [False, True])
async def test_a_session_that_ends_behind_a_pooler_is_no_answer(
    servers: Servers, caplog: pytest.LogCaptureFixture, piped: bool
) -> None:
    """The pooler adds an error of its own, and psycopg took the two for an internal error: callers got that."""

    async def terminated(pool: Pool) -> None:
        async with pool.lend(20) as connection, connection.transaction():
            ending = "SELECT pg_terminate_backend(pg_backend_pid()), pg_sleep(20)"
            if piped:
                async with connection.pipeline():
                    await connection.execute(ending)
                    await connection.execute("SELECT 1")
            found = await (await connection.execute("SELECT pg_backend_pid()")).fetchone()
            assert found is not None
            await query(servers.postgres.dsn, "SELECT pg_terminate_backend(%s, 20000)", found[0])

    async with TransactionPooler(servers.postgres.dsn) as pooler:
        pool = await open_pool(pooler.dsn, size=1)
        try:
            with pytest.raises(NoAnswer):
                await terminated(pool)
            async with pool.lend(20) as connection:
                assert await connection.execute("SELECT 1")
        finally:
            await pool.close()
    assert [r.getMessage() for r in caplog.records if r.name.startswith("psycopg")] == []


@pytest.mark.parametrize("words", ["query_wait_timeout", "server login has been failing, try again later"])
async def test_what_a_pooler_says_in_place_of_a_session_leaves_nothing_unknown(servers: Servers, words: str) -> None:
    """It has the SQLSTATE of a lost connection: a checkpoint that was certainly not saved was OutcomeUnknown."""
    async with (
        TransactionPooler(servers.postgres.dsn) as pooler,
        PostgresThreadStore(pooler.dsn, schema=fresh("schema"), timeout_s=20) as store,
    ):
        await store.setup()
        pooler.refuses_with = words
        with pytest.raises(StoreUnavailable, match=f"pooler .* says: {words}"):
            await store.checkpoint("t", [said(0)], run_of("t"))
        pooler.refuses_with = None
        assert await store.load_messages("t") is None
        await store.checkpoint("t", [said(1)], run_of("t"))
        assert await store.load_messages("t") == [said(1)]


async def test_a_pooler_without_a_free_session_is_told_by_the_time(servers: Servers) -> None:
    """It takes no request to cancel for who has no session, so we hang up; that was told as a lost connection."""
    async with TransactionPooler(servers.postgres.dsn, servers=1) as pooler:
        pool = await open_pool(pooler.dsn, size=2)
        try:
            async with pool.lend(20) as connection, connection.transaction():
                await connection.execute("SELECT 1")
                with pytest.raises(NoAnswer, match=r"no answer .* in 0\.5 s.* pooler .* no session free"):
                    async with pool.lend(0.5) as waiting:
                        await waiting.execute("SELECT 1")
        finally:
            await pool.close()


async def test_a_pooler_that_takes_no_transactions_is_misconfigured(servers: Servers) -> None:
    """It counted as an outage, which is waited for."""
    async with TransactionPooler(servers.postgres.dsn) as pooler, PostgresThreadStore(pooler.dsn) as store:
        pooler.refuses_with = "transaction blocks not allowed in statement pooling mode"
        with pytest.raises(StoreMisconfigured, match="pool_mode=transaction"):
            await store.setup()
