"""Checks of a `MailboxStore` with several instances: keys, races, signals, sweeping."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from bufstore.errors import AlreadyExists, StaleClaim, StepUnknown
from bufstore.mailbox.config import MailboxConfig
from bufstore.mailbox.model import Dispatch, Status
from bufstore.mailbox.ports import Signal
from bufstore.mailbox.store import MailboxStore
from bufstore.testing.basics import Check, fresh, raises, registrar
from conformance.mailbox_queue import Stores, Unsteady, claimed, ids, now, reclaimed, soon_s

CHECKS: list[Check] = []
_check = registrar(CHECKS)


async def _eventually(check: Callable[[], Awaitable[Any]], timeout_s: float = 60.0) -> Any:
    async with asyncio.timeout(timeout_s):
        while not (answer := await check()):  # noqa: ASYNC110 - nobody tells us
            await asyncio.sleep(0.02)
        return answer


async def _won(*calls: Awaitable[Dispatch | None], unknown: Awaitable[list[Dispatch]] | None = None) -> list[Dispatch]:
    """Make the calls at once and return the dispatches that they got; a refusal is no error.

    When a call lost its answer and no other call won, the winner is what `unknown` finds.
    """
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    refused = (AlreadyExists, StaleClaim, *([StepUnknown] if unknown is not None else []))
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, refused):
            raise outcome
    won = [o for o in outcomes if isinstance(o, Dispatch)]
    if unknown is None:
        return won
    found = await unknown
    return won or (found if any(isinstance(o, StepUnknown) for o in outcomes) else [])


@_check()
async def a_thread_goes_on_after_another_instance_has_interrupted_it(stores: Stores) -> None:
    """Regression on NATS: what an instance had read ahead hid the thread's later dispatches from it for good."""
    a, b = stores[:2]
    thread_id = fresh()
    for _ in range(4):
        await a.enqueue(thread_id)
    claim = await a.claim(thread_id, "a")
    assert claim is not None
    await a.ack(claim)
    assert len((await b.interrupt(thread_id)).superseded) == 3
    assert await a.claim(thread_id, "a") is None
    later = await b.enqueue(thread_id)
    found = await a.claim(thread_id, "a")
    assert found is not None
    assert found.dispatch_id == later.dispatch_id


@_check()
async def an_id_that_the_store_chose_is_taken_like_any_other(stores: Stores) -> None:
    """Regression on NATS: it was not guarded, and the second dispatch with it was lost."""
    a, b = stores[:2]
    thread_id = fresh()
    put = await a.enqueue(thread_id, b"first")
    with raises(AlreadyExists):
        await b.enqueue(thread_id, b"second", dispatch_id=put.dispatch_id)
    claim = await a.claim(thread_id, "a")
    assert claim is not None
    with raises(AlreadyExists):
        await b.enqueue(thread_id, b"second", dispatch_id=put.dispatch_id)
    await a.ack(claim)
    with raises(AlreadyExists):
        await b.enqueue(thread_id, b"second", dispatch_id=put.dispatch_id)
    assert [d.payload for d in await b.list_dispatches(thread_id)] == [b"first"]


@_check()
async def a_dedupe_key_is_taken_once_per_thread(stores: Stores) -> None:
    a, b = stores[:2]
    thread_id, other = fresh(), fresh()
    first = await a.enqueue(thread_id, dedupe_key="key")
    with raises(AlreadyExists) as caught:
        await b.enqueue(thread_id, dedupe_key="key", priority=1)
    assert first.dispatch_id in str(caught.value)
    await b.enqueue(thread_id, dedupe_key="another")
    await b.enqueue(other, dedupe_key="key")
    assert len(await a.list_dispatches(thread_id)) == 2


@_check()
async def a_dedupe_key_is_free_when_its_dispatch_has_ended(stores: Stores) -> None:
    a, b = stores[:2]

    async def cancel(d: Dispatch) -> None:
        await b.cancel(d.thread_id, d.dispatch_id)

    async def ack(d: Dispatch) -> None:
        await b.ack(await claimed(b, d.thread_id))

    async def kill(d: Dispatch) -> None:
        await b.dead_letter(await claimed(b, d.thread_id))

    async def interrupt(d: Dispatch) -> None:
        await b.interrupt(d.thread_id)

    async def forget(d: Dispatch) -> None:
        await ack(d)
        await b.purge_finished(now() + 60_000)

    for end in (cancel, ack, kill, interrupt, forget):
        thread_id = fresh()
        first = await a.enqueue(thread_id, dedupe_key="key")
        await end(first)
        second = await a.enqueue(thread_id, dedupe_key="key")
        assert second.dispatch_id != first.dispatch_id
        with raises(AlreadyExists):
            await b.enqueue(thread_id, dedupe_key="key")
        assert (await claimed(b, thread_id)).dispatch_id == second.dispatch_id


@_check()
async def a_dedupe_key_stays_taken_while_its_dispatch_is_claimed(stores: Stores) -> None:
    a, b = stores[:2]
    thread_id = fresh()
    await a.enqueue(thread_id, dedupe_key="key")
    claim = await claimed(a, thread_id)
    await b.interrupt(thread_id)
    with raises(AlreadyExists):
        await b.enqueue(thread_id, dedupe_key="key")
    await a.ack(claim)
    second = await b.enqueue(thread_id, dedupe_key="key")
    # Purging the first dispatch does not free the key, which the second one has.
    while await a.purge_finished(now() + 60_000):
        pass
    with raises(AlreadyExists):
        await a.enqueue(thread_id, dedupe_key="key")
    assert (await claimed(a, thread_id)).dispatch_id == second.dispatch_id


@_check()
async def of_many_with_one_dedupe_key_one_is_admitted(stores: Stores) -> None:
    thread_id = fresh()
    for _ in range(2):
        calls = [stores[n % len(stores)].enqueue(thread_id, str(n).encode(), dedupe_key="key") for n in range(64)]
        won = await _won(*calls)
        assert len(won) == 1
        assert ids(await stores[0].list_dispatches(thread_id, {Status.QUEUED})) == ids(won)
        await stores[0].cancel(thread_id, won[0].dispatch_id)


@_check()
async def many_enqueue_into_one_thread_and_none_is_lost(stores: Stores) -> None:
    thread_id = fresh()
    calls = [stores[n % len(stores)].enqueue(thread_id, str(n).encode(), priority=n % 3) for n in range(64)]
    put = await asyncio.gather(*calls)
    listed = await stores[0].list_dispatches(thread_id)
    assert sorted(ids(listed)) == sorted(ids(put))
    assert sorted(d.payload for d in listed) == sorted(str(n).encode() for n in range(64))
    order = []
    while (claim := await stores[1].claim(thread_id, "worker")) is not None:
        order.append(await stores[1].ack(claim))
    assert ids(order) == ids(listed)


@_check()
async def of_many_claimers_one_wins(stores: Stores) -> None:
    thread_id = fresh()
    put = [await stores[0].enqueue(thread_id) for _ in range(8)]
    won = await _won(*(stores[n % len(stores)].claim(thread_id, f"w{n}") for n in range(16)))
    assert ids(won) == [put[0].dispatch_id]
    await stores[0].ack(won[0])
    # The same holds for claims of different dispatches of the thread.
    calls = (stores[n % len(stores)].claim_dispatch(thread_id, put[1 + n % 7].dispatch_id, f"w{n}") for n in range(14))
    won = await _won(*calls)
    assert len(won) == 1
    assert (await stores[1].list_dispatches(thread_id, {Status.CLAIMED})) == won


@_check()
async def an_expired_claim_is_taken_back_once(stores: Stores) -> None:
    thread_id, t = fresh(), now()
    await stores[0].enqueue(thread_id, max_attempts=1, now_ms=t)
    claim = await claimed(stores[0], thread_id, lease_s=1, now_ms=t)
    mine = await reclaimed(thread_id, t + 2000, *(stores[n % len(stores)] for n in range(8)))
    # While leaders change, the answer may be lost: then it is done, and nobody is told.
    untold = isinstance(stores[0], Unsteady) and not mine
    assert untold or [(d.status, d.attempts) for d in mine] == [(Status.DEAD, 1)]
    assert [(d.status, d.attempts) for d in await stores[1].list_dispatches(thread_id)] == [(Status.DEAD, 1)]
    with raises(StaleClaim):
        await stores[0].ack(claim)


@_check()
async def a_retry_waits_for_its_time_everywhere(stores: Stores) -> None:
    a, b = stores[:2]
    thread_id, t = fresh(), now()
    d = await a.enqueue(thread_id, now_ms=t)
    await a.nack(await claimed(a, thread_id, now_ms=t), retry_at_ms=t + 5000, now_ms=t)
    assert await b.claim(thread_id, "worker", now_ms=t + 4999) is None
    assert (await claimed(b, thread_id, now_ms=t + 5000)).dispatch_id == d.dispatch_id


@_check()
async def an_interrupt_and_enqueues_at_once_leave_each_on_one_side(stores: Stores) -> None:
    a, b = stores[:2]
    for _ in range(5):
        thread_id = fresh()
        outcomes = await asyncio.gather(
            *(a.enqueue(thread_id) for _ in range(5)), b.interrupt(thread_id), *(b.enqueue(thread_id) for _ in range(5))
        )
        epoch = await a.current_epoch(thread_id)
        after = [o for o in outcomes if isinstance(o, Dispatch) and o.epoch == epoch]
        done = []
        while (claim := await b.claim(thread_id, "worker")) is not None:
            done.append(await b.ack(claim))
        assert sorted(ids(done)) == sorted(ids(after))
        assert len(await a.list_dispatches(thread_id, {Status.SUPERSEDED})) == 10 - len(after)


@_check()
async def steps_at_once_end_a_claim_once(stores: Stores) -> None:
    for _ in range(5):
        thread_id = fresh()
        await stores[0].enqueue(thread_id)
        claim = await claimed(stores[0], thread_id)
        ended = await _won(
            stores[0].nack(claim),
            stores[1].dead_letter(claim),
            stores[1].supersede_claimed(thread_id),
            stores[0].nack(claim),
            unknown=stores[1].list_dispatches(thread_id),
        )
        assert len(ended) == 1
        assert ended[0].status is not Status.CLAIMED
        assert await stores[1].list_dispatches(thread_id) == ended


async def _signal(store: MailboxStore, thread_id: str, timeout_s: float | None = None) -> Signal | None:
    """Return the thread's signal, or None if it does not come in time. Signals of other threads are acknowledged."""
    timeout_s = soon_s(store) if timeout_s is None else timeout_s
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        for signal in await store.pull_signals(timeout_s=min(0.2, timeout_s)):
            if signal.thread_id == thread_id:
                return signal
            await signal.ack()
    return None


@_check()
async def a_signal_comes_to_one_worker_wherever_it_is(stores: Stores) -> None:
    a, b = stores[:2]
    thread_id = fresh("thread with . * > ")
    for _ in range(5):
        await a.enqueue(thread_id)
    began = time.monotonic()
    signal = await _signal(b, thread_id)
    assert signal is not None
    # A client that stands still for two seconds hands back what came meanwhile.
    assert signal.deliveries == 1 or time.monotonic() - began > 2
    # A thread has one signal, however many dispatches are in it.
    assert await _signal(a, thread_id, 0.5) is None
    while (claim := await b.claim(thread_id, "worker")) is not None:
        await b.ack(claim)
    await signal.ack()
    assert await _signal(a, thread_id, 0.5) is None
    await b.enqueue(thread_id)
    assert await _signal(a, thread_id) is not None


@_check()
async def a_signal_that_is_handed_back_comes_again(stores: Stores) -> None:
    a, b = stores[:2]
    thread_id = fresh()
    await a.enqueue(thread_id)
    signal = await _signal(a, thread_id)
    assert signal is not None
    began = time.monotonic()
    await signal.nack(0.6)
    again = await _signal(a, thread_id, 0.3) or await _signal(b, thread_id)
    assert again is not None
    # The signal is not delivered again at once. A new leader may not know of the first delivery.
    assert time.monotonic() - began > 0.55 or again.deliveries == 1
    assert again.deliveries == 2 or isinstance(a, Unsteady) or time.monotonic() - began > 2
    await again.ack()


@_check()
async def a_freed_thread_is_signalled(stores: Stores) -> None:
    a, b = stores[:2]
    t = now()

    async def nack(claim: Dispatch) -> None:
        await a.nack(claim)

    async def kill(claim: Dispatch) -> None:
        await a.dead_letter(claim)

    async def supersede(claim: Dispatch) -> None:
        await b.supersede_claimed(claim.thread_id)

    async def reclaim(claim: Dispatch) -> None:
        await reclaimed(claim.thread_id, t + 120_000, b)

    for free in (nack, kill, supersede, reclaim):
        thread_id = fresh()
        await a.enqueue(thread_id)
        await a.enqueue(thread_id)
        signal = await _signal(a, thread_id)
        assert signal is not None
        claim = await claimed(a, thread_id)
        # The worker found the thread busy, and wrongly acknowledged the signal.
        await signal.ack()
        await free(claim)
        assert await _signal(b, thread_id) is not None, free


@_check()
async def what_becomes_due_is_signalled_by_the_sweeper(stores: Stores) -> None:
    from bufstore.mailbox.sweeper import Sweeper

    a, b = stores[:2]
    thread_id, t = fresh(), int(a.backend.now_ms())  # type: ignore[attr-defined]
    await a.enqueue(thread_id, available_at_ms=t + 700, now_ms=t)
    early = await _signal(b, thread_id, 0.3)
    # The machine may have paused until it was due, and some stores tell of it then without a sweeper.
    assert early is None or int(b.backend.now_ms()) >= t + 700  # type: ignore[attr-defined]
    sweepers = [Sweeper(a), Sweeper(b)]  # type: ignore[arg-type]

    async def signalled() -> Signal | None:
        for sweeper in sweepers:
            await sweeper.sweep()
        return await _signal(b, thread_id, 0.1)

    signal = early or await _eventually(signalled)
    assert (await claimed(b, thread_id)).thread_id == signal.thread_id


@_check()
async def a_worker_works_queues_off(stores: Stores) -> None:
    from bufstore.mailbox.worker import Worker

    a, b = stores[:2]
    threads = [fresh() for _ in range(6)]
    working: set[str] = set()
    overlaps: list[str] = []
    seen: list[tuple[str, bytes]] = []

    async def handle(d: Dispatch) -> None:
        if d.thread_id in working:  # an error here would only have the dispatch tried again
            overlaps.append(d.thread_id)
        working.add(d.thread_id)
        await asyncio.sleep(0.002)
        working.remove(d.thread_id)
        if d.payload == b"2" and d.attempts == 0:
            raise ValueError("not at the first time")
        seen.append((d.thread_id, d.payload))

    async def all_done() -> bool:
        return len(seen) == 30

    async with Worker(a, "a", handle), Worker(b, "b", handle):  # type: ignore[arg-type]
        for n in range(5):
            for thread_id in threads:
                await a.enqueue(thread_id, str(n).encode())
        from bufstore.mailbox.sweeper import Sweeper

        sweeper = Sweeper(a)  # type: ignore[arg-type]

        async def swept() -> bool:
            await sweeper.sweep()
            return await all_done()

        await _eventually(swept)
    assert sorted(seen) == sorted((t, str(n).encode()) for t in threads for n in range(5))
    assert overlaps == []


@_check()
async def a_worker_stops_when_it_is_interrupted_or_loses_its_claim(stores: Stores) -> None:
    from bufstore.mailbox.worker import Worker

    a, b = stores[:2]
    for stop in ("interrupt", "supersede_claimed"):
        thread_id = fresh()
        begun, cancelled = asyncio.Event(), asyncio.Event()

        async def handle(
            d: Dispatch, thread_id: str = thread_id, begun: asyncio.Event = begun, ended: asyncio.Event = cancelled
        ) -> None:
            if d.thread_id == thread_id:
                begun.set()
                try:
                    await asyncio.sleep(60)
                finally:
                    ended.set()

        worker = Worker(a, "a", handle)  # type: ignore[arg-type]
        # It looks after its claim every 0.2 s, and no pause of the machine outlasts the lease.
        worker._config = MailboxConfig(lease_s=30, signal_ack_wait_s=0.6, signal_fetch_expires_s=0.1)
        async with worker:
            await b.enqueue(thread_id)
            async with asyncio.timeout(10 + soon_s(a)):
                await begun.wait()
                await getattr(b, stop)(thread_id)
                await cancelled.wait()

        async def ended(thread_id: str = thread_id) -> bool:
            return [d.status for d in await b.list_dispatches(thread_id)] == [Status.SUPERSEDED]

        await _eventually(ended)


@_check()
async def what_nobody_hears_is_enqueued(stores: Stores) -> None:
    a, b = stores[:2]
    thread_id = fresh()
    put = await a.deliver(thread_id, b"command", priority=1)
    assert put is not None
    assert (put.payload, put.priority, put.maybe_delivered) == (b"command", 1, False)
    assert (await claimed(b, thread_id)).dispatch_id == put.dispatch_id


@_check()
async def counters_say_what_was_done(stores: Stores) -> None:
    a = stores[0]
    thread_id, t = fresh(), now()
    before = a.statistics().counts
    for n in range(4):
        await a.enqueue(thread_id, dispatch_id=f"d{n}")
    with raises(AlreadyExists):
        await a.enqueue(thread_id, dispatch_id="d1")
    claim = await claimed(a, thread_id)
    await a.extend_lease(claim)
    await a.ack(claim)
    with raises(StaleClaim):
        await a.nack(claim)
    await a.nack(await claimed(a, thread_id))
    await a.dead_letter(await claimed(a, thread_id))
    await a.cancel(thread_id, "d3")
    await a.interrupt(thread_id, now_ms=t)
    assert await a.claim(thread_id, "worker") is None
    counts = a.statistics().counts
    done = {name: counts[name] - before.get(name, 0) for name in counts}
    if isinstance(a, Unsteady):  # the answer to the call that supersedes it may be lost
        assert done.pop("superseded", 0) <= 1
        done["superseded"] = 1
    expected = {"enqueued": 4, "duplicates": 1, "claimed": 3, "extended": 1, "acked": 1, "stale_claims": 1, "nacked": 1}
    expected |= {"dead_lettered": 1, "cancelled": 1, "interrupted": 1, "superseded": 1, "claims_empty": 1}
    assert {name: done.get(name) for name in expected} == expected
    timings = a.statistics().timings
    assert {"enqueue", "claim", "ack", "waited", "worked"} <= set(timings)
    assert all(0 <= timing.p50_ms <= timing.p99_ms <= timing.max_ms for timing in timings.values())
