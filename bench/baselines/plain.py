"""*plain*: pipelined JetStream publishes with the client library, each acknowledged separately.

A write-ahead log in its simplest form: no order within a thread, no expectation, no grouping. Publishes are sent as
they come, and their acks are awaited concurrently (``publish_async``).
"""

from __future__ import annotations

import nats
from nats.js.api import StreamConfig

from bench.contestant import Contestant, body


class Plain(Contestant):
    """Publishes with nats-py, one message per checkpoint."""

    async def open(self) -> None:
        self._client = await nats.connect(self.place.nats)
        self._js = self._client.jetstream(publish_async_max_pending=4000)
        self._stream = f"plain-{self.place.name}"
        await self._js.add_stream(
            StreamConfig(name=self._stream, subjects=[f"{self._stream}.>"], num_replicas=self.place.replicas)
        )

    async def close(self) -> None:
        await self._js.delete_stream(self._stream)
        await self._client.close()

    async def step(self, thread: str, number: int) -> None:
        await (await self._js.publish_async(f"{self._stream}.{thread}", body(number)))
