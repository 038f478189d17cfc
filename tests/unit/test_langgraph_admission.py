"""Runs that begin at once take turns, first come, first served, and nobody waits for a turn in vain."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.runnables import RunnableConfig

from bufstore import BufferConfig, Closed, ConfigError, ReadNotFresh, StoreUnavailable
from bufstore.buffer.lanes import lane_of
from bufstore.errors import StoreMisconfigured, ThreadQuarantined
from bufstore.langgraph import AsyncBufferedSaver, MemoryCheckpointStore
from bufstore.langgraph.admission import Admission
from bufstore.langgraph.engine import DEFAULT_LOG
from bufstore.langgraph.protocol import Part
from bufstore.memory import MemoryNats
from unit.fake_log import run

_AT_ONCE = 3


async def _settle() -> None:
    for _ in range(300):
        await asyncio.sleep(0)


class _Reads:
    """Reads that end when they are told to."""

    def __init__(self) -> None:
        self.admission = Admission(_AT_ONCE, lambda error: isinstance(error, (ReadNotFresh, StoreUnavailable)))
        self.inside: list[int] = []
        self.entered: list[int] = []
        self.ends: dict[int, asyncio.Future[None]] = {}
        self.tasks: dict[int, asyncio.Task[None]] = {}

    def begin(self, number: int) -> None:
        self.ends[number] = asyncio.get_running_loop().create_future()
        self.tasks[number] = asyncio.create_task(self._read(number))

    async def _read(self, number: int) -> None:
        async with self.admission:
            self.entered.append(number)
            self.inside.append(number)
            try:
                await self.ends[number]
            finally:
                self.inside.remove(number)

    async def end_all(self) -> None:
        await _settle()
        while self.inside:
            for number in self.inside:
                if not self.ends[number].done():
                    self.ends[number].set_result(None)
            await _settle()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)


@given(st.randoms(use_true_random=False))
def test_reads_are_bounded_and_nobody_waits_in_vain(chance: random.Random) -> None:
    async def live() -> None:
        reads, cancelled = _Reads(), set[int]()
        for step in range(chance.randint(1, 40)):
            what = chance.random()
            if what < 0.5:
                reads.begin(step)
            elif what < 0.8 and reads.inside:
                end = reads.ends[chance.choice(reads.inside)]
                if not end.done():
                    of_one = chance.choice([None, None, ThreadQuarantined("t", 1), StoreMisconfigured("one row")])
                    end.set_exception(of_one) if of_one is not None else end.set_result(None)
            elif what < 0.95 and reads.tasks:
                number = chance.choice(list(reads.tasks))
                cancelled.add(number)
                reads.tasks[number].cancel()
            else:
                await _settle()
                live = [n for n, task in reads.tasks.items() if not task.done()]
                assert len(reads.inside) == min(_AT_ONCE, len(live)), "no place is lost, and none is there twice"
            assert len(reads.inside) <= _AT_ONCE
            for _ in range(chance.randint(0, 3)):
                await asyncio.sleep(0)
        await reads.end_all()
        assert set(reads.tasks) - set(reads.entered) <= cancelled
        for number in range(100, 100 + _AT_ONCE + 1):
            reads.begin(number)
        await _settle()
        assert len(reads.inside) == _AT_ONCE
        await reads.end_all()

    run(live())


@pytest.mark.parametrize("error", [ReadNotFresh("late"), StoreUnavailable("away")])
def test_all_go_on_once_one_finds_that_a_server_does_not_answer(error: Exception) -> None:
    async def live() -> None:
        reads = _Reads()
        for number in range(10):
            reads.begin(number)
        await _settle()
        reads.ends[1].set_exception(error)
        await _settle()
        assert reads.inside == [0, 2, 3, 4, 5, 6, 7, 8, 9]
        reads.begin(10)
        reads.ends[4].set_result(None)
        await _settle()
        assert 10 not in reads.inside, "still more than there should be"
        await reads.end_all()
        assert reads.entered[-1] == 10

    run(live())


def _at(thread_id: str) -> RunnableConfig:
    return {"configurable": {"thread_id": thread_id, "checkpoint_ns": ""}}


class _OneAtATime(MemoryCheckpointStore):
    """A store that reads one thread at a time, each in a tenth of a second."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self._free = list[str](), asyncio.Semaphore(1)

    async def latest(self, thread_id: str, ns: str, namespaces_max: int) -> Part:
        self.asked.append(thread_id)
        async with self._free:
            await asyncio.sleep(0.1)
        return await super().latest(thread_id, ns, namespaces_max)


_Main = Callable[[AsyncBufferedSaver, _OneAtATime, list[asyncio.Task[Any]]], Awaitable[None]]


def _while_they_begin(ids: Iterable[str], main: _Main, lanes: int = 1) -> None:
    """Call `main` in virtual time while runs of these threads begin at once."""

    async def live() -> None:
        store, config = _OneAtATime(), BufferConfig(log=replace(DEFAULT_LOG, lanes=lanes))
        saver = await AsyncBufferedSaver.open(store, nats=MemoryNats(), config=config)
        reads = [asyncio.create_task(saver.aget_tuple(_at(id_))) for id_ in ids]
        await _settle()
        await main(saver, store, reads)
        await asyncio.gather(*reads, return_exceptions=True)
        await saver.aclose()

    run(live())


def _ids(count: int) -> list[str]:
    return [f"t{number}" for number in range(count)]


def test_a_thousand_runs_that_begin_at_once_do_not_time_out() -> None:
    async def main(saver: AsyncBufferedSaver, store: _OneAtATime, reads: list[asyncio.Task[Any]]) -> None:
        assert await asyncio.gather(*reads) == [None] * 1000
        assert store.asked == _ids(1000), "first come, first served"

    _while_they_begin(_ids(1000), main)


def test_a_run_that_has_begun_waits_for_none_that_begins() -> None:
    async def main(saver: AsyncBufferedSaver, store: _OneAtATime, reads: list[asyncio.Task[Any]]) -> None:
        assert len(store.asked) < 100
        await saver.aget_tuple({"configurable": {"thread_id": "t0", "checkpoint_ns": "sub:1"}})
        assert "t199" not in store.asked

    _while_they_begin(_ids(200), main)


def test_who_waits_for_a_turn_learns_that_the_saver_was_closed() -> None:
    async def main(saver: AsyncBufferedSaver, store: _OneAtATime, reads: list[asyncio.Task[Any]]) -> None:
        await saver.aclose()
        async with asyncio.timeout(20):
            ended = await asyncio.gather(*reads, return_exceptions=True)
        assert isinstance(ended[-1], Closed)

    _while_they_begin(_ids(500), main)


def test_lanes_do_not_wait_for_each_other() -> None:
    log = replace(DEFAULT_LOG, lanes=2)
    slow, quick = ([id_ for id_ in _ids(400) if lane_of(id_, log) == lane] for lane in (0, 1))

    async def main(saver: AsyncBufferedSaver, store: _OneAtATime, reads: list[asyncio.Task[Any]]) -> None:
        async with asyncio.timeout(5):
            assert await saver.aget_tuple(_at(quick[0])) is None
        assert not reads[-1].done()

    _while_they_begin(slow, main, lanes=2)


def test_a_call_from_another_loop_is_refused_also_while_runs_wait_for_a_turn() -> None:
    async def main(saver: AsyncBufferedSaver, store: _OneAtATime, reads: list[asyncio.Task[Any]]) -> None:
        refused: list[BaseException] = []

        def elsewhere() -> None:
            try:
                asyncio.run(asyncio.wait_for(saver.aget_tuple(_at("t")), 5))
            except BaseException as e:
                refused.append(e)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert [type(e) for e in refused] == [ConfigError]

    _while_they_begin(_ids(200), main)
