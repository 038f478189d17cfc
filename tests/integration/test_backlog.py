"""A process takes over a large backlog of entries."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bufstore.nats.session import NatsSession
from helpers import eventually, fresh, run_of

#: More bytes than a server queues for one connection (``max_pending``, 64 MiB).
_ENTRIES, _BYTES = 1000, 100_000


@pytest.mark.long  # 100 MB
async def test_a_large_backlog_costs_nobody_the_connection(deploy: Any) -> None:
    deployment = deploy(max_bytes=256 << 20)
    threads = [fresh() for _ in range(50)]
    async with deployment.store(flusher=False) as writer:

        async def write(thread_id: str) -> None:
            for n in range(_ENTRIES // len(threads)):
                await writer.checkpoint_append(thread_id, [f"{n} ".ljust(_BYTES, "x")], run_of(thread_id))

        await asyncio.gather(*map(write, threads))
    async with deployment.store() as store:
        session: NatsSession = store.buffer.session

        async def flushed() -> bool:
            return (await store.statistics()).flusher.entries >= _ENTRIES

        await eventually(flushed, 60)
        assert session.stream.connections == 1
