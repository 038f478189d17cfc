"""Faults of a three-node NATS cluster in a row, under load: `python -m sweep.nodes --seconds N [--seed N]`.

The next fault comes once the last one is over and writes are acknowledged again; in the end everything is checked. A
line for each fault says how long it took until enough writes were acknowledged beside it, how long after its end
leaders were missing, until what was in the log then was flushed, and until every node had everything. Leaders and
replication are NATS' own affair: nobody can flush from a log without a leader, and two of three copies are enough. A
node that comes back has counted elections while it was alone, and deposes leaders that were there when the fault ended:
so leaders are looked for until all is flushed.
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

from bufstore import BufferedThreadStore, BufstoreError, Consistency, LogUnavailable
from bufstore.embedded import Servers
from bufstore.jetstream.errors import ConsumerMissing
from cluster import Cluster, leader_of, replicas_current
from conftest import Deployment
from helpers import eventually
from load import PATIENCE, Load

#: A leader answers within this time.
_TOLD_S = 2.0


class Faults:
    """The faults of a cluster; after each, the cluster is whole again."""

    def __init__(
        self, cluster: Cluster, load: Load, stores: Sequence[BufferedThreadStore], deployment: Deployment
    ) -> None:
        self._cluster = cluster
        self._load = load
        self._stores = stores
        self._store = stores[0]
        self._deployment = deployment

    async def kill(self, node: int) -> None:
        """Kill the node (SIGKILL), and start it again."""
        server = self._cluster.servers[node]
        await asyncio.to_thread(server.kill)
        await self._load.acknowledged(50, 120)
        await asyncio.to_thread(server.start)

    async def wipe(self, node: int) -> None:
        """Kill the node (SIGKILL), and start it again with an empty disk."""
        server = self._cluster.servers[node]
        await asyncio.to_thread(server.kill)
        await self._load.acknowledged(50, 120)
        await asyncio.to_thread(server.stop)
        self._cluster.wipe(node)
        await asyncio.to_thread(server.start)

    async def hang(self, node: int) -> None:
        """Stop the node for a while (SIGSTOP)."""
        server = self._cluster.servers[node]
        await asyncio.to_thread(server.pause)
        try:
            await self._load.acknowledged(50, 120)
        finally:
            await asyncio.to_thread(server.resume)

    async def reset(self, node: int) -> None:
        """Cut the node, with its clients, off from the others."""
        self._cluster.isolate(node, silently=False)
        await self._load.acknowledged(50, 120)
        self._cluster.heal()

    async def silence(self, node: int) -> None:
        """The same without resetting connections: what was sent arrives late."""
        self._cluster.isolate(node, silently=True)
        await self._load.acknowledged(50, 120)
        self._cluster.heal()

    async def flushed(self) -> float:
        """Wait until everything that is in the log now is flushed. Returns the seconds that took."""
        began = time.monotonic()
        await eventually(self._flush, 120)
        return time.monotonic() - began

    async def _connected(self) -> bool:
        return await asyncio.to_thread(self._cluster.connected)

    async def _flush(self) -> bool:
        try:
            await self._store.force_flush_all(timeout_s=60)
        except LogUnavailable:
            return False  # the store is still connecting
        return True

    async def led(self, flushing: asyncio.Future[float]) -> float:
        """The seconds until a store last missed a leader before all was flushed; 0 if none did.

        That is the time of a question whose answer said so, or that got no answer on a connection that stayed.
        """
        began, missing = time.monotonic(), 0.0
        while not flushing.done():
            asked = time.monotonic() - began
            if not all(await asyncio.gather(*map(self._has_leaders, self._stores))):
                missing = asked
            await asyncio.sleep(0.2)
        return missing

    async def _has_leaders(self, store: BufferedThreadStore) -> bool:
        """Whether a store sees leaders of log, bucket and cluster; the first two prove it by an empty purge.

        Without the cluster's leader no consumer can be made. For a store that is not connected the answer is yes.
        """
        log: Any = store.buffer.session.stream
        client = log._connection._client
        stream, bucket = self._deployment.log.stream, self._deployment.log.bucket
        answers = await asyncio.gather(
            # These calls change nothing, and a missing answer does not end the connection.
            log.api(f"STREAM.PURGE.{stream}", {"filter": store.buffer.subjects.unused}, timeout_s=_TOLD_S),
            log.api(f"STREAM.PURGE.KV_{bucket}", {"filter": f"$KV.{bucket}.unused"}, timeout_s=_TOLD_S),
            log.api(f"CONSUMER.DELETE.{stream}.unused", timeout_s=_TOLD_S),
            return_exceptions=True,
        )
        for answer in answers:
            if isinstance(answer, BufstoreError) and not isinstance(answer, ConsumerMissing):
                return client is None or log._connection._client is not client
            assert isinstance(answer, dict | ConsumerMissing), answer
        return True

    async def whole(self) -> float:
        """Wait until all nodes have everything. Returns the seconds that took."""
        began = time.monotonic()
        await eventually(self._connected, 60)
        await eventually(lambda: replicas_current(self._store, self._deployment), 240)
        return time.monotonic() - began


async def run(seconds: float, seed: int, slow_s: float = 10.0) -> None:
    """Raise an error when anything is wrong.

    That includes a flush that takes longer than `slow_s`, from when log and bucket had leaders again after a fault.
    """
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
            faults = Faults(cluster, load, stores, deployment)
            kinds: list[Callable[[int], Awaitable[Any]]] = [
                faults.kill, faults.wipe, faults.hang, faults.reset, faults.silence,
            ]  # fmt: skip
            longest = ours = 0.0
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                fault = chance.choice(kinds)
                leader = await leader_of(stores[0], deployment)
                node = leader if chance.random() < 0.6 else chance.choice(sorted({0, 1, 2} - {leader}))
                what = f"{fault.__name__} {'leader' if node == leader else 'follower'}"  # type: ignore[attr-defined]
                began = time.monotonic()
                await fault(node)
                beside = time.monotonic() - began
                flushing = asyncio.ensure_future(faults.flushed())
                led, flushed, whole = await asyncio.gather(faults.led(flushing), flushing, faults.whole())
                await load.acknowledged(50, 120)
                count[what] += 1
                longest, ours = max(longest, flushed), max(ours, flushed - led)
                print(
                    f"{what:<18}n{node}  {beside:5.1f} s  led after {led:4.1f} s, flushed after {flushed:4.1f} s, "
                    f"whole after {whole:5.1f} s, "
                    f"{load.history.acknowledged} acknowledged",
                    flush=True,
                )
            await load.end()
            await load.check(stores[0])
            for store in stores:
                await store.aclose()
    reads = sum(len(t.reads) for t in load.history.threads.values())
    print(f"{sum(count.values())} faults, {load.history.acknowledged} acknowledged, {reads} fresh reads, seed {seed}:")
    print("nothing lost, doubled, reordered or stale; what the log held after a fault was flushed")
    print(f"in {longest:.1f} s at most, and {ours:.1f} s after log and bucket had leaders again")
    assert ours <= slow_s, f"{ours:.1f} s after the leaders were there again what was in the log was not flushed"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit code."""
    parser = argparse.ArgumentParser(prog="cluster")
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(arguments)
    logging.disable(logging.ERROR)  # faults cause many log messages
    asyncio.run(run(given.seconds, given.seed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
