"""Savers as processes open, configure, share and close them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bufstore.embedded import Servers
from bufstore.errors import Closed
from helpers import fresh
from langgraph_savers import META, Place, checkpoint, config


@pytest.fixture
def place(servers: Servers) -> Place:
    return Place(servers)


async def test_who_waits_for_a_flush_hears_of_the_close(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    async with place.saver(flusher=False) as saver:
        at, asked = config(fresh()), [asyncio.Event() for _ in range(2)]
        await saver.aput(at, checkpoint({"a": "1"}, {"a": [1]}), META, {"a": "1"})
        shared, waiting = saver.engine.buffer.shared, list(asked)
        call_owner = shared.call_owner

        async def noted(partition: int) -> None:
            await call_owner(partition)
            if waiting:
                waiting.pop().set()

        async def listed() -> list[Any]:
            return [item async for item in saver.alist(at)]

        monkeypatch.setattr(shared, "call_owner", noted)
        calls = [asyncio.ensure_future(call) for call in (saver.force_flush(), listed())]
        async with asyncio.timeout(10):
            await asyncio.gather(*(each.wait() for each in asked))
            await saver.aclose()
            for call in calls:
                with pytest.raises(Closed):
                    await call
