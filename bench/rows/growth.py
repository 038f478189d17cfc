"""`growth_length`, `growth_history`: the cost of an operation late in a history, compared with early."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

from bench.contestant import text
from bench.ours import Ours, run_of
from bench.results import Benchmark, compared
from bench.stage import Stage
from bench.worker import Worker

_LENGTHS = (5, 500, 5000)
_SAMPLES, _SAMPLES_WHOLE = 100, 20
#: Checkpoints and threads of each history; messages are small, so that a million are written soon.
_HISTORIES = ((1_000, 100), (10_000, 1_000), (100_000, 10_000), (1_000_000, 100_000))
_SMALL = 200
_OPERATIONS = ("append", "read", "load_run", "force_flush")
_ACTIVE = 50


class LongThread(Ours):
    """Threads of any length."""

    async def prepare(self, length: int) -> None:
        """Make the thread."""
        self._list = [f"{n}:{text(n)}" for n in range(length)]
        self._thread = f"long-{length}"
        await self.store.checkpoint(self._thread, self._list, run_of(self._thread))
        self._numbers = iter(range(10**9))

    async def measure(self, length: int, samples: int) -> dict[str, float]:
        """Return median time (ms) and bytes in the log of an append, and of a checkpoint with the whole list."""
        await self.prepare(length)
        times: dict[str, list[float]] = {"append": [], "whole": []}
        sizes: dict[str, list[float]] = {"append": [], "whole": []}
        for number in range(samples):
            for name, action in (("append", self._append), ("whole", self._whole)):
                # After a whole list of 5000 messages the processor's caches are cold, which the next call pays for, on
                # any thread. This uncounted call pays for it.
                await self.step("another", number)
                before = await self.log_bytes() if number < 5 else 0
                times[name].append(await _timed(action))
                if number < 5:
                    sizes[name].append(await self.log_bytes() - before)
        found = {f"{name}.p50": statistics.median(values) for name, values in times.items()}
        return found | {f"{name}.bytes": statistics.median(values) for name, values in sizes.items()}

    async def _append(self) -> None:
        number = next(self._numbers)
        await self.store.checkpoint_append(self._thread, [f"{number}:{text(number)}"], self._run())

    async def _whole(self) -> None:
        # Replaces the last message: the list keeps its length, and one message is new.
        number = next(self._numbers)
        self._list[-1] = f"{number}:{text(number)}"
        await self.store.checkpoint(self._thread, self._list, self._run())

    def _run(self) -> Any:
        return run_of(self._thread)


class OldStore(Ours):
    """A store with a history."""

    async def age(self, checkpoints: int, threads: int) -> None:
        """Make and flush the history, and choose the threads to measure."""
        await self.fill(threads=threads, each=checkpoints // threads, at_once=min(512, threads), size=_SMALL)
        await self.flush()
        self._threads = [f"t-{n}" for n in random.Random(1).sample(range(threads), min(_ACTIVE, threads))]
        for thread in self._threads:
            await self.step(thread, 0)
        await self.flush()

    async def measure(self, samples: int) -> dict[str, float]:
        """Return the median time (ms) of each operation, with one caller."""
        chosen = [self._threads[n % len(self._threads)] for n in range(samples)]
        found = {"append": [await _timed(partial(self.step, t, 0)) for t in chosen]}
        await self.flush()
        found["read"] = [await _timed(partial(self.store.load_messages, t)) for t in chosen]
        found["load_run"] = [await _timed(partial(self.store.load_run, f"run-of-{t}")) for t in chosen]
        found["force_flush"] = []
        for thread in chosen[: max(samples // 3, 3)]:
            await self.step(thread, 0)
            found["force_flush"].append(await _timed(partial(self.store.force_flush, thread)))
        return {name: statistics.median(values) for name, values in found.items()}


async def _timed(action: Callable[[], Awaitable[Any]]) -> float:
    began = time.perf_counter()
    await action()
    return 1000 * (time.perf_counter() - began)


def growth_length(stage: Stage) -> Iterator[Benchmark]:
    """Measure threads of different lengths: the longest is *ours*, the shorter ones are the baselines."""
    with stage.workers(ours=LongThread) as workers:

        def measure(length: int) -> dict[str, float]:
            samples = stage.count(_SAMPLES if length <= 500 else _SAMPLES_WHOLE, 3)
            found: dict[str, float] = workers["ours"].call("measure", length=length, samples=samples)
            return found

        found = stage.interleave({f"length {n}": partial(measure, n) for n in _LENGTHS})
    longest = f"length {_LENGTHS[-1]}"
    for prefix, what in (("growth_length", "append"), ("growth_length_whole", "whole")):
        for figure, unit in (("bytes", "bytes"), ("p50", "ms")):
            values = {name: [r[f"{what}.{figure}"] for r in rounds] for name, rounds in found.items()}
            yield compared(f"{prefix}.{figure}", unit, values, ours=longest)


def growth_history(stage: Stage) -> Iterator[Benchmark]:
    """Measure a deployment for each history, in turn; the longest is *ours*."""
    with ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for checkpoints, threads in _HISTORIES:
            name = f"{checkpoints} checkpoints"
            worker = stack.enter_context(stage.workers(ours=(OldStore, {"flusher": True})))["ours"]
            stage.say(f"making the history of {name}")
            threads = stage.count(threads, 10)
            worker.call("age", checkpoints=stage.count(checkpoints, 2 * threads), threads=threads)
            workers[name] = worker

        samples = stage.count(_SAMPLES, 6)
        found = stage.interleave(
            {name: partial(worker.call, "measure", samples=samples) for name, worker in workers.items()}
        )
    for operation in _OPERATIONS:
        values = {name: [r[operation] for r in rounds] for name, rounds in found.items()}
        yield compared(f"growth_history_{operation}.p50", "ms", values, ours=f"{_HISTORIES[-1][0]} checkpoints")
