"""Where a job's checkpoints are, and how its sink works."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from ssl import SSLContext
from typing import Literal

from bufstore.buffer.target import check_flushable
from bufstore.config import BufferConfig, LogConfig, NatsConfig, Secretive, as_nats_config, check_kinds
from bufstore.errors import ConfigError, NoLog
from bufstore.nats.finding import FoundLog, find_log
from bufstore.postgres.connection.migrate import check_schema
from bufstore.postgres.ledger.ledger import PostgresLedger
from bufstore.threads.postgres.store import PostgresThreadStore
from bufstore.threads.protocol import kind_of
from bufstore.types import check_choice, check_id

_TIMEOUT_S = 30.0

Mode = Literal["log", "postgres"]
BadRows = Literal["fail", "quarantine"]


@dataclass(frozen=True, kw_only=True, repr=False)
class Deployment(Secretive):
    """The log and the database of one deployment. The author of a job sets it.

    Spark sends it to the executors as it is; its repr shows no secret. The log's settings (partitions, replicas) are
    read from the server.
    """

    #: One or several URLs, or a NatsConfig. An SSLContext cannot be sent to executors: name files (`TlsFiles`), which
    #: are on every machine that runs tasks.
    nats: str | Sequence[str] | NatsConfig = field(metadata={"secret": True})
    postgres: str = field(metadata={"secret": True})
    schema: str = "bufstore"
    stream: str = LogConfig.stream
    bucket: str = LogConfig.bucket

    def __post_init__(self) -> None:
        check_kinds(self)
        object.__setattr__(self, "nats", as_nats_config(self.nats))
        if isinstance(self.server.tls, SSLContext):
            raise ConfigError(
                "an SSLContext cannot be sent to Spark's executors: give NatsConfig.tls as TlsFiles, with paths there, "
                "or use a tls:// URL, which trusts their systems' CAs"
            )
        LogConfig(stream=self.stream, bucket=self.bucket)
        check_schema(self.schema)

    @property
    def server(self) -> NatsConfig:
        """The settings for connecting to NATS."""
        assert isinstance(self.nats, NatsConfig)
        return self.nats

    async def find_log(self) -> LogConfig:
        """Return the log's settings on the server, for writing into the log or the PostgresThreadStore behind it.

        Raises NoLog when there is no log, ConfigDrift when it is flushed into another kind of store, LogUnavailable.
        """
        found = await self.look()
        check_flushable(self.stream, found.target, kind_of(PostgresThreadStore))
        return found.config

    async def look(self) -> FoundLog:
        """Return the log's settings on the server, and the store it is flushed into. Raises NoLog, LogUnavailable."""
        found = await find_log(self.server, self.stream, self.bucket, "bufstore-spark")
        if found is None:
            raise NoLog(self.stream)
        return found

    def store(self, *, pool_size: int) -> PostgresThreadStore:
        """Return the store of the threads' tables, not yet connected."""
        return PostgresThreadStore(self.postgres, schema=self.schema, pool_size=pool_size)

    @asynccontextmanager
    async def database(self, log: LogConfig) -> AsyncIterator[tuple[PostgresThreadStore, PostgresLedger]]:
        """Open the threads' tables and the ledger of this log for the block, but not the log."""
        store = self.store(pool_size=1)
        ledger, _ = store.behind(None, BufferConfig.fitting(log), _TIMEOUT_S)
        async with AsyncExitStack() as stack:
            for part in (store, ledger):
                stack.push_async_callback(part.aclose)
                await part.open()
            yield store, ledger


@dataclass(frozen=True, kw_only=True, repr=False)
class SinkConfig(Deployment):
    """A sink of one streaming query (or backfill). The author of a job sets it."""

    #: The source's name in every thread that it writes to. One query has it while its checkpoint folder lives.
    app_id: str
    #: "log": rows go through the log, as from any writer. "postgres": rows go past the log, for backfills of threads
    #: that have no other writer meanwhile (rows that need the log's checks still go through it).
    mode: Mode = "log"
    #: What happens to a row that cannot become a checkpoint: "fail" ends the batch (after all other threads are
    #: written), "quarantine" puts the row into the table ``spark_quarantine`` and goes on.
    bad_rows: BadRows = "fail"
    #: The number of tasks that write at the same time; None: Spark's number of shuffle partitions.
    tasks: int | None = None
    #: The number of checkpoints that a task has on their way at a time.
    in_flight: int = 4096
    #: The bytes of rows that a task decodes and has on their way at a time, beside the rows that Spark hands it; one
    #: row may be larger. Decoded rows take several times as much memory.
    in_flight_bytes: int = 16 << 20
    #: How long a write may take, in seconds. None: 30 s, or half of the log's failover window if that is less.
    append_timeout_s: float | None = None
    #: How long, in seconds, the sink waits while nothing gets through because a server is away or the log is full; then
    #: the batch fails. Raise it for outages that take hours to mend. Lower it so that somebody is called sooner.
    outage_timeout_s: float = 3600.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_id(self.app_id, "app_id")
        check_choice(self.mode, Mode, "SinkConfig.mode", ConfigError)
        check_choice(self.bad_rows, BadRows, "SinkConfig.bad_rows", ConfigError)
        if self.in_flight < 1 or self.in_flight_bytes < 1 or (self.tasks is not None and self.tasks < 1):
            raise ConfigError("SinkConfig.in_flight, in_flight_bytes and tasks must be positive")
        if not self.outage_timeout_s >= 0:
            raise ConfigError("SinkConfig.outage_timeout_s must not be negative")
        if self.append_timeout_s is not None and not 0 < self.append_timeout_s < float("inf"):
            raise ConfigError("SinkConfig.append_timeout_s must be positive")
