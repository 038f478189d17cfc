"""`append_{32,256}_r3`, `append_{32,256}_r3_lazy`: appends that three servers store."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from bench.baselines.limit import Limit
from bench.baselines.limit_groups import LimitGroups
from bench.cluster import cluster
from bench.ours import Ours
from bench.results import Benchmark
from bench.rows.append import at_levels
from bench.stage import Stage

_LEVELS = (32, 256)


def append_r3(stage: Stage, *, always: bool) -> Iterator[Benchmark]:
    """Measure three replicas, on servers that sync always, or every two minutes."""
    kinds = {"ours": Ours, "limit": Limit, "limit_groups": LimitGroups}
    with cluster("always" if always else "2m") as servers:
        servers.check(always=always)
        here = stage.place()
        pids = {**here.pids, "nats": servers.pids}
        place = replace(here, nats=servers.url, pids=pids, replicas=len(servers.pids))
        suffix = "_r3" if always else "_r3_lazy"
        yield from at_levels(stage, place, kinds, _LEVELS, suffix, opened=servers.lead)
        servers.check(always=always)
