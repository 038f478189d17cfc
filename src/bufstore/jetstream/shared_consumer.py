"""A durable consumer that all workers pull from: any idle worker gets a message, until one worker acks it."""

from __future__ import annotations

from typing import Any

from bufstore.jetstream.connection import Connection
from bufstore.jetstream.ensure import ensure_consumer
from bufstore.jetstream.errors import ConsumerMissing
from bufstore.jetstream.pulls import Delivery, PullRefused, Pulls
from bufstore.jetstream.stream import NatsStream


def consumer_config(name: str, ack_wait_s: float, pending_max: int, **more: Any) -> dict[str, Any]:
    """Return the configuration. Messages without an ack, at most `pending_max`, come again after `ack_wait_s`."""
    return {
        "name": name,
        "durable_name": name,
        "deliver_policy": "all",
        "ack_policy": "explicit",
        "ack_wait": round(ack_wait_s * 1e9),
        "max_deliver": -1,
        "max_ack_pending": pending_max,
        "replay_policy": "instant",
        **more,
    }


class SharedConsumer:
    """A consumer of a stream, and the pulls from it. Make it before the connection is opened."""

    def __init__(self, connection: Connection, stream: NatsStream, wanted: dict[str, Any], ours: str) -> None:
        """`ours` is the place of the consumer's settings, for `ConfigDrift`."""
        self._stream, self._wanted, self._ours = stream, wanted, ours
        self._name = str(wanted["durable_name"])
        self.pulls = Pulls(connection, self._name, stream.next_of(self._name), wanted["ack_wait"] / 1e9)

    async def setup(self) -> None:
        """Create the consumer, or check it. Raises ConfigDrift, ConfigError, LogUnavailable."""
        await ensure_consumer(self._stream, self._wanted, self._ours)

    async def next(self, wait_s: float) -> Delivery | None:
        """As `Pulls.next`. A consumer that somebody has removed is made again. Raises like `setup`, too."""
        try:
            return await self.pulls.next(wait_s)
        except PullRefused as e:
            if e.code != "503":
                raise
        await self.setup()
        return await self.pulls.next(wait_s)

    async def info(self) -> dict[str, Any]:
        """Return what the server says of the consumer. Raises ConsumerMissing, LogUnavailable."""
        try:
            return await self._stream.consumer(self._name)
        except ConsumerMissing as e:
            raise ConsumerMissing(
                f"{e}: somebody removed {self._name!r} of stream {self._stream.name}. Nothing is lost: "
                "a worker that asks for work makes it again, or the next instance that is opened"
            ) from None
