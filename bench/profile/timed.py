"""Contestants that measure where the time of their calls goes."""

from __future__ import annotations

import cProfile
import gc
import io
import pstats
import time
from collections.abc import Mapping
from typing import Any

from bench.baselines.limit import Limit
from bench.contestant import Contestant
from bench.ours import Ours
from bench.rows.drain import Drainer

_LINES = 14


class Timed(Contestant):
    """Mixed into a contestant: measures the processor time of a call, or profiles it."""

    async def timed(self, name: str, **arguments: Any) -> tuple[Any, float]:
        """Call a method; return its result and this process's processor time for it, in seconds."""
        began = time.process_time()
        result = await getattr(self, name)(**arguments)
        return result, time.process_time() - began

    async def profiled(self, name: str, **arguments: Any) -> str:
        """Call a method, and return the functions with the most time of their own."""
        profile = cProfile.Profile()
        with profile:
            await getattr(self, name)(**arguments)
        text = io.StringIO()
        pstats.Stats(profile, stream=text).strip_dirs().sort_stats("tottime").print_stats(_LINES)
        rows = text.getvalue().splitlines()
        first = next(i for i, row in enumerate(rows) if row.lstrip().startswith("ncalls"))
        return "\n".join(rows[first : first + _LINES + 1])


class TimedOurs(Timed, Ours):
    """Our store."""


class TimedDrainer(Timed, Drainer):
    """A flusher that starts with the whole backlog."""


class TimedLimit(Timed, Limit):
    """Bare batches."""

    async def batches(self, size: int, seconds: float) -> float:
        """Return the median time of an atomic batch of `size` messages, one batch after another, in ms."""
        subjects = [f"{self._stream}.{size}-{i}" for i in range(size)]
        return (await self._run(subjects, seconds, 1, True))["p50"]


class CollectedOurs(Ours):
    """Our store, with Python's garbage collector on or off, and the times of its full collections."""

    async def collected(self, callers: int, seconds: float, label: str, collect: bool) -> dict[str, float]:
        """Run `load`; the result includes the number of full collections and the longest, in ms."""
        pauses: list[float] = [0.0]
        began = 0.0

        def watch(phase: str, info: Mapping[str, int]) -> None:
            nonlocal began
            if phase == "start":
                began = time.perf_counter()
            elif info["generation"] == 2:
                pauses.append(1000 * (time.perf_counter() - began))

        gc.collect()
        gc.callbacks.append(watch)
        (gc.enable if collect else gc.disable)()
        try:
            found = await self.load(callers=callers, seconds=seconds, label=label)
        finally:
            gc.enable()
            gc.callbacks.remove(watch)
        return found | {"collections": len(pauses) - 1, "longest": max(pauses)}
