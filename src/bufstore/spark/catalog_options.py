"""Options of a table of SQL's catalog: ``CREATE TABLE … USING threadlog OPTIONS (…)``.

Spark (4.3) gives a table's options to a source in Python when the table is made, but not when it is read. When a table
is read, Spark gives its schema, with the metadata of its columns; so the options are kept there, too (docs/adr/0043).
Many people can read a catalog, so it takes no login.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow

from bufstore.config import split_url, urls_in
from bufstore.errors import ConfigError
from bufstore.spark.connection_options import NATS_VARIABLE, POSTGRES_VARIABLE

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

#: The option that Spark adds for a table of a catalog only.
_PROVIDER = "provider"
#: The prefix of an option there; a name without it may be one of TBLPROPERTIES.
_OPTION = "option."
#: The key, in the first column's metadata, under which the options are kept.
_KEPT = "bufstore.options"
#: Options that answer the same question: if a read gives one of them, none of the table's in that set counts.
_ALTERNATIVES = (
    {"nats", "natsurl"},
    {"postgres", "postgresurl"},
    {"tlscertificatefile", "tlskeyfile"},
    {"startingposition", "startingtimestamp"},
    {"endingposition", "endingtimestamp"},
    {"threads", "partitions"},
)


def of_catalog(given: Mapping[str, str]) -> dict[str, str] | None:
    """Return the options of a table that is being made in a catalog; None for any other call.

    Raises ConfigError for a login.
    """
    if _PROVIDER not in given:
        return None
    kept = {name.removeprefix(_OPTION).lower(): value for name, value in given.items() if name.startswith(_OPTION)}
    for name in kept:
        if _has_login(name, kept):
            raise ConfigError(
                f"option {name} contains a login, which everybody who can read the catalog would see: give the server "
                f"with its login in the environment of the driver ({NATS_VARIABLE}, {POSTGRES_VARIABLE}), or the login "
                "in a file (credentialsFile with its path, libpq's passfile), or as an option of those who read the "
                "table"
            )
    return kept


def _has_login(name: str, kept: Mapping[str, str]) -> bool:
    if name in ("nats", "natsurl"):
        return any(split_url(url)[1] is not None for url in urls_in(kept[name]))
    if name in ("postgres", "postgresurl"):
        from bufstore.postgres.connection.conninfo import has_secret  # the log alone is read without psycopg

        return has_secret(kept[name])
    if name in ("credentialsfile", "tlscertificatefile", "tlskeyfile"):
        return "-----BEGIN" in kept[name]  # a file's contents, in place of its path
    return name in ("password", "token")


def schema_of(columns: Mapping[str, Any], kept: Mapping[str, str] | None) -> StructType:
    """Return Spark's schema of columns with these Arrow types, with the options that a catalog keeps."""
    from pyspark.sql.pandas.types import from_arrow_schema

    found = from_arrow_schema(pyarrow.schema(list(columns.items())))
    if kept is not None:
        found.fields[0].metadata = {_KEPT: msgspec.json.encode(kept).decode()}
    return found


def with_kept(given: Mapping[str, str], schema: StructType) -> dict[str, str]:
    """Return the options of a read: its own, and those of its table that they do not replace."""
    kept = msgspec.json.decode(schema.fields[0].metadata.get(_KEPT, "{}"), type=dict[str, str])
    named = {name.lower() for name in given}
    answered = named.union(*(one for one in _ALTERNATIVES if one & named))
    return {name: value for name, value in kept.items() if name.lower() not in answered} | dict(given)


def check_same_columns(wanted: Sequence[str], schema: StructType) -> None:
    """Raise ConfigError unless a read gives the columns that its table has."""
    if list(wanted) != schema.fieldNames():
        raise ConfigError(
            f"the table has the columns {', '.join(schema.fieldNames())}, and a read with these options gives "
            f"{', '.join(wanted)}: make the table without naming its columns (option columns says which it has)"
        )
