"""Savers as processes open, configure, share and close them."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer

from bufstore import BufferConfig
from bufstore.embedded import Servers
from bufstore.errors import Closed
from bufstore.langgraph import BufferedSaver
from helpers import elsewhere, fresh, query
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


class Reversed:
    """What encrypts: in this test, it writes bytes in reverse."""

    def encrypt(self, plaintext: bytes) -> tuple[str, bytes]:
        return "reversed", plaintext[::-1]

    def decrypt(self, ciphername: str, ciphertext: bytes) -> bytes:
        return ciphertext[::-1]


class Encrypting(BufferedSaver):
    """A subclass that brings its serializer along."""

    serde = EncryptedSerializer(Reversed())


@pytest.mark.parametrize("how", ["set", "set on a copy", "subclass"])
def test_the_serializer_that_a_blocking_saver_has_is_the_one_that_works(place: Place, how: str) -> None:
    kind = Encrypting if how == "subclass" else BufferedSaver
    opened = saver = kind.open(place.store(), nats=place.nats, config=BufferConfig.fitting(place.log))
    try:
        if how != "subclass":
            saver = copy.copy(opened) if how == "set on a copy" else opened
            saver.serde = EncryptedSerializer(Reversed())
        at = saver.put(config(fresh()), checkpoint({"a": "1"}, {"a": ["secret"]}), META, {"a": "1"})
        found = saver.get_tuple(at)
        assert found is not None
        assert found.checkpoint["channel_values"] == {"a": ["secret"]}
        assert isinstance(opened.serde, EncryptedSerializer) is (how != "set on a copy")
    finally:
        opened.close()
    ((stored,),) = asyncio.run(query(place.dsn, f"SELECT type FROM {place.schema}.checkpoint_blobs"))
    assert stored.endswith("+reversed")


async def test_while_writes_wait_for_the_log_a_call_on_another_loop_holds_up_nobody(place: Place) -> None:
    async with place.saver() as saver:

        async def put() -> None:
            await saver.aput(config(fresh()), checkpoint({"a": "1"}, {"a": [1]}), META, {"a": "1"})

        (lane,) = saver.engine.all
        waits = lane.backlog.enter(lane.backlog.bytes_max)
        await elsewhere(put)
        lane.backlog.leave(waits)
        async with asyncio.timeout(5):
            await put()
