"""`bufstore setup`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import click
import msgspec
from psycopg import AsyncConnection

from bufstore.buffer.lanes import lane_logs, ledger_schema
from bufstore.buffer.target import check_kind
from bufstore.cli.connect import Endpoints, Options, connects
from bufstore.cli.running import reporting_errors
from bufstore.config import BufferConfig, LogConfig
from bufstore.errors import ConfigDrift, ConfigError
from bufstore.langgraph.engine import DEFAULT_LOG
from bufstore.langgraph.postgres.store import BUFFER_SCHEMA
from bufstore.postgres.connection.conninfo import opened_within
from bufstore.postgres.connection.migrate import applied_migrations, check_schema, has_schema, has_table, taking_turns
from bufstore.threads.buffered import BufferedThreadStore
from bufstore.threads.postgres import tables
from bufstore.threads.postgres.store import PostgresThreadStore
from bufstore.threads.protocol import kind_of

_CONNECT_S = 5.0
#: How many seconds all migrations together may take: one may rewrite a table.
_TIMEOUT_S = 3600.0
#: Names that a LangGraph saver has, unless it is told others: a log of messages in their place would lock savers out.
_SAVERS = {"stream": DEFAULT_LOG.stream, "bucket": DEFAULT_LOG.bucket, "schema": BUFFER_SCHEMA}


class SetupReport(msgspec.Struct, kw_only=True):
    """The fields of ``bufstore setup --json``."""

    schema: str
    #: Per part of the tables, the versions that were applied now.
    migrated: Mapping[str, Sequence[int]]
    #: The same for the tables of the other lanes, by schema.
    lanes: Mapping[str, Mapping[str, Sequence[int]]]
    #: Roles that may use the tables now.
    granted: Sequence[str]
    #: Whether the stream was made now; None: it was not checked.
    log_made: bool | None
    log: str


@click.command()
@click.option(
    "--grant",
    "roles",
    metavar="ROLE",
    multiple=True,
    help="Postgres role of an app: it may use the schema's tables and needs no CREATE. May be repeated.",
)
@click.option(
    "--sql",
    "as_sql",
    is_flag=True,
    help="Print the SQL of what the database lacks (of everything, if none is named); change nothing.",
)
@click.option(
    "--own-store",
    is_flag=True,
    help="The app wraps a store of its own, or is a LangGraph saver: make the buffer's tables only, and no log.",
)
@click.option("--mailbox", is_flag=True, help="Make the tables of a mailbox in Postgres only, and no log.")
@click.option("--partitions", type=int, help="LogConfig.partitions of a new log. [default: 8]")
@click.option(
    "--lanes", type=int, help="LogConfig.lanes of a new log, each with a ledger in a schema of its own. [default: 1]"
)
@click.option("--replicas", type=int, help="LogConfig.replicas of a new log. [default: 1]")
@click.option("--max-bytes", type=int, help="LogConfig.max_bytes of a new log. [default: 2147483648]")
@click.option("--subject", help="LogConfig.subject of a new log. [default: thread]")
@click.option(
    "--failover-window", "failover_window_s", type=float, help="LogConfig.failover_window_s of a new log. [default: 60]"
)
@click.option("--archive", is_flag=True, default=None, help="LogConfig.archive of a new log.")
@connects(nats_needed=False)
def setup(options: Options, roles: tuple[str, ...], as_sql: bool, own_store: bool, mailbox: bool, **log: Any) -> None:
    """Make or migrate tables, stream and bucket, with an owner's rights, so that apps need none.

    May be repeated; run it before a new release starts, with --grant again: new tables need it. What exists with other
    settings than the ones given is an error (ConfigDrift) and left as it is. An app with a store of its own, or a
    LangGraph saver, gets its log by opening that once with the owner's rights.
    """
    parts = tables.MAILBOX if mailbox else tables.LEDGER if own_store else tables.PARTS
    context = click.get_current_context()
    wanted = {name: value for name, value in log.items() if value is not None}
    if mailbox and (own_store or wanted):
        raise click.UsageError("--mailbox makes no log: leave out --own-store and the options of a new log.")
    if own_store and wanted.keys() - {"lanes"}:
        raise click.UsageError("--own-store makes no log: of the options of a new log, it takes only --lanes.")
    reporting_errors(LogConfig)(**wanted)
    if as_sql:
        if options.as_json:
            raise click.UsageError("--sql prints SQL: leave out --json.")
        click.echo(_sql(options, parts, roles, context.params, wanted.get("lanes")), nl=False)
        return
    no_log = own_store or mailbox
    if options.named and not (no_log or context.params["nats"] or context.params["embedded"]):
        raise click.UsageError(
            "--nats (or BUFSTORE_NATS) is missing; only --sql, --own-store and --mailbox do without."
        )
    lanes, made = wanted.get("lanes"), None if no_log else wanted
    options.answer(options.run(lambda target: _setup(target, parts, roles, made, lanes)), _show)


def _sql(
    options: Options, parts: Sequence[str], roles: Sequence[str], names: Mapping[str, str], lanes: int | None
) -> str:
    if not options.named:
        if parts is tables.PARTS:
            _check_no_savers(names)
        places = _places(check_schema(names["schema"]), parts, lanes or 1)
        return "".join(tables.script(check_schema(s), tables.everything(s, of), roles) for s, of in places)
    return options.run(lambda target: _missing(target, parts, roles, lanes))


async def _missing(target: Endpoints, parts: Sequence[str], roles: Sequence[str], lanes: int | None) -> str:
    scripts = []
    async with _owner(target, roles) as connection:
        if parts is tables.PARTS and "threads" not in await applied_migrations(connection, target.schema):
            await _check_messages(connection, target)  # else they stand there: an app's own kind of store may use them
        of_all = _lanes(f"schema {target.schema}", lanes, await tables.lanes(connection, target.schema))
        for schema, of in _places(target.schema, parts, of_all):
            there = await has_schema(connection, schema)
            missing = await tables.missing(connection, schema, of)
            again = await tables.functions(connection, schema, of)
            scripts.append(tables.script(schema, missing, roles, new_schema=not there, again=again))
    return "".join(script for script in scripts if script != tables.NOTHING) or tables.NOTHING


def _lanes(what: str, wanted: int | None, found: int | None) -> int:
    """Return how many lanes there are to be. `found`: how many `what` has. Raises ConfigDrift when they differ."""
    if None in (wanted, found) or wanted == found:
        return wanted or found or 1
    raise ConfigDrift(
        what,
        "lanes",
        expected=str(wanted),
        found=str(found),
        way_out="The number of lanes is fixed: leave out --lanes, or choose another stream, bucket and schema.",
    )


def _places(schema: str, parts: Sequence[str], lanes: int) -> list[tuple[str, Sequence[str]]]:
    """Return the schemas, with the parts of the tables in each: for every lane but the first, only the ledger."""
    others = lane_logs(LogConfig(lanes=lanes))[1:] if parts is not tables.MAILBOX else ()
    return [(schema, parts), *((ledger_schema(schema, log), tables.LEDGER) for log in others)]


async def _setup(
    target: Endpoints, parts: Sequence[str], roles: Sequence[str], log: dict[str, Any] | None, wanted: int | None
) -> SetupReport:
    # NATS is asked before anything is made in Postgres: either may be away.
    found = await target.find_log() if log is not None else None
    if found is not None:
        if found.config.lane:
            lane = found.config.lane
            raise ConfigError(f"stream {target.stream!r} is lane {lane} of a log: name the first lane's stream")
        wanted = _lanes(f"stream {target.stream}", wanted, found.config.lanes)
    async with _owner(target, roles) as connection:
        if found is not None:  # the log may be that of an app's own store
            target.check_threads(found)
        if log is not None:
            await _check_messages(connection, target, named=found is None)
        lanes = _lanes(f"schema {target.schema}", wanted, await tables.lanes(connection, target.schema))
        migrated: dict[str, dict[str, list[int]]] = {}
        for schema, of in _places(target.schema, parts, lanes):
            migrated[schema] = await tables.make_tables(connection, schema, of)
            async with connection.transaction():
                if roles:  # Postgres refuses concurrent grants on the same table
                    await connection.execute(taking_turns())
                for role in roles:
                    for statement in tables.grants(schema, role):
                        await connection.execute(statement)
                    await tables.check_granted(connection, schema, role)
    if log is not None:
        new = LogConfig(stream=target.stream, bucket=target.bucket, lanes=lanes)
        await _make_log(target, found.config if found is not None else new, log)
    made = None if log is None else found is None
    return SetupReport(
        schema=target.schema,
        migrated=migrated.pop(target.schema),
        lanes=migrated,
        granted=roles,
        log_made=made,
        log=target.stream,
    )


async def _check_messages(connection: AsyncConnection[Any], target: Endpoints, *, named: bool = True) -> None:
    """Raise ConfigDrift, ConfigError if tables of messages would stand where another store has its own.

    `named`: no log says whose these names are.
    """
    noted = await tables.target(connection, target.schema)
    way_out = "Another store's buffer has its tables here: `bufstore setup --own-store` makes what those need."
    check_kind(f"schema {target.schema}", noted, kind_of(PostgresThreadStore), way_out)
    if named and not await has_table(connection, target.schema, "threads"):
        _check_no_savers({what: getattr(target, what) for what in _SAVERS})


def _check_no_savers(names: Mapping[str, str]) -> None:
    """Raise ConfigError if a log of messages would stand where a LangGraph saver looks for its own."""
    for what, name in _SAVERS.items():
        if names[what] == name:
            raise ConfigError(
                f"{what} {name} is a LangGraph saver's, and this makes a log of messages: start a saver once with the "
                "owner's rights; `bufstore setup --own-store --grant ROLE` then grants what others need of its "
                "buffer's tables (docs/LANGGRAPH.md, Rights)"
            )


@asynccontextmanager
async def _owner(target: Endpoints, roles: Sequence[str]) -> AsyncIterator[AsyncConnection[Any]]:
    async with target.plain(pool_size=1) as plain:
        # Only a migration may take longer.
        async with plain.pool.lend(opened_within(plain.pool.conninfo, _CONNECT_S), _CONNECT_S) as connection:
            for role in roles:
                await tables.check_grantee(connection, role)
        async with plain.pool.lend(_TIMEOUT_S) as connection:
            yield connection


async def _make_log(target: Endpoints, found: LogConfig, wanted: dict[str, Any]) -> None:
    """Make or check the log, as the first start of an app would. Raises ConfigDrift."""
    config = BufferConfig.fitting(replace(found, **wanted), flusher=False)
    async with await BufferedThreadStore.open(target.plain(pool_size=2), nats=target.nats, config=config):
        pass


def _show(report: SetupReport) -> None:
    for schema, parts in ({report.schema: report.migrated} | dict(report.lanes)).items():
        for part, versions in parts.items():
            done = f"migrations {versions[0]} to {versions[-1]} applied" if versions else "up to date"
            click.echo(f"{part} tables in schema {schema}: {done}")
    for role in report.granted:
        click.echo(f"role {role} may use them, and needs no CREATE")
    if report.log_made is not None:
        click.echo(f"log {report.log} and its bucket: {'made' if report.log_made else 'already there, as required'}")
