"""TLS of Postgres: what can never work is no outage, and the error says what to look at."""

from __future__ import annotations

import datetime
import socket
import socketserver
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psycopg
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519
from psycopg.conninfo import make_conninfo

from bufstore import StoreMisconfigured, StoreUnavailable
from bufstore.postgres.connection.conninfo import own_conninfo
from bufstore.postgres.connection.pool import connect
from integration.test_cli_environments import Certificates

SSL_REQUEST = bytes.fromhex("0000000804d2162f")
Serve = Callable[[socket.socket], object]


@contextmanager
def listening(serve: Serve) -> Iterator[str]:
    """A server that does this with each client; gives the connection string to it."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):  # the client has hung up
                serve(self.request)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        port = server.server_address[1]
        try:
            yield make_conninfo(host="127.0.0.1", port=port, user="u", dbname="d", password="p", gssencmode="disable")
        finally:
            server.shutdown()


def server_context(cert: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    return context


def saying(*answers: Callable[[bytes], bytes]) -> Serve:
    """To each that is sent, whoever listens gives the next answer."""

    def serve(client: socket.socket) -> None:
        for answer in answers:
            client.sendall(answer(client.recv(10_000)))
        client.recv(10_000)

    return serve


def speaking(context: ssl.SSLContext, *answers: Callable[[bytes], bytes]) -> Serve:
    """TLS from the start, and in it these answers."""

    def serve(client: socket.socket) -> None:
        with context.wrap_socket(client, server_side=True) as wrapped:
            saying(*answers)(wrapped)

    return serve


def offering(context: ssl.SSLContext, *answers: Callable[[bytes], bytes]) -> Serve:
    """TLS as Postgres offers it, and in it these answers."""

    def serve(client: socket.socket) -> None:
        assert client.recv(8) == SSL_REQUEST
        client.sendall(b"S")
        speaking(context, *answers)(client)

    return serve


def authentication(kind: int, what: bytes = b"") -> bytes:
    return b"R" + struct.pack("!ii", 8 + len(what), kind) + what


async def refused(dsn: str, **options: str) -> str:
    with pytest.raises(StoreMisconfigured) as found:
        await connect(own_conninfo(make_conninfo(dsn, **options)))
    return str(found.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"host": "", "hostaddr": "127.0.0.1", "sslmode": "verify-full"}, "host name must be specified"),
        (
            {"sslmode": "require", "ssl_min_protocol_version": "TLSv1", "ssl_max_protocol_version": "TLSv1.1"},
            "no protocols available",
        ),
        ({"sslmode": "require", "sslcertmode": "require"}, "without a valid SSL certificate"),
    ],
)
async def test_tls_that_can_never_be_made_is_a_misconfiguration(
    tmp_path: Path, options: dict[str, str], said: str
) -> None:
    """Regression: each was an outage, and retried until the caller's time was over."""
    made = Certificates(tmp_path)
    context = server_context(made.cert, made.key)
    context.load_verify_locations(made.ca)
    context.verify_mode = ssl.CERT_OPTIONAL
    with listening(offering(context, lambda _: authentication(0))) as dsn:
        assert said in await refused(dsn, sslrootcert=str(made.ca), **options)


async def test_a_tls_that_knows_nothing_of_postgres_is_a_misconfiguration(tmp_path: Path) -> None:
    """Regression: a proxy that ends TLS for HTTP, or that does not know the host's name, was an outage."""
    made = Certificates(tmp_path)
    context = server_context(made.cert, made.key)
    with listening(speaking(context)) as dsn:
        assert "without ALPN" in await refused(dsn, sslmode="require", sslnegotiation="direct")
    context = server_context(made.cert, made.key)
    context.sni_callback = lambda *_: ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME
    with listening(offering(context)) as dsn:
        assert "unrecognized name" in await refused(dsn, sslmode="require", host="pq.invalid", hostaddr="127.0.0.1")


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b'INFO {"server_id":"N"}\r\n', b"-ERR\r\n"])
@pytest.mark.parametrize("tls", ["disable", "prefer", "require"])
async def test_a_port_where_no_postgres_listens_is_a_misconfiguration(answer: bytes, tls: str) -> None:
    """Regression: a mistyped port was an outage."""
    with listening(saying(lambda _: answer)) as dsn:
        assert "(no Postgres listens there)" in await refused(dsn, sslmode=tls)


@pytest.mark.parametrize(
    "answer",
    [
        b"Ecould not fork new process for connection: Resource temporarily unavailable\n\0",
        b"E\0\0\0\x37SFATAL\0VFATAL\0C08P01\0Mbad packet header: '16030106'\0\0",  # a PgBouncer
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
    ],
)
async def test_what_does_not_speak_tls_at_once_may_be_an_outage(answer: bytes) -> None:
    """Regression: a Postgres that could not fork for a moment was no Postgres, and so was a pooler."""
    advised = pytest.raises(StoreUnavailable, match=r"\(what answers there does not speak TLS at once: ")
    with listening(saying(lambda _: answer)) as dsn, advised:
        await connect(own_conninfo(make_conninfo(dsn, sslmode="require", sslnegotiation="direct")))


def with_an_ed25519_key(folder: Path) -> tuple[Path, Path]:
    key, name = ed25519.Ed25519PrivateKey.generate(), x509.Name([])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
    made = builder.sign(key, None)
    cert_file, key_file = folder / "ed25519.pem", folder / "ed25519.key"
    cert_file.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    form, none = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    key_file.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, none))
    return cert_file, key_file


async def test_a_certificate_that_scram_cannot_be_bound_to_is_a_misconfiguration(tmp_path: Path) -> None:
    """Regression: it was an outage, with nothing but "could not find digest for NID UNDEF" to go by."""

    def asks(_: bytes) -> bytes:
        return authentication(10, b"SCRAM-SHA-256-PLUS\0SCRAM-SHA-256\0\0")

    def goes_on(first: bytes) -> bytes:
        return authentication(11, b"r=%bx,s=QUJD,i=1" % first.rpartition(b"r=")[2])

    with listening(offering(server_context(*with_an_ed25519_key(tmp_path)), asks, goes_on)) as dsn:
        assert "set channel_binding=disable" in await refused(dsn, sslmode="require")


@pytest.mark.parametrize("tls", ["direct", "postgres"])
async def test_a_server_that_hangs_up_while_tls_is_made_is_away(tls: str) -> None:
    """It may not know direct TLS, but a restart does the same, and a balancer whose server is away.

    Regression: the error of a restart spoke of sslnegotiation=direct, also where nobody had set that.
    """

    # A Postgres before 17 takes what is sent for the length of a message, and ends the session.
    def serve(client: socket.socket) -> None:
        client.recv(10_000)
        if tls == "postgres":
            client.sendall(b"S")
            client.recv(10_000)

    away = pytest.raises(StoreUnavailable, match=r"(unexpected eof while reading|EOF detected)$")
    with listening(serve) as dsn, away:
        await connect(own_conninfo(make_conninfo(dsn, sslmode="require", sslnegotiation=tls)))


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ("SSL error: certificate verify failed", "its issuer is not in sslrootcert, or a certificate is out of date"),
        ("SSL error: tlsv1 alert unknown ca", "the server refuses the client's certificate, sslcert"),
        ("SSL error: tlsv13 alert certificate required", "the server asks for a client's certificate: set sslcert"),
        ("SSL error: ssl/tls alert certificate expired", "the server refuses the client's certificate, sslcert"),
        (
            "FATAL:  connection requires a valid client certificate",
            "the server asks for a client's certificate: set sslcert; libpq passes",
        ),
        ('could not load private key file "k": bad decrypt', "sslpassword is missing or wrong"),
        ("direct SSL connection was established without ALPN protocol negotiation extension", ""),
        ("SSL connection was established with unexpected ALPN protocol", ""),
        ("SSL error: tlsv1 alert no application protocol", ""),
        ("could not determine server certificate signature algorithm", "SCRAM cannot be bound to the server's"),
    ],
)
async def test_a_refusal_of_tls_says_what_to_look_at(said: str, advice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object, **__: object) -> None:
        raise psycopg.OperationalError(f'connection failed: connection to server at "h", port 5 failed: {said}')

    monkeypatch.setattr(psycopg.AsyncConnection, "connect", refuse)
    with pytest.raises(StoreMisconfigured) as found:
        await connect("host=h user=u dbname=d")
    _, _, after = str(found.value).partition(said)
    assert after.startswith(f" ({advice}") if advice else after == ""
