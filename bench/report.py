"""The table on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.results import Benchmark
from bench.targets import verdicts

#: Percentiles that only the plots show.
_HIDDEN = (".p90", ".p999")


def show(machine: Mapping[str, Any], benchmarks: Sequence[Benchmark], console: Console) -> None:
    """Print everything that was measured, a table for each family of rows."""
    console.print("; ".join(f"{name}: {value}" for name, value in machine.items()), highlight=False)
    shown = [b for b in benchmarks if not b.name.endswith(_HIDDEN)]
    for family, group in groupby(shown, key=lambda b: (b.name.split("_")[0], tuple(b.baselines))):
        console.print(_table(family[0].partition(".")[0], list(group)))
    found = [met for b in benchmarks for _, _, met in verdicts(b.entry())]
    console.print(f"{sum(found)} of {len(found)} targets met")


def _table(title: str, benchmarks: Sequence[Benchmark]) -> Table:
    table = Table(title=f"{title}: medians, and the ratio to each baseline (more is better)", title_justify="left")
    table.add_column("")
    for name in ("unit", "ours", "spread", *benchmarks[0].baselines, "targets"):
        table.add_column(name, justify="left" if name in ("unit", "targets") else "right", overflow="fold")
    for benchmark in benchmarks:
        entry = benchmark.entry()
        cells = [f"{number(v)} [bold]×{entry['ratios'][n]:.2f}[/]" for n, v in entry["baselines"].items()]
        table.add_row(
            benchmark.name,
            benchmark.unit,
            number(entry["ours"]),
            f"±{100 * benchmark.spread():.0f} %",
            *cells,
            "; ".join(
                f"[{'green' if met else 'red'}]{'met' if met else 'not met'}[/] ×{least:.2f} {name}"
                for name, least, met in verdicts(entry)
            ),
        )
    return table


def number(value: float) -> str:
    """A figure with three digits that mean something."""
    return f"{value:,.0f}".replace(",", " ") if abs(value) >= 100 else f"{value:.3g}"
