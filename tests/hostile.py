"""Publishes entries and messages that no writer of ours makes."""

from __future__ import annotations

import random
import re
import zlib
from base64 import b64encode
from typing import Any

import msgspec
from nats.aio.client import Client

from bufstore import BufferedThreadStore, Run, RunStatus
from bufstore.buffer.entry import Base, Entry, encode
from bufstore.jetstream.messages import Outgoing
from bufstore.threads.model import RunSave, encode_run

RUN = encode_run(Run(run_id="run", thread_id="t", status=RunStatus.DONE))


async def publish_entry(store: BufferedThreadStore, thread_id: str, headers: bytes | None, body: bytes) -> None:
    """Publish an entry with these headers and this body to the thread, in a group as any writer does."""
    found = re.search(rb"Bufstore-Entry: ([^\r\n]*)", headers) if headers is not None else None
    header = found[1].decode("latin-1") if found else None
    await store.buffer.log.publish(Outgoing(store.buffer.subjects.of(thread_id), body, header), 5)


async def publish_raw(store: BufferedThreadStore, headers: bytes | None, body: bytes) -> None:
    """Publish a raw message on the groups' subject, as no client would; return once the stream has stored it."""
    subject = store.buffer.subjects.groups
    client: Client = store.buffer.session.connection.client()
    inbox = client.new_inbox()
    answer = await client.subscribe(inbox, max_msgs=1)
    if headers is None:
        head = f"PUB {subject} {inbox} {len(body)}\r\n".encode()
    else:
        head = f"HPUB {subject} {inbox} {len(headers)} {len(headers) + len(body)}\r\n".encode() + headers
    await client._send_command(head + body + b"\r\n")
    await client.flush()
    assert b'"seq"' in (await answer.next_msg(timeout=5)).data


def saved(run_id: str, **fields: Any) -> RunSave:
    return RunSave(run_id, fields.get("status", RunStatus.DONE), fields.get("parent"))


def sealed(meta: Any, body: bytes, version: object = 1) -> bytes:
    text = b64encode(msgspec.msgpack.encode(meta))
    checksum = zlib.crc32(body, zlib.crc32(text))
    return f"NATS/1.0\r\nBufstore-Entry: {version}.{checksum:08x}.{text.decode()}\r\n\r\n".encode()


def forged(payload: bytes, *, version: int = 1, chance: random.Random | None = None) -> bytes:
    """Return headers like ours, with a correct checksum, of an entry that claims to be a whole thread and late."""
    entry = Entry(
        id=(chance or random).getrandbits(62),
        prev_id=0,
        base=Base.UNKNOWN,
        seen=2**62,
        version=version,
        self_contained=True,
        keys=b"",
        payload=payload,
    )
    header, _ = encode(entry)
    return f"NATS/1.0\r\nBufstore-Entry: {header}\r\n\r\n".encode()
