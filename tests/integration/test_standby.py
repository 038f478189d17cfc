"""A standby is not taken for the primary, although it answers reads: what it shows may be old."""

from __future__ import annotations

import asyncio
import secrets
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from bufstore import Consistency, PostgresThreadStore, StoreUnavailable
from bufstore.embedded import PostgresServer, Servers
from bufstore.errors import ConfigError
from bufstore.mailbox import MailboxConfig, PostgresMailboxStore
from bufstore.postgres.connection.conninfo import own_conninfo
from bufstore.postgres.connection.pool import _Connection, new_pool, open_pool
from bufstore.postgres.connection.session import changes_of_database
from conftest import Deployment
from fault_proxy.proxy import FaultProxy
from helpers import eventually, fresh, query, run_of, said
from transaction_pooler import TransactionPooler

_LOCAL = "127.0.0.1"
_RECOVERS = "SELECT pg_is_in_recovery()"


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


async def test_a_mailbox_is_opened_beside_a_host_that_says_nothing(servers: Servers) -> None:
    """Regression: the first of several hosts had all of the time, however often a process began anew."""
    postgres = servers.postgres
    async with FaultProxy(_LOCAL, postgres.port, protocol="postgres") as gone:
        gone.to_server.hold()
        dsn = postgres.dsn.replace(f"{_LOCAL}:{postgres.port}/", f"{_LOCAL}:{gone.port},{_LOCAL}:{postgres.port}/")
        config = MailboxConfig(timeout_s=3)
        async with PostgresMailboxStore(dsn, schema=f"m{secrets.token_hex(5)}", pool_size=2, config=config) as box:
            assert await box.queued_thread_ids() == []


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


@pytest.mark.parametrize("level", ["read committed", "serializable"])
async def test_a_standby_behind_a_pooler_that_takes_it_for_the_primary_is_not_used(
    own_servers: Servers, level: str
) -> None:
    """The pooler's first session was one of the primary, and it leads to a standby by now: old rows were read.

    A standby answers nothing where serializable is the default.
    """
    primary, role = own_servers.postgres, {"user": fresh("role").replace("-", "_"), "password": "p"}
    async with await psycopg.AsyncConnection.connect(primary.dsn, autocommit=True) as connection:
        await connection.execute(f"CREATE ROLE {role['user']} SUPERUSER LOGIN PASSWORD 'p'")
        await connection.execute(f"ALTER ROLE {role['user']} SET default_transaction_isolation = '{level}'")
    async with PostgresThreadStore(primary.dsn) as store:
        await store.setup()
        await store.checkpoint("t", [said(0)], run_of("t"))
    with standby_of(primary) as standby:
        async with (
            PostgresThreadStore(primary.dsn) as direct,
            TransactionPooler(make_conninfo(standby.dsn, **role), standby=False) as first,
            TransactionPooler(make_conninfo(primary.dsn, **role), standby=False) as second,
        ):
            await direct.checkpoint_append("t", [said(1)], run_of("t"))
            async with PostgresThreadStore(first.dsn, timeout_s=2.0) as store:
                changes = changes_of_database()
                for _ in range(3):
                    with pytest.raises(StoreUnavailable, match="standby mode, and a pooler"):
                        await store.load_messages("t")
                assert changes_of_database() == changes, "it counts when it is promoted, which is no restart"
            async with PostgresThreadStore(_of_both(first.dsn, second.dsn), timeout_s=10.0) as store:
                # The first read, too: it got connections that had been made to the standby.
                assert await store.load_messages("t") == [said(0), said(1)]


async def test_a_pooler_that_misled_once_keeps_nobody_from_the_servers_of_a_service(
    own_servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only libpq knows them, and where it had been misled it was not asked any more: only the first was looked at."""
    with standby_of(own_servers.postgres) as standby:
        async with (
            TransactionPooler(standby.dsn, standby=False) as first,
            TransactionPooler(own_servers.postgres.dsn, standby=False) as second,
        ):
            given = conninfo_to_dict(_of_both(first.dsn, second.dsn))
            service = tmp_path / "services"
            service.write_text("\n".join(["[both]", *(f"{name}={value}" for name, value in given.items())]))
            monkeypatch.setenv("PGSERVICEFILE", str(service))
            async with await open_pool("service=both", size=1) as pool:
                async with pool.lend(20) as connection:
                    assert await (await connection.execute(_RECOVERS)).fetchone() == (False,)
                    await connection.close()
                first.reconnect()
                async with pool.lend(20) as connection:
                    assert await (await connection.execute(_RECOVERS)).fetchone() == (False,)


async def test_a_standby_beside_a_server_that_refuses_is_an_outage(own_servers: Servers) -> None:
    """A pooler had passed the standby off: then the last server's own refusal counted, not that the primary is away."""
    with standby_of(own_servers.postgres) as standby:
        async with TransactionPooler(standby.dsn, standby=False) as first, TransactionPooler(standby.dsn) as second:
            second.refuses_logins_with = 'no pg_hba.conf entry for host "10.0.0.1", user "u", database "d"'
            async with await open_pool(_of_both(first.dsn, second.dsn), size=1) as pool:
                for _ in range(3):
                    with pytest.raises(StoreUnavailable, match="standby"):
                        async with pool.lend(1.5):
                            pass


async def test_a_server_that_is_away_behind_a_misleading_pooler_is_not_told_as_a_standby(servers: Servers) -> None:
    async with TransactionPooler(servers.postgres.dsn, standby=True) as pooler:
        pooler.refuses_with = "server login has been failing, try again later (server_login_retry)"
        async with await open_pool(pooler.dsn, size=1) as pool:
            with pytest.raises(StoreUnavailable, match="in time: server login has been failing"):
                async with pool.lend(1.5):
                    pass


async def test_a_pool_that_closes_waits_for_no_server_to_say_what_it_is(servers: Servers) -> None:
    before = asyncio.all_tasks()
    async with TransactionPooler(servers.postgres.dsn, standby=True) as pooler:
        pooler.runs.clear()
        pool = await open_pool(pooler.dsn, size=1)
        with pytest.raises(StoreUnavailable):
            async with pool.lend(0.5):
                pass
        await pool.close()
        left = {task.get_name() for task in asyncio.all_tasks() - before}
        assert not [name for name in left if "worker" in name]


async def test_a_cancel_request_gets_as_long_as_the_connection_took_and_not_its_search(servers: Servers) -> None:
    async with TransactionPooler(servers.postgres.dsn, standby=True) as pooler:
        pooler.runs.clear()
        asyncio.get_running_loop().call_later(1.0, pooler.runs.set)
        async with await open_pool(pooler.dsn, size=1) as pool, pool.lend(10) as connection:
            assert isinstance(connection, _Connection)
            assert connection.made_in_s < 0.5


def _of_both(first: str, second: str) -> str:
    port, other = (conninfo_to_dict(dsn)["port"] for dsn in (first, second))
    return make_conninfo(first, host=f"{_LOCAL},{_LOCAL}", port=f"{port},{other}")


@pytest.mark.parametrize("wanted", ["standby", "prefer-standby", "read-only"])
def test_nobody_can_ask_for_a_standby(wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted):
        new_pool(f"postgresql://127.0.0.1/postgres?target_session_attrs={wanted}")


def test_a_choice_of_the_primary_stays_as_it_is() -> None:
    named = "host=127.0.0.1 target_session_attrs=read-write"
    assert "target_session_attrs=read-write" in own_conninfo(named)
    assert "target_session_attrs=primary" in own_conninfo("host=127.0.0.1 target_session_attrs=any")
