"""Several processes that write at the same time, on a real server."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

from bufstore import Run
from bufstore.nats.log import NatsLog
from bufstore.nats.session import NatsSession
from conftest import Deployment
from helpers import eventually, fresh, said

_STORES = 4
_CALLERS = 4
_FIRST = 10
_EACH = 60


async def test_writers_take_turns_and_hear_what_was_faster(deployment: Deployment, monkeypatch: Any) -> None:
    reads: list[int] = []
    read = NatsLog.read

    async def counted(log: NatsLog, subject: str, seq: int, timeout_s: float, limit: int = 0) -> Any:
        reads.append(seq)
        return await read(log, subject, seq, timeout_s, limit)

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
        monkeypatch.setattr(NatsLog, "read", counted)
        await asyncio.gather(*(write(*caller, range(_FIRST, _FIRST + _EACH)) for caller in callers))
        after = [writes(store) for store in stores]
        groups = sum(a.groups - b.groups for a, b in zip(after, before, strict=True))
        refusals = sum(a.refused - b.refused for a, b in zip(after, before, strict=True))
        assert groups >= _EACH
        assert refusals < groups / 2, (refusals, groups)  # without turns two to three for each group
        assert len(reads) < groups / 4, (len(reads), groups)
        for store, thread_id in callers:
            assert len(await store.load_messages(thread_id)) == _FIRST + _EACH

        # Who writes nothing does not listen any more.

        async def silent() -> bool:
            return not any(map(listening, stores))

        await eventually(silent)


def writes(store: Any) -> Any:
    session: NatsSession = store.buffer.session
    return session.log.writes


def listening(store: Any) -> bool:
    session: NatsSession = store.buffer.session
    client = session.connection.client()
    return any(subscription.subject.endswith("-writers") for subscription in client._subs.values())
