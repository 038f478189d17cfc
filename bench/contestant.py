"""Contestants: what is measured. Each has a process of its own, and takes a load.

A contestant holds what an application's process would: a client and its background work. It has its own process so that
it does not pay for another's threads, caches and garbage; while one is measured, the others sleep.
"""

from __future__ import annotations

import asyncio
import gc
import time
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.processor import Meter
from bench.workload import texts

#: Bytes of a message, unless a row says otherwise.
PAYLOAD = 2048
#: The messages, used in turn.
TEXTS = texts(PAYLOAD)
BODIES = [text.encode() for text in TEXTS]


def text(number: int) -> str:
    """Return the message with this number, of `PAYLOAD` bytes."""
    return TEXTS[number % len(TEXTS)]


def body(number: int) -> bytes:
    """Return the same message as bytes."""
    return BODIES[number % len(BODIES)]


@dataclass(frozen=True)
class Place:
    """The servers of a contestant, and its own name for streams, schemas and tables."""

    nats: str
    dsn: str
    name: str
    #: The process ids of "nats" and "postgres".
    pids: Mapping[str, Sequence[int]] = field(default_factory=dict)
    #: How many servers store what is written to NATS.
    replicas: int = 1
    #: The largest size of a log, so that no row fails for a full log. The server reserves it on its disk.
    log_bytes: int = 8 << 30


class Contestant:
    """Base of all contestants; the parent process calls every method except `step`."""

    #: The server that makes a step durable: "nats" or "postgres".
    server = "nats"

    def __init__(self, place: Place) -> None:
        self.place = place

    async def open(self) -> None:
        """Connect and create streams, schemas and tables."""

    async def close(self) -> None:
        """Remove what was created, so that the next row finds free disks, and disconnect."""

    async def step(self, thread: str, number: int) -> Any:
        """Make one checkpoint durable: `PAYLOAD` bytes for a thread."""
        raise NotImplementedError

    async def load(self, callers: int, seconds: float, label: str) -> dict[str, float]:
        """Run `callers` at once, each on its own thread, for `seconds`; see `summary`."""
        return await closed_loop(
            lambda who, number: self.step(f"{label}-{who}", number), callers, seconds, self.server_pids()
        )

    async def warm(self, threads: Sequence[str]) -> None:
        """Make the first checkpoint of each thread, as `load` does before its clock starts."""
        await asyncio.gather(*(self.step(thread, 0) for thread in threads))
        gc.collect()

    async def load_at(
        self, at: float, threads: Sequence[Sequence[str]], seconds: float
    ) -> tuple[Sequence[float], float, float]:
        """Run a load in step with other processes: from `at` (`time.time`) on, with a caller for each list of threads.

        Returns the time of each step, the time of all steps, and this process's processor time for them, in seconds.
        """
        await asyncio.sleep(at - time.time())
        spent = time.process_time()
        latencies, took = await repeat(
            lambda who, number: self.step(threads[who][number % len(threads[who])], number), len(threads), seconds
        )
        return latencies, took, time.process_time() - spent

    def server_pids(self) -> Sequence[int]:
        """Return the process ids of the server that makes a step durable."""
        return self.place.pids.get(self.server, ())


async def closed_loop(
    step: Callable[[int, int], Awaitable[Any]], callers: int, seconds: float, server: Sequence[int] = ()
) -> dict[str, float]:
    """Let each caller call `step(who, number)` again as soon as it returns; see `summary` and `Meter`.

    Each caller's first step is not counted: it includes what a thread costs once.
    """
    await asyncio.gather(*(step(who, 0) for who in range(callers)))
    gc.collect()
    meter = Meter(server)
    latencies, took = await repeat(step, callers, seconds)
    return summary(latencies, len(latencies), took) | meter.each(len(latencies))


async def repeat(
    step: Callable[[int, int], Awaitable[Any]], callers: int, seconds: float
) -> tuple[Sequence[float], float]:
    """Return the time of each step, and the time of all steps, in seconds."""
    latencies = array("d")
    clock = time.perf_counter
    began = clock()
    end = began + seconds

    async def caller(who: int) -> None:
        number = 1
        while (at := clock()) < end:
            await step(who, number)
            latencies.append(clock() - at)
            number += 1

    await asyncio.gather(*(caller(i) for i in range(callers)))
    return latencies, clock() - began


def summary(latencies: Sequence[float], done: int, seconds: float) -> dict[str, float]:
    """Return how many steps were done, the rate (1/s) and percentiles of the latency (ms)."""
    ordered = sorted(latencies)
    found = {"done": done, "rate": done / seconds}
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p999", 0.999)):
        found[name] = 1000 * ordered[min(int(len(ordered) * share), len(ordered) - 1)]
    return found
