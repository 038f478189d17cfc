"""`append_idle…`: the next append of a thread that was idle for a while, as agents' threads are."""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections.abc import Iterator, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

from bench.contestant import summary
from bench.ours import Ours
from bench.processor import Meter
from bench.results import Benchmark, compared
from bench.rows.append import UNITS
from bench.stage import Stage
from bench.stored import stored

#: Threads, and checkpoints of each: a log of nearly 500 MB.
_THREADS, _EACH = 100_000, 2
#: nats-server drops its cache of a file after ten seconds.
_IDLE_S = 15.0
_CALLERS = 256
#: How many percent of the threads a round wakes: few, because one read of the server also serves neighbours, and agents
#: do not wake all at once.
_WOKEN = 3
_ROUNDS_MAX = 3
#: Busy threads for comparison; more than callers, so that no two callers wait for each other.
_HOT = 1024
#: With `--quick`.
_QUICK_THREADS, _QUICK_ROUNDS = 20_000, 1


class Sleepers(Ours):
    """Appends once to each of many threads."""

    async def append_each(self, threads: Sequence[str], callers: int) -> dict[str, float]:
        """Append once to each thread, with `callers` at a time; see `summary` and `Meter`."""
        waiting = iter(threads)
        latencies: list[float] = []

        async def caller() -> None:
            for thread in waiting:
                at = time.perf_counter()
                await self.step(thread, len(latencies))
                latencies.append(time.perf_counter() - at)

        gc.collect()
        meter = Meter(self.server_pids())
        began = time.perf_counter()
        await asyncio.gather(*(caller() for _ in range(callers)))
        took = time.perf_counter() - began
        return summary(latencies, len(latencies), took) | meter.each(len(latencies))


def append_idle(stage: Stage) -> Iterator[Benchmark]:
    """Measure idle threads against hot ones, in a process that knows all tips and in one that has seen no thread.

    The latter once with everything flushed, as it is half a second after a write, and once as in an outage of Postgres
    that began before the writes, when only the log has the threads' entries.
    """
    threads = stage.count(_QUICK_THREADS if stage.quick else _THREADS, 200)
    rounds = min(stage.rounds, _QUICK_ROUNDS if stage.quick else _ROUNDS_MAX)
    callers, woken = stage.count(_CALLERS, 16), threads * _WOKEN // 100
    hot = [f"hot-{i % stage.count(_HOT, 32)}" for i in range(woken)]
    asleep = iter(random.Random(1).sample(range(threads), threads))
    kinds: Any = {"known": (Sleepers, {"cached_threads": 2 * threads}), "evicted": Sleepers, "unflushed": Sleepers}
    flushed, unflushed = stage.place(), stage.place()
    places = {"known": flushed, "evicted": flushed, "unflushed": unflushed}
    with stage.workers_at({name: (places[name], kind) for name, kind in kinds.items()}) as workers:
        filling = {"threads": threads, "each": _EACH, "at_once": min(512, threads)}
        workers["known"].call("fill", **filling)
        with stage.workers(unflushed, writer=Ours) as writers:
            writers["writer"].call("fill", **filling)
        with stage.workers(flushed, flusher=(Ours, {"flusher": True})) as flushers:
            flushers["flusher"].call("flush")
        # A new process first reads where each thread ends, which another row measures.
        for name in ("evicted", "unflushed"):
            workers[name].call("append_each", threads=["first"], callers=1)
        stage.say(f"{threads} threads, a log of {workers['known'].call('log_bytes') / 1e6:.0f} MB")

        def idle(name: str) -> dict[str, float]:
            chosen = [f"t-{next(asleep)}" for _ in range(woken)]
            time.sleep(stage.seconds(_IDLE_S))
            return append(name, chosen)

        def busy(name: str) -> dict[str, float]:
            mine = [f"{name}-{thread}" for thread in hot]
            append(name, sorted(set(mine)))
            return append(name, mine)

        def append(name: str, chosen: Sequence[str]) -> dict[str, float]:
            return stored(
                places[name],
                "nats",
                lambda: workers[name].call("append_each", threads=chosen, callers=callers),
                done=itemgetter("done"),
            )

        actions = {f"{name} idle": partial(idle, name) for name in workers}
        found = stage.interleave(actions | {f"{name} hot": partial(busy, name) for name in workers}, rounds)
    for name, suffix in (("known", ""), ("evicted", "_evicted"), ("unflushed", "_unflushed")):
        both = {"ours": found[f"{name} idle"], "hot threads": found[f"{name} hot"]}
        for what, unit in UNITS.items():
            values = {who: [result[what] for result in results] for who, results in both.items()}
            yield compared(f"append_idle{suffix}.{what}", unit, values)
