"""The size of messages to a server that accepts less than it announces."""

from __future__ import annotations

import asyncio

import nats.errors
import pytest

from bufstore.jetstream import frames
from bufstore.jetstream.client import ListeningClient, taken_bytes


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
