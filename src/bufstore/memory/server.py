"""A NATS server in memory, for tests that need none: ``BufferedThreadStore.open(store, nats=MemoryNats())``."""

from __future__ import annotations

import secrets

from bufstore.buffer.groups.log import GroupLog
from bufstore.buffer.ports.shared_state import Session
from bufstore.config import BufferConfig
from bufstore.memory.log import MemoryLog, MemoryStream
from bufstore.memory.shared_state import MemoryBucket, MemorySharedState


class MemoryNats:
    """Stands for a NATS server: for unit tests of an app, and as an oracle of ours.

    Any number of instances in one event loop share its content, which ends with the process. With a MemoryThreadStore
    behind it, a buffered store is the real one, without any server.
    """

    def __init__(self) -> None:
        #: The streams, by the name in the configuration.
        self.streams: dict[str, MemoryStream] = {}
        self.buckets: dict[str, MemoryBucket] = {}

    def session(self, config: BufferConfig) -> Session:
        """Return a session for one instance."""
        bucket = self.buckets.setdefault(config.log.bucket, MemoryBucket())
        return MemorySession(MemoryLog(self.streams, config), MemorySharedState(bucket), config)


class MemorySession:
    """See `bufstore.buffer.ports.shared_state.Session`."""

    def __init__(self, log: MemoryLog, shared: MemorySharedState, config: BufferConfig) -> None:
        self.stream = log
        self.log = GroupLog(log, shared, config, secrets.token_hex(6))
        self.shared = shared

    @property
    def traffic(self) -> tuple[int, int]:
        calls = self.stream.calls + self.shared.calls
        return calls, calls

    async def open(self) -> None:
        """Nothing to connect to."""

    async def aclose(self) -> None:
        self.shared.close()
        await self.log.aclose()
        self.stream.close()
