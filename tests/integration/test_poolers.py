"""What a pooler between an app and Postgres says and does of its own."""

from __future__ import annotations

import pytest

from bufstore.embedded import Servers
from bufstore.postgres.connection.errors import NoAnswer
from bufstore.postgres.connection.pool import Pool, open_pool
from helpers import query
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
