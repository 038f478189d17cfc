"""*nats-py*: one consumer that fetches as its documentation shows, without acks and without decoding."""

from __future__ import annotations

import time

import nats
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from bench.contestant import Contestant, Place

#: The server disconnects a client for which it queues 64 MiB, and a group may take 256 KiB.
_BATCH = 64


class NatsConsumer(Contestant):
    """Reads a stream from its beginning."""

    def __init__(self, place: Place, *, stream: str) -> None:
        super().__init__(place)
        self._stream = stream

    async def open(self) -> None:
        self.client = await nats.connect(self.place.nats, pending_size=0)

    async def close(self) -> None:
        await self.client.close()

    async def read(self, entries: int) -> float:
        """Read the whole log of `entries`, in groups, and return the entries per second."""
        js = self.client.jetstream()
        messages = (await js.stream_info(self._stream)).state.messages
        config = ConsumerConfig(ack_policy=AckPolicy.NONE, deliver_policy=DeliverPolicy.ALL)
        subscription = await js.pull_subscribe(f"{self.place.name}.*.*", stream=self._stream, config=config)
        read = 0
        began = time.perf_counter()
        while read < messages:
            read += len(await subscription.fetch(min(_BATCH, messages - read), timeout=30))
        rate = entries / (time.perf_counter() - began)
        await subscription.unsubscribe()
        return rate
