"""A nats-server that is too old for bufstore is reported before anything is made on it."""

from __future__ import annotations

import asyncio
import json
from contextlib import nullcontext

import pytest

from bufstore.config import NatsConfig
from bufstore.errors import ConfigError
from bufstore.jetstream.connection import Connection
from bufstore.jetstream.stream import NatsStream


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
    info = {"server_id": "x", "version": version, "max_payload": 1 << 20, "headers": True}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"INFO %s\r\n" % json.dumps(info).encode())
        while line := await reader.readline():
            if line.startswith(b"PING"):
                writer.write(b"PONG\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    nats_ = NatsConfig(servers=[f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"])
    connection = Connection(nats_, "test")
    NatsStream(connection, nats_.api, "s", 1)
    refused = pytest.raises(ConfigError, match=rf"nats-server {version} is too old: bufstore needs 2\.14\.0 or later")
    try:
        with refused if too_old else nullcontext():
            await connection.open()
    finally:
        await connection.aclose()
        server.close()
        await server.wait_closed()
