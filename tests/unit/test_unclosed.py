"""A program that ends without closing what it opened: `asyncio.run` cancels every task, and waits for each."""

from __future__ import annotations

import asyncio
import gc
import socket
from contextlib import suppress
from typing import Any

import pytest

from bufstore.config import NatsConfig
from bufstore.errors import LogUnavailable
from bufstore.jetstream.connection import Connection
from bufstore.postgres.connection.pool import _POOL_NAME, new_pool
from bufstore.postgres.connection.quiet import _Quiet


@pytest.mark.timeout(30)
def test_it_ends_while_connections_are_being_made() -> None:
    async def main(server: socket.socket) -> None:
        pool = new_pool(f"postgresql://u:p@127.0.0.1:{server.getsockname()[1]}/d", size=4)
        await pool.open()
        client, _ = await asyncio.get_running_loop().sock_accept(server)
        client.close()
        kept.append((await asyncio.get_running_loop().sock_accept(server))[0])  # requests get no answer

    kept: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        asyncio.run(main(server))
    kept[0].close()


@pytest.mark.timeout(30)
async def test_a_pool_that_is_closed_while_postgres_hangs_leaves_no_attempt_to_connect(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Regression: a close waited for its own attempts as long as it may, a second, and left them."""
    loop, told = asyncio.get_running_loop(), list[Any]()
    loop.set_exception_handler(lambda _, context: told.append(context))
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        pool = new_pool(f"postgresql://u:p@127.0.0.1:{server.getsockname()[1]}/d", size=4)
        await pool.open()
        silent, _ = await loop.sock_accept(server)
        await pool.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        gc.collect()
        silent.close()
    assert told == []
    assert caplog.records == [], "psycopg warns of the pool's tasks"


@pytest.mark.parametrize("fails", [False, True])
async def test_it_ends_while_the_connection_to_nats_is_made_anew(fails: bool) -> None:
    """A cancellation that comes with an answer is swallowed by nats-py, and may make the next request fail."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id":"x","version":"2.15.1","max_payload":1048576,"headers":true}\r\n')
        while line := await reader.readline():
            if line.startswith(b"PING"):
                writer.write(b"PONG\r\n")
        writer.close()

    async def swallows(_: Any) -> None:
        if again.is_set():
            return
        again.set()
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        if fails:
            raise LogUnavailable("its client was cancelled, too")

    again = asyncio.Event()
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    connection = Connection(NatsConfig(servers=[url]), "test")
    await connection.open()
    try:
        connection.on_connect(swallows)
        connection._drop(connection.client(), "for a test")
        await again.wait()
        assert connection._supervisor is not None
        connection._supervisor.cancel()
        await asyncio.wait([connection._supervisor], timeout=5)
        assert connection._supervisor.cancelled()
    finally:
        await connection.aclose()
        server.close()
        await server.wait_closed()


@pytest.mark.parametrize(
    ("name", "ours"),
    [("bufstore", True), ("bufstore-worker-1", True), ("bufstore-scheduler", True), ("bufstore-orders", False)],
)
def test_what_is_said_of_a_pool_of_an_app_is_not_kept_back(name: str, ours: bool) -> None:
    assert _Quiet(_POOL_NAME)._is_ours(name) is ours
