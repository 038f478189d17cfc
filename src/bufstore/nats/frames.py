"""A whole batch as the bytes that go over the wire, written at once.

nats-py's publish costs about 20 µs of Python per message with headers, most of the price of an append; framing it here
costs about 2. For that two private methods of its client are called, so only for the version they were checked with;
with any other the public path does the same, slower (tests run both).
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version

import nats.errors
from nats.aio.client import Client

from bufstore import failpoints
from bufstore.buffer.entry import HEADER
from bufstore.buffer.ports import Outgoing

_EXPECTED = "Nats-Expected-Last-Subject-Sequence"
_EXPECTED_OF = "Nats-Expected-Last-Subject-Sequence-Subject"
_CHECKED_VERSIONS = ("2.16.",)
_ALL = slice(None)

#: Whether `send` writes frames of its own.
supported = version("nats-py").startswith(_CHECKED_VERSIONS)


async def send(client: Client, messages: Sequence[Outgoing], batch: str, reply: str) -> None:
    """Send the messages, several as the atomic batch `batch`; the answer to the last goes to `reply`.

    Raises nats.errors.OutboundBufferLimitError when the client is not connected: nothing was sent then, or a batch
    without its end, which the server never stores.
    """
    last = len(messages)
    if supported:
        if not client.is_connected:
            raise nats.errors.OutboundBufferLimitError
        if last > 1 and failpoints.active is not None:
            # Only where a crash test listens.
            await _write(client, framed(messages, batch, reply, slice(last // 2)), last // 2, flushed=True)
            failpoints.reach(failpoints.Failpoint.BATCH_HALF_SENT)
            await _write(client, framed(messages, batch, reply, slice(last // 2, last)), last - last // 2)
        else:
            await _write(client, framed(messages, batch, reply), last)
        return
    for number, message in enumerate(messages, 1):
        headers = dict(_headers(message, batch if last > 1 else "", number, number == last))
        await client.publish(
            message.subject, message.body, reply=reply if number == last else "", headers=headers or None
        )


async def _write(client: Client, data: bytes, messages: int, *, flushed: bool = False) -> None:
    client.stats["out_msgs"] += messages
    client.stats["out_bytes"] += len(data)
    await client._send_command(data)
    await client._flush_pending(force_flush=flushed)


def framed(messages: Sequence[Outgoing], batch: str, reply: str, part: slice = _ALL) -> bytes:
    """The protocol's bytes for (a part of) the messages: HPUB and PUB of the NATS client protocol."""
    parts: list[bytes] = []
    last = len(messages)
    for number, message in list(enumerate(messages, 1))[part]:
        pairs = _headers(message, batch if last > 1 else "", number, number == last)
        to = f" {reply}" if number == last else ""
        if pairs:
            head = "NATS/1.0\r\n" + "".join([f"{name}: {value}\r\n" for name, value in pairs]) + "\r\n"
            size = len(head)  # ASCII: tokens, numbers and base64
            parts.append(f"HPUB {message.subject}{to} {size} {size + len(message.body)}\r\n{head}".encode("ascii"))
        else:
            parts.append(f"PUB {message.subject}{to} {len(message.body)}\r\n".encode("ascii"))
        parts.append(message.body)
        parts.append(b"\r\n")
    return b"".join(parts)


def _headers(message: Outgoing, batch: str, number: int, is_last: bool) -> list[tuple[str, str]]:
    pairs = []
    if message.header is not None:
        pairs.append((HEADER, message.header))
    if message.expected is not None:
        pairs.append((_EXPECTED, str(message.expected)))
    if message.expected_of is not None:
        pairs.append((_EXPECTED_OF, message.expected_of))
    if message.ttl_s:
        pairs.append(("Nats-TTL", f"{message.ttl_s}s"))
    if message.rollup:
        pairs.append(("Nats-Rollup", "sub"))
    if batch:
        pairs.append(("Nats-Batch-Id", batch))
        pairs.append(("Nats-Batch-Sequence", str(number)))
        if is_last:
            pairs.append(("Nats-Batch-Commit", "1"))
    return pairs
