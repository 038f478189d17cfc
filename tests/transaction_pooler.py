"""A small Postgres pooler in transaction mode that also counts round trips and loses replies.

Many clients share few server connections. A client has a connection from its first message until the server is idle
again (ReadyForQuery with status I). Then the pooler runs ``DISCARD ALL`` on it, and the client that has waited longest
gets it. So everything that a client leaves in its session is lost. Or, as PgBouncer does by default, all that stays
there, the connection that was used last is used next, and what it hears in between reaches nobody. When the server ends
a connection, the client gets what the server said, and behind it an error of the pooler, as PgBouncer does it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from contextlib import suppress
from typing import Self

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

_PARAMETERS = (
    "server_version",
    "server_encoding",
    "client_encoding",
    "DateStyle",
    "IntervalStyle",
    "TimeZone",
    "integer_datetimes",
    "standard_conforming_strings",
    "in_hot_standby",
)
#: What PgBouncer says to the client of a connection that the server has ended.
_ENDED = "server conn crashed?"
_SSL_REQUEST, _GSS_REQUEST, _CANCEL_REQUEST = 80877103, 80877104, 80877102


class _Server:
    """One connection to Postgres. libpq signs in; then the pooler uses the socket."""

    def __init__(
        self,
        libpq: psycopg.AsyncConnection,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.libpq = libpq
        self.reader = reader
        self.writer = writer
        self.parameters = {name: libpq.pgconn.parameter_status(name.encode()) for name in _PARAMETERS}

    @classmethod
    async def connect(cls, dsn: str) -> Self:
        libpq = await psycopg.AsyncConnection.connect(dsn, sslmode="disable", autocommit=True)
        connected = socket.socket(fileno=os.dup(libpq.pgconn.socket))
        return cls(libpq, *await asyncio.open_connection(sock=connected))

    async def discard_all(self) -> None:
        self.writer.write(b"Q" + struct.pack("!i", 4 + len(b"DISCARD ALL\0")) + b"DISCARD ALL\0")
        while (await _message(self.reader))[:1] != b"Z":
            pass

    async def close(self) -> None:
        self.writer.close()
        with suppress(OSError):
            await self.writer.wait_closed()
        await self.libpq.close()


class TransactionPooler:
    """Listens on ``dsn`` within its ``async with`` block."""

    def __init__(self, upstream: str, *, servers: int = 2, discards: bool = True, standby: bool | None = None) -> None:
        """`discards`: whether what clients leave in sessions is discarded.

        `standby`: what clients are told of the server, whatever it is: PgBouncer tells what its first session was told.
        """
        self._upstream = upstream
        self._size = servers
        self._discards = discards
        self._told = {} if standby is None else {"in_hot_standby": b"on" if standby else b"off"}
        self._idle: asyncio.Queue[_Server] = asyncio.Queue() if discards else asyncio.LifoQueue()
        self._clients: set[asyncio.Task[None]] = set()
        #: How often a client waited for the server: the number of ReadyForQuery messages passed on.
        self.round_trips = 0
        #: Names of prepared statements that clients made, which a pooler in transaction mode cannot keep.
        self.prepared: list[bytes] = []
        #: How many replies to drop, after the server has done its work; their clients are disconnected.
        self.replies_to_lose = 0
        #: What clients are told in place of a server connection, before they are disconnected.
        self.refuses_with: str | None = None
        #: What clients are told that sign in, if they are refused.
        self.refuses_logins_with: str | None = None
        #: Cleared, it lets clients that are connected wait, as PgBouncer does after PAUSE.
        self.runs = asyncio.Event()
        self.runs.set()

    async def __aenter__(self) -> Self:
        for _ in range(self._size):
            self._idle.put_nowait(await _Server.connect(self._upstream))
        self._listener = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        port = self._listener.sockets[0].getsockname()[1]
        where = {"host": "127.0.0.1", "port": port, "sslmode": "disable", "password": None}
        self.dsn = make_conninfo(**(conninfo_to_dict(self._upstream) | where))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._listener.close()
        for client in self._clients:
            client.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)
        while not self._idle.empty():
            await self._idle.get_nowait().close()

    def reconnect(self) -> None:
        """Tell clients what the server says of itself, as PgBouncer does after RECONNECT."""
        self._told = {}

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._clients.add(task)
        task.add_done_callback(self._clients.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if await self._greet(reader, writer):
                while await self._transaction(reader, writer):
                    pass
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        while True:
            (size,) = struct.unpack("!i", await reader.readexactly(4))
            (code,) = struct.unpack("!i", (await reader.readexactly(size - 4))[:4])
            if code == _CANCEL_REQUEST:
                return False
            if code not in (_SSL_REQUEST, _GSS_REQUEST):
                break
            writer.write(b"N")
        if self.refuses_logins_with is not None:
            writer.write(_error(self.refuses_logins_with))
            return False
        server = await self._idle.get()
        self._idle.put_nowait(server)
        writer.write(_framed(b"R", struct.pack("!i", 0)))
        for name, value in (server.parameters | self._told).items():
            if value is not None:
                writer.write(_framed(b"S", name.encode() + b"\0" + value + b"\0"))
        writer.write(_framed(b"K", struct.pack("!ii", 1, 1)) + _framed(b"Z", b"I"))
        return True

    async def _transaction(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Pass on one transaction; False when the client has ended its session."""
        message = await _message(reader)
        if message[:1] == b"X":
            return False
        await self.runs.wait()
        if self.refuses_with is not None:
            writer.write(_error(self.refuses_with))
            return False
        server = await self._idle.get()
        clean = False
        try:
            await self._relay(message, reader, writer, server)
            if self._discards:
                await server.discard_all()
            clean = True
        finally:
            if not clean:
                await server.close()
                server = await _Server.connect(self._upstream)
            self._idle.put_nowait(server)
        return True

    async def _relay(
        self, message: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, server: _Server
    ) -> None:
        awaited = 0  # ReadyForQuery messages that the server still owes

        async def to_server() -> None:
            nonlocal message, awaited
            while True:
                kind = message[:1]
                if kind == b"P" and message[5:6] != b"\0":
                    self.prepared.append(message[5:].split(b"\0", 1)[0])
                awaited += kind in (b"Q", b"S")
                server.writer.write(message)
                await server.writer.drain()
                message = await _message(reader)

        sending = asyncio.ensure_future(to_server())
        try:
            while True:
                receiving = asyncio.ensure_future(_message(server.reader))
                await asyncio.wait((receiving, sending), return_when=asyncio.FIRST_COMPLETED)
                if not receiving.done():
                    receiving.cancel()
                    sending.result()  # raises when the client is gone
                try:
                    reply = receiving.result()
                except asyncio.IncompleteReadError:
                    writer.write(_error(_ENDED))
                    raise
                if reply[:1] == b"A":  # a notification, which the session may have heard before this client had it
                    continue
                ready = reply[:1] == b"Z"
                awaited -= ready
                if ready and self.replies_to_lose:
                    self.replies_to_lose -= 1
                    writer.transport.abort()
                    raise ConnectionResetError
                if not self.replies_to_lose:
                    writer.write(reply)
                    await writer.drain()
                if ready:
                    self.round_trips += 1
                    if awaited == 0 and reply[5:6] == b"I":
                        return
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)


async def _message(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readexactly(5)
    (size,) = struct.unpack("!i", head[1:])
    return head + await reader.readexactly(size - 4)


def _framed(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack("!i", len(body) + 4) + body


def _error(text: str) -> bytes:
    return _framed(b"E", b"SFATAL\0VFATAL\0C08P01\0M" + text.encode() + b"\0\0")
