"""Stores do not keep their callers' context variables (a request, a span) alive."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from functools import partial

import pytest

from bufstore.notify import NatsNotifier, Notifier, PostgresNotifier, Unlisten
from conftest import Deployment
from helpers import eventually, fresh, run_of, said


class Request:
    """An object that a framework keeps in a context variable."""


_REQUEST: ContextVar[Request | None] = ContextVar("request", default=None)


async def _as_request(work: Callable[[], Awaitable[object]]) -> weakref.ref[Request]:
    async def serve() -> weakref.ref[Request]:
        request = Request()
        _REQUEST.set(request)
        await work()
        return weakref.ref(request)

    return await asyncio.create_task(serve())


async def _let_go(request: weakref.ref[Request]) -> None:
    async def gone() -> bool:
        gc.collect()
        return request() is None

    await eventually(gone, 60)


@pytest.mark.long  # as long as their timers
async def test_the_first_calls_of_stores_that_share_threads_are_let_go(deployment: Deployment) -> None:
    # asyncio keeps cancelled timers, and the context they were set in, until they are due.
    soon = {"append_timeout_s": 4.0, "read_timeout_s": 4.0}
    async with deployment.store(**soon) as one, deployment.store(**soon) as other:
        thread_id = fresh()
        requests = []
        for n, store in enumerate([one, other] * 3):
            messages = [said(i) for i in range(n + 1)]
            requests.append(await _as_request(partial(store.checkpoint, thread_id, messages, run_of(thread_id))))
            requests.append(await _as_request(partial(store.load_checkpoint, thread_id)))
        for request in requests:
            await _let_go(request)


async def test_who_listened_first_is_let_go_when_it_listens_no_more(deployment: Deployment) -> None:
    servers = deployment.servers
    async with (
        await NatsNotifier.open(servers.nats.url, prefix=deployment.name, timeout_s=10) as on_nats,
        await PostgresNotifier.open(servers.postgres.dsn, prefix=deployment.name, timeout_s=10) as on_postgres,
    ):
        notifier: Notifier
        for notifier in (on_nats, on_postgres):
            listening: list[Unlisten] = []

            async def first(n: Notifier = notifier, listening: list[Unlisten] = listening) -> None:
                listening.append(await n.listen_completed("first", print))

            request = await _as_request(first)
            await notifier.listen_completed("second", print)  # this listener keeps the shared subscription open
            await listening.pop()()
            await _let_go(request)
