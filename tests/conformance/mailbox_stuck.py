"""Every accepted dispatch is worked on: checks for the ways in which a thread with work was once forgotten.

Each check takes a list of at least two stores, instances of one deployment. Their sweepers must find only threads that
a signal tells of, unless a check removes the signal itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from bufstore.errors import AlreadyExists, ClaimInterrupted, LogUnavailable, StaleClaim
from bufstore.jetstream.messages import AppendUnknown
from bufstore.mailbox import decisions
from bufstore.mailbox.memory import MemoryBackend
from bufstore.mailbox.model import Dispatch, Status
from bufstore.mailbox.nats import NatsBackend
from bufstore.mailbox.postgres import PostgresBackend
from bufstore.mailbox.store import MailboxStore
from bufstore.mailbox.sweeper import Sweeper
from bufstore.mailbox.worker import Worker
from bufstore.testing.basics import Check, fresh, raises, registrar
from conformance.mailbox_queue import Stores, Unsteady, claimed, soon_s
from conformance.mailbox_together import _signal

CHECKS: list[Check] = []
_check = registrar(CHECKS)


async def _until(check: Callable[[], Awaitable[bool]], stores: Stores, timeout_s: float = 60.0) -> None:
    """Sweep until `check` is true. It is repeated when all replicas that were asked lag behind their leader."""
    sweepers = [Sweeper(store) for store in stores]

    async def looks_so() -> bool:
        try:
            return await check()
        except LogUnavailable:
            return False

    async with asyncio.timeout(timeout_s):
        while not await looks_so():
            for sweeper in sweepers:
                await sweeper.sweep()
            await asyncio.sleep(0.02)


def _resignalled(stores: Stores) -> int:
    return sum(store.statistics().counts.get("resignalled", 0) for store in stores)


def _none_resignalled(stores: Stores) -> bool:
    """Whether no signal was sent again; while leaders change, a sweeper may take a late signal for lost."""
    return isinstance(stores[0], Unsteady) or _resignalled(stores) == 0


async def _drop_signal(store: MailboxStore, thread_id: str) -> None:
    """Acknowledge the thread's signal without looking at the thread."""
    signal, backend = await _signal(store, thread_id), store.backend
    assert signal is not None
    if isinstance(backend, NatsBackend):
        subject = backend._keys.signal(thread_id).subject
        while signal is not None:  # a replica that lags may still have an older signal
            try:
                await backend._stream.purge(subject, signal.mark.seq)
                signal = await _signal(store, thread_id, 0.3)
            except LogUnavailable:
                await asyncio.sleep(0.05)  # the store is reconnecting
    elif isinstance(backend, PostgresBackend):
        async with backend._pool.lend(5) as connection:
            table = f'"{backend._schema}".mailbox_threads'
            await connection.execute(f"UPDATE {table} SET wake_at = NULL WHERE thread_id = %s", (thread_id,))
    else:
        assert isinstance(backend, MemoryBackend)
        del backend.shared.wakes[thread_id]


@_check()
async def a_signal_that_is_acked_too_early_comes_again(stores: Stores) -> None:
    a, b = stores[:2]
    thread_id = fresh()
    await a.enqueue(thread_id)
    signal = await _signal(a, thread_id)
    assert signal is not None
    lost = isinstance(a, Unsteady)  # the answer to an ack may be lost with a leader; the signal comes again then
    assert await signal.ack() or lost
    again = await _signal(b, thread_id)
    assert again is not None
    claim = await claimed(b, thread_id)
    # The holder looks after the rest, and the worker that has the signal keeps it.
    assert not await again.ack()
    await b.ack(claim)
    assert await again.ack() or lost
    late = await _signal(a, thread_id, 0.3)
    assert late is None or (lost and await late.ack())
    assert _none_resignalled(stores)


@_check()
async def two_that_become_due_in_one_slot_are_both_signalled(stores: Stores) -> None:
    a, b = stores[:2]
    for hand_back in (False, True):
        thread_id, t = fresh(), int(a.backend.now_ms())
        done: list[bytes] = []
        late, early = t + 1500, t + 500
        if hand_back:
            for payload in (b"late", b"early"):
                await a.enqueue(thread_id, payload, now_ms=t)
            first, second = await claimed(a, thread_id, now_ms=t), None
            await a.nack(first, retry_at_ms=late, now_ms=t)
            second = await claimed(a, thread_id, now_ms=t)
            await a.nack(second, retry_at_ms=early, now_ms=t)
        else:
            await a.enqueue(thread_id, b"late", available_at_ms=late, now_ms=t)
            await a.enqueue(thread_id, b"early", available_at_ms=early, now_ms=t)

        async def handle(d: Dispatch, thread_id: str = thread_id, done: list[bytes] = done) -> None:
            if d.thread_id == thread_id:
                done.append(d.payload)

        async def both(done: list[bytes] = done) -> bool:
            return sorted(done) == [b"early", b"late"]

        async with Worker(b, "w", handle):
            await _until(both, stores)
    assert _none_resignalled(stores)


@_check()
async def acks_of_signals_and_delayed_enqueues_at_once_leave_none_unsignalled(stores: Stores) -> None:
    a, b = stores[:2]
    t = int(a.backend.now_ms())
    threads = [fresh() for _ in range(40)]
    for thread_id in threads:
        await a.enqueue(thread_id, now_ms=t)
    signals = []
    while len(signals) < len(threads):
        signals += [s for s in await b.pull_signals(timeout_s=5) if s.thread_id in threads]
    for thread_id in threads:
        await a.ack(await claimed(a, thread_id))
    due = t + 40_000
    await asyncio.gather(
        *(call for s in signals for call in (a.enqueue(s.thread_id, available_at_ms=due, now_ms=t), s.ack()))
    )
    # Two minutes later, whatever the acks left behind has expired.
    waiting = set(threads)
    clocks = [(store, store.backend.now_ms) for store in stores]
    try:
        for store, real in clocks:
            store.backend.now_ms = lambda real=real: real() + 120_000  # type: ignore[method-assign,misc]

        async def all_signalled() -> bool:
            waiting.difference_update(s.thread_id for s in await b.pull_signals(timeout_s=0.1))
            return not waiting

        await _until(all_signalled, stores)
    finally:
        for store, real in clocks:
            store.backend.now_ms = real  # type: ignore[method-assign]


@_check()
async def a_wall_clock_that_steps_moves_no_lease_and_no_delay(stores: Stores) -> None:
    a, b = stores[:2]
    thread_id, real = fresh(), time.time
    try:
        for step_s in (7200, -7200):
            time.time = lambda step_s=step_s: real() + step_s  # type: ignore[misc]
            claim = await _claim_of_new(a, thread_id)
            time.time = real
            assert claim.lease_until_ms is not None
            assert abs(claim.lease_until_ms - b.backend.now_ms() - 1000 * a.config.lease_s) < 10_000
            assert not [d for d in await b.reclaim_expired() if d.thread_id == thread_id]
            await a.ack(claim)
    finally:
        time.time = real


async def _claim_of_new(store: MailboxStore, thread_id: str) -> Dispatch:
    await store.enqueue(thread_id)
    return await claimed(store, thread_id)


@_check()
async def a_worker_whose_clock_is_behind_the_sweepers_leaves_nothing(stores: Stores) -> None:
    a, b = stores[:2]
    thread_id, t, real = fresh(), int(a.backend.now_ms()), b.backend.now_ms
    done = asyncio.Event()

    async def handle(d: Dispatch) -> None:
        if d.thread_id == thread_id:
            done.set()

    async def is_done() -> bool:
        return done.is_set()

    b.backend.now_ms = lambda: real() - 700  # type: ignore[method-assign]
    try:
        async with Worker(b, "behind", handle):
            await a.enqueue(thread_id, available_at_ms=t + 300, now_ms=t)
            await _until(is_done, [a])
    finally:
        b.backend.now_ms = real  # type: ignore[method-assign]
    assert _none_resignalled(stores)


@_check()
async def a_thread_that_is_freed_between_claim_and_look_is_not_left(stores: Stores) -> None:
    a, b = stores[:2]
    thread_id, done = fresh(), asyncio.Event()
    await a.enqueue(thread_id)
    await a.enqueue(thread_id)
    claim = await claimed(a, thread_id, "a user without signals")
    real, freed = b.claim, asyncio.Event()

    async def handle(d: Dispatch) -> None:
        if d.thread_id == thread_id:
            done.set()

    async def claim_then_free(wanted: str, *args: object) -> Dispatch | None:
        got = await real(wanted, *args)  # type: ignore[arg-type]
        if wanted == thread_id and not freed.is_set():
            assert got is None
            await a.ack(claim)
            freed.set()
        return got

    b.claim = claim_then_free  # type: ignore[method-assign,assignment]
    # A claim whose answer is lost with a leader holds the thread for its lease.
    limit_s = 10 + soon_s(b) + (1.5 * b.config.lease_s if isinstance(b, Unsteady) else 0)
    try:
        async with Worker(b, "w", handle), asyncio.timeout(limit_s):
            await done.wait()
    finally:
        b.claim = real  # type: ignore[method-assign]
    assert _none_resignalled(stores)


@_check()
async def what_no_signal_tells_of_is_found_by_position(stores: Stores) -> None:
    a, b = stores[:2]
    waiting, delayed, busy = ([fresh() for _ in range(3)] for _ in range(3))
    t = int(a.backend.now_ms())
    for thread_id in (*waiting, *busy):
        await a.enqueue(thread_id)
        await _drop_signal(b, thread_id)
    for thread_id in busy:
        await claimed(a, thread_id)
    for thread_id in delayed:
        await a.enqueue(thread_id, available_at_ms=t + 3600_000, now_ms=t)
    before = _resignalled(stores)
    found: set[str] = set()

    async def all_found() -> bool:
        found.update(s.thread_id for s in await b.pull_signals(timeout_s=0.1))
        return set(waiting) <= found

    await _until(all_found, stores)
    assert not found & {*delayed, *busy}
    # When the answer to a resent signal is lost, it is not counted; see also `_none_resignalled`.
    assert isinstance(a, Unsteady) or _resignalled(stores) - before == len(waiting)


@_check()
async def people_may_wake_a_thread(stores: Stores) -> None:
    a, b = stores[:2]
    thread_id = fresh()
    await a.wake(thread_id)  # the thread does not exist yet
    await a.enqueue(thread_id)
    await _drop_signal(a, thread_id)
    assert await _signal(b, thread_id, 0.3) is None
    await b.wake(thread_id)
    signal = await _signal(a, thread_id)
    assert signal is not None
    await a.ack(await claimed(a, thread_id))
    # When the answer to the wake-up was lost, the thread may have been moved once or twice.
    assert await signal.ack() or isinstance(a, Unsteady)


@_check()
async def after_a_long_outage_all_leases_and_delays_are_found(stores: Stores) -> None:
    a, b = stores[:2]
    hours = 3 * 3600_000
    t = int(a.backend.now_ms()) - hours
    leased, delayed = [fresh() for _ in range(12)], [fresh() for _ in range(12)]
    for thread_id in leased:
        await a.enqueue(thread_id, now_ms=t)
        await claimed(a, thread_id, lease_s=1, now_ms=t)
    for thread_id in delayed:
        await a.enqueue(thread_id, available_at_ms=t + 1000, now_ms=t)
    waiting = set(delayed)

    async def all_found() -> bool:
        waiting.difference_update(s.thread_id for s in await b.pull_signals(timeout_s=0.05))
        back = [d for t in leased for d in await a.list_dispatches(t, {Status.QUEUED}) if d.attempts == 1]
        return not waiting and len(back) == len(leased)

    await _until(all_found, stores)


@_check()
async def a_busy_thread_starves_no_other(stores: Stores) -> None:
    a = stores[0]
    busy, others = fresh(), [fresh() for _ in range(5)]
    done: set[str] = set()
    runs = 0

    async def handle(d: Dispatch) -> None:
        nonlocal runs
        done.add(d.thread_id)
        if d.thread_id == busy:
            runs += 1
            await a.enqueue(busy)

    async def all_done() -> bool:
        return set(others) <= done

    worker = Worker(a, "w", handle)
    worker._room = asyncio.Semaphore(1)
    worker._config = type(a.config)(max_concurrent_handlers=1, signal_fetch_expires_s=0.1)
    async with worker:
        for thread_id in (busy, *others):
            await a.enqueue(thread_id)
        await _until(all_done, stores)
        before = runs

        async def goes_on() -> bool:
            return runs > before

        await _until(goes_on, stores)
    assert _none_resignalled(stores)


@_check()
async def an_interrupted_worker_stops_within_a_second(stores: Stores) -> None:
    a, b = stores[:2]
    for stop in ("interrupt", "supersede_claimed"):
        thread_id, begun, ended = fresh(), asyncio.Event(), asyncio.Event()

        async def handle(
            d: Dispatch, thread_id: str = thread_id, begun: asyncio.Event = begun, ended: asyncio.Event = ended
        ) -> None:
            if d.thread_id == thread_id:
                begun.set()
                try:
                    await asyncio.sleep(60)
                finally:
                    ended.set()

        async with Worker(a, "w", handle), asyncio.timeout(15 + soon_s(a)):
            await b.enqueue(thread_id)
            await begun.wait()
            await getattr(b, stop)(thread_id)
            began = time.monotonic()
            await ended.wait()
            # The limit is half a second and a read, with room for a busy machine, and far below a third of the lease.
            assert time.monotonic() - began < soon_s(a)


@_check()
async def an_enqueue_without_an_answer_is_known_when_its_dispatch_was_handed_back(stores: Stores) -> None:
    a, b = stores[:2]
    backend: Any = a.backend
    add = backend.add
    for own_id, ahead_ms in (("own", 0), ("own", 100), (None, 100)):
        thread_id, t = fresh(), int(a.backend.now_ms())

        async def lost(*args: Any, thread_id: str = thread_id, t: int = t, **options: Any) -> None:
            backend.add = add
            await add(*args, **options)
            for _ in range(2):
                claim = await claimed(b, thread_id, now_ms=t)
                await b._as_holder(claim, t, decisions.release)  # as for a cancelled caller
            raise AppendUnknown("lost on its way back")

        backend.add = lost
        try:
            put = await a.enqueue(thread_id, b"x", dispatch_id=own_id, now_ms=t + ahead_ms)
        finally:
            backend.add = add
        assert await a.list_dispatches(thread_id) == [put]
        if own_id is not None:
            with raises(AlreadyExists):
                await a.enqueue(thread_id, b"x", dispatch_id=own_id)


@_check()
async def a_claim_without_an_answer_is_known_behind_an_interrupt(stores: Stores) -> None:
    a, b = stores[:2]
    backend: Any = a.backend
    real = backend.write, backend.claim_first
    claims: list[Callable[[str], Awaitable[Dispatch | None]]] = [
        lambda thread_id: a.claim(thread_id, "w", lease_s=3600),
        lambda thread_id: a.claim_dispatch(thread_id, "own", "w", lease_s=3600),
    ]
    for claim in claims:
        thread_id = fresh()
        await a.enqueue(thread_id, dispatch_id="own")

        async def lost(writing: Awaitable[object], thread_id: str = thread_id) -> None:
            if await writing is not None:
                backend.write, backend.claim_first = real
                await b.interrupt(thread_id)
                raise AppendUnknown("lost on its way back")

        backend.write, backend.claim_first = (lambda *args, call=call: lost(call(*args)) for call in real)
        try:
            got = await claim(thread_id)
        finally:
            backend.write, backend.claim_first = real
        assert got is not None
        with raises(ClaimInterrupted):
            await a.extend_lease(got)
        assert (await a.ack(got)).status is Status.ACKED


@_check()
async def a_cancelled_claim_burns_no_attempt(stores: Stores) -> None:
    a = stores[0]
    threads = [fresh() for _ in range(20)]
    for thread_id in threads:
        await a.enqueue(thread_id, max_attempts=1)

    async def cancelled(n: int, thread_id: str) -> None:
        task = asyncio.create_task(a.claim(thread_id, "w"))
        for _ in range(1 + n % 3):  # cancelled again while the claim is handed back
            for _ in range(n):  # cancelled at a different moment each time
                await asyncio.sleep(0)
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if not task.cancelled():
            claim = task.result()
            assert claim is not None
            await a.ack(claim)

    for n, thread_id in enumerate(threads):
        await cancelled(n, thread_id)
    for thread_id in threads:
        async with asyncio.timeout(10 + soon_s(a)):  # less than the lease
            while await a.list_dispatches(thread_id, {Status.CLAIMED}):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        (d,) = await a.list_dispatches(thread_id)
        assert d.attempts == 0
        assert d.status in (Status.QUEUED, Status.ACKED)
        if d.status is Status.QUEUED:
            claim = await claimed(a, thread_id)
            await a.ack(claim)
            with raises(StaleClaim):
                await a.nack(claim)
