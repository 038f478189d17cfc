"""The results: the form of `latest.json`, and the rounds behind it.

`latest.json` is ``{"machine": …, "benchmarks": [{"name", "unit", "ours", "baselines": {name: value}, "ratios": {name:
value}}]}``, with medians. `rounds.json` has every round.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Units in which more is better. In all others (times, sizes, counts of work) less is better.
MORE = {"1/s", "checkpoints/transaction", "checkpoints/row", "slowest/fastest"}


@dataclass(frozen=True)
class Benchmark:
    """One figure, for every round and contestant."""

    name: str
    unit: str
    ours: Sequence[float]
    baselines: Mapping[str, Sequence[float]]

    def entry(self) -> dict[str, Any]:
        """Return the medians and ratios; a ratio above 1 means that ours is better."""
        ours = statistics.median(self.ours)
        baselines = {name: statistics.median(values) for name, values in self.baselines.items()}
        return {
            "name": self.name,
            "unit": self.unit,
            "ours": ours,
            "baselines": baselines,
            "ratios": {name: _ratio(self.unit, ours, value) for name, value in baselines.items()},
        }

    def spread(self) -> float:
        """Return half the distance between our best and worst round, as a share of the median."""
        median = statistics.median(self.ours)
        return (max(self.ours) - min(self.ours)) / 2 / median if median else 0.0


def _ratio(unit: str, ours: float, baseline: float) -> float:
    above, below = (ours, baseline) if unit in MORE else (baseline, ours)
    return above / below if below else 0.0


def compared(name: str, unit: str, found: Mapping[str, Sequence[float]], ours: str = "ours") -> Benchmark:
    """Make a benchmark of the values that `found` has for each contestant."""
    return Benchmark(name, unit, found[ours], {who: values for who, values in found.items() if who != ours})


def write(folder: Path, machine: Mapping[str, Any], benchmarks: Sequence[Benchmark], again: Sequence[str] = ()) -> None:
    """Write both files. `again`: the rows that replace those of the run that is there; its `machine` names them."""
    folder.mkdir(parents=True, exist_ok=True)
    latest_file, rounds_file = folder / "latest.json", folder / "rounds.json"
    entries = {b.name: b.entry() for b in benchmarks}
    rounds = {b.name: {"ours": list(b.ours), **{n: list(v) for n, v in b.baselines.items()}} for b in benchmarks}
    if again:
        before = json.loads(latest_file.read_text())
        machine = before["machine"] | machine | {"again": sorted({*before["machine"].get("again", ()), *again})}
        entries = {entry["name"]: entry for entry in before["benchmarks"]} | entries
        rounds = json.loads(rounds_file.read_text()) | rounds
    latest = {"machine": machine, "benchmarks": list(entries.values())}
    latest_file.write_text(json.dumps(latest, indent=1, ensure_ascii=False) + "\n")
    rounds_file.write_text(json.dumps(rounds, ensure_ascii=False) + "\n")
