"""Each fault of the fault proxy takes effect, and healing ends it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import struct
import time
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bufstore import Consistency, PostgresThreadStore
from bufstore.embedded import Servers
from conftest import Deployment
from fault_proxy.proxy import FaultProxy, Flow
from fault_proxy.replies import NatsReplies, PostgresReplies
from helpers import eventually, fresh, query, run_of, said
from unit.fake_log import run


@pytest.fixture
async def echo() -> AsyncIterator[FaultProxy]:
    """A proxy in front of an echo server."""
    open_ends = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_ends.add(writer)
        with contextlib.suppress(OSError):
            while data := await reader.read(1000):
                writer.write(data)
                await writer.drain()
            writer.write_eof()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with FaultProxy("127.0.0.1", server.sockets[0].getsockname()[1]) as proxy:
        yield proxy
    server.close()
    for end in open_ends:
        end.close()


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def say(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def hear(self, count: int) -> bytes:
        async with asyncio.timeout(10):
            return await self.reader.readexactly(count)

    async def deaf(self) -> bool:
        """True when nothing arrives for a moment."""
        try:
            async with asyncio.timeout(0.1):
                await self.reader.readexactly(1)
        except TimeoutError:
            return True
        return False

    async def ended(self) -> bool:
        try:
            async with asyncio.timeout(10):
                return await self.reader.read() == b""
        except ConnectionError:
            return True


@contextlib.asynccontextmanager
async def client_of(proxy: FaultProxy) -> AsyncIterator[Client]:
    client = Client(*await asyncio.open_connection("127.0.0.1", proxy.port))
    try:
        yield client
    finally:
        client.writer.close()
        with contextlib.suppress(OSError):
            await client.writer.wait_closed()


async def test_passes_everything_and_the_end(echo: FaultProxy) -> None:
    async with client_of(echo) as client:
        await client.say(b"x" * 300_000)
        assert await client.hear(300_000) == b"x" * 300_000
        assert echo.connections == 1
        client.writer.write_eof()
        assert await client.ended()

    async def nobody() -> bool:
        return echo.connections == 0

    await eventually(nobody)


async def test_a_cut_ends_what_is_there_and_lets_in_what_comes(echo: FaultProxy) -> None:
    async with client_of(echo) as client:
        await client.say(b"a")
        assert await client.hear(1) == b"a"
        echo.cut()
        assert await client.ended()
    async with client_of(echo) as client:
        await client.say(b"b")
        assert await client.hear(1) == b"b"


async def test_refuses_new_connections_only(echo: FaultProxy) -> None:
    async with client_of(echo) as old:
        await old.say(b"a")
        assert await old.hear(1) == b"a"
        echo.refuse = True
        async with client_of(echo) as new:
            assert await new.ended()
        await old.say(b"b")
        assert await old.hear(1) == b"b"
        echo.heal()
        async with client_of(echo) as new:
            await new.say(b"c")
            assert await new.hear(1) == b"c"


@pytest.mark.parametrize("direction", ["to_server", "to_client"])
async def test_what_is_held_arrives_later(echo: FaultProxy, direction: str) -> None:
    async with client_of(echo) as client:
        getattr(echo, direction).hold()
        await client.say(b"abc")
        assert await client.deaf()
        echo.heal()
        assert await client.hear(3) == b"abc"


@pytest.mark.parametrize("direction", ["to_server", "to_client"])
async def test_what_is_swallowed_never_arrives_and_ends_the_connection(echo: FaultProxy, direction: str) -> None:
    async with client_of(echo) as client, client_of(echo) as other:
        await other.say(b"a")
        assert await other.hear(1) == b"a"
        getattr(echo, direction).swallow = True
        await client.say(b"abc")
        assert await client.deaf()
        echo.heal()
        assert await client.ended()
        await other.say(b"b")
        assert await other.hear(1) == b"b"


async def test_delays_and_narrow_links_take_their_time(echo: FaultProxy) -> None:
    async with client_of(echo) as client:
        echo.to_client.delay_s = 0.2
        began = time.monotonic()
        await client.say(b"a")
        assert await client.hear(1) == b"a"
        assert time.monotonic() - began >= 0.2
        echo.heal()
        echo.to_server.bytes_per_s = 10_000
        began = time.monotonic()
        await client.say(b"a" * 3000)
        assert await client.hear(3000)
        assert time.monotonic() - began >= 0.25


def test_what_is_delayed_does_not_hold_up_what_comes_behind_it() -> None:
    """In virtual time, because on a machine that stands still everything comes at once."""

    async def main() -> None:
        loop, flow, reader = asyncio.get_running_loop(), Flow(), asyncio.StreamReader()
        flow.delay_s = 0.5

        async def say() -> None:
            for _ in range(10):
                reader.feed_data(b"a")
                await asyncio.sleep(0.02)
            reader.feed_eof()

        saying = asyncio.create_task(say())
        heard = [(round(loop.time(), 2), data) async for data in flow.arrivals(reader)]
        assert heard == [(round(0.5 + 0.02 * n, 2), b"a") for n in range(10)]
        await saying

    run(main())


async def test_a_server_that_is_not_there_is_a_closed_connection() -> None:
    async with FaultProxy("127.0.0.1", 1) as proxy, client_of(proxy) as client:
        assert await client.ended()


_ACK = b'{"stream":"LOG","seq":17}'
_STREAM = [
    b'INFO {"server_id":"x"}\r\n',
    b"PONG\r\n",
    b"MSG _INBOX.a.1 1 %d\r\n%s\r\n" % (len(_ACK), _ACK),
    b"MSG other 2 5\r\na\r\nbc\r\n",
    b"HMSG _INBOX.b 3 12 14\r\nNATS/1.0\r\n\r\nhi\r\n",
    b"PING\r\n",
]


@given(st.lists(st.integers(0, 200), max_size=8), st.booleans())
def test_publish_acks_are_found_however_the_bytes_are_cut(cuts: list[int], drop: bool) -> None:
    whole, replies = b"".join(_STREAM), NatsReplies()
    edges = [0, *sorted(min(c, len(whole)) for c in cuts), len(whole)]
    passed = b"".join(replies.feed(whole[a:b], drop=drop) for a, b in itertools.pairwise(edges))
    assert passed == b"".join(m for m in _STREAM if not (drop and _ACK in m))
    assert replies.dropped == drop


def test_what_is_not_nats_passes() -> None:
    replies = NatsReplies()
    assert replies.feed(b"\x16\x03\x01\r\nMSG a 1 2\r\n", drop=True) == b"\x16\x03\x01\r\nMSG a 1 2\r\n"
    assert replies.feed(_ACK, drop=True) == _ACK


def _framed(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack("!i", len(body) + 4) + body


@given(st.lists(st.integers(0, 100), max_size=8), st.booleans())
def test_the_reply_to_a_commit_is_found_however_the_bytes_are_cut(cuts: list[int], drop: bool) -> None:
    before = b"N" + _framed(b"R", b"\0\0\0\0") + _framed(b"N", b"a notice\0") + _framed(b"C", b"INSERT 0 1\0")
    whole = before + _framed(b"C", b"COMMIT\0") + _framed(b"Z", b"I")
    replies = PostgresReplies()
    edges = [0, *sorted(min(c, len(whole)) for c in cuts), len(whole)]
    passed = b"".join(replies.feed(whole[a:b], drop=drop) for a, b in itertools.pairwise(edges))
    assert passed == (before if drop else whole)
    assert (replies.over, replies.dropped) == (drop, drop)


def test_an_encrypted_connection_to_postgres_passes() -> None:
    replies = PostgresReplies()
    assert replies.feed(b"S", drop=True) == b"S"
    assert replies.feed(_framed(b"C", b"COMMIT\0"), drop=True) == _framed(b"C", b"COMMIT\0")


async def test_a_lost_publish_ack_is_not_noticed_by_the_caller(deployment: Deployment, servers: Servers) -> None:
    url = urlsplit(servers.nats.url)
    assert url.hostname is not None
    assert url.port is not None
    async with FaultProxy(url.hostname, url.port, protocol="nats") as proxy:
        nats = servers.nats.url.replace(f":{url.port}", f":{proxy.port}")
        thread_id = fresh()
        async with deployment.store(nats=nats) as store:
            await store.checkpoint(thread_id, [said(0)], run_of(thread_id))
            proxy.drop_replies = True
            writing = asyncio.create_task(store.checkpoint_append(thread_id, [said(1)], run_of(thread_id)))

            async def lost() -> bool:
                return bool(proxy.replies_dropped)

            await eventually(lost)
            assert not writing.done()
            proxy.heal()
            proxy.cut()
            await writing
            assert await store.load_messages(thread_id) == [said(0), said(1)]
            assert len(await store.buffer.log.after(store.buffer.subjects.of(thread_id), 0)) == 2


async def test_a_commit_without_a_reply_is_applied_once(deployment: Deployment, servers: Servers) -> None:
    url = urlsplit(servers.postgres.dsn)
    assert url.hostname is not None
    assert url.port is not None
    async with FaultProxy(url.hostname, url.port, protocol="postgres") as proxy:
        dsn = servers.postgres.dsn.replace(f":{url.port}", f":{proxy.port}")
        inner = PostgresThreadStore(dsn, schema=deployment.name, pool_size=4)
        thread_id = fresh()
        async with deployment.store(inner) as store:
            await store.checkpoint(thread_id, [said(0)], run_of(thread_id))
            await store.force_flush(thread_id)
            proxy.drop_replies = True
            await store.checkpoint_append(thread_id, [said(1)], run_of(thread_id))

            async def lost() -> bool:
                return bool(proxy.replies_dropped)

            async def stored() -> bool:
                """The first reply that is dropped may belong to another transaction of the flusher."""
                sql = f"SELECT count(*) FROM {deployment.name}.messages WHERE thread_id = %s"
                return await query(servers.postgres.dsn, sql, thread_id) == [(2,)]

            await eventually(lost)
            await eventually(stored)
            proxy.heal()
            await store.force_flush(thread_id)
            found = await store.load_messages(thread_id, consistency=Consistency.EVENTUAL)
            assert found == [said(0), said(1)]


async def test_a_connection_that_does_not_reach_the_server_yet_ends_with_the_proxy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: nobody closed it, which pytest held against whichever test ran when the collector found it."""
    connect, asked = asyncio.open_connection, asyncio.Event()

    async def hangs(*_: object) -> None:
        asked.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio, "open_connection", hangs)
    async with FaultProxy("127.0.0.1", 1) as proxy:
        reader, writer = await connect("127.0.0.1", proxy.port)
        await asked.wait()
    assert await asyncio.wait_for(reader.read(), 10) == b""
    writer.close()
    await writer.wait_closed()
