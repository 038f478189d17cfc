"""`drain.rate`, `drain.memory`: a backlog into Postgres."""

from __future__ import annotations

import time
from collections.abc import Iterator

import psycopg

from bench.baselines.raw_drain import RawDrain
from bench.ours import Ours
from bench.results import Benchmark, compared
from bench.rows.backlog import backlog, fresh_options
from bench.stage import Stage

_ROUNDS_MAX = 2
_RATE, _MEMORY_MAX_MIB = 60_000.0, 200.0


class Drainer(Ours):
    """A flusher that starts with the whole backlog."""

    async def drained(self, entries: int) -> None:
        """Wait until it has flushed `entries`."""
        await self.until(lambda state: state["entries"] >= entries)


def drain(stage: Stage) -> Iterator[Benchmark]:
    """Measure a process of ours that opens the store and flushes all; *raw loop* drains the same stream."""
    what = backlog(stage)

    def ours() -> tuple[float, float]:
        options = fresh_options(stage)
        began = time.perf_counter()
        with stage.workers(what.place, ours=(Drainer, {"flusher": True, **options})) as workers:
            workers["ours"].call("drained", entries=what.entries)
            rate = what.entries / (time.perf_counter() - began)
            memory = workers["ours"].memory()
        with psycopg.connect(stage.servers.dsn) as connection:
            total = f"SELECT sum(version) FROM {options['schema']}.threads"
            arrived = connection.execute(total).fetchone()
        assert arrived is not None
        assert arrived[0] == what.entries, f"{arrived[0]} of {what.entries} arrived"
        return rate, memory

    def raw() -> tuple[float, float]:
        with stage.workers(raw=(RawDrain, {"stream": f"LOG-{what.place.name}"})) as workers:
            rate = float(workers["raw"].call("drain", entries=what.entries))
            return rate, workers["raw"].memory()

    found = stage.interleave({"ours": ours, "raw loop": raw}, min(stage.rounds, _ROUNDS_MAX))
    rates = {name: [r for r, _ in results] for name, results in found.items()}
    yield compared("drain.rate", "1/s", rates | {"60 000/s": [_RATE]})
    memory = {name: [m for _, m in results] for name, results in found.items()}
    yield compared("drain.memory", "MiB", memory | {"200 MiB": [_MEMORY_MAX_MIB]})
