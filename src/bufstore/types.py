"""Small value types that every package uses, and the rule for ids."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any, Literal, TypeAlias, TypeVar, get_args

import msgspec

from bufstore.errors import BufstoreError, InvalidId, InvalidRecord

T = TypeVar("T")
Ids = TypeVar("Ids", bound=Iterable[str])

#: One message of a conversation: any value built of None, bool, int (64 bit), float, str, bytes, list and dict.
#: Usually a dict with ``role`` and ``content``; every field, known or not, comes back as it was given.
Message: TypeAlias = Any

#: What a read does about a thread whose chain is broken by a parked entry: raise ThreadQuarantined, or show what
#: is known.
Quarantined: TypeAlias = Literal["raise", "known"]

MAX_ID_BYTES = 1024


class Consistency(enum.Enum):
    """How fresh a read must be."""

    #: Postgres overlaid with the unflushed tail of the log: every write acknowledged before the call is visible.
    READ_YOUR_WRITES = "read-your-writes"
    #: Flush the thread, then read Postgres: what another reader of the database sees is at least this.
    STRONG = "strong"
    #: Postgres as it is: a past state, cheapest.
    EVENTUAL = "eventual"


class ProducerSequence(msgspec.Struct, frozen=True):
    """The producer that numbers a write, and the number: see `BufferedThreadStore.checkpoint`.

    A producer's numbers grow per thread, in the order in which the writes are to take effect: with the batch, for
    example, and within a batch with the row. A number is a repeat unless it is above the highest number that the thread
    has from this producer. So await each write of a thread before its next one: a write that another overtakes, or that
    fails while a later one is stored, counts as a repeat.
    """

    #: E.g. the name of a streaming query. A thread remembers the 8 producers that wrote to it last.
    producer_id: str
    #: 0 … 2⁶³ - 1.
    sequence: int


class Receipt(msgspec.Struct, frozen=True, gc=False):
    """What a write returns, and what a read elsewhere takes as "at least this"."""

    thread_id: str
    #: The entry's position: its sequence in the log, unique, growing per thread (with gaps).
    thread_seq: int
    #: The entry's random id (63 bit).
    id: int
    #: The thread's version after the entry: its number of messages.
    version: int
    #: True when the idempotency key was already known: nothing new was appended.
    repeated: bool = False


def check_id(value: object, what: str) -> str:
    """Return `value` if it can be an id of a thread, run or message.

    Raises InvalidId for anything else, before any I/O: not a str, empty, more than 1024 bytes of UTF-8, a NUL
    (Postgres text has none) or a lone surrogate (UTF-8 has none). Ids that differ in any code point are different
    ids: nothing is normalised.
    """
    if type(value) is str and value.isascii() and 0 < len(value) <= MAX_ID_BYTES and "\0" not in value:
        return value  # the usual case
    if type(value) is not str:
        raise InvalidId(f"{what} must be a str, not {type(value).__name__}")
    if not value:
        raise InvalidId(f"{what} is empty")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise InvalidId(f"{what} {value!r} has a lone surrogate") from None
    if size > MAX_ID_BYTES:
        raise InvalidId(f"{what} has {size} bytes of UTF-8, the limit is {MAX_ID_BYTES}")
    if "\0" in value:
        raise InvalidId(f"{what} {value!r} has a NUL character")
    return value


def check_ids(values: Ids, what: str) -> Ids:
    """Return `values` if they can be several ids. Raises InvalidId for a str: its letters would be the ids."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise InvalidId(f"{what} must be a list of ids, not {type(values).__name__}")
    return values


def check_choice(value: T, kind: Any, what: str, error: type[BufstoreError]) -> T:
    """Return `value` if it is one of `kind`, an enum or a Literal. Raises `error`, which names the choices.

    A member's value is no choice: code that compares members by identity would take "strong" for another level.
    """
    choices = list(kind) if isinstance(kind, enum.EnumMeta) else get_args(kind)
    if any(isinstance(value, type(choice)) and value == choice for choice in choices):
        return value
    names = [f"{kind.__name__}.{c.name}" if isinstance(c, enum.Enum) else repr(c) for c in choices]
    raise error(f"{what} must be {', '.join(names[:-1])} or {names[-1]}, not {value!r}")


def check_producer(producer: object, key: str | None = None) -> None:
    """Raise InvalidId or InvalidRecord unless `producer` is a ProducerSequence, and no key is given beside it."""
    if not isinstance(producer, ProducerSequence):
        raise InvalidRecord(f"producer must be a ProducerSequence, not {type(producer).__name__}")
    if key is not None:
        raise InvalidRecord("a write has an idempotency key or a producer sequence, not both")
    check_id(producer.producer_id, "the producer's id")
    if type(producer.sequence) is not int or not 0 <= producer.sequence < 1 << 63:
        raise InvalidRecord(f"a producer's sequence is an int from 0 to 2**63 - 1, not {producer.sequence!r}")
