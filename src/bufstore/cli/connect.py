"""The options that commands share, and the `Endpoints` that they name."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec
from click.core import ParameterSource
from psycopg.conninfo import make_conninfo

from bufstore.buffer.buffer import Buffer
from bufstore.buffer.lanes import ledger_schema
from bufstore.buffer.prepare import compare
from bufstore.buffer.side_by_side import Lanes
from bufstore.buffer.target import Target, check_flushable
from bufstore.cli.output import show_fields, show_json
from bufstore.cli.running import configure_logs, reporting_errors, run
from bufstore.config import BufferConfig, LogConfig, NatsConfig
from bufstore.errors import ConfigError, EmbeddedError, LogRolledBack, NoLog, StoreMisconfigured, StoreUnavailable
from bufstore.langgraph.domain import LANGGRAPH
from bufstore.langgraph.engine import CheckpointEngine
from bufstore.langgraph.postgres.store import PostgresCheckpointStore, schema_of
from bufstore.nats.finding import FoundLog, find_log
from bufstore.nats.session import session_to
from bufstore.postgres.connection.conninfo import check_conninfo, opened_within
from bufstore.postgres.connection.migrate import applied_migrations, check_schema
from bufstore.threads.behind import buffer_of as threads_buffer
from bufstore.threads.buffered import BufferedThreadStore
from bufstore.threads.postgres.store import PostgresThreadStore
from bufstore.threads.protocol import kind_of
from bufstore.tls_files import TlsFiles

if TYPE_CHECKING:
    from bufstore.embedded import Servers

T = TypeVar("T")
R = TypeVar("R")

#: A buffer of any domain.
AnyBuffer = Buffer[Any, Any, Any]

#: The path of a file that is there.
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
STREAM = click.option("--stream", default="THREADLOG", show_default=True, envvar="BUFSTORE_STREAM", show_envvar=True,
                      help="JetStream stream that is the log.")  # fmt: skip
BUCKET = click.option("--bucket", default="thread-hot", show_default=True, envvar="BUFSTORE_BUCKET", show_envvar=True,
                      help="JetStream bucket beside the log.")  # fmt: skip
_OPTIONS = (
    click.option("--nats", metavar="URL", envvar="BUFSTORE_NATS", show_envvar=True,
                 help="NATS server; several are separated by commas."),
    click.option("--postgres", metavar="DSN", envvar="BUFSTORE_POSTGRES", show_envvar=True,
                 help="Postgres, as URL or key=value."),
    click.option("--embedded", is_flag=True, help="Start servers just for this command, on 127.0.0.1."),
    click.option("--data", metavar="DIR", type=click.Path(file_okay=False, path_type=Path),
                 help="With --embedded: keep the data in this folder. Default: a fresh temporary one."),
    click.option("--nats-creds", metavar="FILE", envvar="BUFSTORE_NATS_CREDS", show_envvar=True,
                 type=FILE, help="NATS credentials file."),
    click.option("--nats-user", metavar="USER", envvar="BUFSTORE_NATS_USER", show_envvar=True,
                 help="NATS user; the password comes from BUFSTORE_NATS_PASSWORD, a token from BUFSTORE_NATS_TOKEN."),
    click.option("--tls-ca", metavar="FILE", envvar="BUFSTORE_TLS_CA", show_envvar=True, type=FILE,
                 help="CA certificates (PEM) to check NATS' certificate with. Default: those this system trusts."),
    click.option("--tls-cert", metavar="FILE", envvar="BUFSTORE_TLS_CERT", show_envvar=True, type=FILE,
                 help="Client certificate (PEM) for a NATS that asks for one. (TLS for Postgres is part of its DSN.)"),
    click.option("--tls-key", metavar="FILE", envvar="BUFSTORE_TLS_KEY", show_envvar=True, type=FILE,
                 help="The private key of --tls-cert, if that file does not hold it."),
    click.option("--schema", default="bufstore", show_default=True, envvar="BUFSTORE_SCHEMA", show_envvar=True,
                 help="Postgres schema of bufstore's tables."),
    STREAM,
    BUCKET,
    click.option("--json", "as_json", is_flag=True,
                 help="Print one JSON object on standard output, and nothing else there."),
    click.option("-v", "--verbose", count=True, help="Show logs on standard error; twice: all of them."),
)  # fmt: skip


_EMBEDDED_LOG_BYTES = 1 << 30
_CONNECT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Endpoints:
    """Where the servers are, and how to open a store there."""

    nats: NatsConfig
    #: Empty: the options name no Postgres.
    postgres: str = field(repr=False)
    schema: str
    stream: str
    bucket: str
    #: Whether the options name NATS; else `nats` is the default, which a command must not take for it.
    nats_named: bool = True
    #: The embedded servers that the command starts; None: the servers are others'.
    servers: Servers | None = None
    #: The name by which Postgres knows our sessions.
    session: str = field(default_factory=lambda: f"bufstore-{secrets.token_hex(6)}")

    @asynccontextmanager
    async def opened(
        self, *, create: bool = True, **config: Any
    ) -> AsyncIterator[Lanes[Any, Any, Any] | BufferedThreadStore]:
        """Open what flushes the log (all of its lanes), whatever its domain is; the rest is as in `buffered`."""
        found = await self.find_log()
        schema = langgraph_schema(found.target) if found is not None else None
        if found is None or schema is None:
            async with self.buffered(create=create, **config) as store:
                yield store
            return
        fitting = BufferConfig.fitting(found.config, **config)
        engine = CheckpointEngine(self._checkpoints(schema), self.nats, fitting, name=self.session)
        await engine.open()
        try:
            yield engine.lanes
        finally:
            await engine.aclose()

    def buffer_of(self, target: Target | None, config: BufferConfig, *, timeout_s: float = 30.0) -> AnyBuffer:
        """Return the buffer of a log with this target, whatever its domain is; the buffer is not connected yet."""
        schema = langgraph_schema(target)
        if schema is not None:
            ledger, backing = self._checkpoints(schema, timeout_s).of_lane(config.log).behind(config)
            return Buffer(LANGGRAPH, session_to(self.nats, config, self.session), ledger, backing, config)
        return threads_buffer(self.plain(pool_size=2), self.nats, config, name=self.session, timeout_s=timeout_s)

    def _checkpoints(self, schema: str, timeout_s: float = 30.0) -> PostgresCheckpointStore:
        return PostgresCheckpointStore(
            self._conninfo(), schema=schema, buffer_schema=self.schema, pool_size=2, timeout_s=timeout_s
        )

    @asynccontextmanager
    async def buffered(self, *, create: bool = True, **config: Any) -> AsyncIterator[BufferedThreadStore]:
        """Open the buffered store, with the log's configuration as it stands on the server.

        `create`: make a log if there is none; otherwise raise what `check_not_lost` raises, else NoLog.
        `config`: fields of BufferConfig.
        """
        found = await self.find_log()
        if found is not None:
            self.check_threads(found)
            log = found.config
        elif not create:
            await self.check_not_lost()
            raise NoLog(self.stream)
        else:
            log = LogConfig(stream=self.stream, bucket=self.bucket)
            if self.servers is not None:  # this machine's disk may be small
                log = replace(log, max_bytes=_EMBEDDED_LOG_BYTES)
        fitting = BufferConfig.fitting(log, **config)
        async with await BufferedThreadStore.open(self.plain(), nats=self.nats, config=fitting) as store:
            yield store

    def plain(self, *, pool_size: int = 8) -> PostgresThreadStore:
        """Return the Postgres store alone, without a buffer: it reads what Postgres holds."""
        return PostgresThreadStore(self._conninfo(), schema=self.schema, pool_size=pool_size)

    def _conninfo(self) -> str:
        check_conninfo(self.postgres)
        return make_conninfo(self.postgres, application_name=self.session)

    async def find_log(self) -> FoundLog | None:
        """Return the log as it stands on the server, whatever its domain is; None if there is none."""
        return await find_log(self.nats, self.stream, self.bucket, self.session)

    def check_threads(self, log: FoundLog) -> None:
        """Raise ConfigDrift unless the entries of the log may be written into a PostgresThreadStore."""
        check_flushable(self.stream, log.target, kind_of(PostgresThreadStore))

    def check_ours(self, log: FoundLog) -> None:
        """Raise ConfigDrift when the log is flushed into a store that does not come with bufstore."""
        if langgraph_schema(log.target) is None:
            self.check_threads(log)

    async def lost_log(self, lane: int | None, *, applies: bool = False) -> LogConfig:
        """Return what is known of a log that is not on the server. `lane`: the log's lane, if an operator says it.

        `applies`: see `noted`. Raises ConfigError when the database has ledgers of several lanes and `lane` is None:
        only the log could tell; and when it has no ledger of this lane.
        """
        first = LogConfig(stream=self.stream, bucket=self.bucket)
        if lane is None and await self.has_ledger(replace(first, lanes=2, lane=1)):
            raise ConfigError(
                f"there is no log {self.stream!r} on this server, and schema {self.schema!r} has several "
                "lanes: say with `bufstore repair --lane` which one it was (0: the first)"
            )
        # --bucket names the first lane's bucket, as in `find_log`. Any number of lanes finds the ledger, which has the
        # true one.
        log = replace(first, bucket=f"{self.bucket}-{lane}", lanes=lane + 1, lane=lane) if lane else first
        if lane is not None and not await self.has_ledger(log):
            raise ConfigError(f"there is no ledger of lane {lane} in schema {ledger_schema(self.schema, log)!r}")
        async with self._ledger_of(log, applies) as buffer:
            layout = await buffer.ledger.layout() if buffer is not None else None
        return replace(log, lanes=layout.lanes, partitions=layout.partitions) if layout is not None else log

    async def check_not_lost(self) -> None:
        """Raise LogRolledBack if Postgres has entries of the log, which is not on the server.

        Raises ConfigDrift when the bucket is another log's, ConfigError when only an operator knows the log's lane.
        """
        with contextlib.suppress(StoreUnavailable, StoreMisconfigured):
            log = await self.lost_log(None)
            async with self._ledger_of(log) as buffer:
                if buffer is not None:
                    await buffer.shared.check()
                    why = await compare(buffer.log, buffer.ledger, log.stream, None, await buffer.ledger.epoch())
                    if why is not None:
                        raise LogRolledBack(why)

    async def has_ledger(self, log: LogConfig) -> bool:
        """Whether the database has the tables of this log's buffer. Only reads. Raises StoreUnavailable."""
        return await self.has_tables("buffer", ledger_schema(self.schema, log))

    async def has_tables(self, part: str, schema: str) -> bool:
        """Whether the schema has tables of this part of bufstore. Only reads. Raises StoreUnavailable."""
        async with (
            self.plain(pool_size=1) as plain,
            plain.pool.lend(opened_within(plain.pool.conninfo, _CONNECT_S), _CONNECT_S) as connection,
        ):
            return part in await applied_migrations(connection, schema)

    async def noted(self, log: LogConfig, *, applies: bool = False) -> Target | None:
        """Return the target that the database names for its log; None: it names none. `log`: what is known of it.

        `applies`: the caller is going to write into the tables, so they are made or migrated now.
        """
        async with self._ledger_of(log, applies) as buffer:
            return await buffer.ledger.target() if buffer is not None else None

    @asynccontextmanager
    async def _ledger_of(self, log: LogConfig, applies: bool = False) -> AsyncIterator[AnyBuffer | None]:
        """Give a buffer whose ledger can be read; None: the database has none. `applies`: see `noted`."""
        async with self.buffer_of(None, BufferConfig(log=log, flusher=False)).connected() as buffer:
            yield buffer if applies or await buffer.ledger.look() else None


def langgraph_schema(target: Target | None) -> str | None:
    """Return the schema of LangGraph's tables, if that is where a log with this target is flushed to; else None."""
    return schema_of(target.kind) if target is not None else None


@dataclass(frozen=True)
class Options:
    """What the shared options say."""

    as_json: bool
    _unopened: Endpoints | None

    @property
    def named(self) -> bool:
        """Whether the options name servers at all."""
        return self._unopened is not None

    @contextmanager
    def target(self) -> Iterator[Endpoints]:
        """Give the target; embedded servers run inside the block. Raises EmbeddedError."""
        if self._unopened is None:
            raise click.UsageError(
                "No servers given: use --nats and --postgres (or BUFSTORE_NATS and BUFSTORE_POSTGRES), or --embedded."
            )
        servers = self._unopened.servers
        if servers is None:
            yield self._unopened
            return
        for name in [name for name in os.environ if name.startswith("PG")]:
            del os.environ[name]  # libpq would take it for the embedded Postgres
        servers.start()
        try:
            yield replace(self._unopened, nats=NatsConfig(servers=(servers.nats.url,)), postgres=servers.postgres.dsn)
        finally:
            servers.stop()

    def run(self, work: Callable[[Endpoints], Coroutine[Any, Any, T]]) -> T:
        """Run `work` with the target on an event loop of its own, and return its result. Raises EmbeddedError."""
        with self.target() as target:
            return run(work(target))

    def answer(
        self, report: R, show: Callable[[R], None] | str, *, problems: Sequence[str] = (), code: int = 0
    ) -> None:
        """Print the report, as one line of JSON or by `show`, and end the command with `code`.

        `show`: prints the report for people; a text: the title of a table of its fields. `problems` go to stderr.
        """
        if self.as_json:
            show_json(report)
        elif isinstance(show, str):
            assert isinstance(report, msgspec.Struct)
            show_fields(report, show)
        else:
            show(report)
        for problem in problems:
            click.echo(problem, err=True)
        if code:
            raise click.exceptions.Exit(code)


def connects(
    *, embedded_by_default: bool = False, nats_needed: bool = True, postgres_needed: bool = True
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command: add the shared options, and pass what they say as `options`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def wrapped(**given: Any) -> None:
            shared = {name: given.pop(name) for name in _NAMES}
            configure_logs(shared["verbose"])
            options = Options(shared["as_json"], _target(shared, embedded_by_default, nats_needed, postgres_needed))
            reporting_errors(command)(options=options, **given)

        for option in reversed(_OPTIONS):
            wrapped = option(wrapped)
        return wrapped

    return decorate


_NAMES = ("nats", "postgres", "embedded", "data", "nats_creds", "nats_user", "tls_ca", "tls_cert", "tls_key", "schema",
          "stream", "bucket", "as_json", "verbose")  # fmt: skip


def _target(
    shared: dict[str, Any], embedded_by_default: bool, nats_needed: bool, postgres_needed: bool
) -> Endpoints | None:
    """Return the target that the options name, with its servers not started; None if they name none."""
    context = click.get_current_context()
    typed = [n for n in ("nats", "postgres") if context.get_parameter_source(n) is ParameterSource.COMMANDLINE]
    if shared["embedded"] and typed:
        raise click.UsageError(f"--embedded starts servers of its own: leave out --{typed[0]}.")
    nats, postgres = shared["nats"], shared["postgres"]
    embedded = shared["embedded"] or (embedded_by_default and not (nats or postgres))
    if shared["data"] is not None and not embedded:
        raise click.UsageError("--data is for embedded servers: add --embedded, or leave out --data.")
    names = {name: shared[name] for name in ("schema", "stream", "bucket")}
    # Names become part of subjects and statements, so they are checked before a server is asked anything.
    reporting_errors(LogConfig)(stream=names["stream"], bucket=names["bucket"])
    reporting_errors(check_schema)(names["schema"])
    if embedded:
        return Endpoints(nats=NatsConfig(), postgres="", servers=reporting_errors(_servers)(shared["data"]), **names)
    if not nats and not postgres:
        return None
    if (not postgres and postgres_needed) or (not nats and nats_needed):
        missing = "--postgres (or BUFSTORE_POSTGRES)" if nats else "--nats (or BUFSTORE_NATS)"
        raise click.UsageError(f"{missing} is missing; both are needed, or --embedded.")
    config = reporting_errors(_nats_config)(nats, shared) if nats else NatsConfig()
    return Endpoints(nats=config, postgres=postgres, nats_named=bool(nats), **names)


def _servers(data: Path | None) -> Servers:
    # Not imported at the top: every command would then need a Unix, which only embedded servers need.
    try:
        from bufstore.embedded import Servers
    except ModuleNotFoundError as e:
        raise EmbeddedError(
            f"embedded servers run on Linux and macOS only (Python has no {e.name} here): give --nats and --postgres"
        ) from None
    return Servers(data)


def _nats_config(urls: str, shared: dict[str, Any]) -> NatsConfig:
    return NatsConfig(
        servers=urls,
        credentials=shared["nats_creds"],
        user=shared["nats_user"],
        # These are no options, because everybody on the machine can read a command line.
        password=os.environ.get("BUFSTORE_NATS_PASSWORD"),
        token=os.environ.get("BUFSTORE_NATS_TOKEN"),
        tls=_tls_files(shared["tls_ca"], shared["tls_cert"], shared["tls_key"]),
    )


def _tls_files(ca: Path | None, certificate: Path | None, key: Path | None) -> TlsFiles | None:
    """Return the files of the --tls options; None if there are none. Raises ConfigError if they cannot be used."""
    if key is not None and certificate is None:
        raise ConfigError("--tls-key is the key of --tls-cert, which is missing")
    if ca is None and certificate is None:
        return None
    files = TlsFiles(ca=ca, certificate=certificate, key=key)
    files.context()  # before anything is started or asked
    return files
