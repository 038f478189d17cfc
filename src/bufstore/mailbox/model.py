"""What a mailbox holds: dispatches, and the present claim of each thread.

Times are milliseconds since 1970. Tokens and epochs are numbers of one sequence that grows with every write of the
store, so that no two claims ever carry the same token, not even after everything about a thread was removed.
"""

from __future__ import annotations

import enum
import uuid
from typing import Any

import msgspec
from msgspec.structs import replace

from bufstore.errors import InvalidQuery, InvalidRecord
from bufstore.types import check_id

#: Stands for the number that the store gives to the write itself.
OWN = -1
DEFAULT_PRIORITY = 128
PRIORITY_MAX = 255
#: The latest time there is.
MS_MAX = (1 << 52) - 1
_TEXT_MAX = 16 << 10


class Status(enum.Enum):
    """Where a dispatch is in its life."""

    QUEUED = "queued"
    CLAIMED = "claimed"
    ACKED = "acked"
    CANCELLED = "cancelled"
    SUPERSEDED = "superseded"
    DEAD = "dead"

    @property
    def finished(self) -> bool:
        """True for the four statuses that no dispatch leaves."""
        return self not in (Status.QUEUED, Status.CLAIMED)


class Dispatch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One piece of work for one thread. `claim` returns the dispatch as claimed: it then carries the token."""

    thread_id: str
    #: Unique within the thread.
    dispatch_id: str
    run_id: str | None = None
    payload: bytes = b""
    #: 0 is first, 255 last.
    priority: int = DEFAULT_PRIORITY
    #: While a dispatch with this key is queued or claimed, the thread accepts no other with the same key.
    dedupe_key: str | None = None
    #: The thread's epoch when the dispatch was enqueued; a queued dispatch is superseded once the thread's is higher.
    epoch: int = 0
    status: Status = Status.QUEUED
    #: The position in the queue of its priority, which a dispatch keeps when it is handed back.
    position: int = 0
    #: When the dispatch may first be claimed; 0: at once, whatever the clocks of two instances say.
    available_at_ms: int = 0
    #: How many claims of it ended with a nack, or because their lease ran out.
    attempts: int = 0
    max_attempts: int = 5
    last_error: str | None = None
    #: The fencing token of the claim that holds it; 0: no claim does.
    token: int = 0
    claimed_by: str | None = None
    claimed_at_ms: int | None = None
    #: A random id of that claim, to recognize it when its answer was lost; empty when no claim holds the dispatch.
    claim_id: str = ""
    lease_until_ms: int | None = None
    #: The worker that began, and the outcome, as the holder recorded them.
    instance_id: str | None = None
    run_status: str | None = None
    termination: str | None = None
    result: bytes | None = None
    run_error: str | None = None
    #: True when a live delivery of it got no answer: it may have reached its handler already.
    maybe_delivered: bool = False
    #: The token of the claim that finished it; 0: no claim did.
    ended_by: int = 0
    completed_at_ms: int | None = None
    created_at_ms: int = 0
    updated_at_ms: int = 0
    #: When it was enqueued, where that was later than `created_at_ms` says: by a clock that was ahead of that of the
    #: claim that was handed back. 0: `created_at_ms` says it.
    enqueued_at_ms: int = 0

    @property
    def order(self) -> tuple[int, int]:
        """The sort key of the order in which dispatches are claimed."""
        return self.priority, self.position


class MailboxThread(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The state of a thread, which every step except an enqueue compares and sets."""

    thread_id: str
    #: The number of the write that made this state; 0: the thread has no state.
    version: int = 0
    epoch: int = 0
    #: The dispatch that is claimed, if one is.
    active: Dispatch | None = None
    #: A random id of the step that wrote this state, to recognize the step when its answer was lost.
    step: str = ""
    #: The number up to which signals found nothing to do, on a store where an answered signal may still be seen.
    answered: int = 0


def numbered(state: MailboxThread, number: int) -> MailboxThread:
    """Return the state that the write of this number made; a new epoch or token in the state is the same number."""
    epoch = number if state.epoch == OWN else state.epoch
    active = state.active
    if active is not None and active.token == OWN:
        active = replace(active, token=number)
    return replace(state, version=number, epoch=epoch, active=active)


class Interruption(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of an interrupt."""

    epoch: int
    #: The dispatch that somebody works on; it keeps the thread until it ends (`supersede_claimed` ends it).
    active: Dispatch | None
    #: The superseded dispatches that this call took out of the queue. A claim that came meanwhile has taken out others.
    superseded: list[Dispatch]
    #: True when none is left in the queue. What is left is superseded, too; claims take it out when it is due.
    complete: bool = True


def draft(
    thread_id: str,
    payload: bytes,
    now_ms: int,
    payload_max: int,
    *,
    dispatch_id: str | None = None,
    available_at_ms: int | None = None,
    **said: Any,
) -> Dispatch:
    """Return a dispatch to be enqueued; `said` has further fields of it. Raises InvalidId or InvalidRecord."""
    d = Dispatch(
        thread_id=thread_id,
        dispatch_id=uuid.uuid4().hex if dispatch_id is None else dispatch_id,
        payload=payload,
        available_at_ms=0 if available_at_ms is None else available_at_ms,
        created_at_ms=now_ms,
        updated_at_ms=now_ms,
        **said,
    )
    check_id(d.thread_id, "thread_id")
    check_id(d.dispatch_id, "dispatch_id")
    for name in ("run_id", "dedupe_key"):
        if getattr(d, name) is not None:
            check_id(getattr(d, name), name)
    check_bytes(d.payload, "payload", payload_max)
    if type(d.priority) is not int or not 0 <= d.priority <= PRIORITY_MAX:
        raise InvalidRecord(f"priority must be an int from 0 to {PRIORITY_MAX}, not {d.priority!r}")
    if type(d.max_attempts) is not int or not 1 <= d.max_attempts <= 1000:
        raise InvalidRecord(f"max_attempts must be an int from 1 to 1000, not {d.max_attempts!r}")
    check_ms(d.available_at_ms, "available_at_ms")
    if type(d.maybe_delivered) is not bool:
        raise InvalidRecord(f"maybe_delivered must be True or False, not {d.maybe_delivered!r}")
    return d


def check_claim(claim: Dispatch) -> Dispatch:
    """Return `claim` if it can be a claim. Raises InvalidId or InvalidRecord."""
    if not isinstance(claim, Dispatch):
        raise InvalidRecord(f"a claim is the Dispatch that `claim` returned, not {type(claim).__name__}")
    check_id(claim.thread_id, "thread_id")
    check_id(claim.dispatch_id, "dispatch_id")
    return claim


def check_bytes(value: object, what: str, payload_max: int | None = None) -> bytes:
    """Return `value` if it can be a payload or a result. Raises InvalidRecord."""
    if type(value) is not bytes:
        raise InvalidRecord(f"{what} must be bytes, not {type(value).__name__}")
    if payload_max is not None and len(value) > payload_max:
        raise InvalidRecord(f"the {what} has {len(value)} bytes, the limit is {payload_max} (payload_max)")
    return value


def check_ms(value: object, what: str) -> int:
    """Return `value` if it can be a time. Raises InvalidRecord."""
    if type(value) is not int or not 0 <= value <= MS_MAX:
        raise InvalidRecord(f"{what} must be milliseconds since 1970 as an int, not {value!r}")
    return value


def lease_ms(lease_s: object) -> int:
    """Return a lease in milliseconds. Raises InvalidRecord when `lease_s` cannot be a lease."""
    if not isinstance(lease_s, (int, float)) or not 0.001 <= lease_s < 1 << 42:
        raise InvalidRecord(f"lease_s must be a number of seconds, 0.001 or more, not {lease_s!r}")
    return round(1000 * lease_s)


def check_limit(value: object, what: str = "limit") -> int:
    """Return `value` if it can be a limit or an offset. Raises InvalidQuery."""
    if type(value) is not int or not 0 <= value < 1 << 31:
        raise InvalidQuery(f"{what} must be an int from 0 to below 2**31, not {value!r}")
    return value


def clean(text: str | None, what: str) -> str | None:
    """Return a text that can be stored: characters that no store could keep are replaced, a very long text is cut.

    Raises InvalidRecord for any value but a text: it would be stored, and could not be read again.
    """
    if text is None:
        return None
    if not isinstance(text, str):
        raise InvalidRecord(f"{what} must be a str, not {type(text).__name__}")
    return text[:_TEXT_MAX].replace("\0", "?").encode("utf-8", "replace").decode()


def check_invariants(d: Dispatch) -> Dispatch:
    """Return `d` if it may be stored. Raises InvalidRecord, which shows a mistake of this code, not of its caller."""
    claim = (d.token != 0, d.claimed_by is not None, d.lease_until_ms is not None, d.claimed_at_ms is not None)
    wrong = ""
    if d.status is Status.CLAIMED:
        wrong = "" if all(claim) else "a claimed dispatch has a token, a holder and a lease"
    elif any(claim):
        wrong = f"a {d.status.value} dispatch has no claim"
    if d.status.finished != (d.completed_at_ms is not None):
        wrong = "a dispatch has completed_at_ms exactly when it is finished"
    if d.attempts > d.max_attempts or (d.status is Status.QUEUED and d.attempts >= d.max_attempts):
        wrong = "a dispatch has more attempts than it may"
    if wrong:
        raise InvalidRecord(f"dispatch {d.dispatch_id!r}: {wrong}")
    return d
