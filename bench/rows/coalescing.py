"""`coalescing_…`: checkpoints per transaction and per row written, over threads × step rate × window."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator

from bench.ours import Ours
from bench.results import Benchmark, compared
from bench.stage import Stage

_THREADS = (10, 50, 250)
_RATES = (0.2, 1.0, 5.0)
_WINDOWS_MS = (100, 500, 2000, 5000)
#: The factor by which windows and steps are shortened.
_COMPRESSION = 2
_LEAST_S, _WINDOWS_LEAST = 2.0, 3


class Walkers(Ours):
    """Writer and flusher in one process, at a given pace."""

    async def walk(self, threads: int, step_s: float, seconds: float, label: str) -> tuple[int, int, int]:
        """Let `threads` take a step every `step_s`; return the number of entries, transactions and changed threads."""
        rng = random.Random(11)
        names = [f"{label}-{n}" for n in range(threads)]
        await asyncio.gather(*(self.step(name, 0) for name in names))
        await self.flush()
        before = await self.flusher()
        began = time.perf_counter()
        end = began + seconds

        async def thread(name: str) -> None:
            due = began + rng.random() * step_s
            while due < end:
                await asyncio.sleep(max(due - time.perf_counter(), 0))
                await self.step(name, 1)
                due += step_s

        await asyncio.gather(*map(thread, names))
        await asyncio.sleep(self.config.flush_interval_s)  # the last window ends like the others
        await self.flush()
        after = await self.flusher()
        return tuple(after[what] - before[what] for what in ("entries", "transactions", "changes"))


def coalescing(stage: Stage) -> Iterator[Benchmark]:
    """Without a buffer, every checkpoint is a transaction and writes its thread's row, so the baseline is 1."""
    points = [(threads, rate) for threads in _THREADS for rate in _RATES]
    points = points[-stage.count(len(points), 2) :]
    for window_ms in _WINDOWS_MS[: stage.count(len(_WINDOWS_MS), 2)]:
        interval_s = window_ms / 1000 / _COMPRESSION
        with stage.workers(ours=(Walkers, {"flusher": True, "flush_interval_s": interval_s})) as workers:
            for threads, rate in points:
                step_s = 1 / rate / _COMPRESSION
                seconds = stage.seconds(max(_WINDOWS_LEAST * interval_s, _LEAST_S, step_s))
                entries, transactions, changes = workers["ours"].call(
                    "walk", threads=threads, step_s=min(step_s, seconds), seconds=seconds, label=f"{threads}-{rate}"
                )
                name = f"coalescing_t{threads}_r{rate:g}_w{window_ms}ms"
                for what, below in (("transaction", transactions), ("row", changes)):
                    found = {"ours": [entries / max(below, 1)], "unbuffered": [1.0]}
                    yield compared(f"{name}.per_{what}", f"checkpoints/{what}", found)
