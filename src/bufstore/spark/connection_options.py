"""Options of both formats, as strings that Spark hands over: where the log is. No Spark in here."""

from __future__ import annotations

from collections.abc import Mapping

from bufstore.config import LogConfig, NatsConfig
from bufstore.errors import ConfigError

#: Option (Spark's are not case-sensitive) → what it says. Where the log is; nothing of it shows in a plan.
CONNECTION = {
    "nats": "URL of a server, or several with commas",
    "credentialsFile": "a .creds file, on every machine that runs tasks: its contents do not travel in the job",
    "user": "NATS user",
    "password": "NATS password",
    "token": "NATS token",
    "domain": "JetStream domain",
    "stream": f"the log (default {LogConfig.stream})",
}
#: Spark's own, which it hands over as well.
_SPARKS = ("path", "checkpointLocation")


def named(given: Mapping[str, str], names: Mapping[str, str]) -> dict[str, str]:
    """The options, spelled as in `names` and CONNECTION. Raises ConfigError for an option that is in neither."""
    known = {name.lower(): name for name in (*CONNECTION, *names, *_SPARKS)}
    for name in given:
        if name.lower() not in known:
            raise ConfigError(f"there is no option {name}; the options are {', '.join((*CONNECTION, *names))}")
    return {known[name.lower()]: value for name, value in given.items() if known[name.lower()] not in _SPARKS}


def connection(found: Mapping[str, str]) -> NatsConfig:
    """How to reach NATS. Raises ConfigError."""
    if "nats" not in found:
        raise ConfigError("option nats is missing: the URL of a NATS server")
    return NatsConfig(
        servers=tuple(words(found, "nats")),
        credentials=found.get("credentialsFile"),
        user=found.get("user"),
        password=found.get("password"),
        token=found.get("token"),
        domain=found.get("domain"),
    )


def words(found: Mapping[str, str], name: str) -> list[str]:
    return [word.strip() for word in found.get(name, "").split(",") if word.strip()]
