"""Makes the buffers in front of a store of threads, with the ledger and the store behind them."""

from __future__ import annotations

import inspect
from dataclasses import replace

from bufstore.buffer.buffer import Buffer
from bufstore.buffer.domain import Backing, nothing_to_do
from bufstore.buffer.lanes import lane_configs, ledger_schema
from bufstore.buffer.ports.ledger import Ledger
from bufstore.config import BufferConfig
from bufstore.errors import ConfigError
from bufstore.nats.session import Nats, session_to
from bufstore.postgres.ledger.ledger import PostgresLedger
from bufstore.threads.domain import THREADS
from bufstore.threads.lanes import ThreadBuffer, ThreadLanes
from bufstore.threads.protocol import WrappableStore, kind_of
from bufstore.threads.state import ThreadState
from bufstore.threads.state_readers import ComparingReader


def check_wrappable(store: object) -> None:
    """Raise ConfigError when the store lacks a method that the buffer calls, before a flush is the first to show it."""
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
    opens_store: bool = True,
) -> ThreadBuffer:
    """The buffer of one lane in front of a store; nothing is connected yet. Raises ConfigError.

    `name`: what the servers call this process. `postgres`, `schema`: see `BufferedThreadStore.open`. `timeout_s`
    bounds each call of the ledger. `opens_store`: whether the store is opened and closed with the buffer.
    """
    ledger, backing = _behind(store, postgres, schema, config, timeout_s)
    if not opens_store:
        backing = replace(backing, open=nothing_to_do, aclose=nothing_to_do)
    return Buffer(THREADS, session_to(nats, config, name), ledger, backing, config)


def lanes_of(
    store: WrappableStore, nats: Nats, config: BufferConfig, *, name: str, postgres: str | None, schema: str
) -> ThreadLanes:
    """The buffers in front of a store: one for each lane. Arguments and errors as in `buffer_of`."""
    buffers = [
        # The store is opened and closed with the first lane.
        buffer_of(store, nats, c, name=name, postgres=postgres, schema=schema, opens_store=not c.log.lane)
        for c in lane_configs(config)
    ]
    return ThreadLanes(buffers)


def _behind(
    store: WrappableStore, postgres: str | None, schema: str, config: BufferConfig, timeout_s: float
) -> tuple[Ledger, Backing[ThreadState]]:
    """Return the ledger that keeps the watermarks, and what the store offers.

    Raises ConfigError when the ledger's database is not known, or the store cannot be wrapped.
    """
    # Not getattr: a store that delegates every attribute to an inner store would take the inner store's method.
    if inspect.getattr_static(store, "behind", None) is not None:
        found: tuple[Ledger, Backing[ThreadState]] | None = store.behind(postgres, config, timeout_s)  # type: ignore[attr-defined]
        if found is not None:
            return found
    check_wrappable(store)
    if postgres is None:
        raise ConfigError("give `postgres`: the database of your store, where the buffer keeps its watermarks")
    ledger = PostgresLedger.configured(config, postgres, store, ledger_schema(schema, config.log), timeout_s)
    return ledger, Backing(kind_of(store), ComparingReader(store, ledger))
