"""`mailbox_…`: cycles of enqueue, claim and ack; `mailbox_claim_…`: a claim from a long queue."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from bench.mailbox import MemoryQueue, NatsQueue, PostgresQueue, Procrastinate
from bench.results import Benchmark, compared
from bench.stage import Stage

_SECONDS = 3.0
_FEW, _MANY = 100, 100_000
_CLAIMS = 300


def mailbox(stage: Stage) -> Iterator[Benchmark]:
    """Measure each of ours against procrastinate; all but the one in memory are fsynced."""
    kinds = {"memory": MemoryQueue, "nats": NatsQueue, "postgres": PostgresQueue, "procrastinate": Procrastinate}
    with stage.workers(stage.place(), **kinds) as workers:
        for callers in (1, 32):
            numbers = {name: iter(range(1_000_000)) for name in workers}

            def load(name: str, callers: int = callers, numbers: Any = numbers) -> dict[str, float]:
                label = f"{callers}-{next(numbers[name])}"
                found: dict[str, float] = workers[name].call(
                    "load", callers=callers, seconds=stage.seconds(_SECONDS), label=label
                )
                return found

            found = stage.interleave({name: partial(load, name) for name in workers})
            for ours in ("nats", "postgres", "memory"):
                for what, unit in (("rate", "1/s"), ("p50", "ms"), ("p99", "ms")):
                    values = {"ours": [r[what] for r in found[ours]]}
                    values["procrastinate"] = [r[what] for r in found["procrastinate"]]
                    yield compared(f"mailbox_{ours}_{callers}.{what}", unit, values)


def mailbox_claim(stage: Stage) -> Iterator[Benchmark]:
    """Measure claims of a thread with 100 queued dispatches against one with 100 000."""
    few, many = f"{_FEW} queued", f"{_MANY} queued"
    with stage.workers(stage.place(), nats=NatsQueue, postgres=PostgresQueue) as workers:
        for ours, worker in workers.items():
            worker.call("fill", thread=few, count=_FEW)
            worker.call("fill", thread=many, count=stage.count(_MANY, _FEW))

            def claims(thread: str, worker: Any = worker) -> dict[str, float]:
                found: dict[str, float] = worker.call("claims", thread=thread, count=stage.count(_CLAIMS, 20))
                return found

            found = stage.interleave({"ours": partial(claims, many), few: partial(claims, few)})
            for what in ("p50", "p99"):
                values = {name: [r[what] for r in results] for name, results in found.items()}
                yield compared(f"mailbox_claim_{ours}.{what}", "ms", values)
