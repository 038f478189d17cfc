"""A requester or a worker of exclusive work in a process of its own, for `sweep.tokens`, which pauses and kills it.

It writes what it does to a history, a line each, at once: what it is about to submit, what was accepted, what it began
under which token, and what it completed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

from bufstore import BufstoreError, LogFull, LogUnavailable, NatsConfig
from bufstore.errors import SubmitUnknown, TokenQueueFull
from bufstore.tokens import ExclusiveWork, Task, TokensConfig

#: Of a hundred items: so many fail at first, so many take longer than a lease.
_FAIL, _LONG = 3, 1


class History:
    """Lines that are there although the process is killed."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, what: str, key: str, item: int, token: int = 0) -> None:
        """One event, now."""
        os.write(self._file, json.dumps([time.monotonic(), what, key, item, token]).encode() + b"\n")


async def request(work: ExclusiveWork, history: History, keys: list[str], items: int, begun: dict[str, int]) -> None:
    """Submit items 0 to `items` of each key in order; `begun`: what an earlier process has got to."""

    async def one(key: str) -> None:
        for item in range(begun.get(key, -1) + 1, items):
            history.write("submitting", key, item)
            while True:
                try:
                    await work.submit(key, str(item).encode())
                except (LogFull, TokenQueueFull, LogUnavailable):
                    await asyncio.sleep(random.uniform(0.02, 0.2))
                    continue
                except SubmitUnknown:
                    break
                history.write("accepted", key, item)
                break

    await asyncio.gather(*map(one, keys))
    history.write("requested", "", 0)


async def work_on(work: ExclusiveWork, history: History, stopping: asyncio.Event, chance: random.Random) -> None:
    """Work until told to stop."""
    finish = work._finish

    async def noted(task: Task) -> None:
        history.write("completed", task.key, int(task.payload), task.token)
        await finish(task)

    work._finish = noted  # type: ignore[method-assign]

    async def handler(task: Task) -> None:
        history.write("began", task.key, int(task.payload), task.token)
        draw = chance.randrange(100)
        await asyncio.sleep(work._config.ttl_s * 1.3 if draw < _LONG else chance.uniform(0, 0.01))
        if task.attempt == 1 and _LONG <= draw < _LONG + _FAIL:
            raise RuntimeError("as it happens")

    await work.run(handler, stopping, concurrency=8)
    history.write("found", "", work._found)


async def main(options: dict[str, Any]) -> None:
    """Open, however long that takes, and do what the role says until it is done or SIGTERM comes."""
    stopping, history = asyncio.Event(), History(Path(options["history"]))
    chance = random.Random(options["seed"])
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stopping.set)
    loop.add_signal_handler(signal.SIGUSR1, step_clock, chance)
    history.write("listening", "", 0)
    nats = NatsConfig(servers=options["servers"], user=options["user"], password=options["password"])
    while not stopping.is_set():
        with contextlib.suppress(BufstoreError):
            async with await ExclusiveWork.open(nats, TokensConfig(**options["config"])) as work:
                if options["role"] == "worker":
                    await work_on(work, history, stopping, chance)
                else:
                    await request(work, history, options["keys"], options["items"], options["begun"])
                return
        await asyncio.sleep(0.2)


_true_time, _true_time_ns = time.time, time.time_ns


def step_clock(chance: random.Random) -> None:
    """The wall clock jumps, for everybody in this process who asks Python for it."""
    offset = chance.choice((-7200, -60, 60, 7200))
    time.time = lambda: _true_time() + offset
    time.time_ns = lambda: _true_time_ns() + offset * 10**9


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
