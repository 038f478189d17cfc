"""Servers that refuse (no permission, login, table or space, read-only): reported in time, resumed once repaired."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from bufstore import (
    AlreadyExists,
    BufferedThreadStore,
    BufstoreError,
    ConfigError,
    Consistency,
    FlushTimeout,
    LogFull,
    LogUnavailable,
    OutcomeUnknown,
    PostgresThreadStore,
    Run,
    StoreMisconfigured,
    StoreUnavailable,
)
from bufstore.embedded import NatsServer, PostgresServer, Servers
from bufstore.langgraph.postgres.store import PostgresCheckpointStore
from command_line import bufstore_cli, where
from conftest import Deployment
from helpers import eventually, fresh, healthy, query, run_of, said, writable
from integration.test_doctor import doctor

#: These tests measure time or wait for timeouts.
pytestmark = pytest.mark.alone

#: A flush that must succeed is given more: it takes a new store's partitions first.
SHORT = {"append_timeout_s": 3.0, "read_timeout_s": 3.0, "flush_timeout_s": 3.0}


@contextlib.contextmanager
def in_time(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    try:
        yield
    finally:  # also when a call fails in it
        assert time.monotonic() - began < seconds


# --- Postgres ---------------------------------------------------------------------------------------------------


async def test_what_the_log_has_is_read_and_written_while_postgres_lets_nobody_in(deployment: Deployment) -> None:
    """Regression: a login that was refused stopped every read, and appends, though an outage stops neither."""
    dsn, role = deployment.servers.postgres.dsn, deployment.name
    await query(dsn, f"CREATE ROLE {role} SUPERUSER LOGIN PASSWORD 'x'")
    app = make_conninfo(dsn, user=role, password="x")

    def store() -> Any:
        return deployment.store(PostgresThreadStore(app, schema=deployment.name, pool_size=2))

    async with store() as one, store() as other:
        await one.save_thread("parent")
        await one.checkpoint("t", [said(0)], run_of("t"))
        await one.force_flush_all()
        await query(dsn, f"ALTER ROLE {role} NOLOGIN")
        await query(dsn, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = %s", role)
        assert await other.load_messages("t") == [said(0)]
        await other.checkpoint_append("t", [said(1)], run_of("t"))
        run = Run(run_id="r", thread_id="t", parent_thread_id="parent")
        await other.checkpoint("t", [said(0), said(1), said(2)], run)
        assert await one.load_messages("t") == [said(0), said(1), said(2)]
        assert await one.load_run("r") == run
        health = await one.health()
        assert (health.can_write, health.can_read, health.flushing) == (True, False, False)
        assert "not permitted to log in; threads whose last snapshot is in the log can be read" in health.read_trouble
        with pytest.raises(StoreMisconfigured, match="is not permitted to log in"):
            await one.load_messages("unknown")
        await query(dsn, f"ALTER ROLE {role} LOGIN")
        await healthy(one)
        await one.force_flush_all()
        assert await one.load_messages("t", consistency=Consistency.EVENTUAL) == [said(0), said(1), said(2)]


@pytest.fixture(scope="module")
def disturbed() -> Iterator[Servers]:
    """A pair of servers for the tests of this file; each test restores them."""
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
    """End the role's sessions, so that new ones begin under the new rules."""
    await query(dsn, f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'role_{deployment.name}'")


#: The statements that break and repair each.
FAULTS = {
    "password": ("ALTER ROLE {role} PASSWORD 'other'", "ALTER ROLE {role} PASSWORD 'right'"),
    "no login": ("ALTER ROLE {role} NOLOGIN", "ALTER ROLE {role} LOGIN"),
    "permission": (
        "REVOKE ALL ON ALL TABLES IN SCHEMA {schema} FROM {role}",
        "GRANT ALL ON ALL TABLES IN SCHEMA {schema} TO {role}",
    ),
    "schema usage": ("REVOKE USAGE ON SCHEMA {schema} FROM {role}", "GRANT USAGE ON SCHEMA {schema} TO {role}"),
    "missing table": ("ALTER TABLE {schema}.messages RENAME TO gone", "ALTER TABLE {schema}.gone RENAME TO messages"),
    "missing buffer table": (
        "ALTER TABLE {schema}.buffer_threads RENAME TO gone",
        "ALTER TABLE {schema}.gone RENAME TO buffer_threads",
    ),
    "missing column": (
        "ALTER TABLE {schema}.buffer_threads RENAME COLUMN version TO not_here",
        "ALTER TABLE {schema}.buffer_threads RENAME COLUMN not_here TO version",
    ),
    "missing schema": (
        "ALTER SCHEMA {schema} RENAME TO {schema}_gone",
        "ALTER SCHEMA {schema}_gone RENAME TO {schema}",
    ),
    "read-only": (
        "ALTER ROLE {role} SET default_transaction_read_only = on",
        "ALTER ROLE {role} RESET default_transaction_read_only",
    ),
    "too many connections": ("ALTER ROLE {role} CONNECTION LIMIT 0", "ALTER ROLE {role} CONNECTION LIMIT -1"),
}


@pytest.mark.long
async def test_postgres_that_refuses_parks_nothing_and_goes_on_when_mended(disturbed: Servers) -> None:
    """No entry is at fault: all entries wait in the log, writes go on, and the operator is told what to repair."""

    async def one(fault: str) -> None:
        try:
            await _refused_and_mended(disturbed, fault)
        except Exception as e:
            e.add_note(f"the fault was: {fault}")
            raise

    async with asyncio.TaskGroup() as tasks:  # they mostly wait
        for fault in FAULTS:
            tasks.create_task(one(fault))


async def _refused_and_mended(disturbed: Servers, fault: str) -> None:
    deployment = Deployment(disturbed)
    dsn = disturbed.postgres.dsn
    names = {"role": f"role_{deployment.name}", "schema": deployment.name}
    async with as_role(disturbed, deployment) as limited:
        inner = PostgresThreadStore(limited, schema=deployment.name, pool_size=4, timeout_s=3)
        async with deployment.store(inner, **SHORT) as store:
            thread_id = fresh()
            await store.checkpoint(thread_id, [said(0)], run_of(thread_id))
            await store.force_flush(thread_id, timeout_s=30)
            await query(dsn, FAULTS[fault][0].format(**names))
            await hang_up(dsn, deployment)
            with in_time(20):
                for n in range(1, 4):
                    await store.checkpoint(thread_id, [said(i) for i in range(n + 1)], run_of(thread_id, n))
                new = fresh("new")
                await store.checkpoint(new, [said(0)], run_of(new))
                with pytest.raises(FlushTimeout) as late:
                    await store.force_flush(thread_id, timeout_s=6)
            passing = fault == "too many connections"  # a transaction waits half a minute before this error is reported
            assert passing or "Postgres" in str(late.value), "says what it waits for"

            async def said_so() -> str:
                health = await store.health()
                if passing:
                    return health.store if "too many connections" in health.store else ""
                return health.flusher

            assert await eventually(said_so)
            expected = StoreUnavailable if passing else StoreMisconfigured
            if "buffer" not in fault and fault != "missing column":  # the wrapped store does not use these
                async with PostgresThreadStore(limited, schema=deployment.name, timeout_s=3) as direct:
                    with in_time(10), pytest.raises(expected):
                        await direct.checkpoint("direct", [said(0)], run_of("direct"))
            assert (await store.statistics()).flusher.stopped is not passing
            await query(dsn, FAULTS[fault][1].format(**names))

            async def flushed() -> bool:
                with contextlib.suppress(FlushTimeout):
                    await store.force_flush_all(timeout_s=1)
                    return True
                return False

            await eventually(flushed, 60)
            assert await store.quarantined() == 0
            level = Consistency.EVENTUAL
            assert await store.load_messages(thread_id, consistency=level) == [said(i) for i in range(4)]
            assert await store.load_messages(new, consistency=level) == [said(0)]


@pytest.mark.parametrize(
    ("tables", "shown"),
    [(["messages"], "true"), (["messages", "buffer_threads", "bufstore_migrations"], "current_user <> 'nobody'")],
)
async def test_row_level_security_that_hides_threads_is_said_and_a_policy_for_all_of_them_is_not(
    servers: Servers, tables: list[str], shown: str
) -> None:
    deployment, dsn = Deployment(servers), servers.postgres.dsn
    async with as_role(servers, deployment) as limited:
        for table in tables:
            await query(dsn, f"ALTER TABLE {deployment.name}.{table} ENABLE ROW LEVEL SECURITY")
        hides = f"row level security hides the rows of .*{tables[0]}"
        with pytest.raises(StoreMisconfigured, match=hides):
            async with PostgresThreadStore(limited, schema=deployment.name) as store:
                await store.setup()
        report = await asyncio.to_thread(
            bufstore_cli, "doctor", "--json", **(where(deployment) | {"BUFSTORE_POSTGRES": limited})
        )
        assert [c["what"] for c in report.json["checks"] if re.search(hides, c["found"])] == ["looked at"]
        async with PostgresThreadStore(dsn, schema=deployment.name) as owners:
            await owners.setup()
        for table in tables:
            await query(dsn, f"CREATE POLICY everything ON {deployment.name}.{table} USING ({shown})")
        async with deployment.store(PostgresThreadStore(limited, schema=deployment.name)) as ours:
            await ours.checkpoint("t", [said(0)], run_of("t"))
            await ours.force_flush_all()
            # As many as are copied where row level security is off; with it, Postgres takes no COPY at all.
            await ours.checkpoint_append("t", [said(n) for n in range(1, 301)], run_of("t"))
            await ours.force_flush_all()
            assert len(await ours.load_messages("t", consistency=Consistency.EVENTUAL) or []) == 301


async def test_row_level_security_on_langgraphs_tables_is_said(servers: Servers) -> None:
    dsn, name = servers.postgres.dsn, f"g{fresh()[-10:]}"
    owners = PostgresCheckpointStore(dsn, schema=name)
    await owners.open()
    await owners.setup()
    await owners.aclose()
    await query(dsn, f"CREATE ROLE {name} LOGIN PASSWORD 'right'")
    await query(dsn, f"GRANT USAGE ON SCHEMA {name} TO {name}")
    await query(dsn, f"GRANT ALL ON ALL TABLES IN SCHEMA {name} TO {name}")
    await query(dsn, f"ALTER TABLE {name}.checkpoint_migrations ENABLE ROW LEVEL SECURITY")
    apps = PostgresCheckpointStore(psycopg.conninfo.make_conninfo(dsn, user=name, password="right"), schema=name)
    await apps.open()
    with pytest.raises(StoreMisconfigured, match="row level security hides the rows of checkpoint_migrations"):
        await apps.setup()
    await apps.aclose()


async def test_postgres_without_tls_is_refused_where_tls_is_asked_for(disturbed: Servers) -> None:
    for mode in ("require", "verify-full"):
        dsn = psycopg.conninfo.make_conninfo(disturbed.postgres.dsn, sslmode=mode)
        async with PostgresThreadStore(dsn) as store:
            with in_time(9), pytest.raises(StoreMisconfigured, match="SSL"):
                await store.load_thread("t")


async def test_a_full_disk_of_postgres_parks_nothing_and_goes_on_with_room(own_servers: Servers) -> None:
    """SQLSTATE 53100 is not an entry's fault."""
    folder = own_servers.data / "small"
    folder.mkdir()
    with small_disk(folder, "24m"):
        shutil.chown(folder, *_postgres_account(own_servers.postgres))
        dsn = own_servers.postgres.dsn
        await query(dsn, f"CREATE TABLESPACE small LOCATION '{folder}'")
        await query(dsn, "ALTER ROLE bufstore SET default_tablespace = small")
        deployment = Deployment(own_servers)
        async with deployment.store(**SHORT) as store:
            thread_id = fresh()
            await store.checkpoint(thread_id, [said(0)], run_of(thread_id))
            await store.force_flush(thread_id, timeout_s=30)
            filler = folder / "filler"
            _fill(filler)
            messages = [{"n": n, "blob": os.urandom(100_000)} for n in range(10)]
            await store.checkpoint(thread_id, [said(0), *messages], run_of(thread_id))

            async def said_so() -> bool:
                return "53100" in (await store.health()).flusher

            await eventually(said_so)
            with pytest.raises(FlushTimeout, match="53100"):
                await store.force_flush(thread_id, timeout_s=2)
            assert await store.load_messages(thread_id) == [said(0), *messages]
            assert not (await store.statistics()).flusher.stopped
            filler.unlink()
            await eventually(lambda: _flushed(store))
            found = await store.load_messages(thread_id, consistency=Consistency.EVENTUAL)
            assert found == [said(0), *messages]
            assert await store.quarantined() == 0
        own_servers.postgres.stop()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that the account which runs Postgres for root can enter, with a folder `nats`."""
    made = Path(tempfile.mkdtemp(prefix="full-"))
    made.chmod(0o711)
    (made / "nats").mkdir()
    yield made
    shutil.rmtree(made, ignore_errors=True)


async def test_a_full_disk_of_nats_loses_nothing_that_was_acknowledged(folder: Path) -> None:
    nats = folder / "nats"
    with small_disk(nats, "64m"), Servers(folder) as servers:
        deployment = Deployment(servers, max_bytes=16 << 20)
        async with deployment.store(**SHORT) as store:
            expected: dict[str, Any] = {}

            async def write(n: int) -> None:
                thread_id = fresh()
                message = {"n": n, "blob": os.urandom(50_000)}
                await store.checkpoint(thread_id, [message], run_of(thread_id))
                expected[thread_id] = message

            for n in range(5):
                await write(n)
            _fill(nats / "filler")
            refused: list[BufstoreError] = []
            for n in range(100):
                try:
                    with in_time(9):
                        await write(n)
                except (LogFull, LogUnavailable, OutcomeUnknown) as e:
                    refused.append(e)
                    if len(refused) == 3:
                        break
            assert refused, "the disk is full"

            async def said_so() -> bool:
                return "NATS does not answer writes" in (await store.health()).write_trouble

            await eventually(said_so)
            (nats / "filler").unlink()
            # A stream that met a full disk stores nothing until the server is restarted.
            code, checks = await doctor(deployment)
            assert (code, checks["NATS storage"]["level"]) == (2, "bad")
            assert checks["NATS permissions"]["level"] == "ok", checks
            assert not (await store.health()).can_write
            await asyncio.to_thread(servers.nats.restart)

            async def again() -> bool:
                with contextlib.suppress(LogFull, LogUnavailable, OutcomeUnknown):
                    await write(-1)
                    return True
                return False

            await eventually(again, 30)
            await writable(store)
            await eventually(lambda: _flushed(store))
            for thread_id, message in expected.items():
                assert await store.load_messages(thread_id, consistency=Consistency.EVENTUAL) == [message]
            assert await store.quarantined() == 0


@pytest.mark.long  # forty seconds
async def test_where_a_full_disk_stopped_the_bucket_only_new_runs_are_taken(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """While nobody writes, flushers renew their leases, so that the bucket alone meets the full disk."""
    nats = folder / "nats"
    with small_disk(nats, "64m"), Servers(folder) as servers:
        deployment = Deployment(servers, max_bytes=16 << 20)
        short = {**SHORT, "lease_s": 4}
        async with deployment.store(flusher=False, **short) as writer:
            async with deployment.store(**short) as flusher:
                await writer.checkpoint("t", [said(0)], run_of("t"))
                await writer.force_flush("t", timeout_s=30)
                _fill(nats / "filler")

                async def met() -> bool:
                    return "cannot renew its lease" in (await flusher.health()).flush_trouble

                await eventually(met, 30)
                (nats / "filler").unlink()
                with in_time(9), pytest.raises(LogUnavailable, match="could not be registered in time"):
                    await writer.checkpoint("first", [said(0)], run_of("first"))
                began = asyncio.get_running_loop().time()
                for n in range(3):
                    await writer.checkpoint(f"new-{n}", [said(n)], run_of(f"new-{n}"))
                assert asyncio.get_running_loop().time() - began < 9
                assert [getattr(r, "action", "") for r in caplog.records].count("runs_unregistered") == 1
                for n in range(3):
                    await writer.force_flush(f"new-{n}", timeout_s=20)  # by the flusher that cannot renew its lease
                code, checks = await doctor(deployment)
                assert (code, checks["NATS bucket storage"]["level"]) == (2, "bad")
            # Its record stays, because nothing can be stored in the bucket, but it is not renewed.
            found = await asyncio.to_thread(bufstore_cli, "status", "--json", **where(deployment))
            assert not json.loads(found.out)["flushing"], found.out
        await asyncio.to_thread(servers.nats.restart)
        async with deployment.store(**short) as flusher:
            with pytest.raises(AlreadyExists):
                await flusher.checkpoint("another", [said(0)], Run(run_id=run_of("t").run_id, thread_id="another"))
            await flusher.checkpoint("first", [said(0)], run_of("first"))
            await flusher.force_flush_all()
            assert (await flusher.health()).ok
            assert await flusher.quarantined() == 0


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """Mount a file system of `size` on `folder`. Skips the test where that is not allowed."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("a full disk needs a small file system, and only root may mount one")
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=711", "tmpfs", folder], capture_output=True)
    if made.returncode != 0:
        pytest.skip(f"no small file system can be mounted here: {made.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def _fill(path: Path) -> None:
    """Fill all free space."""
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(bytes(1 << 16)):
            pass


def _postgres_account(server: PostgresServer) -> tuple[int, int]:
    owner = server._cluster.stat()
    return owner.st_uid, owner.st_gid


async def _flushed(store: BufferedThreadStore) -> bool:
    with contextlib.suppress(FlushTimeout, LogUnavailable):
        await store.force_flush_all(timeout_s=1)
        return True
    return False


# --- NATS -------------------------------------------------------------------------------------------------------

ALL = '">"'
#: Users of one account, each without some right.
USERS = """
authorization {{ timeout: 10, users: [
    {{ user: bufstore, password: {password} }}
    {{ user: all, password: "p@ss:w/rd#%41" }}
    {{ user: no_append, password: x, permissions: {{ publish: {{ deny: "{subject}.>" }} }} }}
    {{ user: no_inbox, password: x, permissions: {{ subscribe: {{ deny: "_INBOX.>" }} }} }}
    {{ user: no_api, password: x, permissions: {{ publish: {{ deny: "$JS.API.>" }} }} }}
    {{ user: no_reads, password: x, permissions: {{ publish: {{ deny: "$JS.API.DIRECT.GET.>" }} }} }}
    {{ user: no_bucket, password: x, permissions: {{ publish: {{ deny: "$KV.>" }} }} }}
] }}
"""


@pytest.fixture(scope="module")
def guarded(disturbed: Servers) -> Iterator[tuple[Servers, str, NatsServer]]:
    """A NATS server with users that lack rights, and the subject on which one of them may not publish."""
    folder = Path(tempfile.mkdtemp(prefix="guarded-"))
    server = NatsServer(folder)
    server.start()
    password = server.url.partition("bufstore:")[2].partition("@")[0]
    server.stop()
    subject = fresh("t").replace("-", "_")
    server.extra_config = USERS.format(password=f'"{password}"', subject=subject)
    server.start()
    yield disturbed, subject, server
    server.stop()
    shutil.rmtree(folder, ignore_errors=True)


def _as(server: NatsServer, user: str, password: str = "x") -> str:
    return f"nats://{user}:{password}@127.0.0.1:{server.port}"


async def test_a_password_in_a_url_is_percent_decoded(guarded: Any) -> None:
    servers, _, server = guarded
    for password in ("p%40ss%3Aw%2Frd%23%2541", "p@ss:w/rd#%2541"):
        async with Deployment(servers).store(nats=_as(server, "all", password)) as store:
            await store.checkpoint("t", [said(0)], run_of("t"))
    for password in ("wrong", "p%40ss", ""):
        with in_time(9), pytest.raises(ConfigError, match="refused the credentials"):
            async with Deployment(servers).store(nats=_as(server, "all", password)):
                pass


@pytest.mark.parametrize(
    ("user", "says"),
    [("no_inbox", "subscribe to _INBOX"), ("no_api", r"publish on '\$js\.api"), ("no_bucket", r"publish on '\$kv")],
)
async def test_a_user_who_may_not_even_begin_is_told_at_once(guarded: Any, user: str, says: str) -> None:
    servers, _, server = guarded
    with in_time(9), pytest.raises(ConfigError, match=says):
        async with Deployment(servers).store(nats=_as(server, user)) as store:
            await store.checkpoint("t", [said(0)], run_of("t"))


async def test_a_user_who_may_not_append_or_read_is_told_at_once_and_others_go_on(guarded: Any) -> None:
    servers, subject, server = guarded
    deployment = Deployment(servers)
    deployment.verified = False  # not every user may read for verify()
    deployment.log = type(deployment.log)(
        **{f: getattr(deployment.log, f) for f in ("stream", "bucket", "max_bytes")}, subject=subject
    )
    async with deployment.store(nats=_as(server, "all", "p%40ss:w/rd%23%2541")) as good:
        await good.checkpoint("t", [said(0)], run_of("t"))
        for user, call in (
            ("no_append", lambda s: s.checkpoint("t", [said(0), said(1)], run_of("t"))),
            ("no_append", lambda s: s.checkpoint("new", [{"blob": bytes(3 << 20)}], run_of("new"))),
            ("no_reads", lambda s: s.load_messages("t")),
        ):
            # A user that may not read is refused at open, which compares the log with Postgres.
            with in_time(9), pytest.raises(ConfigError, match="does not permit"):
                async with deployment.store(nats=_as(server, user), flusher=False) as limited:
                    await call(limited)
        assert await good.load_thread("new") is None
        await good.checkpoint("t", [said(0), said(2)], run_of("t"))
        await good.force_flush("t")
        assert await good.load_messages("t", consistency=Consistency.EVENTUAL) == [said(0), said(2)]


@pytest.mark.long  # ten seconds
async def test_a_user_who_is_removed_and_comes_back_goes_on_by_itself(own_servers: Servers) -> None:
    """A running store's credentials are refused: it is reported, and the store goes on once they are valid again."""
    deployment = Deployment(own_servers)
    nats = own_servers.nats
    async with deployment.store(**SHORT) as store:
        await store.checkpoint("t", [said(0)], run_of("t"))
        port = nats.port
        nats.stop()
        other = NatsServer(own_servers.data / "other", port=port)
        other.start()

        async def said_so() -> bool:
            return "authorization" in (await store.health()).log.lower()

        await eventually(said_so)
        with in_time(9), pytest.raises(LogUnavailable, match=r"(?i)no entry in time: not connected .*authorization"):
            await store.checkpoint("t", [said(0), said(1)], run_of("t"))
        with pytest.raises(LogUnavailable, match=r"(?i)registered in time: not connected to NATS at .*authorization"):
            await store.checkpoint("new", [said(0)], run_of("new"))
        other.stop()
        nats.start()
        await eventually(lambda: _flushed(store))
        await store.checkpoint("t", [said(0), said(1)], run_of("t"))
        await store.force_flush("t", timeout_s=30)
        assert await store.load_messages("t", consistency=Consistency.EVENTUAL) == [said(0), said(1)]


async def _max_payload(server: NatsServer) -> int:
    """Return the server's `max_payload` as it tells a new connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    info = await reader.readline()
    writer.close()
    return int(json.loads(info.removeprefix(b"INFO "))["max_payload"])


@pytest.mark.parametrize("size", [300 << 10, 3 << 20], ids=["whole", "in parts"])
async def test_a_smaller_max_payload_costs_one_connection_and_no_write(
    size: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The server does not announce a reload; it closes a connection that sends more than the new limit."""
    with Servers(nats_config="max_payload: 1048576\n") as servers:
        async with Deployment(servers).store() as store:
            await store.checkpoint("t", [said(0)], run_of("t"))
            assert servers.nats.pid is not None
            file = servers.nats.data / "nats.conf"
            file.write_text(file.read_text().replace("1048576", str(256 << 10)))
            os.kill(servers.nats.pid, signal.SIGHUP)

            async def reloaded() -> bool:
                return await _max_payload(servers.nats) == 256 << 10

            await eventually(reloaded)
            for thread_id, messages in (("large", [said(0, size)]), ("small", [said(0)]), ("t", [said(0), said(1)])):
                await store.checkpoint(thread_id, messages, run_of(thread_id))
            await store.force_flush_all()
            found = await store.load_messages("large", consistency=Consistency.EVENTUAL)
            assert found == [said(0, size)]
            # The reason is not always known: a reset may drop the server's last message.
            assert [getattr(r, "action", "") for r in caplog.records].count("nats_lost") == 1
