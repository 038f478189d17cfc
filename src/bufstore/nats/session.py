"""A session with a NATS server: one connection, with the log and the shared state on it."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence
from typing import Protocol, TypeAlias, runtime_checkable

from bufstore.buffer.groups.log import GroupLog
from bufstore.buffer.ports.shared_state import Session
from bufstore.config import BufferConfig, NatsConfig, as_nats_config
from bufstore.jetstream.connection import Connection
from bufstore.nats.log import NatsLog
from bufstore.nats.shared_state import NatsSharedState


@runtime_checkable
class HasSessions(Protocol):
    """Stands for a NATS server, as `bufstore.memory.MemoryNats` does."""

    def session(self, config: BufferConfig) -> Session:
        """Return a session for one instance."""


#: Where the log is: URLs, a configuration, or an object that stands for a server in tests.
Nats: TypeAlias = str | Sequence[str] | NatsConfig | HasSessions


def session_to(nats: Nats, config: BufferConfig, name: str) -> Session:
    """Return a session that is not connected yet. Raises ConfigError."""
    if isinstance(nats, HasSessions):
        return nats.session(config)
    return NatsSession(as_nats_config(nats), config, name)


class NatsSession:
    """See `bufstore.buffer.ports.shared_state.Session`."""

    def __init__(self, nats: NatsConfig, config: BufferConfig, name: str) -> None:
        self.connection = Connection(nats, name)
        self.shared = NatsSharedState(self.connection, nats.api, config.log, config.append_timeout_s)
        self.stream = NatsLog(self.connection, nats.api, config)
        self.log = GroupLog(self.stream, self.shared, config, secrets.token_hex(6))

    @property
    def traffic(self) -> tuple[int, int]:
        return self.connection.traffic

    async def open(self) -> None:
        await self.connection.open()

    async def aclose(self) -> None:
        async with contextlib.AsyncExitStack() as stack:  # closes in reverse, each one even if another fails
            stack.push_async_callback(self.connection.aclose)
            stack.push_async_callback(self.shared.aclose)
            stack.push_async_callback(self.stream.aclose)
            stack.push_async_callback(self.log.aclose)
