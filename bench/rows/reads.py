"""`read_clean.p50`, `read_tail.p50`, `read_first.p50`: ReadYourWrites reads of a thread of 100 messages."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

from bench.baselines.bare_read import BareRead
from bench.baselines.unbuffered import Unbuffered
from bench.contestant import summary
from bench.ours import Ours
from bench.results import Benchmark, compared
from bench.stage import Stage

_MESSAGES, _TAIL = 100, 50
_READS = 1000


class Reader(Ours):
    """Reads with one caller in the writing process."""

    async def grow(self, thread: str, messages: int) -> None:
        """Append `messages` messages."""
        for number in range(messages):
            await self.step(thread, number)

    async def timed(self, thread: str, reads: int) -> float:
        """Return the median time of `reads` reads, in ms."""
        return await _timed(lambda: self.store.load_messages(thread), reads)

    async def timed_first(self, thread: str, reads: int) -> float:
        """Return the median time of `reads` reads, in ms, each as if this process had not read the thread before."""

        async def read() -> Any:
            self.store.buffer.reads._recent.forget(thread)
            return await self.store.load_messages(thread)

        return await _timed(read, reads)


class BareReader(BareRead):
    """One SELECT."""

    async def timed(self, thread: str, reads: int) -> float:
        """Return the median time of `reads` reads, in ms."""
        return await _timed(lambda: self.read(thread), reads)


class UnbufferedReader(Unbuffered):
    """The wrapped store alone."""

    async def timed(self, thread: str, reads: int) -> float:
        """Return the median time of `reads` reads, in ms."""
        return await _timed(lambda: self.store.load_messages(thread), reads)


async def _timed(read: Callable[[], Awaitable[Any]], reads: int) -> float:
    latencies = []
    began = time.perf_counter()
    for _ in range(reads):
        at = time.perf_counter()
        found = await read()
        latencies.append(time.perf_counter() - at)
        assert _MESSAGES in (found, len(found) if isinstance(found, list) else 0)
    return summary(latencies, reads, time.perf_counter() - began)["p50"]


def reads(stage: Stage) -> Iterator[Benchmark]:
    """Measure reads; the baselines read a thread of as many messages that is wholly in Postgres."""
    place = stage.place()
    with stage.workers(place, ours=Reader) as writers:
        ours = writers["ours"]
        with stage.workers(place, flusher=(Ours, {"flusher": True})):
            ours.call("grow", thread="clean", messages=_MESSAGES)
            ours.call("grow", thread="tail", messages=_MESSAGES - _TAIL)
            ours.call("flush")
        # No flusher runs any more, so the tail is not flushed.
        ours.call("grow", thread="tail", messages=_TAIL)
        bare = (BareReader, {"schema": place.name})
        with stage.workers(place, limit=bare, unbuffered=UnbufferedReader) as readers:
            for name in ("clean", "tail"):
                actions = {"ours": partial(_median, stage, ours, name)}
                for baseline, worker in readers.items():
                    actions[baseline] = partial(_median, stage, worker, "clean")
                yield compared(f"read_{name}.p50", "ms", stage.interleave(actions))
            actions = {"ours": partial(_median, stage, ours, "clean", "timed_first")}
            actions |= {baseline: partial(_median, stage, worker, "clean") for baseline, worker in readers.items()}
            yield compared("read_first.p50", "ms", stage.interleave(actions))


def _median(stage: Stage, worker: Any, thread: str, method: str = "timed") -> float:
    return float(worker.call(method, thread=thread, reads=stage.count(_READS, 20)))
