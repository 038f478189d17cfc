"""Authentication, names and settings: what is configured, what exists, and the errors when they differ."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import ssl
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import nats
import nkeys
import pytest
import trustme

from bufstore import (
    BufferedThreadStore,
    ConfigDrift,
    ConfigError,
    Consistency,
    LogConfig,
    LogUnavailable,
    NatsConfig,
    PostgresThreadStore,
    repair,
)
from bufstore.buffer.places import last_place
from bufstore.buffer.target import Target
from bufstore.embedded import NatsServer, Servers
from bufstore.embedded._wheels import nats_binary
from bufstore.errors import LogRolledBack, StoreMisconfigured, StoreUnavailable
from bufstore.jetstream.connection import Connection
from bufstore.jetstream.server_choice import ServerChoice
from bufstore.nats.setup import EPOCHS_MAX, stream_config
from command_line import bufstore_cli, where
from conftest import Deployment
from helpers import eventually, fresh, run_of, said


async def works(deployment: Deployment, nats: Any) -> None:
    """Write a checkpoint and flush it."""
    async with deployment.store(nats=nats) as store:
        thread_id = fresh()
        await store.checkpoint(thread_id, [said(0)], run_of(thread_id))
        await store.force_flush(thread_id)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("max_age", {"max_age": 3600 * 10**9}),
        ("discard", {"discard": "old"}),
        ("max_bytes", {"max_bytes": 64 << 20}),
        ("max_msgs", {"max_msgs": 10}),
        ("allow_direct", {"allow_direct": False}),
    ],
)
async def test_a_stream_that_differs_is_named_with_both_values(
    deployment: Deployment, field: str, change: dict[str, Any]
) -> None:
    async with deployment.store(flusher=False) as store:
        info = await store.buffer.session.stream.api(f"STREAM.INFO.{deployment.log.stream}")
        await store.buffer.session.stream.api(f"STREAM.UPDATE.{deployment.log.stream}", info["config"] | change)
    with pytest.raises(ConfigDrift) as caught:
        async with deployment.store():
            pass
    assert caught.value.field == field
    assert caught.value.found == change[field]
    assert str(caught.value.expected) in str(caught.value)
    assert "nats stream edit" in caught.value.way_out


@pytest.mark.parametrize(
    ("change", "way_out"),
    [
        ({"no_ack": True}, "nats stream edit"),
        ({"subject_transform": {"src": ">", "dest": "archive.>"}}, "nats stream edit"),
        ({"sealed": True}, "nats stream rm"),
    ],
    ids=["no_ack", "subject_transform", "sealed"],
)
async def test_a_stream_that_takes_no_writes_is_refused(
    deployment: Deployment, change: dict[str, Any], way_out: str
) -> None:
    deployment.verified = False
    ((field, value),) = change.items()
    async with deployment.store(flusher=False) as store:
        api = store.buffer.session.stream.api
        made = (await api(f"STREAM.INFO.{deployment.log.stream}"))["config"]
        await api(f"STREAM.UPDATE.{deployment.log.stream}", made | change)
        with pytest.raises(ConfigDrift) as caught:
            async with deployment.store():
                pass
        assert (caught.value.field, caught.value.found) == (field, value)
        assert way_out in caught.value.way_out
        assert "LogConfig" not in caught.value.way_out
        if field != "sealed":
            await api(f"STREAM.UPDATE.{deployment.log.stream}", made)
            await works(deployment, deployment.servers.nats.url)


async def test_commands_say_which_bound_a_log_must_have_that_has_none(deployment: Deployment) -> None:
    async with deployment.store(flusher=False) as store:
        api = store.buffer.session.stream.api
        made = (await api(f"STREAM.INFO.{deployment.log.stream}"))["config"]
        for bound in (-1, 1000):
            await api(f"STREAM.UPDATE.{deployment.log.stream}", made | {"max_bytes": bound})
            for command in (("status",), ("flush", "--all")):
                told = await asyncio.to_thread(bufstore_cli, *command, **where(deployment))
                way_out = f"nats stream edit {deployment.log.stream} --max-bytes"
                assert (told.code, f"max_bytes is {bound}" in told.err, way_out in told.err) == (2, True, True), told
        await api(f"STREAM.UPDATE.{deployment.log.stream}", made)


async def test_a_bucket_that_differs_is_named(deployment: Deployment) -> None:
    async with deployment.store(flusher=False) as store:
        name = f"KV_{deployment.log.bucket}"
        info = await store.buffer.session.stream.api(f"STREAM.INFO.{name}")
        await store.buffer.session.stream.api(f"STREAM.UPDATE.{name}", info["config"] | {"max_age": 10**12})
    with pytest.raises(ConfigDrift, match=r"bucket .* max_age"):
        async with deployment.store():
            pass


async def test_an_account_that_requires_max_bytes_has_a_bucket_made_by_hand(servers: Servers, tmp_path: Path) -> None:
    """The bucket is made as OPERATIONS says."""
    account = "A { jetstream: { max_file: 1GB, max_bytes_required: true }, users: [ { user: a, password: a } ] }"
    server = NatsServer(tmp_path / "nats", extra_config=f"accounts {{ {account} }}")
    server.start()
    deployment = Deployment(servers, max_bytes=64 << 20)
    text = (Path(__file__).parent.parent.parent / "docs" / "OPERATIONS.md").read_text()
    (told,) = re.findall(r"`(\{\"name\": \"KV_thread-hot.*?\})`", text, re.DOTALL)
    made = told.replace("thread-hot", deployment.log.bucket)
    try:
        url = f"nats://a:a@127.0.0.1:{server.port}"
        with pytest.raises(ConfigError, match="max bytes"):
            await works(deployment, url)
        client = await nats.connect(url)
        answer = await client.request(f"$JS.API.STREAM.CREATE.KV_{deployment.log.bucket}", made.encode(), timeout=10)
        assert "error" not in json.loads(answer.data)
        await client.close()
        await works(deployment, url)
    finally:
        server.stop()


async def test_the_bucket_of_another_log_is_refused(deploy: Any) -> None:
    """Two logs with the same bucket would share flushers and runs, without an error."""
    deployment, other = deploy(), deploy()
    async with deployment.store(flusher=False):
        pass
    own, other.log = other.log.bucket, replace(other.log, bucket=deployment.log.bucket)
    with pytest.raises(ConfigDrift, match=rf"bucket {deployment.log.bucket}: log is '{deployment.log.stream}'"):
        async with other.store():
            pass
    other.log = replace(other.log, bucket=own)  # the error's advice; the refused open has made nothing against it
    async with other.store(flusher=False):
        pass
    async with deployment.store(flusher=False) as store:  # make the bucket look as an earlier release made it
        name = f"KV_{deployment.log.bucket}"
        info = await store.buffer.session.stream.api(f"STREAM.INFO.{name}")
        await store.buffer.session.stream.api(f"STREAM.UPDATE.{name}", info["config"] | {"metadata": {}})
    async with deployment.store(flusher=False):
        pass


async def test_another_number_of_partitions_is_refused(servers: Servers, deploy: Any) -> None:
    deployment = deploy(partitions=4)
    async with deployment.store(flusher=False):
        pass
    deployment.log = LogConfig(**{f: getattr(deployment.log, f) for f in ("stream", "bucket", "subject", "max_bytes")})
    with pytest.raises(ConfigDrift, match="partitions is '4' but '8'"):
        async with deployment.store():
            pass


async def test_a_stream_of_somebody_else_is_refused(deployment: Deployment) -> None:
    async with deployment.store(flusher=False) as store:
        await store.buffer.session.stream.api(f"STREAM.DELETE.{deployment.log.stream}")
        config = {"name": deployment.log.stream, "subjects": [f"{deployment.name}.>"]}
        await store.buffer.session.stream.api(f"STREAM.CREATE.{deployment.log.stream}", config)
    with pytest.raises(ConfigDrift, match="did not create this stream"):
        async with deployment.store():
            pass


async def test_a_log_of_an_earlier_release_is_refused_and_told_how_to_go_on(deployment: Deployment) -> None:
    thread_id = fresh()
    async with deployment.store(flusher=False) as store:
        await store.checkpoint(thread_id, [said(0)], run_of(thread_id))
        info = await store.buffer.session.stream.api(f"STREAM.INFO.{deployment.log.stream}")
        older = {n: v for n, v in info["config"]["metadata"].items() if n != "bufstore.form"}
        await store.buffer.session.stream.api(
            f"STREAM.UPDATE.{deployment.log.stream}", info["config"] | {"metadata": older}
        )
    with pytest.raises(ConfigDrift, match=r"flush --all`; remove the stream .* begin a new log with `bufstore repair"):
        async with deployment.store():
            pass
    # A repair refuses such a log too, and loses none of it.
    for command in (["repair"], ["repair", "--apply"]):
        result = await asyncio.to_thread(bufstore_cli, *command, **where(deployment))
        assert result.code != 0
        assert "An earlier release wrote this log" in result.err
        assert "somebody has removed bufstore.form" in result.err
    client = await nats.connect(deployment.servers.nats.url)
    found = await client.jetstream().stream_info(deployment.log.stream)
    assert found.state.messages > 0
    await client.close()


async def test_a_log_that_the_server_has_no_room_for_is_a_config_error(deploy: Any) -> None:
    with pytest.raises(ConfigError, match="max_bytes"):
        async with deploy(max_bytes=1 << 50).store():
            pass


async def test_more_replicas_than_servers_is_an_error(deploy: Any) -> None:
    with pytest.raises((ConfigError, LogUnavailable)):
        async with deploy(replicas=3).store():
            pass


@pytest.mark.alone
async def test_a_wrong_nats_url_is_a_clear_error_in_time(deployment: Deployment) -> None:
    began = time.monotonic()
    with pytest.raises(LogUnavailable, match="cannot reach NATS"):
        async with deployment.store(nats="nats://someone:geheim@127.0.0.1:1"):
            pass
    assert time.monotonic() - began < 10


def address(server: NatsServer) -> str:
    """Return the server's URL without a user."""
    return f"nats://127.0.0.1:{server.port}"


async def test_user_and_password(deployment: Deployment) -> None:
    user, _, password = deployment.servers.nats.url.removeprefix("nats://").partition("@")[0].partition(":")
    url = address(deployment.servers.nats)
    await works(deployment, NatsConfig(servers=url, user=user, password=password))
    with pytest.raises(ConfigError, match="refused the credentials") as caught:
        async with deployment.store(nats=NatsConfig(servers=url, user=user, password="geheim")):
            pass
    assert "geheim" not in str(caught.value)
    assert "geheim" not in repr(NatsConfig(servers="nats://u:geheim@h:1", user=user, password="geheim"))
    with pytest.raises(ConfigError, match="refused the credentials"):
        async with deployment.store(nats=url):
            pass


@pytest.mark.parametrize("first", [0, 1])
async def test_a_wrong_password_is_said_also_beside_a_server_that_is_down(servers: Servers, first: int) -> None:
    urls = [address(servers.nats), "nats://127.0.0.1:1"]
    connection = Connection(NatsConfig(servers=urls, user="u", password="geheim"), "test")
    connection._choice = ServerChoice(connection._choice.given, 1 - first)
    with pytest.raises(ConfigError, match="refused the credentials"):
        await connection.open()


class NatsByHand:
    """A nats-server with a configuration that does not admit the embedded server's user, so the test runs it itself."""

    def __init__(self, folder: Path, config: str) -> None:
        folder.mkdir()
        self._ports = folder / "ports"
        self._ports.mkdir()
        self._config = folder / "nats.conf"
        self._config.write_text(
            f'listen: "127.0.0.1:-1"\nports_file_dir: "{self._ports}"\n'
            f'jetstream {{ store_dir: "{folder}/js" }}\n{config}'
        )
        self.url = ""

    async def __aenter__(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            str(nats_binary()), "-c", str(self._config), stderr=asyncio.subprocess.DEVNULL
        )
        async with asyncio.timeout(20):
            while not (files := list(self._ports.glob("*.ports"))) or not files[0].read_text():  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        found = json.loads(files[0].read_text())["nats"][0]
        self.url = "nats://127.0.0.1:" + found.rpartition(":")[2]

    async def __aexit__(self, *_: object) -> None:
        self._process.kill()
        await self._process.wait()


async def test_a_token(servers: Servers, tmp_path: Path) -> None:
    server = NatsByHand(tmp_path / "nats", "authorization { timeout: 10, token: geheim }")
    async with server:
        await works(Deployment(servers), NatsConfig(servers=server.url, token="geheim"))
        with pytest.raises(ConfigError, match="refused the credentials") as caught:
            async with Deployment(servers).store(nats=NatsConfig(servers=server.url, token="falsch")):
                pass
    assert "falsch" not in str(caught.value)
    assert "geheim" not in repr(NatsConfig(servers=server.url, token="geheim"))


async def test_a_jetstream_domain_and_an_api_prefix(servers: Servers, tmp_path: Path) -> None:
    server = NatsServer(tmp_path, extra_config=f'jetstream {{ store_dir: "{tmp_path}/js", domain: hub }}')
    server.start()
    try:
        await works(Deployment(servers), NatsConfig(servers=server.url, domain="hub"))
        await works(Deployment(servers), NatsConfig(servers=server.url, api_prefix="$JS.hub.API"))
        with pytest.raises((LogUnavailable, ConfigError)):
            async with Deployment(servers).store(nats=NatsConfig(servers=server.url, domain="elsewhere")):
                pass
    finally:
        server.stop()


async def test_tls(servers: Servers, tmp_path: Path) -> None:
    ca = trustme.CA()
    certificate = ca.issue_cert("127.0.0.1")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    key.write_bytes(certificate.private_key_pem.bytes())
    cert.write_bytes(b"".join(c.bytes() for c in certificate.cert_chain_pems))
    trusting = ssl.create_default_context()
    ca.configure_trust(trusting)
    server = NatsByHand(tmp_path / "nats", f'tls {{ cert_file: "{cert}", key_file: "{key}", timeout: 10 }}')
    async with server:
        await works(Deployment(servers), NatsConfig(servers=server.url, tls=trusting))
        with pytest.raises(LogUnavailable, match=r"(?i)certificate"):
            async with Deployment(servers).store(nats=NatsConfig(servers=server.url, tls=ssl.create_default_context())):
                pass
        with pytest.raises(LogUnavailable, match=r"(?i)mismatch|not match|hostname|not valid for"):
            async with Deployment(servers).store(
                nats=NatsConfig(servers=server.url, tls=trusting, tls_hostname="elsewhere.example")
            ):
                pass
    with pytest.raises(LogUnavailable, match="does not ask for TLS"):
        async with Deployment(servers).store(nats=NatsConfig(servers=servers.nats.url, tls=trusting)):
            pass


@pytest.mark.parametrize("configured", [True, False], ids=["in NatsConfig", "asked for by the server"])
async def test_the_end_of_a_connection_over_tls_is_no_warning_of_asyncio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, configured: bool
) -> None:
    ca, authority = trustme.CA(), tmp_path / "ca.pem"
    certificate = ca.issue_cert("127.0.0.1")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    key.write_bytes(certificate.private_key_pem.bytes())
    cert.write_bytes(b"".join(c.bytes() for c in certificate.cert_chain_pems))
    ca.cert_pem.write_to_path(str(authority))
    monkeypatch.setenv("SSL_CERT_FILE", str(authority))
    tls = ssl.create_default_context() if configured else None
    server = NatsByHand(tmp_path / "nats", f'tls {{ cert_file: "{cert}", key_file: "{key}", timeout: 10 }}')
    async with server:
        connection = Connection(NatsConfig(servers=server.url, tls=tls), "test")
        await connection.open()
        client = connection.client()

    async def lost() -> bool:
        return not client.is_connected

    await eventually(lost)
    await connection.aclose()
    assert [r.getMessage() for r in caplog.records if r.name == "asyncio"] == []


async def test_a_client_certificate_that_nats_does_not_trust_is_named(tmp_path: Path) -> None:
    """Regression: often only a lost connection was told: with TLS 1.3 the alert comes while nats-py writes."""
    ca, unknown = trustme.CA(), trustme.CA()
    certificate = ca.issue_cert("127.0.0.1")
    cert, key, authority = tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "ca.pem"
    key.write_bytes(certificate.private_key_pem.bytes())
    cert.write_bytes(b"".join(c.bytes() for c in certificate.cert_chain_pems))
    ca.cert_pem.write_to_path(str(authority))
    tls = ssl.create_default_context()
    ca.configure_trust(tls)
    unknown.issue_cert("client.example").configure_cert(tls)
    verifies = f'tls {{ cert_file: "{cert}", key_file: "{key}", ca_file: "{authority}", verify: true, timeout: 10 }}'
    server = NatsByHand(tmp_path / "nats", verifies)
    async with server:
        for _ in range(5):
            with pytest.raises(LogUnavailable, match=r"(?i)alert|certificate"):
                await Connection(NatsConfig(servers=server.url, tls=tls), "test").open()


def _jwt(claims: dict[str, Any], signer: Any) -> str:
    def part(value: dict[str, Any]) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()

    body = part({"typ": "JWT", "alg": "ed25519-nkey"}) + "." + part(claims)
    return body + "." + base64.urlsafe_b64encode(signer.sign(body.encode())).rstrip(b"=").decode()


def _key(prefix: int) -> tuple[Any, str, str]:
    """Return a new key pair of a kind, its public key and its seed."""
    seed = nkeys.encode_seed(os.urandom(32), prefix)
    pair = nkeys.from_seed(seed)
    return pair, pair.public_key.decode(), bytes(seed).decode()


def _claims(kind: str, subject: str, issuer: str, **nats: Any) -> dict[str, Any]:
    return {"jti": fresh(), "iat": int(time.time()), "iss": issuer, "name": kind, "sub": subject,
            "nats": {"type": kind, "version": 2, **nats}}  # fmt: skip


def operator_mode(**claims: int) -> tuple[str, str, str]:
    """Return a server's configuration with accounts by JWT, and the credentials of an app's and of a system user.

    `claims`: more of the app's user, like `exp`.
    """
    operator, operator_id, _ = _key(nkeys.PREFIX_BYTE_OPERATOR)
    account, account_id, _ = _key(nkeys.PREFIX_BYTE_ACCOUNT)
    system, system_id, _ = _key(nkeys.PREFIX_BYTE_ACCOUNT)
    counted = ("subs", "data", "payload", "imports", "exports", "conn", "leaf")
    limits = dict.fromkeys((*counted, "mem_storage", "disk_storage", "streams", "consumer"), -1)
    limits["wildcards"] = True  # type: ignore[assignment]
    operator_jwt = _jwt(_claims("operator", operator_id, operator_id), operator)
    account_jwt = _jwt(_claims("account", account_id, operator_id, limits=limits), operator)
    system_limits = dict.fromkeys(counted, -1) | {"wildcards": True}
    system_jwt = _jwt(_claims("account", system_id, operator_id, limits=system_limits), operator)
    config = (
        f"operator: {operator_jwt}\nsystem_account: {system_id}\nresolver: MEMORY\n"
        f"resolver_preload: {{ {account_id}: {account_jwt}, {system_id}: {system_jwt} }}\n"
    )
    return config, _credentials(account, account_id, **claims), _credentials(system, system_id)


def _credentials(account: Any, account_id: str, **claims: int) -> str:
    """Return what is in the credentials file of a new user of the account."""
    _, user_id, user_seed = _key(nkeys.PREFIX_BYTE_USER)
    user_jwt = _jwt(_claims("user", user_id, account_id, subs=-1, data=-1, payload=-1) | claims, account)
    return (
        f"-----BEGIN NATS USER JWT-----\n{user_jwt}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user_seed}\n------END USER NKEY SEED------\n"
    )


async def test_a_credentials_file_or_its_contents(servers: Servers, tmp_path: Path) -> None:
    config, contents, _ = operator_mode()
    file = tmp_path / "user.creds"
    file.write_text(contents)
    assert contents.splitlines()[5] not in repr(NatsConfig(credentials=contents))
    server = NatsByHand(tmp_path / "nats", config)
    async with server:
        for credentials in (file, str(file), contents):
            await works(Deployment(servers), NatsConfig(servers=server.url, credentials=credentials))
        with pytest.raises(ConfigError, match="refused the credentials"):
            async with Deployment(servers).store(nats=server.url):
                pass


async def test_credentials_that_have_expired_are_told_to_be(servers: Servers, tmp_path: Path) -> None:
    """NATS says "Authorization Violation" to whoever connects with them, as if they were wrong."""
    config, contents, _ = operator_mode(exp=int(time.time()) + 3)
    server = NatsByHand(tmp_path / "nats", config)
    async with server:
        nats = NatsConfig(servers=server.url, credentials=contents)
        connection = Connection(nats, "test")
        await connection.open()

        async def says_so() -> bool:
            try:
                connection.client()
            except LogUnavailable as e:
                return "refused the credentials" in str(e) and "expired at 20" in str(e)
            return False

        await eventually(says_so)
        await connection.aclose()
        with pytest.raises(ConfigError, match=r"expired at 20\S+Z: renew it"):
            await Connection(nats, "test").open()
    _, contents, _ = operator_mode(exp=int(time.time()) + 3600)
    server = NatsByHand(tmp_path / "other", operator_mode()[0])
    async with server:
        with pytest.raises(ConfigError, match="refused the credentials") as caught:
            await Connection(NatsConfig(servers=server.url, credentials=contents), "test").open()
    assert "expired" not in str(caught.value)


async def test_credentials_that_cannot_be_used_are_no_outage(
    deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nonsense = tmp_path / "nonsense.creds"
    nonsense.write_text("nonsense")
    url = "nats://127.0.0.1:1"
    for credentials, says in (
        (nonsense, "BEGIN NATS USER JWT"),
        ("-----BEGIN nonsense", "BEGIN NATS USER JWT"),
        (tmp_path / "missing.creds", "cannot read the file"),
    ):
        with pytest.raises(ConfigError, match=says):
            async with deployment.store(nats=NatsConfig(servers=url, credentials=credentials)):
                pass
    monkeypatch.setitem(sys.modules, "nkeys", None)
    with pytest.raises(ConfigError, match=r"pip install 'bufstore\[nkeys\]'"):
        async with deployment.store(nats=NatsConfig(servers=url, credentials=nonsense)):
            pass


async def test_postgres_that_refuses_is_said_and_nothing_is_lost(servers: Servers, deployment: Deployment) -> None:
    from bufstore import PostgresThreadStore

    thread_id = fresh()
    async with deployment.store(flusher=False) as store:
        await store.checkpoint(thread_id, [said(0)], run_of(thread_id))
    user, _, rest = servers.postgres.dsn.partition("@")
    wrong = user.rpartition(":")[0] + ":geheim@" + rest
    with pytest.raises((StoreMisconfigured, StoreUnavailable)) as caught:
        async with deployment.store(PostgresThreadStore(wrong, schema=deployment.name)):
            pass
    assert "geheim" not in str(caught.value)
    assert "geheim" not in repr(PostgresThreadStore(wrong))
    async with deployment.store() as store:
        await store.force_flush(thread_id)


async def test_a_store_of_an_app_without_its_database_is_a_config_error(deployment: Deployment) -> None:
    class Mine(Readable):
        async def apply(self, connection: Any, batch: Any) -> None: ...

    with pytest.raises(ConfigError, match="give `postgres`: the database of your store"):
        await BufferedThreadStore.open(Mine(), nats=deployment.servers.nats.url)  # type: ignore[arg-type]


@pytest.mark.parametrize("flushed", [False, True])
async def test_a_second_stream_into_one_database_is_refused(deployment: Deployment, flushed: bool) -> None:
    """Regression: before the first flush both were accepted, and each took the other's flushes for its own."""
    other = Deployment(deployment.servers)
    async with deployment.store() as store:
        if flushed:
            await store.checkpoint("t", [1], run_of("t"))
            await store.force_flush("t")
        with pytest.raises(ConfigDrift, match=f"the database: stream is {deployment.log.stream!r}"):
            async with other.store(deployment.inner()):
                pass
        # So is a repair: with a mistyped name it would begin the log anew beside the one that is in use.
        with pytest.raises(ConfigDrift, match=f"the database: stream is {deployment.log.stream!r}"):
            await repair(deployment.inner(), nats=deployment.servers.nats.url, config=other.config(), apply=True)


async def test_a_second_nats_into_one_fresh_database_is_refused(deployment: Deployment, tmp_path: Path) -> None:
    """Regression: before the first flush both were accepted; so was a NATS that had lost what was acknowledged."""
    server = NatsServer(tmp_path)
    await asyncio.to_thread(server.start)
    try:
        async with deployment.store() as store:
            with pytest.raises(LogRolledBack, match="this NATS is not the one"):
                await BufferedThreadStore.open(deployment.inner(), nats=server.url, config=deployment.config())
            await store.checkpoint("t", [1], run_of("t"))
            await store.force_flush("t")
    finally:
        await asyncio.to_thread(server.stop)


@pytest.mark.parametrize("generation", [0, 1])
async def test_a_log_that_is_gone_before_its_first_flush_is_begun_anew_by_a_repair(
    deployment: Deployment, generation: int
) -> None:
    """Regression: it began anew without a word; and a repair with a mistyped name did so beside the one in use."""
    where, other = {"nats": deployment.servers.nats.url}, Deployment(deployment.servers)

    async def lost() -> None:
        async with deployment.store(flusher=False) as store:
            await store.checkpoint("t", [1], run_of("t"))
            with pytest.raises(ConfigDrift, match=f"the database: stream is {deployment.log.stream!r}"):
                await repair(deployment.inner(), **where, config=other.config(), apply=True)
            with pytest.raises(ConfigDrift, match=f"the database: stream is {deployment.log.stream!r}"):
                async with other.store(deployment.inner()):
                    pass
        client = await nats.connect(deployment.servers.nats.url)
        await client.jetstream().delete_stream(deployment.log.stream)
        await client.close()
        with pytest.raises(LogRolledBack, match="gone before anything of it was flushed"):
            async with deployment.store():
                pass

    for n in range(generation + 1):
        await lost()
        report = await repair(deployment.inner(), **where, config=deployment.config(), apply=True)
        assert report.done and report.epoch == n + 1
    async with other.store(deployment.inner()) as store:  # the next one may have another name
        await store.checkpoint("t", [2], run_of("t"))
        await store.force_flush("t")


class Readable:
    """An app's store that has only the two reads."""

    async def load_checkpoint(self, thread_id: str) -> None: ...

    async def load_run(self, run_id: str) -> None: ...


class Tickets(PostgresThreadStore):
    """An app's own kind of store, which uses the tables of messages."""

    store_kind = "tickets"


async def test_setup_prints_what_an_apps_own_kind_of_store_with_the_tables_of_messages_lacks(
    deployment: Deployment,
) -> None:
    """Regression: it said that the tables of messages would stand where another store has its own."""
    async with deployment.store(Tickets(deployment.servers.postgres.dsn, schema=deployment.name)):
        pass
    printed = await asyncio.to_thread(bufstore_cli, "setup", "--sql", **where(deployment))
    assert (printed.code, printed.out) == (0, "-- Nothing is missing.\n"), printed


async def test_a_store_without_apply_is_refused_at_open(deployment: Deployment) -> None:
    with pytest.raises(ConfigError, match="Readable cannot be wrapped: it has no apply"):
        async with deployment.store(Readable(), postgres=deployment.servers.postgres.dsn):
            pass


async def test_a_connection_string_in_place_of_a_store_is_named(deployment: Deployment) -> None:
    """Regression: the error asked for `postgres`, which would not have helped."""
    with pytest.raises(ConfigError, match="str cannot be wrapped"):
        async with deployment.store(deployment.servers.postgres.dsn):  # type: ignore[arg-type]
            pass


@pytest.mark.parametrize("epoch", [-1, EPOCHS_MAX])
def test_an_epoch_whose_positions_would_not_fit_is_refused(epoch: int) -> None:
    target = Target("threads", "app", "x")
    with pytest.raises(ConfigError, match="epoch"):
        stream_config(LogConfig(), epoch, target)
    last = stream_config(LogConfig(), EPOCHS_MAX - 1, target)["first_seq"]
    assert last_place(last) < 1 << 62


@pytest.mark.parametrize(
    "bad",
    [
        {"servers": ()},
        {"user": "u"},
        {"user": "u", "password": "p", "token": "t"},
        {"domain": "d", "api_prefix": "p"},
        {"connect_timeout_s": 0},
    ],
)
def test_a_nats_configuration_that_cannot_work_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        NatsConfig(**bad)


async def test_a_postgres_that_hangs_holds_up_no_start(own_servers: Servers) -> None:
    deployment = Deployment(own_servers)
    deployment.verified = False
    async with deployment.store() as store:
        await store.checkpoint("t", [1], run_of("t"))
        await store.force_flush("t")
    own_servers.postgres.pause()
    try:
        began = asyncio.get_running_loop().time()
        async with deployment.store(flush_timeout_s=1.0) as store:
            assert asyncio.get_running_loop().time() - began < 15
            await store.checkpoint("t", [1, 2], run_of("t"))
            own_servers.postgres.resume()
            await store.force_flush("t", timeout_s=30)
            assert await store.load_messages("t", consistency=Consistency.EVENTUAL) == [1, 2]
    finally:
        own_servers.postgres.resume()


@pytest.mark.long
async def test_a_postgres_that_is_away_holds_up_a_start_for_seconds_only(own_servers: Servers) -> None:
    """With the defaults a startup probe does not wait for `flush_timeout_s`, and all lanes together wait once."""
    deployment = Deployment(own_servers, lanes=3, max_bytes=64 << 20)
    deployment.verified = False
    async with deployment.store() as store:
        await store.checkpoint("t", [1], run_of("t"))
        await store.force_flush("t")
    own_servers.postgres.stop()
    try:
        began = asyncio.get_running_loop().time()
        async with deployment.store(flush_timeout_s=30.0) as store:
            assert asyncio.get_running_loop().time() - began < 10, "two lanes that waited in turn would take as long"
            await store.checkpoint("t", [1, 2], run_of("t"))
            own_servers.postgres.start()
            await store.force_flush("t", timeout_s=30)
            assert await store.load_messages("t", consistency=Consistency.EVENTUAL) == [1, 2]
    finally:
        own_servers.postgres.start()
