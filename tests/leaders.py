"""Makes leaders of streams and consumers go, one after the other, while the checks of a contract run.

The seed decides which leader goes next and how: it steps down, or its node is killed and started again. The next one
goes when every node is back, and every stream has a leader and followers that are up to date.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import nats
import nats.errors
from nats.aio.client import Client

from bufstore import BufstoreError, LogUnavailable
from bufstore.config import as_nats_config
from bufstore.mailbox import MailboxConfig
from bufstore.mailbox.nats import NatsBackend
from cluster import Cluster
from conformance.mailbox_queue import Unsteady
from helpers import eventually
from mailboxes import Mailboxes

#: How many stream leaders, and how many consumer leaders, step down for each node that is killed.
_STEPS_DOWN = 2
#: Longest pause between two leaders, in seconds; the check makes progress meanwhile.
_PAUSE_S = 0.5
#: How long an election may take on a busy machine, in seconds.
_PATIENCE_S = 30.0
#: How long a check may take while leaders go, in seconds.
_CHECK_S = 180.0


class Leaders:
    """Makes the leaders of some streams of a cluster go; streams may be added and removed."""

    def __init__(self, cluster: Cluster, streams: list[str], seed: int) -> None:
        self._cluster = cluster
        self.streams = streams
        self._chance = random.Random(seed)
        self._kinds = ["stepped down"] * _STEPS_DOWN + ["consumer's stepped down"] * _STEPS_DOWN + ["killed"]
        self.gone: Counter[str] = Counter()
        self._breaking: asyncio.Task[None] | None = None
        self._client: Client | None = None

    async def beside(self, check: Callable[[], Awaitable[bool | None]], faults: int) -> None:
        """Repeat the check until `faults` leaders have gone, one of them killed, and a check was completed.

        A check returns False if it was broken off. A fault counts only if it was answered: a kill may come later.
        """
        done = False
        while not done or self.gone.total() < faults or not self.gone["killed"]:
            assert self._breaking is not None
            if self._breaking.done():
                await self._breaking
            async with asyncio.timeout(_CHECK_S):
                done |= await check() is not False

    @asynccontextmanager
    async def leave(self) -> AsyncIterator[None]:
        """Make leaders go, one after the other, within the block; at its end the cluster is whole."""
        config = self._cluster.nats()
        client = await nats.connect(
            list(config.servers),
            user=config.user,
            password=config.password,
            max_reconnect_attempts=-1,
            reconnect_time_wait=0.1,
            error_cb=_expected,
        )
        self._client = client
        self._breaking = breaking = asyncio.create_task(self._break(client))
        try:
            yield
        finally:
            breaking.cancel()
            await asyncio.gather(breaking, return_exceptions=True)
            await eventually(lambda: asyncio.to_thread(self._cluster.connected), 60)
            await client.close()

    @asynccontextmanager
    async def of(self, *streams: str) -> AsyncIterator[None]:
        """Include these streams' leaders within the block; at its end the streams are deleted."""
        self.streams += streams
        try:
            yield
        finally:
            assert self._client is not None
            for stream in streams:
                self.streams.remove(stream)
                await _asked(self._client, f"STREAM.DELETE.{stream}")

    async def _break(self, client: Client) -> None:
        deck: list[str] = []
        while True:
            await eventually(lambda: self._whole(client), 120)
            await asyncio.sleep(self._chance.uniform(0.05, _PAUSE_S))
            if not self.streams:
                continue
            deck = deck or self._chance.sample(self._kinds, len(self._kinds))
            kind, stream = deck.pop(), self._chance.choice(self.streams)
            done = await self._killed(client, stream) if kind == "killed" else await self._stepped(client, stream, kind)
            self.gone[kind] += done

    async def _stepped(self, client: Client, stream: str, kind: str) -> bool:
        if kind == "stepped down":
            return (await _asked(client, f"STREAM.LEADER.STEPDOWN.{stream}")).get("success", False)
        consumers = (await _asked(client, f"CONSUMER.NAMES.{stream}")).get("consumers") or [""]
        consumer = self._chance.choice(consumers)
        return (await _asked(client, f"CONSUMER.LEADER.STEPDOWN.{stream}.{consumer}")).get("success", False)

    async def _killed(self, client: Client, stream: str) -> bool:
        leader = (await _asked(client, f"STREAM.INFO.{stream}")).get("cluster", {}).get("leader")
        if not leader:
            return False
        server = self._cluster.servers[int(leader[1:])]
        # The node is started also when the check ends meanwhile: the next check finds the cluster whole.
        killing = asyncio.ensure_future(_killed_and_started(server))
        try:
            await asyncio.shield(killing)
        except asyncio.CancelledError:
            await killing
            raise
        return True

    async def _whole(self, client: Client) -> bool:
        if not await asyncio.to_thread(self._cluster.connected):
            return False
        for stream in list(self.streams):
            info = await _asked(client, f"STREAM.INFO.{stream}")
            if (info.get("error") or {}).get("err_code") == 10059:
                continue  # the check that used this stream has ended
            followers = info.get("cluster", {}).get("replicas") or ()
            if len(followers) != 2 or not all(f["current"] and not f.get("offline") for f in followers):
                return False
        return True


async def _expected(_: Exception) -> None:
    """Ignore the client's errors: its node was killed, and it connects to another."""


async def _killed_and_started(server: Any) -> None:
    await asyncio.to_thread(server.kill)
    await asyncio.to_thread(server.start)


async def _asked(client: Client, verb: str) -> dict[str, Any]:
    """Return the answer of JetStream's API, or an empty one when nobody answers."""
    with suppress(nats.errors.Error, OSError, TimeoutError):
        answer = await client.request(f"$JS.API.{verb}", b"", timeout=2)
        return dict(json.loads(answer.data))
    return {}


async def unsteady(boxes: Mailboxes, cluster: Cluster, stack: AsyncExitStack) -> Unsteady:
    """Open an instance on the cluster that repeats what failed without effect."""
    config = MailboxConfig(
        timeout_s=_PATIENCE_S, sweep_interval_s=1.0, signal_ack_wait_s=3.0, signal_nack_max_delay_s=3.0
    )

    async def opened() -> Unsteady | None:
        with suppress(BufstoreError):  # no leader makes streams yet
            store = Unsteady(Patient(as_nats_config(cluster.nats()), boxes.names, config), config)
            return await stack.enter_async_context(store)
        return None

    store: Unsteady = await eventually(opened, 60)
    return store


class Patient(NatsBackend):
    """A backend that repeats calls which raised LogUnavailable, as docs/MAILBOX.md tells callers to do.

    Steps repeat themselves for as long as their call may take; reads, sweeps and answers to signals do not.
    """


def _repeated(name: str) -> Any:
    call = getattr(NatsBackend, name)

    async def patient(self: Patient, *args: Any, **options: Any) -> Any:
        until = time.monotonic() + 2 * _PATIENCE_S
        while True:
            try:
                return await call(self, *args, **options)
            except LogUnavailable:
                if time.monotonic() > until:
                    raise
            await asyncio.sleep(0.05)

    return patient


for _name in (
    *("thread", "first", "find", "queued", "all_of", "queued_threads", "finished", "counts", "gauges"),
    *("purge", "expiring", "signal_due", "signal_lost", "sweeps", "signals", "ack_signal", "listen_live"),
):
    setattr(Patient, _name, _repeated(_name))
