"""Faults between the nodes of a NATS cluster: a node that is wiped, nodes that are cut off from each other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from bufstore import BufferedThreadStore, BufstoreError, Consistency, OutcomeUnknown
from bufstore.embedded import Servers
from chaos import checkers
from chaos.history import Final, History, Op, Read, ThreadHistory
from cluster import Cluster, leader_of, replicas_current
from conftest import Deployment
from helpers import eventually, fresh, run_of

_RULES = (
    checkers.lost, checkers.duplicated, checkers.phantom, checkers.reordered, checkers.not_a_past_state, checkers.stale,
    checkers.flicker,
)  # fmt: skip
_SHORT = {"append_timeout_s": 2.0, "read_timeout_s": 2.0, "flush_timeout_s": 30.0, "failover_window_s": 60.0}


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with Cluster(tmp_path) as running:
        yield running


class Load:
    """Writers and readers of some threads, and all that they saw."""

    def __init__(self, threads: int = 6) -> None:
        self.history = History()
        self.threads = [fresh() for _ in range(threads)]
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def write(self, store: BufferedThreadStore, who: str) -> None:
        """Begin to append to every thread through this store."""
        self._tasks += [asyncio.create_task(self._write(store, who, t)) for t in self.threads]

    def read(self, store: BufferedThreadStore, who: str, level: Consistency) -> None:
        """Begin to read every thread through this store."""
        self._tasks += [asyncio.create_task(self._read(store, who, t, level)) for t in self.threads]

    async def acknowledged(self, more: int, timeout_s: float = 60) -> None:
        """Wait until so many more writes are acknowledged."""
        goal = self.history.acknowledged + more

        async def reached() -> bool:
            self._raise()
            return self.history.acknowledged >= goal

        await eventually(reached, timeout_s)

    async def end(self) -> None:
        """Stop; raises what a writer or reader has died of."""
        self._stop.set()
        await asyncio.gather(*self._tasks)

    async def check(self, store: BufferedThreadStore) -> None:
        """Everything acknowledged is in Postgres, once and in order, and every read was right."""
        await store.force_flush_all(timeout_s=60)
        final = Final({t: await store.load_messages(t, consistency=Consistency.EVENTUAL) or [] for t in self.threads})
        assert [str(v) for rule in _RULES for v in rule(self.history, final)] == []
        report = await store.verify()
        assert report.ok, report.findings

    def _raise(self) -> None:
        for task in self._tasks:
            if task.done():
                task.result()

    async def _write(self, store: BufferedThreadStore, who: str, thread_id: str) -> None:
        ops = self.history.threads.setdefault(thread_id, ThreadHistory()).ops
        number = 0
        while not self._stop.is_set():
            name = f"{who}-{number}"
            op = Op(f"{who}-{thread_id}", thread_id, "append", (name,), time.monotonic())
            ops.append(op)
            while True:
                try:
                    receipt = await store.checkpoint_append(thread_id, [name], run_of(thread_id), idempotency_key=name)
                except BufstoreError as e:
                    op.kind = "retry" if isinstance(e, OutcomeUnknown) else op.kind  # its position is not known then
                    if self._stop.is_set():
                        return
                    await asyncio.sleep(0.05)
                    continue
                break
            op.ended, op.outcome, op.seq = time.monotonic(), "ok", receipt.thread_seq
            number += 1
            await asyncio.sleep(0.01)

    async def _read(self, store: BufferedThreadStore, who: str, thread_id: str, level: Consistency) -> None:
        reads = self.history.threads.setdefault(thread_id, ThreadHistory()).reads
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                names = await store.load_messages(thread_id, consistency=level)
            except BufstoreError:
                names = None
            else:
                shown = tuple(names) if names is not None else None
                reads.append(Read(who, thread_id, level.value, 0, began, time.monotonic(), shown))
            await asyncio.sleep(0.05)


async def test_a_node_that_was_wiped_rejoins_and_carries_what_others_lose(servers: Servers, cluster: Cluster) -> None:
    """The leader is killed under load and comes back empty; then both others are killed, one after the other."""
    deployment = Deployment(servers, replicas=3)
    store = await cluster.open(deployment, **_SHORT)
    try:
        load = Load()
        load.write(store, "w")
        load.read(store, "r", Consistency.STRONG)
        await load.acknowledged(100)
        first = await leader_of(store, deployment)
        await asyncio.to_thread(cluster.servers[first].kill)
        await load.acknowledged(100)
        await asyncio.to_thread(cluster.servers[first].stop)
        cluster.wipe(first)
        await asyncio.to_thread(cluster.servers[first].start)
        await eventually(lambda: replicas_current(store, deployment), 60)
        for node in {0, 1, 2} - {first}:
            await asyncio.to_thread(cluster.servers[node].kill)
            await load.acknowledged(50)
            await asyncio.to_thread(cluster.servers[node].start)
            await eventually(lambda: replicas_current(store, deployment), 60)
        await load.end()
        await load.check(store)
    finally:
        await store.aclose()


@pytest.mark.parametrize("silently", [False, True], ids=["reset", "silent"])
async def test_a_leader_that_is_cut_off(servers: Servers, cluster: Cluster, silently: bool) -> None:
    """Its clients are not: what they write is not acknowledged, and Strong shows them nothing old."""
    deployment = Deployment(servers, replicas=3)
    everywhere = await cluster.open(deployment, **_SHORT)
    stores = [everywhere]
    try:
        leader = await leader_of(everywhere, deployment)
        inside = await cluster.open(deployment, leader, **_SHORT)
        stores.append(inside)
        outside = await cluster.open(deployment, *({0, 1, 2} - {leader}), **_SHORT)
        stores.append(outside)
        load = Load()
        load.write(outside, "outside")
        load.write(inside, "inside")
        for store, who in ((inside, "inside"), (outside, "outside")):
            load.read(store, who, Consistency.STRONG)
        await load.acknowledged(100)
        cluster.isolate(leader, silently=silently)
        try:
            await load.acknowledged(100)  # the others have elected
            assert await leader_of(outside, deployment) != leader
        finally:
            cluster.heal()
        await load.acknowledged(100)
        await eventually(lambda: replicas_current(outside, deployment), 60)
        await load.end()
        await load.check(outside)
        final: Any = await outside.load_messages(load.threads[0], consistency=Consistency.STRONG)
        assert final == await inside.load_messages(load.threads[0], consistency=Consistency.STRONG)
    finally:
        for store in reversed(stores):
            await store.aclose()
