"""The size of messages to a server that accepts less than it announces."""

from __future__ import annotations

import asyncio

import nats.errors
import pytest

from bufstore.config import NatsConfig
from bufstore.jetstream import frames
from bufstore.jetstream.client import ListeningClient, taken_bytes
from bufstore.jetstream.connection import Connection


@pytest.mark.parametrize(
    ("told", "refused", "taken"),
    [
        (1 << 20, None, 1 << 20),
        (1 << 20, 256 << 10, 128 << 10),  # the server would accept the refused size, so an account has a limit
        (128 << 10, 256 << 10, 128 << 10),  # the server accepts less since a reload
        (256 << 10, 256 << 10, 128 << 10),
        (1 << 20, 12, 1024),
    ],
)
def test_what_a_server_takes_is_less_than_what_it_refused(told: int, refused: int | None, taken: int) -> None:
    assert taken_bytes(told, refused) == taken


async def test_a_refused_message_is_noted_although_the_connection_ends_with_the_words() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id":"x","version":"2.15.1","max_payload":1048576,"headers":true}\r\n')
        while not (line := await reader.readline()).startswith(b"PUB"):
            if line.startswith(b"PING"):
                writer.write(b"PONG\r\n")
        writer.write(b"-ERR 'Maximum Payload Violation'\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = ListeningClient()
    ended = asyncio.Event()

    async def on_closed() -> None:
        ended.set()

    url = f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    await client.connect(url, allow_reconnect=False, closed_cb=on_closed)
    frames.prepare(client)
    await frames.post(client, "a", b"x" * 1000, "")
    async with asyncio.timeout(10):
        await ended.wait()
    assert client.refused_bytes == 1000
    client.take_at_most(500)
    with pytest.raises(nats.errors.Error):
        await frames.post(client, "a", b"x" * 501, "")
    server.close()
    await server.wait_closed()


async def test_a_server_that_takes_more_again_is_believed() -> None:
    """A reload lowers its limit, of which it tells new connections only, and another one raises it again."""
    limits, ends, clients = [1 << 20, 128 << 10, 1 << 20], asyncio.Event(), asyncio.Queue[ListeningClient]()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, takes: int) -> None:
        while line := await reader.readline():
            if line.startswith(b"PUB") and int(line.split()[-1]) > takes:
                writer.write(b"-ERR 'Maximum Payload Violation'\r\n")
                return
            if line.startswith(b"PING"):
                writer.write(b"PONG\r\n")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        told, takes = limits[0], min(limits)
        del limits[0]
        writer.write(b'INFO {"server_id":"x","version":"2.15.1","max_payload":%d,"headers":true}\r\n' % told)
        both = [asyncio.create_task(answer(reader, writer, takes)), asyncio.create_task(ends.wait())]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        ends.clear()
        for task in both:
            task.cancel()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    connection = Connection(NatsConfig(servers=[f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"]), "test")
    connection.on_connect(clients.put)
    async with asyncio.timeout(20):
        await connection.open()
        try:
            assert (await clients.get()).max_payload == 1 << 20
            await frames.post(connection.client(), "a", b"x" * (256 << 10), "")
            assert (await clients.get()).max_payload == 128 << 10
            await connection.wait_up(10)
            ends.set()
            assert (await clients.get()).max_payload == 1 << 20
        finally:
            await connection.aclose()
            server.close()
            await server.wait_closed()
