"""Plots (PNG) of a `latest.json`: latency percentiles, throughput over concurrency and processes, growth, coalescing.

They show only what the file holds; a plot whose rows are missing in it is not drawn.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot

_Entries = Mapping[str, Mapping[str, Any]]
_PERCENTILES = {"p50": "50 %", "p90": "90 %", "p99": "99 %", "p999": "99.9 %"}
_LEVELS = (1, 32, 256, 1000)


def draw(results: Path, folder: Path) -> Iterator[Path]:
    """Draw the plots that `results` allows into `folder`, and yield the files."""
    found = json.loads(results.read_text())
    entries = {entry["name"]: entry for entry in found["benchmarks"]}
    plots: Mapping[str, Callable[[_Entries], Any]] = {
        "latency": _latency,
        "throughput": _throughput,
        "processes": _processes,
        "growth": _growth,
        "coalescing": _coalescing,
    }
    for name, plot in plots.items():
        figure = plot(entries)
        if figure is not None:
            path = folder / f"{name}.png"
            figure.savefig(path, dpi=110)
            pyplot.close(figure)
            yield path


def _values(entry: Mapping[str, Any]) -> dict[str, float]:
    """Return the values of ours and of the baselines."""
    return {"ours": entry["ours"], **entry["baselines"]}


def _panels(count: int) -> tuple[Any, Sequence[Any]]:
    figure, axes = pyplot.subplots(1, count, figsize=(5.2 * count, 4.2), squeeze=False, layout="constrained")
    return figure, axes[0]


def _line(axis: Any, name: str, xs: Sequence[Any], ys: Sequence[float]) -> None:
    axis.plot(xs, ys, marker="o", label=name, linewidth=3 if name == "ours" else 1.2, zorder=3 if name == "ours" else 2)


def _latency(entries: _Entries) -> Any:
    levels = [n for n in _LEVELS if f"append_{n}.p50" in entries]
    if not levels:
        return None
    figure, axes = _panels(len(levels))
    for axis, level in zip(axes, levels, strict=True):
        table = [_values(entries[f"append_{level}.{p}"]) for p in _PERCENTILES]
        for name in table[0]:
            _line(axis, name, list(_PERCENTILES.values()), [row[name] for row in table])
        axis.set(title=f"{level} callers", yscale="log", xlabel="percentile", ylabel="time of one append, ms")
    axes[0].legend()
    return figure


def _throughput(entries: _Entries) -> Any:
    levels = [n for n in _LEVELS if f"append_{n}.rate" in entries]
    if not levels:
        return None
    figure, (axis,) = _panels(1)
    table = [_values(entries[f"append_{n}.rate"]) for n in levels]
    for name in table[0]:
        _line(axis, name, [str(n) for n in levels], [row[name] for row in table])
    axis.set(title="appends, fsynced", yscale="log", xlabel="callers", ylabel="checkpoints/s")
    axis.legend()
    return figure


def _processes(entries: _Entries) -> Any:
    pattern = re.compile(r"append_(\d+x\d+)\.rate")
    shapes = [match[1] for name in entries if (match := pattern.fullmatch(name))]
    if not shapes:
        return None
    titles = {"": "threads of their own", "_shared": "threads of all", "_far": "one process 2 ms away"}
    figure, axes = _panels(len(titles))
    for axis, (how, title) in zip(axes, titles.items(), strict=True):
        table = [_values(entries[f"append_{shape}{how}.rate"]) for shape in shapes]
        for name in table[0]:
            _line(axis, name, shapes, [row[name] for row in table])
        axis.set(title=title, xlabel="processes x callers", ylabel="checkpoints/s of all")
        axis.set_ylim(bottom=0)
    axes[0].legend()
    return figure


def _growth(entries: _Entries) -> Any:
    sizes = ["growth_length.bytes", "growth_length_whole.bytes"]
    times = ["growth_length.p50", "growth_length_whole.p50"]
    history = [name for name in entries if name.startswith("growth_history_")]
    panels = [names for names in (sizes, times, history) if all(n in entries for n in names) and names]
    if not panels:
        return None
    figure, axes = _panels(len(panels))
    for axis, names in zip(axes, panels, strict=True):
        for name in names:
            values = _values(entries[name])
            ours = values.pop("ours")
            points = sorted((_first_number(what), value) for what, value in values.items())
            # "ours" is the largest, ten times the one before.
            points.append((points[-1][0] * 10, ours))
            label = name.partition("growth_")[2].rpartition(".")[0].replace("_", " ")
            axis.plot([x for x, _ in points], [y for _, y in points], marker="o", label=label)
        unit = entries[names[0]]["unit"]
        over = "checkpoints in the store" if names is history else "messages in the thread"
        axis.set(xscale="log", xlabel=over, ylabel="bytes in the log" if unit == "bytes" else "p50, ms")
        if unit == "ms":
            axis.set(yscale="log")
        else:  # from zero, so that a few more bytes do not look like growth
            axis.set_ylim(bottom=0)
        axis.legend()
    return figure


def _first_number(text: str) -> int:
    found = re.search(r"\d+", text)
    return int(found[0]) if found else 0


def _coalescing(entries: _Entries) -> Any:
    pattern = re.compile(r"coalescing_t(\d+)_r([\d.]+)_w(\d+)ms\.per_(transaction|row)")
    curves: dict[str, dict[tuple[int, float], list[tuple[int, float]]]] = {"transaction": {}, "row": {}}
    for name, entry in entries.items():
        if match := pattern.fullmatch(name):
            threads, rate, window, what = int(match[1]), float(match[2]), int(match[3]), match[4]
            curves[what].setdefault((threads, rate), []).append((window, entry["ours"]))
    if not curves["transaction"]:
        return None
    figure, axes = _panels(2)
    for axis, (what, lines) in zip(axes, curves.items(), strict=True):
        for (threads, rate), points in sorted(lines.items()):
            label = f"{threads} threads, {rate:g}/s"
            axis.plot([w for w, _ in points], [y for _, y in points], marker="o", label=label)
        row = "row of a thread" if what == "row" else what
        axis.set(xscale="log", yscale="log", xlabel="window, ms", ylabel=f"checkpoints per {row}")
    axes[0].legend(fontsize="small")
    return figure


if __name__ == "__main__":
    for drawn in draw(Path(sys.argv[1]), Path(sys.argv[1]).parent):
        print(drawn)
