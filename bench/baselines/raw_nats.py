"""The least code between a program and nats-server: bytes on a socket, one callback per message.

Only for measuring limits: it does not reconnect, and raises when the server says anything unexpected.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import unquote, urlsplit

#: How long an answer may take, how long a cluster may elect leaders, and the pause between two questions, in seconds.
ANSWER_S = 5.0
ELECTION_S = 60.0
LOOK_S = 0.05

#: Called with subject, reply subject and payload (of an HMSG: headers and payload together, and the headers' size).
OnMessage = Callable[[bytes, bytes, bytes, int], None]


class RawNats(asyncio.Protocol):
    """One connection. All answers come to ``<inbox>.<token>``."""

    def __init__(self) -> None:
        self._transport: Any = None
        self._buffer = bytearray()
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._hello = b""
        self._tokens = itertools.count(1)
        self._answers: dict[bytes, asyncio.Future[bytes]] = {}
        self._callbacks: dict[bytes, OnMessage] = {b"1": self._on_answer}
        self.inbox = f"_INBOX.raw{id(self):x}"

    @classmethod
    async def connect(cls, url: str) -> RawNats:
        """Connect and sign in."""
        where = urlsplit(url)
        _, self = await asyncio.get_running_loop().create_connection(
            cls, where.hostname or "127.0.0.1", where.port or 4222
        )
        login = {"user": unquote(where.username or ""), "pass": unquote(where.password or ""), "verbose": False,
                 "pedantic": False, "headers": True, "no_responders": True, "lang": "raw", "version": "0"}  # fmt: skip
        self._hello = f"CONNECT {json.dumps(login)}\r\nSUB {self.inbox}.* 1\r\nPING\r\n".encode()
        self.write(self._hello)
        await self._ready
        return self

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        waiting: list[asyncio.Future[Any]] = [self._ready, *self._answers.values()]
        for answer in waiting:
            if not answer.done():
                answer.set_exception(ConnectionError("the connection was lost"))

    def close(self) -> None:
        """Disconnect."""
        self._transport.close()

    def write(self, data: bytes) -> None:
        """Send protocol bytes."""
        self._transport.write(data)

    def subscribe(self, subject: str, on_message: OnMessage) -> None:
        """Call `on_message` with each message on `subject`."""
        sid = str(len(self._callbacks) + 1)
        self._callbacks[sid.encode()] = on_message
        self.write(f"SUB {subject} {sid}\r\n".encode())

    def expect(self) -> tuple[str, asyncio.Future[bytes]]:
        """Return a new reply subject, and the future of the payload that arrives there."""
        token = str(next(self._tokens))
        answer = self._answers[token.encode()] = asyncio.get_running_loop().create_future()
        return f"{self.inbox}.{token}", answer

    async def request(self, subject: str, body: dict[str, Any] | bytes = b"") -> dict[str, Any]:
        """Send a JSON request, and return its answer. Raises RuntimeError for an error."""
        payload = body if isinstance(body, bytes) else json.dumps(body).encode()
        reply, answer = self.expect()
        self.write(f"PUB {subject} {reply} {len(payload)}\r\n".encode() + payload + b"\r\n")
        return checked(await answer)

    async def ask(self, subject: str, body: dict[str, Any] | bytes = b"") -> dict[str, Any]:
        """Send a request that may be repeated, until it is answered: while a leader is elected, an answer may be lost.

        Raises RuntimeError for an error, and TimeoutError when an election takes too long.
        """
        async with asyncio.timeout(ELECTION_S):
            while True:
                with suppress(NoLeader, TimeoutError):
                    return await asyncio.wait_for(self.request(subject, body), ANSWER_S)
                await asyncio.sleep(LOOK_S)

    async def remove(self, what: str) -> None:
        """Ask for a removal, e.g. ``STREAM.DELETE.<name>``, until it is done; it may have been, and its answer lost."""
        with suppress(NotThere):
            await self.ask(f"$JS.API.{what}")

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        at = 0
        while (end := buffer.find(b"\r\n", at)) >= 0:
            words = bytes(buffer[at:end]).split()
            verb = words[0] if words else b""
            if verb in (b"MSG", b"HMSG"):
                size = int(words[-1])
                begin, stop = end + 2, end + 2 + size
                if len(buffer) < stop + 2:
                    break
                head = int(words[-2]) if verb == b"HMSG" else 0
                has_reply = len(words) == (6 if verb == b"HMSG" else 5)
                at = stop + 2
                self._callbacks[words[2]](words[1], words[3] if has_reply else b"", bytes(buffer[begin:stop]), head)
                continue
            at = end + 2
            if verb == b"PING":
                self.write(b"PONG\r\n")
            elif verb == b"PONG" and not self._ready.done():
                self._ready.set_result(None)
            elif verb == b"-ERR":
                raise RuntimeError(b" ".join(words).decode())
        del buffer[:at]

    def _on_answer(self, subject: bytes, reply: bytes, data: bytes, head: int) -> None:
        answer = self._answers.pop(subject.rpartition(b".")[2], None)
        if answer is not None and not answer.done():
            answer.set_result(data[head:])


class NoLeader(RuntimeError):
    """Nobody answers now, as while a leader is elected."""


class NotThere(RuntimeError):
    """There is no such stream or consumer."""


_ERRORS = {503: NoLeader, 404: NotThere}


def checked(answer: bytes) -> dict[str, Any]:
    """Return JetStream's answer. Raises RuntimeError for an error."""
    found: dict[str, Any] = json.loads(answer or b'{"error": {"code": 503, "description": "nobody answers"}}')
    if "error" in found:
        raise _ERRORS.get(found["error"].get("code"), RuntimeError)(str(found["error"]))
    return found


def bare_stream(name: str, **more: Any) -> dict[str, Any]:
    """Return the configuration of a file stream of the subjects ``<name>.>``."""
    return {"name": name, "subjects": [f"{name}.>"], "storage": "file", "num_replicas": 1, "max_bytes": -1, **more}
