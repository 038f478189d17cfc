"""Several processes that write at the same time, on a real server."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest

from bufstore import Run
from bufstore.nats.log import NatsLog
from bufstore.nats.session import NatsSession
from conftest import Deployment
from fault_proxy.proxy import FaultProxy
from helpers import eventually, fresh, said

_STORES = 4
_CALLERS = 4
_FIRST = 10
_EACH = 60
#: Number of writes of the distant writer.
_FAR = 8


@pytest.mark.long
async def test_writers_take_turns_and_hear_what_was_faster(deployment: Deployment, monkeypatch: Any) -> None:
    reads: list[int] = []
    part = NatsLog.part

    async def counted(log: NatsLog, subject: str, seq: int, *how: Any) -> Any:
        reads.append(seq)
        return await part(log, subject, seq, *how)

    async with AsyncExitStack() as stack:
        stores = [await stack.enter_async_context(deployment.store(flusher=False)) for _ in range(_STORES)]

        async def write(store: Any, thread_id: str, numbers: range) -> None:
            for number in numbers:
                run = Run(run_id=f"run-{thread_id}", thread_id=thread_id)
                await store.checkpoint_append(thread_id, [said(number)], run)

        callers = [(store, fresh()) for store in stores for _ in range(_CALLERS)]
        await asyncio.gather(*(write(*caller, range(_FIRST)) for caller in callers))
        assert any(map(listening, stores))
        before = [writes(store) for store in stores]
        monkeypatch.setattr(NatsLog, "part", counted)
        await asyncio.gather(*(write(*caller, range(_FIRST, _FIRST + _EACH)) for caller in callers))
        after = [writes(store) for store in stores]
        groups = sum(a.groups - b.groups for a, b in zip(after, before, strict=True))
        refusals = sum(a.refused - b.refused for a, b in zip(after, before, strict=True))
        assert groups >= _EACH
        assert refusals < groups / 2, (refusals, groups)  # without turns there are two to three refusals per group
        assert len(reads) < groups / 4, (len(reads), groups)
        for store, thread_id in callers:
            assert len(await store.load_messages(thread_id)) == _FIRST + _EACH

        # An instance that writes nothing stops listening.

        async def silent() -> bool:
            return not any(map(listening, stores))

        await eventually(silent)


@pytest.mark.long  # a property of `test_group_sequencer.py` has it without servers
async def test_a_writer_that_is_far_away_gets_its_turns(deployment: Deployment) -> None:
    server = deployment.servers.nats
    async with FaultProxy("127.0.0.1", server.port, protocol="nats") as proxy, AsyncExitStack() as stack:
        url = server.url.replace(f":{server.port}", f":{proxy.port}")
        far = await stack.enter_async_context(deployment.store(nats=url, flusher=False))
        near = [await stack.enter_async_context(deployment.store(flusher=False)) for _ in range(3)]
        proxy.to_client.delay_s = proxy.to_server.delay_s = 0.1
        done = asyncio.Event()

        async def write(store: Any) -> int:
            thread_id, count = fresh(), 0
            while not done.is_set():
                await store.checkpoint_append(thread_id, [said(count)], Run(run_id=thread_id, thread_id=thread_id))
                count += 1
            return count

        others = [asyncio.create_task(write(store)) for store in near]
        thread_id = fresh()
        for number in range(_FAR):
            await far.checkpoint_append(thread_id, [said(number)], Run(run_id=thread_id, thread_id=thread_id))
        done.set()
        counts = await asyncio.gather(*others)
        assert min(counts) > _FAR, counts
        proxy.heal()


def writes(store: Any) -> Any:
    session: NatsSession = store.buffer.session
    return session.log.writes


def listening(store: Any) -> bool:
    session: NatsSession = store.buffer.session
    client = session.connection.client()
    return any(subscription.subject.endswith("-writers") for subscription in client._subs.values())
