"""`append_{1,32,256,1000}` and `append_{32,256}_lazy`: how fast checkpoints are acknowledged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from bench.baselines.batched import Batched
from bench.baselines.limit import Limit
from bench.baselines.plain import Plain
from bench.baselines.protocol4 import Protocol4
from bench.baselines.unbuffered import Unbuffered
from bench.baselines.upsert import Upsert
from bench.contestant import Contestant
from bench.ours import Ours
from bench.results import Benchmark, compared
from bench.stage import Stage

_SECONDS = 2.0
_UNITS = {"rate": "1/s", "p50": "ms", "p90": "ms", "p99": "ms", "p999": "ms"}


def append(stage: Stage) -> Iterator[Benchmark]:
    """Fsynced, against everything. Ours only writes: flushing beside it is measured by `end_to_end`."""
    kinds = {
        "ours": Ours,
        "unbuffered": Unbuffered,
        "upsert": Upsert,
        "protocol4": Protocol4,
        "plain": Plain,
        "batched": Batched,
        "limit": Limit,
    }
    yield from _at(stage, kinds, (1, 32, 256, 1000), lazy=False)


def append_lazy(stage: Stage) -> Iterator[Benchmark]:
    """With the server's default sync, where nothing waits for the disk and only work per message counts."""
    kinds = {"ours": Ours, "plain": Plain, "limit": Limit}
    yield from _at(stage, kinds, (32, 256), lazy=True)


def _at(
    stage: Stage, kinds: Mapping[str, type[Contestant]], levels: Sequence[int], *, lazy: bool
) -> Iterator[Benchmark]:
    with stage.workers(stage.place(lazy=lazy), **kinds) as workers:
        for callers in levels:
            numbers = {name: iter(range(1_000_000)) for name in workers}

            def load(name: str, callers: int = callers, numbers: Any = numbers) -> dict[str, float]:
                # Threads of their own in every round: histories stay short, as for everybody.
                label = f"{callers}-{next(numbers[name])}"
                found: dict[str, float] = workers[name].call(
                    "load", callers=stage.count(callers, 32), seconds=stage.seconds(_SECONDS), label=label
                )
                return found

            found = stage.interleave({name: partial(load, name) for name in workers})
            suffix = "_lazy" if lazy else ""
            for what, unit in _UNITS.items():
                values = {name: [r[what] for r in results] for name, results in found.items()}
                yield compared(f"append_{callers}{suffix}.{what}", unit, values)
