"""Finds the replies that can be dropped in a server's bytes: publish acks of NATS, completions of Postgres' COMMIT.

Bytes come in as the network cuts them and go out as whole protocol messages. A connection that speaks another protocol
(TLS, for example) passes unchanged. No I/O here.
"""

from __future__ import annotations

import struct
from typing import Protocol

_CRLF = b"\r\n"
_LINE_MAX = 64 << 10


class Replies(Protocol):
    """Cuts one connection's bytes into messages and drops replies."""

    #: True when the connection must end, because nothing may follow a dropped reply.
    over: bool
    #: How many replies have been dropped.
    dropped: int

    def feed(self, data: bytes, *, drop: bool) -> bytes:
        """Return the bytes that may pass, of `data` and kept ones; with `drop`, without the replies to be dropped."""
        ...


class AnyReplies:
    """An unknown protocol: everything passes."""

    over = False
    dropped = 0

    def feed(self, data: bytes, *, drop: bool) -> bytes:
        """See `Replies`."""
        return data


class NatsReplies:
    """Drops JetStream's publish acks only: the connection goes on, and the publisher waits in vain."""

    over = False

    def __init__(self) -> None:
        self.dropped = 0
        self._rest = b""
        self._opaque = False

    def feed(self, data: bytes, *, drop: bool) -> bytes:
        """See `Replies`."""
        if self._opaque:
            return data
        data = self._rest + data
        passed, at = [], 0
        while True:
            size = self._message_size(data, at)
            if size is None or at + size > len(data):
                break
            if not size:
                self._opaque = True
                passed.append(data[at:])
                at = len(data)
                break
            message = data[at : at + size]
            if drop and _is_publish_ack(message):
                self.dropped += 1
            else:
                passed.append(message)
            at += size
        self._rest = data[at:]
        return b"".join(passed)

    def _message_size(self, data: bytes, at: int) -> int | None:
        """Return the size of the message at `at`; None if its first line is incomplete, 0 if it is not a message."""
        end = data.find(_CRLF, at)
        if end < 0:
            return None if len(data) - at <= _LINE_MAX else 0
        line = data[at:end]
        if line.startswith((b"MSG ", b"HMSG ")):
            return end - at + len(_CRLF) + int(line.rpartition(b" ")[2]) + len(_CRLF)
        known = line.startswith((b"INFO", b"PING", b"PONG", b"+OK", b"-ERR"))
        return end - at + len(_CRLF) if known else 0


def _is_publish_ack(message: bytes) -> bool:
    body = message.partition(_CRLF)[2]
    return message.startswith(b"MSG ") and body.startswith(b'{"stream":') and b'"seq":' in body


class PostgresReplies:
    """Drops the completion of a COMMIT and ends the connection: the transaction is done, its client does not know."""

    def __init__(self) -> None:
        self.over = False
        self.dropped = 0
        self._rest = b""
        self._opaque = False
        self._greeting = True

    def feed(self, data: bytes, *, drop: bool) -> bytes:
        """See `Replies`."""
        if self._opaque or self.over:
            return b"" if self.over else data
        data = self._rest + data
        at = 0
        if self._greeting and data[:1] in (b"N", b"S", b"G"):
            # The one-byte answer to a request for encryption; after a yes nothing is readable.
            at, self._opaque = 1, data[:1] != b"N"
        while not self._opaque and len(data) - at >= 5:
            size = 1 + struct.unpack_from("!i", data, at + 1)[0]
            if size < 5:
                self._opaque = True
            elif at + size > len(data):
                break
            elif drop and data[at : at + size] == b"C\0\0\0\x0bCOMMIT\0":
                self.dropped += 1
                self.over = True
                return data[:at]
            else:
                at += size
                self._greeting = False
        if self._opaque:
            at = len(data)
        self._rest = data[at:]
        return data[:at]


def replies_of(protocol: str) -> Replies:
    """Return the parser of a protocol: "nats", "postgres", or any other name for none. One for each connection."""
    if protocol == "nats":
        return NatsReplies()
    return PostgresReplies() if protocol == "postgres" else AnyReplies()
