"""A process that saves checkpoints and kills itself at one failpoint: `python -m langgraph_worker OPTIONS`.

Two instances on one log each write to some threads. The process writes a checkpoint's id to the history before the
write, and again once it is acknowledged. What an earlier life was acknowledged must be readable.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, TextIO

from bufstore import BufferConfig, LogConfig, failpoints
from bufstore.failpoints import Failpoint
from bufstore.langgraph import AsyncBufferedSaver, PostgresCheckpointStore
from langgraph_savers import checkpoint, config

THREADS, STEPS = 8, 12


class Life:
    """One run of the process, from its start to its kill."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options, self._visits = options, 0
        path = Path(options["history"])
        self._told = acknowledged(path)
        self._history: TextIO = path.open("a")

    def _reached(self, point: Failpoint) -> None:
        if point == self._options["point"]:
            self._visits += 1
            if self._visits == self._options["visit"]:
                os.kill(os.getpid(), signal.SIGKILL)

    async def live(self) -> None:
        failpoints.active = self._reached
        savers = [await self._opened() for _ in range(2)]
        async with asyncio.TaskGroup() as group:
            for number in range(THREADS):
                group.create_task(self._talk(savers, f"thread-{number}"))
        for saver in savers:
            await saver.aclose()

    async def _opened(self) -> AsyncBufferedSaver:
        schema = self._options["schema"]
        store = PostgresCheckpointStore(
            self._options["postgres"], schema=schema, buffer_schema=f"{schema}_b", pool_size=3
        )
        log = BufferConfig.fitting(LogConfig(**self._options["log"]), flush_interval_s=0.1, lease_s=4)
        return await AsyncBufferedSaver.open(store, nats=self._options["nats"], config=log)

    async def _talk(self, savers: list[AsyncBufferedSaver], thread_id: str) -> None:
        told = self._told.get(thread_id, {})
        for number in range(STEPS):
            saver = savers[number % 2]
            found = await saver.aget_tuple(config(thread_id))
            last = found.config["configurable"]["checkpoint_id"] if found is not None else ""
            assert last >= max(told, default=""), "a checkpoint that was acknowledged is not read"
            before = dict(found.checkpoint) if found is not None else {}
            new = {
                "ab"[number % 2]: saver.get_next_version(
                    max(before.get("channel_versions", {}).values(), default=None), None
                )
            }
            versions = {**before.get("channel_versions", {}), **new}
            made = checkpoint(versions, {**before.get("channel_values", {})})
            made["channel_values"]["ab"[number % 2]] = [made["id"]]
            at = config(thread_id, last or None)
            self._note("begin", thread_id, made["id"])
            at = await saver.aput(at, made, {"source": "loop", "step": number, "parents": {}}, new)
            self._note("put", thread_id, made["id"])
            await saver.aput_writes(at, [("a", made["id"])], "task")
            self._note("written", thread_id, made["id"])
            told = {**told, made["id"]: True}

    def _note(self, *what: str) -> None:
        self._history.write(" ".join(what) + "\n")
        self._history.flush()


def acknowledged(history: Path) -> dict[str, dict[str, bool]]:
    """Return each thread's acknowledged checkpoints, with True if a checkpoint's writes were acknowledged too."""
    found: dict[str, dict[str, bool]] = {}
    for line in history.read_text().splitlines() if history.exists() else ():
        what, thread_id, id_ = line.split()
        if what != "begin":
            found.setdefault(thread_id, {})[id_] = what == "written"
    return found


if __name__ == "__main__":
    asyncio.run(Life(json.loads(sys.argv[1])).live())
