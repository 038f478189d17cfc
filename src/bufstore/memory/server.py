"""A NATS server in memory, for tests that need none: ``BufferedThreadStore.open(store, nats=MemoryNats())``."""

from __future__ import annotations

from bufstore.buffer.ports.hot import Link
from bufstore.config import BufferConfig
from bufstore.memory.hot import MemoryBucket, MemoryHotState
from bufstore.memory.log import MemoryLog, MemoryStream


class MemoryNats:
    """Stands for a NATS server: for unit tests of an app, and as an oracle of ours.

    Any number of instances in one event loop share what it holds; it forgets all with the process. With a
    MemoryThreadStore behind it, a buffered store is the real one, without any server.
    """

    def __init__(self) -> None:
        #: By name, as configured.
        self.streams: dict[str, MemoryStream] = {}
        self.buckets: dict[str, MemoryBucket] = {}

    def link(self, config: BufferConfig) -> Link:
        """The way to it for one instance."""
        bucket = self.buckets.setdefault(config.log.bucket, MemoryBucket())
        return MemoryLink(MemoryLog(self.streams, config), MemoryHotState(bucket))


class MemoryLink:
    """See `bufstore.buffer.ports.hot.Link`."""

    def __init__(self, log: MemoryLog, hot: MemoryHotState) -> None:
        self.log = log
        self.hot = hot

    @property
    def traffic(self) -> tuple[int, int]:
        calls = self.log.calls + self.hot.calls
        return calls, calls

    async def open(self) -> None:
        """Nothing to connect to."""

    async def aclose(self) -> None:
        self.hot.close()
        self.log.close()
