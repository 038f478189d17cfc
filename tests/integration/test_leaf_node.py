"""A leaf node, whose link to a JetStream domain passes neither the plain API's nor a plain bucket's subjects."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import nats
import nats.errors
import pytest

from bench.three_servers import free_ports
from bufstore import ConfigError, Consistency, NatsConfig
from bufstore.embedded import NatsServer, Servers
from bufstore.embedded._base import USER, make_folder
from bufstore.mailbox import MailboxConfig, NatsMailboxNames, NatsMailboxStore
from bufstore.nats.permissions import Role, permissions
from bufstore.tokens import ExclusiveWork, Locks, TokensConfig
from conftest import Deployment
from helpers import eventually, fresh, run_of, said
from thorough import seldom
from token_instances import took


class Leaf(NatsServer):
    """A server without JetStream."""

    def _answers(self, seconds: float) -> bool:
        return True  # the test uses the hub's JetStream across the link


class Linked(NamedTuple):
    hub: NatsConfig
    leaf: NatsConfig


@asynccontextmanager
async def linked(folder: Path, *, on_hub: str = "", on_leaf: str = "") -> AsyncIterator[Linked]:
    """Start a server whose JetStream is the domain "hub", and a leaf node of it. `on_…`: their additional users."""
    hub, leaf = NatsServer(folder / "hub"), Leaf(folder / "leaf")
    for server in (hub, leaf):
        make_folder(server.data)
    (port,) = free_ports(1)

    def users(server: NatsServer, more: str) -> str:
        return (
            f'authorization {{ timeout: 10, users: [ {{ user: {USER}, password: "{server._password}" }}\n{more} ] }}\n'
        )

    hub.extra_config = (
        f'server_name: hub\nleafnodes {{ listen: "127.0.0.1:{port}" }}\n'
        f'jetstream {{ store_dir: "{hub.data}", domain: hub }}\n{users(hub, on_hub)}'
    )
    remote = f"nats://{USER}:{hub._password}@127.0.0.1:{port}"
    leaf.extra_config = (
        f'server_name: leaf\nleafnodes {{ remotes: [ {{ url: "{remote}" }} ] }}\n'
        f"jetstream: disabled\n{users(leaf, on_leaf)}"
    )
    try:
        await asyncio.to_thread(hub.start)
        await asyncio.to_thread(leaf.start)
        await eventually(lambda: _reached(leaf.url))
        yield Linked(*(NatsConfig(servers=server.url, domain="hub") for server in (hub, leaf)))
    finally:
        await asyncio.to_thread(leaf.stop)
        await asyncio.to_thread(hub.stop)


async def _reached(url: str) -> bool:
    try:
        async with asyncio.timeout(2):
            client = await nats.connect(url, max_reconnect_attempts=0)
            await client.request("$JS.hub.API.INFO", timeout=1)
            await client.close()
    except (nats.errors.Error, OSError, TimeoutError):
        return False
    return True


@pytest.fixture(scope="module")
async def sites(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Linked]:
    """A hub and a leaf node for all tests that need no additional users."""
    async with linked(tmp_path_factory.mktemp("linked")) as running:
        yield running


@pytest.mark.parametrize("flushed_on", ["hub", *seldom("leaf")])
async def test_a_store_on_a_leaf_node_writes_flushes_and_deletes(
    deployment: Deployment, sites: Linked, flushed_on: str
) -> None:
    async with (
        asyncio.timeout(60),
        deployment.store(nats=getattr(sites, flushed_on)) as other,
        deployment.store(nats=sites.leaf, flusher=False) as store,
    ):
        t = fresh()
        await store.checkpoint(t, [said(0)], run_of(t))
        await store.force_flush(t, timeout_s=20)
        await other.checkpoint(t, [said(0), said(1)], run_of(t))
        assert await store.load_messages(t) == [said(0), said(1)]
        assert await store.load_messages(t, consistency=Consistency.STRONG) == [said(0), said(1)]
        await store.force_flush_all(timeout_s=20)
        await store.delete_thread(t)
        assert await store.load_messages(t) is None
        # Flushers share state in the bucket, whichever server they use.
        shared = store.buffer.session.shared
        assert len(await shared.members()) == 1
        assert await eventually(shared.progress)
        assert await eventually(shared.floors)


async def test_a_mailbox_on_a_leaf_node(sites: Linked) -> None:
    names = NatsMailboxNames(bucket=fresh("box"), max_bytes=16 << 20)
    config = MailboxConfig(sweep_interval_s=1.0)
    async with (
        asyncio.timeout(60),
        NatsMailboxStore(sites.leaf, names=names, config=config) as box,
        NatsMailboxStore(sites.hub, names=names, config=config) as other,
    ):
        await other.enqueue("t", b"from the hub")
        await box.enqueue("t", b"from the leaf")
        assert [s.thread_id for s in await box.pull_signals(timeout_s=5)] == ["t"]
        for worker, payload in ((box, b"from the hub"), (other, b"from the leaf")):
            claim = await worker.claim("t", "worker")
            assert claim is not None
            assert claim.payload == payload
            assert (await worker.ack(claim)).status.finished


async def test_tokens_on_a_leaf_node(sites: Linked) -> None:
    config = TokensConfig(name=fresh("tokens"))
    async with asyncio.timeout(60), await ExclusiveWork.open(sites.leaf, config) as work:
        await work.submit("key", b"item")
        task = await took(work)
        await task.extend()
        await task.done()
        assert (await work.statistics()).stored == 0
    async with await Locks.open(sites.leaf, name=config.name) as locks, await locks.acquire("key"):
        assert await locks.held() == 1


@pytest.mark.long
async def test_exact_rights_in_a_domain(servers: Servers, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A leaf node checks the subject that is sent; a server of the domain checks the subject it is mapped to."""
    deployment, other = Deployment(servers), Deployment(servers)

    def user(api: str) -> str:
        return f"{{ user: exact, password: exact\n{permissions(Role.FLUSHER, deployment.log, api).config()} }}"

    async with linked(tmp_path, on_hub=user("$JS.API"), on_leaf=user("$JS.hub.API")) as sites:
        async with deployment.store(nats=sites.hub), other.store(nats=sites.hub):
            pass  # makes both logs
        for site in sites:
            exact = NatsConfig(servers=f"nats://exact:exact@{site.servers[0].rpartition('@')[2]}", domain="hub")
            with caplog.at_level(logging.ERROR, "bufstore"):
                async with deployment.store(nats=exact) as store:
                    t = fresh()
                    await store.checkpoint(t, [said(0)], run_of(t))
                    await store.force_flush(t)
            assert [r.getMessage() for r in caplog.records if getattr(r, "action", "") == "nats_forbidden"] == []
            async with asyncio.timeout(4.5):  # the error comes at once, before the timeout
                with pytest.raises(ConfigError, match="does not permit"):
                    async with other.store(nats=exact):
                        pass
            caplog.clear()
