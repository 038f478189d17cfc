"""What `bufstore doctor` looks at in Postgres. Only reads."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from psycopg import AsyncConnection, sql

from bufstore.buffer.lanes import ledger_schema
from bufstore.cli.connect import Endpoints, langgraph_schema
from bufstore.cli.doctor.diagnosis import CheckResult, Level, Notes
from bufstore.cli.doctor.together import SeenLog, check_together
from bufstore.config import LogConfig
from bufstore.errors import BufstoreError, ConfigError, StoreMisconfigured
from bufstore.langgraph.postgres.store import PRIVILEGES, check_migration, check_never_flushed
from bufstore.postgres.connection.conninfo import opened_within
from bufstore.postgres.connection.functions import made_elsewhere
from bufstore.postgres.connection.migrate import (
    UTF8_NEEDED,
    all_functions,
    applied_migrations,
    check_rows_shown,
    encoding_of,
    function_names,
    newest,
    tables_of,
    works_with,
)
from bufstore.postgres.connection.pool import new_pool
from bufstore.threads.postgres.tables import folder_of

_TIMEOUT_S = 5.0
_VERSION_MIN = 15
_CONNECTIONS_MIN = 10
_DURABLE = {
    "fsync": "a crash of the machine may ruin the database: set it on",
    "synchronous_commit": "a crash may lose the last commits; the log fills them in only if they are younger than "
    "failover_window_s: set it on",
    "full_page_writes": "a crash may tear pages: set it on",
}
_PARTS = ("buffer", "threads")
# The privileges are asked for one at a time: of several, any one would be enough for Postgres.
_REFUSED = """
SELECT string_agg(tablename, ', ') FROM pg_tables
WHERE schemaname = %s AND tablename = ANY (%s::text[]) AND tablename <> 'bufstore_migrations' AND NOT (
    SELECT bool_and(has_table_privilege(quote_ident(schemaname) || '.' || quote_ident(tablename), privilege))
    FROM unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) AS privilege
)
"""
_NOT_CALLED = """
SELECT string_agg(DISTINCT proname, ', ') FROM pg_proc
WHERE pronamespace = to_regnamespace(quote_ident(%s)) AND proname = ANY (%s::text[])
    AND prorettype <> 'trigger'::regtype AND NOT has_function_privilege(oid, 'EXECUTE')
"""
_LACKING = """
SELECT string_agg(privilege || ' on ' || name, ', ') FROM unnest(%s::text[], %s::text[]) AS needed (name, privilege)
WHERE has_table_privilege(to_regclass(quote_ident(%s) || '.' || name), privilege) IS NOT TRUE
"""
_IS_LANGGRAPHS = "SELECT count(*) = 1 FROM pg_tables WHERE schemaname = %s AND tablename = 'checkpoint_migrations'"


async def check_postgres(target: Endpoints, log: SeenLog | None) -> list[CheckResult]:
    """Return the checks. `log`: None if it could not be seen. The ledger of a lane has a schema of its own."""
    notes = Notes("Postgres")
    config = log.config if log is not None else LogConfig()
    langgraphs = langgraph_schema(log.target) if log is not None else None
    of_lane = [Notes(f"Postgres, lane {config.lane}")] if config.lane else []
    pool = new_pool(str(target.plain(pool_size=1).pool.conninfo), size=1)
    try:
        await pool.open(wait=False)
        # Of several hosts, one that hangs takes its time before the next is asked, also in `check_together`.
        async with pool.lend(2 * opened_within(pool.conninfo, _TIMEOUT_S), _TIMEOUT_S) as connection:
            await _look(notes, connection)
            await _look_at_tables(notes, connection, target, target.schema, None if of_lane else log)
            for lane in of_lane:
                await _look_at_tables(lane, connection, target, ledger_schema(target.schema, config), log)
            if langgraphs is not None:
                await _langgraph(notes, connection, langgraphs, target.schema)
    except BufstoreError as e:
        if notes.checks:
            notes.say("looked at", Level.BAD, str(e))
        else:
            notes.say("reachable", Level.BAD, str(e), "see the address, the server and the login")
    finally:
        await pool.close()
    return [check for each in (notes, *of_lane) for check in each.checks]


async def _look(notes: Notes, connection: AsyncConnection[Any]) -> None:
    notes.say("reachable", Level.OK, "yes")
    number = connection.info.server_version
    found = f"{number // 10000}.{number % 10000}"
    notes.require("version", number >= _VERSION_MIN * 10000, found, "Postgres 15 or later is needed", Level.BAD)
    encoding = await encoding_of(connection)
    notes.require("encoding", encoding == "UTF8", encoding, UTF8_NEEDED, Level.BAD)
    for name, advice in _DURABLE.items():
        value = await _value(connection, "SELECT current_setting(%s)", name)
        notes.require(name, value not in ("off", "local" if name == "synchronous_commit" else ""), value, advice)
    reads = await _value(connection, "SELECT pg_is_in_recovery() OR current_setting('transaction_read_only') = 'on'")
    notes.require("writable", not reads, "read-only" if reads else "yes", "give the address of the primary", Level.BAD)
    used = await _value(connection, "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'")
    limit = int(await _value(connection, "SELECT current_setting('max_connections')"))
    advice = "each instance takes up to about 20: raise max_connections, or put a pooler in front"
    notes.require("connections", limit - used >= _CONNECTIONS_MIN, f"{used} of {limit} in use", advice)


async def _look_at_tables(
    notes: Notes, connection: AsyncConnection[Any], target: Endpoints, schema: str, log: SeenLog | None
) -> None:
    """Check the tables of this schema. `log`: the log whose ledger is in it, if that is known."""
    await check_rows_shown(connection, schema, [t for part in _PARTS for t in tables_of(folder_of(part))])
    versions = await applied_migrations(connection, schema)
    if "buffer" not in versions:
        await _none(notes, "tables", connection, schema, named=log is not None and log.target is not None)
    elif not await _tables(notes, connection, schema, versions):
        return
    if log is None:
        return
    if "buffer" in versions and max(versions["buffer"]) < newest(folder_of("buffer")):
        notes.say("log", Level.UNKNOWN, "not compared: the tables are older", "look again once they are migrated")
        return
    await check_together(notes, target, log, tables="buffer" in versions)


async def _none(notes: Notes, what: str, connection: AsyncConnection[Any], schema: str, *, named: bool) -> None:
    """Note that tables are missing. `named`: the log says which database it is flushed into, so not this one."""
    there = await _value(connection, "SELECT to_regnamespace(quote_ident(%s)) IS NOT NULL", schema)
    question = (
        "SELECT has_schema_privilege(%s, 'CREATE')"
        if there
        else "SELECT has_database_privilege(current_database(), 'CREATE') AND %s <> ''"
    )
    may = await _value(connection, question, schema)
    advice = "the first store that opens makes them" if may else "this user may not create them: grant CREATE"
    notes.say(
        what,
        Level.WARNING if may else Level.BAD,
        f"there are none in schema {schema!r} yet",
        "give the database and the schema that the log is flushed into" if named else advice,
    )


async def _tables(
    notes: Notes, connection: AsyncConnection[Any], schema: str, versions: Mapping[str, Mapping[int, int]]
) -> bool:
    """Check the tables; return whether they can be read and written."""
    for part in _PARTS:
        if part not in versions:
            continue  # with an app's own store there are no tables of threads
        known, theirs = newest(folder_of(part)), max(versions[part])
        found = f"version {theirs} of {known}"
        if theirs > known:
            fits = works_with(versions[part], known)
            advice = "a newer release has migrated them: upgrade bufstore"
            if fits:
                advice = "a newer release has migrated them; this one works with them: finish the upgrade"
            notes.say(f"{part} tables", Level.WARNING if fits else Level.BAD, found, advice)
        else:
            notes.require(f"{part} tables", theirs == known, found, "the next store that opens migrates them")
    names = [name for part in _PARTS for name in function_names(folder_of(part))]
    strange = await made_elsewhere(connection, schema, names)
    if strange:
        found = f"{', '.join(strange)} read and write another schema: this one was renamed, or is a copy"
        advice = "run `bufstore setup` with their owner's rights; the next store that opens does it, too, if it may"
        notes.say("functions", Level.BAD, found, advice)
        return False
    folders = {part: folder_of(part) for part in _PARTS}
    folders |= {part: files(f"bufstore.{part}") / "sql" for part in ("mailbox", "spark")}
    ours = [table for part, folder in folders.items() if part in versions for table in tables_of(folder)]
    refused = await _value(connection, _REFUSED, schema, ours)
    called = set[str]().union(*(all_functions(folder_of(part)) for part in _PARTS))
    not_called = await _value(connection, _NOT_CALLED, schema, sorted(called))
    lacking = [f"not all of SELECT, INSERT, UPDATE, DELETE on {refused}"] if refused is not None else []
    lacking += [f"no EXECUTE on {not_called}"] if not_called is not None else []
    may = "; ".join(lacking) or f"read and write bufstore's tables in schema {schema!r}"
    notes.require("permissions", not lacking, may, "grant them to bufstore's user", Level.BAD)
    if lacking:
        return False
    parked = await _value(
        connection, sql.SQL("SELECT count(*) FROM {}.buffer_quarantine").format(sql.Identifier(schema))
    )
    notes.require("quarantine", parked == 0, f"{parked} entries", "see `bufstore quarantine list`")
    return True


async def _langgraph(notes: Notes, connection: AsyncConnection[Any], schema: str, buffer_schema: str) -> None:
    """Check LangGraph's tables, which the log is flushed into."""
    if not await _value(connection, _IS_LANGGRAPHS, schema):
        try:
            await check_never_flushed(connection, schema, buffer_schema)
        except StoreMisconfigured as e:
            notes.say("LangGraph tables", Level.BAD, str(e))
        else:
            await _none(notes, "LangGraph tables", connection, schema, named=False)
        return
    needed = [(table, privilege) for table, privileges in PRIVILEGES.items() for privilege in privileges]
    lacking = await _value(connection, _LACKING, *map(list, zip(*needed, strict=True)), schema)
    may = f"read and write LangGraph's tables in schema {schema!r}" if lacking is None else f"lacking: {lacking}"
    notes.require("LangGraph permissions", lacking is None, may, "grant them to bufstore's user", Level.BAD)
    if lacking is not None:
        return
    await check_rows_shown(connection, schema, PRIVILEGES)
    version = await _value(
        connection, sql.SQL("SELECT max(v) FROM {}.checkpoint_migrations").format(sql.Identifier(schema))
    )
    try:
        check_migration(schema, version)
    except ConfigError as e:
        notes.say("LangGraph tables", Level.BAD, str(e))
    else:
        notes.say("LangGraph tables", Level.OK, f"migration {version}")


async def _value(connection: AsyncConnection[Any], question: Any, *parameters: Any) -> Any:
    cursor = await connection.execute(question, parameters)
    row = await cursor.fetchone()
    assert row is not None
    return row[0]
