"""`bufstore doctor` on servers that are healthy, slow to sync, limited, changed or away."""

from __future__ import annotations

import asyncio
import shutil
import socket
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from bench.three_servers import free_ports
from bufstore import NatsConfig
from bufstore.cli.doctor.diagnosis import Level
from bufstore.cli.doctor.disk_sync import check_sync
from bufstore.embedded import NatsServer, Servers
from bufstore.errors import BufstoreError, ConfigError
from bufstore.nats.setup import out_of_service
from bufstore.spark.sink.spark_ledger import SparkLedger
from command_line import bufstore_cli, where
from conftest import Deployment
from helpers import eventually, fresh, query, run_of, said
from integration.test_quarantine import picky, poisoned
from integration.test_setup import NatsByHand, operator_mode
from thorough import seldom


async def doctor(deployment: Deployment, *arguments: str, **environment: str) -> tuple[int, dict[str, Any]]:
    result = await asyncio.to_thread(bufstore_cli, "doctor", "--json", *arguments, **(where(deployment) | environment))
    assert result.out, result
    assert result.json["code"] == result.code
    return result.code, {f"{c['part']} {c['what']}": c for c in result.json["checks"]}


async def state(deployment: Deployment) -> Any:
    async with deployment.store(flusher=False) as store:
        found = (await store.buffer.session.stream.api(f"STREAM.INFO.{deployment.log.stream}"))["state"]
        return {k: found[k] for k in ("messages", "bytes", "last_seq")}


async def test_servers_that_are_fine_and_a_sync_that_cannot_be_seen(deployment: Deployment) -> None:
    async with deployment.store():
        before = await state(deployment)
        code, checks = await doctor(deployment)
        sync = checks.pop("NATS sync of the disk")
        assert {c["level"] for c in checks.values()} == {"ok"}, checks
        assert (code, sync["level"]) == (1, "unknown")
        assert "--nats-sys" in sync["advice"]
        assert checks.keys() >= {
            "NATS version",
            "NATS client",
            "NATS permissions",
            "NATS headroom of the log",
            "NATS replicas",
            "NATS account limits",
            "NATS bucket settings",
            "NATS log settings",
            "Postgres version",
            "Postgres fsync",
            "Postgres permissions",
        }
        result = await asyncio.to_thread(bufstore_cli, "doctor", **where(deployment))
        assert (result.code, "see the warnings" in result.out) == (1, True)
        assert await state(deployment) == before
    code, checks = await doctor(deployment)
    assert checks["NATS flushers"]["level"] == "warning"


async def test_a_postgres_of_several_hosts_is_looked_at_behind_one_that_hangs(deployment: Deployment) -> None:
    """Regression: it was not reachable, as doctor said, while stores opened on the same address."""
    good = conninfo_to_dict(deployment.servers.postgres.dsn)
    with socket.create_server(("127.0.0.1", 0)) as hung:
        places = {"host": f"127.0.0.1,{good['host']}", "port": f"{hung.getsockname()[1]},{good['port']}"}
        async with deployment.store():
            _, checks = await doctor(deployment, BUFSTORE_POSTGRES=make_conninfo("", **(good | places)))
    bad = {what: check for what, check in checks.items() if check["level"] != "ok"}
    assert bad.keys() == {"NATS sync of the disk"}, bad
    assert checks["Postgres log"]["found"] == "belongs to this database"


async def test_what_differs_and_what_waits_is_said(deployment: Deployment) -> None:
    deployment.verified = False
    async with deployment.store(picky(deployment), flush_interval_s=600) as store:
        await poisoned(store, fresh())
        config = (await store.buffer.session.stream.api(f"STREAM.INFO.{deployment.log.stream}"))["config"]
        config |= {"max_age": 3_600_000_000_000, "deny_delete": True}
        await store.buffer.session.stream.api(f"STREAM.UPDATE.{deployment.log.stream}", config)
        await query(deployment.servers.postgres.dsn, f"UPDATE {deployment.name}.buffer_log SET epoch = 3")
        code, checks = await doctor(deployment)
    assert code == 2
    assert checks["NATS log settings"]["level"] == "bad"
    assert "max_age" in checks["NATS log settings"]["found"]
    assert checks["NATS deletes"]["level"] == "warning"
    assert checks["Postgres quarantine"]["found"] == "3 entries"
    assert checks["Postgres log"]["level"] == "bad"
    assert "epoch" in checks["Postgres log"]["found"]


async def test_a_log_and_a_database_that_do_not_belong_together(servers: Servers) -> None:
    """The doctor reports the error that a store would raise there, and does not advise to start one."""
    one, other = Deployment(servers), Deployment(servers)
    for each in (one, other):
        async with each.store() as store:
            await store.checkpoint("t", [said(0)], run_of("t"))
            await store.force_flush("t")
    code, checks = await doctor(one)
    assert (code, checks["Postgres log"]["level"]) == (1, "ok"), checks
    code, checks = await doctor(one, BUFSTORE_SCHEMA=other.name)
    assert (code, checks["Postgres log"]["level"]) == (2, "bad"), checks
    assert "database is" in checks["Postgres log"]["found"]
    empty = fresh("empty")
    code, checks = await doctor(one, BUFSTORE_SCHEMA=empty)
    assert (code, checks["Postgres log"]["level"]) == (2, "bad"), checks
    assert "the first store" not in checks["Postgres tables"]["advice"]
    assert await query(servers.postgres.dsn, "SELECT 1 FROM pg_namespace WHERE nspname = %s", empty) == []
    async with one.store(flusher=False) as store:
        await store.buffer.session.stream.api(f"STREAM.DELETE.{one.log.stream}")
    code, checks = await doctor(one)
    assert (code, checks["Postgres log"]["level"]) == (2, "bad"), checks
    assert "is gone" in checks["Postgres log"]["found"]
    assert checks["NATS log"]["advice"].startswith("see the check `log`")


async def test_tables_of_an_earlier_release_are_left_as_they_are(made: Deployment) -> None:
    """A comparison with the log would migrate the tables."""
    dsn, versions = made.servers.postgres.dsn, f"SELECT max(version) FROM {made.name}.bufstore_migrations"
    of_buffer = f"{versions} WHERE room = 'buffer'"
    await query(dsn, f"DELETE FROM {made.name}.bufstore_migrations WHERE room = 'buffer' AND version = ({of_buffer})")
    before = await query(dsn, of_buffer)
    code, checks = await doctor(made)
    assert (code, checks["Postgres log"]["level"]) == (1, "unknown"), checks
    assert await query(dsn, of_buffer) == before


async def test_a_log_that_a_repair_has_taken_out_of_service_is_diagnosed(deployment: Deployment) -> None:
    deployment.verified = False
    async with deployment.store(flusher=False) as store:
        config = (await store.buffer.session.stream.api(f"STREAM.INFO.{deployment.log.stream}"))["config"]
        config["subjects"] = out_of_service(deployment.log)
        await store.buffer.session.stream.api(f"STREAM.UPDATE.{deployment.log.stream}", config)
    code, checks = await doctor(deployment)
    assert (code, checks["NATS log settings"]["level"]) == (2, "bad")
    assert "a repair" in checks["NATS log settings"]["found"]
    assert "NATS permissions" not in checks, "they cannot be tried"
    assert checks["Postgres reachable"]["level"] == "ok", "the rest is looked at all the same"


@pytest.mark.parametrize("of_bucket", [False, True])
async def test_a_mirror_answers_no_read_unnoticed(deployment: Deployment, of_bucket: bool) -> None:
    """By default the server lets a mirror answer half of all reads, with what it has copied so far."""
    name, thread_id = f"COPY-{deployment.name}", fresh()
    mirrored = f"KV_{deployment.log.bucket}" if of_bucket else deployment.log.stream
    async with deployment.store(flusher=False) as store:
        await store.checkpoint(thread_id, [said(0)], run_of(thread_id))
        api = store.buffer.session.stream.api
        made = {"name": name, "storage": "memory", "mirror": {"name": mirrored}}
        assert (await api(f"STREAM.CREATE.{name}", made))["config"]["mirror_direct"]

        async def read() -> None:
            if of_bucket:
                assert await store.buffer.session.shared.thread_of_run(run_of(thread_id).run_id, 5) == thread_id
                return
            async with deployment.store(flusher=False) as reader:
                assert await reader.load_messages(thread_id) == [said(0)]

        async def copied() -> bool:
            ends = [(await api(f"STREAM.INFO.{each}"))["state"]["last_seq"] for each in (name, mirrored)]
            return ends[0] == ends[1]

        # Before that, the mirror may answer that there is no such message: nothing in that answer names the mirror.
        await eventually(copied)
        with pytest.raises(ConfigError, match=f"{name} mirrors {mirrored} .*nats stream rm"):
            async with asyncio.timeout(20):
                while True:
                    await read()
        code, checks = await doctor(deployment)
        assert (code, checks["NATS mirrors"]["level"]) == (2, "bad")
        assert name in checks["NATS mirrors"]["found"]
        await api(f"STREAM.DELETE.{name}")
        for _ in range(5):
            await read()  # works again without a restart


@pytest.mark.parametrize("answer", ["[]", '"x"', "null", '{"jetstream": []}', '{"jetstream": {"config": "x"}}', "{"])
async def test_a_monitoring_port_that_is_none_tells_nothing(answer: str) -> None:
    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer.encode())

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            (check,) = await check_sync(None, f"http://127.0.0.1:{server.server_port}", None, None)
        finally:
            server.shutdown()
            thread.join()
    assert (check.level, check.found.startswith("could not be asked: ")) == (Level.UNKNOWN, True), check


@pytest.mark.parametrize("known", ["2m", None])
async def test_three_replicas_are_enough_however_nats_syncs(known: str | None) -> None:
    for replicas, level in (1, Level.WARNING if known else Level.UNKNOWN), (3, Level.OK):
        (check,) = await check_sync(None, None, None, known, replicas)
        assert check.level is level, check
        assert bool(check.advice) is (replicas == 1)


@pytest.mark.long
async def test_nothing_there_yet_and_nobody_there(servers: Servers) -> None:
    deployment = Deployment(servers)
    code, checks = await doctor(deployment)
    assert code == 1
    assert {checks["NATS log"]["level"], checks["Postgres tables"]["level"]} == {"warning"}
    assert "the first store that opens makes it" in checks["Postgres log"]["found"]
    code, checks = await doctor(deployment, BUFSTORE_NATS="nats://u:geheim@127.0.0.1:1")
    assert (code, checks["NATS reachable"]["level"]) == (2, "bad")
    assert "geheim" not in str(checks)
    assert checks["Postgres reachable"]["level"] == "ok"
    code, checks = await doctor(deployment, BUFSTORE_POSTGRES="postgresql://u:geheim@127.0.0.1:1/x")
    assert (code, checks["Postgres reachable"]["level"]) == (2, "bad")
    assert "geheim" not in str(checks)


class WithAccounts(NatsServer):
    """A server with an application's account, a limited user in it, and a system account."""

    def _answers(self, seconds: float) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1):
                return True
        except OSError:
            return False


ACCOUNTS = """
authorization { timeout: 10 }
accounts {
    APP { jetstream: enabled, users: [
        { user: app, password: app }
        { user: narrow, password: narrow, permissions: {
            publish: ["$JS.API.INFO", "$JS.API.STREAM.INFO.*", "$JS.API.STREAM.MSG.GET.*"], subscribe: "_INBOX.>"
        } }
    ] }
    SYS { users: [ { user: sys, password: sys } ] }
}
system_account: SYS
"""


async def test_an_account_without_room_for_what_has_to_be_made(servers: Servers, tmp_path: Path) -> None:
    limits = {
        "one": "max_streams: 1",
        "small": "max_file: 200MB",
        "tiny": "max_file: 64MB",
        "wide": "max_file: 4GB, max_streams: 2",
    }
    accounts = (f"{n} {{ jetstream: {{ {x} }}, users: [ {{ user: {n}, password: x }} ] }}" for n, x in limits.items())
    server = WithAccounts(tmp_path / "nats", extra_config=f"accounts {{\n{chr(10).join(accounts)}\n}}")
    await asyncio.to_thread(server.start)
    try:
        deployments = {user: Deployment(servers, max_bytes=64 << 20) for user in limits}
        urls = {user: f"nats://{user}:x@127.0.0.1:{server.port}" for user in limits}

        async def room(user: str) -> tuple[int, Any, str]:
            code, checks = await doctor(deployments[user], BUFSTORE_NATS=urls[user])
            found = checks.get("NATS room", {"level": None, "found": ""})
            return code, found["level"], found["found"]

        assert await room("one") == (2, "bad", "0 of 1 streams are used, and 2 must be made")
        code, level, found = await room("small")
        assert (code, level) == (1, "warning"), "an app may have configured less"
        assert "reserves 2.1 GB by default" in found
        assert (await room("wide"))[1] is None
        for user in "one", "tiny":  # the log is created, and the bucket is refused
            with pytest.raises(BufstoreError):
                async with deployments[user].store(nats=urls[user]):
                    pass
        assert await room("one") == (2, "bad", "1 of 1 streams are used, and 1 must be made")
        assert await room("tiny") == (2, "bad", "67.1 MB of 67.1 MB of storage are reserved")
    finally:
        await asyncio.to_thread(server.stop)


@pytest.mark.parametrize("sync", ["always", *seldom("1m")])
async def test_the_system_account_and_the_monitoring_port_tell_how_nats_syncs(servers: Servers, sync: str) -> None:
    (port,) = free_ports(1)
    folder = Path(tempfile.mkdtemp(prefix="doctor-"))
    extra = f'{ACCOUNTS}\nhttp: "127.0.0.1:{port}"'
    server = WithAccounts(folder / "nats", sync_interval=sync, extra_config=extra)
    try:
        server.start()
        deployment = Deployment(servers)
        at = f"127.0.0.1:{server.port}"
        app = {"BUFSTORE_NATS": f"nats://app:app@{at}"}
        async with deployment.store(nats=app["BUFSTORE_NATS"]):
            for way in (("--nats-sys", f"nats://sys:sys@{at}"), ("--nats-monitor", f"http://127.0.0.1:{port}")):
                code, checks = await doctor(deployment, *way, **app)
                found = checks["NATS sync of the disk"]
                if sync == "always":
                    assert (code, found["level"], found["found"]) == (0, "ok", "always"), checks
                else:
                    assert (code, found["level"]) == (1, "warning"), checks
                    assert "lazy, every 60 s" in found["found"]
            code, checks = await doctor(deployment, "--nats-sys", f"nats://app:app@{at}", **app)
            assert (code, checks["NATS sync of the disk"]["level"]) == (1, "unknown")
            code, checks = await doctor(deployment, BUFSTORE_NATS=f"nats://narrow:narrow@{at}")
            assert (code, checks["NATS permissions"]["level"]) == (2, "bad"), checks
            assert "CONSUMER.CREATE" in checks["NATS permissions"]["found"]
            assert "MSG.GET" not in checks["NATS permissions"]["found"]
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


async def test_a_system_account_signs_in_with_a_credentials_file(servers: Servers, tmp_path: Path) -> None:
    """Regression: only a user and a password in the URL could sign in there, which no server with JWTs takes."""
    config, *contents = operator_mode()
    app, system = tmp_path / "app.creds", tmp_path / "system.creds"
    for file, held in zip((app, system), contents, strict=True):
        file.write_text(held)
    server, deployment = NatsByHand(tmp_path / "nats", config), Deployment(servers)
    async with server:
        ours = {"BUFSTORE_NATS": server.url, "BUFSTORE_NATS_CREDS": str(app)}
        async with deployment.store(nats=NatsConfig(servers=server.url, credentials=app)):
            told = ("--nats-sys", server.url, "--nats-sys-creds", str(system))
            code, checks = await doctor(deployment, *told, **ours)
            found = checks["NATS sync of the disk"]
            assert (code, found["level"]) == (1, "warning"), checks
            assert "lazy, every 120 s" in found["found"]
            code, checks = await doctor(deployment, "--nats-sys", server.url, **ours)
            found = checks["NATS sync of the disk"]
            assert (code, found["level"]) == (1, "unknown"), checks
            assert ("refused the credentials" in found["found"], "--nats-sys-creds" in found["advice"]) == (True, True)
    alone = await asyncio.to_thread(bufstore_cli, "doctor", *told[2:], **where(deployment))
    assert (alone.code, "--nats-sys-creds goes with --nats-sys" in alone.err) == (2, True), alone
    # In the environment it may be there for other commands of the same shell.
    exported = where(deployment) | {"BUFSTORE_NATS_SYS_CREDS": str(system)}
    unused = await asyncio.to_thread(bufstore_cli, "doctor", **exported)
    assert "goes with" not in unused.err, unused


async def test_postgres_that_is_not_durable_or_not_ours(own_servers: Servers) -> None:
    """Regression: another's table in the schema was among those that bufstore's role must be allowed to write."""
    deployment = Deployment(own_servers)
    async with deployment.store():
        pass
    dsn = own_servers.postgres.dsn
    await query(dsn, "CREATE ROLE reader LOGIN PASSWORD 'r'")
    await query(dsn, f"GRANT USAGE ON SCHEMA {deployment.name} TO reader")
    await query(dsn, f"GRANT SELECT ON ALL TABLES IN SCHEMA {deployment.name} TO reader")
    await query(dsn, "ALTER DATABASE postgres SET synchronous_commit = off")
    code, checks = await doctor(deployment)
    assert code == 1
    assert checks["Postgres synchronous_commit"]["level"] == "warning"
    assert {checks["Postgres fsync"]["found"], checks["Postgres full_page_writes"]["found"]} == {"on"}
    host = dsn.rpartition("@")[2]
    code, checks = await doctor(deployment, BUFSTORE_POSTGRES=f"postgresql://reader:r@{host}")
    assert (code, checks["Postgres permissions"]["level"]) == (2, "bad")
    assert "buffer_threads" in checks["Postgres permissions"]["found"]
    tables = f"SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {deployment.name}"
    functions = f"EXECUTE ON ALL FUNCTIONS IN SCHEMA {deployment.name}"
    await query(dsn, f"GRANT {tables} TO reader; REVOKE {functions} FROM PUBLIC")
    code, checks = await doctor(deployment, BUFSTORE_POSTGRES=f"postgresql://reader:r@{host}")
    assert (code, "no EXECUTE on" in checks["Postgres permissions"]["found"]) == (2, True), checks
    assert "run_taken" in checks["Postgres permissions"]["found"]
    await query(dsn, f"GRANT {functions} TO reader; CREATE TABLE {deployment.name}.spark_of_others ()")
    code, checks = await doctor(deployment, BUFSTORE_POSTGRES=f"postgresql://reader:r@{host}")
    assert checks["Postgres permissions"]["level"] == "ok", checks
    ledger = SparkLedger(dsn, deployment.name)
    await ledger.open()
    await ledger.setup()
    await ledger.aclose()
    code, checks = await doctor(deployment, BUFSTORE_POSTGRES=f"postgresql://reader:r@{host}")
    assert (code, "spark_sources" in checks["Postgres permissions"]["found"]) == (2, True), checks
    await query(dsn, f"GRANT {tables} TO reader")
    await query(dsn, "ALTER ROLE reader SET default_transaction_read_only = on")
    code, checks = await doctor(deployment, BUFSTORE_POSTGRES=f"postgresql://reader:r@{host}")
    assert checks["Postgres writable"]["level"] == "bad"
