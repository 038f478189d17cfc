"""Where a job's checkpoints are, and how its sink works."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

from bufstore.buffer.target import check_flushable
from bufstore.config import BufferConfig, LogConfig, NatsConfig, Secretive, as_nats_config, check_whole
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

    Goes to the executors as it is; its repr shows no secret. What the log is like (partitions, replicas) is read from
    the server.
    """

    #: One URL or several, or a NatsConfig; without an SSLContext, which cannot travel: name a ``tls://`` URL.
    nats: str | Sequence[str] | NatsConfig = field(metadata={"secret": True})
    postgres: str = field(metadata={"secret": True})
    schema: str = "bufstore"
    stream: str = LogConfig.stream
    bucket: str = LogConfig.bucket

    def __post_init__(self) -> None:
        object.__setattr__(self, "nats", as_nats_config(self.nats))
        if self.server.tls is not None:
            raise ConfigError(
                "an SSLContext cannot be sent to Spark's executors: use a tls:// URL, which trusts their systems' CAs"
            )
        LogConfig(stream=self.stream, bucket=self.bucket)
        check_schema(self.schema)

    @property
    def server(self) -> NatsConfig:
        """How to reach NATS."""
        assert isinstance(self.nats, NatsConfig)
        return self.nats

    async def find_log(self) -> LogConfig:
        """The log as it stands on the server, to write into it or a PostgresThreadStore behind it.

        Raises NoLog when there is no log, ConfigDrift when it is flushed into another kind of store, LogUnavailable.
        """
        found = await self.look()
        check_flushable(self.stream, found.target, kind_of(PostgresThreadStore))
        return found.config

    async def look(self) -> FoundLog:
        """The log as it stands on the server, and where it is flushed to. Raises NoLog, LogUnavailable."""
        found = await find_log(self.server, self.stream, self.bucket, "bufstore-spark")
        if found is None:
            raise NoLog(self.stream)
        return found

    def store(self, *, pool_size: int) -> PostgresThreadStore:
        """The threads' tables, not connected."""
        return PostgresThreadStore(self.postgres, schema=self.schema, pool_size=pool_size)

    @asynccontextmanager
    async def database(self, log: LogConfig) -> AsyncIterator[tuple[PostgresThreadStore, PostgresLedger]]:
        """The threads' tables and the ledger of this log for the block, without the log."""
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

    #: Names the source in every thread that it writes to. One query, for as long as its checkpoint folder lives.
    app_id: str
    #: "log": through the log, as any writer. "postgres": past the log, for backfills of threads that have no other
    #: writer meanwhile (rows that need the log's checks go through it all the same).
    mode: Mode = "log"
    #: What a row that cannot become a checkpoint does: "fail" ends the batch (when all other threads are written),
    #: "quarantine" puts it into the table ``spark_quarantine`` and goes on.
    bad_rows: BadRows = "fail"
    #: Tasks that write at the same time; None: Spark's shuffle partitions.
    tasks: int | None = None
    #: Checkpoints on their way per task.
    in_flight: int = 4096
    #: Bytes of rows that a task decodes and has on their way at a time, beside what Spark hands it; one row may be
    #: larger. Decoded, they take several times as much.
    in_flight_bytes: int = 16 << 20
    #: How long a write may take. None: 30 s, or as long as the log's failover window allows if that is less.
    append_timeout_s: float | None = None
    #: How long the sink waits for a server that is away or a log that is full, while nothing gets through; then the
    #: batch fails. Longer: for outages that nobody mends in an hour. Shorter: so that somebody is called sooner.
    outage_timeout_s: float = 3600.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole(self)
        check_id(self.app_id, "app_id")
        check_choice(self.mode, Mode, "SinkConfig.mode", ConfigError)
        check_choice(self.bad_rows, BadRows, "SinkConfig.bad_rows", ConfigError)
        if self.in_flight < 1 or self.in_flight_bytes < 1 or (self.tasks is not None and self.tasks < 1):
            raise ConfigError("SinkConfig.in_flight, in_flight_bytes and tasks must be positive")
        if not self.outage_timeout_s >= 0:
            raise ConfigError("SinkConfig.outage_timeout_s must not be negative")
