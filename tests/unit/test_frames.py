"""Our frames are the same bytes that nats-py would have sent."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from nats.aio.client import Client
from nats.aio.transport import TcpTransport
from nats.errors import MaxPayloadError, OutboundBufferLimitError

from bufstore.jetstream import frames
from bufstore.jetstream.messages import Outgoing

_MESSAGES = [
    Outgoing("thread.1.a", b"body", "1.header", expected=7),
    Outgoing("thread.1.b", b"", "1.other"),
    Outgoing("$KV.hot.run.x", b"\r\n\0", None, expected=0, expected_of="$KV.hot.run.y", ttl_s=5),
    Outgoing("plain", b"nothing else"),
]


class Sent(Client):
    """A client that keeps the data instead of sending it."""

    def __init__(self) -> None:
        super().__init__()
        self.data = b""
        self._max_payload = 1 << 20
        self._status = Client.CONNECTED

    async def _send_command(self, cmd: bytes, priority: bool = False) -> None:
        self.data += cmd

    async def _flush_pending(self, force_flush: bool = False) -> None:
        pass


def sent(messages: list[Outgoing], supported: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[bytes, dict[str, Any]]:
    monkeypatch.setattr(frames, "supported", supported)
    client = Sent()
    client._flush_queue = None
    asyncio.run(frames.send(client, messages, "batch", "_INBOX.x.1"))
    # Without a reply nats-py leaves two spaces where one is enough.
    return client.data.replace(b"  ", b" "), client.stats


@pytest.mark.parametrize("count", [1, 2, 4])
def test_both_ways_send_the_same_bytes(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for messages in (_MESSAGES[:count], _MESSAGES[-count:]):
        ours, our_stats = sent(messages, True, monkeypatch)
        theirs, their_stats = sent(messages, False, monkeypatch)
        assert ours == theirs
        assert our_stats["out_msgs"] == their_stats["out_msgs"] == count


class Gone:
    """The socket of a connection that ended before the client knows; this is uvloop's answer."""

    def write(self, data: bytes) -> None:
        raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")


def test_a_socket_that_is_gone_is_a_client_that_is_not_connected() -> None:
    async def main() -> None:
        client = Sent()
        transport = TcpTransport()
        transport._io_writer = Gone()  # type: ignore[assignment]
        client._transport = transport
        with pytest.raises(OutboundBufferLimitError):
            await frames.post(client, "subject", b"", "reply")
        with pytest.raises(OutboundBufferLimitError):
            await frames.send(client, _MESSAGES[:1], "", "reply")
        with pytest.raises(OutboundBufferLimitError):
            await frames.send_each(client, _MESSAGES[:1], ["reply"])

    asyncio.run(main())


class GoneAfterOne(Sent):
    """A client whose connection ends once it has sent something."""

    async def _send_command(self, cmd: bytes, priority: bool = False) -> None:
        await super()._send_command(cmd, priority)
        self._status = Client.DISCONNECTED


def test_what_was_sent_before_the_connection_was_lost_may_be_stored() -> None:
    large = [Outgoing(f"s.{number}", b"x" * 900_000) for number in range(4)]

    async def main() -> None:
        gone = Sent()
        gone._status = Client.DISCONNECTED
        for messages in (large, large[:1]):
            with pytest.raises(OutboundBufferLimitError):
                await frames.send_each(gone, messages, ["reply"] * len(messages))
        with pytest.raises(ConnectionResetError):
            await frames.send_each(GoneAfterOne(), large, ["reply"] * 4)
        with pytest.raises(OutboundBufferLimitError):  # a batch without its end is never stored
            await frames.send(GoneAfterOne(), large, "batch", "reply")

    asyncio.run(main())


@pytest.mark.parametrize("supported", [True, False])
@pytest.mark.parametrize("messages", [_MESSAGES[:1], _MESSAGES])
def test_a_message_that_the_server_would_not_take_is_not_sent(
    messages: list[Outgoing], supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Headers count: for a message that is too large with them, the server ends the connection and all calls on it."""
    monkeypatch.setattr(frames, "supported", supported)

    async def main() -> None:
        client = Sent()
        client._flush_queue = None
        lines = frames.framed(messages, "batch", "reply").split(b"\r\n")
        takes = [int(line.split()[-1]) for line in lines if line.startswith((b"PUB", b"HPUB"))]
        client._max_payload = max(takes)
        largest = takes.index(max(takes))
        more = list(messages)
        more[largest] = msgspec.structs.replace(more[largest], body=more[largest].body + b"x")
        with pytest.raises(MaxPayloadError):
            await frames.send(client, more, "batch", "reply")
        assert not client.data
        await frames.send(client, messages, "batch", "reply")
        assert client.data

    asyncio.run(main())


def test_the_installed_client_is_one_that_was_checked() -> None:
    assert frames.supported


class Socket:
    """A socket that keeps what is written to it."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data


def on_a_socket() -> tuple[Sent, Socket]:
    """Return a connected client, and what it writes to."""
    client, socket = Sent(), Socket()
    client._transport = TcpTransport()
    client._transport._io_writer = socket  # type: ignore[assignment]
    return client, socket


def test_what_is_sent_at_once_is_the_same_bytes() -> None:
    async def main() -> None:
        for message in _MESSAGES:
            (client, socket), (other, waited) = on_a_socket(), on_a_socket()
            assert frames.send_now(client, message, "_INBOX.x.1")
            await frames.send(other, [message], "", "_INBOX.x.1")
            assert socket.data == waited.data != b""
            assert client.stats == other.stats

    asyncio.run(main())


def test_nothing_is_sent_at_once_that_has_to_wait_or_is_refused() -> None:
    async def main() -> None:
        message = Outgoing("plain", b"x" * 100)

        def refused(client: Sent, socket: Socket) -> bool:
            before = dict(client.stats)
            return not frames.send_now(client, message, "_INBOX.x.1") and not socket.data and client.stats == before

        client, socket = on_a_socket()
        client._pending_data_size = 1  # what stands there must not be overtaken
        assert refused(client, socket)
        client, socket = on_a_socket()
        client._max_payload = 99
        assert refused(client, socket)
        client, socket = on_a_socket()
        client._status = Client.DISCONNECTED
        assert refused(client, socket)
        client, socket = on_a_socket()
        client._transport._io_writer = Gone()  # type: ignore[union-attr, assignment]
        assert not frames.send_now(client, message, "_INBOX.x.1")
        assert refused(Sent(), Socket())  # no transport of ours: a websocket's, for one

    asyncio.run(main())
