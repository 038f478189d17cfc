"""Feeds on a real server: what they hold, and what they release."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from bufstore import Consistency, LogUnavailable, ThreadQuery
from bufstore.embedded import NatsServer, Servers
from bufstore.jetstream.messages import Outgoing
from bufstore.nats import log as log_module
from bufstore.nats.feed import NatsFeed, consumer_config, open_feed
from conftest import Deployment
from helpers import eventually, fresh, run_of, said


async def test_a_closed_feed_leaves_nothing_behind(deployment: Deployment) -> None:
    async with deployment.store(flusher=False) as store:
        log, client = store.buffer.session.log, store.buffer.session.connection.client()
        before = len(client._subs), len(client._listeners)
        feeds = []
        for _ in range(20):
            feed = await log.feed(0, 1, lambda: None)
            await feed.close()
            feeds.append(weakref.ref(feed))
        del feed
        gc.collect()
        assert (len(client._subs), len(client._listeners)) == before
        assert not [alive for alive in feeds if alive() is not None]


async def test_a_feed_that_could_not_be_made_for_long_is_made_in_the_end(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: after 1024 failures, 80 s of a full disk, a flusher flushed nothing until it was restarted."""
    within = []

    async def refused(*arguments: Any) -> NatsFeed:
        within.append(arguments[-1])
        raise LogUnavailable("the disk is full")

    async with deployment.store(flusher=False) as store:
        log = store.buffer.session.log
        with monkeypatch.context() as patch:
            patch.setattr(log_module, "open_feed", refused)
            for _ in range(1100):
                with pytest.raises(LogUnavailable, match="full"):
                    await log.feed(0, 1, lambda: None)
        assert (within[:4], set(within[3:])) == ([2.0, 4.0, 8.0, 8.0], {8.0})
        await (await log.feed(0, 1, lambda: None)).close()


async def test_a_message_larger_than_a_feed_asks_for_at_once_is_delivered(deployment: Deployment) -> None:
    """The server took larger messages when this one was stored. The feed once asked for it for ever, in vain."""
    deployment.verified = False  # the messages written here are no groups
    async with deployment.store(flusher=False) as store:
        session, log = store.buffer.session, deployment.log
        stream = session.stream
        for size in (10, 5000, 5000, 10):
            await stream.publish(Outgoing(f"{log.subject}.groups.0", b"x" * size), 5)
        arrived, came, left = [], asyncio.Event(), list[str]()
        config = consumer_config(f"{log.subject}-large", f"{log.subject}.groups.0", 1, 100)
        feed = await open_feed(session.connection.client(), stream, config, came.set, 1000, left.append, 5)
        async with asyncio.timeout(10):
            while len(arrived) < 4:
                await came.wait()
                came.clear()
                assert feed.lost is None
                for message in feed.take():
                    arrived.append(len(message.body))
                    await feed.ack(message.seq)
        await feed.close()
        assert arrived == [10, 5000, 5000, 10]


async def test_a_thread_that_waits_leaves_its_partition_to_the_others(deploy: Callable[..., Deployment]) -> None:
    """A locked thread's entries exceed what a feed holds and the server delivers ahead; then the owner is replaced."""
    deployment = deploy(partitions=1)
    held, free = fresh("held"), [fresh("free") for _ in range(30)]
    written = 0

    async def write(store: object, rounds: int) -> None:
        nonlocal written

        async def one(thread_id: str) -> None:
            for n in range(written, written + rounds):
                await store.checkpoint_append(thread_id, [said(n)], run_of(thread_id))  # type: ignore[attr-defined]

        await asyncio.gather(*(one(t) for t in (held, *free)))
        written += rounds

    async with deployment.store(flusher=False) as writer:
        await writer.checkpoint(held, [], run_of(held))
        async with deployment.store(flush_max_entries=500) as first:
            await first.force_flush(held)
            locked = await psycopg.AsyncConnection.connect(deployment.servers.postgres.dsn)
            async with locked:
                await locked.execute(
                    f"SELECT 1 FROM {deployment.name}.threads WHERE thread_id = %s FOR UPDATE",  # type: ignore[arg-type]
                    [held],
                )
                for _ in range(4):
                    await write(writer, 35)
                    await asyncio.gather(*(writer.force_flush(t, timeout_s=20) for t in free))
                    found = await writer.load_messages(free[0], consistency=Consistency.STRONG)
                    assert found == [said(n) for n in range(written)]
                    page = await writer.query_messages(free[1], limit=100)
                    assert len(page.records) == min(written, 100)
                (owned,) = first.buffer.flusher._owned.values()  # type: ignore[union-attr]
                assert len(owned.pending) + len(owned._order) < 3000
                report = await writer.verify()
                assert report.ok, "nothing is acknowledged before it is committed"
                assert report.waiting > 100
                await first.aclose()
                async with deployment.store(flush_max_entries=500) as second:
                    await write(writer, 10)
                    await asyncio.gather(*(writer.force_flush(t, timeout_s=20) for t in free))
                    await locked.rollback()
                    await second.force_flush_all(timeout_s=30)
                    for thread_id in (held, *free):
                        found = await second.load_messages(thread_id, consistency=Consistency.EVENTUAL)
                        assert found == [said(n) for n in range(written)]
                    assert len((await second.query_threads(ThreadQuery(), limit=100)).threads) == 31
                    assert await second.quarantined() == 0

                    async def all_acknowledged() -> bool:
                        (owned,) = second.buffer.flusher._owned.values()  # type: ignore[union-attr]
                        return not owned.unsettled

                    await eventually(all_acknowledged)


async def test_a_purge_by_hand_of_what_is_not_flushed_is_told_with_what_it_took(
    deploy: Callable[..., Deployment], caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: the flusher went past the hole without a line, and nothing showed it once that was flushed."""
    deployment = deploy(partitions=1)
    deployment.verified = False  # it lacks what is purged
    thread_id = fresh("t")
    async with deployment.store(flush_max_entries=1) as store:
        await store.checkpoint(thread_id, [], run_of(thread_id))
        await store.force_flush(thread_id)
        locked = await psycopg.AsyncConnection.connect(deployment.servers.postgres.dsn)
        async with locked:
            await locked.execute(f"LOCK {deployment.name}.threads")  # type: ignore[arg-type]
            for n in range(300):
                await store.checkpoint_append(thread_id, [said(n)], run_of(thread_id))
            client, stream = store.buffer.session.connection.client(), deployment.log.stream
            await client.jetstream().purge_stream(stream, keep=1)
            await locked.rollback()
        await store.checkpoint_append(thread_id, [said(300)], run_of(thread_id))

        async def told() -> bool:
            return any(r.levelname == "ERROR" and getattr(r, "action", "") == "log_gap" for r in caplog.records)

        await eventually(told)


async def test_a_paused_consumer_is_replaced(deployment: Deployment) -> None:
    """The owner of a paused consumer once took its partitions for ever, as did one whose consumer's leader lags."""
    async with deployment.store() as store:
        await store.checkpoint("t", [said(0)], run_of("t"))
        await store.force_flush_all()
        client, stream = store.buffer.session.connection.client(), deployment.log.stream

        async def api(verb: str, body: object = None) -> Any:
            answer = await client.request(f"$JS.API.{verb}", json.dumps(body or {}).encode(), timeout=10)
            return json.loads(answer.data)

        paused = (await api(f"CONSUMER.NAMES.{stream}"))["consumers"]
        for name in paused:
            assert (await api(f"CONSUMER.PAUSE.{stream}.{name}", {"pause_until": "2100-01-01T00:00:00Z"}))["paused"]
        await store.checkpoint("t", [said(0), said(1)], run_of("t"))
        await store.force_flush("t", timeout_s=15)
        assert not set(paused) & set((await api(f"CONSUMER.NAMES.{stream}"))["consumers"])


@contextlib.contextmanager
def _limited(folder: Path, limits: str) -> Iterator[str]:
    """The URL of a server with these limits."""
    server = NatsServer(folder)
    server.extra_config = f"jetstream {{ store_dir: {json.dumps(str(folder))}, limits {{ {limits} }} }}"
    server.start()
    try:
        yield server.url
    finally:
        server.stop()


async def test_an_account_that_lets_too_little_be_unacknowledged_is_named(servers: Servers, tmp_path: Path) -> None:
    """The flusher once asked for the consumer that was not created, and reported that it was not found."""
    deployment = Deployment(servers)
    with _limited(tmp_path, "max_ack_pending: 1000") as url:
        async with deployment.store(nats=url) as store:
            await store.checkpoint("t", [said(0)], run_of("t"))

            async def told() -> bool:
                return "raise max_ack_pending" in (await store.health()).flush_trouble

            await eventually(told)
        async with deployment.store(nats=url, flush_max_entries=1000) as store:
            await store.force_flush_all()


async def test_no_more_is_asked_for_than_a_server_allows(servers: Servers, tmp_path: Path) -> None:
    """Larger requests were once refused, and consumers were made and removed for ever without an error."""
    with _limited(tmp_path, "max_request_batch: 8") as url:
        async with Deployment(servers).store(nats=url) as store:
            for n in range(20):
                await store.checkpoint_append("t", [said(n)], run_of("t"))
            await store.force_flush_all()
            assert (await store.statistics()).flusher.takeovers == store.buffer.subjects.partitions
