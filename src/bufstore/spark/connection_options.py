"""The options of both formats that say where the log is, as strings that Spark hands over. No Spark in here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from bufstore.config import LogConfig, NatsConfig, split_url, urls_in
from bufstore.errors import ConfigError
from bufstore.tls_files import TlsFiles

#: Option (Spark's names are not case-sensitive) → what it says. These say where the log is. The plan of a stream shows
#: options; Spark masks those whose names end in url, password or token.
CONNECTION = {
    "nats": "URL of a server, or several with commas, without a login",
    "natsUrl": "instead of nats: the same, with or without a login; Spark masks it in plans",
    "credentialsFile": "a .creds file, on every machine that runs tasks: its contents do not travel in the job",
    "user": "NATS user",
    "password": "NATS password",
    "token": "NATS token",
    "domain": "JetStream domain",
    "apiPrefix": "prefix of the JetStream API, as $JS.other.API; instead of domain",
    "tlsCaFile": "CA certificates (PEM) to check NATS' certificate with, on every machine that runs tasks",
    "tlsCertificateFile": "our certificate (PEM) for a NATS that asks for one, there, too",
    "tlsKeyFile": "its private key, if that file does not hold it",
    "tlsHostname": "the name in the servers' certificates, where it is not that of the URL",
    "connectTimeout": f"seconds that one attempt to connect takes at most (default {NatsConfig.connect_timeout_s:g})",
    "stream": f"the log (default {LogConfig.stream})",
}
#: Option → the field of NatsConfig that it is, as text.
_FIELDS = {
    "credentialsFile": "credentials",
    "user": "user",
    "password": "password",
    "token": "token",
    "domain": "domain",
    "apiPrefix": "api_prefix",
    "tlsHostname": "tls_hostname",
}
#: Option → the field of TlsFiles that it is.
_FILES = {"tlsCaFile": "ca", "tlsCertificateFile": "certificate", "tlsKeyFile": "key"}
#: Spark's own options, which it hands over, too.
_SPARKS = ("path", "checkpointLocation")
#: The environment variable that names the server when no option does, as for the command line.
NATS_VARIABLE = "BUFSTORE_NATS"
POSTGRES_VARIABLE = "BUFSTORE_POSTGRES"
#: The variables with the login and the files for TLS for that server. They do not apply to a server that an option
#: names: whoever sets the option would get the login.
_VARIABLES = {
    "credentialsFile": "BUFSTORE_NATS_CREDS",
    "user": "BUFSTORE_NATS_USER",
    "password": "BUFSTORE_NATS_PASSWORD",
    "token": "BUFSTORE_NATS_TOKEN",
    "tlsCaFile": "BUFSTORE_TLS_CA",
    "tlsCertificateFile": "BUFSTORE_TLS_CERT",
    "tlsKeyFile": "BUFSTORE_TLS_KEY",
}
#: The ways to sign in; only one of them may be used.
_WAYS = (("credentialsFile",), ("user", "password"), ("token",))
#: A certificate and its key, of which neither goes with another one.
_CERTIFICATE = ("tlsCertificateFile", "tlsKeyFile")


def named(given: Mapping[str, str], names: Mapping[str, str]) -> dict[str, str]:
    """Return the options, spelled as in `names` and CONNECTION; where none names a server, add the environment's.

    Raises ConfigError for an option that is in neither.
    """
    known = {name.lower(): name for name in (*CONNECTION, *names, *_SPARKS)}
    for name in given:
        if name.lower() not in known:
            raise ConfigError(f"there is no option {name}; the options are {', '.join((*CONNECTION, *names))}")
    found = {known[name.lower()]: value for name, value in given.items() if known[name.lower()] not in _SPARKS}
    if NATS_VARIABLE in os.environ and not found.keys() & {"nats", "natsUrl"}:
        ways = [way for way in _WAYS if found.keys() & set(way)] or _WAYS
        certificate = () if found.keys() & set(_CERTIFICATE) else _CERTIFICATE
        names_of = [name for way in (*ways, ("tlsCaFile",), certificate) for name in way]
        there = {name: os.environ[_VARIABLES[name]] for name in names_of if _VARIABLES[name] in os.environ}
        # As for the command line, an empty variable is none; only a password may be empty.
        theirs = {name: value for name, value in there.items() if value or name == "password"}
        found = {"natsUrl": os.environ[NATS_VARIABLE]} | theirs | found
    if POSTGRES_VARIABLE in os.environ and "postgres" in names and not found.keys() & {"postgres", "postgresUrl"}:
        found["postgresUrl"] = os.environ[POSTGRES_VARIABLE]
    return found


def connection(found: Mapping[str, str]) -> NatsConfig:
    """Return the settings for connecting to NATS. Raises ConfigError, also for a login that plans would show."""
    if ("nats" in found) == ("natsUrl" in found):
        raise ConfigError(
            f"give one of the options nats and natsUrl, or {NATS_VARIABLE} in the driver's environment: the URL of a "
            "NATS server"
        )
    if any(split_url(url)[1] is not None for url in urls_in(found.get("nats", ""))):
        raise ConfigError(
            "option nats has a login in its URL, which plans would show: give the URL as option natsUrl, which Spark "
            "masks, or the login as user and password, token, or credentialsFile"
        )
    given: dict[str, Any] = {field: found[name] for name, field in _FIELDS.items() if name in found}
    files = {field: found[name] for name, field in _FILES.items() if name in found}
    return NatsConfig(
        servers=found.get("nats") or found.get("natsUrl", ""),
        tls=TlsFiles(**files) if files else None,
        connect_timeout_s=seconds(found, "connectTimeout", NatsConfig.connect_timeout_s),
        **given,
    )


def connection_options(config: NatsConfig) -> dict[str, str]:
    """Return the options from which `connection` makes `config`; a login stands only where Spark masks it in plans."""
    given = {name: getattr(config, field) for name, field in _FIELDS.items()}
    if isinstance(config.tls, TlsFiles):
        given |= {name: getattr(config.tls, field) for name, field in _FILES.items()}
    return {
        "natsUrl": ",".join(url.replace(",", "%2C") for url in config.servers),
        "connectTimeout": str(config.connect_timeout_s),
        **{name: str(value) for name, value in given.items() if value is not None},
    }


def words(found: Mapping[str, str], name: str) -> list[str]:
    return [word.strip() for word in found.get(name, "").split(",") if word.strip()]


def seconds(found: Mapping[str, str], name: str, default: float) -> float:
    """Raises ConfigError."""
    try:
        value = float(found.get(name, default))
    except ValueError:
        value = float("nan")
    if not value >= 0:
        raise ConfigError(f"option {name} must be a number of seconds, at least 0")
    return value
