"""No password, token or payload appears in logs of any level, errors and their causes, reprs, or the CLI's output."""

from __future__ import annotations

import logging
import os
import secrets
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
import pytest

import bufstore
from bufstore import BufferedThreadStore, BufstoreError, NatsConfig, PostgresThreadStore
from bufstore.config import mask_url
from bufstore.embedded import NatsServer, Servers
from bufstore.jetstream.messages import Outgoing
from bufstore.notify import PostgresNotifier
from bufstore.postgres.ledger.ledger import PostgresLedger
from conftest import Deployment
from helpers import eventually, query, run_of

SOURCE = Path(next(iter(bufstore.__path__))).parent


class Secrets:
    """Makes random secrets with characters that must be escaped, and searches for them in every spelling."""

    def __init__(self) -> None:
        self.known: list[str] = []

    def new(self, special: str = "") -> str:
        # Each part alone is long enough to be found, in case code cuts the secret at a special character.
        secret = secrets.token_hex(6) + "".join(c + secrets.token_hex(6) for c in special)
        self.known += [part for part in _parts(secret, special) if len(part) >= 12]
        return secret

    def leaked(self, text: str) -> list[str]:
        """Return the lines that show a secret."""
        lines = [line[:300] for line in text.splitlines() if any(s in line for s in self._spellings())]
        return lines[:5]

    def _spellings(self) -> set[str]:
        return {*self.known, *(quote(secret, safe="") for secret in self.known)}


def _parts(secret: str, special: str) -> list[str]:
    for character in special:
        secret = secret.replace(character, "\n")
    return secret.split("\n")


class Everything(logging.Handler):
    """Collects all log records, of every level and logger, with tracebacks and extra fields."""

    def __init__(self) -> None:
        super().__init__(logging.NOTSET)
        self.lines: list[str] = []
        self.setFormatter(logging.Formatter("%(name)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{self.format(record)} {record.__dict__!r}")


@pytest.fixture
def heard() -> Iterator[Everything]:
    handler = Everything()
    names = ["", *logging.root.manager.loggerDict]
    levels = {name: logging.getLogger(name).level for name in names}
    root = logging.getLogger()
    root.addHandler(handler)
    for name in names:
        logging.getLogger(name).setLevel(logging.DEBUG)
    yield handler
    root.removeHandler(handler)
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def told(error: BaseException) -> str:
    """Return all that an error shows: itself, its causes and contexts, their attributes, and tracebacks."""
    texts = ["".join(traceback.format_exception(error))]
    seen: set[int] = set()
    queue: list[BaseException | None] = [error]
    while queue:
        e = queue.pop()
        if e is None or id(e) in seen:
            continue
        seen.add(id(e))
        texts += [str(e), repr(e), repr(e.args), repr(vars(e))]
        queue += [e.__cause__, e.__context__]
        if isinstance(e, BaseExceptionGroup):
            queue += e.exceptions
    return "\n".join(texts)


USERS = """
authorization {{ timeout: 10, users: [
    {{ user: bufstore, password: "{own}" }}
    {{ user: app, password: "{password}" }}
] }}
"""


@pytest.mark.long
async def test_nothing_secret_is_said_while_all_is_well_and_when_servers_fail(heard: Everything) -> None:
    hidden = Secrets()
    password, payload = hidden.new("@/#:%?"), hidden.new()
    role_password = hidden.new("@/#:%?")
    with Servers() as servers:
        own = servers.nats.url.partition("bufstore:")[2].partition("@")[0]
        servers.nats.extra_config = USERS.format(own=own, password=password)
        servers.nats.restart()
        hidden.known += [own, servers.postgres.dsn.partition("bufstore:")[2].partition("@")[0]]
        nats = f"nats://app:{quote(password, safe='')}@127.0.0.1:{servers.nats.port}"
        await query(
            servers.postgres.dsn, f"CREATE ROLE app SUPERUSER LOGIN PASSWORD '{role_password.replace('%', '%%')}'"
        )
        host = servers.postgres.dsn.rpartition("@")[2]
        dsn = f"postgresql://app:{quote(role_password, safe='')}@{host}"
        deployment = Deployment(servers)
        short = {"append_timeout_s": 4.0, "read_timeout_s": 4.0}
        inner = PostgresThreadStore(dsn, schema=deployment.name, timeout_s=2)
        said: list[str] = []
        async with deployment.store(inner, nats=nats, **short) as store:
            said += [
                repr(v)
                for v in (store, inner, inner.pool, store.buffer.session.connection, store.buffer.ledger, servers)
            ]
            await store.checkpoint("t", [payload], run_of("t", input=payload, error=payload))
            await store.save_thread_state("t", payload)
            await store.force_flush_all()
            await store.buffer.log.publish(Outgoing(store.buffer.subjects.of("u"), payload.encode()), 5)
            await store.force_flush_all()
            said += [repr(await store.health()), repr(await store.statistics()), repr(await store.verify())]
            for server in (servers.postgres, servers.nats):
                server.kill()
                for call in (
                    lambda: store.checkpoint("t", [payload, payload], run_of("t")),
                    lambda: store.load_messages("t"),
                    lambda: inner.load_messages("t"),
                    lambda: store.force_flush_all(timeout_s=0.5),
                    lambda: store.query_threads(),
                ):
                    try:
                        said.append(type(await call()).__name__)
                    except BufstoreError as e:
                        said.append(told(e))
                said.append(repr(await store.health()))
                server.start()

                async def well() -> bool:
                    return (await store.health()).ok

                await eventually(well)
        everything = "\n".join([*said, *heard.lines])
        assert "nats" in everything
        assert "Postgres" in everything
        assert hidden.leaked(everything) == []


BAD_NATS = [
    "nats://u:{s}@127.0.0.1:1",
    "nats://{s}@127.0.0.1:1",
    "u:{s}@127.0.0.1:1",
    "nats://u:{s}",
    "nats://u:{s}@",
    "nats:/u:{s}@127.0.0.1:1",
    "nats://u:{s}@host.invalid:4222",
    "nats://u:{s}@127.0.0.1:port",
    "nats://u:{s}@@@127.0.0.1:1",
    "nats://u:{s}@127.0.0.1:99999",
    "nats://u:{s}@[::1",
    "tls://u:{s}@127.0.0.1:1",
    "ws://u:{s}@127.0.0.1:1",
    "http://u:{s}@127.0.0.1:1",
]
BAD_POSTGRES = [
    "postgresql://u:{s}@127.0.0.1:1/x",
    "postgresql://u:{s}@host.invalid/x",
    "postgresql://u:{s}",
    "postgres://u:{s}@h:port/x",
    "postgresql://u:{s}@@127.0.0.1:1/x",
    "postgresql://u:{s}@[::1/x",
    "postgresql://u:{s}@127.0.0.1:1/x?sslmode=nonsense",
    "postgresql://u:{s}@127.0.0.1:1/x?unknown={s}",
    "mysql://u:{s}@h/x",
    "password={s} nonsense",
    "host=127.0.0.1 port=1 password='{s}",
    "host=127.0.0.1 port=1 passwort={s}",
    "host=127.0.0.1 port=1 user=u password='{s}' dbname=x",
]


@pytest.mark.parametrize("special", ["", "@", "/", "#", "%zz", ": ?,\\\n"], ids=repr)
async def test_no_error_shows_a_piece_of_a_password(heard: Everything, special: str) -> None:
    """No error shows a password either that the user forgot to escape."""
    hidden = Secrets()
    said = []
    for form in BAD_NATS:
        if special == "@" and form == "nats://u:{s}":
            continue  # here the part behind the "@" is the host
        config: Any = None
        try:
            config = NatsConfig(servers=form.format(s=hidden.new(special)), connect_timeout_s=0.5)
            await BufferedThreadStore.open(bufstore.MemoryThreadStore(), nats=config, postgres="dbname=x")
        except BufstoreError as e:
            said.append(told(e))
        else:
            pytest.fail("nothing is there")
        said.append(repr(config))
    for form in BAD_POSTGRES:
        if special == "@" and form == "postgresql://u:{s}":
            continue
        try:
            store = PostgresThreadStore(form.format(s=hidden.new(special)), timeout_s=0.1)
            said.append(repr(store) + repr(store.pool))
            async with store:
                await store.load_thread("t")
        except BufstoreError as e:
            said.append(told(e))
        else:
            pytest.fail("nothing is there")
        try:
            PostgresLedger(form.format(s=hidden.new(special)), bufstore.MemoryThreadStore())
        except BufstoreError as e:
            said.append(told(e))
        try:
            listen = form.format(s=hidden.new(special))
            async with await PostgresNotifier.open("host=127.0.0.1 port=1", listen=listen, timeout_s=0.1) as notifier:
                await notifier.listen_scheduled(["k"], said.append)
        except BufstoreError as e:
            said.append(told(e))
        else:
            pytest.fail("nobody listens there")
    assert hidden.leaked("\n".join([*said, *heard.lines])) == []


async def test_refused_logins_show_nothing(servers: Servers, heard: Everything) -> None:
    hidden = Secrets()
    host = f"127.0.0.1:{servers.nats.port}"
    seed = "SUACSSL3UAHUDXKFSNVUZRF5UHPMWZ6BFDTJ7M6USDXIEDNPPQYYYCU3VY"  # nats.io's example, which belongs to nobody
    creds = (
        "-----BEGIN NATS USER JWT-----\nx.y.z\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
    )
    hidden.known.append(seed)
    said = []
    for config in (
        NatsConfig(servers=host, user="u", password=hidden.new("@")),
        NatsConfig(servers=host, token=hidden.new("@")),
        NatsConfig(servers=host, credentials=creds),
        NatsConfig(servers=f"u:{hidden.new()}@{host}"),
        NatsConfig(servers=[f"{hidden.new()}@127.0.0.1:1", f"{hidden.new()}@{host}"]),
    ):
        said.append(repr(config))
        try:
            async with Deployment(servers).store(nats=config):
                pytest.fail("nobody knows him")
        except BufstoreError as e:
            said.append(told(e))
    for field in ({"password": hidden.new("@ '")}, {"user": "nobody", "password": hidden.new()}):
        dsn = psycopg.conninfo.make_conninfo(servers.postgres.dsn, **field)
        async with PostgresThreadStore(dsn, timeout_s=2) as store:
            try:
                await store.load_thread("t")
            except BufstoreError as e:
                said.append(told(e))
            else:
                pytest.fail("nobody knows him")
        async with await PostgresNotifier.open(servers.postgres.dsn, listen=dsn) as notifier:
            try:
                await notifier.listen_scheduled(["k"], said.append)
            except BufstoreError as e:
                said.append(told(e))
            else:
                pytest.fail("nobody knows him")
    assert hidden.leaked("\n".join([*said, *heard.lines])) == []


@pytest.mark.parametrize("verbose", [pytest.param((), marks=pytest.mark.long), ("-vv",)], ids=["quiet", "verbose"])
def test_the_command_line_shows_nothing(servers: Servers, verbose: Sequence[str]) -> None:
    hidden = Secrets()
    hidden.known += [u.partition("bufstore:")[2].partition("@")[0] for u in (servers.nats.url, servers.postgres.dsn)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("BUFSTORE_")}
    environment |= {"PYTHONPATH": os.pathsep.join([str(SOURCE), *sys.path[1:]]), "COLUMNS": "200"}
    nats, postgres = servers.nats.url, servers.postgres.dsn
    wrong = psycopg.conninfo.make_conninfo(postgres, password=hidden.new("@"))
    tries = [
        ("status", nats, postgres, {}),
        ("doctor", nats, wrong, {}),
        ("status", f"nats://u:{hidden.new('#')}@127.0.0.1:{servers.nats.port}", postgres, {}),
        ("verify", f"127.0.0.1:{servers.nats.port}", postgres, {"BUFSTORE_NATS_TOKEN": hidden.new("@")}),
        ("flush", f"nats://u:{hidden.new(',')}@127.0.0.1:1", postgres, {}),
        ("doctor", nats, f"postgresql://u:{hidden.new('/')}@127.0.0.1:1/x", {}),
    ]
    for command, to_nats, to_postgres, more in tries:
        arguments = [command, *(["--all"] if command == "flush" else []), "--stream", "NONE-OF-OURS", *verbose]
        result = subprocess.run(
            [sys.executable, "-W", "error", "-m", "bufstore.cli", *arguments],
            capture_output=True,
            env=environment | {"BUFSTORE_NATS": to_nats, "BUFSTORE_POSTGRES": to_postgres} | more,
            timeout=60,
        )
        text = (result.stdout + result.stderr).decode()
        assert hidden.leaked(text) == [], text
        assert verbose or "Traceback" not in text, text
        assert text


def test_embedded_servers_show_no_password() -> None:
    with tempfile.TemporaryDirectory() as folder:
        server = NatsServer(Path(folder) / "nats")
        server.start()
        try:
            secret = server.url.partition("bufstore:")[2].partition("@")[0]
            assert secret not in repr(server)
            assert secret not in mask_url(server.url)
        finally:
            server.stop()
