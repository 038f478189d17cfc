"""Reads of a stream with replicas, one of which does not answer: a node that hangs, before the others notice it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import nats
import nats.errors
import pytest
from nats.aio.msg import Msg

from bufstore import LogUnavailable, NatsConfig
from bufstore.embedded import Servers
from bufstore.jetstream import direct_gets
from bufstore.jetstream.connection import Connection
from bufstore.jetstream.stream import NatsStream
from fault_proxy.proxy import FaultProxy
from helpers import eventually, fresh


class Copies:
    """Answers direct gets of a stream "s", in place of nats-server: each but the first `silent` ones."""

    def __init__(self, silent: int, *, begun: int = 0, then: bytes = b"204 EOB") -> None:
        """`begun`: how many messages of the answer come although the copy is silent. `then`: what ends an answer."""
        self.asked, self._silent, self._begun, self._then = 0, silent, begun, then

    @asynccontextmanager
    async def answering(self, servers: Servers, api: str) -> AsyncIterator[None]:
        client = await nats.connect(servers.nats.url)
        await client.subscribe(f"{api}.DIRECT.GET.s", cb=self._answer)
        await client.flush()
        try:
            yield
        finally:
            await client.close()

    async def _answer(self, msg: Msg) -> None:
        self.asked += 1
        silent = self.asked <= self._silent
        for seq in range(1, 1 + (self._begun if silent else 3 if self._then.startswith(b"204") else 0)):
            headers = {"Nats-Stream": "s", "Nats-Subject": "a", "Nats-Sequence": str(seq), "Nats-Num-Pending": "0"}
            await msg._client.publish(msg.reply, b"x", headers=headers)
        if not silent:
            end = b"NATS/1.0 %s\r\n\r\n" % self._then  # which nats-py does not send as headers
            await msg._client._send_command(b"HPUB %s %d %d\r\n%s\r\n" % (msg.reply.encode(), len(end), len(end), end))
            await msg._client.flush()


@asynccontextmanager
async def stream_of(url: str, api: str, replicas: int) -> AsyncIterator[NatsStream]:
    connection = Connection(NatsConfig(servers=[url], api_prefix=api), "test")
    stream = NatsStream(connection, api, "s", replicas)
    await connection.open()
    try:
        yield stream
    finally:
        await connection.aclose()


@pytest.mark.parametrize("begun", [0, 2])
async def test_a_read_that_a_hung_copy_leaves_unanswered_is_asked_of_another(servers: Servers, begun: int) -> None:
    """Regression: until the nodes had noticed, after more than a minute, many reads ended in a timeout."""
    api, copies = fresh("api"), Copies(2, begun=begun)
    async with copies.answering(servers, api), stream_of(servers.nats.url, api, 3) as stream:
        messages = await stream.read("a", 0, 30.0)
    assert [m.seq for m in messages] == [1, 2, 3]
    assert copies.asked == 3


async def test_a_single_server_is_asked_once(servers: Servers) -> None:
    api, copies = fresh("api"), Copies(1)
    async with copies.answering(servers, api), stream_of(servers.nats.url, api, 1) as stream:
        with pytest.raises(LogUnavailable, match="did not answer a read in time"):
            await stream.read("a", 0, 1.0)
    assert copies.asked == 1


async def test_an_answer_that_may_be_on_its_way_is_not_asked_for_again(servers: Servers) -> None:
    """A link that is slow would carry it twice, and be slower still."""
    api, copies, server = fresh("api"), Copies(0), servers.nats
    async with (
        FaultProxy("127.0.0.1", server.port, protocol="nats") as proxy,
        copies.answering(servers, api),
        stream_of(server.url.replace(f":{server.port}", f":{proxy.port}"), api, 3) as stream,
    ):
        proxy.to_client.hold()
        reading = asyncio.create_task(stream.read("a", 0, 30.0))
        await asyncio.wait([reading], timeout=2.0)  # the time in which another copy would be asked twice
        proxy.heal()
        assert [m.seq for m in await reading] == [1, 2, 3]
    assert copies.asked == 1


async def test_copies_that_are_slow_get_no_more_to_do_by_that(servers: Servers) -> None:
    """Regression: each read was asked again, so that copies with a queue of half a second never came to its end."""
    api, copies = fresh("api"), Copies(1000)
    async with copies.answering(servers, api), stream_of(servers.nats.url, api, 3) as stream:
        reads = await asyncio.gather(*(stream.read("a", 0, 1.2) for _ in range(20)), return_exceptions=True)
    assert {type(read) for read in reads} == {LogUnavailable}
    assert copies.asked == 21, "one of them asks another copy"


async def test_once_a_later_read_is_answered_all_that_wait_ask_another_copy(servers: Servers) -> None:
    api, copies = fresh("api"), Copies(10)

    async def all_asked() -> bool:
        return copies.asked >= 10

    async with copies.answering(servers, api), stream_of(servers.nats.url, api, 3) as stream:
        reads = [asyncio.create_task(stream.read("a", 0, 30.0)) for _ in range(10)]
        await eventually(all_asked)
        await stream.read("a", 0, 30.0)
        assert [len(read) for read in await asyncio.gather(*reads)] == [3] * 10
    assert copies.asked == 21


async def test_an_answer_counts_although_the_answer_to_the_ping_does_not_come(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: on a slow link, on which that one comes last, all reads ended in a timeout beside their answers."""
    api, pinged = fresh("api"), asyncio.Event()

    class Late(Copies):
        async def _answer(self, msg: Msg) -> None:
            await pinged.wait()
            await super()._answer(msg)

    async def unanswered(client: object, timeout_s: float) -> None:
        pinged.set()
        await asyncio.sleep(timeout_s)
        raise nats.errors.FlushTimeoutError

    monkeypatch.setattr(direct_gets, "round_trip", unanswered)
    copies = Late(0)
    async with copies.answering(servers, api), stream_of(servers.nats.url, api, 3) as stream:
        assert [m.seq for m in await stream.read("a", 0, 30.0)] == [1, 2, 3]


async def test_what_one_copy_has_sent_counts_although_another_cannot_answer(servers: Servers) -> None:
    api, copies = fresh("api"), Copies(1, begun=2, then=b"408 Bad Request")
    async with copies.answering(servers, api), stream_of(servers.nats.url, api, 3) as stream:
        part = await stream.part("a", 0, 30.0, 10)
    assert ([m.seq for m in part.messages], copies.asked) == ([1, 2], 2)


async def test_with_a_client_whose_ping_must_not_be_given_up_a_read_is_asked_once(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_gets.frames, "supported", False)
    api, copies = fresh("api"), Copies(1)
    async with copies.answering(servers, api), stream_of(servers.nats.url, api, 3) as stream:
        with pytest.raises(LogUnavailable, match="did not answer a read in time"):
            await stream.read("a", 0, 1.0)
        assert [m.seq for m in await stream.read("a", 0, 30.0)] == [1, 2, 3]
    assert copies.asked == 2
