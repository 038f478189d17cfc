"""`end_to_end.rate`, `end_to_end_hot.rate`: concurrent appends and flushes, counted on their arrival in Postgres."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from psycopg import AsyncConnection

from bench.baselines.upsert import Upsert
from bench.ours import Ours
from bench.results import Benchmark, compared
from bench.stage import Stage
from bench.worker import Worker

_SECONDS, _BASELINE_SECONDS = 60.0, 20.0
#: Several windows of the flusher.
_SECONDS_MIN = 1.5
_CALLERS = 256
_DISTINCT, _HOT = 10_000, 256
#: The writers wait while more entries than this are acknowledged and not in Postgres: about two seconds of work.
_LAG_MAX = 20_000
_LOOK_S = 0.1
_ROUNDS_MAX = 2


class BoundedWriter(Ours):
    """Writes as fast as the flusher, in another process, keeps up."""

    async def load_bounded(self, seconds: float, threads: int, label: str) -> float:
        """Write, and return the checkpoints per second that arrived in Postgres."""
        names = [f"{label}-{i}" for i in range(threads)]
        free = asyncio.Event()
        free.set()
        over = False
        appended = 0

        async def caller(who: int) -> None:
            nonlocal appended
            while not over:
                await free.wait()
                number = appended
                appended += 1
                await self.step(names[number % threads], number)

        async with await AsyncConnection.connect(self.place.dsn, autocommit=True) as connection:
            before = await self._arrived(connection)
            callers = [asyncio.create_task(caller(who)) for who in range(_CALLERS)]
            # Fill the pipeline before the clock starts.
            began, first, end = 0.0, 0, float("inf")
            warm = time.perf_counter() + seconds / 10
            while (now := time.perf_counter()) < end:
                arrived = await self._arrived(connection) - before
                if not began and now >= warm and arrived:
                    began, first, end = now, arrived, now + seconds
                (free.clear if appended - arrived > _LAG_MAX else free.set)()
                await asyncio.sleep(_LOOK_S)
            arrived, now = await self._arrived(connection) - before, time.perf_counter()
        over = True
        free.set()
        await asyncio.gather(*callers)
        await self.flush()
        return (arrived - first) / (now - began)

    async def _arrived(self, connection: AsyncConnection[Any]) -> int:
        cursor = await connection.execute(f"SELECT coalesce(sum(version), 0) FROM {self.schema}.threads")
        row: Any = await cursor.fetchone()
        return int(row[0])


def end_to_end(stage: Stage) -> Iterator[Benchmark]:
    """Measure checkpoints spread over 10 000 threads, then on 256 hot ones."""
    for name, threads in (("end_to_end", _DISTINCT), ("end_to_end_hot", _HOT)):
        half = (Upsert, {"pool": 8})
        with stage.workers(
            flusher=(Ours, {"flusher": True}), ours=BoundedWriter, upsert=Upsert, one=half, two=half
        ) as workers:
            upserts = {"upsert": [workers["upsert"]], "upsert, two processes": [workers["one"], workers["two"]]}

            def ours(worker: Worker = workers["ours"], threads: int = threads) -> float:
                arguments = {"threads": threads, "label": str(time.monotonic_ns())}
                seconds = max(stage.seconds(_SECONDS), _SECONDS_MIN)
                return float(worker.call("load_bounded", seconds=seconds, **arguments))

            actions: dict[str, Callable[[], float]] = {"ours": ours}
            for baseline, group in upserts.items():
                actions[baseline] = partial(_upserts, stage, group, threads)
            found = stage.interleave(actions, min(stage.rounds, _ROUNDS_MAX))
            yield compared(f"{name}.rate", "1/s", found)


def _upserts(stage: Stage, group: list[Worker], threads: int) -> float:
    """Return the upserts per second of the processes of `group`, which share callers and threads."""
    share = len(group)
    for number, worker in enumerate(group):
        worker.begin(
            "load_many",
            callers=_CALLERS // share,
            seconds=stage.seconds(_BASELINE_SECONDS),
            threads=threads // share,
            label=f"{number}",
        )
    return float(sum(worker.end()["rate"] for worker in group))
