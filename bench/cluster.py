"""A cluster of three servers that stores three replicas of each stream."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.baselines.raw_nats import RawNats, bare_stream
from bench.servers import NotDurable, syncs_always
from bench.three_servers import free_ports, three_servers

_NODES = 3
#: How long an election and a transfer of leadership may take, in seconds.
_ELECTION_S = 60.0
_ANSWER_S = 2.0
_LOOK_S = 0.05


@dataclass(frozen=True)
class Cluster:
    """A running cluster. `url` is the first server's, to which every client connects."""

    url: str
    pids: list[int]
    monitors: list[int]

    def check(self, *, always: bool) -> None:
        """Raise NotDurable unless every server syncs as expected."""
        found = [syncs_always(port) for port in self.monitors]
        if found != [always] * _NODES:
            raise NotDurable(f"sync_interval always: {found}")

    def lead(self) -> None:
        """Make the first server lead all streams; otherwise chance decides whose appends need another hop."""
        asyncio.run(asyncio.wait_for(_lead(self.url), _ELECTION_S))


@contextmanager
def cluster(sync_interval: str) -> Iterator[Cluster]:
    """Start a cluster that makes streams of three replicas. Raises TimeoutError when it elects no leader."""
    monitors = free_ports(_NODES)
    with (
        tempfile.TemporaryDirectory(prefix="bufstore-") as folder,
        three_servers(Path(folder), sync_interval=sync_interval, monitors=monitors) as servers,
    ):
        url = f"nats://all:all@127.0.0.1:{servers[0].port}"
        asyncio.run(asyncio.wait_for(_elected(url), _ELECTION_S))
        yield Cluster(url, [server.pid for server in servers if server.pid], monitors)


async def _elected(url: str) -> None:
    """Wait until a stream of three replicas can be made."""
    while True:
        with suppress(RuntimeError, OSError, TimeoutError):
            nats = await RawNats.connect(url)
            try:
                probe = bare_stream("probe", num_replicas=_NODES)
                await asyncio.wait_for(nats.request("$JS.API.STREAM.CREATE.probe", probe), _ANSWER_S)
                await asyncio.wait_for(nats.request("$JS.API.STREAM.DELETE.probe"), _ANSWER_S)
                return
            finally:
                nats.close()
        await asyncio.sleep(_LOOK_S)


async def _lead(url: str) -> None:
    nats = await RawNats.connect(url)

    async def ask(subject: str, body: Any = b"") -> dict[str, Any]:
        """Return the answer, or nothing: while a stream elects a leader an error comes, or no answer at all."""
        with suppress(RuntimeError, TimeoutError):
            return await asyncio.wait_for(nats.request(subject, body), _ANSWER_S)
        return {}

    try:
        for name in (await nats.ask("$JS.API.STREAM.NAMES"))["streams"] or ():
            while (await ask(f"$JS.API.STREAM.INFO.{name}")).get("cluster", {}).get("leader") != "n0":
                await ask(f"$JS.API.STREAM.LEADER.STEPDOWN.{name}", {"placement": {"preferred": "n0"}})
                await asyncio.sleep(_LOOK_S)
    finally:
        nats.close()
