"""Three nats-servers: replicas, leader reads, a leader that dies."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from bufstore import BufstoreError, Consistency, LogFull, NatsConfig, ReadNotFresh
from bufstore.embedded import NatsServer, Servers
from bufstore.jetstream.messages import Outgoing
from cluster import three_servers
from conftest import Deployment
from helpers import eventually, fresh, run_of, said


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[list[NatsServer]]:
    """Three servers of one JetStream cluster."""
    with three_servers(tmp_path) as started:
        yield started


async def test_three_replicas_survive_their_leader(servers: Servers, cluster: list[NatsServer]) -> None:
    deployment = Deployment(servers, replicas=3)
    nats = NatsConfig(servers=[f"nats://127.0.0.1:{s.port}" for s in cluster], user="all", password="all")

    async def opened() -> Any:
        try:
            context = deployment.store(nats=nats)
            return context, await context.__aenter__()
        except BufstoreError:
            return None  # no meta leader yet

    context, store = await eventually(opened, 60)
    try:
        thread_ids = [fresh() for _ in range(10)]
        acknowledged: dict[str, list[Any]] = {t: [] for t in thread_ids}

        async def write(count: int) -> None:
            async def talk(thread_id: str) -> None:
                for _ in range(count):
                    number = len(acknowledged[thread_id])
                    key: str | None = f"{number}"
                    while True:
                        try:
                            await store.checkpoint_append(
                                thread_id, [said(number)], run_of(thread_id), idempotency_key=key
                            )
                        except BufstoreError:
                            await asyncio.sleep(0.05)
                            continue
                        break
                    acknowledged[thread_id].append(said(number))

            await asyncio.gather(*map(talk, thread_ids))

        await write(10)
        for thread_id in thread_ids:
            assert await store.load_messages(thread_id) == acknowledged[thread_id]
        info = await store._log.api(f"STREAM.INFO.{deployment.log.stream}")
        assert info["config"]["num_replicas"] == 3
        leader = cluster[int(info["cluster"]["leader"][1:])]
        await asyncio.to_thread(leader.kill)
        await asyncio.wait_for(write(10), 60)
        for thread_id in thread_ids:
            assert await store.load_messages(thread_id) == acknowledged[thread_id]
        await store.force_flush_all(timeout_s=30)
        assert await store.load_messages(thread_ids[0], consistency=Consistency.STRONG) == acknowledged[thread_ids[0]]
        for thread_id in thread_ids:
            found = await store.load_messages(thread_id, consistency=Consistency.EVENTUAL)
            assert found == acknowledged[thread_id]
    finally:
        await context.__aexit__(None, None, None)


async def test_strong_notices_a_leader_that_is_alone(servers: Servers, cluster: list[NatsServer]) -> None:
    deployment = Deployment(servers, replicas=3)
    nats = NatsConfig(servers=[f"nats://127.0.0.1:{s.port}" for s in cluster], user="all", password="all")

    async def opened() -> Any:
        try:
            context = deployment.store(nats=nats, read_timeout_s=2.0, flush_timeout_s=5.0)
            return context, await context.__aenter__()
        except BufstoreError:
            return None  # no meta leader yet

    context, store = await eventually(opened, 60)
    try:
        thread_id = fresh()
        await store.checkpoint(thread_id, [said(0)], run_of(thread_id))
        await store.force_flush(thread_id)
        assert (await store.health()).ok
        await eventually(lambda: _counted_as_flushed(store))
        info = await store._log.api(f"STREAM.INFO.{deployment.log.stream}")
        followers = [s for i, s in enumerate(cluster) if f"n{i}" != info["cluster"]["leader"]]
        for server in followers:
            await asyncio.to_thread(server.pause)
        try:
            health = await store.health()
            assert (health.can_write, health.can_read) == (False, False), "it answers, and takes nothing"
            with pytest.raises(ReadNotFresh):
                await store.load_messages(thread_id, consistency=Consistency.STRONG)
        finally:
            for server in followers:
                await asyncio.to_thread(server.resume)

        async def read() -> Any:
            try:
                return await store.load_messages(thread_id, consistency=Consistency.STRONG)
            except BufstoreError:
                return None

        assert await eventually(read, 60) == [said(0)]
        assert (await store.health()).can_write
    finally:
        await context.__aexit__(None, None, None)


async def _counted_as_flushed(store: Any) -> bool:
    return bool((await store.statistics()).log_bytes_unflushed == 0)


async def test_a_full_log_is_read_as_strongly_as_any(servers: Servers, cluster: list[NatsServer]) -> None:
    """What proves that the leader leads needs no room in the log, and leaves nothing in it."""
    deployment = Deployment(servers, replicas=3, max_bytes=1 << 20)
    nats = NatsConfig(servers=[f"nats://127.0.0.1:{s.port}" for s in cluster], user="all", password="all")

    async def opened() -> Any:
        try:
            context = deployment.store(nats=nats, append_timeout_s=2.0, read_timeout_s=4.0)
            return context, await context.__aenter__()
        except BufstoreError:
            return None  # no meta leader yet

    context, store = await eventually(opened, 60)
    try:
        thread_id, written = fresh(), 0
        with suppress(LogFull):
            while True:
                await store.checkpoint_append(thread_id, [said(written, 50_000)], run_of(thread_id))
                written += 1
        for size in (1000, 1):  # to the last byte
            with suppress(LogFull):
                while True:
                    await store._log.publish(Outgoing(f"{deployment.log.subject}.barrier.2", b"x" * size), 5)

        async def read() -> int | None:
            found = await store.load_messages(thread_id, consistency=Consistency.STRONG)
            return len(found or [])

        before = (await store._log.api(f"STREAM.INFO.{deployment.log.stream}"))["state"]
        assert await read() == written
        info = await store._log.api(f"STREAM.INFO.{deployment.log.stream}")
        assert (info["state"]["last_seq"], info["state"].get("num_deleted", 0)) == (before["last_seq"], 0)
        followers = [s for i, s in enumerate(cluster) if f"n{i}" != info["cluster"]["leader"]]
        for server in followers:
            await asyncio.to_thread(server.pause)
        try:
            with pytest.raises(ReadNotFresh):
                await read()
        finally:
            for server in followers:
                await asyncio.to_thread(server.resume)
    finally:
        await context.__aexit__(None, None, None)
