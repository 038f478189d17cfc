"""Three nats-servers: replicas, reads from the leader, and nodes that die, are wiped or are isolated."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bufstore import (
    BufferedThreadStore,
    BufstoreError,
    Consistency,
    FlushTimeout,
    LogFull,
    LogUnavailable,
    OutcomeUnknown,
    ReadNotFresh,
    Receipt,
)
from bufstore.buffer.places import group_of
from bufstore.embedded import Servers
from bufstore.jetstream.messages import Outgoing
from bufstore.nats.ranges import LogReader
from cluster import Cluster, lead_log_and_cluster, leader_of, replicas_current
from command_line import bufstore_cli, where
from conftest import Deployment
from helpers import eventually, flush_all, fresh, healthy, run_of, said, writable
from load import PATIENCE, Load
from sweep import nodes


@pytest.fixture(scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """One cluster for all tests, which leave it whole."""
    async with Cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.mark.long
async def test_the_doctor_finds_nothing_wrong_with_three_replicas(servers: Servers, cluster: Cluster) -> None:
    """Nothing is reported about the servers' sync either, which an application's account cannot see."""
    deployment, nats = Deployment(servers, replicas=3), cluster.nats()
    urls = ",".join(url.replace("://", f"://{nats.user}:{nats.password}@") for url in nats.servers)
    async with cluster.store(deployment):
        found = await asyncio.to_thread(bufstore_cli, "doctor", "--json", **where(deployment) | {"BUFSTORE_NATS": urls})
    assert [c for c in found.json["checks"] if c["level"] != "ok"] == []
    assert found.code == 0


@pytest.mark.long
async def test_a_lost_log_of_three_replicas_is_repaired_by_the_command_line(servers: Servers, cluster: Cluster) -> None:
    deployment, nats = Deployment(servers, replicas=3), cluster.nats()
    thread_id = fresh()
    deployment.verified = False
    async with cluster.store(deployment) as store:
        await store.checkpoint(thread_id, [said(0)], run_of(thread_id))
        await store.force_flush_all()
        await store.buffer.session.stream.api(f"STREAM.DELETE.{deployment.log.stream}")
    here = where(deployment) | {"BUFSTORE_NATS": ",".join(nats.servers), "BUFSTORE_NATS_PASSWORD": "all"}

    async def repaired() -> bool:
        done = await asyncio.to_thread(bufstore_cli, "repair", "--apply", "--nats-user", "all", **here)
        assert done.code == 0 or "still flush" in done.err, done
        return done.code == 0

    await eventually(repaired)
    deployment.verified = True
    async with cluster.store(deployment) as store:
        await store.checkpoint_append(thread_id, [said(1)], run_of(thread_id))
        assert await store.load_messages(thread_id) == [said(0), said(1)]


@pytest.mark.long
async def test_three_replicas_survive_their_leader(servers: Servers, cluster: Cluster) -> None:
    deployment = Deployment(servers, replicas=3)
    async with cluster.store(deployment) as store:
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
            assert await _shown(store, thread_id) == acknowledged[thread_id]
        info = await store.buffer.session.stream.api(f"STREAM.INFO.{deployment.log.stream}")
        assert info["config"]["num_replicas"] == 3
        leader = cluster.servers[await leader_of(store, deployment)]
        await asyncio.to_thread(leader.kill)
        try:
            await asyncio.wait_for(write(10), 120)
            for thread_id in thread_ids:
                assert await _shown(store, thread_id) == acknowledged[thread_id]
            await flush_all(store)  # log, bucket and cluster elect their leaders one by one
            found = await _shown(store, thread_ids[0], consistency=Consistency.STRONG)
            assert found == acknowledged[thread_ids[0]]
            for thread_id in thread_ids:
                found = await store.load_messages(thread_id, consistency=Consistency.EVENTUAL)
                assert found == acknowledged[thread_id]
        finally:
            await asyncio.to_thread(leader.start)


@pytest.mark.long
async def test_strong_notices_a_leader_that_is_alone(servers: Servers, cluster: Cluster) -> None:
    deployment = Deployment(servers, replicas=3)
    async with cluster.store(deployment, read_timeout_s=2.0, flush_timeout_s=5.0) as store:
        thread_id = fresh()
        await store.checkpoint(thread_id, [said(0)], run_of(thread_id))
        await flush_all(store)
        await healthy(store)
        await eventually(lambda: _counted_as_flushed(store))
        info = await store.buffer.session.stream.api(f"STREAM.INFO.{deployment.log.stream}")
        followers = [s for i, s in enumerate(cluster.servers) if f"n{i}" != info["cluster"]["leader"]]
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

        assert await _shown(store, thread_id, consistency=Consistency.STRONG) == [said(0)]
        await writable(store)  # followers that stood still may depose the leader


@pytest.mark.long
async def test_a_full_log_is_read_as_strongly_as_any(servers: Servers, cluster: Cluster) -> None:
    """The proof that the leader leads needs no room in the log and leaves nothing in it."""
    deployment = Deployment(servers, replicas=3, max_bytes=1 << 20)
    async with cluster.store(deployment, append_timeout_s=8.0, read_timeout_s=4.0) as store:
        thread_id, written = fresh(), 0
        with suppress(LogFull):
            while True:
                await store.checkpoint_append(thread_id, [said(written, 50_000)], run_of(thread_id))
                written += 1
        for size in (1000, 1):  # fill the log to the last byte
            with suppress(LogFull):
                while True:
                    await store.buffer.session.stream.publish(Outgoing(store.buffer.subjects.parts, b"x" * size), 5)

        async def read() -> int | None:
            found = await store.load_messages(thread_id, consistency=Consistency.STRONG)
            return len(found or [])

        before = (await store.buffer.session.stream.api(f"STREAM.INFO.{deployment.log.stream}"))["state"]
        assert await read() == written
        info = await store.buffer.session.stream.api(f"STREAM.INFO.{deployment.log.stream}")
        assert (info["state"]["last_seq"], info["state"].get("num_deleted", 0)) == (before["last_seq"], 0)
        followers = [s for i, s in enumerate(cluster.servers) if f"n{i}" != info["cluster"]["leader"]]
        for server in followers:
            await asyncio.to_thread(server.pause)
        try:
            with pytest.raises(ReadNotFresh):
                await read()
        finally:
            for server in followers:
                await asyncio.to_thread(server.resume)


@pytest.mark.long  # twenty seconds; the test with all faults wipes nodes too
async def test_a_node_that_was_wiped_rejoins_and_has_what_another_loses(servers: Servers, cluster: Cluster) -> None:
    """The leader is killed under load and comes back empty; then the log needs it to store and read anything."""
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


@pytest.mark.long  # twenty seconds of elections
async def test_a_leader_that_is_cut_off_acknowledges_nothing_and_shows_nothing_old(
    servers: Servers, cluster: Cluster
) -> None:
    """The leader's clients stay connected. No connection is reset, so it does not know for seconds and answers reads.

    The only flusher is connected to it too, so only the log can show what the others have stored since.
    """
    deployment = Deployment(servers, replicas=3)
    stores = [await cluster.open(deployment, flusher=False, **PATIENCE)]
    try:
        leader = await leader_of(stores[0], deployment)
        stores.append(inside := await cluster.open(deployment, leader, **PATIENCE))
        # This instance only reads: unanswered writes would make it reconnect, maybe to no node.
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
            # The others have elected a leader. On a busy machine nats-server may take a minute: nothing is promised.
            await load.acknowledged(100, 120)
            assert await leader_of(outside, deployment) != leader
            # A client that has seen more of the log than this leader reconnects to it.
            inside.buffer.session.stream._same.note(await eventually(lambda: _end(outside), 60))
            connection = inside.buffer.session.connection
            # The leader may refuse a connection, and a client that has found its node deaf may be on its way already.
            with suppress(TimeoutError, LogUnavailable):
                before = await connection.wait_up(2.5)
                connection._drop(before, "by the test")
                await eventually(lambda: _reconnected(inside, before), 2.5)
        finally:
            cluster.heal()
        await load.acknowledged(100)
        # On a new thread: an edit gets no turn on one to which another writer always appends.
        await eventually(lambda: _takes_writes(inside, fresh()), 60)
        await load.end()
        await load.check(outside)
    finally:
        for store in reversed(stores):
            await store.aclose()


@pytest.mark.long  # thirty seconds; `test_proven_reads.py` has a property of it without servers
async def test_a_read_combines_no_proof_of_one_node_with_what_another_shows(servers: Servers, cluster: Cluster) -> None:
    """Requests that need votes go to the new leader, all others to the old one, which does not know it is replaced."""
    deployment = Deployment(servers, replicas=3)
    stores = [await cluster.open(deployment, flusher=False, **PATIENCE)]
    thread_id = fresh()
    try:
        leader = await lead_log_and_cluster(stores[0], cluster, deployment)
        stores.append(old := await cluster.open(deployment, leader, flusher=False, **PATIENCE))
        stores.append(new := await cluster.open(deployment, *({0, 1, 2} - {leader}), flusher=False, **PATIENCE))

        async def written(store: BufferedThreadStore, what: str) -> Receipt | None:
            with suppress(BufstoreError):
                return await store.checkpoint_append(thread_id, [what], run_of(thread_id), idempotency_key=what)
            return None

        await eventually(partial(written, old, "before"), 60)
        assert await _shown(new, thread_id) == ["before"]
        both, log = old.buffer.session.connection, old.buffer.log
        cluster.isolate(leader, silently=True)
        try:
            after = await eventually(partial(written, new, "after"), 60)
            both.write = new.buffer.session.connection.write

            async def shown() -> list[int] | None:
                with suppress(LogUnavailable):  # it asks those that it is cut off from, now and then
                    return await log.ends([old.buffer.subjects.of(thread_id)])
                return None

            assert await eventually(shown, 60) < [after.thread_seq], "it still answers"
            for level in (Consistency.READ_YOUR_WRITES, Consistency.STRONG):
                with pytest.raises(ReadNotFresh):
                    await old.load_messages(thread_id, consistency=level)
            # The error depends on whether the node has already noticed that it is alone.
            with pytest.raises((FlushTimeout, LogUnavailable)):
                await old.force_flush_all(timeout_s=2.0)
        finally:
            with suppress(AttributeError):
                del both.write
            cluster.heal()

        assert await _shown(old, thread_id) == ["before", "after"]
        await eventually(lambda: replicas_current(new, deployment), 60)
    finally:
        for store in reversed(stores):
            await store.aclose()


@pytest.mark.long  # half a minute; `test_ranges.py` imitates such nodes
async def test_a_node_that_was_cut_off_and_lags_ends_no_read_of_the_log(servers: Servers, cluster: Cluster) -> None:
    """At once after it is back, the log's last messages are read through each node, until it has caught up."""
    deployment = Deployment(servers, replicas=3, max_bytes=1 << 30)
    stores = [await cluster.open(deployment, flusher=False, **PATIENCE)]
    readers = [LogReader(cluster.nats(node), deployment.log.stream) for node in range(3)]
    groups = set[int]()

    async def write(to: BufferedThreadStore, count: int) -> None:
        thread_id = fresh()
        for n in range(count):
            message = {"id": f"m{n}", "role": "user", "content": secrets.token_hex(200_000)}
            wrote = partial(_wrote, to, thread_id, message)
            groups.add(group_of(await eventually(wrote, 60)))

    try:
        lagging = (await leader_of(stores[0], deployment) + 1) % 3
        stores.append(outside := await cluster.open(deployment, *({0, 1, 2} - {lagging}), flusher=False, **PATIENCE))
        cluster.isolate(lagging, silently=True)
        try:
            await asyncio.gather(*(write(outside, 30) for _ in range(8)))
        finally:
            cluster.heal()
        await asyncio.gather(*(reader.open() for reader in readers))
        end, subjects, reads = max(groups) + 1, outside.buffer.subjects, 0

        async def read(reader: LogReader) -> None:
            nonlocal reads
            with suppress(LogUnavailable):
                async with aclosing(reader.read(end - 10, end, [subjects.groups], headers_only=True)) as parts:
                    found = {each.message.seq async for part in parts for each in part}
                assert found == {seq for seq in groups if end - 10 <= seq < end}
                reads += 1

        async def caught_up() -> bool:
            await asyncio.gather(*map(read, readers * 3))
            return await replicas_current(outside, deployment)

        await eventually(caught_up, 120)
        assert reads
    finally:
        cluster.heal()
        for reader in readers:
            await reader.aclose()
        for store in reversed(stores):
            await store.aclose()


async def _wrote(store: BufferedThreadStore, thread_id: str, message: dict[str, str]) -> int | None:
    with suppress(LogUnavailable, OutcomeUnknown):
        key = message["id"]
        return (await store.checkpoint_append(thread_id, [message], run_of(thread_id), idempotency_key=key)).thread_seq
    return None


@pytest.mark.long
async def test_a_process_that_was_given_one_server_goes_on_with_the_others(servers: Servers, tmp_path: Path) -> None:
    deployment = Deployment(servers, replicas=3)
    async with Cluster(tmp_path, told=True) as cluster:
        store = await cluster.open(deployment, 0, **PATIENCE)
        try:
            for lost in (0, 1, 2):
                await asyncio.to_thread(cluster.servers[lost].kill)
                await eventually(lambda: _takes_writes(store, fresh()), 60)
                await asyncio.to_thread(cluster.servers[lost].start)
                await eventually(lambda: replicas_current(store, deployment), 60)
        finally:
            await store.aclose()


async def test_nodes_are_killed_wiped_stopped_and_cut_off_in_a_row() -> None:
    """Run a short `make cluster`."""
    await nodes.run(10, seed=1, slow_s=60)


async def _shown(store: BufferedThreadStore, thread_id: str, **options: Any) -> Any:
    """Return the thread's messages as soon as they can be read: while a leader is elected they cannot."""

    async def read() -> Any:
        with suppress(LogUnavailable, ReadNotFresh):
            return [await store.load_messages(thread_id, **options)]
        return None

    (found,) = await eventually(read, 60)
    return found


async def _end(store: BufferedThreadStore) -> int:
    with suppress(LogUnavailable):
        return await store.buffer.session.stream.end(5.0)
    return 0


async def _counted_as_flushed(store: Any) -> bool:
    return bool((await store.statistics()).log_bytes_unflushed == 0)


async def _reconnected(store: BufferedThreadStore, before: object) -> bool:
    return store.buffer.session.connection._client not in (None, before)


async def _takes_writes(store: BufferedThreadStore, thread_id: str) -> bool:
    try:
        await store.save_thread(thread_id)
    except (LogUnavailable, OutcomeUnknown, ReadNotFresh):
        return False  # LogRolledBack is not caught
    return True
