"""Checks of the arguments that a `MailboxStore` refuses before it asks a server."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any

from msgspec.structs import replace

from bufstore.errors import InvalidId, InvalidQuery, InvalidRecord
from bufstore.mailbox.model import Status
from bufstore.testing.basics import Check, fresh, raises, registrar
from conformance.mailbox_queue import Stores, claimed

CHECKS: list[Check] = []
_check = registrar(CHECKS)


@_check()
async def what_cannot_be_stored_is_refused(stores: Stores) -> None:
    store, thread_id = stores[0], fresh()
    for wrong in ("", "a\0b", "\ud800", 7, "x" * 1025):
        with raises(InvalidId):
            await store.enqueue(wrong)  # type: ignore[arg-type]
        with raises(InvalidId):
            await store.enqueue(thread_id, dispatch_id=wrong)  # type: ignore[arg-type]
        with raises(InvalidId):
            await store.claim(thread_id, wrong)  # type: ignore[arg-type]
    for options in (
        {"priority": 256},
        {"priority": -1},
        {"priority": True},
        {"max_attempts": 0},
        {"available_at_ms": -1},
        {"available_at_ms": 1.5},
        {"payload": "text"},
        {"payload": b"x" * (1 << 20)},
        {"maybe_delivered": 1},
        {"maybe_delivered": None},
    ):
        with raises(InvalidRecord):
            await store.enqueue(thread_id, **options)
    with raises(InvalidQuery):
        await store.list_dispatches(thread_id, limit=-1)
    assert await store.list_dispatches(thread_id) == []


@_check()
async def a_wrong_value_in_a_step_is_refused_and_leaves_the_claim_as_it_is(stores: Stores) -> None:
    """Regression: falsy values of a wrong type were stored, and then no dispatch of the thread could be read."""
    a, b = stores[:2]
    thread_id = fresh()
    await a.enqueue(thread_id)
    claim = await claimed(a, thread_id)
    loose: Any = a
    steps: list[Callable[[Any], Awaitable[object]]] = [
        lambda wrong: loose.nack(claim, error=wrong),
        lambda wrong: loose.dead_letter(claim, error=wrong),
        lambda wrong: loose.record_result(claim, wrong),
        lambda wrong: loose.record_result(claim, "done", termination=wrong),
        lambda wrong: loose.record_result(claim, "done", error=wrong),
    ]
    wrong: Any
    for step in steps:
        for wrong in ([], {}, 0, False, b"", ValueError("none")):
            with raises(InvalidRecord):
                await step(wrong)
    for wrong in ("", 0, [], {}, False, bytearray(), b"x" * (1 << 20)):
        with raises(InvalidRecord):
            await loose.record_result(claim, "done", result=wrong)
    for wrong in ("a\0b", "\ud800", "", 7):
        for of in (replace(claim, thread_id=wrong), replace(claim, dispatch_id=wrong)):
            for step in (loose.ack, loose.nack, loose.dead_letter, loose.extend_lease):
                with raises(InvalidId):
                    await step(of)
    with raises(InvalidRecord):
        await loose.ack(None)
    recorded = await b.record_result(claim, "", termination="", result=b"", error="a\0b")
    assert (recorded.run_status, recorded.termination, recorded.result, recorded.run_error) == ("", "", b"", "a?b")
    assert await a.list_dispatches(thread_id) == [recorded]
    assert (await a.ack(claim)).status is Status.ACKED


@_check()
async def what_could_not_be_enqueued_is_not_delivered_live_either(stores: Stores) -> None:
    """Regression: a wrong option was noticed only when nobody listened."""
    store, thread_id, got = stores[0], fresh(), list[bytes]()

    async def handler(payload: bytes) -> None:
        got.append(payload)

    loose: Any = store
    stop = await store.listen_live(thread_id, handler)
    for options in ({"priority": 999}, {"max_attempts": 0}, {"available_at_ms": -1}, {"now_ms": -1}):
        with raises(InvalidRecord):
            await loose.deliver(thread_id, b"x", **options)
    for options in ({"run_id": ""}, {"dedupe_key": "a\0b"}, {"dispatch_id": 7}):
        with raises(InvalidId):
            await loose.deliver(thread_id, b"x", **options)
    for deliver in (loose.deliver, loose.deliver_live):
        with raises(InvalidRecord):
            await deliver(thread_id, "text")
    with raises(TypeError):
        await loose.deliver(thread_id, b"x", prioritty=1)
    await stop()
    assert got == []
    assert await store.list_dispatches(thread_id) == []


@_check()
async def a_number_that_makes_no_sense_is_refused_on_every_store(stores: Stores) -> None:
    """Regression: some stores accepted such numbers, and others failed with an error of their driver."""
    loose: Any = stores[0]
    thread_id = fresh()
    calls: list[Callable[[Any], Awaitable[object]]] = [
        lambda wrong: loose.list_dispatches(thread_id, limit=wrong),
        lambda wrong: loose.list_dispatches(thread_id, offset=wrong),
        lambda wrong: loose.list_finished(limit=wrong),
        lambda wrong: loose.queued_thread_ids(limit=wrong),
        lambda wrong: loose.reclaim_expired(limit=wrong),
        lambda wrong: loose.purge_finished(1, limit=wrong),
        lambda wrong: loose.pull_signals(wrong, 0.1),
    ]
    for call in calls:
        for limit in (-1, 2**70, 1.5, "3"):
            with raises(InvalidQuery):
                await call(limit)
    await loose.enqueue(thread_id)
    for lease_s in (-5, 0, math.nan, math.inf, 1e306, "5"):
        with raises(InvalidRecord):
            await loose.claim(thread_id, "w", lease_s=lease_s)
    queued = await loose.list_dispatches(thread_id, (status for status in [Status.QUEUED]))
    assert len(queued) == 1, "statuses are looked at once"
