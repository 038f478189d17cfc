"""The streams and the consumer of exclusive work, as they must be."""

from __future__ import annotations

import time
from typing import Any

from nats.aio.client import Client

from bufstore.errors import ConfigError
from bufstore.jetstream.drift import check
from bufstore.jetstream.errors import ConsumerMissing, StreamMissing
from bufstore.jetstream.stream import NatsStream
from bufstore.tokens.model import Form, Policy, TokensConfig, first_token

#: All workers use one durable consumer of this name.
WORKERS = "workers"
#: A fence that nobody has touched for this long is forgotten; its next token is larger all the same.
_FENCE_AGE_S = 7 * 24 * 3600
_S = 1_000_000_000
_SOURCED_SINCE = (2, 12, 6)


def check_server(config: TokensConfig, client: Client) -> None:
    """Raise ConfigError for a server on which the SOURCED form would work on items more than once."""
    found = client.connected_server_version
    version = (found.major, found.minor, found.patch)
    if config.form is Form.SOURCED and version < _SOURCED_SINCE:
        raise ConfigError(
            f"nats-server {'.'.join(map(str, version))} doubles items that it cannot move immediately: "
            "Form.SOURCED needs 2.12.6, Form.DIRECT does not"
        )


def names(config: TokensConfig) -> tuple[str, str, str]:
    return f"{config.name}-inbox", f"{config.name}-work", f"{config.name}-fence"


def inbox_config(config: TokensConfig) -> dict[str, Any]:
    """Items that are not done (DIRECT), or not yet moved to the work queue (SOURCED)."""
    return {
        **_common(config, f"{config.name}-inbox", [f"{config.name}.inbox.*"]),
        "retention": "limits" if config.form is Form.DIRECT else "workqueue",
        "max_msgs_per_subject": config.per_key,
        # "old": the newest item of a key replaces the one before.
        "discard": "old" if config.policy is Policy.REPLACE else "new",
        "discard_new_per_subject": config.policy is not Policy.REPLACE,
    }


def work_config(config: TokensConfig) -> dict[str, Any]:
    """One message per key: refused while there is one, gone when it is acknowledged."""
    wanted = {
        **_common(config, f"{config.name}-work", [f"{config.name}.work.*"]),
        "retention": "workqueue",
        "max_msgs_per_subject": 1,
        "discard": "new",
        "discard_new_per_subject": True,
    }
    if config.form is Form.SOURCED and config.policy is not Policy.REFUSE:
        move = {"src": f"{config.name}.inbox.*", "dest": f"{config.name}.work.{{{{wildcard(1)}}}}"}
        wanted["sources"] = [{"name": f"{config.name}-inbox", "subject_transforms": [move]}]
    return wanted


def fence_config(config: TokensConfig) -> dict[str, Any]:
    """The last record of each key."""
    return {
        **_common(config, f"{config.name}-fence", [f"{config.name}.fence.*"]),
        "retention": "limits",
        "max_msgs_per_subject": 1,
        "discard": "old",
        "max_age": _FENCE_AGE_S * _S,
    }


def consumer_config(config: TokensConfig) -> dict[str, Any]:
    """The consumer of all workers: a pull consumer, so that only an idle worker gets anything."""
    return {
        "name": WORKERS,
        "durable_name": WORKERS,
        "deliver_policy": "all",
        "ack_policy": "explicit",
        "ack_wait": round(config.ttl_s * _S),
        "max_deliver": -1,
        "max_ack_pending": 100_000,
        "max_waiting": 10_000,
        "replay_policy": "instant",
    }


def _common(config: TokensConfig, name: str, subjects: list[str]) -> dict[str, Any]:
    return {
        "name": name,
        "subjects": subjects,
        "storage": "file",
        "num_replicas": config.replicas,
        "max_age": 0,
        "max_msgs": -1,
        "max_bytes": -1,
        "allow_direct": True,
    }


async def ensure(config: TokensConfig, inbox: NatsStream, work: NatsStream, fence: NatsStream) -> None:
    """Create what is missing, and check the rest. Raises ConfigDrift, ConfigError, LogUnavailable."""
    await _stream(inbox, inbox_config(config))
    await _stream(work, work_config(config))
    await _stream(fence, fence_config(config), first_seq=first_token(time.time_ns() // 1_000_000))
    wanted = consumer_config(config)
    name = f"{config.name}-work"
    try:
        info = await work.api(f"CONSUMER.INFO.{name}.{WORKERS}")
    except ConsumerMissing:
        body = {"stream_name": name, "config": wanted, "action": ""}
        info = await work.api(f"CONSUMER.CREATE.{name}.{WORKERS}", body)
    check(
        f"consumer {WORKERS} of {name}", wanted, info["config"], "TokensConfig", f"nats consumer edit {name} {WORKERS}"
    )


async def _stream(stream: NatsStream, wanted: dict[str, Any], **once: Any) -> None:
    name = wanted["name"]
    try:
        info = await stream.api(f"STREAM.INFO.{name}")
    except StreamMissing:
        info = await stream.api(f"STREAM.CREATE.{name}", {**wanted, **once})
    found = info["config"]
    if "sources" in wanted and "sources" in found:
        # The server adds to what it was given; only the origin says whether it is the same work.
        wanted = {**wanted, "sources": [s["name"] for s in wanted["sources"]]}
        found = {**found, "sources": [s["name"] for s in found["sources"]]}
    check(f"stream {name}", wanted, found, "TokensConfig", f"nats stream edit {name}")
