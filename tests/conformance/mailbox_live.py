"""Checks of a `MailboxStore` with live deliveries."""

from __future__ import annotations

import asyncio

from bufstore.mailbox.ports import Live
from bufstore.mailbox.store import MailboxStore
from bufstore.testing.basics import Check, fresh, registrar
from conformance.mailbox_queue import Stores
from helpers import eventually

CHECKS: list[Check] = []
_check = registrar(CHECKS)


async def _told(store: MailboxStore, thread_id: str, payload: bytes) -> Live:
    """Deliver to a listener that is there. The nodes of a cluster tell each other of it a moment after it came."""

    async def delivered() -> Live | None:
        outcome = await store.deliver_live(thread_id, payload)
        return outcome if outcome is not Live.NO_SUBSCRIBER else None

    found: Live = await eventually(delivered, 10)
    return found


@_check()
async def a_live_delivery_is_answered_before_its_handler_runs(stores: Stores) -> None:
    """Otherwise a sender would wait as long as the handler takes, and would enqueue a message that is in work."""
    a, b = stores[:2]
    thread_id, got, answered = fresh(), list[bytes](), asyncio.Event()

    async def handle(payload: bytes) -> None:
        await answered.wait()
        got.append(payload)

    stop = await b.listen_live(thread_id, handle)
    async with asyncio.timeout(20):
        assert await _told(a, thread_id, b"x") is Live.DELIVERED
    assert got == []
    answered.set()

    async def arrived() -> bool:
        return got == [b"x"]

    await eventually(arrived, 60)
    await stop()


@_check()
async def what_a_listener_has_not_got_when_it_stops_was_not_delivered(stores: Stores) -> None:
    """Otherwise `deliver` would not enqueue the message, and nobody would get it."""
    a, b = stores[:2]
    thread_id, got, go_on = fresh(), list[bytes](), asyncio.Event()

    async def handle(payload: bytes) -> None:
        got.append(payload)
        await go_on.wait()

    stop = await b.listen_live(thread_id, handle)
    assert await _told(a, thread_id, b"first") is Live.DELIVERED
    assert await a.deliver_live(thread_id, b"late", timeout_s=0.1) is Live.UNKNOWN
    left = [a.deliver_live(thread_id, b"left", timeout_s=1) for _ in range(3)]
    *told, _ = await asyncio.gather(*left, stop())
    assert Live.DELIVERED not in told
    go_on.set()
    assert await a.deliver_live(thread_id, b"nobody") is Live.NO_SUBSCRIBER
    assert got == [b"first"]


@_check()
async def a_live_handler_that_fails_gets_the_next_delivery(stores: Stores) -> None:
    a, b = stores[:2]
    thread_id, got = fresh(), []

    async def handle(payload: bytes) -> None:
        got.append(payload)
        raise ValueError("a handler that fails") if len(got) % 2 else asyncio.CancelledError

    stop = await b.listen_live(thread_id, handle)
    for n in range(4):
        assert await _told(a, thread_id, b"%d" % n) is Live.DELIVERED

    async def arrived() -> bool:
        return len(got) == 4

    await eventually(arrived, 60)
    await stop()


@_check()
async def a_live_delivery_reaches_who_listens(stores: Stores) -> None:
    a, b = stores[:2]
    thread_id, got = fresh("Ünïcode .*> "), []
    everything = [b"", b"x", b"\0\xff" * 1000]

    async def handle(payload: bytes) -> None:
        got.append(payload)

    assert await a.deliver_live(thread_id, b"nobody") is Live.NO_SUBSCRIBER
    stop = await b.listen_live(thread_id, handle)
    for payload in everything:
        assert await _told(a, thread_id, payload) is Live.DELIVERED
    assert await a.deliver_live(fresh(), b"another thread") is Live.NO_SUBSCRIBER

    async def arrived() -> bool:
        return got == everything

    await eventually(arrived, 60)
    await stop()
    await stop()
    assert await a.deliver_live(thread_id, b"nobody") is Live.NO_SUBSCRIBER
    assert got == everything
    assert await a.list_dispatches(thread_id) == []


@_check()
async def a_live_delivery_reaches_all_who_listen(stores: Stores) -> None:
    a, b = stores[:2]
    thread_id, got = fresh(), []

    async def handle(payload: bytes) -> None:
        got.append(payload)

    stops = [await store.listen_live(thread_id, handle) for store in (a, b, b)]
    assert await _told(a, thread_id, b"x") is Live.DELIVERED

    async def arrived() -> bool:
        return got == [b"x"] * 3

    await eventually(arrived, 60)
    for stop in stops:
        await stop()


@_check()
async def a_live_handler_that_fails_is_its_own_trouble(stores: Stores) -> None:
    """The sender is still told that the message arrived, and later messages arrive, too."""
    a, b = stores[:2]
    thread_id, got = fresh(), []

    async def handle(payload: bytes) -> None:
        got.append(payload)
        raise ZeroDivisionError

    stop = await b.listen_live(thread_id, handle)
    for payload in (b"1", b"2"):
        assert await _told(a, thread_id, payload) is Live.DELIVERED

    async def arrived() -> bool:
        return got == [b"1", b"2"]

    await eventually(arrived, 60)
    await stop()
