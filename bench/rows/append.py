"""`append_{1,32,256,1000}`, `append_{32,256}_lazy` and `append_256_lanes`: how fast checkpoints are acknowledged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

from bench import processor
from bench.baselines.batched import Batched
from bench.baselines.limit import Limit
from bench.baselines.limit_groups import LimitGroups
from bench.baselines.plain import Plain
from bench.baselines.protocol4 import Protocol4
from bench.baselines.unbuffered import Unbuffered
from bench.baselines.upsert import Upsert
from bench.contestant import Contestant, Place
from bench.ours import Ours
from bench.results import Benchmark, compared
from bench.stage import Stage
from bench.stored import stored

_SECONDS = 2.0
UNITS = {"rate": "1/s", "p50": "ms", "p90": "ms", "p99": "ms", "p999": "ms", **processor.UNITS}


def append(stage: Stage) -> Iterator[Benchmark]:
    """Measure fsynced appends of all contestants. Ours only writes: `end_to_end` measures flushing as well."""
    kinds = {
        "ours": Ours,
        "unbuffered": Unbuffered,
        "upsert": Upsert,
        "protocol4": Protocol4,
        "plain": Plain,
        "batched": Batched,
        "limit": Limit,
        "limit_groups": LimitGroups,
    }
    yield from at_levels(stage, stage.place(), kinds, (1, 32, 256, 1000))


def append_lazy(stage: Stage) -> Iterator[Benchmark]:
    """Measure with the server's default sync, where nothing waits for the disk and only the work per message counts."""
    kinds = {"ours": Ours, "plain": Plain, "limit": Limit, "limit_groups": LimitGroups}
    yield from at_levels(stage, stage.place(lazy=True), kinds, (32, 256), "_lazy")


class TwoLanes(Ours):
    """*ours* with two logs on one server."""

    lanes = 2

    def __init__(self, place: Place) -> None:
        super().__init__(replace(place, name=f"{place.name}-lanes"))


def append_lanes(stage: Stage) -> Iterator[Benchmark]:
    """Measure the cost of lanes where they gain nothing: both logs share server, disk and two cores."""
    yield from at_levels(stage, stage.place(), {"ours": TwoLanes, "one lane": Ours}, (256,), "_lanes")


def at_levels(
    stage: Stage,
    place: Place,
    kinds: Mapping[str, type[Contestant]],
    levels: Sequence[int],
    suffix: str = "",
    opened: Callable[[], None] = lambda: None,
) -> Iterator[Benchmark]:
    """Measure `append_{level}{suffix}` for each number of callers; `opened` is called once all contestants are open."""
    with stage.workers(place, **kinds) as workers:
        opened()
        for callers in levels:
            numbers = {name: iter(range(1_000_000)) for name in workers}

            def load(name: str, callers: int = callers, numbers: Any = numbers) -> dict[str, float]:
                # New threads in every round, for every contestant, so that histories stay short.
                label = f"{callers}-{next(numbers[name])}"
                count, seconds = stage.count(callers, 32), stage.seconds(_SECONDS)
                return stored(
                    place,
                    kinds[name].server,
                    lambda: workers[name].call("load", callers=count, seconds=seconds, label=label),
                    done=itemgetter("done"),
                )

            found = stage.interleave({name: partial(load, name) for name in workers})
            for what, unit in UNITS.items():
                values = {name: [r[what] for r in results] for name, results in found.items()}
                yield compared(f"append_{callers}{suffix}.{what}", unit, values)
