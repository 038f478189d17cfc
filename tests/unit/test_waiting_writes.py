"""What a write costs while it waits for the log: many wait at a time, and Python's collector looks at each of them."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable

from bufstore import BufferedThreadStore, MemoryThreadStore
from bufstore.langgraph import AsyncBufferedSaver, MemoryCheckpointStore
from bufstore.memory import MemoryNats
from helpers import run_of
from langgraph_savers import META, checkpoint, config

_CALLS = 200


async def _looked_at(call: Callable[[str], Awaitable[object]]) -> float:
    """Return how many objects the collector has to look at for each of many calls that wait for the log.

    These include what the caller itself brings: a task, and the objects that it passes.
    """
    threads = [f"thread-{number}" for number in range(_CALLS)]
    await asyncio.gather(*map(call, threads))  # each thread is looked up before its first write
    gc.collect()
    gc.disable()
    try:
        before = len(gc.get_objects())
        calls = [asyncio.ensure_future(call(thread)) for thread in threads]
        await asyncio.sleep(0)
        waiting = len(gc.get_objects()) - before
        assert not any(done.done() for done in calls)
        await asyncio.gather(*calls)
    finally:
        gc.enable()
    return waiting / _CALLS


async def test_an_append_that_waits_is_few_objects_for_the_collector() -> None:
    async with await BufferedThreadStore.open(MemoryThreadStore(), nats=MemoryNats()) as store:

        async def append(thread_id: str) -> None:
            await store.checkpoint_append(thread_id, [1], run_of(thread_id))

        assert await _looked_at(append) < 22


async def test_a_checkpoint_of_langgraph_that_waits_is_few_objects_for_the_collector() -> None:
    saver = await AsyncBufferedSaver.open(MemoryCheckpointStore(), nats=MemoryNats())
    try:

        async def put(thread_id: str) -> None:
            versions = {"text": saver.get_next_version(None, None)}
            await saver.aput(config(thread_id), checkpoint(versions, {"text": "value"}), META, versions)

        assert await _looked_at(put) < 24
    finally:
        await saver.aclose()
