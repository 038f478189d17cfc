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
    """Print all figures, in a table for each family of rows."""
    console.print("; ".join(f"{name}: {value}" for name, value in machine.items()), highlight=False, soft_wrap=True)
    shown = [b for b in benchmarks if not b.name.endswith(_HIDDEN)]
    surface = [b for b in shown if b.name.startswith("coalescing_")]
    rest = [b for b in shown if b not in surface]
    for (title, _), group in groupby(rest, key=lambda b: (b.name.split("_")[0].split(".")[0], tuple(b.baselines))):
        console.print(_table(title, list(group)))
    if surface:
        console.print(_surface(surface))
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


def _surface(benchmarks: Sequence[Benchmark]) -> Table:
    """Return the table of threads and step rate over windows: checkpoints per transaction, and per row of a thread."""
    title = "coalescing: checkpoints per transaction · per row of a thread (threads, steps/s; windows)"
    table = Table(title=title, title_justify="left")
    cells: dict[str, dict[str, list[str]]] = {}
    for benchmark in benchmarks:
        _, threads, rate, window = benchmark.name.rpartition(".")[0].split("_")
        found = cells.setdefault(f"{threads[1:]} threads, {rate[1:]}/s", {}).setdefault(window[1:], [])
        found.append(number(benchmark.entry()["ours"]))
    table.add_column("")
    for window in next(iter(cells.values())):
        table.add_column(window, justify="right")
    for name, row in cells.items():
        table.add_row(name, *(" · ".join(both) for both in row.values()))
    return table


def number(value: float) -> str:
    """Return a figure with three significant digits."""
    return f"{value:,.0f}".replace(",", " ") if abs(value) >= 100 else f"{value:.3g}"
