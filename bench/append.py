"""How fast checkpoints are acknowledged: buffered, against what people would use instead, side by side.

    python bench/append.py [--seconds S] [--rounds N]      (make bench-quick)

On the same embedded servers, fsync on for both (NATS ``sync_interval: always``, Postgres ``synchronous_commit`` on):

* *buffered*: ``BufferedThreadStore.checkpoint_append`` of one message of 2 KiB, each caller on a thread of its own, its
  flusher running beside it.
* *unbuffered*: the same call on ``PostgresThreadStore``, pool of 16: one round trip per checkpoint.
* *upsert*: one bare single-row upsert per checkpoint, autocommit, pool of 16: the least any Postgres store could do.

Rounds are interleaved; medians of the rounds. Ratios are "more is better".
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from psycopg_pool import AsyncConnectionPool
from rich.console import Console
from rich.table import Table

from bufstore import BufferedThreadStore, PostgresThreadStore, Run
from bufstore.embedded import Servers

CALLERS = (1, 32, 256)
PAYLOAD = 2048
Step = Callable[[int, int], Awaitable[Any]]


async def measure(step: Step, callers: int, seconds: float) -> dict[str, float]:
    """Checkpoints per second and latencies (ms) of `callers` calling `step(caller, number)` for `seconds`."""
    latencies: list[float] = []
    end = time.perf_counter() + seconds

    async def caller(who: int) -> None:
        number = 0
        while (began := time.perf_counter()) < end:
            await step(who, number)
            latencies.append(time.perf_counter() - began)
            number += 1

    began = time.perf_counter()
    await asyncio.gather(*(caller(i) for i in range(callers)))
    rate = len(latencies) / (time.perf_counter() - began)
    latencies.sort()
    return {
        "rate": rate,
        "p50_ms": 1000 * latencies[len(latencies) // 2],
        "p99_ms": 1000 * latencies[int(len(latencies) * 0.99)],
    }


async def compare(servers: Servers, rounds: int, seconds: float) -> list[dict[str, Any]]:
    """All rows of the table."""
    text = "x" * PAYLOAD
    round_ = 0

    def append(store: Any) -> Step:
        async def step(who: int, number: int) -> None:
            thread_id = f"{round_}-{who}"
            await store.checkpoint_append(thread_id, [text], Run(run_id=f"run-{thread_id}", thread_id=thread_id))

        return step

    async with (
        await BufferedThreadStore.open(PostgresThreadStore(servers.postgres.dsn), nats=servers.nats.url) as buffered,
        PostgresThreadStore(servers.postgres.dsn, schema="unbuffered") as unbuffered,
        AsyncConnectionPool(servers.postgres.dsn, min_size=16, kwargs={"autocommit": True}) as pool,
    ):
        await unbuffered.setup()
        async with pool.connection() as connection:
            await connection.execute("CREATE TABLE plain (id text PRIMARY KEY, body text)")

        async def upsert(who: int, number: int) -> None:
            async with pool.connection() as connection:
                await connection.execute(
                    "INSERT INTO plain VALUES (%s, %s) ON CONFLICT (id) DO UPDATE SET body = excluded.body",
                    [f"{round_}-{who}", text],
                )

        steps = {"buffered": append(buffered), "unbuffered": append(unbuffered), "upsert": upsert}
        rows = []
        for callers in CALLERS:
            found: dict[str, list[dict[str, float]]] = {name: [] for name in steps}
            for _ in range(rounds):
                round_ += 1
                for name, step in steps.items():
                    found[name].append(await measure(step, callers, seconds))
                    await buffered.force_flush_all(timeout_s=120)
            for unit in ("rate", "p50_ms", "p99_ms"):
                medians = {name: statistics.median(r[unit] for r in results) for name, results in found.items()}
                ours = medians.pop("buffered")
                ratios = {n: ours / v if unit == "rate" else v / ours for n, v in medians.items()}
                rows.append(
                    {
                        "name": f"append_{callers}.{unit}",
                        "unit": unit,
                        "ours": ours,
                        "baselines": medians,
                        "ratios": ratios,
                    }
                )
    return rows


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=3.0, help="length of one measurement")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    try:
        from uvloop import run
    except ImportError:
        run = asyncio.run
    with Servers() as servers:
        rows = run(compare(servers, options.rounds, options.seconds))
    table = Table("", "buffered", "unbuffered", "×", "upsert", "×", title="appends, fsynced; medians")
    for row in rows:
        cells = [f"{row['ours']:.1f}"]
        for name, value in row["baselines"].items():
            cells += [f"{value:.1f}", f"{row['ratios'][name]:.2f}"]
        table.add_row(row["name"], *cells)
    Console().print(table)
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    machine = {"cores": os.cpu_count(), "system": platform.system(), "python": platform.python_version()}
    (results / "latest.json").write_text(json.dumps({"machine": machine, "benchmarks": rows}, indent=1) + "\n")


main()
