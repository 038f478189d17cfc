"""The options of a read of threads, runs or messages, as strings that Spark hands over. No Spark in here."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bufstore.config import LogConfig, NatsConfig, Secretive
from bufstore.errors import ConfigError
from bufstore.postgres.connection.conninfo import has_secret
from bufstore.postgres.connection.migrate import check_schema
from bufstore.spark.connection_options import POSTGRES_VARIABLE, connection, named, words
from bufstore.spark.option_values import count, ids, number, timestamp_us
from bufstore.spark.source.options import ReadOptions
from bufstore.spark.tables.narrowing import ALL, Narrowing
from bufstore.spark.tables.table_rows import TABLES

#: What `pg_export_snapshot` returns.
_SNAPSHOT = re.compile(r"[0-9A-Fa-f]+(-[0-9A-Fa-f]+)*")


@dataclass(frozen=True, kw_only=True, repr=False)
class TableOptions(Secretive):
    """What a job wants to read. The author of a job sets it; its repr shows no secret."""

    nats: NatsConfig = field(metadata={"secret": True})
    postgres: str = field(metadata={"secret": True})
    schema: str = "bufstore"
    stream: str = LogConfig.stream
    table: str
    columns: Sequence[str]
    #: The first position that is not read, of each lane; empty: where the logs end when a task begins.
    ending_positions: Sequence[int] = ()
    #: The moment of Postgres that is read (`bufstore.spark.hold_position`); None: the moment when a task begins.
    snapshot: str | None = None
    tasks: int | None = None
    min_tasks: int = os.cpu_count() or 2
    narrowing: Narrowing = ALL

    def log(self, stream: str) -> ReadOptions:
        """Return the options for reading the log of a lane."""
        threads = self.narrowing.threads
        return ReadOptions(nats=self.nats, stream=stream, threads=sorted(threads) if threads is not None else ())


#: Option → what it says. These say what is read; they come beside the options of the connection.
NAMES = {
    "table": "threads, runs or messages",
    "postgresUrl": "the database, as URL or key=value; Spark masks it in plans",
    "postgres": "instead of postgresUrl: the same without a password",
    "schema": "of bufstore's tables (default bufstore)",
    "columns": "the columns you need, comma-separated (default: all)",
    "threads": "only of these threads, as a JSON list of ids",
    "agents": "only of these agents, as a JSON list (threads: of the latest run; not of messages)",
    "changedFrom": "only what was changed then or later, as ISO 8601",
    "changedBefore": "only what was changed before, as ISO 8601",
    "endingPosition": "the first position that is not read, or one for each lane (default: where the log ends)",
    "postgresSnapshot": "a snapshot of Postgres that is held at endingPosition: see hold_position",
    "numPartitions": "tasks that a read is divided into (default: minPartitions)",
    "minPartitions": "tasks, if numPartitions is not given (default: the driver's cores)",
}


def table_options(given: Mapping[str, str]) -> TableOptions:
    """Return the options. Raises ConfigError, naming the option."""
    found = named(given, NAMES)
    table = found.get("table", "")
    if table not in TABLES:
        raise ConfigError(f"option table must be one of {', '.join(TABLES)}")
    columns = words(found, "columns") or list(TABLES[table])
    if unknown := set(columns) - TABLES[table].keys():
        raise ConfigError(f"option columns: table {table} has no {min(unknown)}: {', '.join(TABLES[table])}")
    if "agents" in found and "agent_id" not in TABLES[table]:
        raise ConfigError(f"option agents: table {table} has no column agent_id")
    if "postgresSnapshot" in found and "endingPosition" not in found:
        raise ConfigError("option postgresSnapshot needs endingPosition: hold_position gives both")
    if not _SNAPSHOT.fullmatch(found.get("postgresSnapshot", "0")):
        raise ConfigError("option postgresSnapshot is not the name of a snapshot")
    ending = found["endingPosition"].split(",") if "endingPosition" in found else ()
    return TableOptions(
        nats=connection(found),
        postgres=postgres_of(found),
        schema=check_schema(found.get("schema", TableOptions.schema)),
        stream=LogConfig(stream=found.get("stream", LogConfig.stream)).stream,
        table=table,
        columns=tuple(columns),
        ending_positions=[number("endingPosition", position.strip()) for position in ending],
        snapshot=found.get("postgresSnapshot"),
        tasks=count(found, "numPartitions"),
        min_tasks=count(found, "minPartitions") or TableOptions.min_tasks,
        narrowing=Narrowing(
            threads=frozenset(ids(found, "threads")) or None,
            agents=frozenset(ids(found, "agents")) or None,
            changed_from=timestamp_us(found, "changedFrom"),
            changed_before=timestamp_us(found, "changedBefore"),
        ),
    )


def postgres_of(found: Mapping[str, str]) -> str:
    """Return the database. Raises ConfigError, also for a password in the option that plans show."""
    if ("postgres" in found) == ("postgresUrl" in found):
        raise ConfigError(
            f"give one of the options postgres and postgresUrl, or {POSTGRES_VARIABLE} in the driver's environment: "
            "the database"
        )
    if "postgres" in found and has_secret(found["postgres"]):
        raise ConfigError("option postgres has a password, which plans would show: give it as postgresUrl")
    return found.get("postgres") or found["postgresUrl"]
