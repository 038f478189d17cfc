"""Our parser finds in a NATS server's data what nats-py's parser finds, however the data is cut."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.aio.client import Client
from nats.aio.transport import TcpTransport
from nats.errors import ProtocolError
from nats.protocol.parser import Parser

from bufstore.jetstream.client import ListeningClient
from bufstore.jetstream.parser import MessageParser, read_all


class Told:
    """A client that records its parser's calls. `ends`: after how many messages its connection ends."""

    def __init__(self, kind: type[Parser], ends: int = -1) -> None:
        self.calls: list[Any] = []
        self._ends = ends
        self.parser = kind(self)

    async def _process_msg(self, *message: Any) -> None:
        sid, subject, reply, data, headers = message
        self.calls.append((sid, subject, reply, data, headers or b""))
        if len(self.calls) == self._ends:
            self.parser.reset()

    async def _process_ping(self) -> None:
        self.calls.append("PING")

    async def _process_pong(self) -> None:
        self.calls.append("PONG")

    async def _process_info(self, info: Any) -> None:
        self.calls.append(info)

    async def _process_err(self, error: str) -> None:
        self.calls.append(error)


_words = st.text("abc.>*$_-", min_size=1, max_size=9).map(str.encode)
_bytes = st.binary(max_size=40) | st.sampled_from([b"\r\n", b"MSG a 1 2\r\n", b"HMSG", b"PING\r\n"])


@st.composite
def _messages(draw: st.DrawFn) -> bytes:
    subject, sid, body = draw(_words), b"%d" % draw(st.integers(0, 99)), draw(_bytes)
    words = [subject, sid, *draw(st.lists(_words, max_size=1))]
    if draw(st.booleans()):
        headers = b"NATS/1.0\r\nName: " + draw(st.binary(max_size=9)) + b"\r\n\r\n"
        words = [b"HMSG", *words, b"%d" % len(headers), b"%d" % (len(headers) + len(body))]
        return b" ".join(words) + b"\r\n" + headers + body + b"\r\n"
    return b" ".join([b"MSG", *words, b"%d" % len(body)]) + b"\r\n" + body + b"\r\n"


_others = st.sampled_from(
    [b"PING\r\n", b"PONG\r\n", b"+OK\r\n", b"-ERR 'Stale Connection'\r\n", b'INFO {"a": "%s"}\r\n' % (b"x" * 5000)]
)
_lines = st.lists(_messages() | _others, max_size=8).map(b"".join)


def _parsed(kind: type[Parser], pieces: list[bytes]) -> list[Any]:
    told = Told(kind)

    async def main() -> None:
        for piece in pieces:
            await told.parser.parse(piece)

    asyncio.run(main())
    return told.calls


@given(_lines, st.data())
def test_it_finds_what_the_client_s_own_finds(sent: bytes, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=6)))
    pieces = [sent[a:b] for a, b in zip([0, *cuts], [*cuts, len(sent)], strict=True)]
    assert _parsed(MessageParser, pieces) == _parsed(Parser, [sent])


@pytest.mark.parametrize(
    "line",
    [
        b"MSG a\r\n",
        b"MSG a b 3\r\n",
        b"MSG a 1 x\r\n",
        b"MSG a 1 r s 3\r\n",
        b"MSG a 1 -3\r\n",
        b"HMSG a 1 3\r\n",
        b"HMSG a 1 9 3\r\n",
        b"HMSG a 1 r s 3 9\r\n",
        b"NOTHING\r\n",
        b"\r\n",
    ],
)
def test_what_is_no_line_of_the_protocol_is_an_error(line: bytes) -> None:
    with pytest.raises(ProtocolError):
        _parsed(MessageParser, [b"PING\r\n" + line + b"PING\r\n"])


@pytest.mark.parametrize("cut", [0, 3, 11, 13])
def test_what_came_with_a_connection_ends_with_it(cut: int) -> None:
    told = Told(MessageParser, ends=2)
    message = b"MSG a 1 2\r\nxy\r\n"

    async def main() -> None:
        await told.parser.parse(message * 3 + message[:cut])
        assert len(told.calls) == 2
        await told.parser.parse(b"PING\r\n")  # from the next connection

    asyncio.run(main())
    assert told.calls[2:] == ["PING"]


async def test_all_that_has_come_is_read_at_once() -> None:
    transport, reader = TcpTransport(), asyncio.StreamReader(limit=1 << 15)
    transport._io_reader = reader
    reader.feed_data(bytes(100_000))
    read_all(transport)
    assert len(await transport.read(1 << 15)) == 100_000


def test_the_installed_client_asks_this_parser() -> None:
    """If it did not, there would be no error: nats-py would use its own parser, which is slower."""
    assert type(ListeningClient()._ps) is MessageParser
    assert {"_ps", "parse"} <= set(Client._read_loop.__code__.co_names)
