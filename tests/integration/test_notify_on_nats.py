"""Notifiers on NATS: what a listen that fails leaves behind, and what NATS does not permit."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import nats
import pytest
from nats.aio.client import Client

from bufstore.embedded import NatsServer
from bufstore.errors import Unavailable
from bufstore.notify import Hints, NatsNotifier
from bufstore.notify.nats import NatsBroker
from bufstore.notify.protocol import Event


@pytest.fixture
def prefix() -> str:
    return f"t{secrets.token_hex(4)}"


@pytest.fixture
async def hanging(tmp_path: Path) -> AsyncIterator[tuple[NatsServer, Client]]:
    """A server, and a client of an app's, connected to it."""
    server = NatsServer(tmp_path)
    server.start()
    try:
        client = await nats.connect(server.url)
        yield server, client
        await client.close()
    finally:
        server.stop()


async def test_a_listen_that_fails_leaves_nothing_on_an_apps_client(
    hanging: tuple[NatsServer, Client], prefix: str
) -> None:
    server, client = hanging
    async with await NatsNotifier.open(client, prefix=prefix, hints=Hints.NONE, timeout_s=0.2) as notifier:
        broker = NatsBroker(client, prefix, None, owned=False, timeout_s=60)
        server.pause()
        try:
            for _ in range(3):
                with pytest.raises(Unavailable):
                    await notifier.listen_scheduled(["kind"], print)
            waiting = asyncio.create_task(broker.subscribe(Event.COMPLETED, print))
            while not client._subs:  # noqa: ASYNC110
                await asyncio.sleep(0)
            waiting.cancel()
            with suppress(asyncio.CancelledError):
                await waiting
            assert client._subs == {}
        finally:
            server.resume()
        heard = asyncio.Event()
        await notifier.listen_completed("work", heard.set)
        await notifier.notify_completed("work")
        async with asyncio.timeout(10):
            await heard.wait()
