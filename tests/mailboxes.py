"""Makes mailboxes of each kind for the tests: a deployment, and any number of instances of it."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

from bufstore.embedded import Servers
from bufstore.mailbox import (
    MailboxConfig,
    MemoryMailbox,
    MemoryMailboxStore,
    NatsMailboxNames,
    NatsMailboxStore,
    PostgresMailboxStore,
)
from bufstore.mailbox.store import MailboxStore
from bufstore.notify import Notifier

if TYPE_CHECKING:
    from cluster import Cluster

KINDS = ("memory", "nats", "postgres")


class Mailboxes:
    """One deployment of a kind; with three replicas on NATS if a cluster is given."""

    def __init__(self, kind: str, servers: Servers | None, cluster: Cluster | None = None) -> None:
        self.kind = kind
        self._servers = servers
        self.max_bytes = 256 << 20
        self.pool_size = 3
        self.cluster = cluster
        self.name = f"m{secrets.token_hex(5)}"
        self._shared = MemoryMailbox()

    @property
    def servers(self) -> Servers:
        """Return the shared servers; a deployment on a cluster alone has none."""
        assert self._servers is not None
        return self._servers

    @property
    def names(self) -> NatsMailboxNames:
        replicas = 1 if self.cluster is None else 3
        return NatsMailboxNames(bucket=self.name, max_bytes=self.max_bytes, replicas=replicas)

    def store(self, notifier: Notifier | None = None, **config: Any) -> MailboxStore:
        """Make an instance, which the caller opens. `notifier`: for a mailbox on Postgres."""
        settings = MailboxConfig(**({"sweep_interval_s": 1.0, "timeout_s": 10.0} | config))
        if self.kind == "memory":
            return MemoryMailboxStore(self._shared, config=settings)
        if self.kind == "nats":
            nats = self.servers.nats.url if self.cluster is None else self.cluster.nats()
            return NatsMailboxStore(nats, names=self.names, config=settings)
        dsn = self.servers.postgres.dsn
        return PostgresMailboxStore(dsn, schema=self.name, pool_size=self.pool_size, notifier=notifier, config=settings)

    @asynccontextmanager
    async def open(self, count: int = 2, **config: Any) -> AsyncIterator[list[MailboxStore]]:
        """Open `count` instances."""
        async with AsyncExitStack() as stack:
            yield [await stack.enter_async_context(self.store(**config)) for _ in range(count)]
