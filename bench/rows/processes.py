"""`append_{processes}x{callers}`: many processes with few callers each, as Python services run."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import count
from operator import itemgetter
from typing import Any

from bench import processor
from bench.baselines.upsert import Upsert
from bench.contestant import summary
from bench.ours import Ours
from bench.relay import Relay
from bench.results import Benchmark, compared
from bench.rows.append import UNITS
from bench.stage import Kind, Stage, server_of
from bench.stored import stored
from bench.worker import Worker

SHAPES = ((4, 16), (8, 8), (16, 4), (16, 16))
_SECONDS = 2.0
_ROUNDS_MAX = 3
#: Connections of one process of *upsert*; all processes together stay below Postgres' default limit.
_POOL = 4
#: One-way delay of the process that is 2 ms away, in seconds.
_ONE_WAY_S = 0.001
#: Seconds between the order and the start, by which the order has reached all processes.
_LEAD_S = 0.1
_CALL_TIMEOUT_S = 120.0

#: The threads of each caller of each process.
Threads = Sequence[Sequence[Sequence[str]]]


def append_processes(stage: Stage, processes: int, callers: int) -> Iterator[Benchmark]:
    """Measure threads private to a process, threads shared by all, and private ones with one process 2 ms away."""
    share = stage.count(processes, 2)
    kinds: Mapping[str, Kind] = {"ours": Ours, "upsert": (Upsert, {"pool": min(callers, _POOL)})}
    fairness = []
    with ExitStack() as stack:
        near = stage.place()
        far = replace(
            near,
            nats=stack.enter_context(Relay(near.nats, _ONE_WAY_S)).url,
            dsn=stack.enter_context(Relay(near.dsn, _ONE_WAY_S)).url,
        )
        places = [near] * share + [far]
        workers = stack.enter_context(
            stage.workers_at(
                {f"{name} {i}": (place, kind) for name, kind in kinds.items() for i, place in enumerate(places)}
            )
        )
        groups = {name: [workers[f"{name} {i}"] for i in range(len(places))] for name in kinds}
        servers = {name: near.pids[server_of(kind)] for name, kind in kinds.items()}
        variants: Mapping[str, tuple[slice, Callable[[str, int, int], Threads]]] = {
            "": (slice(0, share), private),
            "_shared": (slice(0, share), shared),
            "_far": (slice(1, share + 1), private),
        }
        for variant, (chosen, threads) in variants.items():
            labels = map(f"round{variant}-{{}}".format, count())

            def measure(name: str, chosen: slice = chosen, of: Any = threads, labels: Any = labels) -> dict[str, float]:
                group = groups[name][chosen]
                threads: Threads = of(next(labels), len(group), callers)
                return stored(
                    near,
                    server_of(kinds[name]),
                    lambda: _measure(group, threads, stage.seconds(_SECONDS), servers[name]),
                    done=itemgetter("done"),
                )

            found = stage.interleave({n: partial(measure, n) for n in kinds}, min(stage.rounds, _ROUNDS_MAX))
            name = f"append_{processes}x{callers}{variant}"
            for what, unit in UNITS.items():
                yield compared(f"{name}.{what}", unit, _of(found, what))
            shares = _of(found, "fairness") | {"half": [0.5]}
            fairness.append(compared(f"{name}.fairness", "slowest/fastest", shares))
    yield from fairness


def private(label: str, processes: int, callers: int) -> Threads:
    """Return one thread for each caller."""
    return [[[f"{label}-{p}-{c}"] for c in range(callers)] for p in range(processes)]


def shared(label: str, processes: int, callers: int) -> Threads:
    """Return the same threads for all callers, each of which goes through them in its own order."""
    names = [name for process in private(label, processes, callers) for (name,) in process]
    chance = random.Random(label)
    return [[chance.sample(names, len(names)) for _ in range(callers)] for _ in range(processes)]


def _measure(workers: Sequence[Worker], threads: Threads, seconds: float, server: Sequence[int]) -> dict[str, float]:
    """Run all workers at once."""
    warmed: set[str] = set()
    for worker, mine in zip(workers, threads, strict=True):
        names = {name for caller in mine for name in caller} - warmed
        worker.begin("warm", threads=sorted(names))
        warmed |= names
    for worker in workers:
        worker.end(_CALL_TIMEOUT_S)
    at = time.time() + _LEAD_S
    for worker, mine in zip(workers, threads, strict=True):
        worker.begin("load_at", at=at, threads=mine, seconds=seconds)
    time.sleep(max(at - time.time(), 0.0))
    before = processor.taken(server)
    time.sleep(max(at + seconds - time.time(), 0.0))
    spent = processor.taken(server) - before
    found = [worker.end(_CALL_TIMEOUT_S) for worker in workers]
    latencies = [taken for steps, _, _ in found for taken in steps]
    rates = [len(steps) / took for steps, took, _ in found]
    return {
        **summary(latencies, len(latencies), seconds),
        **processor.shares(sum(cpu for _, _, cpu in found), spent, len(latencies)),
        "rate": sum(rates),
        "fairness": min(rates) / max(rates),
    }


def _of(found: Mapping[str, Sequence[Mapping[str, float]]], what: str) -> dict[str, Sequence[float]]:
    return {who: [result[what] for result in results] for who, results in found.items()}
