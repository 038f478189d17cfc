"""`database_load_{500ms,5s}.{transactions,rows,wal}`: the database's work for the same conversations."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import psycopg

from bench.baselines.once import Once
from bench.baselines.unbuffered import Unbuffered
from bench.baselines.upsert import Upsert
from bench.contestant import Contestant
from bench.counters import Counters, rows_written
from bench.ours import Ours, run_of
from bench.results import Benchmark, compared
from bench.stage import Stage
from bench.worker import Worker
from bench.workload import conversations

_SLOTS, _STEP_S = 50, 1.0
_WINDOWS = {"500ms": 0.5, "5s": 5.0}
#: The factor by which windows and steps are shortened.
_COMPRESSION = 5
_ROUNDS_MAX = 3
_UNITS = {"transactions": "transactions", "rows": "rows", "wal": "bytes"}
#: The shortest length of scaled-down conversations.
_LENGTH_MIN = 4


class Paced(Ours):
    """Writer and flusher in one process, at the pace of conversations."""

    async def owner(self, partitions: int) -> None:
        """Wait until this flusher owns all partitions: from then on it only flushes."""
        await self.until(lambda state: len(state["partitions"]) == partitions)

    async def replay(self, conversations: Sequence[Sequence[Any]], slots: int, step_s: float) -> float:
        """Take a step of each of `slots` conversations every `step_s`, at different moments."""
        waiting = list(enumerate(conversations))
        rng = random.Random(7)
        began = time.perf_counter()

        async def slot(offset: float) -> None:
            due = began + offset
            while waiting:
                number, messages = waiting.pop()
                thread = f"conversation-{number}"
                for message in messages:
                    await asyncio.sleep(max(due - time.perf_counter(), 0))
                    due += step_s
                    await self.store.checkpoint_append(thread, [message], run_of(thread))

        await asyncio.gather(*(slot(rng.random() * step_s) for _ in range(slots)))
        await self.flush()
        return time.perf_counter() - began


def database_load(stage: Stage) -> Iterator[Benchmark]:
    """Measure 50 threads at a step a second. The baselines' work does not depend on time: they run at full speed."""
    source, all_ = conversations()
    stage.shared["conversations"] = source
    chosen = all_[: stage.count(len(all_), _SLOTS)]
    length = stage.count(max(map(len, chosen)), _LENGTH_MIN)
    chosen = [messages[:length] for messages in chosen]
    stage.say(f"{sum(map(len, chosen))} steps of {len(chosen)} {source} conversations, {_SLOTS} at once")

    def baseline(kind: type[Contestant], prefix: str = "") -> dict[str, int]:
        return _measured(stage, kind, {}, prefix, {"conversations": chosen, "slots": _SLOTS})

    def ours(window_s: float) -> dict[str, int]:
        options = {"flusher": True, "flush_interval_s": window_s / _COMPRESSION}
        call = {"conversations": chosen, "slots": _SLOTS, "step_s": _STEP_S / _COMPRESSION}
        return _measured(stage, Paced, options, "", call)

    actions: dict[str, Callable[[], dict[str, int]]] = {name: partial(ours, s) for name, s in _WINDOWS.items()}
    actions["unbuffered"] = partial(baseline, Unbuffered)
    actions["upsert"] = partial(baseline, Upsert, "upsert_")
    actions["once"] = partial(baseline, Once)
    with _without_autovacuum(stage.servers.dsn):
        found = stage.interleave(actions, min(stage.rounds, _ROUNDS_MAX))
    for window in _WINDOWS:
        for what, unit in _UNITS.items():
            values = {name: [r[what] for r in rounds] for name, rounds in found.items() if name not in _WINDOWS}
            values["ours"] = [r[what] for r in found[window]]
            yield compared(f"database_load_{window}.{what}", unit, values)


@contextmanager
def _without_autovacuum(dsn: str) -> Iterator[None]:
    """What one contestant leaves behind would be cleaned up on the account of the next, and ours take the longest."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        try:
            for statement in ("ALTER SYSTEM SET autovacuum = off", "SELECT pg_reload_conf()"):
                connection.execute(statement)
            yield
        finally:
            for statement in ("ALTER SYSTEM RESET autovacuum", "SELECT pg_reload_conf()"):
                connection.execute(statement)


def _measured(
    stage: Stage, kind: type[Contestant], options: dict[str, Any], prefix: str, call: dict[str, Any]
) -> dict[str, int]:
    dsn = stage.servers.dsn
    # Each round has its own log, which stays until the row ends, and the server reserves its `max_bytes`.
    place = replace(stage.place(), log_bytes=256 << 20)
    with stage.workers(place, it=(kind, options)) as workers:
        worker: Worker = workers["it"]
        if kind is Paced:
            worker.call("owner", partitions=8)
        before = Counters.now(dsn, fresh=True)
        worker.call("replay", **call)
        after = Counters.now(dsn)
        if not prefix:
            _check(dsn, place.name, sum(map(len, call["conversations"])))
    rows = rows_written(dsn, prefix + place.name)
    return {"transactions": after.transactions - before.transactions, "rows": rows, "wal": after.wal - before.wal}


def _check(dsn: str, schema: str, messages: int) -> None:
    with psycopg.connect(dsn) as connection:
        found = connection.execute(f"SELECT count(*) FROM {schema}.messages").fetchone()
    assert found == (messages,), f"{found} of {messages} messages arrived"
