"""A slow link: a process that connects through it is farther away from its servers than others."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import deque
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

_CHUNK = 256 << 10
#: A connection that takes no data for this many seconds is closed.
_TIMEOUT_S = 10.0


class Relay:
    """Passes TCP connections on to the server of `url`; a context manager.

    Each piece arrives `delay_s` after it was sent, in both directions, however many follow: the link is long, not
    narrow. One thread does it with `select`, which waits with microsecond precision, unlike an event loop.
    """

    def __init__(self, url: str, delay_s: float) -> None:
        self._parts = urlsplit(url)
        self._delay_s = delay_s
        #: The other end of each connection, and the connections whose stream has not ended.
        self._peers: dict[socket.socket, socket.socket] = {}
        self._read: set[socket.socket] = set()
        #: When each connection gets which bytes, in this order; empty bytes: the end of its stream.
        self._due: deque[tuple[float, socket.socket, bytes]] = deque()
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)

    def __enter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._stop, self._stopped = socket.socketpair()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.close()
        self._thread.join(2 * _TIMEOUT_S)
        self._listener.close()

    @property
    def url(self) -> str:
        """The server's URL through this relay."""
        login, at, _ = self._parts.netloc.rpartition("@")
        port = self._listener.getsockname()[1]
        return self._parts._replace(netloc=f"{login}{at}127.0.0.1:{port}").geturl()

    def _run(self) -> None:
        try:
            while True:
                wait = max(self._due[0][0] - time.monotonic(), 0.0) if self._due else None
                ready, _, _ = select.select([self._stopped, self._listener, *self._read], [], [], wait)
                if self._stopped in ready:
                    return
                for connection in ready:
                    if connection is self._listener:
                        self._join(connection.accept()[0])
                    else:
                        self._take(connection)
                while self._due and self._due[0][0] <= time.monotonic():
                    _, connection, data = self._due.popleft()
                    self._give(connection, data)
        finally:
            for connection in self._peers:
                connection.close()
            self._stopped.close()

    def _join(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection((self._parts.hostname, self._parts.port), _TIMEOUT_S)
        except OSError:
            client.close()
            return
        self._peers |= {client: server, server: client}
        for connection in (client, server):
            connection.settimeout(_TIMEOUT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._read.add(connection)

    def _take(self, connection: socket.socket) -> None:
        """Read the available data, to be passed on later."""
        try:
            data = connection.recv(_CHUNK)
        except OSError:
            data = b""
        self._due.append((time.monotonic() + self._delay_s, self._peers[connection], data))
        if not data:
            self._read.discard(connection)

    def _give(self, connection: socket.socket, data: bytes) -> None:
        if connection not in self._peers:
            return  # both ends are closed
        try:
            connection.sendall(data)
            ended = not data
        except OSError:
            ended = True
        if ended:
            peer = self._peers.pop(connection)
            del self._peers[peer]
            for end in (connection, peer):
                self._read.discard(end)
                end.close()
