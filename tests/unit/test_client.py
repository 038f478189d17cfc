"""A round trip to NATS comes after what it is to confirm."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import nats.errors
import pytest
from nats.aio.client import Client

from bufstore.config import NatsConfig
from bufstore.errors import Closed
from bufstore.jetstream import connection as connections
from bufstore.jetstream import frames
from bufstore.jetstream.client import round_trip
from bufstore.jetstream.connection import Connection
from bufstore.jetstream.messages import AppendUnknown
from bufstore.mailbox.nats import NatsMailboxStore


async def test_closing_ends_although_connecting_swallows_that_it_was_cancelled() -> None:
    connection, begun = Connection(NatsConfig(servers=["nats://127.0.0.1:1"]), "test"), asyncio.Event()

    async def swallows() -> None:
        begun.set()
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        connection._lost.clear()  # it is connected

    connection._connect = swallows  # type: ignore[method-assign]
    connection._closed = False
    connection._lost.set()
    connection._supervisor = asyncio.create_task(connection._supervise())
    await begun.wait()
    async with asyncio.timeout(10):
        await connection.aclose()


async def test_what_was_not_opened_is_closed() -> None:
    connection = Connection(NatsConfig(), "test")
    with pytest.raises(Closed):
        connection.client()
    async with asyncio.timeout(10):
        with pytest.raises(Closed):
            await connection.wait_up(3600)
    mailbox = NatsMailboxStore(NatsConfig())
    for call in (mailbox.enqueue("thread"), mailbox.claim("thread", "w"), mailbox.load_dispatch("thread", "id")):
        async with asyncio.timeout(10):
            with pytest.raises(Closed):
                await call


class Recorder:
    """As much of a NATS server as a client needs, which remembers what it was sent."""

    def __init__(self) -> None:
        self.verbs: list[str] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id":"x","version":"2.15.1","max_payload":1048576,"headers":true}\r\n')
        while line := await reader.readline():
            verb = line.split()[0].decode()
            self.verbs.append(verb)
            if verb == "PUB":
                await reader.readexactly(int(line.split()[-1]) + 2)
            elif verb == "PING":
                writer.write(b"PONG\r\n")
        writer.close()


@pytest.fixture
async def client_and_server() -> AsyncIterator[tuple[Client, Recorder]]:
    recorder = Recorder()
    server = await asyncio.start_server(recorder.serve, "127.0.0.1", 0)
    client = Client()
    await client.connect(f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}", allow_reconnect=False)
    recorder.verbs.clear()
    yield client, recorder
    await client.close()
    server.close()
    await server.wait_closed()


async def test_a_round_trip_comes_after_the_subscription(client_and_server: tuple[Client, Recorder]) -> None:
    client, server = client_and_server
    await client.subscribe("a")
    await round_trip(client)
    assert server.verbs == ["SUB", "PING"]


async def test_a_round_trip_comes_after_the_message(client_and_server: tuple[Client, Recorder]) -> None:
    client, server = client_and_server
    for _ in range(3):
        await client.publish("a", b"x")
    await round_trip(client)
    assert server.verbs == ["PUB"] * 3 + ["PING"]


async def test_a_request_that_was_sent_once_has_an_unknown_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an answer it is sent again, and meanwhile the connection has gone: the first may have arrived."""
    server = await asyncio.start_server(Recorder().serve, "127.0.0.1", 0)
    connection = Connection(NatsConfig(servers=[f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"]), "test")
    post, posts = frames.post, 0

    async def once(client: Client, subject: str, payload: bytes, reply: str) -> None:
        nonlocal posts
        posts += 1
        if posts > 1:
            raise nats.errors.OutboundBufferLimitError
        await post(client, subject, payload, reply)

    monkeypatch.setattr(frames, "post", once)
    monkeypatch.setattr(connections, "AGAIN_S", 0.001)
    await connection.open()
    try:
        with pytest.raises(AppendUnknown):
            await connection.request("silent", b"", 10, again=True)
    finally:
        await connection.aclose()
        server.close()
        await server.wait_closed()
    assert posts == 2
