"""The streams and the consumer of exclusive work and of locks, as they must be."""

from __future__ import annotations

import os
import secrets
import socket
from typing import Any, Self

from bufstore.jetstream.buckets import last_values
from bufstore.jetstream.connection import Connection
from bufstore.jetstream.ensure import ensure_consumer, ensure_stream, shared_consumer
from bufstore.jetstream.stream import NatsStream
from bufstore.tokens.model import Policy, Storage, TokensConfig

#: All workers use one durable consumer of this name.
WORKERS = "workers"
#: So many items may be with workers, and so many workers may wait for some, at once.
_TOLD_MAX, _ASKING_MAX = 100_000, 10_000
#: A record that nobody has touched for this long is forgotten; the key's next token is larger all the same.
_RECORD_AGE_S = 7 * 24 * 3600
_ID = "bufstore.id"


def holder_name(given: str) -> str:
    """What others see as the holder: what was given, or host and process."""
    return given or f"{socket.gethostname()}:{os.getpid()}"


class Opened:
    """What `open` of work and of locks gives: for an ``async with`` block, or to be closed."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def __aenter__(self) -> Self:
        return self

    async def aclose(self) -> None:
        """Disconnect. What is held goes to others when its time is over."""
        await self._connection.aclose()

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def items_config(config: TokensConfig) -> dict[str, Any]:
    """Items that are not done, and a message for each key that waits for its turn."""
    return last_values(
        f"{config.name}-items",
        [f"{config.name}.item.*", f"{config.name}.turn.*"],
        max_msgs_per_subject=config.per_key,
        # Not per subject: the newest item of a key replaces the one before, and never one of another key.
        discard_new_per_subject=config.policy is not Policy.REPLACE,
        discard="new",
        max_bytes=config.max_bytes,
        **_stored(config),
    )


def fence_config(config: TokensConfig) -> dict[str, Any]:
    """The last record of each key. Without a bound: what makes room for items writes here."""
    age = _RECORD_AGE_S * 10**9
    return last_values(f"{config.name}-fence", [f"{config.name}.fence.*"], max_age=age, **_stored(config))


def locks_config(name: str, storage: Storage) -> dict[str, Any]:
    """A record per lock that is held."""
    return last_values(f"{name}-locks", [f"{name}.lock.*"], allow_msg_ttl=True, **_stored(storage))


def _stored(storage: Storage) -> dict[str, Any]:
    placement = {"placement": dict(storage.placement)} if storage.placement else {}
    return {"storage": storage.storage, "num_replicas": storage.replicas, **placement}


async def ensure(config: TokensConfig, items: NatsStream, fence: NatsStream) -> str:
    """Create what is missing, and check the rest. Raises ConfigDrift, ConfigError, LogUnavailable.

    Returns what tells the stream of the items from one of the same name before or after it.
    """
    info = await ensure_stream(items, items_config(config), "TokensConfig", {_ID: secrets.token_hex(8)})
    await ensure_stream(fence, fence_config(config), "TokensConfig", {})
    # Only an idle worker asks it, and many wait at once.
    await ensure_consumer(
        items, shared_consumer(WORKERS, config.ttl_s, _TOLD_MAX, max_waiting=_ASKING_MAX), "TokensConfig"
    )
    return str((info["config"].get("metadata") or {}).get(_ID, ""))
