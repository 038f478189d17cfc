"""Faults of a mailbox's servers: each an async context that injects and heals."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from bufstore import BufstoreError
from bufstore.embedded import NatsServer, RedisServer, Servers
from bufstore.jetstream.messages import AppendUnknown, Conflict, Outgoing
from bufstore.mailbox.nats import NatsBackend
from cluster import Cluster
from mailboxes import Mailboxes


@dataclass(frozen=True)
class Place:
    """The servers of a mailbox."""

    on: str
    boxes: Mailboxes
    servers: Servers | None
    cluster: Cluster | None
    redis: RedisServer | None = None
    #: How wrong the servers' clock is for all instances, in milliseconds: a list of one entry.
    stepped_ms: list[int] = field(default_factory=lambda: [0])

    def server(self, chance: random.Random) -> Any:
        """Return the server, or a random one of the cluster."""
        if self.cluster is not None:
            return chance.choice(self.cluster.servers)
        assert self.servers is not None
        return self.servers.nats if self.on == "nats" else self.servers.postgres


@dataclass(frozen=True)
class Fault:
    """One kind of fault."""

    on: tuple[str, ...]
    make: Callable[[Place, random.Random], AbstractAsyncContextManager[None]]

    def __call__(self, place: Place, chance: random.Random) -> AbstractAsyncContextManager[None]:
        return self.make(place, chance)


@asynccontextmanager
async def _killed(place: Place, chance: random.Random) -> AsyncIterator[None]:
    server = place.server(chance)
    await asyncio.to_thread(server.kill)
    try:
        yield
    finally:
        await asyncio.to_thread(server.start)


@asynccontextmanager
async def _redis_killed(place: Place, chance: random.Random) -> AsyncIterator[None]:
    assert place.redis is not None
    await asyncio.to_thread(place.redis.kill)
    try:
        yield
    finally:
        await asyncio.to_thread(place.redis.start)


_true_time, _true_time_ns = time.time, time.time_ns


@asynccontextmanager
async def _wall_clock_stepped(place: Place, chance: random.Random) -> AsyncIterator[None]:
    """Step the wall clock, for all code of this process that asks Python for the time."""
    step_s = chance.choice((-7200, -60, -5, 5, 60, 7200))
    time.time = lambda: _true_time() + step_s
    time.time_ns = lambda: _true_time_ns() + step_s * 10**9
    try:
        yield
    finally:
        time.time, time.time_ns = _true_time, _true_time_ns


@asynccontextmanager
async def _server_clock_stepped(place: Place, chance: random.Random) -> AsyncIterator[None]:
    """Step the servers' clock, as all instances see it, and step it back."""
    place.stepped_ms[0] = chance.choice((-60_000, -20_000, -5_000, 5_000, 20_000))
    try:
        yield
    finally:
        place.stepped_ms[0] = 0


@asynccontextmanager
async def _leader_killed(place: Place, chance: random.Random) -> AsyncIterator[None]:
    assert place.cluster is not None
    leader = await leader_of(place)
    server = place.cluster.servers[leader if leader is not None else chance.randrange(3)]
    await asyncio.to_thread(server.kill)
    try:
        yield
    finally:
        await asyncio.to_thread(server.start)


async def leader_of(place: Place) -> int | None:
    """Return the node that leads the bucket; None while that cannot be read."""
    store = place.boxes.store(timeout_s=2.0)
    with suppress(BufstoreError, TimeoutError):
        async with asyncio.timeout(5), store:
            assert isinstance(store.backend, NatsBackend)
            info = await store.backend._stream.api(f"STREAM.INFO.KV_{place.boxes.name}")
            leader = (info.get("cluster") or {}).get("leader")
            return int(leader[1:]) if leader else None
    return None


@asynccontextmanager
async def _paused(place: Place, chance: random.Random) -> AsyncIterator[None]:
    server = place.server(chance)
    assert isinstance(server, NatsServer)
    pid = server.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@asynccontextmanager
async def _cut_off(place: Place, chance: random.Random) -> AsyncIterator[None]:
    assert place.cluster is not None
    place.cluster.isolate(chance.randrange(3), silently=chance.random() < 0.5)
    try:
        yield
    finally:
        place.cluster.heal()


@asynccontextmanager
async def _full(place: Place, chance: random.Random) -> AsyncIterator[None]:
    """Fill the bucket with foreign data until it takes no more."""
    store = place.boxes.store()
    with suppress(BufstoreError, Conflict, AppendUnknown):
        async with store:
            assert isinstance(store.backend, NatsBackend)
            backend = store.backend
            of = backend._keys.of
            state = (await backend._stream.api(f"STREAM.INFO.KV_{place.boxes.name}"))["state"]
            size = 500_000
            room = place.boxes.max_bytes * 7 // 8 - int(state["bytes"])
            written = [Outgoing(of("zz", str(n)), b"x" * size) for n in range(room // size + 1)]
            for n in range(0, len(written), 8):
                await asyncio.gather(*(backend._bucket.put([m]) for m in written[n : n + 8]))
    try:
        yield
    finally:
        for _ in range(100):
            with suppress(BufstoreError, Conflict, AppendUnknown):
                async with place.boxes.store() as store:
                    assert isinstance(store.backend, NatsBackend)
                    await store.backend._stream.purge(store.backend._keys.of("zz", ">"), 1 << 60)
                    break
            await asyncio.sleep(0.2)
        else:
            raise AssertionError("the bucket could not be emptied again")


FAULTS = {
    "server killed": Fault(("nats", "replicas", "postgres", "redis"), _killed),
    "server paused": Fault(("nats", "replicas"), _paused),
    "leader killed": Fault(("replicas",), _leader_killed),
    "node cut off": Fault(("replicas",), _cut_off),
    "bucket full": Fault(("nats", "replicas"), _full),
    "redis killed": Fault(("redis",), _redis_killed),
    "wall clock stepped": Fault(("nats", "replicas", "postgres", "redis"), _wall_clock_stepped),
    "server's clock stepped": Fault(("nats", "replicas", "postgres", "redis"), _server_clock_stepped),
}
