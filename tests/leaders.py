"""Leaders of streams and consumers that go, one after the other, while checks of a contract run beside.

A seed says who goes next and how: told to step down, or killed with its node, which starts again. The next goes when
every node is back and every stream has a leader and followers that have all it has.
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

#: How many streams are told to let their leaders go, for each node that is killed.
_STEPS_DOWN = 2
#: Seconds between two of them at most: time in which something gets done.
_PAUSE_S = 0.5
#: How long an election may take on a machine that others use, too.
_PATIENCE_S = 30.0
#: And a check, with some of them.
_CHECK_S = 180.0


class Leaders:
    """Of `streams` of a cluster, which may come and go."""

    def __init__(self, cluster: Cluster, streams: list[str], seed: int) -> None:
        self._cluster = cluster
        self.streams = streams
        self._chance = random.Random(seed)
        self._kinds = ["stepped down"] * _STEPS_DOWN + ["consumer's stepped down"] * _STEPS_DOWN + ["killed"]
        self.gone: Counter[str] = Counter()
        self._breaking: asyncio.Task[None] | None = None
        self._client: Client | None = None

    async def beside(self, check: Callable[[], Awaitable[bool | None]], faults: int) -> None:
        """Do the check, again and again until so many have gone, and it has not said (False) that it was broken off."""
        done = False
        while not done or self.gone.total() < faults:
            assert self._breaking is not None
            if self._breaking.done():
                await self._breaking
            async with asyncio.timeout(_CHECK_S):
                done |= await check() is not False

    @asynccontextmanager
    async def leave(self) -> AsyncIterator[None]:
        """Let them go within, one after the other; in the end all is whole."""
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
        """Those of these go, too, within; in the end the streams are removed."""
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
        # Also when the check ends meanwhile: whoever comes next finds the cluster whole.
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
                continue  # its check has ended
            followers = info.get("cluster", {}).get("replicas") or ()
            if len(followers) != 2 or not all(f["current"] and not f.get("offline") for f in followers):
                return False
        return True


async def _expected(_: Exception) -> None:
    """The client's node was killed: it goes to another."""


async def _killed_and_started(server: Any) -> None:
    await asyncio.to_thread(server.kill)
    await asyncio.to_thread(server.start)


async def _asked(client: Client, verb: str) -> dict[str, Any]:
    """The answer, or nothing while nobody answers."""
    with suppress(nats.errors.Error, OSError, TimeoutError):
        answer = await client.request(f"$JS.API.{verb}", b"", timeout=2)
        return dict(json.loads(answer.data))
    return {}


async def unsteady(boxes: Mailboxes, cluster: Cluster, stack: AsyncExitStack) -> Unsteady:
    """An open instance on the cluster; what says that nothing was done is called again."""
    config = MailboxConfig(
        timeout_s=_PATIENCE_S, sweep_interval_s=1.0, signal_ack_wait_s=3.0, signal_nack_max_delay_s=3.0
    )

    async def opened() -> Unsteady | None:
        with suppress(BufstoreError):  # there is nobody yet who makes streams
            store = Unsteady(Patient(as_nats_config(cluster.nats()), boxes.names, config), config)
            return await stack.enter_async_context(store)
        return None

    store: Unsteady = await eventually(opened, 60)
    return store


class Patient(NatsBackend):
    """One whose callers repeat what raised LogUnavailable, as docs/MAILBOX.md says.

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
