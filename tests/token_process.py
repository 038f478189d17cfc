"""A requester or worker of exclusive work in a process of its own, for `sweep.tokens`, which pauses and kills it.

It appends a line to a history at once for each event: an item that is about to be submitted, was accepted, begun (with
its token) or completed. A worker also cancels some of its own calls for work, and takes locks: it writes when it
believed that it held one.
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
from bufstore.errors import SubmitUnknown, TokenBusy, TokenLost, TokenQueueFull
from bufstore.tokens import ExclusiveWork, Lock, Locks, Storage, Task, TokensConfig

#: Of a hundred items, how many fail at first, and how many take longer than a lease.
_FAIL, _LONG = 3, 1
#: The number of locks, the seconds that a lock is held at most, and the tasks of each worker that take locks.
_LOCKS, _LOCK_TTL_S, _LOCKERS = 3, 2, 2


class History:
    """Appends lines that survive the kill of the process."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, what: str, key: str, item: int, token: int = 0, at: float | None = None) -> None:
        """Write one event, with the present time if `at` is None."""
        at = time.monotonic() if at is None else at
        os.write(self._file, json.dumps([at, what, key, item, token]).encode() + b"\n")


async def request(work: ExclusiveWork, history: History, keys: list[str], items: int, begun: dict[str, int]) -> None:
    """Submit items 0 to `items` of each key in order. `begun`: the last item an earlier process submitted, by key."""

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


async def work_on(
    work: ExclusiveWork, history: History, stopping: asyncio.Event, chance: random.Random, nats: NatsConfig
) -> None:
    """Work until `stopping` is set."""
    finish = work._finish

    async def noted(task: Task) -> None:
        history.write("completed", task.key, int(task.payload), task.token)
        await finish(task)

    work._afterwards = work._afterwards._replace(finish=noted)

    async def handler(task: Task) -> None:
        history.write("began", task.key, int(task.payload), task.token)
        draw = chance.randrange(100)
        await asyncio.sleep(work._config.ttl_s * 1.3 if draw < _LONG else chance.uniform(0, 0.01))
        if task.attempt == 1 and _LONG <= draw < _LONG + _FAIL:
            raise RuntimeError("as it happens")

    async with asyncio.TaskGroup() as group:
        beside = [group.create_task(_take_impatiently(work, handler, chance))]
        locks = await group.create_task(_opened_locks(nats, work._config))
        beside += [group.create_task(_lock(locks, history, chance)) for _ in range(_LOCKERS)]
        await work.run(handler, stopping, concurrency=8)
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        await locks.aclose()
    history.write("found", "", work._found)


async def _take_impatiently(work: ExclusiveWork, handler: Any, chance: random.Random) -> None:
    """Ask for work and cancel the call at a random moment: what it took goes to another, and counts no attempt."""
    while True:
        taking = asyncio.ensure_future(work.take(1))
        await asyncio.sleep(chance.uniform(0, 0.05))
        taking.cancel()
        (outcome,) = await asyncio.gather(taking, return_exceptions=True)
        if isinstance(outcome, Task):
            with contextlib.suppress(BufstoreError, RuntimeError):
                async with outcome:
                    await handler(outcome)
                    await outcome.done()
        await asyncio.sleep(chance.uniform(0, 0.5))


async def _opened_locks(nats: NatsConfig, config: TokensConfig) -> Locks:
    while True:
        with contextlib.suppress(BufstoreError):
            return await Locks.open(nats, name=config.name, storage=Storage(replicas=config.replicas), timeout_s=3)
        await asyncio.sleep(0.2)


async def _lock(locks: Locks, history: History, chance: random.Random) -> None:
    """Take one lock after the other, and note the moments at which it was held."""
    while True:
        key = f"lock {chance.randrange(_LOCKS)}"
        try:
            lock = await locks.acquire(key, ttl_s=_LOCK_TTL_S, wait_s=5)
        except (TokenBusy, LogUnavailable):
            continue
        with contextlib.suppress(TokenLost, LogUnavailable):
            async with lock:
                _note(lock, history)
                await asyncio.sleep(1.3 * _LOCK_TTL_S if chance.random() < 0.01 else chance.uniform(0, 0.02))
                _note(lock, history)


def _note(lock: Lock, history: History) -> None:
    """Note a lock as held at a moment before the check: the process may be paused between any two of these lines."""
    at = time.monotonic()
    lock.check()
    history.write("locked", lock.key, 0, lock.token, at)


async def main(options: dict[str, Any]) -> None:
    """Open, retrying until it succeeds, and play the role until it is done or SIGTERM comes."""
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
                    await work_on(work, history, stopping, chance, nats)
                else:
                    await request(work, history, options["keys"], options["items"], options["begun"])
                return
        await asyncio.sleep(0.2)


_true_time, _true_time_ns = time.time, time.time_ns


def step_clock(chance: random.Random) -> None:
    """Make the wall clock jump, for all code of this process that asks Python for the time."""
    offset = chance.choice((-7200, -60, 60, 7200))
    time.time = lambda: _true_time() + offset
    time.time_ns = lambda: _true_time_ns() + offset * 10**9


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
