"""A TCP proxy that fails on demand, to put between a program and its NATS or Postgres.

    async with FaultProxy("127.0.0.1", 4222, protocol="nats") as proxy:
        store = await BufferedThreadStore.open(..., nats=f"nats://127.0.0.1:{proxy.port}")
        proxy.cut()                          # reset every connection
        proxy.refuse = True                  # refuse new connections
        proxy.to_client.delay_s = 0.2        # answers are late
        proxy.to_server.bytes_per_s = 50_000 # a narrow link
        proxy.to_client.hold()               # half-open: requests arrive, nothing comes back
        proxy.to_server.swallow = True       # requests are lost
        proxy.drop_replies = True            # publish acks, or the replies to COMMIT, are lost
        proxy.leads_to = "127.0.0.1", 4223   # the address moves: new connections go elsewhere
        proxy.heal()                         # end all faults

Each fault takes effect at once, on existing and new connections, and faults may be combined. The two directions are
independent `Flow`s. Held bytes arrive later, unchanged, as after a network outage. Swallowed bytes never arrive: a
connection that has lost some is reset when its direction works again, because a stream must not have a hole.

`drop_replies` reads the protocol, which must not be encrypted. On NATS it drops only JetStream's publish acks, and the
connection stays. On Postgres it ends the connection instead of passing on the completion of a COMMIT.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Literal, Self

from fault_proxy.replies import replies_of

_CHUNK = 64 << 10
#: The largest number of pieces in flight.
_ON_THE_WAY_MAX = 1000
#: How long a piece takes on a narrow link, in seconds.
_PIECE_S = 0.05


class Flow:
    """One direction of all connections of a proxy."""

    def __init__(self) -> None:
        #: The delay of every piece, in seconds.
        self.delay_s = 0.0
        #: Bytes per second on each connection; None: unlimited.
        self.bytes_per_s: float | None = None
        #: True when bytes are lost.
        self.swallow = False
        self._open = asyncio.Event()
        self._open.set()

    def hold(self) -> None:
        """Let nothing through until `release`, not even the end of a connection."""
        self._open.clear()

    def release(self) -> None:
        """Let held bytes through."""
        self._open.set()

    def heal(self) -> None:
        """End all faults of this direction."""
        self.delay_s, self.bytes_per_s, self.swallow = 0.0, None, False
        self.release()

    async def opened(self) -> None:
        """Wait while the direction is held."""
        await self._open.wait()

    async def arrivals(self, reader: asyncio.StreamReader) -> AsyncGenerator[bytes]:
        """Yield what arrives, after its delay. Raises OSError."""
        clock = asyncio.get_running_loop().time
        on_the_way = asyncio.Queue[tuple[float, bytes]](_ON_THE_WAY_MAX)

        async def read() -> None:
            try:
                while data := await reader.read(_CHUNK):
                    await on_the_way.put((clock() + self.delay_s, data))
                    if not self.delay_s:
                        await on_the_way.join()  # back-pressure: a slow receiver slows the sender down
            finally:
                await on_the_way.put((clock() + self.delay_s, b""))

        reading = asyncio.create_task(read())
        try:
            data = b"more"
            while data:
                due, data = await on_the_way.get()
                await asyncio.sleep(due - clock())
                await self._open.wait()
                if data:
                    yield data
                on_the_way.task_done()
            await reading
        finally:
            reading.cancel()
            await asyncio.wait([reading])


class FaultProxy:
    """Passes connections on to ``host:port`` within its ``async with`` block; see the module's text.

    Belongs to the event loop that enters it. `protocol` says which replies `drop_replies` drops.
    """

    def __init__(self, host: str, port: int, *, protocol: Literal["nats", "postgres", "raw"] = "raw") -> None:
        #: Where new connections lead to.
        self.leads_to = host, port
        self._protocol = protocol
        self._links: set[_Link] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.to_server = Flow()
        self.to_client = Flow()
        #: True when new connections are closed at once.
        self.refuse = False
        #: True when publish acks and replies to COMMIT are dropped.
        self.drop_replies = False
        #: How many replies have been dropped.
        self.replies_dropped = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._server = None

    @property
    def port(self) -> int:
        """The port on 127.0.0.1."""
        assert self._server is not None, "not entered"
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return len(self._links)

    def cut(self) -> None:
        """Reset every connection, on both sides."""
        for link in list(self._links):
            link.abort()

    def heal(self) -> None:
        """End all faults. Connections that have lost bytes are reset."""
        self.refuse = self.drop_replies = False
        for flow in (self.to_server, self.to_client):
            flow.heal()
        for link in list(self._links):
            if link.torn:
                link.abort()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            writer.transport.abort()  # also if the task was cancelled before it had the server's end

        task = asyncio.ensure_future(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(ended)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuse:
            return
        try:
            server_reader, server_writer = await asyncio.open_connection(*self.leads_to)
        except OSError:
            return  # the server is away: the client's connection is reset too
        link = _Link(writer, server_writer)
        self._links.add(link)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pass_requests(link, reader, server_writer))
                group.create_task(self._pass_replies(link, server_reader, writer))
        except* OSError:
            pass  # one side is gone, so the other is closed too
        finally:
            self._links.discard(link)
            link.abort()

    async def _pass_requests(self, link: _Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with contextlib.aclosing(self.to_server.arrivals(reader)) as arrivals:
            async for data in arrivals:
                await self._pass(link, self.to_server, data, writer)
        self._end(writer)

    async def _pass_replies(self, link: _Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        replies = replies_of(self._protocol)
        async with contextlib.aclosing(self.to_client.arrivals(reader)) as arrivals:
            async for arrived in arrivals:
                before = replies.dropped
                data = replies.feed(arrived, drop=self.drop_replies)
                self.replies_dropped += replies.dropped - before
                if data:
                    await self._pass(link, self.to_client, data, writer)
                if replies.over:
                    await writer.drain()
                    raise ConnectionResetError("in place of a reply")
        self._end(writer)

    async def _pass(self, link: _Link, flow: Flow, data: bytes, writer: asyncio.StreamWriter) -> None:
        if flow.swallow:
            link.torn = True
            return
        if link.torn:
            raise ConnectionResetError("bytes of this connection were swallowed")
        at = 0
        while flow.bytes_per_s is not None and at < len(data):
            size = max(1, int(flow.bytes_per_s * _PIECE_S))
            writer.write(data[at : at + size])
            at += size
            await asyncio.sleep(_PIECE_S)
            await flow.opened()
        if at < len(data):
            writer.write(data[at:])
        await writer.drain()

    @staticmethod
    def _end(writer: asyncio.StreamWriter) -> None:
        """Pass on the end of a side's stream."""
        with contextlib.suppress(OSError):
            writer.write_eof()


class _Link:
    """The two ends of one connection."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self._ends = client, server
        #: True when bytes were swallowed, so that nothing more may pass.
        self.torn = False

    def abort(self) -> None:
        for end in self._ends:
            end.transport.abort()
