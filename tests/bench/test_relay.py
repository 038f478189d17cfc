"""The relay of the benchmarks delivers everything, in order and with its delay."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

_ROOT = Path(__file__).parent.parent.parent
_DELAY_S = 0.02


@pytest.fixture
def relay_type(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(_ROOT))
    from bench.relay import Relay

    return Relay


@asynccontextmanager
async def _echo() -> AsyncIterator[str]:
    """Start an echo server; yields its URL."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.close()
        await writer.wait_closed()

    async with asyncio.TaskGroup() as echoes:  # before Python 3.12, a server does not wait for its connections

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            echoes.create_task(echo(reader, writer))

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            yield f"nats://me:secret@127.0.0.1:{port}/there"


async def _connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    where = urlsplit(url)
    assert where.hostname is not None
    return await asyncio.open_connection(where.hostname, where.port)


async def test_an_answer_comes_two_delays_later(relay_type: Any) -> None:
    async with _echo() as url:
        with relay_type(url, _DELAY_S) as relay:
            assert relay.url.startswith("nats://me:secret@127.0.0.1:")
            assert relay.url.endswith("/there")
            reader, writer = await _connect(relay.url)
            began = time.monotonic()
            writer.write(b"hello")
            assert await asyncio.wait_for(reader.readexactly(5), 10) == b"hello"
            assert time.monotonic() - began >= 2 * _DELAY_S
            writer.close()
            await writer.wait_closed()


async def test_what_follows_does_not_wait_for_what_went_before(relay_type: Any) -> None:
    """A hundred pieces take one delay, not a hundred; all of them arrive, in order."""
    pieces, delay_s = [bytes([number]) * 5000 for number in range(100)], 10 * _DELAY_S
    async with _echo() as url:
        with relay_type(url, delay_s) as relay:
            reader, writer = await _connect(relay.url)
            began = time.monotonic()
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(0)
            found = await asyncio.wait_for(reader.readexactly(500_000), 60)
            assert found == b"".join(pieces)
            assert time.monotonic() - began < len(pieces) * delay_s
            writer.close()
            await writer.wait_closed()


async def test_the_end_of_either_side_ends_the_other(relay_type: Any) -> None:
    async with _echo() as url:
        with relay_type(url, _DELAY_S) as relay:
            reader, writer = await _connect(relay.url)
            writer.write_eof()
            assert await asyncio.wait_for(reader.read(), 10) == b""
            writer.close()
            await writer.wait_closed()
            reader, writer = await _connect(relay.url)
            writer.write(b"hello")  # makes sure that the relay has accepted the connection
            await asyncio.wait_for(reader.readexactly(5), 10)
        # The relay is closed.
        assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()


async def test_a_server_that_is_not_there_is_seen(relay_type: Any) -> None:
    async with _echo() as url:
        gone = url
    with relay_type(gone, _DELAY_S) as relay:
        reader, writer = await _connect(relay.url)
        assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()
