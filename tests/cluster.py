"""Three nats-servers of one JetStream cluster, whose nodes speak to each other through proxies that a test can cut."""

from __future__ import annotations

import asyncio
import json
import shutil
import urllib.request
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import permutations
from pathlib import Path
from typing import Any, Self

from bufstore import BufferedThreadStore, BufstoreError, NatsConfig
from bufstore.embedded import NatsServer
from bufstore.embedded._cluster import free_ports
from conftest import Deployment
from fault_proxy.proxy import FaultProxy
from helpers import eventually

_NODES = 3
#: Who learns of a node from another one connects here: to nobody. So all routes pass through a proxy.
_NOWHERE = "127.0.0.1:1"


class Cluster:
    """Servers n0 to n2; a user "all" that each of them knows. Use it in an ``async with`` block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._exits = AsyncExitStack()
        #: From which node to which.
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
                f'cluster {{ name: c, listen: "127.0.0.1:{port}", advertise: "{_NOWHERE}", routes: [{routes}] }}\n'
                f'http: "127.0.0.1:{self._monitors[i]}"\n'
            )
            server = NatsServer(self._folder / f"n{i}", extra_config=config)
            # Its password is made at its first start, and has to stand beside that of the user that all nodes know.
            await asyncio.to_thread(server.start)
            await asyncio.to_thread(server.stop)
            password = server.url.partition("bufstore:")[2].partition("@")[0]
            server.extra_config += (
                f'authorization {{ users: [ {{ user: bufstore, password: "{password}" }}, '
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
        """For clients of these nodes (of all, if none is named)."""
        chosen = [self.servers[i] for i in nodes] or self.servers
        return NatsConfig(servers=[f"nats://127.0.0.1:{s.port}" for s in chosen], user="all", password="all")

    def isolate(self, node: int, *, silently: bool) -> None:
        """Cut one node off from the others: connections are reset, or (`silently`) nothing passes through them."""
        for pair, proxy in self._routes.items():
            if node in pair:
                if silently:
                    proxy.to_server.hold()
                    proxy.to_client.hold()
                else:
                    proxy.refuse = True
                    proxy.cut()

    def heal(self) -> None:
        """Join what was cut; what was sent into a connection that nothing passed through arrives late."""
        for proxy in self._routes.values():
            proxy.heal()

    def connected(self) -> bool:
        """Whether every node is connected to both others."""
        try:
            return all(len(self.routes(i)) == _NODES - 1 for i in range(_NODES))
        except OSError:
            return False  # one is starting

    def routes(self, node: int) -> set[str]:
        """The nodes that this one is connected to, by its own account."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._monitors[node]}/routez", timeout=2) as answer:
            return {str(route["remote_name"]) for route in json.load(answer)["routes"]}

    def meta_leader(self) -> int | None:
        """Which node leads the cluster, by the first one's account; None while nobody does."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._monitors[0]}/jsz", timeout=2) as answer:
            name = json.load(answer)["meta_cluster"].get("leader")
        return int(name[1:]) if name else None

    def wipe(self, node: int) -> None:
        """Take all streams away from a node that is stopped."""
        shutil.rmtree(self.servers[node].data / "jetstream")

    async def open(self, deployment: Deployment, *nodes: int, **options: Any) -> BufferedThreadStore:
        """An instance on the cluster, once that has elected who answers."""

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
        """The same for an ``async with`` block, verified as every `Deployment.store`."""
        async with AsyncExitStack() as exits:

            async def opened() -> BufferedThreadStore | None:
                try:
                    return await exits.enter_async_context(deployment.store(nats=self.nats(), **options))
                except BufstoreError:
                    return None

            yield await eventually(opened, 60)


async def leader_of(store: Any, deployment: Deployment) -> int:
    """Which node leads the log, as soon as one does."""

    async def asked() -> str:
        try:
            info = await store.buffer.session.stream.api(f"STREAM.INFO.{deployment.log.stream}")
        except BufstoreError:
            return ""
        return str(info["cluster"].get("leader") or "")

    leader: str = await eventually(asked, 60)
    return int(leader[1:])


async def lead_log_and_cluster(store: Any, cluster: Cluster, deployment: Deployment) -> int:
    """Have one node lead both, and return it: one that leads only the log answers nothing once it is cut off."""

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
    """Whether every replica of log and hot bucket has all that its leader has."""
    for stream in (deployment.log.stream, f"KV_{deployment.log.bucket}"):
        try:
            info = await store.buffer.session.stream.api(f"STREAM.INFO.{stream}")
        except BufstoreError:
            return False
        followers = info["cluster"].get("replicas") or ()
        if len(followers) != _NODES - 1 or not all(f["current"] and not f.get("offline") for f in followers):
            return False
    return True
