"""Checks of one thread's queue in a `MailboxStore`: order, claims, ends, interrupts.

Each check takes a list of at least two stores, instances of one deployment (the same store twice will do).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from msgspec.structs import replace

from bufstore.errors import (
    AlreadyExists,
    ClaimInterrupted,
    StaleClaim,
    StepUnknown,
)
from bufstore.mailbox.model import Dispatch, Interruption, Status
from bufstore.mailbox.store import MailboxStore
from bufstore.testing.basics import Check, fresh, raises, registrar

CHECKS: list[Check] = []
_check = registrar(CHECKS)
Stores = Sequence[MailboxStore]


class Unsteady(MailboxStore):
    """A store whose leaders change during a check: a signal may take as long as is promised, an answer may be lost."""


def soon_s(store: MailboxStore) -> float:
    """How long a signal that is sent at once may take: while leaders change, as long as docs/MAILBOX.md promises."""
    c = store.config
    late_s = max(c.signal_ack_wait_s, c.signal_nack_max_delay_s) + 2 * c.sweep_interval_s
    # 15 s more for elections, on a machine that others use too.
    # Otherwise a machine may pause, and this is below a third of the lease.
    return late_s + 15 if isinstance(store, Unsteady) else 9.0


def now() -> int:
    """The time in milliseconds."""
    return int(1000 * time.time())


def ids(dispatches: Sequence[Dispatch]) -> list[str]:
    """The ids of the dispatches, in their order."""
    return [d.dispatch_id for d in dispatches]


async def reclaimed(thread_id: str, now_ms: int, *stores: MailboxStore) -> list[Dispatch]:
    """Reclaim by one call for each store; while leaders change, repeat it for as long as docs/MAILBOX.md promises.

    The copy that answers may lag, for example that of a node that has just started.
    """
    end = time.monotonic() + soon_s(stores[0])
    while True:
        parts = await asyncio.gather(*(_told_reclaimed(store, now_ms) for store in stores))
        found = [d for part in parts for d in part if d.thread_id == thread_id]
        if found or not isinstance(stores[0], Unsteady) or time.monotonic() > end:
            return found


async def _told_reclaimed(store: MailboxStore, now_ms: int) -> list[Dispatch]:
    try:
        return await store.reclaim_expired(now_ms=now_ms)
    except StepUnknown:
        if not isinstance(store, Unsteady):
            raise
        return []  # the answer was lost with a leader


async def claimed(store: MailboxStore, thread_id: str, holder: str = "worker", **options: object) -> Dispatch:
    """Claim the thread's next dispatch; the claim must succeed."""
    claim = await store.claim(thread_id, holder, **options)  # type: ignore[arg-type]
    assert claim is not None
    return claim


@_check()
async def a_dispatch_comes_back_as_it_was_given(stores: Stores) -> None:
    store, thread_id, t = stores[0], fresh("Ünïcode thread/*.> "), now()
    given: dict[str, Any] = {
        "run_id": "run ☂",
        "priority": 7,
        "dedupe_key": "k.*",
        "max_attempts": 3,
        "dispatch_id": "the id",
    }
    put = await store.enqueue(thread_id, b"\0\xff body", available_at_ms=t + 5, now_ms=t, **given)
    assert (put.thread_id, put.payload, put.status, put.attempts) == (thread_id, b"\0\xff body", Status.QUEUED, 0)
    assert {name: getattr(put, name) for name in given} == given
    assert (put.created_at_ms, put.updated_at_ms, put.available_at_ms) == (t, t, t + 5)
    assert await store.load_dispatch(thread_id, "the id") == put
    assert await store.list_dispatches(thread_id) == [put]
    assert await store.load_dispatch(thread_id, "another") is None
    assert await store.load_dispatch(fresh(), "the id") is None
    assert await store.list_dispatches(fresh()) == []


@_check()
async def an_id_is_taken_once(stores: Stores) -> None:
    a, b = stores[:2]
    thread_id = fresh()
    await a.enqueue(thread_id, dispatch_id="one")
    for priority in (128, 3):
        with raises(AlreadyExists):
            await b.enqueue(thread_id, dispatch_id="one", priority=priority)
    await a.ack(await claimed(a, thread_id))
    with raises(AlreadyExists):
        await b.enqueue(thread_id, dispatch_id="one")
    await b.enqueue(fresh(), dispatch_id="one")


@_check()
async def the_first_in_the_queue_is_claimed(stores: Stores) -> None:
    store, thread_id, t = stores[0], fresh(), now()
    assert await store.claim(thread_id, "worker") is None
    put = [await store.enqueue(thread_id, dispatch_id=f"d{n}", now_ms=t) for n in range(5)]
    assert ids(await store.list_dispatches(thread_id)) == ids(put)
    for n in range(5):
        claim = await claimed(store, thread_id, f"worker {n}", lease_s=10, now_ms=t)
        assert (claim.dispatch_id, claim.status, claim.claimed_by) == (f"d{n}", Status.CLAIMED, f"worker {n}")
        assert (claim.lease_until_ms, claim.claimed_at_ms) == (t + 10_000, t)
        assert claim.token > 0
        assert await store.load_dispatch(thread_id, f"d{n}") == claim
        await store.ack(claim, now_ms=t)
    assert await store.claim(thread_id, "worker") is None


@_check()
async def a_lower_priority_number_goes_first(stores: Stores) -> None:
    store, thread_id, t = stores[0], fresh(), now()
    for priority in (128, 200, 0, 5, 128, 0):
        await store.enqueue(thread_id, str(priority).encode(), priority=priority, now_ms=t)
    listed = await store.list_dispatches(thread_id)
    assert [d.priority for d in listed] == [0, 0, 5, 128, 128, 200]
    order = []
    while (claim := await store.claim(thread_id, "worker", now_ms=t)) is not None:
        order.append(await store.ack(claim))
    assert ids(order) == ids(listed)


@_check()
async def nothing_is_claimed_before_its_time(stores: Stores) -> None:
    store, thread_id, t = stores[0], fresh(), now()
    later = await store.enqueue(thread_id, available_at_ms=t + 1000, priority=0, now_ms=t)
    assert await store.claim(thread_id, "worker", now_ms=t + 999) is None
    at_once = await store.enqueue(thread_id, now_ms=t + 999)
    first = await claimed(store, thread_id, now_ms=t + 999)
    assert first.dispatch_id == at_once.dispatch_id
    await store.ack(first)
    assert (await claimed(store, thread_id, now_ms=t + 1000)).dispatch_id == later.dispatch_id


@_check()
async def a_thread_has_one_claim_at_a_time(stores: Stores) -> None:
    a, b = stores[:2]
    thread_id, t = fresh(), now()
    put = [await a.enqueue(thread_id, now_ms=t) for _ in range(3)]
    claim = await claimed(a, thread_id, lease_s=1, now_ms=t)
    for store in (a, b):
        assert await store.claim(thread_id, "other") is None
        assert await store.claim_dispatch(thread_id, put[1].dispatch_id, "other") is None
        # Not even after the lease has ended: reclaiming is a step of its own.
        assert await store.claim(thread_id, "other", now_ms=t + 5000) is None
    await a.ack(claim)
    assert (await claimed(b, thread_id)).dispatch_id == put[1].dispatch_id


@_check()
async def a_dispatch_is_claimed_by_its_id(stores: Stores) -> None:
    store, thread_id, t = stores[0], fresh(), now()
    await store.enqueue(thread_id, now_ms=t)
    wanted = await store.enqueue(thread_id, available_at_ms=t + 60_000, priority=255, now_ms=t)
    # A dispatch can be claimed by its id before it is due.
    claim = await store.claim_dispatch(thread_id, wanted.dispatch_id, "worker", now_ms=t)
    assert claim is not None
    assert claim.dispatch_id == wanted.dispatch_id
    await store.ack(claim)
    assert await store.claim_dispatch(thread_id, wanted.dispatch_id, "worker") is None
    assert await store.claim_dispatch(thread_id, "no such", "worker") is None


@_check()
async def an_ack_ends_it(stores: Stores) -> None:
    store, thread_id, t = stores[0], fresh(), now()
    await store.enqueue(thread_id, b"x", now_ms=t)
    claim = await claimed(store, thread_id, now_ms=t)
    ended = await store.ack(claim, now_ms=t + 7)
    assert (ended.status, ended.completed_at_ms, ended.payload) == (Status.ACKED, t + 7, b"x")
    assert (ended.token, ended.claimed_by, ended.lease_until_ms) == (0, None, None)
    assert ended.ended_by == claim.token
    assert await store.load_dispatch(thread_id, claim.dispatch_id) == ended
    # A caller that got no answer may repeat the call.
    assert await store.ack(claim) == ended
    assert await store.list_dispatches(thread_id) == [ended]


@_check()
async def a_claim_needs_its_own_token(stores: Stores) -> None:
    a, b = stores[:2]
    thread_id = fresh()
    queued = await a.enqueue(thread_id)
    claim = await claimed(a, thread_id)
    for token in (0, claim.token - 1, claim.token + 1):
        wrong = replace(claim, token=token)
        for store in (a, b):
            await _refused(store, wrong, StaleClaim)
    await _refused(a, queued, StaleClaim)
    assert (await a.ack(claim)).status is Status.ACKED


async def _refuses(store: MailboxStore, error: type[Exception], step: Callable[[], Awaitable[Dispatch]]) -> None:
    with raises(error):
        try:
            await step()
        except StepUnknown:
            if not isinstance(store, Unsteady):
                raise
            await step()  # the answer was lost; the repeated call succeeds


async def _refused(store: MailboxStore, claim: Dispatch, error: type[Exception]) -> None:
    await _refuses(store, error, lambda: store.ack(claim))
    await _refuses(store, error, lambda: store.nack(claim))
    await _refuses(store, error, lambda: store.dead_letter(claim))
    await _refuses(store, error, lambda: store.extend_lease(claim))
    await _refuses(store, error, lambda: store.record_start(claim, "instance"))
    await _refuses(store, error, lambda: store.record_result(claim, "done"))


@_check()
async def a_stale_holder_is_refused_every_step(stores: Stores) -> None:
    a, b = stores[:2]
    thread_id, t = fresh(), now()
    await a.enqueue(thread_id, now_ms=t)
    stale = await claimed(a, thread_id, "paused", lease_s=1, now_ms=t)
    assert await reclaimed(thread_id, t + 1001, b)
    await _refused(a, stale, StaleClaim)
    # The stale claim is also refused while another worker works on the same dispatch.
    new = await claimed(b, thread_id, "successor", now_ms=t + 1001)
    assert new.dispatch_id == stale.dispatch_id
    assert new.token > stale.token
    await _refused(a, stale, StaleClaim)
    assert await b.load_dispatch(thread_id, new.dispatch_id) == new
    ended = await b.ack(new)
    await _refused(a, stale, StaleClaim)
    assert await a.load_dispatch(thread_id, new.dispatch_id) == ended


@_check()
async def tokens_grow_with_every_claim(stores: Stores) -> None:
    a, b = stores[:2]
    thread_id, last = fresh(), 0
    for n in range(6):
        await a.enqueue(thread_id)
        store = (a, b)[n % 2]
        claim = await claimed(store, thread_id)
        assert claim.token > last
        last = claim.token
        claim = await store.extend_lease(claim)
        assert claim.token == last
        await store.ack(claim)
        # Tokens do not start again even when the thread is forgotten.
        await store.purge_finished(now() + 60_000)


@_check()
async def a_nack_hands_it_back_at_its_place(stores: Stores) -> None:
    store, thread_id, t = stores[0], fresh(), now()
    first = await store.enqueue(thread_id, now_ms=t)
    second = await store.enqueue(thread_id, now_ms=t)
    back = await store.nack(await claimed(store, thread_id, now_ms=t), retry_at_ms=t + 500, error="broken", now_ms=t)
    assert (back.dispatch_id, back.status, back.attempts) == (first.dispatch_id, Status.QUEUED, 1)
    assert (back.last_error, back.available_at_ms, back.token, back.lease_until_ms) == ("broken", t + 500, 0, None)
    assert ids(await store.list_dispatches(thread_id)) == ids([first, second])
    meanwhile = await claimed(store, thread_id, now_ms=t + 499)
    assert meanwhile.dispatch_id == second.dispatch_id
    await store.nack(meanwhile, now_ms=t + 499)
    # The first dispatch is due again, and it was enqueued first.
    again = await claimed(store, thread_id, now_ms=t + 500)
    assert (again.dispatch_id, again.attempts) == (first.dispatch_id, 1)


@_check()
async def after_its_last_attempt_it_is_dead(stores: Stores) -> None:
    store, thread_id, t = stores[0], fresh(), now()
    await store.enqueue(thread_id, max_attempts=3, now_ms=t)
    for n in range(1, 4):
        ended = await store.nack(await claimed(store, thread_id), error=f"error {n}")
        assert (ended.attempts, ended.last_error) == (n, f"error {n}")
    assert (ended.status, ended.completed_at_ms is not None) == (Status.DEAD, True)
    assert await store.claim(thread_id, "worker") is None
    assert await store.load_dispatch(thread_id, ended.dispatch_id) == ended


@_check()
async def a_holder_gives_it_up(stores: Stores) -> None:
    store, thread_id = stores[0], fresh()
    await store.enqueue(thread_id)
    ended = await store.dead_letter(await claimed(store, thread_id), error="hopeless \0 \ud800")
    assert (ended.status, ended.last_error, ended.attempts) == (Status.DEAD, "hopeless ? ?", 0)
    assert await store.load_dispatch(thread_id, ended.dispatch_id) == ended


@_check()
async def only_what_is_queued_is_cancelled(stores: Stores) -> None:
    a, b = stores[:2]
    thread_id, t = fresh(), now()
    first = await a.enqueue(thread_id, now_ms=t)
    second = await a.enqueue(thread_id, now_ms=t)
    third = await a.enqueue(thread_id, available_at_ms=t + 10_000, now_ms=t)
    claim = await claimed(a, thread_id)
    assert await b.cancel(thread_id, first.dispatch_id) is None
    assert await b.cancel(thread_id, "no such") is None
    for d in (second, third):
        ended = await b.cancel(thread_id, d.dispatch_id, now_ms=t + 3)
        assert ended is not None
        assert (ended.status, ended.completed_at_ms) == (Status.CANCELLED, t + 3)
        assert await a.load_dispatch(thread_id, d.dispatch_id) == ended
        assert await b.cancel(thread_id, d.dispatch_id) is None
    await a.ack(claim)
    assert await a.claim(thread_id, "worker", now_ms=t + 20_000) is None


@_check()
async def a_lease_is_extended(stores: Stores) -> None:
    a, b = stores[:2]
    thread_id, t = fresh(), now()
    await a.enqueue(thread_id, now_ms=t)
    claim = await claimed(a, thread_id, lease_s=1, now_ms=t)
    longer = await b.extend_lease(claim, lease_s=30, now_ms=t + 500)
    assert (longer.lease_until_ms, longer.token) == (t + 30_500, claim.token)
    # A lease is never shortened.
    assert (await a.extend_lease(claim, lease_s=1, now_ms=t + 600)).lease_until_ms == t + 30_500
    assert [d for d in await b.reclaim_expired(now_ms=t + 20_000) if d.thread_id == thread_id] == []
    assert (await a.ack(claim)).status is Status.ACKED


@_check()
async def start_and_result_are_recorded(stores: Stores) -> None:
    a, b = stores[:2]
    thread_id = fresh()
    await a.enqueue(thread_id)
    claim = await claimed(a, thread_id)
    begun = await a.record_start(claim, "instance 1")
    assert (begun.instance_id, begun.run_status) == ("instance 1", "running")
    await b.record_result(claim, "done", termination="end of turn", result=b"answer", error="none")
    ended = await a.ack(claim)
    assert (ended.run_status, ended.termination, ended.result) == ("done", "end of turn", b"answer")
    assert (ended.run_error, ended.instance_id) == ("none", "instance 1")
    assert await b.load_dispatch(thread_id, claim.dispatch_id) == ended
    with raises(StaleClaim):
        await a.record_result(claim, "done again")


def _unsure(store: MailboxStore, done: Interruption) -> bool:
    """Whether an answer was lost, so that `done` may not list all that was superseded; it says so by `complete`."""
    return isinstance(store, Unsteady) and not done.complete


@_check()
async def an_interrupt_supersedes_what_is_queued(stores: Stores) -> None:
    a, b = stores[:2]
    thread_id, t = fresh(), now()
    assert await a.current_epoch(thread_id) == 0
    queued = [await a.enqueue(thread_id, now_ms=t) for _ in range(3)]
    queued.append(await a.enqueue(thread_id, available_at_ms=t + 1000, priority=3, now_ms=t))
    done = await b.interrupt(thread_id, now_ms=t + 1)
    assert done.active is None
    assert done.epoch > 0
    assert sorted(ids(done.superseded)) == sorted(ids(queued)) or _unsure(b, done)
    for store in (a, b):
        assert await store.current_epoch(thread_id) == done.epoch
        assert {d.status for d in await store.list_dispatches(thread_id)} == {Status.SUPERSEDED}
        assert await store.claim(thread_id, "worker", now_ms=t + 5000) is None
        assert await store.claim_dispatch(thread_id, queued[0].dispatch_id, "worker") is None
    # A dispatch that is enqueued after the interrupt belongs to the new epoch.
    after = await a.enqueue(thread_id)
    assert after.epoch == done.epoch
    assert (await claimed(b, thread_id)).dispatch_id == after.dispatch_id
    assert (await a.interrupt(thread_id)).epoch > done.epoch


@_check()
async def an_interrupted_holder_shall_stop_and_may_end(stores: Stores) -> None:
    a, b = stores[:2]
    for end in ("ack", "nack", "dead_letter"):
        thread_id = fresh()
        await a.enqueue(thread_id)
        behind = await a.enqueue(thread_id)
        claim = await claimed(a, thread_id)
        done = await b.interrupt(thread_id)
        assert done.active == claim
        assert ids(done.superseded) == [behind.dispatch_id] or _unsure(b, done)
        await _refuses(a, ClaimInterrupted, lambda claim=claim: a.extend_lease(claim))
        await _refuses(a, ClaimInterrupted, lambda claim=claim: a.record_start(claim, "instance"))
        # The holder still holds the thread.
        after = await b.enqueue(thread_id)
        assert await b.claim(thread_id, "other") is None
        await a.record_result(claim, "done")
        ended = await getattr(a, end)(claim)
        expected = {"ack": Status.ACKED, "nack": Status.SUPERSEDED, "dead_letter": Status.DEAD}[end]
        assert ended.status is expected
        assert (await claimed(b, thread_id)).dispatch_id == after.dispatch_id


@_check()
async def a_claim_is_superseded_from_outside(stores: Stores) -> None:
    a, b = stores[:2]
    thread_id = fresh()
    assert await a.supersede_claimed(thread_id) is None
    await a.enqueue(thread_id)
    behind = await a.enqueue(thread_id)
    claim = await claimed(a, thread_id)
    ended = await b.supersede_claimed(thread_id)
    assert ended is not None
    assert (ended.dispatch_id, ended.status) == (claim.dispatch_id, Status.SUPERSEDED)
    await _refused(a, claim, StaleClaim)
    assert (await claimed(b, thread_id)).dispatch_id == behind.dispatch_id


@_check()
async def an_expired_claim_is_taken_back(stores: Stores) -> None:
    a, b = stores[:2]
    thread_id, t = fresh(), now()
    first = await a.enqueue(thread_id, now_ms=t)
    await a.enqueue(thread_id, now_ms=t)
    await claimed(a, thread_id, "lost", lease_s=2, now_ms=t)
    # The last millisecond of a lease belongs to its holder.
    assert [d for d in await b.reclaim_expired(now_ms=t + 2000) if d.thread_id == thread_id] == []
    (back,) = await reclaimed(thread_id, t + 2001, b)
    assert (back.dispatch_id, back.status, back.attempts) == (first.dispatch_id, Status.QUEUED, 1)
    assert back.last_error is not None
    assert "'lost'" in back.last_error
    assert (back.token, back.claimed_by, back.lease_until_ms) == (0, None, None)
    assert [d for d in await a.reclaim_expired(now_ms=t + 9000) if d.thread_id == thread_id] == []
    # The reclaimed dispatch is first in the queue again.
    assert (await claimed(b, thread_id, now_ms=t + 2001)).dispatch_id == first.dispatch_id


@_check()
async def an_expired_claim_may_be_its_last(stores: Stores) -> None:
    a, b = stores[:2]
    thread_id, t = fresh(), now()
    await a.enqueue(thread_id, max_attempts=1, now_ms=t)
    await claimed(a, thread_id, lease_s=1, now_ms=t)
    (dead,) = await reclaimed(thread_id, t + 1500, b)
    assert (dead.status, dead.attempts, dead.completed_at_ms) == (Status.DEAD, 1, t + 1500)
    assert await b.load_dispatch(thread_id, dead.dispatch_id) == dead


@_check()
async def an_expired_claim_of_an_interrupted_thread_is_superseded(stores: Stores) -> None:
    a, b = stores[:2]
    thread_id, t = fresh(), now()
    await a.enqueue(thread_id, now_ms=t)
    await claimed(a, thread_id, lease_s=1, now_ms=t)
    await a.interrupt(thread_id)
    after = await a.enqueue(thread_id, now_ms=t)
    (ended,) = await reclaimed(thread_id, t + 1500, b)
    assert ended.status is Status.SUPERSEDED
    assert (await claimed(b, thread_id)).dispatch_id == after.dispatch_id
