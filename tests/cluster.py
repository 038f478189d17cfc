"""A JetStream cluster of three nats-servers. They reach each other through proxies that a test can cut."""

from __future__ import annotations

import asyncio
import json
import shutil
import urllib.request
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from http.client import HTTPException
from itertools import permutations
from pathlib import Path
from typing import Any, Self

from bench.three_servers import free_ports
from bufstore import BufferedThreadStore, BufstoreError, NatsConfig
from bufstore.embedded import NatsServer
from conftest import Deployment
from fault_proxy.proxy import FaultProxy
from helpers import eventually

_NODES = 3
#: The address that each node advertises. Nobody can connect to it, so every route passes through a proxy.
_NOWHERE = "127.0.0.1:1"


class Cluster:
    """Servers n0 to n2, which all know the user "all". Use it in an ``async with`` block."""

    def __init__(self, folder: Path, *, told: bool = False) -> None:
        """`told`: whether the servers tell clients of each other; then no client stays with a node that is cut off."""
        self._folder = folder
        self._advertise = f'advertise: "{_NOWHERE}", no_advertise: {str(not told).lower()}'
        self._exits = AsyncExitStack()
        #: The proxy of each route, by (from node, to node).
        self._routes: dict[tuple[int, int], FaultProxy] = {}
        self.servers: list[NatsServer] = []

    async def __aenter__(self) -> Self:
        free = free_ports(2 * _NODES)
        ports, self._monitors = free[:_NODES], free[_NODES:]
        for i, j in permutations(range(_NODES), 2):
            self._routes[i, j] = await self._exits.enter_async_context(FaultProxy("127.0.0.1", ports[j]))
        for i, port in enumerate(ports):
            routes = ", ".join(f'"nats://127.0.0.1:{p.port}"' for (a, _), p in self._routes.items() if a == i)
            config = (
                f"server_name: n{i}\n"
                f'cluster {{ name: c, listen: "127.0.0.1:{port}", {self._advertise}, routes: [{routes}] }}\n'
                f'http: "127.0.0.1:{self._monitors[i]}"\n'
            )
            server = NatsServer(self._folder / f"n{i}", extra_config=config)
            # The server makes its password at its first start. The configuration must name it beside the user "all".
            await asyncio.to_thread(server.start)
            await asyncio.to_thread(server.stop)
            password = server.url.partition("bufstore:")[2].partition("@")[0]
            server.extra_config += (
                f'authorization {{ timeout: 10, users: [ {{ user: bufstore, password: "{password}" }}, '
                "{ user: all, password: all } ] }\n"
            )
            self.servers.append(server)
        self._exits.push_async_callback(self._stop)
        await asyncio.gather(*(asyncio.to_thread(s.start) for s in self.servers))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._exits.aclose()

    async def _stop(self) -> None:
        self.heal()
        await asyncio.gather(*(asyncio.to_thread(s.stop) for s in self.servers))

    def nats(self, *nodes: int) -> NatsConfig:
        """The client configuration for these nodes, or for all nodes if none is named."""
        chosen = [self.servers[i] for i in nodes] or self.servers
        return NatsConfig(servers=[f"nats://127.0.0.1:{s.port}" for s in chosen], user="all", password="all")

    def isolate(self, node: int, *, silently: bool) -> None:
        """Cut a node off from the others: reset its routes, or let nothing pass through them (`silently`)."""
        for pair, proxy in self._routes.items():
            if node in pair:
                if silently:
                    proxy.to_server.hold()
                    proxy.to_client.hold()
                else:
                    proxy.refuse = True
                    proxy.cut()

    def heal(self) -> None:
        """Undo `isolate`. What was sent into a silent route arrives late."""
        for proxy in self._routes.values():
            proxy.heal()

    def connected(self) -> bool:
        """True when every node is connected to both others."""
        try:
            return all(len(self.routes(i)) == _NODES - 1 for i in range(_NODES))
        except (OSError, HTTPException):
            return False  # a node is still starting, or was killed in the middle of its answer

    def routes(self, node: int) -> set[str]:
        """Return the nodes that this node says it is connected to."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._monitors[node]}/routez", timeout=2) as answer:
            return {str(route["remote_name"]) for route in json.load(answer)["routes"]}

    def meta_leader(self) -> int | None:
        """Return the cluster's leader according to node 0; None while there is none, or while the node is busy."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._monitors[0]}/jsz", timeout=2) as answer:
                name = json.load(answer).get("meta_cluster", {}).get("leader")  # a node that starts has none yet
        except (OSError, HTTPException):
            return None
        return int(name[1:]) if name else None

    def wipe(self, node: int) -> None:
        """Delete all streams of a stopped node."""
        shutil.rmtree(self.servers[node].data / "jetstream")

    async def open(self, deployment: Deployment, *nodes: int, **options: Any) -> BufferedThreadStore:
        """Open an instance on the cluster, as soon as the cluster has elected its leaders."""

        async def opened() -> BufferedThreadStore | None:
            try:
                return await BufferedThreadStore.open(
                    deployment.inner(), nats=self.nats(*nodes), config=deployment.config(**options)
                )
            except BufstoreError:
                return None

        store: BufferedThreadStore = await eventually(opened, 60)
        return store

    @asynccontextmanager
    async def store(self, deployment: Deployment, **options: Any) -> AsyncIterator[BufferedThreadStore]:
        """Open an instance in an ``async with`` block; it is verified at the end as in `Deployment.store`."""
        async with AsyncExitStack() as exits:

            async def opened() -> BufferedThreadStore | None:
                try:
                    return await exits.enter_async_context(deployment.store(nats=self.nats(), **options))
                except BufstoreError:
                    return None

            yield await eventually(opened, 60)


async def leader_of(store: Any, deployment: Deployment) -> int:
    """Wait for the log's stream to have a leader, and return that node."""

    async def asked() -> str:
        try:
            info = await store.buffer.session.stream.api(f"STREAM.INFO.{deployment.log.stream}")
        except BufstoreError:
            return ""
        return str(info["cluster"].get("leader") or "")

    leader: str = await eventually(asked, 60)
    return int(leader[1:])


async def lead_log_and_cluster(store: Any, cluster: Cluster, deployment: Deployment) -> int:
    """Make one node lead log and cluster, and return it: one that leads only the log answers nothing when cut off."""

    async def same() -> int | None:
        leader, meta = await leader_of(store, deployment), await asyncio.to_thread(cluster.meta_leader)
        if leader == meta:
            return leader + 1
        if meta is not None:
            wish = {"placement": {"preferred": f"n{meta}"}}
            with suppress(BufstoreError):
                await store.buffer.session.stream.api(f"STREAM.LEADER.STEPDOWN.{deployment.log.stream}", wish)
        return None

    found: int = await eventually(same, 60)
    return found - 1


async def replicas_current(store: Any, deployment: Deployment) -> bool:
    """True when every replica of the log and the hot bucket is up to date with its leader."""
    for stream in (deployment.log.stream, f"KV_{deployment.log.bucket}"):
        try:
            info = await store.buffer.session.stream.api(f"STREAM.INFO.{stream}")
        except BufstoreError:
            return False
        followers = info["cluster"].get("replicas") or ()
        if len(followers) != _NODES - 1 or not all(f["current"] and not f.get("offline") for f in followers):
            return False
    return True
