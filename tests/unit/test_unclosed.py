"""A program that ends without closing what it opened: `asyncio.run` cancels every task, and waits for each."""

from __future__ import annotations

import asyncio
import socket

import pytest

from bufstore.postgres.connection.pool import new_pool


@pytest.mark.timeout(30)
def test_it_ends_while_connections_are_being_made() -> None:
    async def main(server: socket.socket) -> None:
        pool = new_pool(f"postgresql://u:p@127.0.0.1:{server.getsockname()[1]}/d", size=4)
        await pool.open()
        client, _ = await asyncio.get_running_loop().sock_accept(server)
        client.close()
        kept.append((await asyncio.get_running_loop().sock_accept(server))[0])  # what asks it hears nothing

    kept: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        asyncio.run(main(server))
    kept[0].close()
