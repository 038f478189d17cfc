"""What the tasks of a process share: the log, the tables, and the way past the log, opened once."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from bufstore.config import BufferConfig
from bufstore.errors import ConfigError
from bufstore.spark.config import SinkConfig
from bufstore.spark.process_loop import loop
from bufstore.spark.sink.backfill import BackfillWriter
from bufstore.spark.sink.spark_ledger import SparkLedger
from bufstore.threads.buffered import BufferedThreadStore

_POOL = 4
#: How long a write may take, within the log's failover window: long, because no user waits for a task.
_APPEND_TIMEOUT_S = 30.0


class OpenSink(NamedTuple):
    """See the module."""

    store: BufferedThreadStore
    ledger: SparkLedger
    #: The way past the log; None where there are several lanes.
    direct: BackfillWriter | None


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
        direct = BackfillWriter(inner, store.buffer) if len(store.lanes.all) == 1 else None
        return OpenSink(store, ledger, direct)

    # A config with another login or another log gets a store of its own. Both modes share one store, because each open
    # store hears all that is written.
    c = config
    server = replace(c.server, servers=tuple(c.server.servers))
    opened = await loop().opened((server, c.postgres, c.schema, c.stream, c.bucket, c.append_timeout_s), open_)
    if config.mode == "postgres" and opened.direct is None:
        lanes = len(opened.store.lanes.all)
        raise ConfigError(f"SinkConfig.mode must be 'log': stream {config.stream} has {lanes} lanes")
    return opened
