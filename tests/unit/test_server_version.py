"""A nats-server that is too old for bufstore is reported before anything is made on it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from bufstore.cli.connect import Endpoints
from bufstore.cli.doctor.diagnosis import CheckResult, Level
from bufstore.cli.doctor.mailbox import check_mailbox
from bufstore.cli.doctor.nats import check_nats
from bufstore.cli.doctor.tokens import check_tokens
from bufstore.config import NatsConfig
from bufstore.errors import ConfigError
from bufstore.jetstream.connection import Connection
from bufstore.jetstream.server_version import VERSION_MIN
from bufstore.jetstream.stream import NatsStream
from bufstore.nats.finding import find_log
from bufstore.nats.permissions import Role

_TOO_OLD = r"nats-server 2\.11\.11 is too old: bufstore needs 2\.14\.0 or later"


@asynccontextmanager
async def _server_of(version: str) -> AsyncIterator[NatsConfig]:
    """Listen as a server that says this version, and answers nothing but pings."""
    info = {"server_id": "x", "version": version, "max_payload": 1 << 20, "headers": True}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"INFO %s\r\n" % json.dumps(info).encode())
        while line := await reader.readline():
            if line.startswith(b"PING"):
                writer.write(b"PONG\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield NatsConfig(servers=[f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"])
    finally:
        server.close()
        await server.wait_closed()


@pytest.mark.parametrize(
    ("version", "too_old"),
    [
        ("2.10.26", True),
        ("2.11.11", True),
        ("2.12.8", False),
        ("2.15.1", False),
        ("2.16.0-RC.1", False),
        ("of our own", False),
        ("", False),
    ],
)
async def test_a_server_that_is_too_old_is_told_at_once(version: str, too_old: bool) -> None:
    refused = pytest.raises(ConfigError, match=rf"nats-server {version} is too old: bufstore needs 2\.14\.0 or later")
    async with _server_of(version) as nats_:
        connection = Connection(nats_, "test")
        NatsStream(connection, nats_.api, "s", 1)
        try:
            with refused if too_old else nullcontext():
                await connection.open()
        finally:
            await connection.aclose()


@pytest.mark.parametrize(
    ("version", "told"),
    [("2.12.8", True), ("2.14.0", False), ("2.15.1", False), ("2.16.0-RC.1", False), ("of our own", False)],
)
async def test_a_server_that_is_older_than_those_of_the_tests_is_told_once(
    version: str, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with _server_of(version) as nats_:
        connection = Connection(nats_, "test")
        for stream in "log", "bucket":
            NatsStream(connection, nats_.api, stream, 1)
        try:
            await connection.open()
        finally:
            await connection.aclose()
    said = [line.getMessage() for line in caplog.records if getattr(line, "action", "") == "nats_version"]
    text = f"nats-server {version} is older than 2.14.0, the oldest that bufstore is tested with: update it"
    assert said == [text] * told


def test_operations_names_the_oldest_server_that_the_tests_know() -> None:
    major, minor, patch = VERSION_MIN
    said = " ".join((Path(__file__).parents[2] / "docs/OPERATIONS.md").read_text().split())
    assert f"nats-server {major}.{minor}{f'.{patch}' if patch else ''} or later" in said


async def test_who_looks_for_a_log_learns_that_the_server_is_too_old() -> None:
    """Not that there is no log, which would have to be made there."""
    async with _server_of("2.11.11") as nats_:
        with pytest.raises(ConfigError, match=_TOO_OLD):
            await find_log(nats_, "THREADLOG", "thread-hot", "test")


@pytest.mark.parametrize("check", [check_tokens, check_mailbox])
async def test_doctor_advises_no_rights_on_a_server_that_is_too_old(check: Any) -> None:
    """Regression: it said "permit STREAM.INFO", beside what has to be done."""
    async with _server_of("2.11.11") as nats_:
        target = Endpoints(nats=nats_, postgres="", schema="bufstore", stream="THREADLOG", bucket="thread-hot")
        [found] = await check(target, "x")
    assert (found.level, found.advice) == (Level.BAD, "")
    assert re.search(_TOO_OLD, found.found)


@pytest.mark.parametrize("first", [0, 1])
async def test_doctor_looks_at_the_server_that_stores_work_with(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: of a server that stores pass over it said, by chance, that nothing works."""
    monkeypatch.setattr("bufstore.jetstream.connection.secrets.randbelow", lambda _: first)
    monkeypatch.setattr("bufstore.cli.doctor.nats._TIMEOUT_S", 0.1)
    async with _server_of("2.11.11") as old, _server_of("2.15.1") as new:
        nats_ = NatsConfig(servers=[*old.servers, *new.servers])
        target = Endpoints(nats=nats_, postgres="", schema="bufstore", stream="THREADLOG", bucket="thread-hot")
        checks, _ = await check_nats(target, Role.OPERATOR)
    assert [(check.level, check.found) for check in checks if check.what == "version"] == [(Level.OK, "2.15.1")]


async def test_doctor_finds_that_the_version_is_wrong_and_not_the_way_to_the_server() -> None:
    async with _server_of("2.11.11") as nats_:
        target = Endpoints(nats=nats_, postgres="", schema="bufstore", stream="THREADLOG", bucket="thread-hot")
        checks, log = await check_nats(target, Role.OPERATOR)
    needed = "nats-server 2.14.0 or later is needed"
    found = CheckResult(part="NATS", what="version", level=Level.BAD, found="2.11.11", advice=needed)
    assert [check for check in checks if check.level is Level.BAD] == [found]
    assert log is None
