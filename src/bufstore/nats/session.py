"""The way to a NATS server: one connection, with the log and the shared state on it."""

from __future__ import annotations

import contextlib

from bufstore.config import BufferConfig, NatsConfig
from bufstore.jetstream.connection import Connection
from bufstore.nats.log import NatsLog
from bufstore.nats.shared_state import NatsSharedState


class NatsSession:
    """See `bufstore.buffer.ports.shared_state.Session`."""

    def __init__(self, nats: NatsConfig, config: BufferConfig, name: str) -> None:
        self.connection = Connection(nats, name)
        self.log = NatsLog(self.connection, nats.api, config)
        self.shared = NatsSharedState(self.connection, nats.api, config.log)

    @property
    def traffic(self) -> tuple[int, int]:
        return self.connection.traffic

    async def open(self) -> None:
        await self.connection.open()

    async def aclose(self) -> None:
        async with contextlib.AsyncExitStack() as stack:  # in reverse, each whatever the other does
            stack.push_async_callback(self.connection.aclose)
            stack.push_async_callback(self.shared.aclose)
            stack.push_async_callback(self.log.aclose)
