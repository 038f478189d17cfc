"""*protocol4*: the simple protocol of buffered stores that keep their state in a KV bucket.

Each checkpoint reads the thread's record (KV get), reserves the next number (compare-and-set), publishes the entry, and
records it as the newest (KV put): four round trips, three fsyncs. Each is one request with the client library: direct
gets, without its KV object.
"""

from __future__ import annotations

import json

import nats
from nats.js.api import StreamConfig

from bench.contestant import Contestant, body

_TIMEOUT_S = 60.0
_EXPECTED = "Nats-Expected-Last-Subject-Sequence"


class Protocol4(Contestant):
    """Makes four requests per checkpoint, with nats-py."""

    async def open(self) -> None:
        self._client = await nats.connect(self.place.nats)
        self._js = self._client.jetstream(timeout=_TIMEOUT_S)
        self._stream, bucket = f"p4-{self.place.name}", f"p4kv-{self.place.name}"
        self._keys, self._kv_stream = f"$KV.{bucket}", f"KV_{bucket}"
        await self._js.add_stream(StreamConfig(name=self._stream, subjects=[f"{self._stream}.>"]))
        await self._js.create_key_value(bucket=bucket, history=1, direct=True)

    async def close(self) -> None:
        await self._js.delete_stream(self._stream)
        await self._js.delete_stream(self._kv_stream)
        await self._client.close()

    async def step(self, thread: str, number: int) -> None:
        key = f"{self._keys}.meta.{thread}"
        found = await self._client.request(f"$JS.API.DIRECT.GET.{self._kv_stream}.{key}", b"", timeout=_TIMEOUT_S)
        headers = found.headers or {}
        revision = int(headers.get("Nats-Sequence", 0))
        reserved = (json.loads(found.data)["reserved"] if revision else 0) + 1
        await self._publish(key, json.dumps({"reserved": reserved}).encode(), {_EXPECTED: str(revision)})
        entry = await self._publish(f"{self._stream}.{thread}", body(number))
        record = {"reserved": reserved, "latest": reserved, "position": entry}
        await self._publish(key, json.dumps(record).encode())

    async def _publish(self, subject: str, data: bytes, headers: dict[str, str] | None = None) -> int:
        answer = await self._client.request(subject, data, headers=headers, timeout=_TIMEOUT_S)
        ack = json.loads(answer.data)
        if "error" in ack:
            raise RuntimeError(str(ack["error"]))
        return int(ack["seq"])
