"""The buffer in front of a store of threads, and what stands behind it."""

from __future__ import annotations

import inspect

from bufstore.buffer.buffer import Buffer
from bufstore.buffer.domain import Backing
from bufstore.buffer.ports.ledger import Ledger
from bufstore.config import BufferConfig
from bufstore.errors import ConfigError
from bufstore.nats.session import Nats, session_to
from bufstore.postgres.ledger.ledger import PostgresLedger
from bufstore.threads.domain import THREADS
from bufstore.threads.protocol import WrappableStore, kind_of
from bufstore.threads.runs import ThreadBuffer
from bufstore.threads.state import ThreadState
from bufstore.threads.state_readers import ComparingReader


def check_wrappable(store: object) -> None:
    """Raise ConfigError when the store lacks a method that the buffer calls, before the first flush shows it."""
    methods = ("load_checkpoint", "load_run", "apply")
    wrong = [name for name in methods if not callable(getattr(store, name, None))]
    if wrong:
        raise ConfigError(
            f"{type(store).__name__} cannot be wrapped: it has no {' and no '.join(wrong)} "
            "(see bufstore.WrappableStore for what each must do)"
        )


def buffer_of(
    store: WrappableStore,
    nats: Nats,
    config: BufferConfig,
    *,
    name: str,
    postgres: str | None = None,
    schema: str = "bufstore",
    timeout_s: float = 30.0,
) -> ThreadBuffer:
    """The buffer in front of a store; nothing is connected yet. Raises ConfigError.

    `name`: what the servers call this process. `postgres`, `schema`: see `BufferedThreadStore.open`. `timeout_s`: of
    each call of the ledger.
    """
    ledger, backing = _behind(store, postgres, schema, config, timeout_s)
    return Buffer(THREADS, session_to(nats, config, name), ledger, backing, config)


def _behind(
    store: WrappableStore, postgres: str | None, schema: str, config: BufferConfig, timeout_s: float
) -> tuple[Ledger, Backing[ThreadState]]:
    """Where the watermarks are kept, and what the store can do. Raises ConfigError when that cannot be told."""
    # Not getattr: a store that delegates every attribute to an inner store would take the inner store's method.
    if inspect.getattr_static(store, "behind", None) is not None:
        found: tuple[Ledger, Backing[ThreadState]] | None = store.behind(postgres, config, timeout_s)  # type: ignore[attr-defined]
        if found is not None:
            return found
    if postgres is None:
        raise ConfigError("give `postgres`: the database of your store, where the buffer keeps its watermarks")
    check_wrappable(store)
    ledger = PostgresLedger(
        postgres,
        store,
        schema=schema,
        timeout_s=timeout_s,
        quarantine_max=config.quarantine_max,
        lease_s=config.lease_s,
    )
    return ledger, Backing(kind_of(store), ComparingReader(store, ledger))
