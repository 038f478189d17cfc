"""What the owner of the tables does for others: a script of statements to run, and the rights of an app's role."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any, LiteralString

from psycopg import AsyncConnection, sql

from bufstore.buffer.lanes import ledger_schema
from bufstore.buffer.target import Target
from bufstore.config import LANES_MAX, LogConfig
from bufstore.errors import ConfigError, StoreMisconfigured
from bufstore.postgres.connection.migrate import (
    applied_migrations,
    check_schema,
    has_schema,
    migrate,
    migrations_of,
    preparing,
    recording,
    remaking,
    taking_turns,
    waiting,
)

#: Where the migrations of each part of the tables are, by the part's name in ``bufstore_migrations``.
_PACKAGES = {
    "buffer": "bufstore.postgres.ledger",
    "threads": "bufstore.threads.postgres",
    "mailbox": "bufstore.mailbox",
}
#: The parts that a buffered PostgresThreadStore needs, that the buffer of any other store needs, and a mailbox.
LEDGER = ("buffer",)
PARTS = (*LEDGER, "threads")
MAILBOX = ("mailbox",)
#: What `script` says when there is nothing to be run.
NOTHING = "-- Nothing is missing.\n"


async def make_tables(connection: AsyncConnection[Any], schema: str, parts: Sequence[str]) -> dict[str, list[int]]:
    """Create or migrate the tables of these parts. Returns, per part, the versions applied now. Raises as `migrate`."""
    return {part: await migrate(connection, schema, folder_of(part), part) for part in parts}


async def missing(connection: AsyncConnection[Any], schema: str, parts: Sequence[str]) -> dict[str, list[int]]:
    """Return, per part, the versions that are not applied. Only reads."""
    applied = await applied_migrations(connection, schema)
    known = everything(schema, parts)
    return {part: [v for v in versions if v not in applied.get(part, {})] for part, versions in known.items()}


async def functions(connection: AsyncConnection[Any], schema: str, parts: Sequence[str]) -> list[str]:
    """Return the statements that make again those functions of these parts that name another schema. Only reads."""
    return [text for part in parts for text in await remaking(connection, schema, folder_of(part), part)]


async def lanes(connection: AsyncConnection[Any], schema: str) -> int | None:
    """How many lanes the store of this schema has; None if the schema does not say. Only reads.

    A store notes the number when it opens (`bufstore.buffer.lanes.Layout`); until then, the lanes' ledgers are counted.
    """
    noted = await _noted_lanes(connection, schema)
    if noted is not None:
        return noted
    count = 1
    while await has_schema(connection, ledger_schema(schema, LogConfig(lanes=LANES_MAX, lane=count))):
        count += 1
    return count if count > 1 else None


async def target(connection: AsyncConnection[Any], schema: str) -> Target | None:
    """Return the target that the schema's ledger notes for its log; None if it notes none. Only reads."""
    row = await _noted(connection, schema, "target", "domain", "store", "target")
    return Target(*row) if row is not None else None


async def _noted_lanes(connection: AsyncConnection[Any], schema: str) -> int | None:
    row = await _noted(connection, schema, "lanes", "lanes")
    return int(row[0]) if row is not None else None


async def _noted(connection: AsyncConnection[Any], schema: str, given: str, *columns: str) -> tuple[Any, ...] | None:
    """Return these columns of what the schema notes of its log; None unless column `given` is there, and not NULL."""
    there = (
        "SELECT FROM information_schema.columns "
        "WHERE table_schema = %s AND table_name = 'buffer_log' AND column_name = %s"
    )
    if not (await connection.execute(there, [schema, given])).rowcount:
        return None
    names = sql.SQL(", ").join(map(sql.Identifier, columns))
    noted = sql.SQL("SELECT {} FROM {}.buffer_log WHERE {} IS NOT NULL").format(
        names, sql.Identifier(schema), sql.Identifier(given)
    )
    row: tuple[Any, ...] | None = await (await connection.execute(noted)).fetchone()
    return row


def everything(schema: str, parts: Sequence[str]) -> dict[str, list[int]]:
    """Return, per part, all versions that this release knows: those that an empty database lacks."""
    return {part: sorted(migrations_of(folder_of(part), schema)) for part in parts}


def script(
    schema: str,
    versions: Mapping[str, Sequence[int]],
    roles: Sequence[str],
    *,
    new_schema: bool = True,
    again: Sequence[str] = (),
) -> str:
    """Write `make_tables` and `grants` as one transaction, which the owner runs with psql. `again`: see `functions`."""
    check_schema(schema)
    parts: list[str] = []
    if again or any(versions.values()):
        parts += [_text(statement) for statement in waiting()]
    elif roles:
        parts.append(_text(taking_turns()))
    parts += again
    if any(versions.values()):
        if new_schema:
            parts.append(_text(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(schema))))
        parts += [_text(statement) for statement in preparing(schema)]
    for part, wanted in versions.items():
        migrations = migrations_of(folder_of(part), schema)
        for version in wanted:
            parts.append(f"-- {part} {version:04}\n{migrations[version].strip().removesuffix(';')}")
            parts.append(_text(recording(schema, part, version, migrations[version])))
    parts += [_text(statement) for role in roles for statement in grants(schema, role)]
    if not parts:
        return NOTHING
    return "BEGIN;\n\n" + "".join(f"{part};\n\n" for part in parts) + "COMMIT;\n"


def grants(schema: str, role: str) -> list[sql.Composed]:
    """The statements that let an app's role work with all tables of the schema, and alter none of them.

    They cover the tables that exist: grant them again after a migration.
    """
    names = {"schema": sql.Identifier(schema), "role": sql.Identifier(role)}
    statements: list[LiteralString] = [
        "GRANT USAGE ON SCHEMA {schema} TO {role}",
        "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO {role}",
        "REVOKE INSERT, UPDATE, DELETE ON {schema}.bufstore_migrations FROM {role}",
        "GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA {schema} TO {role}",
        "GRANT USAGE ON ALL SEQUENCES IN SCHEMA {schema} TO {role}",
    ]
    return [sql.SQL(statement).format(**names) for statement in statements]


async def check_granted(connection: AsyncConnection[Any], schema: str, role: str) -> None:
    """Raise StoreMisconfigured if `role` did not get what `grants` gives: Postgres only warns of it."""
    given = "SELECT has_schema_privilege(%s, %s, 'USAGE') AND has_table_privilege(%s, %s, 'SELECT')"
    table = sql.Identifier(schema, "bufstore_migrations").as_string(None)
    if (await (await connection.execute(given, [role, schema, role, table])).fetchone()) != (True,):
        raise StoreMisconfigured(
            f"role {role!r} got no rights in schema {schema!r}: the connected role may use the tables, but not grant "
            "that to others; connect as their owner"
        )


async def check_grantee(connection: AsyncConnection[Any], role: str) -> None:
    """Raise ConfigError if `role` is the connected role: it owns the tables, and `grants` would take rights from it."""
    if (await (await connection.execute("SELECT current_user = %s", [role])).fetchone()) == (True,):
        raise ConfigError(f"role {role!r} is the one that owns the tables: it needs no grant; name the app's role")


def folder_of(part: str) -> Traversable:
    return files(_PACKAGES[part]) / "sql"


def _text(statement: sql.Composable) -> str:
    return statement.as_string(None)
