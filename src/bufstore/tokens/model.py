"""Exclusive work: its options and the record that decides who holds a key. No I/O.

JetStream proposes a holder for a key by delivering its message. But it does not fence: it accepts the acknowledgement
of a holder that was given up long ago like any other. So the receiver of a delivery writes itself into the key's
*fence*, by compare-and-set. The sequence of that write is the **fencing token**: it grows with every holder. The item
is done when the last holder has written so, by compare-and-set on its own token; acknowledging only cleans up.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

import msgspec

from bufstore.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def check_name(name: str) -> None:
    """Raise ConfigError for what cannot be the first word of subjects and stream names."""
    if not _NAME.fullmatch(name):
        raise ConfigError("the name of tokens or locks must be 1 to 64 of A-Z a-z 0-9 _ -")


class Policy(enum.Enum):
    """What happens to an item that is submitted while the key has one."""

    #: It waits, up to `TokensConfig.waiting_max`; then TokenQueueFull.
    QUEUE = "queue"
    #: It replaces what waits: only the newest counts, as for "bring it to this state".
    REPLACE = "replace"
    #: TokenBusy.
    REFUSE = "refuse"


class Form(enum.Enum):
    """How waiting items get their turn."""

    #: A message per key says that it has work, and its holder reads the items. Fast on a hot key.
    DIRECT = "direct"
    #: The server moves items from the inbox to the work queue by itself, and tries a busy key every 2 s.
    SOURCED = "sourced"


@dataclass(frozen=True, kw_only=True)
class TokensConfig:
    """One kind of exclusive work; the same for all submitters and workers. Set by the developer except `replicas`."""

    #: First word of the subjects, and of the names of the streams.
    name: str = "tokens"
    policy: Policy = Policy.QUEUE
    form: Form = Form.DIRECT
    #: QUEUE: the limit of items of one key, the one in work included.
    waiting_max: int = 1000
    #: A holder that shows no sign of life for this long loses the key.
    ttl_s: float = 30.0
    #: How long a call may take.
    timeout_s: float = 5.0
    #: Operator.
    replicas: int = 1

    def __post_init__(self) -> None:
        check_name(self.name)
        if not 1 <= self.ttl_s <= 24 * 3600:
            raise ConfigError("TokensConfig.ttl_s must be 1 s to a day")
        if not self.timeout_s > 0:
            raise ConfigError("TokensConfig.timeout_s must be positive")
        if not 1 <= self.waiting_max <= 1_000_000:
            raise ConfigError("TokensConfig.waiting_max must be 1 to 1000000")
        if not 1 <= self.replicas <= 5:
            raise ConfigError("TokensConfig.replicas must be 1 to 5")

    @property
    def per_key(self) -> int:
        """How many items of one key may be stored."""
        return self.waiting_max if self.policy is Policy.QUEUE else 1


class Fence(msgspec.Struct, frozen=True, array_like=True):
    """A key's record: its last holder, the item, and whether that is done."""

    #: Random, drawn for each holder.
    holder: str
    #: The delivered message and which delivery of it: together they order the holders of one message.
    message: int
    delivery: int
    #: The item worked on: its place in the inbox (DIRECT), or the message itself (SOURCED).
    item: int
    done: bool = False

    def outranks(self, message: int, delivery: int) -> bool:
        """Whether another holder got the key by a later delivery than this one, or by a later message."""
        return (self.message, self.delivery) > (message, delivery)


_decoder = msgspec.msgpack.Decoder(Fence)


def encode(fence: Fence) -> bytes:
    return msgspec.msgpack.encode(fence)


def decode(body: bytes) -> Fence | None:
    """The record, or None for bytes that are not a record."""
    try:
        return _decoder.decode(body)
    except msgspec.MsgspecError:
        return None


def first_token(unix_ms: int) -> int:
    """Where the tokens of a stream created at this time begin: above all that an earlier stream can have given.

    A stream that was removed and created again would begin at 1, and a sink that had seen more would refuse everybody.
    """
    return unix_ms << 10
