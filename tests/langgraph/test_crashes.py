"""A process is killed at a crash point: no acknowledged checkpoint is lost, doubled or torn."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from bufstore.embedded import Servers
from bufstore.failpoints import Failpoint
from langgraph_savers import Place
from langgraph_worker import STEPS, THREADS, acknowledged
from thorough import FACTOR

#: Points where a crash falls between two steps that must be atomic; `make thorough` tries more.
_POINTS = (
    Failpoint.PUBLISH_ACKED,
    Failpoint.FLUSH_APPLIED,
    Failpoint.FLUSH_COMMITTED,
    *((Failpoint.RECEIPT_BEFORE, Failpoint.FLUSH_REPORTED, Failpoint.TAKE_RAISED) if FACTOR > 1 else ()),
)


async def test_what_was_acknowledged_survives_a_kill_at_any_point(servers: Servers, tmp_path: Path) -> None:
    places = asyncio.Semaphore(2)

    async def sweep(point: Failpoint) -> None:
        async with places:
            await _sweep(servers, point, tmp_path / str(point.value), random.Random(f"1 {point}"))

    async with asyncio.TaskGroup() as group:
        for point in _POINTS:
            group.create_task(sweep(point))


async def _sweep(servers: Servers, point: Failpoint, history: Path, chance: random.Random) -> None:
    place = Place(servers)
    visit = 1 if point is Failpoint.TAKE_RAISED else chance.randint(1, 4)
    ended = await _live(place, history, point, visit)
    if ended == 0:  # Postgres stood still, so that fewer flushes had it all
        ended = await _live(place, history, point, 1)
    assert ended == -signal.SIGKILL, "it was reached"
    assert await _live(place, history, None, 1) == 0
    told = acknowledged(history)
    assert sum(map(len, told.values())) >= THREADS * STEPS
    async with place.saver() as saver:
        assert (await saver.engine.buffer.verify()).ok
    async with place.plain() as plain:
        for thread_id, checkpoints in told.items():
            named: Any = {"configurable": {"thread_id": thread_id}}
            found = {i.config["configurable"]["checkpoint_id"]: i async for i in plain.alist(named)}
            assert checkpoints.keys() <= found.keys()
            for id_, written in checkpoints.items():
                values = found[id_].checkpoint["channel_values"]
                assert values.keys() == found[id_].checkpoint["channel_versions"].keys()
                assert [id_] in values.values()
                assert not written or found[id_].pending_writes == [("task", "a", id_)]
                parent = found[id_].parent_config
                assert parent is None or parent["configurable"]["checkpoint_id"] in found
            # The checkpoints form one line without forks: each was saved on the last one that was read.
            parents = [i.parent_config and i.parent_config["configurable"]["checkpoint_id"] for i in found.values()]
            assert len(set(parents)) == len(parents)


async def _live(place: Place, history: Path, point: Failpoint | None, visit: int) -> int:
    options = {
        "nats": place.nats,
        "postgres": place.dsn,
        "schema": place.schema,
        "log": dataclasses.asdict(place.log),
        "history": str(history),
        "point": point,
        "visit": visit,
    }
    tests = str(Path(__file__).parents[1])
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "langgraph_worker", json.dumps(options)),
        env={**os.environ, "PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])},
        stderr=subprocess.PIPE,
    )
    try:
        _, said = await asyncio.wait_for(process.communicate(), 120)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode in (0, -signal.SIGKILL), said.decode()
    return process.returncode
