"""Frames a whole batch as the bytes that go over the wire, and writes them at once.

nats-py's publish costs about 20 µs of Python per message with headers; framing the message here costs about 2. The
framing uses private parts of nats-py's client, so it is done only with checked versions. With any other version the
public path does the same, slower (tests run both).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from importlib.metadata import version

import nats.errors
from nats.aio.client import Client
from nats.aio.transport import TcpTransport

from bufstore.jetstream.messages import HEADER, Outgoing
from bufstore.jetstream.parser import read_all

_EXPECTED = "Nats-Expected-Last-Subject-Sequence"
_EXPECTED_OF = "Nats-Expected-Last-Subject-Sequence-Subject"
#: Prefixes of the versions whose private parts were checked.
CHECKED_VERSIONS = ("2.16.",)
_ALL = slice(None)
#: The bytes that enclose the header lines.
_FRAME = len("NATS/1.0\r\n" + "\r\n")

#: A batch of more bytes than this is sent in parts.
_PART_BYTES = 1 << 20
_LOOK_S = 0.5
#: The key in a client's `stats` for the size of the largest body that was sent, in bytes.
_LARGEST = "largest_out_bytes"


def _unwatched(size: int) -> None:
    pass


#: Whether the installed nats-py is a checked version, so that `send` writes frames of its own.
supported = version("nats-py").startswith(CHECKED_VERSIONS)


def prepare(client: Client) -> None:
    """Make a new client read at once all that has come, and send at once.

    uvloop keeps small writes back until all ready callbacks have had their turn.
    """
    transport = client._transport
    if not supported or type(transport) is not TcpTransport:
        return
    read_all(transport)
    if transport._io_writer is not None:
        transport._io_writer.transport.set_write_buffer_limits(0)


def largest_sent(client: Client) -> int:
    """Return the size of the largest message that was sent, without headers, in bytes."""
    return client.stats.get(_LARGEST, 0)


def note(client: Client, sizes: Iterable[int]) -> None:
    """Note that bodies of these sizes are sent."""
    client.stats[_LARGEST] = max([largest_sent(client), *sizes])


async def send(
    client: Client,
    messages: Sequence[Outgoing],
    batch: str,
    reply: str,
    moved: Callable[[int], None] = _unwatched,
) -> None:
    """Send the messages, several as the atomic batch `batch`; the answer to the last goes to `reply`.

    `moved` is called while the bytes of a large write leave: see `_write_part`. Raises
    nats.errors.OutboundBufferLimitError when the client is not connected, nats.errors.MaxPayloadError when a message is
    larger than the server takes: then nothing was sent, or a batch without its end, which the server never stores.
    """
    if not client.is_connected:
        raise nats.errors.OutboundBufferLimitError
    last = len(messages)
    data = framed(messages, batch, reply, bytes_max=client.max_payload)
    note(client, (len(m.body) for m in messages))
    if supported:
        if len(data) <= _PART_BYTES:
            await _write(client, data, last)
        else:
            for p in _parts(messages):
                await _write_part(client, framed(messages, batch, reply, p), p.stop - p.start, moved)
        return
    for number, message in enumerate(messages, 1):
        headers = dict(line.split(": ", 1) for line in _head(message, batch, number, last).splitlines())
        await client.publish(
            message.subject, message.body, reply=reply if number == last else "", headers=headers or None
        )


def goes_straight(client: Client) -> bool:
    """Return whether a small message can be written to the socket at once."""
    return supported and client.is_connected and _is_free(client)


def _is_free(client: Client) -> bool:
    """Whether what is written straight to the socket overtakes no bytes that wait for the client's writing task."""
    return not client._pending_data_size and type(client._transport) is TcpTransport


def send_now(client: Client, message: Outgoing, reply: str) -> bool:
    """Send one small message before this returns; its answer goes to `reply`.

    Returns False, and sends nothing, where that is not possible: `send` waits for what stands before it, or says why.
    """
    if len(message.body) > _PART_BYTES or not goes_straight(client):
        return False
    try:
        data = framed([message], "", reply, bytes_max=client.max_payload)
        note(client, [len(message.body)])
        _write_straight(client, data, 1)
    except (nats.errors.MaxPayloadError, nats.errors.OutboundBufferLimitError):
        return False
    return True


async def post(client: Client, subject: str, payload: bytes, reply: str) -> None:
    """Send one message without headers; its answer goes to `reply`. Raises what nats-py's publish raises."""
    if client.is_connected and len(payload) <= client.max_payload:
        note(client, [len(payload)])
        if supported:
            await _write(client, framed([Outgoing(subject, payload)], "", reply), 1)
            return
    await client.publish(subject, payload, reply=reply)


async def send_each(
    client: Client, messages: Sequence[Outgoing], replies: Sequence[str], moved: Callable[[int], None] = _unwatched
) -> list[int]:
    """Send single messages at once, each with its own reply subject. Needs `supported`.

    Returns the numbers of those that are larger than the server takes: they were not sent. Raises
    nats.errors.OutboundBufferLimitError like `send`, and ConnectionResetError when the connection was lost between two
    of them: some may be stored.
    """
    if not client.is_connected:
        raise nats.errors.OutboundBufferLimitError
    sent: list[Outgoing] = []
    frames: list[bytes] = []
    too_large: list[int] = []
    for number, (message, reply) in enumerate(zip(messages, replies, strict=True)):
        try:
            frames.append(framed([message], "", reply, bytes_max=client.max_payload))
            sent.append(message)
        except nats.errors.MaxPayloadError:
            too_large.append(number)
    note(client, (len(m.body) for m in sent))
    data = b"".join(frames)
    if len(data) <= _PART_BYTES:
        await _write(client, data, len(sent))
    else:
        for p in _parts(sent):
            try:
                await _write_part(client, b"".join(frames[p]), p.stop - p.start, moved)
            except nats.errors.OutboundBufferLimitError:
                if p.start:
                    raise ConnectionResetError("lost between two messages") from None
                raise
    return too_large


def _parts(messages: Sequence[Outgoing]) -> Iterator[slice]:
    """Yield slices of neighbours: the messages of a slice are sent at once."""
    start = size = 0
    for number, message in enumerate(messages):
        size += len(message.body)
        if size >= _PART_BYTES or number + 1 == len(messages):
            yield slice(start, number + 1)
            start, size = number + 1, 0


async def _write_part(client: Client, data: bytes, messages: int, moved: Callable[[int], None]) -> None:
    """Send one of several parts, and return when it has left: what others send may go before the next part.

    `moved` is called with the number of bytes that had to wait for the socket and have left.
    """
    if not client.is_connected:
        raise nats.errors.OutboundBufferLimitError
    await _write(client, data, messages)
    while (waiting := _unsent(client)) and client.is_connected:
        with suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_S):
                await client._transport.drain()  # type: ignore[union-attr]
        if (gone := waiting - _unsent(client)) > 0:
            moved(gone)


def _unsent(client: Client) -> int:
    """Return the number of bytes that wait in this process for the socket to take them."""
    transport = client._transport
    writer = transport._io_writer if type(transport) is TcpTransport else None
    return writer.transport.get_write_buffer_size() if writer is not None else 0


async def _write(client: Client, data: bytes, messages: int) -> None:
    if _is_free(client):
        _write_straight(client, data, messages)
        return
    _count(client, data, messages)
    await client._send_command(data)
    await client._flush_pending()


def _write_straight(client: Client, data: bytes, messages: int) -> None:
    """Write to the socket, past the client's writing task, where it is free."""
    try:
        client._transport.write(data)  # type: ignore[union-attr]
    except RuntimeError:  # uvloop's, when the connection has ended and the client does not know yet
        raise nats.errors.OutboundBufferLimitError from None
    _count(client, data, messages)


def _count(client: Client, data: bytes, messages: int) -> None:
    client.stats["out_msgs"] += messages
    client.stats["out_bytes"] += len(data)


def framed(
    messages: Sequence[Outgoing],
    batch: str,
    reply: str,
    part: slice = _ALL,
    *,
    bytes_max: int | None = None,
) -> bytes:
    """Return the protocol's bytes for (a part of) the messages: HPUB and PUB of the NATS client protocol.

    Raises nats.errors.MaxPayloadError for a message of more than `bytes_max`, headers included: the server would end
    the connection.
    """
    parts: list[bytes] = []
    last = len(messages)
    for number, message in enumerate(messages[part], (part.start or 0) + 1):
        head, body = _head(message, batch, number, last), message.body
        to = f" {reply}" if number == last else ""
        size = len(head) + _FRAME if head else 0  # ASCII: tokens, numbers and base64
        if bytes_max is not None and size + len(body) > bytes_max:
            raise nats.errors.MaxPayloadError
        if head:
            line = f"HPUB {message.subject}{to} {size} {size + len(body)}\r\nNATS/1.0\r\n{head}\r\n"
        else:
            line = f"PUB {message.subject}{to} {len(body)}\r\n"
        parts += (line.encode("ascii"), body, b"\r\n")
    return b"".join(parts)


def _head(message: Outgoing, batch: str, number: int, last: int) -> str:
    """Return the header lines of a message, which is the one of this number in a batch of `last`."""
    head = f"{HEADER}: {message.header}\r\n" if message.header is not None else ""
    if message.expected is not None:
        head += f"{_EXPECTED}: {message.expected}\r\n"
    if message.expected_of is not None:
        head += f"{_EXPECTED_OF}: {message.expected_of}\r\n"
    if message.ttl_s:
        head += f"Nats-TTL: {message.ttl_s}s\r\n"
    if batch and last > 1:
        head += f"Nats-Batch-Id: {batch}\r\nNats-Batch-Sequence: {number}\r\n"
        if number == last:
            head += "Nats-Batch-Commit: 1\r\n"
    return head
