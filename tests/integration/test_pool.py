"""A pool with more callers than connections: all get their turn, and none loses a connection for the others."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import socket
import time
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from bufstore.embedded import Servers
from bufstore.errors import Closed, ConfigError, StoreMisconfigured, StoreUnavailable
from bufstore.postgres.connection.conninfo import check_conninfo
from bufstore.postgres.connection.pool import Pool, connect, open_pool
from bufstore.postgres.connection.session import changes_of_database
from bufstore.postgres.connection.statements import Statements
from fault_proxy.proxy import FaultProxy
from helpers import cancel_as_anyio, eventually, fresh, query
from thorough import seldom
from transaction_pooler import TransactionPooler


@pytest.fixture(scope="module")
async def pool(servers: Servers) -> AsyncIterator[Pool]:
    pool = await open_pool(servers.postgres.dsn, size=3)
    yield pool
    await pool.close()


async def backend(pool: Pool, timeout_s: float = 10) -> int:
    """Run a statement, and return the process id of its server process."""
    async with pool.lend(timeout_s) as connection:
        return connection.info.backend_pid if await connection.execute("SELECT 1") else 0


async def test_what_postgres_says_is_one_line_that_no_terminal_obeys(pool: Pool) -> None:
    says = "DO $$ BEGIN RAISE EXCEPTION E'no\\n\\x1b[2J such thing' USING ERRCODE = '42501'; END $$"
    with pytest.raises(StoreMisconfigured, match=r"says: no\\n\\x1b\[2J such thing \(SQLSTATE 42501\)$"):
        async with pool.lend(10) as connection:
            await connection.execute(says)


async def test_callers_have_their_turn_in_order_on_as_many_connections_as_there_are(pool: Pool) -> None:
    order: list[int] = []

    async def call(n: int) -> int:
        async with pool.lend(10) as connection:
            order.append(n)
            await connection.execute("SELECT 1")
            return connection.info.backend_pid

    async with contextlib.AsyncExitStack() as stack:  # open all three connections
        for _ in range(3):
            await stack.enter_async_context(pool.lend(5))
    pool.pop_stats()
    used = await asyncio.gather(*(call(n) for n in range(100)))
    assert len(set(used)) <= 3
    assert order == sorted(order)
    assert pool.get_stats()["requests_num"] < 50, "most were handed on"


async def test_a_small_question_on_which_many_wait_comes_first(pool: Pool) -> None:
    order: list[str] = []
    statements = Statements(pool, {"little": "SELECT 1"}, 30.0)

    async def told(name: str, answer: Awaitable[object]) -> None:
        await answer
        order.append(name)

    async with contextlib.AsyncExitStack() as stack:
        for _ in range(3):
            await stack.enter_async_context(pool.lend(30))
        calls = [asyncio.ensure_future(told("read", statements.read("little"))) for _ in range(50)]
        await asyncio.sleep(0)
        calls.append(asyncio.ensure_future(told("ping", statements.ping("little"))))
        calls.append(asyncio.ensure_future(told("first", statements.first("little"))))
        await asyncio.sleep(0)
    await asyncio.gather(*calls)
    assert {"ping", "first"} < set(order[:10])
    assert len(order) == 52


async def test_who_gives_up_at_any_moment_takes_nothing_with_him(pool: Pool) -> None:
    chance = random.Random(5)
    for _ in range(30):
        calls = [asyncio.ensure_future(backend(pool)) for _ in range(12)]
        for _ in range(chance.randrange(12)):
            await asyncio.sleep(0)
        for call in chance.sample(calls, 6):
            call.cancel()
            if chance.random() < 0.5:
                await asyncio.sleep(0)
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(o, (int, asyncio.CancelledError)) for o in outcomes), outcomes
        assert sum(isinstance(o, int) for o in outcomes) >= 6
    # All three connections are still there.
    async with contextlib.AsyncExitStack() as stack:
        held = [await stack.enter_async_context(pool.lend(5)) for _ in range(3)]
        assert len({c.info.backend_pid for c in held}) == 3


async def sleeping(pool: Pool) -> None:
    async with pool.lend(60) as connection:
        await connection.execute("SELECT pg_sleep(60)")


async def test_who_gives_up_waits_for_no_postgres_that_hangs(
    servers: Servers, caplog: pytest.LogCaptureFixture
) -> None:
    address = conninfo_to_dict(servers.postgres.dsn)
    async with FaultProxy(str(address["host"]), int(str(address["port"])), protocol="postgres") as proxy:
        pool = await open_pool(make_conninfo(servers.postgres.dsn, host="127.0.0.1", port=proxy.port), size=1)
        before = await backend(pool)
        call = asyncio.create_task(sleeping(pool))
        asleep = "SELECT pid FROM pg_stat_activity WHERE wait_event = 'PgSleep' AND pid = %s"
        await eventually(lambda: query(servers.postgres.dsn, asleep, before))
        proxy.to_client.hold()
        call.cancel()
        ended, _ = await asyncio.wait([call], timeout=8)
        assert ended, "psycopg waits for ten seconds"
        assert call.cancelled()
        proxy.heal()
        assert await backend(pool) not in (0, before), "what was left there is nobody's"
        await pool.close()
    # Regression: psycopg warned that the cancellation had failed, and then that it was interrupted.
    assert [r.getMessage() for r in caplog.records if r.name.startswith("psycopg")] == []


async def test_what_psycopg_warns_of_in_statements_of_others_is_heard(
    servers: Servers, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: Any, **__: Any) -> None:
        raise psycopg.OperationalError("away")

    async with await psycopg.AsyncConnection.connect(servers.postgres.dsn) as other:
        monkeypatch.setattr(other, "cancel_safe", fail)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await other.execute("SELECT pg_sleep(1)")
    assert [r.getMessage() for r in caplog.records if r.name == "psycopg"] == ["query cancellation failed: away"]


@pytest.mark.parametrize("libpq", [16, 17])
async def test_who_is_cancelled_again_and_again_leaves_no_statement_in_postgres(
    servers: Servers, libpq: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if libpq < 17:  # older versions: psycopg sends the request in a thread
        monkeypatch.setattr(psycopg.capabilities, "has_cancel_safe", lambda: False)
    name = fresh("app")
    asleep = "SELECT 1 FROM pg_stat_activity WHERE application_name = %s AND wait_event = 'PgSleep'"
    pool = await open_pool(make_conninfo(servers.postgres.dsn, application_name=name), size=2)
    for _ in range(5):
        call = asyncio.create_task(sleeping(pool))
        await eventually(lambda: query(servers.postgres.dsn, asleep, name))
        await cancel_as_anyio(call)
        assert call.cancelled()

        async def none_left() -> bool:
            return not await query(servers.postgres.dsn, asleep, name)

        await eventually(none_left)
    assert await backend(pool)
    await pool.close()
    assert [r.getMessage() for r in caplog.records if r.name.startswith("psycopg")] == []


@pytest.mark.parametrize("late_s", [0.1, *seldom(1.0)])
async def test_what_has_been_answered_is_done_however_late_the_loop_reads_it(servers: Servers, late_s: float) -> None:
    lock = random.getrandbits(62)
    waits = "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND pid = %s"
    works = "SELECT 1 FROM pg_stat_activity WHERE state = 'active' AND pid = %s"
    pool = await open_pool(servers.postgres.dsn, size=1)
    pid = await backend(pool)

    async def call() -> None:
        async with pool.lend(8) as connection:
            await connection.execute("SELECT pg_advisory_xact_lock(%s)", [lock])

    with psycopg.connect(servers.postgres.dsn, autocommit=True) as other:
        other.execute("SELECT pg_advisory_lock(%s)", [lock])
        called, over = asyncio.create_task(call()), time.monotonic() + 8
        await eventually(lambda: query(servers.postgres.dsn, waits, pid))
        # From here on the event loop is blocked.
        other.execute("SELECT pg_advisory_unlock(%s)", [lock])
        while other.execute(works, [pid]).fetchone():
            pass
        time.sleep(over + late_s - time.monotonic())  # noqa: ASYNC251 - blocks the loop on purpose
    await called
    assert await backend(pool) == pid, "nothing was to be cancelled"
    await pool.close()


async def test_who_waits_too_long_is_told_and_the_others_go_on(pool: Pool) -> None:
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(3):
            await stack.enter_async_context(pool.lend(5))
        patient = asyncio.ensure_future(backend(pool))
        with pytest.raises(StoreUnavailable, match="all connections are in use"):
            await backend(pool, 0.05)
    assert await patient


async def test_who_waits_for_a_silent_postgres_is_told_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connections are accepted, and nobody answers
        port = silent.getsockname()[1]
        pool = await open_pool(make_conninfo(host="127.0.0.1", port=port, user="u", dbname="d"), size=1)
        try:
            waiting = [asyncio.ensure_future(backend(pool, 0.2)) for _ in range(2)]  # the second for the first
            for outcome in await asyncio.gather(*waiting, return_exceptions=True):
                assert isinstance(outcome, StoreUnavailable)
                assert "it does not answer a new connection" in str(outcome)
            for _ in range(3):
                with pytest.raises(StoreUnavailable):
                    await backend(pool, 0.05)
            assert not pool._waiting, "psycopg's pool keeps everyone who has timed out"
        finally:
            await pool.close()


async def test_who_waits_behind_others_hears_of_an_outage_in_its_own_time_and_of_no_queue(servers: Servers) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for conninfo, away in (
        (make_conninfo(host="127.0.0.1", port=port, user="u", dbname="d"), True),
        (servers.postgres.dsn, False),
    ):
        async with contextlib.AsyncExitStack() as stack:
            pool = await open_pool(conninfo, size=1)
            stack.push_async_callback(pool.close)
            if away:
                patient = asyncio.ensure_future(backend(pool, 60))  # it has the only place, and rides out the outage
                stack.callback(patient.cancel)
                await asyncio.sleep(0)
                with pytest.raises(StoreUnavailable, match="refused"):
                    async with asyncio.timeout(10), pool.lend(60, 0.2):
                        pass
                assert not patient.done()
            else:
                async with pool.lend(60):
                    second = asyncio.ensure_future(stack.enter_async_context(pool.lend(60, 0.01)))
                    assert not (await asyncio.wait([second], timeout=0.1))[0]
                await second


async def test_who_waits_behind_others_hears_of_an_outage_that_shows_later() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # until the connecting ends, nothing says why
        conninfo = make_conninfo(host="127.0.0.1", port=silent.getsockname()[1], user="u", dbname="d")
        pool = await open_pool(conninfo, size=1, connect_timeout_s=1)
        patient = asyncio.ensure_future(backend(pool, 60))
        await asyncio.sleep(0)
        try:
            with pytest.raises(StoreUnavailable, match="no connection to Postgres in time"):
                async with asyncio.timeout(10), pool.lend(60, 0.01):
                    pass
            assert not patient.done()
        finally:
            patient.cancel()
            await pool.close()


async def test_a_connection_that_broke_is_not_handed_on(pool: Pool, servers: Servers) -> None:
    async with contextlib.AsyncExitStack() as stack:
        held = [await stack.enter_async_context(pool.lend(5)) for _ in range(3)]
        waiting = [asyncio.ensure_future(backend(pool)) for _ in range(6)]
        await asyncio.sleep(0)
        async with await psycopg.AsyncConnection.connect(servers.postgres.dsn, autocommit=True) as other:
            for connection in held:
                await other.execute("SELECT pg_terminate_backend(%s, 5000)", [connection.info.backend_pid])
        for connection in held:
            with contextlib.suppress(psycopg.Error):
                await connection.execute("SELECT 1")
    used = await asyncio.gather(*waiting)
    assert not set(used) & {c.info.backend_pid for c in held}


async def test_a_transaction_that_was_left_open_is_not_handed_on(pool: Pool) -> None:
    async with contextlib.AsyncExitStack() as stack:
        held = [await stack.enter_async_context(pool.lend(5)) for _ in range(3)]
        waiting = asyncio.ensure_future(backend(pool))
        for connection in held:
            await connection.set_autocommit(False)
            await connection.execute("SELECT 1")
            await connection.rollback()
            await connection.set_autocommit(True)
            await connection.execute("BEGIN")
    assert await waiting
    async with pool.lend(5) as connection:
        assert connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE


async def test_one_who_waits_in_the_pool_itself_is_not_passed(pool: Pool) -> None:
    done: list[int] = []

    async def call(n: int) -> None:
        await backend(pool)
        done.append(n)

    kept = await pool.take(5)
    try:
        await asyncio.gather(*(call(n) for n in range(100)))
    finally:
        await kept.close()
        await pool.putconn(kept)  # type: ignore[arg-type]
    assert done.index(2) < 10, "the third finds no place in the pool, of which one is kept"


@pytest.mark.parametrize("refusing_first", [True, False])
async def test_of_several_hosts_the_one_that_refuses_is_told_of(servers: Servers, refusing_first: bool) -> None:
    ports = [str(servers.postgres.port), "1"][:: 1 if refusing_first else -1]
    wrong = make_conninfo(servers.postgres.dsn, host="127.0.0.1,127.0.0.1", port=",".join(ports), password="no")
    pool = await open_pool(wrong, size=1)
    try:
        with pytest.raises(StoreMisconfigured, match="password authentication failed"):
            await backend(pool)
    finally:
        await pool.close()


async def test_a_host_that_has_no_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: whoever had mistyped the host was told "connection failed" alone."""

    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(StoreUnavailable, match=r"failed to resolve host 'pq\.invalid': .*Name or service not known"):
        await connect("host=pq.invalid user=u dbname=d")


async def test_a_login_that_is_refused_is_told_to_all_at_once(servers: Servers) -> None:
    pool = await open_pool(make_conninfo(servers.postgres.dsn, dbname="nowhere"), size=2)
    calls = [asyncio.ensure_future(backend(pool, 60)) for _ in range(200)]
    async with asyncio.timeout(20):
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(o, StoreMisconfigured) for o in outcomes), outcomes
    await pool.close()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"dbname": "no\nwhere"}, r'database "no\\nwhere" does not exist'),
        ({"channel_binding": "require", "sslmode": "disable"}, "channel binding required"),
        ({"require_auth": "md5"}, 'authentication method requirement "md5" failed'),
        ({"options": "-c statement_timout=5s"}, 'unrecognized configuration parameter "statement_timout"'),
        ({"options": "-c statement_timeout=s3cr3t"}, r'invalid value for parameter "statement_timeout": \*\*\*$'),
        ({"options": "-z"}, "invalid command-line argument"),
        ({"options": "s3cr3t"}, r"invalid command-line argument for server process: \*\*\*$"),
        ({"options": "-c statement_timeout"}, "requires a value"),
    ],
)
async def test_a_connection_that_can_never_be_made_is_no_outage(
    servers: Servers, wrong: dict[str, str], said: str
) -> None:
    """Regression: callers were told that Postgres is away, and of the database not even that it does not exist."""
    pool = await open_pool(make_conninfo(servers.postgres.dsn, **wrong), size=1)
    try:
        with pytest.raises(StoreMisconfigured, match=said):
            await backend(pool, 5)
    finally:
        await pool.close()


async def test_a_password_that_is_changed_in_its_file_is_used_by_the_next_connection(
    servers: Servers, tmp_path: Path
) -> None:
    dsn, role, file = servers.postgres.dsn, fresh("role").replace("-", "_"), tmp_path / "passwords"
    file.touch(0o600)  # libpq ignores a password file that others may read
    fields = {k: v for k, v in conninfo_to_dict(dsn).items() if k != "password"}

    async def change(password: str) -> None:
        await query(dsn, f"ALTER ROLE {role} PASSWORD '{password}'")
        file.write_text(f"*:*:*:{role}:{password}\n")

    await query(dsn, f"CREATE ROLE {role} LOGIN")
    await change("first")
    pool = await open_pool(make_conninfo(**fields | {"user": role, "passfile": str(file)}), size=1)
    try:
        before = await backend(pool)
        await change("second")
        assert await backend(pool) == before
        async with pool.lend(10) as connection:
            await connection.close()
        assert await backend(pool) != before
    finally:
        await pool.close()


async def test_closing_ends_those_who_wait(servers: Servers) -> None:
    pool = await open_pool(servers.postgres.dsn, size=1)
    async with pool.lend(5):
        waiting = [asyncio.ensure_future(backend(pool)) for _ in range(3)]
        await asyncio.sleep(0)
        await pool.close()
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(o, (Closed, StoreUnavailable)) for o in outcomes), outcomes


@pytest.mark.long
async def test_an_outage_is_not_told_by_the_log_of_the_pool(
    own_servers: Servers, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    pool = await open_pool(own_servers.postgres.dsn, size=3)
    try:
        async with contextlib.AsyncExitStack() as stack:  # some connections are in use, others are idle
            await asyncio.gather(*(backend(pool) for _ in range(3)))
            for connection in [await stack.enter_async_context(pool.lend(20)) for _ in range(2)]:
                assert await connection.execute("SELECT 1")
            own_servers.postgres.stop()
            with pytest.raises(StoreUnavailable):
                await backend(pool, 2)
        with pytest.raises(StoreUnavailable):
            await asyncio.gather(*(backend(pool, 1) for _ in range(5)))
        own_servers.postgres.start()
        assert await backend(pool, 20)
    finally:
        await pool.close()
    assert [r.getMessage() for r in caplog.records if r.name.startswith("psycopg")] == []
    caplog.clear()
    logging.getLogger("psycopg.pool").warning("error connecting in %r: %s", "another pool", "reason")
    assert len(caplog.records) == 1, "other pools of the app are heard"


async def test_what_psycopg_warns_of_in_our_pipelines_is_for_debugging(
    servers: Servers, caplog: pytest.LogCaptureFixture
) -> None:
    """For a pipeline with a refused statement psycopg warns that the statements behind it were refused too."""
    warn = logging.getLogger("psycopg").warning
    pool = await open_pool(servers.postgres.dsn, size=1)
    try:
        async with pool.lend(20) as connection, connection.pipeline() as pipeline:
            warn("error ignored terminating %r: %s", pipeline, "pipeline aborted")
    finally:
        await pool.close()
    assert [r.getMessage() for r in caplog.records if r.name == "psycopg"] == []
    async with (
        await psycopg.AsyncConnection.connect(servers.postgres.dsn, autocommit=True) as other,
        other.pipeline() as pipeline,
    ):
        warn("error ignored terminating %r: %s", pipeline, "pipeline aborted")
    assert len([r for r in caplog.records if r.name == "psycopg"]) == 1, "other connections of the app are heard"


async def test_a_database_that_takes_the_place_of_another_is_told_from_more_connections(own_servers: Servers) -> None:
    """See docs/adr/0048-a-restored-postgres-counts-as-away.md: its answers may be older than what was read before."""
    parts = conninfo_to_dict(own_servers.postgres.dsn)
    await query(own_servers.postgres.dsn, "CREATE DATABASE app")
    pool = await open_pool(make_conninfo(**{**parts, "dbname": "app"}), size=3)
    try:
        changes = changes_of_database()
        assert len(set(await asyncio.gather(*(backend(pool) for _ in range(30))))) > 1
        assert changes_of_database() == changes + 1, "more connections to one database"
        for restores in ("DROP DATABASE app WITH (FORCE)", "CREATE DATABASE app"):
            await query(own_servers.postgres.dsn, restores)
        assert await backend(pool, 30)
        assert changes_of_database() == changes + 2
        own_servers.postgres.stop()
        own_servers.postgres.start()
        assert await backend(pool, 30)
        assert changes_of_database() == changes + 3
        for name in ("postgres", "app"):
            again = await open_pool(make_conninfo(**{**parts, "dbname": name}), size=1)
            assert await backend(again)
            await again.close()
        assert changes_of_database() == changes + 5, "one that comes back counts again"
    finally:
        await pool.close()


@pytest.mark.long
async def test_who_would_rather_know_is_told_soon_that_postgres_is_away(own_servers: Servers) -> None:
    pool = await open_pool(own_servers.postgres.dsn, size=1)
    try:
        assert await backend(pool)
        own_servers.postgres.stop()
        async with asyncio.timeout(30):
            for _ in range(2):
                with pytest.raises(StoreUnavailable, match="no connection to Postgres in time"):
                    async with pool.lend(300, 0.2):
                        pass
            # A patient caller goes on waiting, and does not take the error meant for the others.
            patient = asyncio.ensure_future(backend(pool, 300))
            await asyncio.sleep(0)  # it takes the only place
            with pytest.raises(StoreUnavailable):
                async with pool.lend(300, 0.2):
                    pass
            own_servers.postgres.start()
            assert await patient
            async with pool.lend(300, 0.2) as connection:
                assert await connection.execute("SELECT 1")
    finally:
        await pool.close()


@pytest.mark.parametrize("scheme", ["postgresql+psycopg", "postgresql+asyncpg", "postgres+psycopg2"])
def test_a_url_of_sqlalchemy_is_explained(scheme: str) -> None:
    with pytest.raises(ConfigError, match=r"SQLAlchemy.*leave out '\+") as caught:
        check_conninfo(f"{scheme}://u:geheim@127.0.0.1/x")
    assert "geheim" not in str(caught.value)


async def test_a_pipeline_that_ends_with_a_large_statement_sends_all_of_it(pool: Pool) -> None:
    """The statement exceeds the socket's buffer. The server answers once it has all: sending must not wait for it."""
    async with pool.lend(10) as connection:
        with socket.socket(fileno=os.dup(connection.fileno())) as ours:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)
        large = "x" * (8 << 20)
        async with connection.pipeline():
            found = await connection.execute("SELECT length(%s::text)", [large])
        assert await found.fetchall() == [(len(large),)]


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
@pytest.mark.parametrize("pooled", [False, True])
async def test_no_default_of_a_role_makes_who_waits_for_a_row_fail(servers: Servers, level: str, pooled: bool) -> None:
    role, table = fresh("role"), fresh("table")
    await query(servers.postgres.dsn, f"CREATE ROLE \"{role}\" SUPERUSER LOGIN PASSWORD 'x'")
    await query(servers.postgres.dsn, f"ALTER ROLE \"{role}\" SET default_transaction_isolation = '{level}'")
    dsn = make_conninfo(servers.postgres.dsn, user=role, password="x")
    async with contextlib.AsyncExitStack() as stack:
        if pooled:
            dsn = (await stack.enter_async_context(TransactionPooler(dsn, servers=3))).dsn
        pool = await open_pool(dsn, size=3)
        stack.push_async_callback(pool.close)

        async def add() -> None:
            async with pool.lend(10) as connection:
                await connection.execute(f'UPDATE "{table}" SET n = n + 1')

        async with pool.lend(10) as connection:
            await connection.execute(f'CREATE TABLE "{table}" AS SELECT 0 AS n')
        async with pool.lend(10) as connection, connection.transaction():
            await connection.execute(f'UPDATE "{table}" SET n = n + 1')
            waiting = [asyncio.create_task(add()) for _ in range(2)]
            await eventually(lambda: query(servers.postgres.dsn, _WAITS, f'UPDATE "{table}" SET n = n + 1'))
        await asyncio.gather(*waiting)
    assert await query(servers.postgres.dsn, f'SELECT n FROM "{table}"') == [(3,)]


async def test_a_default_of_a_role_that_is_changed_counts_for_the_next_connection(servers: Servers) -> None:
    role = fresh("role")
    await query(servers.postgres.dsn, f"CREATE ROLE \"{role}\" LOGIN PASSWORD 'x'")
    pool = await open_pool(make_conninfo(servers.postgres.dsn, user=role, password="x"), size=1)
    try:
        async with pool.lend(10):
            pass
        await query(servers.postgres.dsn, f"ALTER ROLE \"{role}\" SET default_transaction_isolation = 'serializable'")
        async with pool.lend(10) as connection:
            await connection.close()
        async with pool.lend(10) as connection:
            shown = await (await connection.execute("SHOW transaction_isolation")).fetchone()
        assert shown == ("read committed",)
    finally:
        await pool.close()


_WAITS = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query = %s HAVING count(*) = 2"


@pytest.mark.parametrize("turns", [0, 1, 10])
async def test_a_pool_whose_tasks_somebody_has_cancelled_closes_its_connections(servers: Servers, turns: int) -> None:
    """Regression: closing it raised CancelledError, and left its connections open."""
    before = asyncio.all_tasks()
    pool = await open_pool(servers.postgres.dsn, size=2)
    pid = await backend(pool)
    for task in asyncio.all_tasks() - before:
        task.cancel()
    for _ in range(turns):
        await asyncio.sleep(0)
    await pool.close()

    async def ended() -> bool:
        return not await query(servers.postgres.dsn, "SELECT 1 FROM pg_stat_activity WHERE pid = %s", pid)

    await eventually(ended)
