"""What stands around a wrapped store: a ledger in its database, a reader that knows how fresh a state is, a log."""

from __future__ import annotations

from collections.abc import Sequence

from bufstore.buffer.ports.ledger import Ledger
from bufstore.buffer.ports.shared_state import Session
from bufstore.config import BufferConfig, NatsConfig, as_nats_config
from bufstore.errors import ConfigError
from bufstore.memory.server import MemoryNats
from bufstore.nats.session import NatsSession
from bufstore.postgres.ledger.ledger import PostgresLedger
from bufstore.threads.base import ComparingReader, SnapshotReader, StateReader
from bufstore.threads.memory_store import MemoryThreadStore
from bufstore.threads.postgres.store import PostgresThreadStore
from bufstore.threads.protocol import WrappableStore


def check_wrappable(store: object) -> None:
    """Raise ConfigError when the store lacks a method that the buffer calls: else only the first flush would tell."""
    methods = ("load_checkpoint", "load_run", "apply")
    wrong = [name for name in methods if not callable(getattr(store, name, None))]
    if wrong:
        raise ConfigError(
            f"{type(store).__name__} cannot be wrapped: it has no {' and no '.join(wrong)} "
            "(see bufstore.WrappableStore for what each must do)"
        )


def ledger_for(store: WrappableStore, postgres: str | None, schema: str, config: BufferConfig) -> Ledger:
    """Where the watermarks are kept. Raises ConfigError when that cannot be told."""
    bound = config.quarantine_max
    if isinstance(store, PostgresThreadStore):
        dsn = postgres or str(store.pool.conninfo)
        return PostgresLedger(dsn, store, schema=store.schema, quarantine_max=bound, lease_s=config.lease_s)
    if postgres is not None:
        check_wrappable(store)
        return PostgresLedger(postgres, store, schema=schema, quarantine_max=bound, lease_s=config.lease_s)
    if isinstance(store, MemoryThreadStore):
        return store.ledger(bound)
    raise ConfigError("give `postgres`: the database of your store, where the buffer keeps its watermarks")


def reader_for(store: WrappableStore, ledger: Ledger) -> StateReader:
    """One statement where state and watermark are in one place, else two looks at the row."""
    if isinstance(store, PostgresThreadStore) and isinstance(ledger, PostgresLedger):
        return SnapshotReader(store)
    return ComparingReader(store, ledger)


def session_for(nats: str | Sequence[str] | NatsConfig | MemoryNats, config: BufferConfig, name: str) -> Session:
    """The way to the log. Raises ConfigError."""
    if isinstance(nats, MemoryNats):
        return nats.session(config)
    return NatsSession(as_nats_config(nats), config, name)
