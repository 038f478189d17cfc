"""Servers that refuse: no permission, no login, no table, read-only, full. Each is said, in time, and mends by itself."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from bufstore import (
    BufferedThreadStore,
    BufstoreError,
    ConfigError,
    Consistency,
    FlushTimeout,
    LogFull,
    LogUnavailable,
    OutcomeUnknown,
    PostgresThreadStore,
    StoreMisconfigured,
    StoreUnavailable,
)
from bufstore.embedded import NatsServer, PostgresServer, Servers
from conftest import Deployment
from helpers import eventually, fresh, query, run_of, said

SHORT = {"append_timeout_s": 3.0, "read_timeout_s": 3.0, "flush_timeout_s": 3.0}


@contextlib.contextmanager
def in_time(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


# --- Postgres ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def disturbed() -> Iterator[Servers]:
    """A pair of servers for the tests of this file; each leaves them as they were."""
    with Servers() as running:
        yield running


@contextlib.asynccontextmanager
async def as_role(servers: Servers, deployment: Deployment) -> AsyncIterator[str]:
    """The DSN of an ordinary role that owns nothing but may use the deployment's tables."""
    dsn, role = servers.postgres.dsn, f"role_{deployment.name}"
    async with deployment.store(flusher=False):
        pass
    await query(dsn, f"CREATE ROLE {role} LOGIN PASSWORD 'right'")
    await query(dsn, f"GRANT USAGE ON SCHEMA {deployment.name} TO {role}")
    await query(dsn, f"GRANT ALL ON ALL TABLES IN SCHEMA {deployment.name} TO {role}")
    yield psycopg.conninfo.make_conninfo(dsn, user=role, password="right")


async def hang_up(dsn: str, deployment: Deployment) -> None:
    """End the role's sessions, so that the next ones begin under the new rules."""
    await query(dsn, f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'role_{deployment.name}'")


def _statement(break_: str, mend: str) -> tuple[str, str]:
    return break_, mend


FAULTS = {
    "password": _statement("ALTER ROLE {role} PASSWORD 'other'", "ALTER ROLE {role} PASSWORD 'right'"),
    "no login": _statement("ALTER ROLE {role} NOLOGIN", "ALTER ROLE {role} LOGIN"),
    "permission": _statement(
        "REVOKE ALL ON ALL TABLES IN SCHEMA {schema} FROM {role}", "GRANT ALL ON ALL TABLES IN SCHEMA {schema} TO {role}"
    ),
    "schema usage": _statement("REVOKE USAGE ON SCHEMA {schema} FROM {role}", "GRANT USAGE ON SCHEMA {schema} TO {role}"),
    "missing table": _statement(
        "ALTER TABLE {schema}.messages RENAME TO gone", "ALTER TABLE {schema}.gone RENAME TO messages"
    ),
    "missing buffer table": _statement(
        "ALTER TABLE {schema}.buffer_threads RENAME TO gone", "ALTER TABLE {schema}.gone RENAME TO buffer_threads"
    ),
    "missing column": _statement(
        "ALTER TABLE {schema}.buffer_threads RENAME COLUMN version TO gone",
        "ALTER TABLE {schema}.buffer_threads RENAME COLUMN gone TO version",
    ),
    "missing schema": _statement("ALTER SCHEMA {schema} RENAME TO {schema}_gone", "ALTER SCHEMA {schema}_gone RENAME TO {schema}"),
    "read-only": _statement(
        "ALTER ROLE {role} SET default_transaction_read_only = on", "ALTER ROLE {role} RESET default_transaction_read_only"
    ),
    "too many connections": _statement("ALTER ROLE {role} CONNECTION LIMIT 0", "ALTER ROLE {role} CONNECTION LIMIT -1"),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_postgres_that_refuses_parks_nothing_and_goes_on_when_mended(disturbed: Servers, fault: str) -> None:
    """Not one entry's fault: everything waits in the log, writes go on, and it is said what an operator must mend."""
    deployment = Deployment(disturbed)
    dsn = disturbed.postgres.dsn
    names = {"role": f"role_{deployment.name}", "schema": deployment.name}
    async with as_role(disturbed, deployment) as limited:
        inner = PostgresThreadStore(limited, schema=deployment.name, pool_size=4, timeout_s=3)
        async with deployment.store(inner, **SHORT) as store:
            thread_id = fresh()
            await store.checkpoint(thread_id, [said(0)], run_of(thread_id))
            await store.force_flush(thread_id)
            await query(dsn, FAULTS[fault][0].format(**names))
            await hang_up(dsn, deployment)
            with in_time(10):
                for n in range(1, 4):
                    await store.checkpoint(thread_id, [said(i) for i in range(n + 1)], run_of(thread_id, n))
                new = fresh("new")
                await store.checkpoint(new, [said(0)], run_of(new))
                with pytest.raises(FlushTimeout) as late:
                    await store.force_flush(thread_id, timeout_s=1.5)
            passing = fault == "too many connections"  # a transaction waits for half a minute before that is said
            assert passing or "Postgres" in str(late.value), "says what it waits for"

            async def said_so() -> str:
                health = await store.health()
                return health.store if passing else health.flusher

            assert await eventually(said_so)
            expected = StoreUnavailable if passing else StoreMisconfigured
            if "buffer" not in fault and fault != "missing column":  # those the wrapped store does without
                async with PostgresThreadStore(limited, schema=deployment.name, timeout_s=3) as direct:
                    with in_time(6), pytest.raises(expected):
                        await direct.checkpoint("direct", [said(0)], run_of("direct"))
            assert (await store.statistics()).flusher.stopped is not passing
            await query(dsn, FAULTS[fault][1].format(**names))

            async def flushed() -> bool:
                with contextlib.suppress(FlushTimeout):
                    await store.force_flush_all(timeout_s=1)
                    return True
                return False

            await eventually(flushed)
            assert await store.quarantined() == 0
            level = Consistency.EVENTUAL
            assert await store.load_messages(thread_id, consistency=level) == [said(i) for i in range(4)]
            assert await store.load_messages(new, consistency=level) == [said(0)]
