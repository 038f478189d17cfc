"""The functions of a schema, whose texts name the schema.

Where a schema is renamed, or a copy of one is restored and renamed, Postgres takes everything along but the texts of
functions: these go on reading and writing the schema that they were made for. So they are made again before anybody
calls them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from psycopg import AsyncConnection, sql

from bufstore.errors import ConfigError

#: One statement that makes a function, with the function's name and its body.
_FUNCTION = re.compile(
    r"CREATE (?:OR REPLACE )?(FUNCTION \{schema\}\.([a-z0-9_]+)\((?:(?!\$body\$).)*\$body\$(.*?)\$body\$)", re.DOTALL
)
#: Finds those of some functions in a schema whose body does not name it. All our bodies have a space before the name,
#: which tells the end of a longer name with quotation marks in it from ours.
_ELSEWHERE = """
SELECT array_agg(p.proname::text ORDER BY p.proname)
FROM pg_catalog.pg_proc AS p JOIN pg_catalog.pg_namespace AS n ON n.oid = p.pronamespace
WHERE n.nspname = {schema} AND p.proname = ANY ({names}) AND strpos(p.prosrc, {named}) = 0
"""


def functions_of(migrations: Iterable[str]) -> dict[str, str]:
    """Return, by name, the statements that make or replace the functions, as the last of these migrations has them.

    Functions whose body names no schema are left out: they are the same in each.
    """
    found = [match for text in migrations for match in _FUNCTION.finditer(text)]
    return {name: f"CREATE OR REPLACE {made}" for made, name, body in (m.groups() for m in found) if "{schema}" in body}


def elsewhere(schema: str, names: Iterable[str]) -> sql.Composed:
    """Return the question which of these functions in the schema name another one: a list, or null.

    It has no parameters, because a ``%`` in the schema's name would then need care.
    """
    named = f" {sql.Identifier(schema).as_string()}."
    return sql.SQL(_ELSEWHERE).format(schema=schema, names=list(names), named=named)


async def made_elsewhere(connection: AsyncConnection[Any], schema: str, names: Iterable[str]) -> list[str]:
    """Return those of these functions in the schema that name another one. Only reads."""
    row = await (await connection.execute(elsewhere(schema, names))).fetchone()
    return row[0] or [] if row is not None else []


def not_ours(schema: str, functions: Iterable[str], why: str) -> ConfigError:
    """Return the error for functions that name another schema. `why`: they stay so; with what to do."""
    return ConfigError(
        f"the functions {', '.join(functions)} in schema {schema!r} read and write another schema: this one was "
        f"renamed, or is a copy. {why}. Nothing was read or written"
    )
