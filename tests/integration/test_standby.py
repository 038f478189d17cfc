"""A standby is not taken for the primary, although it answers reads: what it shows may be old."""

from __future__ import annotations

import asyncio
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from bufstore import Consistency, PostgresThreadStore, StoreUnavailable
from bufstore.embedded import PostgresServer, Servers
from bufstore.errors import ConfigError
from bufstore.postgres.connection.conninfo import own_conninfo
from bufstore.postgres.connection.pool import new_pool
from conftest import Deployment
from fault_proxy.proxy import FaultProxy
from helpers import eventually, fresh, query, run_of, said
from transaction_pooler import TransactionPooler

_LOCAL = "127.0.0.1"


@contextmanager
def standby_of(primary: PostgresServer) -> Iterator[PostgresServer]:
    """Start a standby with what the primary has now, and that gets no more. The primary restarts for it."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o711)  # where root runs the tests, Postgres runs as somebody else
        primary.stop()
        try:
            subprocess.run(["cp", "-pR", str(primary.data), f"{folder}/data"], check=True)
        finally:
            primary.start()
        standby = PostgresServer(Path(folder) / "data")
        (standby.data / "cluster/standby.signal").touch()
        standby.start()
        try:
            yield standby
        finally:
            standby.stop()


async def test_no_connection_stays_with_a_standby(own_servers: Servers) -> None:
    """While an address moved, connections were made to the standby. Those that only read stayed: it closed none."""
    primary, thread_id = own_servers.postgres, fresh()
    deployment = Deployment(own_servers)
    async with deployment.store() as store:
        await store.checkpoint(thread_id, [said(0)], run_of(thread_id))
        await store.force_flush_all()
    with standby_of(primary) as standby:
        async with deployment.store() as elsewhere, FaultProxy(_LOCAL, primary.port) as address:
            dsn = primary.dsn.replace(f":{primary.port}/", f":{address.port}/")
            async with deployment.store(PostgresThreadStore(dsn, schema=deployment.name, pool_size=4)) as store:
                await elsewhere.checkpoint_append(thread_id, [said(1)], run_of(thread_id))
                await elsewhere.force_flush_all()
                address.leads_to = _LOCAL, standby.port
                address.cut()

                async def noticed() -> bool:
                    health = await store.health()
                    return "standby" in health.store

                await eventually(noticed, 30)
                address.leads_to = _LOCAL, primary.port

                async def reads_again() -> bool:
                    return (await store.health()).can_read

                await eventually(reads_again, 30)
                assert await store.load_messages(thread_id, consistency=Consistency.EVENTUAL) == [said(0), said(1)]
                await store.checkpoint_append(thread_id, [said(2)], run_of(thread_id))
                await store.force_flush_all()
                assert len(await store.load_messages(thread_id, consistency=Consistency.STRONG) or []) == 3
                assert await store.quarantined() == 0
                sessions = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'bufstore'"
                assert await query(standby.dsn, sessions) == [(0,)]


async def test_of_several_hosts_the_primary_is_used(own_servers: Servers) -> None:
    primary, thread_id = own_servers.postgres, fresh()
    deployment = Deployment(own_servers)
    async with deployment.store() as store:
        await store.checkpoint(thread_id, [said(0)], run_of(thread_id))
    with standby_of(primary) as standby:
        hosts = f"{_LOCAL}:{standby.port},{_LOCAL}:{primary.port}/"
        inner = PostgresThreadStore(primary.dsn.replace(f"{_LOCAL}:{primary.port}/", hosts), schema=deployment.name)
        async with deployment.store(inner) as store:
            await store.checkpoint_append(thread_id, [said(1)], run_of(thread_id))
            await store.force_flush_all()
            found = await store.load_messages(thread_id, consistency=Consistency.EVENTUAL)
            assert found == [said(0), said(1)]


async def test_a_standby_alone_is_no_postgres_to_work_with(own_servers: Servers) -> None:
    with standby_of(own_servers.postgres) as standby:
        async with PostgresThreadStore(standby.dsn, timeout_s=2.0) as store:
            with pytest.raises(StoreUnavailable, match="standby"):
                async with asyncio.timeout(10):
                    await store.load_messages("t")


@pytest.mark.parametrize("wanted", ["primary", "read-write"])
async def test_a_primary_behind_a_pooler_that_takes_it_for_a_standby_is_used(servers: Servers, wanted: str) -> None:
    """The pooler's first session was one of a standby, which was promoted. Nobody could connect any more."""
    async with TransactionPooler(servers.postgres.dsn, standby=True) as pooler:
        dsn = f"{pooler.dsn} target_session_attrs={wanted}"
        async with PostgresThreadStore(dsn, schema=fresh("schema"), timeout_s=20) as store:
            await store.setup()
            await store.checkpoint("t", [said(0)], run_of("t"))
            assert await store.load_messages("t") == [said(0)]


async def test_a_standby_behind_a_pooler_that_takes_it_for_the_primary_is_not_used(own_servers: Servers) -> None:
    """The pooler's first session was one of the primary, and it leads to a standby by now: old rows were read."""
    primary = own_servers.postgres
    async with PostgresThreadStore(primary.dsn) as store:
        await store.setup()
        await store.checkpoint("t", [said(0)], run_of("t"))
    with standby_of(primary) as standby:
        async with (
            PostgresThreadStore(primary.dsn) as direct,
            TransactionPooler(standby.dsn, standby=False) as first,
            TransactionPooler(primary.dsn, standby=False) as second,
        ):
            await direct.checkpoint_append("t", [said(1)], run_of("t"))
            async with PostgresThreadStore(first.dsn, timeout_s=10.0) as store:
                for _ in range(3):
                    with pytest.raises(StoreUnavailable, match="standby"):
                        await store.load_messages("t")
            port, other = (conninfo_to_dict(dsn)["port"] for dsn in (first.dsn, second.dsn))
            both = make_conninfo(first.dsn, host=f"{_LOCAL},{_LOCAL}", port=f"{port},{other}")
            async with PostgresThreadStore(both, timeout_s=10.0) as store:

                async def read() -> bool:
                    with suppress(StoreUnavailable):
                        return await store.load_messages("t") == [said(0), said(1)]
                    return False

                await eventually(read)


@pytest.mark.parametrize("wanted", ["standby", "prefer-standby", "read-only"])
def test_nobody_can_ask_for_a_standby(wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted):
        new_pool(f"postgresql://127.0.0.1/postgres?target_session_attrs={wanted}")


def test_a_choice_of_the_primary_stays_as_it_is() -> None:
    named = "host=127.0.0.1 target_session_attrs=read-write"
    assert "target_session_attrs=read-write" in own_conninfo(named)
    assert "target_session_attrs=primary" in own_conninfo("host=127.0.0.1 target_session_attrs=any")
