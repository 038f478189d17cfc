"""The store counts as down only if it did not answer, not if this process was too busy to read the answer."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from bufstore.buffer.read.store_watch import StoreWatch

_PATIENCE_S = 0.01


class _Answering:
    """A store that answers at once, which takes some turns of the loop to arrive."""

    async def state(self, thread_id: str) -> Any:
        await asyncio.Event().wait()

    async def answers(self) -> None:
        for _ in range(6):
            await asyncio.sleep(0)


async def _busy() -> None:
    """Keep the loop busy: each of its turns takes longer than the store may take to answer."""
    while True:
        time.sleep(2 * _PATIENCE_S)  # noqa: ASYNC251
        await asyncio.sleep(0)


async def test_a_busy_loop_is_no_outage_of_the_store() -> None:
    watch = StoreWatch[Any](_Answering(), 2 * _PATIENCE_S)
    busy = asyncio.ensure_future(_busy())
    asked = watch.ask("t")
    deadline = asyncio.get_running_loop().time() + 20 * _PATIENCE_S
    try:
        assert await watch.stored(asked, deadline) is None
        assert watch.down is None
    finally:
        busy.cancel()
        watch.let_go(asked)
        await watch.aclose()
