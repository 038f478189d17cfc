"""Checks of how a `MailboxStore` lists, counts and purges."""

from __future__ import annotations

from bufstore.mailbox.model import Status
from bufstore.testing.basics import Check, fresh, registrar
from conformance.mailbox_queue import Stores, claimed, ids, now
from helpers import eventually

CHECKS: list[Check] = []
_check = registrar(CHECKS)


@_check()
async def what_is_finished_is_listed_and_purged(stores: Stores) -> None:
    a, b = stores[:2]
    thread_id, t = fresh(), now()
    while await b.purge_finished(t):  # purges go by the order of the ends, whatever their times say
        pass
    old = await a.enqueue(thread_id, dedupe_key="key", now_ms=t - 9000)
    await a.ack(await claimed(a, thread_id, now_ms=t - 9000), now_ms=t - 9000)
    young = await a.enqueue(thread_id, now_ms=t)
    await a.ack(await claimed(a, thread_id, now_ms=t), now_ms=t)
    queued = await a.enqueue(thread_id, now_ms=t - 9000)
    mine = [d for d in await b.list_finished(limit=10_000) if d.thread_id == thread_id]
    assert ids(mine) == ids([old, young])
    assert len(await b.list_finished(limit=1)) == 1

    async def purged() -> bool:
        # A lagging copy may for a moment show neither that a dispatch has ended nor that it was purged.
        await b.purge_finished(t - 8000)
        return ids(await a.list_dispatches(thread_id, {Status.ACKED})) == [young.dispatch_id]

    await eventually(purged, 60)
    assert await a.load_dispatch(thread_id, old.dispatch_id) is None
    assert (await claimed(b, thread_id)).dispatch_id == queued.dispatch_id


@_check()
async def they_are_listed_and_counted(stores: Stores) -> None:
    a, b = stores[:2]
    thread_id, t = fresh(), now()
    for n in range(7):
        await a.enqueue(thread_id, priority=n % 2, now_ms=t)
    order = await a.list_dispatches(thread_id)
    await a.ack(await claimed(a, thread_id))
    await a.cancel(thread_id, order[5].dispatch_id)
    await claimed(a, thread_id)
    listed = await b.list_dispatches(thread_id)
    assert ids(listed) == ids(order)
    assert ids(await b.list_dispatches(thread_id, limit=3, offset=2)) == ids(order[2:5])
    queued = await b.list_dispatches(thread_id, {Status.QUEUED}, limit=2)
    assert ids(queued) == ids([order[2], order[3]])
    counts = await b.count_by_status(thread_id)
    assert counts == dict.fromkeys(Status, 0) | {
        Status.ACKED: 1,
        Status.CANCELLED: 1,
        Status.CLAIMED: 1,
        Status.QUEUED: 4,
    }
    total = await a.count_by_status()
    assert all(total[status] >= n for status, n in counts.items())


@_check()
async def threads_with_queued_dispatches_are_found(stores: Stores) -> None:
    a, b = stores[:2]
    ready, delayed, busy, empty = (fresh() for _ in range(4))
    t = now()
    await a.enqueue(ready)
    await a.enqueue(delayed, available_at_ms=t + 60_000)
    await a.enqueue(busy)
    await claimed(a, busy)
    await a.enqueue(empty)
    await a.interrupt(empty)
    found = await b.queued_thread_ids(limit=100_000)
    assert found == sorted(found)
    assert {ready, delayed} <= set(found)
    assert not {busy, empty} & set(found)
    assert len(await b.queued_thread_ids(limit=1)) == 1
