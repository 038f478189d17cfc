"""Exclusive work and locks: options, the streams they ask for, and the record that decides who holds a key. No I/O.

The record of a key is written by compare-and-set only. A worker that writes itself into the record holds the key, and
the sequence of that write is the **fencing token**: it grows with every holder. The holder writes again to keep the key
(a lease), and in the end writes that the item is done. Delivered messages only hint at keys that may have work: a
message that is lost, late or repeated costs time, and nothing else.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from bufstore.config import check_kinds, check_name, check_timeout
from bufstore.errors import ConfigError
from bufstore.jetstream.buckets import last_values
from bufstore.jetstream.ensure import seconds
from bufstore.types import check_choice

#: All workers use one durable consumer of this name.
WORKERS = "workers"
NAMED = "the name of tokens or locks"
_BACKOFF_S, _BACKOFF_MAX_S = 0.1, 60.0
#: A record that nobody has touched for this long is forgotten; the key's next token is larger all the same.
RECORD_AGE_S = 7 * 24 * 3600

Medium = Literal["file", "memory"]


class Policy(enum.Enum):
    """What happens to an item that is submitted while the key has one."""

    #: The item waits, up to `TokensConfig.waiting_max` items; then TokenQueueFull.
    QUEUE = "queue"
    #: The item replaces the one that waits: only the newest counts, as for "bring it to this state".
    REPLACE = "replace"
    #: The item is refused with TokenBusy.
    REFUSE = "refuse"


@dataclass(frozen=True, kw_only=True)
class Storage:
    """Where a stream of tokens or locks is kept. Set by the operator."""

    replicas: int = 1
    storage: Medium = "file"
    #: The server's `placement`: ``{"cluster": …, "tags": […]}``.
    placement: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_kinds(self)
        if not 1 <= self.replicas <= 5:
            raise ConfigError("replicas must be 1 to 5")
        check_choice(self.storage, Medium, "storage", ConfigError)


@dataclass(frozen=True, kw_only=True)
class TokensConfig(Storage):
    """One kind of exclusive work, the same for all submitters and workers. Set by the developer, except storage."""

    #: First word of the subjects, and of the names of the streams.
    name: str = "tokens"
    policy: Policy = Policy.QUEUE
    #: QUEUE: the limit of items of one key, the one in work included.
    waiting_max: int = 1000
    #: A holder that shows no sign of life for this long loses the key.
    ttl_s: float = 30.0
    #: How long a call may take.
    timeout_s: float = 5.0
    #: After this many attempts an item goes to `run`'s `dead_letter`; 0: never.
    max_attempts: int = 0
    #: Operator: the limit of all items together, in bytes; then LogFull. -1: no limit.
    max_bytes: int = -1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name(self.name, NAMED)
        check_choice(self.policy, Policy, "TokensConfig.policy", ConfigError)
        if not 1 <= self.ttl_s <= 24 * 3600:
            raise ConfigError("TokensConfig.ttl_s must be 1 s to a day")
        check_timeout(self.timeout_s, "TokensConfig.timeout_s")
        if not 1 <= self.waiting_max <= 1_000_000:
            raise ConfigError("TokensConfig.waiting_max must be 1 to 1000000")
        if self.max_attempts < 0 or self.max_bytes < -1 or self.max_bytes == 0:
            raise ConfigError(
                "TokensConfig.max_attempts must be 0 (no limit) or more; max_bytes must be -1 (no limit) or positive"
            )

    @property
    def per_key(self) -> int:
        """How many items of one key may be stored."""
        return self.waiting_max if self.policy is Policy.QUEUE else 1


class Record(msgspec.Struct, frozen=True, array_like=True):
    """A key's record: its holder, the item, and whether the item is done."""

    #: The holder's name, for people; empty when nobody holds the key.
    holder: str = ""
    #: A random mark for each holder, and a number for each of its writes: the holder knows its own writes by them.
    mark: str = ""
    number: int = 0
    #: The holder's token; 0 in its first record, whose sequence is the token.
    token: int = 0
    #: The item that is worked on, or the last one done: its sequence in the stream, and the id of that stream.
    item: int = 0
    stream: str = ""
    #: How often that item was begun.
    attempt: int = 0
    done: bool = False
    #: How long after this was written nobody else takes the key: a holder's lease, or the delay before a retry.
    lease_s: float = 0.0
    #: True when others wait behind the item that is done: the worker that gets the key's turn message takes the next.
    turn: bool = False


class Holder(msgspec.Struct, frozen=True):
    """Who holds a key."""

    name: str
    token: int
    #: Seconds since its last sign of life.
    silent_s: float


class Statistics(msgspec.Struct, frozen=True):
    """How much exclusive work there is to do, as the server counts it, without a scan."""

    #: The items that are not done, and the messages that give waiting keys their turn: how many, and their bytes.
    stored: int
    bytes: int
    #: The age of the oldest of these messages.
    oldest_s: float
    #: How many of these messages no worker was told of yet, how many a worker has, how many of the latter came again.
    untold: int
    told: int
    told_again: int
    #: Keys that this instance found with work that nobody had been told of: more than 0 is worth a look.
    found: int


_decoder = msgspec.msgpack.Decoder(Record)
encode = msgspec.msgpack.encode


def decode(body: bytes) -> Record:
    """Return the record in `body`; for bytes that are no record, that of a key which nobody holds."""
    try:
        return _decoder.decode(body)
    except msgspec.MsgspecError:
        return Record()


def done_to(record: Record, stream: str) -> int:
    """Return the sequence in `stream` up to which the key's items are done. A leader that lags may still show them."""
    return record.item - (not record.done) if record.stream == stream else 0


def attempt_of(record: Record, item: int) -> int:
    """Return the number of the attempt that begins this item now."""
    return record.attempt + 1 if record.item == item and not record.done else 1


def backoff_s(attempt: int) -> float:
    """Return how long to wait after this attempt has failed."""
    return min(_BACKOFF_S * 2.0 ** min(attempt, 20), _BACKOFF_MAX_S)


def oldest_s(info: Mapping[str, Any]) -> float:
    """Return the age of the oldest message of a stream, by its STREAM.INFO; 0 if there is none."""
    state = info["state"]
    return max(0.0, seconds(info["ts"]) - seconds(state["first_ts"])) if state["messages"] else 0.0


def is_young(info: Mapping[str, Any], age_s: float) -> bool:
    """Return whether a stream has nothing older than this. What the future holds is old: the clock went back since."""
    state = info["state"]
    return not state["messages"] or 0 <= seconds(info["ts"]) - seconds(state["first_ts"]) < age_s


def items_config(config: TokensConfig) -> dict[str, Any]:
    """Return the stream of items that are not done, and of a message for each key that waits for its turn."""
    return last_values(
        f"{config.name}-items",
        [f"{config.name}.item.*", f"{config.name}.turn.*"],
        max_msgs_per_subject=config.per_key,
        # REPLACE does not refuse per subject: a key's newest item replaces the one before, never one of another key.
        discard_new_per_subject=config.policy is not Policy.REPLACE,
        discard="new",
        max_bytes=config.max_bytes,
        **_stored(config),
    )


def fence_config(config: TokensConfig) -> dict[str, Any]:
    """Return the stream of each key's last record. It has no limit: a holder that makes room for items writes here."""
    age = RECORD_AGE_S * 10**9
    return last_values(f"{config.name}-fence", [f"{config.name}.fence.*"], max_age=age, **_stored(config))


def locks_config(name: str, storage: Storage) -> dict[str, Any]:
    """Return the stream of locks: a record for each lock that is held."""
    return last_values(f"{name}-locks", [f"{name}.lock.*"], allow_msg_ttl=True, **_stored(storage))


def _stored(storage: Storage) -> dict[str, Any]:
    placement = {"placement": dict(storage.placement)} if storage.placement else {}
    return {"storage": storage.storage, "num_replicas": storage.replicas, **placement}
