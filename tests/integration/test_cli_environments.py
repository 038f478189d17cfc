"""The command line with TLS, in scripts, on narrow terminals, and without Unix."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from bufstore.embedded import Servers
from command_line import ENVIRONMENT, Result, bufstore_cli, where
from conftest import Deployment
from integration.test_setup import NatsByHand

#: Modules that only Unix has. The standard library modules that need them are imported before they are hidden.
NO_UNIX = """
import asyncio, subprocess, sys, click, psycopg, nats, rich.console
for name in ("fcntl", "pwd", "grp", "resource", "termios"):
    sys.modules[name] = None
"""


def python(code: str, *arguments: str) -> Result:
    command = [sys.executable, "-W", "error", "-c", code, *arguments]
    return Result(subprocess.run(command, capture_output=True, env=ENVIRONMENT, timeout=60))


# --- TLS --------------------------------------------------------------------------------------------------------


class Certificates:
    """A certificate authority of our own, a server's certificate and a client's, as files."""

    def __init__(self, folder: Path) -> None:
        authority = trustme.CA()
        self.ca = folder / "ca.pem"
        authority.cert_pem.write_to_path(str(self.ca))
        self.cert, self.key = self._issue(authority, folder, "127.0.0.1")
        self.client_cert, self.client_key = self._issue(authority, folder, "client.example")

    def _issue(self, authority: trustme.CA, folder: Path, name: str) -> tuple[Path, Path]:
        issued = authority.issue_cert(name)
        cert, key = folder / f"{name}.pem", folder / f"{name}.key"
        cert.write_bytes(b"".join(c.bytes() for c in issued.cert_chain_pems))
        key.write_bytes(issued.private_key_pem.bytes())
        return cert, key


@pytest.mark.long
async def test_nats_with_certificates_of_ones_own_from_the_command_line(servers: Servers, tmp_path: Path) -> None:
    files = Certificates(tmp_path)
    server = NatsByHand(
        tmp_path / "nats",
        f'tls {{ cert_file: "{files.cert}", key_file: "{files.key}", ca_file: "{files.ca}", verify: true }}\n'
        "authorization { timeout: 10, users: [ { user: app, password: app } ] }",
    )
    async with server:
        deployment = Deployment(servers)
        environment = where(deployment) | {
            "BUFSTORE_NATS": server.url,
            "BUFSTORE_NATS_USER": "app",
            "BUFSTORE_NATS_PASSWORD": "app",
        }

        async def cli(*arguments: object) -> Result:
            return await asyncio.to_thread(bufstore_cli, *arguments, **environment)

        ours = ("--tls-ca", files.ca, "--tls-cert", files.client_cert, "--tls-key", files.client_key)
        imported = await cli("import", "-", *ours)
        assert imported.code == 0, imported
        found = await cli("doctor", "--json", "--nats-sys", server.url.replace("://", "://app:app@"), *ours)
        checks = {f"{c['part']} {c['what']}": c for c in found.json["checks"]}
        assert checks["NATS reachable"]["level"] == "ok", found
        # The connection works: the error says that this is not a system account.
        assert "no server with JetStream answered" in checks["NATS sync of the disk"]["found"]
        environment |= {
            "BUFSTORE_TLS_CA": str(files.ca),
            "BUFSTORE_TLS_CERT": str(files.client_cert),
            "BUFSTORE_TLS_KEY": str(files.client_key),
        }
        assert "flushing: no flusher is alive" in (await cli("status")).out
        del environment["BUFSTORE_TLS_CA"]
        refused = await cli("status")
        assert (refused.code, "certificate" in refused.err.lower()) == (2, True), refused


def test_files_for_tls_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    files = Certificates(tmp_path)
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("nonsense")
    locked = tmp_path / "locked.key"
    key = serialization.load_pem_private_key(files.key.read_bytes(), None)
    form = serialization.PrivateFormat.PKCS8
    lock = serialization.BestAvailableEncryption(b"geheim")
    locked.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, lock))
    at = ("status", "--nats", "tls://127.0.0.1:1", "--postgres", "dbname=x")
    for arguments, says in (
        (("--tls-ca", nonsense), str(nonsense)),
        (("--tls-cert", nonsense), str(nonsense)),
        (("--tls-cert", files.cert), "in the same file"),
        (("--tls-cert", files.client_cert, "--tls-key", files.key), "cannot be used"),
        (("--tls-key", files.key), "--tls-cert, which is missing"),
        (("--tls-cert", files.cert, "--tls-key", locked), "passphrase"),
    ):
        result = bufstore_cli(*at, *arguments)
        assert (result.code, result.out) == (2, ""), result
        assert says in result.err
        assert "Traceback" not in result.err


# --- scripts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        (["status", "--nats", "nats://u:s3cret@127.0.0.1:1", "--postgres", "dbname=x"], "LogUnavailable", "reach NATS"),
        (["import", "-", "--nats", "x", "--postgres", "password=s3cret nonsense"], "ConfigError", "cannot be read"),
        (["status"], "Usage", "--nats and --postgres"),
        (["flush", "--no-such-option"], "Usage", "No such option"),
        (["quarantine", "show", "no-number"], "Usage", "no-number"),
        (["no-such-command"], "Usage", "no-such-command"),
    ],
)
def test_a_command_that_fails_says_so_in_json_too(arguments: list[str], error: str, says: str) -> None:
    result = bufstore_cli(*arguments, "--json")
    assert (result.code, result.json["code"], result.json["error"]) == (2, 2, error), result
    assert says in result.json["message"]
    assert says in result.err
    assert "s3cret" not in result.out + result.err
    assert bufstore_cli(*arguments).out == ""


def test_python_m_bufstore_is_the_command_line() -> None:
    result = python(
        "import runpy, sys; sys.argv[0] = 'bufstore'; runpy.run_module('bufstore', run_name='__main__')", "-h"
    )
    assert (result.code, "Usage: bufstore" in result.out) == (0, True), result


# --- narrow terminals -------------------------------------------------------------------------------------------


async def test_doctor_is_readable_in_80_columns(deployment: Deployment) -> None:
    async with deployment.store():
        checks = (await asyncio.to_thread(bufstore_cli, "doctor", "--json", **where(deployment))).json["checks"]
        shown = await asyncio.to_thread(bufstore_cli, "doctor", COLUMNS="80", **where(deployment))
    assert max(map(len, shown.out.splitlines())) <= 80
    words = set(shown.out.split())
    said_of = [word for c in checks for text in (c["what"], c["found"], c["advice"]) for word in text.split()]
    # Words with digits are left out: counts may have changed in between.
    broken = [word for word in said_of if len(word) < 40 and word.isalpha() and word not in words]
    assert broken == [], shown


# --- no Unix ----------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_command_line_needs_a_unix_for_its_own_servers_only() -> None:
    start = f"{NO_UNIX}\nfrom bufstore.cli import main\nsys.argv[0] = 'bufstore'\nmain()"
    listed = python(start, "--help")
    assert listed.code == 0, listed
    unreachable = python(start, "status", "--nats", "nats://127.0.0.1:1", "--postgres", "dbname=x")
    assert (unreachable.code, "cannot reach NATS" in unreachable.err) == (2, True), unreachable
    for command in (("status", "--embedded"), ("demo",)):
        refused = python(start, *command)
        assert (refused.code, "Linux and macOS only" in refused.err) == (2, True), refused
        assert "Traceback" not in refused.err
