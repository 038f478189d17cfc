"""`python -m bench.profile`: where the time goes; the source of figures in bench/README.md.

Not a row of the table: nothing is compared. A profiler makes Python slower, so times without it come first.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from statistics import median

import psutil
from rich.console import Console
from rich.table import Table

from bench.baselines.upsert import Upsert
from bench.ours import Ours
from bench.profile.savers import TimedMemorySaver, TimedPlainSaver, TimedSaver
from bench.profile.timed import CollectedOurs, TimedDrainer, TimedLimit, TimedOurs
from bench.rows.backlog import backlog, fresh_options
from bench.rows.end_to_end import BoundedWriter
from bench.servers import BenchServers
from bench.spark import SparkJobs
from bench.stage import Kind, Stage
from bench.worker import Worker

_SIZES = (1, 8, 32, 128, 256, 1000)
_CALLERS = 256
_SECONDS = 3.0
#: For LangGraph: threads, turns on each, and rounds.
_TALKS, _TURNS, _ROUNDS = 64, 4, 5
_DRAINS = 3


def pauses(stage: Stage, console: Console) -> None:
    """The effect of full garbage collections on the tail of append latencies."""
    table = Table("callers", "collector", "1/s", "p50 ms", "p99 ms", "full collections", "longest ms")
    with stage.workers(ours=CollectedOurs) as workers:
        for callers in (256, 1000):
            for collect in (True, False):
                label = f"{callers}-{collect}"
                seconds = stage.seconds(_SECONDS)
                found = workers["ours"].call(
                    "collected", callers=callers, seconds=seconds, label=label, collect=collect
                )
                figures = [f"{found[name]:.1f}" for name in ("rate", "p50", "p99", "collections", "longest")]
                table.add_row(f"{callers}", "on" if collect else "off", *figures)
    console.print(table)


def batches(stage: Stage, console: Console) -> None:
    """The server's time for a batch, whoever writes it."""
    with stage.workers(limit=TimedLimit) as workers:
        seconds = stage.seconds(1.0)
        found = [workers["limit"].call("batches", size=n, seconds=seconds) for n in _SIZES]
    title = "an atomic batch, one after another, ms (1: a plain message)"
    table = Table("messages", *map(str, _SIZES), title=title)
    table.add_row("p50", *(f"{ms:.2f}" for ms in found))
    console.print(table)


def append(stage: Stage, console: Console) -> None:
    """The cost of a checkpoint for its process."""
    with stage.workers(stage.place(lazy=True), ours=TimedOurs) as workers:
        load = {"callers": _CALLERS, "seconds": stage.seconds(_SECONDS)}
        result, spent = workers["ours"].call("timed", name="load", label="a", **load)
        each = 1e6 * spent / (result["rate"] * load["seconds"])
        console.print(f"checkpoint_append, {_CALLERS} callers: {each:.0f} µs of the processor each, in the writer")
        console.print(workers["ours"].call("profiled", name="load", label="b", **load), highlight=False)


def langgraph(stage: Stage, console: Console) -> None:
    """The cost of a step and a turn of LangGraph, and the share of LangGraph itself: see the rows of these names."""
    table = Table(
        "",
        *("a step, µs of the processor", "steps/s", "a ReAct turn, ms of the processor", "turns/s"),
        title=f"{_CALLERS} callers; {_TALKS} threads; in the process of the saver, medians of {_ROUNDS} rounds",
    )
    kinds: dict[str, Kind] = {
        "AsyncPostgresSaver": TimedPlainSaver,
        "without its lock": (TimedPlainSaver, {"unlocked": True}),
        "ours, without a flusher": (TimedSaver, {"flusher": False}),
        "ours": TimedSaver,
        "InMemorySaver": TimedMemorySaver,
    }
    found: dict[str, list[list[float]]] = {name: [] for name in kinds}
    threads = stage.count(_TALKS, 4)
    with stage.workers_at({name: (stage.place(), kind) for name, kind in kinds.items()}) as workers:
        for number in range(_ROUNDS):
            for name, worker in sorted(workers.items(), reverse=bool(number % 2)):
                # In memory, each second takes some hundred MB.
                load = {"callers": stage.count(_CALLERS, 8), "seconds": stage.seconds(1.0), "label": f"s{number}"}
                steps = worker.call("load", **load)
                if name == "ours":
                    worker.call("flush")
                talks = {"threads": threads, "turns": _TURNS, "durability": "sync", "label": f"r{number}"}
                took, spent = worker.call("timed", name="react", **talks)
                turns = threads * _TURNS
                found[name].append([steps["client_cpu"], steps["rate"], 1e3 * spent / turns, turns / took])
                if name == "ours":
                    worker.call("flush")
        load = {"callers": stage.count(_CALLERS, 8), "seconds": stage.seconds(1.0), "label": "profile"}
        where = workers["ours, without a flusher"].call("profiled", name="load", **load)
    for name, rounds in found.items():
        step, rate, turn, turns_rate = (median(figures) for figures in zip(*rounds, strict=True))
        table.add_row(name, f"{step:.0f}", f"{rate:.0f}", f"{turn:.2f}", f"{turns_rate:.0f}")
    console.print(table)
    console.print(where, highlight=False)


def drain(stage: Stage, console: Console) -> None:
    """The cost of a backlog's entry in each process, and the flusher's own profile."""
    what = backlog(stage)
    table = Table("", *_DRAINING, "all", "1/s", title="drain: µs of the processor for an entry, and rate")
    for number in range(_DRAINS):
        with stage.workers(what.place, flusher=(TimedDrainer, {"flusher": True, **fresh_options(stage)})) as workers:
            before, began = _processes(workers), time.perf_counter()
            workers["flusher"].call("drained", entries=what.entries)
            took = time.perf_counter() - began
            spent = {n: s - before.get(n, 0.0) for n, s in _processes(workers).items()}
        table.add_row(f"{number + 1}", *_each(spent, what.entries, _DRAINING), f"{what.entries / took:.0f}")
    console.print(table)
    with stage.workers(what.place, flusher=(TimedDrainer, {"flusher": True, **fresh_options(stage)})) as workers:
        found = workers["flusher"].call("profiled", name="drained", entries=what.entries)
    console.print(found, highlight=False)


def end_to_end(stage: Stage, console: Console) -> None:
    """The cost of a checkpoint in each process, from the call to its row in Postgres."""
    names = ("writer", "flusher", "nats-server", "postgres", "all", "1/s")
    table = Table("", *names, title="end to end: µs of the processor for a checkpoint, and rate")
    seconds = max(stage.seconds(12.0), 1.5)
    for name, threads in (("distinct threads", 10_000), ("256 hot threads", 256)):
        with stage.workers(flusher=(Ours, {"flusher": True}), writer=BoundedWriter) as workers:
            call = {"seconds": seconds, "threads": stage.count(threads, 32), "label": "x"}
            workers["writer"].call("load_bounded", **call | {"seconds": max(seconds / 4, 1.5)})
            before, began = _processes(workers), time.perf_counter()
            rate = workers["writer"].call("load_bounded", **call)
            took = time.perf_counter() - began
            spent = {n: s - before[n] for n, s in _processes(workers).items()}
        table.add_row(name, *_each(spent, rate * took), f"{rate:.0f}")
    with stage.workers(writer=Upsert) as workers:
        call = {"callers": _CALLERS, "seconds": seconds, "threads": 10_000, "label": "x"}
        before = _processes(workers)
        rate = workers["writer"].call("load_many", **call)["rate"]
        spent = {n: s - before[n] for n, s in _processes(workers).items()}
    table.add_row("upsert", *_each(spent, rate * seconds), f"{rate:.0f}")
    console.print(table)


def sink(stage: Stage, console: Console) -> None:
    """The cost of a row in each process, when Spark writes it."""
    names = ("java", "python", "nats-server", "postgres")
    table = Table("", *names, "all", "1/s", title="rows of Spark: µs of the processor for a row, and rate")
    rows = stage.count(100_000, 400)
    with stage.workers(jobs=(SparkJobs, {"cores": 2})) as workers:
        jobs = workers["jobs"]
        for how in ("log", "postgres", "upsert"):
            for label in (f"{how}-first", how):  # the first opens what stays open
                jobs.call("prepare", rows=rows, threads=max(rows // 10, 1), label=label)
                before, began = _processes(workers), time.perf_counter()
                jobs.call("write", label=label, how=how)
                took = time.perf_counter() - began
            spent = {n: s - before.get(n, 0.0) for n, s in _processes(workers).items()}
            table.add_row(how, *_each(spent, rows, names), f"{rows / took:.0f}")
    console.print(table)


_DRAINING = ("flusher", "nats-server", "postgres")
_WRITING = ("writer", "flusher", "nats-server", "postgres")


def _each(spent: Mapping[str, float], checkpoints: float, names: Sequence[str] = _WRITING) -> list[str]:
    each = {name: 1e6 * spent.get(name, 0.0) / checkpoints for name in names}
    return [f"{each[name]:.0f}" for name in names] + [f"{sum(each.values()):.0f}"]


def _processes(workers: Mapping[str, Worker]) -> dict[str, float]:
    """Return the seconds of processor time of workers, servers and their children so far, by name."""
    names = {worker.pid: name for name, worker in workers.items()}
    spent: dict[str, float] = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            # Python's process name may include its version.
            name = names.get(process.pid) or re.sub(r"^python.*", "python", process.name())
            times = process.cpu_times()
            spent[name] = spent.get(name, 0.0) + times.user + times.system
            if name == "postgres":  # of ended sessions
                spent[name] += times.children_user + times.children_system
    return spent


PARTS: Mapping[str, Callable[[Stage, Console], None]] = {
    "batches": batches,
    "append": append,
    "pauses": pauses,
    "langgraph": langgraph,
    "drain": drain,
    "end_to_end": end_to_end,
    "sink": sink,
}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m bench.profile", description="Where the time goes.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"which: {', '.join(PARTS)} (default: all)")
    parser.add_argument("--scale", type=float, default=1.0, help="shrink counts and times, to try it out")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    console = Console(width=None if Console().is_terminal else 160)
    with BenchServers() as servers:
        stage = Stage(servers, 1, options.scale)
        for name in options.parts or PARTS:
            PARTS[name](stage, console)


if __name__ == "__main__":
    main()
