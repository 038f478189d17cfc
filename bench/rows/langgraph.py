"""`langgraph_steps_{1,32,256}`, `langgraph_react`, `langgraph_burst`: checkpoints against LangGraph's own saver."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from bench.counters import Counters
from bench.langgraph_savers import OurSaver, PlainSaver
from bench.results import Benchmark, compared
from bench.rows.append import UNITS
from bench.stage import Kind, Stage, server_of
from bench.stored import stored
from bench.worker import Worker

_SECONDS = 3.0
_THREADS, _TURNS = 64, 4
_BURST = 1000
#: Sets of threads in a round, one after another: one takes a second, of which a collection of garbage is a tenth.
_SETS = 4

_BASELINES: dict[str, Kind] = {"AsyncPostgresSaver": PlainSaver, "without its lock": (PlainSaver, {"unlocked": True})}


def langgraph_steps(stage: Stage) -> Iterator[Benchmark]:
    """Measure `aput` and `aput_writes` per step. Ours only writes, as in `append`; `langgraph_react` also flushes."""
    kinds: dict[str, Kind] = {"ours": (OurSaver, {"flusher": False}), **_BASELINES}
    place, servers = stage.place(), {name: server_of(kind) for name, kind in kinds.items()}
    with stage.workers_at({name: (place, kind) for name, kind in kinds.items()}) as workers:
        for callers in (1, 32, 256):
            numbers = {name: iter(range(1_000_000)) for name in workers}

            def load(name: str, callers: int = callers, numbers: Any = numbers) -> dict[str, float]:
                load = {"callers": stage.count(callers, 16), "seconds": stage.seconds(_SECONDS)}
                label = f"{callers}-{next(numbers[name])}"
                return stored(
                    place,
                    servers[name],
                    lambda: workers[name].call("load", label=label, **load),
                    done=lambda done: 2 * done["done"],  # a checkpoint's text, and a task's
                )

            found = stage.interleave({name: partial(load, name) for name in workers})
            for what, unit in UNITS.items():
                values = {name: [r[what] for r in results] for name, results in found.items()}
                yield compared(f"langgraph_steps_{callers}.{what}", unit, values)


def langgraph_react(stage: Stage) -> Iterator[Benchmark]:
    """Measure a whole graph on 64 concurrent threads, durability="sync", and Postgres' work per turn."""
    threads, turns = stage.count(_THREADS, 8), stage.count(_TURNS, 1)
    kinds: dict[str, Kind] = {"ours": OurSaver, **_BASELINES, "durability exit": PlainSaver}
    found = _turns(stage, kinds, threads, turns, sets=stage.count(_SETS, 1))
    for what, unit in (("seconds", "s"), ("transactions", "transactions"), ("wal", "bytes")):
        values = {name: [r[what] for r in results] for name, results in found.items()}
        yield compared(f"langgraph_react.{what}", unit, values)


def langgraph_burst(stage: Stage) -> Iterator[Benchmark]:
    """Measure 1000 runs of a whole graph that begin at once, on new threads, until the last one ends."""
    found = _turns(stage, {"ours": OurSaver, **_BASELINES}, stage.count(_BURST, 80), turns=1, sets=1)
    yield compared("langgraph_burst.seconds", "s", {name: [r["seconds"] for r in found[name]] for name in found})


def _turns(
    stage: Stage, kinds: dict[str, Kind], threads: int, turns: int, *, sets: int
) -> dict[str, list[dict[str, float]]]:
    """Run a whole graph on sets of concurrent threads, one set after another; a first round is not counted."""
    places = {name: stage.place() for name in kinds}
    messages = 4 * threads * turns * sets  # question, call of the tool, its answer, answer
    with stage.workers_at({name: (places[name], kind) for name, kind in kinds.items()}) as workers:
        numbers = iter(range(1_000_000))

        def run(name: str) -> dict[str, float]:
            labels = [f"r{next(numbers)}" for _ in range(sets)]
            return stored(
                places[name],
                server_of(kinds[name]),
                lambda: _measured(stage, workers[name], labels, threads, turns, name),
                done=lambda _: messages,
                size=1024,
            )

        for name in workers:  # a graph's first turns are slower by a half, whoever saves them
            run(name)
        return stage.interleave({name: partial(run, name) for name in workers})


def _measured(stage: Stage, worker: Worker, labels: list[str], threads: int, turns: int, name: str) -> dict[str, float]:
    load = {"threads": threads, "turns": turns, "durability": "exit" if name == "durability exit" else "sync"}
    before = Counters.now(stage.servers.dsn, fresh=True)
    seconds = [worker.call("react", label=label, **load) for label in labels]
    worker.call("flush")
    after = Counters.now(stage.servers.dsn)
    done = len(labels) * threads * turns
    return {
        "seconds": sum(seconds),
        "transactions": (after.transactions - before.transactions) / done,
        "wal": (after.wal - before.wal) / done,
    }
