"""The life of a dispatch: which step leads from which status to which, and what the step writes.

No I/O and no clock: a step is decided on a thread's state as it was read, and written if the thread still has it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from bufstore.errors import ClaimInterrupted, StaleClaim
from bufstore.mailbox.model import OWN, Dispatch, MailboxThread, Status, check_invariants

#: The statuses that a dispatch may go to from each status. No other change happens.
TRANSITIONS: dict[Status, frozenset[Status]] = {
    Status.QUEUED: frozenset({Status.CLAIMED, Status.CANCELLED, Status.SUPERSEDED}),
    Status.CLAIMED: frozenset({Status.ACKED, Status.QUEUED, Status.DEAD, Status.SUPERSEDED}),
}


class Claiming(msgspec.Struct, frozen=True, array_like=True):
    """What a claim adds to its dispatch. It is stored as it is, so new fields are appended, with defaults."""

    holder: str
    lease_until_ms: int
    now_ms: int
    claim_id: str = ""


class Move(msgspec.Struct, frozen=True):
    """One dispatch that changes its place."""

    #: The dispatch as it stands in the queue that it leaves; None when it was the claimed one.
    before: Dispatch | None
    #: The dispatch when it is finished, or back in the queue; None when it becomes the claimed one.
    after: Dispatch | None


class Step(msgspec.Struct, frozen=True):
    """Changes that are written together or not at all."""

    thread: MailboxThread
    moves: tuple[Move, ...] = ()
    #: True when the thread has become free other than by an ack: somebody may now find work in it.
    wake: bool = False
    #: How long an outcome or error is that is recorded: with a long one, the steps behind it must still fit.
    adds: int = 0


def is_same(found: Dispatch, draft: Dispatch) -> bool:
    """True when `found` is what an earlier attempt at `draft` has stored."""
    stored = found.dispatch_id, found.enqueued_at_ms or found.created_at_ms, found.payload
    return stored == (draft.dispatch_id, draft.created_at_ms, draft.payload)


def is_stale(d: Dispatch, thread: MailboxThread) -> bool:
    """True when an interrupt came after the dispatch was enqueued."""
    return d.epoch < thread.epoch


def clock_ahead(known: float, theirs: float, asked_at: float, answered_at: float) -> float:
    """Return by how much their clock is ahead of ours, close to what is `known` of that: they said `theirs` in between.

    Who stood still before the answer was read would find its clock behind by as long, and its claims expired.
    """
    return min(max(known, theirs - answered_at), theirs - asked_at)


def is_expired(thread: MailboxThread, now_ms: int) -> bool:
    """True when the claim's lease is over; the lease still holds in its last millisecond."""
    active = thread.active
    return active is not None and active.lease_until_ms is not None and active.lease_until_ms < now_ms


def held(thread: MailboxThread, claim: Dispatch) -> Dispatch:
    """Return the thread's active dispatch. Raises StaleClaim when `claim` is not the claim that holds it."""
    active = thread.active
    if active is None or active.dispatch_id != claim.dispatch_id or not 0 < active.token == claim.token:
        raise StaleClaim(claim.thread_id, claim.dispatch_id, claim.token)
    return active


def _became(d: Dispatch, status: Status, now_ms: int, **fields: object) -> Dispatch:
    assert status in TRANSITIONS[d.status], (d.status, status)
    if status.finished:
        fields |= {"completed_at_ms": now_ms, "ended_by": max(0, d.token)}
    if status is not Status.CLAIMED:
        fields |= {"token": 0, "claimed_by": None, "lease_until_ms": None, "claimed_at_ms": None, "claim_id": ""}
    return check_invariants(replace(d, status=status, updated_at_ms=now_ms, **fields))


def claimed(d: Dispatch, claiming: Claiming, token: int) -> Dispatch:
    """Return the queued dispatch `d` as claimed."""
    now_ms, until_ms = claiming.now_ms, claiming.lease_until_ms
    lease = {"claimed_by": claiming.holder, "lease_until_ms": until_ms, "claimed_at_ms": now_ms}
    return _became(d, Status.CLAIMED, now_ms, token=token, claim_id=claiming.claim_id, **lease)


def claim(thread: MailboxThread, d: Dispatch, claiming: Claiming) -> Step:
    """Make `d` the active dispatch of the thread, which must be free; `d` must be queued and not stale."""
    assert thread.active is None
    assert not is_stale(d, thread)
    return Step(replace(thread, active=claimed(d, claiming, OWN)), (Move(d, None),))


def _release(thread: MailboxThread, after: Dispatch, *, wake: bool = True) -> Step:
    return Step(replace(thread, active=None), (Move(None, after),), wake)


def ack(thread: MailboxThread, claim: Dispatch, now_ms: int) -> Step:
    """End the claim: the work is done, even if an interrupt came meanwhile."""
    active = held(thread, claim)
    return _release(thread, _became(active, Status.ACKED, now_ms), wake=False)


def _again(
    thread: MailboxThread, active: Dispatch, attempts: int, available_at_ms: int, error: str | None, now_ms: int
) -> Step:
    if is_stale(active, thread):
        status = Status.SUPERSEDED
    elif attempts >= active.max_attempts:
        status = Status.DEAD
    else:
        status = Status.QUEUED
    after = _became(
        active,
        status,
        now_ms,
        attempts=attempts,
        last_error=error if error is not None else active.last_error,
        available_at_ms=available_at_ms if status is Status.QUEUED else active.available_at_ms,
        instance_id=None if status is Status.QUEUED else active.instance_id,
    )
    return _release(thread, after)


def nack(thread: MailboxThread, claim: Dispatch, retry_at_ms: int, error: str | None, now_ms: int) -> Step:
    """Hand the claim back, to be tried again from `retry_at_ms` on, unless interrupted or without an attempt left."""
    active = held(thread, claim)
    return replace(_again(thread, active, active.attempts + 1, retry_at_ms, error, now_ms), adds=len(error or ""))


def release(thread: MailboxThread, claim: Dispatch, now_ms: int) -> Step:
    """Hand back a claim that nobody got, without counting an attempt. As after a nack, it is not new in the queue."""
    active = held(thread, claim)
    if active.created_at_ms >= now_ms:
        # The clock was ahead when it came. So it came now: it must not wait until then.
        enqueued_at_ms = active.enqueued_at_ms or active.created_at_ms
        active = replace(active, created_at_ms=now_ms - 1, enqueued_at_ms=enqueued_at_ms)
    at_ms = max(active.available_at_ms, active.created_at_ms + 1)
    return _again(thread, active, active.attempts, at_ms, None, now_ms)


def expire(thread: MailboxThread, now_ms: int) -> Step | None:
    """Take back the claim if its lease is over; None when there is no such claim."""
    active = thread.active
    if active is None or not is_expired(thread, now_ms):
        return None
    return _again(thread, active, active.attempts + 1, 0, f"the lease of {active.claimed_by!r} ran out", now_ms)


def dead_letter(thread: MailboxThread, claim: Dispatch, error: str | None, now_ms: int) -> Step:
    """Give the dispatch up for good, as its holder asks."""
    active = held(thread, claim)
    return _release(thread, _became(active, Status.DEAD, now_ms, last_error=error or active.last_error))


def supersede_claimed(thread: MailboxThread, now_ms: int) -> Step | None:
    """End the active dispatch and fence its holder off; None when there is none."""
    if thread.active is None:
        return None
    return _release(thread, _became(thread.active, Status.SUPERSEDED, now_ms))


def cancel(thread: MailboxThread, d: Dispatch | None, now_ms: int) -> Step | None:
    """Take a queued dispatch out of the queue; None when it is not there, or no longer."""
    if d is None or d.status is not Status.QUEUED or is_stale(d, thread):
        return None
    return Step(thread, (Move(d, _became(d, Status.CANCELLED, now_ms)),))


def interrupt(thread: MailboxThread, *, waits: bool) -> Step | None:
    """Supersede everything that is queued now: the number of this one write becomes the thread's epoch.

    `waits`: whether anything is queued. None when nothing is known of the thread either: what the step wrote would stay
    for ever, because threads are forgotten with their last dispatch.
    """
    if not (waits or thread.step or thread.epoch):
        return None
    return Step(replace(thread, epoch=OWN))


def supersede_stale(thread: MailboxThread, queued: Sequence[Dispatch], now_ms: int) -> Step | None:
    """Take those of `queued` that are superseded out of the queue; None when none is superseded."""
    stale = [d for d in queued if is_stale(d, thread)]
    if not stale:
        return None
    return Step(thread, tuple(Move(d, _became(d, Status.SUPERSEDED, now_ms)) for d in stale))


def extend(thread: MailboxThread, claim: Dispatch, lease_until_ms: int, now_ms: int) -> Step:
    """Extend the lease. Raises ClaimInterrupted when the thread was interrupted: the holder must stop."""
    active = _uninterrupted(thread, claim)
    return _note(thread, active, now_ms, lease_until_ms=max(lease_until_ms, active.lease_until_ms or 0))


def start(thread: MailboxThread, claim: Dispatch, instance_id: str, now_ms: int) -> Step:
    """Record that the holder begins. Raises ClaimInterrupted when the thread was interrupted."""
    active = _uninterrupted(thread, claim)
    return _note(thread, active, now_ms, instance_id=instance_id, run_status="running")


def finish(
    thread: MailboxThread,
    claim: Dispatch,
    run_status: str,
    termination: str | None,
    result: bytes | None,
    error: str | None,
    now_ms: int,
) -> Step:
    """Record the outcome of the work; the ack is a step of its own."""
    said = {"run_status": run_status, "termination": termination, "result": result, "run_error": error}
    return replace(_note(thread, held(thread, claim), now_ms, **said), adds=len(result or b"") + len(error or ""))


def _uninterrupted(thread: MailboxThread, claim: Dispatch) -> Dispatch:
    active = held(thread, claim)
    if is_stale(active, thread):
        raise ClaimInterrupted(claim.thread_id, claim.dispatch_id, claim.token)
    return active


def _note(thread: MailboxThread, active: Dispatch, now_ms: int, **fields: object) -> Step:
    return Step(replace(thread, active=check_invariants(replace(active, updated_at_ms=now_ms, **fields))))


def as_seen(d: Dispatch, thread: MailboxThread) -> Dispatch:
    """Return `d` as a reader must see it: a queued dispatch is superseded as soon as the interrupt was written."""
    if d.status is Status.QUEUED and is_stale(d, thread):
        return replace(d, status=Status.SUPERSEDED, completed_at_ms=d.updated_at_ms)
    return d
