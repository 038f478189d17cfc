"""What is measured: a contestant lives in a process of its own, and takes a load.

A contestant is what an application's process would hold: a client and whatever it does in it. It has its own
process so that nobody pays for another's threads, caches and garbage; while one is measured the others sleep.
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
    #: The processes of "nats" and of "postgres".
    pids: Mapping[str, Sequence[int]] = field(default_factory=dict)
    #: How many servers hold what is written to NATS.
    replicas: int = 1
    #: What a log may grow to, so that no row ends because its log is full. The server reserves it on its disk.
    log_bytes: int = 8 << 30


class Contestant:
    """Base of all; every method but `step` is called from the parent process."""

    #: Which server makes a step durable, "nats" or "postgres".
    server = "nats"

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
        """As `load`, beside other processes: from `at` (`time.time`) on, with a caller for each list of threads.

        What each step took, the time of all of them, and the processor's time that this process took for it, s.
        """
        await asyncio.sleep(at - time.time())
        spent = time.process_time()
        latencies, took = await repeat(
            lambda who, number: self.step(threads[who][number % len(threads[who])], number), len(threads), seconds
        )
        return latencies, took, time.process_time() - spent

    def server_pids(self) -> Sequence[int]:
        """The processes of the server that makes a step durable."""
        return self.place.pids.get(self.server, ())


async def closed_loop(
    step: Callable[[int, int], Awaitable[Any]], callers: int, seconds: float, server: Sequence[int] = ()
) -> dict[str, float]:
    """Each caller calls `step(who, number)` again as soon as it returns; see `summary` and `Meter`.

    The first step of each is not counted: what a thread costs once is not what an append costs.
    """
    await asyncio.gather(*(step(who, 0) for who in range(callers)))
    gc.collect()
    meter = Meter(server)
    latencies, took = await repeat(step, callers, seconds)
    return summary(latencies, len(latencies), took) | meter.each(len(latencies))


async def repeat(
    step: Callable[[int, int], Awaitable[Any]], callers: int, seconds: float
) -> tuple[Sequence[float], float]:
    """What each step took, in seconds, and all of them together."""
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
    """The rate (1/s) and percentiles of the latency (ms)."""
    ordered = sorted(latencies)
    found = {"rate": done / seconds}
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p999", 0.999)):
        found[name] = 1000 * ordered[min(int(len(ordered) * share), len(ordered) - 1)]
    return found
