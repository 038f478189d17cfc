"""What import and demo share: conversations, latencies, and many threads at a time in bounded memory."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from typing import Any

import pytest

from bufstore.cli.conversations.concurrency import MemoryBudget, each, read_ahead
from bufstore.cli.conversations.latencies import Latencies
from command_line import generate


def test_generated_conversations_are_the_same_for_the_same_seed() -> None:
    threads = list(generate(1, 50))
    assert threads == list(generate(1, 50))
    assert threads != list(generate(2, 50))
    assert len({t for t, _ in threads}) == 50
    assert len({m["id"] for _, messages in threads for m in messages}) == sum(len(m) for _, m in threads)
    for _, messages in threads:
        assert [m["role"] for m in messages[:3]] == ["system", "user", "assistant"]
        calls = [c for m in messages for c in m.get("tool_calls", ())]
        answers = [(m["tool_call_id"], m["name"]) for m in messages if m["role"] == "tool"]
        assert answers == [(c["id"], c["function"]["name"]) for c in calls] != []
        assert all(json.loads(c["function"]["arguments"]) for c in calls)


def test_percentiles_are_right_to_a_percent() -> None:
    latencies = Latencies()
    assert latencies.percentile_ms(50) == 0
    for ms in range(1, 1001):
        latencies.add(ms / 1000)
    assert latencies.percentile_ms(50) == pytest.approx(500, rel=0.01)
    assert latencies.percentile_ms(99) == pytest.approx(990, rel=0.01)
    assert latencies.percentile_ms(100) == pytest.approx(1000, rel=0.01)


async def test_a_memory_budget_bounds_number_and_bytes() -> None:
    budget, inside = MemoryBudget(things=4, bytes_=50), []

    async def take(size: int) -> None:
        await budget.take(size)
        inside.append(size)

    async def after(*takes_or_gives: Any) -> list[int]:
        await asyncio.gather(*takes_or_gives)
        for _ in range(10):  # let those that can take do so
            await asyncio.sleep(0)
        return inside

    waiting = [asyncio.create_task(take(size)) for size in (20, 20, 20, 1, 1, 1, 200)]
    assert await after() == [20, 20, 1, 1]
    assert await after(budget.give_back(1)) == [20, 20, 1, 1, 1]
    assert await after(budget.give_back(20)) == [20, 20, 1, 1, 1, 20]
    assert await after(*(budget.give_back(size) for size in (20, 20, 1, 1))) == [20, 20, 1, 1, 1, 20, 200]
    await asyncio.gather(*waiting)


@pytest.mark.long
async def test_reading_ahead_gives_everything_in_order_in_batches() -> None:
    budget, read = MemoryBudget(things=10, bytes_=50), []
    async for batch in read_ahead(range(100), budget, lambda size: size, most=4):
        assert 1 <= len(batch) <= 4
        for size in batch:
            await budget.give_back(size)
        read += batch
    assert read == list(range(100))


async def test_an_error_of_the_reading_thread_arrives_after_what_was_read() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise OSError("broken")

    batches = []
    with pytest.raises(OSError, match="broken"):
        async for batch in read_ahead(items(), MemoryBudget(10, 10), lambda _: 1, most=4):
            batches += batch
    assert batches == [1]


def test_the_reading_thread_leaves_nothing_unawaited_when_the_loop_has_ended() -> None:
    """Ctrl-C ended the loop, and Python then warned of a coroutine that was made for it."""
    go_on = threading.Event()

    def items() -> Iterator[int]:
        yield 1
        go_on.wait(10)
        yield 2

    async def first() -> Sequence[int]:
        async with aclosing(read_ahead(items(), MemoryBudget(10, 10), lambda _: 1, most=4)) as batches:
            async for batch in batches:
                return batch
        return []

    assert asyncio.run(first()) == [1]
    go_on.set()
    for thread in threading.enumerate():
        if thread.name == "bufstore-read-ahead":
            thread.join(10)
    gc.collect()


async def test_an_item_that_cannot_be_measured_ends_the_reading() -> None:
    def size(_: int) -> int:
        raise ValueError("no size")

    with pytest.raises(ValueError, match="no size"):
        async for _ in read_ahead(range(3), MemoryBudget(10, 10), size, most=4):
            pass


async def test_each_works_on_so_many_at_once_and_stops_at_an_error() -> None:
    running = most = 0

    async def numbers() -> AsyncIterator[int]:
        for n in range(20):
            yield n

    async def work(n: int) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        if n == 12:
            raise ValueError("twelve")

    with pytest.raises(ExceptionGroup) as caught:
        await each(numbers(), work, at_once=3)
    assert [str(e) for e in caught.value.exceptions] == ["twelve"]
    assert most == 3
