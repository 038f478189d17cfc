"""What the tasks of a process share: the log, the tables, and the way past the log, opened once."""

from __future__ import annotations

from typing import NamedTuple

from bufstore.config import BufferConfig
from bufstore.spark.config import SinkConfig
from bufstore.spark.process_loop import loop
from bufstore.spark.sink.spark_ledger import SparkLedger
from bufstore.threads.buffered import BufferedThreadStore
from bufstore.threads.postgres.store import PostgresThreadStore

_POOL = 4
#: How long a write may take, within the log's failover window: long, because no user waits for a task.
_APPEND_TIMEOUT_S = 30.0


class OpenSink(NamedTuple):
    """See the module."""

    store: BufferedThreadStore
    ledger: SparkLedger
    #: The store's tables, for the way past the log.
    tables: PostgresThreadStore


async def open_sink(config: SinkConfig) -> OpenSink:
    """Return what is open on the process's loop already, or open it now. Raises as `BufferedThreadStore.open` does."""

    async def open_() -> OpenSink:
        log = await config.find_log()
        longest = config.append_timeout_s or min(_APPEND_TIMEOUT_S, log.failover_window_s / 2)
        buffer = BufferConfig.fitting(log, flusher=False, append_timeout_s=longest)
        inner = config.store(pool_size=_POOL)
        store = await BufferedThreadStore.open(inner, nats=config.server, config=buffer)
        ledger = SparkLedger(config.postgres, config.schema)
        await ledger.open()
        return OpenSink(store, ledger, inner)

    # A config with another login or another log gets a store of its own. Both modes share one store, because each open
    # store hears all that is written.
    c = config
    return await loop().opened((c.server, c.postgres, c.schema, c.stream, c.bucket, c.append_timeout_s), open_)
