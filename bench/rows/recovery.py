"""`recovery.seconds`, `recovery_start.seconds`: how long nothing is flushed after a kill, and at a start."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

from psycopg import AsyncConnection

from bench.ours import Ours
from bench.results import Benchmark, compared
from bench.rows.backlog import backlog, fresh_options
from bench.stage import Stage
from bench.worker import Worker
from bufstore import BufferConfig

_ROUNDS_MAX = 3
_PARTITIONS = 8
_LOOK_S = 0.02
#: Half of a flusher's default lease, after which its record expires (`bufstore.buffer.flush.lease`).
_RECOVERY_MAX_S = 3.0
_START_MAX_S = 3.0


class Watcher(Ours):
    """Writes, and looks into Postgres for flushed entries."""

    async def touch(self, number: int) -> dict[int, int]:
        """Append an entry to every partition, and return the position of each."""
        found: dict[int, int] = {}
        while len(found) < _PARTITIONS:
            thread = f"touch-{number}-{len(found)}-{time.monotonic_ns()}"
            partition = self.store.buffer.subjects.partition(thread)
            if partition not in found:
                found[partition] = (await self.step(thread, 0)).thread_seq
        return found

    async def flushed(self, positions: dict[int, int]) -> float:
        """Wait until the cursors have passed these positions, and return the time (`time.time`)."""
        async with await AsyncConnection.connect(self.place.dsn, autocommit=True) as connection:
            while True:
                cursor = await connection.execute(f"SELECT partition, cursor_seq FROM {self.schema}.buffer_partitions")
                at: dict[int, int] = dict(await cursor.fetchall())
                if all(at.get(partition, 0) >= seq for partition, seq in positions.items()):
                    return time.time()
                await asyncio.sleep(_LOOK_S)


class Owner(Ours):
    """A flusher."""

    async def share(self) -> list[int]:
        """Wait until it shares the partitions with another flusher, and return those that it owns."""
        await self.until(lambda state: 0 < len(state["partitions"]) < _PARTITIONS)
        return list((await self.flusher())["partitions"])

    async def first_flush(self) -> float:
        """Wait until it has flushed an entry, and return the time (`time.time`)."""
        await self.until(lambda state: state["entries"] > 0)
        return time.time()


def recovery(stage: Stage) -> Iterator[Benchmark]:
    """Kill one of two flushers that share the partitions, and watch its partitions. Then: a start with a backlog."""
    # Scaled down, a shorter lease: such a run only tests that the row works.
    lease_s = BufferConfig().lease_s if stage.scale >= 1 else 4
    rounds = min(stage.rounds, _ROUNDS_MAX)
    options: dict[str, Any] = {"lease_s": lease_s}
    place = stage.place()
    with stage.workers(place, writer=(Watcher, options)) as writers:
        taken = [_killed(stage, place, writers["writer"], options, number) for number in range(rounds)]
    yield compared("recovery.seconds", "s", {"ours": taken, "3 s": [_RECOVERY_MAX_S]})

    what = backlog(stage)
    started = []
    for _ in range(rounds):
        options = fresh_options(stage)
        began = time.time()
        with stage.workers(what.place, it=(Owner, {"flusher": True, **options})) as workers:
            started.append(workers["it"].call("first_flush") - began)
            workers["it"].kill()  # else it would flush the whole backlog before it ends
    yield compared("recovery_start.seconds", "s", {"ours": started, "3 s": [_START_MAX_S]})


def _killed(stage: Stage, place: Any, writer: Worker, options: dict[str, Any], number: int) -> float:
    flusher = (Owner, {"flusher": True, **options})
    with stage.workers(place, other=flusher) as others, stage.workers(place, owner=flusher) as owners:
        mine = set(owners["owner"].call("share"))
        others["other"].call("share")
        writer.call("flushed", positions=writer.call("touch", number=number))
        owners["owner"].kill()
        killed = time.time()
        positions = {p: seq for p, seq in writer.call("touch", number=number).items() if p in mine}
        return float(writer.call("flushed", positions=positions)) - killed
