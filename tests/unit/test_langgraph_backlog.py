"""Writes that wait for the log are limited in size; further writes wait in order, for a bounded time."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bufstore import Closed, LogUnavailable
from bufstore.langgraph.backlog import Backlog

_MAX = 20_000


async def _settle() -> None:
    """Let the loop run until nothing moves any more: some turns for each of many tasks that go on in a row."""
    for _ in range(300):
        await asyncio.sleep(0)


class _Writes:
    """Writes that end when they are told to."""

    def __init__(self, backlog: Backlog) -> None:
        self.backlog = backlog
        self.entered: list[int] = []
        self.ends: dict[int, asyncio.Event] = {}
        self.tasks: dict[int, asyncio.Task[None]] = {}

    def begin(self, number: int, size: int) -> None:
        self.ends[number] = asyncio.Event()
        self.tasks[number] = asyncio.create_task(self._write(number, size))

    async def _write(self, number: int, size: int) -> None:
        if self.backlog.full:
            await self.backlog.room()
        if size < 0:
            return  # it cannot be serialized
        cost = self.backlog.enter(size)
        self.entered.append(number)
        try:
            await self.ends[number].wait()
        finally:
            self.backlog.leave(cost)


@given(st.randoms(use_true_random=False))
def test_the_backlog_is_bounded_and_nobody_waits_in_vain(chance: random.Random) -> None:
    async def live() -> None:
        writes, number = _Writes(Backlog(_MAX, 60.0)), 0
        backlog = writes.backlog
        for _ in range(chance.randint(1, 30)):
            open_ = [n for n, task in writes.tasks.items() if not task.done()]
            what = chance.random()
            if what < 0.6 or not open_:
                for _ in range(chance.randint(1, 4)):
                    number += 1
                    writes.begin(number, chance.choice((-1, 0, 100, 5000, 9000)))
            elif what < 0.9:
                writes.ends[chance.choice(open_)].set()
            else:
                writes.tasks[chance.choice(open_)].cancel()
            if chance.random() < 0.7:
                await _settle()
                waiting = [n for n, t in writes.tasks.items() if not t.done() and n not in writes.entered]
                assert not waiting or backlog.bytes >= _MAX, "somebody waits though there is room"
            assert backlog.bytes < _MAX + 9000 + 4096
        assert writes.entered == sorted(writes.entered)
        for end in writes.ends.values():
            end.set()
        async with asyncio.timeout(10):
            ended = await asyncio.gather(*writes.tasks.values(), return_exceptions=True)
        for outcome in ended:
            assert outcome is None or isinstance(outcome, asyncio.CancelledError)
        assert backlog.bytes == 0
        assert not backlog.full

    asyncio.run(live())


async def test_who_finds_no_room_in_time_is_told_that_nothing_was_stored() -> None:
    backlog = Backlog(1, 0.01)
    cost = backlog.enter(100)
    for _ in range(2):
        with pytest.raises(LogUnavailable, match="this write was not stored"):
            await backlog.room()
    backlog.leave(cost)
    assert not backlog.full
    await backlog.room()


async def test_closing_ends_the_wait() -> None:
    backlog = Backlog(1, 60.0)
    backlog.enter(100)
    waiting = asyncio.create_task(backlog.room())
    await _settle()
    backlog.close()
    with pytest.raises(Closed):
        await waiting
    with pytest.raises(Closed):
        await backlog.room()
