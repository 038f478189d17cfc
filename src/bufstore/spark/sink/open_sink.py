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
#: No user waits for a task, so its writes may take long, within the log's failover window.
_APPEND_TIMEOUT_S = 30.0


class OpenSink(NamedTuple):
    """See the module."""

    store: BufferedThreadStore
    ledger: SparkLedger
    #: In mode="postgres".
    direct: BackfillWriter | None


async def open_sink(config: SinkConfig) -> OpenSink:
    """On the process's loop: what is open already, or opened now. Raises as `BufferedThreadStore.open` does."""

    async def open_() -> OpenSink:
        log = await config.find_log()
        if config.mode == "postgres" and log.lanes > 1:
            raise ConfigError(f"SinkConfig.mode must be 'log': stream {log.stream} has {log.lanes} lanes")
        longest = config.append_timeout_s or min(_APPEND_TIMEOUT_S, log.failover_window_s / 2)
        buffer = BufferConfig.fitting(log, flusher=False, append_timeout_s=longest)
        inner = config.store(pool_size=_POOL)
        store = await BufferedThreadStore.open(inner, nats=config.server, config=buffer)
        ledger = SparkLedger(config.postgres, config.schema)
        await ledger.open()
        direct = BackfillWriter(inner, store.buffer) if config.mode == "postgres" else None
        return OpenSink(store, ledger, direct)

    # Whoever signs in as somebody else, or finds the log elsewhere, has a connection of its own.
    c = config
    server = replace(c.server, servers=tuple(c.server.servers))
    key = (server, c.postgres, c.schema, c.stream, c.bucket, c.append_timeout_s, c.mode)
    return await loop().opened(key, open_)
