"""Connection strings of Postgres: what is wrong with one is said, and nothing secret in it is shown."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path

import psycopg
import pytest
from cryptography.hazmat.primitives import serialization
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import Conninfo

from bufstore import BufstoreError, ConfigError, StoreMisconfigured, StoreUnavailable
from bufstore.postgres.connection.conninfo import check_conninfo, opened_within, own_conninfo
from bufstore.postgres.connection.pool import connect
from bufstore.postgres.connection.refusals import reason_in
from integration.test_cli_environments import Certificates

#: Nobody listens there.
NOWHERE = "host=127.0.0.1 port=1 user=u dbname=d"
SECRET = "s3cr3t-0123456789"
#: The parameters of which an operator must see what they are to mend them, as in a refused login.
NAMES = {"host", "hostaddr", "user", "dbname", "service"}


@pytest.mark.parametrize("url", ["postgresql://u:p@h:5/d\n", " postgres://u:p@h:5/d", "\tpostgresql://u:p@h:5/d\r\n"])
def test_space_around_a_url_is_no_part_of_it(url: str) -> None:
    """Regression: a URL out of a file, with the newline at its end, named a database that does not exist."""
    fields = {"user": "u", "password": "p", "host": "h", "port": "5", "dbname": "d"}
    assert check_conninfo(url) == fields
    assert conninfo_to_dict(own_conninfo(url))["dbname"] == "d"
    assert check_conninfo("host=h password='p ' dbname=d\\ ")["dbname"] == "d ", "libpq itself reads this"


@pytest.mark.parametrize("name", ["pgbouncer", "pool_size"])
def test_a_parameter_that_libpq_does_not_know_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"does not know, {name}: leave it out") as refused:
        check_conninfo(f"postgresql://u:{SECRET}@h/d?sslmode=require&{name}={SECRET}")
    assert SECRET not in "".join(traceback.format_exception(refused.value))


@pytest.mark.parametrize(
    "dsn",
    [
        *("postgresql://u:p/?{}=x@h/d", "postgresql://u:1/?{}=x@h/d", "host=h password=p {}=x"),
        *("postgresql://h/d?user=u&password=p&{}", "postgresql://h/d?password=p&{}=x", "postgresql://h/d?{}=p=x"),
        "postgresql://h/d?sslpassword=p&{}=x",
    ],
)
def test_a_piece_of_a_password_is_not_named_as_a_parameter(dsn: str) -> None:
    piece = SECRET[0] * 9  # not as such in a line that a traceback shows
    with pytest.raises(ConfigError, match="cannot be read") as refused:
        check_conninfo(dsn.format(piece))
    assert piece not in "".join(traceback.format_exception(refused.value))


@pytest.mark.parametrize("port", ["0", "65536", "99999", "5432,70000"])
def test_a_port_that_cannot_be_is_refused(port: str) -> None:
    with pytest.raises(ConfigError, match="no usable host and port"):
        check_conninfo(f"host=a,b port={port}")
    assert check_conninfo("host=a,b port=5432,")["port"] == "5432,"


@pytest.mark.parametrize("seconds", [SECRET, "inf", "nan"])
def test_a_time_that_is_none_is_refused(seconds: str) -> None:
    """Regression: psycopg's error of it was no OperationalError, and Postgres was called away."""
    with pytest.raises(ConfigError, match="connect_timeout") as refused:
        check_conninfo(f"host=h connect_timeout={seconds}")
    assert SECRET not in "".join(traceback.format_exception(refused.value))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"service": "nope"}, 'definition of service "nope" not found'),
        ({"gssencmode": "require"}, "GSSAPI"),
        ({"host": "127.0.0.1,127.0.0.1", "port": "1,1,1"}, "could not match 3 port numbers to 2 hosts"),
        ({"hostaddr": "nowhere"}, "could not parse network address"),
        ({"sslmode": SECRET}, r"invalid sslmode value: \*\*\*"),
        ({"require_auth": SECRET + '"\n"'}, r"invalid require_auth value: \*\*\*"),
        ({"ssl_min_protocol_version": SECRET}, r"ssl_min_protocol_version\"? value: \*\*\*"),
        ({"require_auth": "md5,md5"}, r"require_auth method \*\*\* is specified more than once"),
        ({"require_auth": f"md5,!{SECRET}"}, r"negative require_auth method \*\*\* cannot be mixed"),
        ({"require_auth": f"!md5,{SECRET}"}, r"require_auth method \*\*\* cannot be mixed"),
        ({"keepalives_idle": "-1"}, "Invalid argument"),
        ({"host": "/" + 200 * "x"}, "is too long"),
        ({"keepalives_idle": SECRET}, r"invalid integer value \*\*\* for connection option \"keepalives_idle\""),
    ],
)
async def test_what_libpq_does_not_even_try_is_a_misconfiguration(wrong: dict[str, str], said: str) -> None:
    """Regression: each was an outage, most of them "connection failed" and no more."""
    with pytest.raises(StoreMisconfigured, match=said) as refused:
        await connect(make_conninfo(NOWHERE, **wrong))
    assert SECRET not in "".join(traceback.format_exception(refused.value))


async def test_a_peer_that_is_another_user_is_a_misconfiguration() -> None:
    async def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    with tempfile.TemporaryDirectory() as folder:  # the path of a test's own folder may be too long for a socket
        async with await asyncio.start_unix_server(refuse, f"{folder}/.s.PGSQL.1"):
            with pytest.raises(StoreMisconfigured, match=r"requirepeer specifies \*\*\*, but actual peer") as refused:
                await connect(make_conninfo(NOWHERE, host=folder, requirepeer=SECRET))
    assert SECRET not in "".join(traceback.format_exception(refused.value))


@pytest.mark.parametrize(
    "said",
    [
        'FATAL:  pg_hba.conf rejects connection for host "10.0.0.1", user "u", database "d", no encryption',
        'FATAL:  cannot connect to invalid database "d"',
        "FATAL:  connection requires a valid client certificate",
        'FATAL:  parameter "geqo" requires a Boolean value',
        "FATAL:  no such database: d",
        "FATAL:  unsupported frontend protocol 3.0: server supports 2.0 to 2.0",
        "SSL error: tlsv13 alert certificate required",
        "SSL error: tlsv1 alert unknown ca",
        "SSL error: ssl/tls alert bad certificate",
        "SSL error: tlsv1 alert protocol version",
        "SSL error: sslv3 alert handshake failure",
        "server did not request an SSL certificate",
        'could not load SSL engine "e": could not load the shared library',
        "channel binding is required, but server did not offer an authentication method that supports channel binding",
        "none of the server's SASL authentication mechanisms are supported",
        "authentication method 99 not supported",
        "server doesn't support GSSAPI encryption, but it was required",
        'server only supports protocol version 3.0, but "min_protocol_version" was set to 3.2',
    ],
)
async def test_a_refusal_of_the_server_or_of_libpq_is_no_outage(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: each was an outage, and retried until the caller's time was over."""

    async def refuse(*_: object, **__: object) -> None:
        raise psycopg.OperationalError(f'connection failed: connection to server at "h", port 5 failed: {said}')

    monkeypatch.setattr(psycopg.AsyncConnection, "connect", refuse)
    with pytest.raises(StoreMisconfigured, match=re.escape(said)):
        await connect(NOWHERE)


@pytest.mark.parametrize(
    "said",
    [
        "Connection refused",
        "SSL error: tlsv1 alert internal error",
        "timeout expired",
        'FATAL:  database "d" is not currently accepting connections',  # for a time: somebody maintains it
    ],
)
async def test_an_outage_is_no_refusal(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise psycopg.OperationalError(f'connection failed: connection to server at "h", port 5 failed: {said}')

    monkeypatch.setattr(psycopg.AsyncConnection, "connect", fail)
    with pytest.raises(StoreUnavailable, match=said):
        await connect(NOWHERE)


REJECTED = 'FATAL:  pg_hba.conf rejects connection for host "10.0.0.1", user "u", database "d", no encryption'
NO_LOGIN = 'FATAL:  password authentication failed for user "u"'
NO_PEER = 'FATAL:  Peer authentication failed for user "u"'
AWAY = "Connection refused"


def told(*attempts: tuple[str, str]) -> str:
    """What psycopg says of several attempts, each at a host and with a reason."""
    texts = [f'connection failed: connection to server at "10.0.0.1", port 5 failed: {why}' for _, why in attempts]
    each = [
        f"- host: {host!r}, port: '5', hostaddr: '10.0.0.1': {t}" for (host, _), t in zip(attempts, texts, strict=True)
    ]
    return "\n".join([texts[-1], "Multiple connection attempts failed. All failures were:", *each])


@pytest.mark.parametrize("first", [0, 1])
def test_a_host_that_is_away_may_let_in_whom_another_refuses_by_a_setting_of_its_own(first: int) -> None:
    """Regression: a standby that rejects the app turned the primary's outage into a misconfiguration."""
    attempts = [("a", REJECTED), ("b", AWAY)][:: 1 if first else -1]
    assert reason_in(told(*attempts)).endswith(AWAY)
    assert reason_in(told(("a", REJECTED), ("b", REJECTED))).endswith(REJECTED)
    assert reason_in(told(("a", NO_PEER), ("b", AWAY))).endswith(AWAY)
    # The standby's logins are the primary's.
    assert reason_in(told(*[("a", NO_LOGIN), ("b", AWAY)][:: 1 if first else -1])).endswith(NO_LOGIN)
    # One server, of which one address is not listened on.
    assert reason_in(told(*[("localhost", REJECTED), ("localhost", AWAY)][:: 1 if first else -1])).endswith(REJECTED)


@pytest.mark.parametrize("value", ["true", "database", "1", SECRET])
def test_a_connection_for_replicas_is_refused(value: str) -> None:
    """Regression: it was opened, and each of its statements that has parameters was an outage."""
    with pytest.raises(ConfigError, match="replication") as refused:
        own_conninfo(f"{NOWHERE} replication={value}")
    assert SECRET not in str(refused.value)
    for none in ("off", "of", "False", "n", "0", ""):
        own_conninfo(f"{NOWHERE} replication='{none}'")


@pytest.mark.parametrize("special", ["", '"', "\n", '"\n"', ": ", "'\\"], ids=repr)
async def test_no_parameter_of_libpq_shows_a_secret_in_an_error(special: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    tried = 0
    for name in (option.keyword.decode() for option in Conninfo.get_defaults()):
        if name in NAMES:
            continue
        with pytest.raises(BufstoreError) as failed:
            await connect(own_conninfo(make_conninfo(NOWHERE, **{name: special + SECRET + special + SECRET})))
        assert SECRET not in "".join(traceback.format_exception(failed.value)), name
        tried += 1
    assert tried > 30


_CONNECTS = """
import asyncio, sys
from bufstore import PostgresThreadStore, StoreMisconfigured
async def main():
    try:
        async with PostgresThreadStore(sys.argv[1]) as store:
            await store.load_messages("t")
    except StoreMisconfigured as e:
        print("refused:", e)
asyncio.run(main())
"""


@pytest.mark.parametrize("given", [{}, {"sslpassword": ""}])
def test_nobody_is_asked_for_the_passphrase_of_a_key(tmp_path: Path, given: dict[str, str]) -> None:
    """Regression: OpenSSL asked on the terminal, and waited for good."""
    made, locked = Certificates(tmp_path), tmp_path / "locked.key"
    key = serialization.load_pem_private_key(made.client_key.read_bytes(), None)
    lock, form = serialization.BestAvailableEncryption(b"geheim"), serialization.PrivateFormat.PKCS8
    locked.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, lock))
    locked.chmod(0o600)

    class TakesTls(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            if self.request.recv(8)[4:] == bytes.fromhex("04d2162f"):  # SSLRequest
                self.request.sendall(b"S")
                self.request.recv(1)

    ours, terminal = pty.openpty()
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), TakesTls) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port, options = server.server_address[1], {"sslcert": made.client_cert, "sslkey": locked, **given}
        dsn = make_conninfo(NOWHERE, port=port, sslmode="require", gssencmode="disable", **options)
        try:
            ended = subprocess.run(
                [sys.executable, "-c", _CONNECTS, dsn],
                stdin=terminal, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=30,
                start_new_session=True,
            )  # fmt: skip
        finally:
            server.shutdown()
            os.close(ours)
            os.close(terminal)
    assert "refused: " in ended.stdout and "private key file" in ended.stdout, ended.stdout


@pytest.mark.parametrize(
    ("conninfo", "within_s"),
    [
        ("host=a", 5),
        ("host=a connect_timeout=9", 5),
        ("", 5),
        ("host=a,b", 10),
        ("host=a,b,c connect_timeout=3", 11),
        ("host=a,b connect_timeout=0", 10),
        ("host=a,b connect_timeout=1", 7),
        ("hostaddr=10.0.0.1,10.0.0.2 host=a", 10),
        ("postgresql://u@a:1,b:2/d?connect_timeout=4", 9),
    ],
)
def test_the_first_connection_may_take_what_each_host_may_take(
    conninfo: str, within_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PGHOST", raising=False)
    assert opened_within(conninfo, 5) == within_s
