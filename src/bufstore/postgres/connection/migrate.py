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
from typing import Any, LiteralString, NamedTuple

import psycopg
from psycopg import AsyncConnection, sql
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_random

from bufstore.errors import BufstoreError, ConfigError, StoreMisconfigured, StoreUnavailable
from bufstore.failpoints import Failpoint, reach
from bufstore.postgres.connection.functions import elsewhere, functions_of, made_elsewhere, not_ours

_NUMBERED = re.compile(r"(\d{4})_.+\.sql")
#: One block of a file of statements; blank lines separate the blocks.
_STATEMENT = re.compile(r"-- name: ([a-z][a-z0-9_]*)\n((?:-- (?!name:).+\n)+)((?!--)(?:(?!-- name:)[^;])+);")
_FUNCTION = re.compile(r"CREATE (?:OR REPLACE )?FUNCTION \{schema\}\.(\w+)")
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
#: What sets up a part for apps without the rights to do that.
_SETS_UP = {
    "threads": "run `bufstore setup --grant ROLE`",
    "buffer": "run `bufstore setup --grant ROLE` (with --own-store for a store of your own)",
    "mailbox": "run `bufstore setup --mailbox --grant ROLE`",
}
#: The same for other parts.
_OPEN_ONCE = "open it once"
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
    if not isinstance(schema, str):
        raise ConfigError(f"the schema must be a str, not {type(schema).__name__}")
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


async def migrate(
    connection: AsyncConnection[Any], schema: str, folder: Traversable, part: str, way_out: str | None = None
) -> list[int]:
    """Bring the tables of `part` in `schema` up to date; return the versions that were applied now.

    All migrations run in one transaction, in one process at a time. A schema that is up to date is only read, so a role
    without DDL rights can start an app. Tables of a newer release are left alone. Functions that name another schema
    are made again. Raises ConfigError when this release cannot work with the tables, when the role may not make those
    functions again, or when there are no tables yet and the database is not in UTF-8; StoreMisconfigured when row level
    security hides rows, or the role may not create the tables; StoreUnavailable when another session held a lock on the
    tables for too long: then nothing was changed. `way_out`: what a role that may create nothing is told; None: what
    the part has for that.
    """
    check_schema(schema)
    texts = _texts(folder)
    async with connection.transaction():  # one instead of four, in each process that starts, for each part
        await check_rows_shown(connection, schema, tables_of(folder))
        lacking = await _lacking(connection, schema, part, texts)
    if not any(lacking):
        return []
    # Existing tables may have any encoding: their app's ids are in it, and the app must not be shut out.
    if len(lacking.versions) == len(texts) and (encoding := await encoding_of(connection)) != "UTF8":
        raise ConfigError(
            f"the database's encoding is {encoding}, which cannot store every id: {UTF8_NEEDED}. Nothing was changed"
        )
    applied = await _patiently(connection, schema, part, texts, lacking, way_out)
    reach(Failpoint.MIGRATION_DONE)
    return applied


async def look(connection: AsyncConnection[Any], schema: str, folder: Traversable, part: str) -> bool:
    """Return whether `schema` has the tables of `part`. Only reads.

    For who must change nothing, and so cannot call `migrate`. Raises ConfigError when a migration is lacking, when this
    release cannot work with the tables, or when their functions name another schema; StoreMisconfigured when row level
    security hides rows.
    """
    texts = _texts(folder)
    async with connection.transaction():
        await check_rows_shown(connection, schema, tables_of(folder))
        lacking = await _lacking(connection, schema, part, texts)
    if len(lacking.versions) == len(texts):
        return False
    if lacking.versions:
        raise ConfigError(
            f"the {part} tables in schema {schema!r} were made by an older release, and reading does not "
            f"migrate them (to version {max(texts)}): open the store once with this release, or run `bufstore setup`"
        )
    if lacking.functions:
        raise not_ours(schema, lacking.functions, "The next store that opens makes them again")
    return True


async def own_functions(connection: AsyncConnection[Any], schema: str, folder: Traversable, part: str) -> None:
    """Make again the functions of `part` that name another schema, and change nothing else.

    For who has not called `migrate`: it costs one question. Raises ConfigError when this role or this release may not
    make them again; StoreUnavailable as `migrate`.
    """
    texts = _texts(folder)
    names = list(functions_of(texts.values()))
    async with connection.transaction():
        if not await made_elsewhere(connection, schema, names):
            return
        lacking = await _lacking(connection, schema, part, texts)
    await _patiently(connection, schema, part, texts, lacking._replace(versions=[]))
    async with connection.transaction():
        if strange := await made_elsewhere(connection, schema, names):
            raise not_ours(schema, strange, "No migration of it is recorded: copy it whole, with bufstore_migrations")


async def remaking(connection: AsyncConnection[Any], schema: str, folder: Traversable, part: str) -> list[str]:
    """Return the statements that make again the functions of `part` that name another schema. Only reads."""
    return list((await _lacking(connection, schema, part, _texts(folder))).functions.values())


async def _patiently(
    connection: AsyncConnection[Any],
    schema: str,
    part: str,
    texts: Mapping[int, str],
    lacking: _Lacking,
    way_out: str | None = None,
) -> list[int]:
    """Make what is lacking, and wait for others' locks; return the versions that were applied."""
    try:
        return await AsyncRetrying(
            retry=retry_if_exception_type(psycopg.errors.LockNotAvailable),
            wait=wait_random(_LOCK_PAUSE_S, 2 * _LOCK_PAUSE_S),
            stop=stop_after_delay(_LOCKS_S),
            reraise=True,
        )(_at_once, connection, schema, part, texts, migrating=bool(lacking.versions))
    except psycopg.errors.LockNotAvailable as e:
        raise StoreUnavailable(
            f"the {part} tables in schema {schema!r} could not be migrated: another session holds a lock on them "
            "(a long query, a dump, VACUUM FULL). Nothing was changed. See pg_stat_activity, let it end, and try again"
        ) from e
    except psycopg.errors.InsufficientPrivilege as e:
        raise _refused(schema, part, lacking, e.diag.message_primary, way_out) from e


def _refused(schema: str, part: str, lacking: _Lacking, why: str | None, way_out: str | None) -> BufstoreError:
    """Return the error for a role that may not make what is lacking."""
    way_out = way_out or f"{_SETS_UP.get(part, _OPEN_ONCE)} with their owner's rights"
    if lacking.versions:
        return StoreMisconfigured(
            f"the {part} tables in schema {schema!r} are missing or were made by an older release, and this role may "
            f"not create them ({why}): {way_out}"
        )
    return not_ours(schema, lacking.functions, f"This role may not replace them ({why}): {way_out}")


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


async def _at_once(
    connection: AsyncConnection[Any], schema: str, part: str, texts: Mapping[int, str], *, migrating: bool
) -> list[int]:
    """Make what is lacking in one transaction, or fail; return the versions that were applied."""
    async with connection.transaction():
        for statement in waiting():
            await connection.execute(statement)
        missing, functions = await _lacking(connection, schema, part, texts)
        for function in functions.values():
            await connection.execute(function)
        if not migrating:
            return []
        if missing:
            await make_schema(connection, schema)
            for statement in preparing(schema):
                await connection.execute(statement)
        for version in missing:
            await connection.execute(rendered(texts[version], schema))
            reach(Failpoint.MIGRATION_HALF)
            await connection.execute(recording(schema, part, version, texts[version]))
    return missing


class _Lacking(NamedTuple):
    """What a part of a schema lacks."""

    #: The migrations that are not applied yet.
    versions: list[int]
    #: The statements that make again the functions that name another schema, by the function's name.
    functions: dict[str, LiteralString]


async def _lacking(connection: AsyncConnection[Any], schema: str, part: str, texts: Mapping[int, str]) -> _Lacking:
    """Return what is lacking. Raises ConfigError if this release cannot work with what is there, or not mend it."""
    of_all, strange = await _applied(connection, schema, functions_of(texts.values()))
    applied = of_all.get(part, {})
    _check_known(schema, part, applied, max(texts))
    # As far as the migrations were applied: a function must fit to its tables.
    known = functions_of(text for version, text in sorted(texts.items()) if version in applied)
    functions = {name: rendered(known[name], schema) for name in strange if name in known}
    if functions and max(applied) > max(texts):
        raise not_ours(  # it may have replaced them
            schema, functions, "A newer release has migrated its tables: open it once with that release"
        )
    return _Lacking(sorted(texts.keys() - applied.keys()), functions)


async def check_known(connection: AsyncConnection[Any], schema: str, folders: Mapping[str, Traversable]) -> None:
    """Raise ConfigError if this release cannot work with the tables of these parts, which may be missing. Only reads.

    For who only reads the tables, and so has not called `migrate`.
    """
    applied = await applied_migrations(connection, schema)
    for part, folder in folders.items():
        _check_known(schema, part, applied.get(part, {}), newest(folder))


def _check_known(schema: str, part: str, applied: Mapping[int, int], newest_known: int) -> None:
    if not works_with(applied, newest_known):
        raise ConfigError(
            f"the {part} tables in schema {schema!r} have version {max(applied)}, made by a newer release that "
            f"works only with version {max(applied.values())} and later; this release knows up to "
            f"{newest_known}: upgrade bufstore"
        )


def migrations_of(folder: Traversable, schema: str) -> dict[int, LiteralString]:
    """Return the folder's migrations by version, for `schema`."""
    return {version: rendered(text, schema) for version, text in _texts(folder).items()}


def tables_of(folder: Traversable) -> list[str]:
    """Return the tables that the folder's migrations make, and the table that records migrations."""
    return ["bufstore_migrations", *(name for text in _texts(folder).values() for name in _TABLE.findall(text))]


def function_names(folder: Traversable) -> list[str]:
    """Return the functions that the folder's migrations make and that name the schema."""
    return list(functions_of(_texts(folder).values()))


def all_functions(folder: Traversable) -> set[str]:
    """Return the names of all functions that the folder's migrations make."""
    return {name for text in _texts(folder).values() for name in _FUNCTION.findall(text)}


def newest(folder: Traversable) -> int:
    """Return the newest version of the folder's tables that this release knows."""
    return max(_files(folder))


def _texts(folder: Traversable) -> dict[int, str]:
    """Return the migrations as they are in the folder, in order."""
    return {version: file.read_text(encoding="utf-8") for version, file in sorted(_files(folder).items())}


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
    return (await _applied(connection, schema, ()))[0]


async def _applied(
    connection: AsyncConnection[Any], schema: str, functions: Iterable[str]
) -> tuple[dict[str, dict[int, int]], list[str]]:
    """Return what `applied_migrations` returns, and those of these functions that name another schema."""
    if not await has_table(connection, schema, "bufstore_migrations"):
        return {}, []
    # `works_with` through JSON, because the column may be missing: earlier releases made the table without it.
    question = sql.SQL(
        "SELECT room, version, coalesce((to_jsonb(m) ->> 'works_with')::int, version), ({}) "
        "FROM {}.bufstore_migrations AS m"
    ).format(elsewhere(schema, functions), sql.Identifier(schema))
    applied: dict[str, dict[int, int]] = {}
    strange: list[str] = []
    for part, version, oldest, named in await (await connection.execute(question)).fetchall():
        applied.setdefault(part, {})[version] = oldest
        strange = named or []
    return applied, strange


async def has_table(connection: AsyncConnection[Any], schema: str, table: str) -> bool:
    """Return whether the schema holds a table."""
    # Do not use to_regclass: a session that found nothing may still say so after it has waited for the table's creator.
    there = "SELECT FROM pg_catalog.pg_tables WHERE schemaname = %s AND tablename = %s"
    return bool((await connection.execute(there, [schema, table])).rowcount)


async def has_schema(connection: AsyncConnection[Any], schema: str) -> bool:
    """Return whether the schema is there."""
    return bool((await connection.execute("SELECT FROM pg_catalog.pg_namespace WHERE nspname = %s", [schema])).rowcount)


async def make_schema(connection: AsyncConnection[Any], schema: str) -> None:
    """Create the schema unless it is there."""
    # Not with IF NOT EXISTS alone: that needs the right to create schemas even when this one exists.
    if not await has_schema(connection, schema):
        await connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(schema)))


def taking_turns() -> sql.Composed:
    """Return what a transaction begins with of which one at a time may run: a migration, or grants."""
    return sql.SQL("SELECT pg_advisory_xact_lock({})").format(_MIGRATION_LOCK)


def waiting() -> list[sql.Composed]:
    """Return what a migrating transaction begins with: one transaction at a time, and short waits for locks."""
    return [
        taking_turns(),
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
