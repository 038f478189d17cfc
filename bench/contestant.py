"""What is measured: a contestant lives in a process of its own, and takes a load.

A contestant is what an application's process would hold: a client and whatever it does in it. It has its own
process so that nobody pays for another's threads, caches and garbage; while one is measured the others sleep.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.workload import texts

#: Bytes of a message, unless a row says otherwise.
PAYLOAD = 2048
#: What messages say, in turn.
TEXTS = texts(PAYLOAD)
BODIES = [text.encode() for text in TEXTS]


def text(number: int) -> str:
    """The message with this number, `PAYLOAD` bytes."""
    return TEXTS[number % len(TEXTS)]


def body(number: int) -> bytes:
    """The same as bytes."""
    return BODIES[number % len(BODIES)]


@dataclass(frozen=True)
class Place:
    """Where a contestant works: the servers, and a name of its own for streams, schemas and tables."""

    nats: str
    dsn: str
    name: str


class Contestant:
    """Base of all; every method but `step` is called from the parent process."""

    def __init__(self, place: Place) -> None:
        self.place = place

    async def open(self) -> None:
        """Connect and create what is needed."""

    async def close(self) -> None:
        """Remove what was created, so that the next row finds free disks, and disconnect."""

    async def step(self, thread: str, number: int) -> Any:
        """Make one checkpoint durable: `PAYLOAD` bytes for a thread."""
        raise NotImplementedError

    async def load(self, callers: int, seconds: float, label: str) -> dict[str, float]:
        """What `callers` at once, each on a thread of its own, get done in `seconds`; see `summary`."""
        return await closed_loop(lambda who, number: self.step(f"{label}-{who}", number), callers, seconds)


async def closed_loop(step: Callable[[int, int], Awaitable[Any]], callers: int, seconds: float) -> dict[str, float]:
    """Each caller calls `step(who, number)` again as soon as it returns.

    The first step of each is not counted: what a thread costs once is not what an append costs.
    """
    await asyncio.gather(*(step(who, 0) for who in range(callers)))
    latencies: list[float] = []
    clock = time.perf_counter
    gc.collect()
    began = clock()
    end = began + seconds

    async def caller(who: int) -> None:
        number = 1
        while (at := clock()) < end:
            await step(who, number)
            latencies.append(clock() - at)
            number += 1

    await asyncio.gather(*(caller(i) for i in range(callers)))
    return summary(latencies, len(latencies), clock() - began)


def summary(latencies: Sequence[float], done: int, seconds: float) -> dict[str, float]:
    """The rate (1/s) and percentiles of the latency (ms)."""
    ordered = sorted(latencies)
    found = {"rate": done / seconds}
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p999", 0.999)):
        found[name] = 1000 * ordered[min(int(len(ordered) * share), len(ordered) - 1)]
    return found
