"""Faults of a three-node NATS cluster in a row, under load: `python -m sweep.nodes --seconds N [--seed N]`.

Each fault is over, and writes are acknowledged again, before the next one comes; in the end everything is checked. A
line says how long a fault took until enough was acknowledged beside it; how long after its end it took until what was
in the log then was flushed; and until every node had everything, which is the servers' own affair: writes and flushes
go on with two of three.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from bufstore import BufferedThreadStore, Consistency, LogUnavailable
from bufstore.embedded import Servers
from cluster import Cluster, leader_of, replicas_current
from conftest import Deployment
from helpers import eventually
from load import PATIENCE, Load


class Faults:
    """What can happen to a cluster; each ends with the cluster whole."""

    def __init__(self, cluster: Cluster, load: Load, store: BufferedThreadStore, deployment: Deployment) -> None:
        self._cluster = cluster
        self._load = load
        self._store = store
        self._deployment = deployment

    async def kill(self, node: int) -> None:
        """SIGKILL and start again."""
        server = self._cluster.servers[node]
        await asyncio.to_thread(server.kill)
        await self._load.acknowledged(50, 120)
        await asyncio.to_thread(server.start)

    async def wipe(self, node: int) -> None:
        """SIGKILL, and it comes back empty."""
        server = self._cluster.servers[node]
        await asyncio.to_thread(server.kill)
        await self._load.acknowledged(50, 120)
        await asyncio.to_thread(server.stop)
        self._cluster.wipe(node)
        await asyncio.to_thread(server.start)

    async def hang(self, node: int) -> None:
        """SIGSTOP for a while."""
        server = self._cluster.servers[node]
        await asyncio.to_thread(server.pause)
        try:
            await self._load.acknowledged(50, 120)
        finally:
            await asyncio.to_thread(server.resume)

    async def reset(self, node: int) -> None:
        """Cut off from the others, with its clients."""
        self._cluster.isolate(node, silently=False)
        await self._load.acknowledged(50, 120)
        self._cluster.heal()

    async def silence(self, node: int) -> None:
        """The same; no connection is reset, and what was sent arrives late."""
        self._cluster.isolate(node, silently=True)
        await self._load.acknowledged(50, 120)
        self._cluster.heal()

    async def flushed(self) -> float:
        """Wait until all that is in the log now is flushed; the seconds that took."""
        began = time.monotonic()
        await eventually(self._flush, 120)
        return time.monotonic() - began

    async def _connected(self) -> bool:
        return await asyncio.to_thread(self._cluster.connected)

    async def _flush(self) -> bool:
        try:
            await self._store.force_flush_all(timeout_s=60)
        except LogUnavailable:
            return False  # it is still connecting
        return True

    async def whole(self) -> float:
        """Wait until all nodes have all; the seconds that took."""
        began = time.monotonic()
        await eventually(self._connected, 60)
        await eventually(lambda: replicas_current(self._store, self._deployment), 240)
        return time.monotonic() - began


async def run(seconds: float, seed: int, slow_s: float = 10.0) -> None:
    """Raises when something is not as it must be; also when flushing took longer than `slow_s` after a fault."""
    chance = random.Random(seed)
    count: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder, Servers() as servers:
        async with Cluster(Path(folder)) as cluster:
            deployment = Deployment(servers, replicas=3)
            stores = [await cluster.open(deployment, *nodes, **PATIENCE) for nodes in ((), (0,), (1, 2))]
            load = Load()
            for number, store in enumerate(stores):
                load.write(store, f"w{number}")
            for number, store in enumerate(stores):
                load.read(store, f"r{number}", Consistency.STRONG)
                load.read(store, f"y{number}", Consistency.READ_YOUR_WRITES)
            faults = Faults(cluster, load, stores[0], deployment)
            kinds: list[Callable[[int], Awaitable[Any]]] = [
                faults.kill, faults.wipe, faults.hang, faults.reset, faults.silence,
            ]  # fmt: skip
            longest = 0.0
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                fault = chance.choice(kinds)
                leader = await leader_of(stores[0], deployment)
                node = leader if chance.random() < 0.6 else chance.choice(sorted({0, 1, 2} - {leader}))
                what = f"{fault.__name__} {'leader' if node == leader else 'follower'}"  # type: ignore[attr-defined]
                began = time.monotonic()
                await fault(node)
                beside = time.monotonic() - began
                flushed, whole = await asyncio.gather(faults.flushed(), faults.whole())
                await load.acknowledged(50, 120)
                count[what] += 1
                longest = max(longest, flushed)
                print(
                    f"{what:<18}n{node}  {beside:5.1f} s  flushed after {flushed:4.1f} s, whole after {whole:5.1f} s, "
                    f"{load.history.acknowledged} acknowledged",
                    flush=True,
                )
            await load.end()
            await load.check(stores[0])
            for store in stores:
                await store.aclose()
    reads = sum(len(t.reads) for t in load.history.threads.values())
    print(f"{sum(count.values())} faults, {load.history.acknowledged} acknowledged, {reads} fresh reads, seed {seed}:")
    print(f"nothing lost, doubled, reordered or stale; what the log held after a fault was flushed in {longest:.1f} s")
    assert longest <= slow_s, f"after a fault it took {longest:.1f} s until what was in the log was flushed"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit code."""
    parser = argparse.ArgumentParser(prog="cluster")
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(arguments)
    logging.disable(logging.ERROR)  # of what is lost and found again there is much
    asyncio.run(run(given.seconds, given.seed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
