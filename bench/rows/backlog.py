"""A million entries that wait in the log: built once in a run, drained again and again into fresh schemas."""

from __future__ import annotations

from dataclasses import dataclass

from bench.contestant import Place
from bench.ours import Ours
from bench.stage import Stage

#: What it creates stays until the end of the run: see `BenchServers.clear`.
NAME = "backlog"
_ENTRIES, _THREADS, _AT_ONCE = 1_000_000, 10_000, 512


@dataclass(frozen=True)
class Backlog:
    """Where it is, and how much."""

    place: Place
    entries: int


def backlog(stage: Stage) -> Backlog:
    """The backlog of this run."""
    found: Backlog | None = stage.shared.get(NAME)
    if found is None:
        place = stage.place(name=NAME)
        entries = stage.count(_ENTRIES, 2000)
        threads = max(entries * _THREADS // _ENTRIES, 1)
        stage.say(f"appending a backlog of {entries} entries")
        with stage.workers(place, writer=Ours) as workers:
            workers["writer"].call("fill", threads=threads, each=entries // threads, at_once=min(_AT_ONCE, threads))
        found = stage.shared[NAME] = Backlog(place, entries // threads * threads)
    return found


def fresh_options(stage: Stage) -> dict[str, str]:
    """Options of `Ours` for which nothing of the backlog is flushed yet."""
    name = stage.place().name
    return {"schema": name, "bucket": f"hot-{name}"}
