"""SQL files: numbered migrations, and the named statements beside them.

A folder of SQL files belongs to one *part* of tables. ``NNNN_what.sql`` are its migrations, applied in order,
once. Each other file has the statements about one subject, each with a name and a sentence that says what it is for:

    -- name: lock_thread
    -- The thread's row, so that nobody changes it meanwhile.
    SELECT …;

In all of them ``{schema}`` stands for the (quoted) schema name.

A rolling upgrade runs two releases on the same tables, and a rollback runs the older one on the newer tables. So a
migration may begin with the line ``-- Works with: NNNN``: the release whose newest migration is NNNN, and every later
one, still works after this migration. NNNN is recorded with the migration, because an older release cannot read the
file. A migration without that line shuts out all earlier releases. Expand first, contract a release later: see
docs/OPERATIONS.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from importlib.resources.abc import Traversable
from typing import Any, LiteralString

import psycopg
from psycopg import AsyncConnection, sql
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_random

from bufstore.errors import ConfigError, StoreMisconfigured, StoreUnavailable
from bufstore.failpoints import Failpoint, reach

_NUMBERED = re.compile(r"(\d{4})_.+\.sql")
#: One block of a file of statements; blank lines separate the blocks.
_STATEMENT = re.compile(r"-- name: ([a-z][a-z0-9_]*)\n((?:-- (?!name:).+\n)+)((?!--)(?:(?!-- name:)[^;])+);")
_TABLE = re.compile(r"CREATE TABLE \{schema\}\.([a-z_]+)")
#: Finds tables whose rows are all hidden from this role by row level security: no policy lets it read any of them.
_HIDING = """
SELECT string_agg(c.relname, ', ' ORDER BY c.relname)
FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE n.nspname = %s AND c.relname = ANY (%s) AND row_security_active(c.oid) AND NOT EXISTS (
    SELECT FROM pg_policies AS p, unnest(p.roles) AS r (name)
    WHERE (p.schemaname, p.tablename) = (n.nspname, c.relname) AND p.permissive = 'PERMISSIVE'
        AND p.cmd IN ('ALL', 'SELECT') AND (r.name = 'public' OR pg_has_role(r.name, 'USAGE'))
)
"""
_WORKS_WITH = re.compile(r"-- Works with: (\d{4})$", re.MULTILINE)
#: Encloses the functions' bodies, so the schema's name must not hold it.
_BODY_QUOTE = "$body$"
#: Postgres silently truncates longer identifiers.
_MAX_IDENTIFIER_BYTES = 63
#: The advice for a database in another encoding.
UTF8_NEEDED = "use one made with CREATE DATABASE … ENCODING 'UTF8' TEMPLATE template0"
#: The key of an advisory lock, any fixed number: only one migration at a time runs in a database.
_MIGRATION_LOCK = 0x6275_6673_746F_7265
#: How long a migration waits for a lock on a table, how long it then leaves the tables alone at least, and how long it
#: keeps trying.
_LOCK_S = 1.0
_LOCK_PAUSE_S = 0.5
_LOCKS_S = 6.0


def check_schema(schema: str) -> str:
    """Return `schema` if it can name our schema; else raise ConfigError."""
    reserved = "\0" in schema or _BODY_QUOTE in schema or schema.startswith("pg_")
    try:
        size = len(schema.encode())
    except UnicodeEncodeError:  # a lone surrogate
        size = 0
    if reserved or not 1 <= size <= _MAX_IDENTIFIER_BYTES:
        raise ConfigError(
            f"schema {schema!r}: a name of 1 to {_MAX_IDENTIFIER_BYTES} bytes is needed, "
            f"without NUL, lone surrogates and {_BODY_QUOTE}, that does not start with pg_"
        )
    return schema


def queries(folder: Traversable, schema: str) -> dict[str, LiteralString]:
    """Return the statements of the folder's files by name, without their comments, for `schema`.

    They have ``$1`` placeholders, for psycopg's raw cursors: there a ``%`` in a schema's name needs no care. Raises
    ValueError when a file holds anything but statements, or two statements have one name.
    """
    found: dict[str, LiteralString] = {}
    for file in folder.iterdir():
        if not file.name.endswith(".sql") or _NUMBERED.fullmatch(file.name):
            continue
        for block in re.split(r"\n{2,}", file.read_text(encoding="utf-8").strip()):
            statement = _STATEMENT.fullmatch(block)
            if statement is None:
                raise ValueError(f"{file.name}: expected `-- name: …`, a comment and a statement, not {block[:80]!r}")
            name = statement[1]
            if name in found:
                raise ValueError(f"{file.name}: {name!r} is the name of another statement, too")
            found[name] = rendered(statement[3], schema)
    return found


async def migrate(connection: AsyncConnection[Any], schema: str, folder: Traversable, part: str) -> list[int]:
    """Bring the tables of `part` in `schema` up to date; return the versions that were applied now.

    All migrations run in one transaction, in one process at a time. A schema that is up to date is only read, so a role
    without DDL rights can start an app. Tables of a newer release are left alone. Raises ConfigError when this release
    cannot work with them, or when there are none yet and the database is not in UTF-8; StoreMisconfigured when row
    level security hides rows, or the role may not create the tables; StoreUnavailable when another session held a lock
    on the tables for too long: then nothing was changed.
    """
    check_schema(schema)
    migrations = migrations_of(folder, schema)
    async with connection.transaction():  # one instead of four, in each process that starts, for each part
        await check_rows_shown(connection, schema, tables_of(folder))
        missing = await _missing(connection, schema, part, migrations)
    if not missing:
        return []
    # Existing tables may have any encoding: their app's ids are in it, and the app must not be shut out.
    if len(missing) == len(migrations) and (encoding := await encoding_of(connection)) != "UTF8":
        raise ConfigError(
            f"the database's encoding is {encoding}, which cannot store every id: {UTF8_NEEDED}. Nothing was changed"
        )
    try:
        async for attempt in AsyncRetrying(
            retry=retry_if_exception_type(psycopg.errors.LockNotAvailable),
            wait=wait_random(_LOCK_PAUSE_S, 2 * _LOCK_PAUSE_S),
            stop=stop_after_delay(_LOCKS_S),
            reraise=True,
        ):
            with attempt:
                applied = await _migrate_at_once(connection, schema, part, migrations)
    except psycopg.errors.LockNotAvailable as e:
        raise StoreUnavailable(
            f"the {part} tables in schema {schema!r} could not be migrated: another session holds a lock on them "
            "(a long query, a dump, VACUUM FULL). Nothing was changed. See pg_stat_activity, let it end, and try again"
        ) from e
    except psycopg.errors.InsufficientPrivilege as e:
        raise StoreMisconfigured(
            f"the {part} tables in schema {schema!r} are missing or were made by an older release, and this role may "
            f"not create them ({e.diag.message_primary}): run `bufstore setup --grant ROLE` with their owner's rights"
        ) from e
    reach(Failpoint.MIGRATION_DONE)
    return applied


async def check_rows_shown(connection: AsyncConnection[Any], schema: str, tables: Iterable[str]) -> None:
    """Raise StoreMisconfigured when row level security hides all rows of one of these tables: reads would find none."""
    row = await (await connection.execute(_HIDING, [schema, list(tables)])).fetchone()
    if row is not None and row[0] is not None:
        raise StoreMisconfigured(
            f"row level security hides the rows of {row[0]} in schema {schema!r} from this role: as the tables' owner, "
            "ALTER TABLE … DISABLE ROW LEVEL SECURITY on each, or CREATE POLICY … USING (true) for this role"
        )


async def encoding_of(connection: AsyncConnection[Any]) -> str:
    """Return the encoding in which the database stores text."""
    row = await (await connection.execute("SELECT current_setting('server_encoding')")).fetchone()
    assert row is not None
    return str(row[0])


async def _migrate_at_once(
    connection: AsyncConnection[Any], schema: str, part: str, migrations: Mapping[int, LiteralString]
) -> list[int]:
    """Migrate in one transaction, or fail; return the versions that were applied."""
    async with connection.transaction():
        for statement in waiting():
            await connection.execute(statement)
        missing = await _missing(connection, schema, part, migrations)
        if missing:
            await make_schema(connection, schema)
            for statement in preparing(schema):
                await connection.execute(statement)
        for version in missing:
            await connection.execute(migrations[version])
            reach(Failpoint.MIGRATION_HALF)
            await connection.execute(recording(schema, part, version, migrations[version]))
    return missing


async def _missing(
    connection: AsyncConnection[Any], schema: str, part: str, migrations: Mapping[int, LiteralString]
) -> list[int]:
    """Return the versions that are not applied yet. Raises ConfigError if this release cannot work with the others."""
    applied = (await applied_migrations(connection, schema)).get(part, {})
    if not works_with(applied, max(migrations)):
        raise ConfigError(
            f"the {part} tables in schema {schema!r} have version {max(applied)}, made by a newer release that "
            f"works only with version {max(applied.values())} and later; this release knows up to "
            f"{max(migrations)}: upgrade bufstore"
        )
    return sorted(migrations.keys() - applied.keys())


def migrations_of(folder: Traversable, schema: str) -> dict[int, LiteralString]:
    """Return the folder's migrations by version, for `schema`."""
    return {version: rendered(file.read_text(encoding="utf-8"), schema) for version, file in _files(folder).items()}


def tables_of(folder: Traversable) -> list[str]:
    """Return the tables that the folder's migrations make, and the table that records migrations."""
    texts = [file.read_text(encoding="utf-8") for file in _files(folder).values()]
    return ["bufstore_migrations", *(name for text in texts for name in _TABLE.findall(text))]


def newest(folder: Traversable) -> int:
    """Return the newest version of the folder's tables that this release knows."""
    return max(_files(folder))


def _files(folder: Traversable) -> dict[int, Traversable]:
    return {int(match[1]): file for file in folder.iterdir() if (match := _NUMBERED.fullmatch(file.name))}


def oldest_release(migration: str, version: int) -> int:
    """Return the newest migration of the oldest release that works after this one: as the file says, else `version`."""
    said = _WORKS_WITH.search(migration)
    return int(said[1]) if said else version


def works_with(applied: Mapping[int, int], newest_known: int) -> bool:
    """Return whether a release whose newest migration is `newest_known` works with tables that have these migrations.

    `applied`: each migration's version, with the oldest release that works after it.
    """
    return all(oldest <= newest_known for version, oldest in applied.items() if version > newest_known)


async def applied_migrations(connection: AsyncConnection[Any], schema: str) -> dict[str, dict[int, int]]:
    """Return, by part, the versions that were applied, each with the oldest release that works after it."""
    table = sql.SQL("{}.bufstore_migrations").format(sql.Identifier(schema))
    if not await has_table(connection, schema, "bufstore_migrations"):
        return {}
    # Through JSON, because the column may be missing: earlier releases made the table without it.
    cursor = await connection.execute(
        sql.SQL("SELECT room, version, coalesce((to_jsonb(m) ->> 'works_with')::int, version) FROM {} AS m").format(
            table
        )
    )
    applied: dict[str, dict[int, int]] = {}
    for part, version, oldest in await cursor.fetchall():
        applied.setdefault(part, {})[version] = oldest
    return applied


async def has_table(connection: AsyncConnection[Any], schema: str, table: str) -> bool:
    """Return whether the schema holds a table."""
    # Do not use to_regclass: a session that found nothing may still say so after it has waited for the table's creator.
    there = "SELECT FROM pg_tables WHERE schemaname = %s AND tablename = %s"
    return bool((await connection.execute(there, [schema, table])).rowcount)


async def has_schema(connection: AsyncConnection[Any], schema: str) -> bool:
    """Return whether the schema is there."""
    return bool((await connection.execute("SELECT FROM pg_namespace WHERE nspname = %s", [schema])).rowcount)


async def make_schema(connection: AsyncConnection[Any], schema: str) -> None:
    """Create the schema unless it is there."""
    # Not with IF NOT EXISTS alone: that needs the right to create schemas even when this one exists.
    if not await has_schema(connection, schema):
        await connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(schema)))


def waiting() -> list[sql.Composed]:
    """Return what a migrating transaction begins with: one transaction at a time, and short waits for locks."""
    return [
        sql.SQL("SELECT pg_advisory_xact_lock({})").format(_MIGRATION_LOCK),
        # While a change of a table waits for a reader, all other sessions wait behind the change.
        sql.SQL("SET LOCAL lock_timeout = {}").format(f"{round(_LOCK_S * 1000)}ms"),
    ]


def preparing(schema: str) -> list[sql.Composed]:
    """Return the statements that make the table of the migrations, in an existing schema."""
    statements: list[LiteralString] = [
        "CREATE TABLE IF NOT EXISTS {}.bufstore_migrations ("
        "room text, version int, applied_at timestamptz NOT NULL DEFAULT now(), PRIMARY KEY (room, version))",
        # The oldest release that works with the tables as they are from this migration on.
        "ALTER TABLE {}.bufstore_migrations ADD COLUMN IF NOT EXISTS works_with int",
    ]
    return [sql.SQL(statement).format(sql.Identifier(schema)) for statement in statements]


def recording(schema: str, part: str, version: int, migration: str) -> sql.Composed:
    """Return the statement that records that a migration was applied."""
    return sql.SQL("INSERT INTO {}.bufstore_migrations (room, version, works_with) VALUES ({}, {}, {})").format(
        sql.Identifier(schema), part, version, oldest_release(migration, version)
    )


def rendered(text: str, schema: str) -> LiteralString:
    """Return the text of one of our SQL files for `schema`."""
    # Our own text with a quoted identifier in it: as literal as a string that is read from a file can be.
    return text.replace("{schema}", sql.Identifier(schema).as_string())
