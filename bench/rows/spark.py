"""`spark_…`: jobs on Spark against what a data engineer would write instead, on the same session and servers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from bench.baselines.nats_consumer import NatsConsumer
from bench.results import Benchmark, compared
from bench.rows.backlog import NAME, backlog, fresh_options
from bench.rows.drain import Drainer
from bench.spark import SparkJobs
from bench.stage import Stage
from bench.stored import stored

_CORES = 2
_ROWS, _THREADS = 100_000, 10_000
_DRAINS_MAX = 2


def spark_sink(stage: Stage) -> Iterator[Benchmark]:
    """Measure rows made durable in the log, or in Postgres past the log, against fsynced upserts of the same rows."""
    rows = stage.count(_ROWS, 400)
    threads = max(rows * _THREADS // _ROWS, 1)
    place = stage.place()
    with stage.workers(place, jobs=(SparkJobs, {"cores": _CORES})) as workers:
        jobs, numbers = workers["jobs"], iter(range(1_000_000))

        def run(method: str, **options: Any) -> float:
            label = f"{method}{next(numbers)}"
            return stored(
                place,
                "nats" if options.get("mode") == "log" else "postgres",
                lambda: float(jobs.call(method, rows=rows, threads=threads, label=label, **options)),
                done=lambda _: rows,
            )

        run("sink", mode="log")  # opens what is opened once
        run("sink", mode="postgres")
        found = stage.interleave(
            {
                "sink": partial(run, "sink", mode="log"),
                "upsert": partial(run, "upserts", together=False),
                "backfill": partial(run, "sink", mode="postgres"),
                "executemany": partial(run, "upserts", together=True),
            }
        )
        yield compared("spark_sink.rate", "1/s", {"ours": found["sink"], "upsert": found["upsert"]})
        pair = {"ours": found["backfill"], "executemany": found["executemany"]}
        yield compared("spark_backfill.rate", "1/s", pair)


def spark_source(stage: Stage) -> Iterator[Benchmark]:
    """Measure reads of the log with one core and two, decoded and by group, against one nats-py consumer of groups."""
    what = backlog(stage)
    stream = {"stream": f"LOG-{NAME}"}
    kinds: dict[str, Any] = {f"{c}": (SparkJobs, stream | {"cores": c}) for c in (1, 2)}
    kinds["nats-py"] = (NatsConsumer, stream)
    with stage.workers(what.place, **kinds) as workers:

        def read(cores: int, form: str) -> float:
            rate: float = workers[f"{cores}"].call("read", entries=what.entries, form=form)
            return rate

        def consume() -> float:
            rate: float = workers["nats-py"].call("read", entries=what.entries)
            return rate

        for cores in (1, 2):
            read(cores, "messages")
            counted = workers[f"{cores}"].call("count")
            assert counted == what.entries, f"{counted} of {what.entries} entries were read"
        actions = {f"{form}_{c}": partial(read, c, form) for form in ("entries", "messages") for c in (1, 2)}
        found = stage.interleave(actions | {"nats-py": consume})
        for name in actions:
            yield compared(f"spark_source_{name}.rate", "1/s", {"ours": found[name], "nats-py": found["nats-py"]})


def spark_drain(stage: Stage) -> Iterator[Benchmark]:
    """Measure a drain by Spark's tasks against one flusher, both already running; and the starts of both."""
    what = backlog(stage)

    def ours() -> tuple[float, float]:
        options = fresh_options(stage) | {"stream": f"LOG-{NAME}", "cores": _CORES}
        with stage.workers(what.place, jobs=(SparkJobs, options)) as workers:
            began = time.perf_counter()
            entries = workers["jobs"].call("drain")
            seconds = time.perf_counter() - began
            assert entries == what.entries, f"{entries} of {what.entries} were drained"
            return what.entries / seconds, float(workers["jobs"].call("start"))

    def one() -> tuple[float, float]:
        options = fresh_options(stage)
        began = time.perf_counter()
        with stage.workers(what.place, one=(Drainer, {"flusher": True, **options})) as workers:
            opened = time.perf_counter()
            workers["one"].call("drained", entries=what.entries)
            return what.entries / (time.perf_counter() - opened), opened - began

    found = stage.interleave({"ours": ours, "one flusher": one}, min(stage.rounds, _DRAINS_MAX))
    for name, unit, which in (("spark_drain.rate", "1/s", 0), ("spark_start.seconds", "s", 1)):
        yield compared(name, unit, {who: [result[which] for result in results] for who, results in found.items()})
