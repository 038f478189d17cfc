"""Connection strings: checked and completed, and never shown in an error."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from bufstore.errors import ConfigError

_PORT = re.compile(r"\s*[0-9]{1,5}\s*")
#: Parameters of libpq that are secrets (its manual, Parameter Key Words).
_SECRETS = frozenset({"password", "sslpassword", "oauth_client_secret", "scram_client_key", "scram_server_key"})
#: The servers that libpq may be told to look for, of which none need be the primary.
_NO_PRIMARY = frozenset({"standby", "prefer-standby", "read-only"})
#: Which server it looks for here. Until libpq 14 it could not tell a standby from a role that may only read.
_PRIMARY = "primary" if psycopg.pq.version() >= 140000 else "read-write"
#: A wrong passphrase (libpq 13 and later): without any, OpenSSL would ask for that of a client's key on the terminal.
_NO_PASSPHRASE = {"sslpassword": "-"} if psycopg.pq.version() >= 130000 else {}
#: What says that a connection is none of a replica; the server takes the beginning of such a word, too.
_NOT_FOR_REPLICAS = re.compile(r"f|fa|fal|fals|false|n|no|of|off|0|", re.IGNORECASE)
#: "postgresql+psycopg://", which most apps have in their environment.
_DIALECT = re.compile(r"(postgres(?:ql)?)(\+[a-z0-9_]+)://")
#: libpq's words about a parameter of a URL that it does not know.
_UNKNOWN = re.compile(r"invalid URI query parameter: \"([A-Za-z_]{1,40})\"")


def check_conninfo(conninfo: str) -> dict[str, Any]:
    """Return the parameters of a connection string. Raises ConfigError, which shows nothing of the string."""
    if not isinstance(conninfo, str):
        raise ConfigError(f"the Postgres connection string must be a str, not {type(conninfo).__name__}")
    if "\0" in conninfo:
        raise ConfigError("the Postgres connection string has a NUL character, at which libpq would end it")
    if (url := conninfo.strip()).startswith(("postgres://", "postgresql://")):
        conninfo = url  # a secret that is read from a file ends with a newline: libpq would take it for a name's end
    if dialect := _DIALECT.match(url):
        raise ConfigError(
            f"a Postgres URL that begins with {dialect[0]} is SQLAlchemy's: leave out {dialect[2]!r} (postgresql://…)"
        )
    found: dict[str, Any] | None = None
    unknown = ""
    try:
        found = dict(conninfo_to_dict(conninfo))
    except (psycopg.ProgrammingError, UnicodeError) as e:
        unknown = _unknown_parameter(conninfo, str(e))
    if found is None:
        # Not within an except: libpq's message quotes the string with its password, and would be our error's context.
        raise ConfigError(
            f"the Postgres URL has a parameter that libpq does not know, {unknown}: leave it out"
            if unknown
            else "the Postgres connection string cannot be read (neither URL nor key=value)"
        )
    # libpq takes a part of a password with an unescaped "/", "@" or "#" for the address, and would say it in errors.
    hosts, ports = str(found.get("host", "")), str(found.get("port", ""))
    if "@" in hosts or not all(map(_is_port, ports.split(","))):
        raise ConfigError(
            "the Postgres connection string names no usable host and port; "
            "special characters of user and password in a URL are written as %XX"
        )
    with suppress(ValueError, OverflowError):
        int(float(found.get("connect_timeout", 0)))  # as psycopg does, whose error shows the value
        return found
    raise ConfigError("connect_timeout in the Postgres connection string must be a number of seconds")


def _unknown_parameter(url: str, said: str) -> str:
    """Return the name of the parameter of a URL that libpq does not know; empty if it may be a piece of a password."""
    server, _, parameters = url.partition("?")
    named = _UNKNOWN.search(said)
    if named is None or "@" in parameters or "pass" in parameters.lower():  # the login ends at the last "@"
        return ""
    with suppress(ConfigError):
        check_conninfo(server)
        return named[1]
    return ""


def _is_port(text: str) -> bool:
    return text == "" or (_PORT.fullmatch(text) is not None and 0 < int(text) < 1 << 16)


def own_conninfo(conninfo: str, **defaults: Any) -> str:
    """Return the string to connect with. Raises like `check_conninfo`.

    The client's encoding is always UTF-8, whatever the string, the environment, or a default of role or database says:
    ids travel in binary arrays (`bufstore.postgres.connection.arrays`), which psycopg does not encode.

    Only the primary is connected to. In a failover an address may lead to a standby for a moment; a connection that
    only reads would stay there, show old rows as if they were new, and have writes built on them.

    A client's key whose passphrase is not given is refused, and nobody is asked for it.
    """
    given = check_conninfo(conninfo)
    if (wanted := given.get("target_session_attrs", "any")) in _NO_PRIMARY:
        raise ConfigError(
            f"target_session_attrs={wanted} asks for a server that may lack what was just written: leave it out"
        )
    if not _NOT_FOR_REPLICAS.fullmatch(str(given.get("replication", ""))):
        raise ConfigError("replication makes a connection of a replica, which takes no parameters: leave it out")
    if wanted == "any":
        wanted = _PRIMARY
    ours = {"client_encoding": "UTF8", "target_session_attrs": wanted}
    # What is given here comes before what a service's file has.
    if not (given.get("sslpassword") or given.get("service") or "PGSERVICE" in os.environ):
        ours |= _NO_PASSPHRASE
    return make_conninfo(**(defaults | given | ours))


def opened_within(conninfo: object, timeout_s: float) -> float:
    """Return how long the first connection of a pool with this string may take, where one server is given `timeout_s`.

    Of several, libpq gives each its `connect_timeout`, in turn: one whose machine is gone says nothing for so long.
    """
    found = conninfo_to_dict(str(conninfo))
    named = found.get("host") or os.environ.get("PGHOST"), found.get("hostaddr")
    others = max(str(names or "").count(",") for names in named)
    each_s = float(found.get("connect_timeout") or 0) or timeout_s
    return timeout_s + others * max(each_s, 2.0)


def has_secret(conninfo: str) -> bool:
    """Return whether a connection string holds a secret. Raises like `check_conninfo`."""
    return not _SECRETS.isdisjoint(check_conninfo(conninfo))
