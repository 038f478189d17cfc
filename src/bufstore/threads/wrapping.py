"""What a wrapped store needs beside it: a ledger in the same database, and a reader that knows how fresh a state is."""

from __future__ import annotations

from bufstore.buffer.ports import Ledger
from bufstore.errors import ConfigError
from bufstore.memory.ledger import MemoryLedger
from bufstore.memory.store import MemoryThreadStore
from bufstore.postgres.ledger import PostgresLedger
from bufstore.postgres.store import PostgresThreadStore
from bufstore.threads.base import ComparingReader, SnapshotReader, StateReader
from bufstore.threads.protocol import WrappableStore


def ledger_for(store: WrappableStore, postgres: str | None, schema: str) -> Ledger:
    """Where the watermarks are kept. Raises ConfigError when that cannot be told."""
    if isinstance(store, PostgresThreadStore):
        return PostgresLedger(postgres or str(store.pool.conninfo), store, schema=store.schema)
    if postgres is not None:
        return PostgresLedger(postgres, store, schema=schema)
    if isinstance(store, MemoryThreadStore):
        return MemoryLedger(store)
    raise ConfigError("give `postgres`: the database of your store, where the buffer keeps its watermarks")


def reader_for(store: WrappableStore, ledger: Ledger) -> StateReader:
    """One statement where state and watermark are in one place, else two looks at the row."""
    if isinstance(store, PostgresThreadStore) and isinstance(ledger, PostgresLedger):
        return SnapshotReader(store)
    return ComparingReader(store, ledger)
