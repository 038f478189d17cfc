"""What a wrapped store needs beside it: a ledger in the same database, and a reader that knows how fresh a state is."""

from __future__ import annotations

from bufstore.buffer.ports import Ledger
from bufstore.config import BufferConfig
from bufstore.errors import ConfigError
from bufstore.memory.ledger import MemoryLedger
from bufstore.memory.store import MemoryThreadStore
from bufstore.postgres.ledger import PostgresLedger
from bufstore.postgres.store import PostgresThreadStore
from bufstore.threads.base import ComparingReader, SnapshotReader, StateReader
from bufstore.threads.protocol import WrappableStore


def ledger_for(store: WrappableStore, postgres: str | None, schema: str, config: BufferConfig) -> Ledger:
    """Where the watermarks are kept. Raises ConfigError when that cannot be told."""
    bound = config.quarantine_max
    if isinstance(store, PostgresThreadStore):
        dsn = postgres or str(store.pool.conninfo)
        return PostgresLedger(dsn, store, schema=store.schema, quarantine_max=bound)
    if postgres is not None:
        return PostgresLedger(postgres, store, schema=schema, quarantine_max=bound)
    if isinstance(store, MemoryThreadStore):
        return MemoryLedger(store, quarantine_max=bound)
    raise ConfigError("give `postgres`: the database of your store, where the buffer keeps its watermarks")


def reader_for(store: WrappableStore, ledger: Ledger) -> StateReader:
    """One statement where state and watermark are in one place, else two looks at the row."""
    if isinstance(store, PostgresThreadStore) and isinstance(ledger, PostgresLedger):
        return SnapshotReader(store)
    return ComparingReader(store, ledger)
