"""Faults between the nodes of a NATS cluster: a node that is wiped, nodes that are cut off from each other."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from bufstore import BufferedThreadStore, Consistency, LogUnavailable, OutcomeUnknown, ReadNotFresh
from bufstore.embedded import Servers
from cluster import Cluster, leader_of, replicas_current
from conftest import Deployment
from helpers import eventually, fresh
from load import PATIENCE, Load
from sweep import nodes


@pytest.fixture(scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """One for both tests, which leave it whole."""
    async with Cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


async def test_a_node_that_was_wiped_rejoins_and_has_what_another_loses(servers: Servers, cluster: Cluster) -> None:
    """The leader is killed under load and comes back empty; then nothing can be stored or read without it."""
    deployment = Deployment(servers, replicas=3)
    store = await cluster.open(deployment, **PATIENCE)
    try:
        load = Load()
        load.write(store, "w")
        load.read(store, "r", Consistency.STRONG)
        await load.acknowledged(100)
        wiped = await leader_of(store, deployment)
        await asyncio.to_thread(cluster.servers[wiped].kill)
        await load.acknowledged(100)
        await asyncio.to_thread(cluster.servers[wiped].stop)
        cluster.wipe(wiped)
        await asyncio.to_thread(cluster.servers[wiped].start)
        await eventually(lambda: replicas_current(store, deployment), 60)
        other = await leader_of(store, deployment)
        await asyncio.to_thread(cluster.servers[other].kill)
        await load.acknowledged(100)
        await asyncio.to_thread(cluster.servers[other].start)
        await load.end()
        await load.check(store)
    finally:
        await store.aclose()


async def test_a_leader_that_is_cut_off_acknowledges_nothing_and_shows_nothing_old(
    servers: Servers, cluster: Cluster
) -> None:
    """Its clients are not cut off. No connection is reset: for seconds it does not know, and answers reads.

    The only flusher is with it, so nothing but the log can tell what the others have stored since.
    """
    deployment = Deployment(servers, replicas=3)
    stores = [await cluster.open(deployment, flusher=False, **PATIENCE)]
    try:
        leader = await leader_of(stores[0], deployment)
        stores.append(inside := await cluster.open(deployment, leader, **PATIENCE))
        # Writes that get no answer would make it connect again, maybe to nobody.
        stores.append(reading := await cluster.open(deployment, leader, flusher=False, **PATIENCE))
        stores.append(outside := await cluster.open(deployment, *({0, 1, 2} - {leader}), flusher=False, **PATIENCE))
        load = Load()
        load.write(inside, "inside")
        load.write(outside, "outside")
        load.read(inside, "inside", Consistency.STRONG)
        load.read(reading, "reading", Consistency.READ_YOUR_WRITES)
        await load.acknowledged(100)
        cluster.isolate(leader, silently=True)
        try:
            await load.acknowledged(100)  # the others have elected
            assert await leader_of(outside, deployment) != leader
            # One that has seen more of the log than this leader is connected to it again.
            inside._log._same.note(await outside._log.end(5.0))
            before = inside._log._connection.client()
            inside._log._connection._drop(before, "by the test")
            with contextlib.suppress(TimeoutError):  # it may well not let itself be connected
                await eventually(lambda: _reconnected(inside, before), 2.5)
        finally:
            cluster.heal()
        await load.acknowledged(100)
        # On a thread of its own: an edit has no turn where another appends all the time.
        await eventually(lambda: _takes_writes(inside, fresh()), 60)
        await load.end()
        await load.check(outside)
    finally:
        for store in reversed(stores):
            await store.aclose()


async def test_nodes_are_killed_wiped_stopped_and_cut_off_in_a_row() -> None:
    """A short run of `make cluster`."""
    await nodes.run(10, seed=1, slow_s=60)


async def _reconnected(store: BufferedThreadStore, before: object) -> bool:
    return store._log._connection._client not in (None, before)


async def _takes_writes(store: BufferedThreadStore, thread_id: str) -> bool:
    try:
        await store.save_thread(thread_id)
    except (LogUnavailable, OutcomeUnknown, ReadNotFresh):
        return False  # but not LogRolledBack
    return True
