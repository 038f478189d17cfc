"""Limits that the server does not tell its clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import nats
import pytest

from bufstore import BufferedThreadStore, ConfigError, Consistency, FlushTimeout, LogFull
from bufstore.embedded import NatsServer, Servers
from bufstore.mailbox import NatsMailboxNames, NatsMailboxStore
from bufstore.tokens import ExclusiveWork, TokensConfig
from conftest import Deployment
from helpers import eventually, healthy, run_of, said, writable
from rights import guarded

#: These tests run servers of their own.
pytestmark = pytest.mark.alone

ACCOUNT = "users: [{user: a, password: p}], jetstream: enabled, limits {max_payload: 65536}"


@pytest.mark.long
@pytest.mark.parametrize("size", [1 << 10, 3 << 20], ids=["many", "in parts"])
async def test_a_max_payload_of_the_account_stops_no_write(size: int, caplog: pytest.LogCaptureFixture) -> None:
    """The server announces its own limit, and closes a connection that sends more than the account's."""
    with Servers(nats_config=f"accounts {{ A {{ {ACCOUNT} }} }}\n") as servers:
        async with Deployment(servers).store(nats=f"nats://a:p@127.0.0.1:{servers.nats.port}") as store:
            threads = [f"t{number}" for number in range(300 if size < 65536 else 1)]
            await asyncio.gather(*(store.checkpoint(t, [said(0, size)], run_of(t)) for t in threads))
            # Nothing has to be looked up any more, so that these wait for the same group, also on a busy machine.
            more = [said(1, min(size, 1 << 10))]
            await asyncio.gather(*(store.checkpoint(t, [said(0, size), *more], run_of(t)) for t in threads))
            await store.force_flush_all()
            for thread_id in threads:
                found = await store.load_messages(thread_id, consistency=Consistency.EVENTUAL)
                assert found == [said(0, size), *more]
        assert 1 <= [getattr(r, "action", "") for r in caplog.records].count("nats_lost") <= 6


async def test_a_live_delivery_that_is_too_large_stops_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    """Regression: the size that the server had refused was taken for that of a small write before.

    From then on the mailbox took next to nothing, and what was queued could not be claimed.
    """

    async def live(_: bytes) -> None: ...

    with Servers(nats_config=f"accounts {{ A {{ {ACCOUNT} }} }}\n") as servers:
        names = NatsMailboxNames(bucket="mm", max_bytes=64 << 20)
        async with NatsMailboxStore(f"nats://a:p@127.0.0.1:{servers.nats.port}", names=names) as mailbox:
            await mailbox.listen_live("t", live)
            await mailbox.enqueue("before", b"x" * 1000)
            await mailbox.deliver_live("t", b"x" * 200_000, timeout_s=2)

            async def taken() -> bool:
                await mailbox.enqueue("after", b"x" * 20_000)
                return await mailbox.claim("before", "me") is not None

            await eventually(taken)
    assert "nats_lost" in [getattr(r, "action", "") for r in caplog.records]


async def test_too_few_subscriptions_are_told_and_end_no_connection(caplog: pytest.LogCaptureFixture) -> None:
    """By itself nats-py would close the connection, and each new one."""

    async def live(_: bytes) -> None: ...

    account = "users: [{user: a, password: p}], jetstream: enabled, limits {max_subs: %d}"
    few, more = f"F {{ {account % 3} }}", f"M {{ {account % 20} }}".replace("user: a", "user: b")
    with Servers(nats_config=f"accounts {{ {few}, {more} }}\n") as servers:
        at = f"p@127.0.0.1:{servers.nats.port}"
        with pytest.raises(ConfigError, match="max_subs"):
            async with Deployment(servers).store(nats=f"nats://a:{at}"):
                pass
        names = NatsMailboxNames(bucket="mm", max_bytes=64 << 20)
        async with NatsMailboxStore(f"nats://b:{at}", names=names) as mailbox:
            tried = (mailbox.listen_live(f"t{n}", live) for n in range(25))
            stops = [r for r in await asyncio.gather(*tried, return_exceptions=True) if not isinstance(r, ConfigError)]
            assert 10 < len(stops) < 20
            assert not any(isinstance(stop, BaseException) for stop in stops)
            with pytest.raises(ConfigError, match="max_subs"):
                await mailbox.listen_live("one more", live)
            await stops[0]()  # type: ignore[operator]
            await mailbox.listen_live("last", live)
            await mailbox.enqueue("t", b"x")
    actions = [getattr(r, "action", "") for r in caplog.records]
    assert "nats_lost" not in actions
    assert actions.count("nats_forbidden") == 2


async def test_a_feed_without_a_subscription_is_told() -> None:
    """The store itself has all of its subscriptions. Without the feed's, partitions were taken again and again."""
    account = "users: [{user: a, password: p}], jetstream: enabled, limits {max_subs: 4}"
    with Servers(nats_config=f"accounts {{ A {{ {account} }} }}\n") as servers:
        async with Deployment(servers).store(nats=f"nats://a:p@127.0.0.1:{servers.nats.port}") as store:
            await store.checkpoint("t", [said(0)], run_of("t"))

            async def told() -> bool:
                return "max_subs" in (await store.health()).flusher

            await eventually(told)

            async def says_so() -> bool:
                with pytest.raises(FlushTimeout) as late:
                    await store.force_flush_all(timeout_s=3)
                return "max_subs" in str(late.value)

            await eventually(says_so)


@pytest.mark.parametrize(
    ("limit", "storage", "kind", "what"),
    [
        ("max_mem: 300KB", "memory", LogFull, "max_memory_store"),
        ("max_streams: 3", "file", ConfigError, "max_streams"),
    ],
)
async def test_a_limit_of_the_account_is_told_with_what_to_raise(
    limit: str, storage: Any, kind: type[Exception], what: str
) -> None:
    """Regression: too little memory was told as an outage, which a retry cannot end."""
    account = f"users: [{{user: a, password: p}}], jetstream {{ max_file: 1GB, max_mem: 100MB, {limit} }}"
    with Servers(nats_config=f"accounts {{ A {{ {account} }} }}\n") as servers:
        url = f"nats://a:p@127.0.0.1:{servers.nats.port}"
        async with await ExclusiveWork.open(url, TokensConfig(name="first")):
            with pytest.raises(kind, match=what):
                await ExclusiveWork.open(url, TokensConfig(name="second", storage=storage, max_bytes=1 << 20))


async def test_a_flusher_for_which_there_is_no_consumer_says_what_to_raise() -> None:
    account = "users: [{user: a, password: p}], jetstream { max_file: 1GB, max_mem: 100MB, max_consumers: 1 }"
    with Servers(nats_config=f"accounts {{ A {{ {account} }} }}\n") as servers:
        deployment, url = Deployment(servers), f"nats://a:p@127.0.0.1:{servers.nats.port}"
        async with deployment.store(nats=url) as one, deployment.store(nats=url) as other:

            async def said() -> bool:
                found = [(await store.health()).flush_trouble for store in (one, other)]
                return any("raise max_consumers" in trouble for trouble in found)

            await eventually(said)


async def test_storage_that_another_stream_has_taken_is_not_said_to_be_the_logs(
    servers: Servers, tmp_path: Path
) -> None:
    """The log has room, and raising its limit would not help."""
    jetstream = f'jetstream {{ store_dir: "{tmp_path}/nats", sync_interval: always, max_file_store: 20MB }}'
    server = NatsServer(tmp_path / "nats", extra_config=jetstream)
    server.start()
    client = await nats.connect(server.url)
    try:
        async with Deployment(servers, max_bytes=15 << 20).store(nats=server.url, append_timeout_s=5.0) as store:
            await store.checkpoint("t", [said(0)], run_of("t"))
            hog = json.dumps({"name": "HOG", "subjects": ["hog"], "storage": "file"}).encode()
            await client.request("$JS.API.STREAM.CREATE.HOG", hog, timeout=10)
            for _ in range(80):
                if b"insufficient resources" in (await client.request("hog", b"x" * 500_000, timeout=10)).data:
                    break
            with pytest.raises(LogFull, match="NATS has no storage left") as caught:
                await store.checkpoint("t", [said(0), said(1)], run_of("t"))
            assert "LogConfig.max_bytes" not in str(caught.value)
            assert "max_file_store" in str(caught.value)
            await eventually(lambda: _takes_none(store, str(caught.value)))
            with pytest.raises(LogFull, match="NATS has no storage left"):  # the bucket has no storage either
                await store.delete_thread("t")
            await client.request("$JS.API.STREAM.DELETE.HOG", timeout=10)

            async def written() -> bool:
                with contextlib.suppress(LogFull):
                    await store.checkpoint("t", [said(0), said(1)], run_of("t"))
                    return True
                return False

            await eventually(written, 10)
            await store.force_flush_all()
            await healthy(store)
    finally:
        await client.close()
        await asyncio.to_thread(server.stop)


async def test_a_log_larger_than_the_servers_storage_is_told_what_to_do(servers: Servers, tmp_path: Path) -> None:
    jetstream = f'jetstream {{ store_dir: "{tmp_path}/nats", max_file_store: 20MB }}'
    server = NatsServer(tmp_path / "nats", extra_config=jetstream)
    server.start()
    try:
        with pytest.raises(ConfigError, match=r"insufficient storage.*: lower it, or raise the storage") as caught:
            async with Deployment(servers, max_bytes=1 << 30).store(nats=server.url):
                pass
        assert "have taken it" not in str(caught.value)
    finally:
        server.stop()


async def test_a_right_that_is_taken_shows_in_health_until_a_write_is_answered(
    servers: Servers, tmp_path: Path
) -> None:
    deployment = Deployment(servers)
    with guarded(tmp_path) as rights:
        async with deployment.store(nats=rights.url) as store:
            await store.checkpoint("t", [said(0)], run_of("t"))
            await rights.deny(f"{deployment.log.subject}.>")
            with pytest.raises(ConfigError, match="does not permit") as caught:
                await store.checkpoint("t", [said(0), said(1)], run_of("t"))
            await eventually(lambda: _takes_none(store, str(caught.value)))
            await rights.deny()
            await store.checkpoint("t", [said(0), said(1)], run_of("t"))
            await writable(store)


async def _takes_none(store: BufferedThreadStore, why: str) -> bool:
    health = await store.health()
    return (health.can_write, health.write_trouble) == (False, why)
