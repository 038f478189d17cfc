"""Fresh reads per second from three nats-servers with three replicas: `python -m sweep.read_rate [--seconds N]`.

ReadYourWrites reads of flushed threads, by one caller and by many, with and without writes beside them.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.three_servers import three_servers
from bufstore import BufferedThreadStore, NatsConfig
from bufstore.embedded import Servers
from conftest import Deployment
from helpers import eventually, fresh, run_of, said

_THREADS = 200


async def measure(nats: NatsConfig, deployment: Deployment, seconds: float) -> None:
    """Measure and print the rates."""
    options = {"read_timeout_s": 30.0, "append_timeout_s": 30.0}

    async def opened() -> BufferedThreadStore | None:
        try:
            return await BufferedThreadStore.open(deployment.inner(), nats=nats, config=deployment.config(**options))
        except Exception:
            return None

    async with await eventually(opened, 60) as store:
        threads = [fresh() for _ in range(_THREADS)]
        await asyncio.gather(*(store.checkpoint(t, [said(0)], run_of(t)) for t in threads))
        await store.force_flush_all(timeout_s=30)
        stop = asyncio.Event()

        async def write(who: str) -> None:
            number = 0
            while not stop.is_set():
                thread = threads[number % _THREADS]
                await store.checkpoint_append(thread, [f"{who}-{number}"], run_of(thread))
                number += 1

        for writers in (0, 4):
            stop.clear()
            writing = [asyncio.create_task(write(f"{writers}-{n}")) for n in range(writers)]
            for callers in (1, 32):
                rate = await _rate(store, threads, callers, seconds)
                print(f"{writers} writers, {callers:>2} callers: {rate:7.0f} reads a second", flush=True)
            stop.set()
            await asyncio.gather(*writing)


async def _rate(store: BufferedThreadStore, threads: Sequence[str], callers: int, seconds: float) -> float:
    began = time.monotonic()
    done = 0

    async def call(number: int) -> None:
        nonlocal done
        while time.monotonic() - began < seconds:
            await store.load_messages(threads[number % len(threads)])
            number += callers
            done += 1

    await asyncio.gather(*(call(number) for number in range(callers)))
    return done / (time.monotonic() - began)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit code."""
    parser = argparse.ArgumentParser(prog="read_rate")
    parser.add_argument("--seconds", type=float, default=10)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder, Servers() as servers, three_servers(Path(folder)) as nodes:
        nats = NatsConfig(servers=[f"nats://127.0.0.1:{s.port}" for s in nodes], user="all", password="all")
        asyncio.run(measure(nats, Deployment(servers, replicas=3), given.seconds))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
