"""Rights that a reload of NATS takes away, while the connection stays open."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from bufstore import ConfigError, FlushTimeout, LogUnavailable, OutcomeUnknown, Unavailable
from bufstore.embedded import NatsServer, Servers
from bufstore.jetstream import asking
from bufstore.jetstream.client import ListeningClient, refusal
from bufstore.mailbox import Dispatch, MailboxConfig, NatsMailboxNames, NatsMailboxStore, Worker
from bufstore.notify import NatsNotifier
from bufstore.notify.nats import NatsBroker
from bufstore.notify.payload import channel
from bufstore.notify.protocol import Event
from bufstore.tokens import Locks
from conftest import Deployment
from helpers import eventually, fresh, run_of, said

#: These tests run servers of their own.
pytestmark = pytest.mark.alone


class Guarded:
    """A server with a user whose rights change. The embedded server's own user keeps all rights."""

    def __init__(self, folder: Path) -> None:
        self.server = NatsServer(folder)
        self.server.start()
        self.limited = f"nats://limited:x@127.0.0.1:{self.server.port}"
        self._file = self.server.data / "nats.conf"
        self._rest = [line for line in self._file.read_text().splitlines() if not line.startswith("authorization")]

    def _reloads(self) -> int:
        return (self.server.data / "log").read_text().count("Reloaded server configuration")

    async def deny(self, *subjects: str, publishing: Sequence[str] = ()) -> None:
        """Deny the limited user subscriptions to these subjects only, and publishing on those."""
        name, _, password = self.server.url.partition("//")[2].partition("@")[0].partition(":")
        rights = {"subscribe": {"deny": subjects}, "publish": {"deny": publishing}}
        denied = f"permissions: {json.dumps(rights)}" if subjects or publishing else ""
        users = f'{{ user: {name}, password: "{password}" }}, {{ user: limited, password: x, {denied} }}'
        self._file.write_text("\n".join([*self._rest, f"authorization {{ timeout: 10, users: [ {users} ] }}\n"]))
        before = self._reloads()
        assert self.server.pid is not None
        os.kill(self.server.pid, signal.SIGHUP)

        async def reloaded() -> bool:
            return self._reloads() > before

        await eventually(reloaded)


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[Guarded]:
    found = Guarded(tmp_path / "nats")
    await found.deny()
    yield found
    found.server.stop()


async def test_a_writer_that_cannot_hear_what_is_parked_writes_nothing_until_it_can(
    servers: Servers, guarded: Guarded
) -> None:
    """The writer would build on a parked entry: its own entries, reported as stored, would be parked too."""
    deployment, parked = Deployment(servers), fresh("t").replace("-", "_")
    deployment.log = replace(deployment.log, subject=parked)
    async with (
        deployment.store(nats=guarded.server.url) as other,
        deployment.store(nats=guarded.limited, flusher=False, append_timeout_s=3.0, read_timeout_s=3.0) as writer,
    ):
        await writer.checkpoint("t", [said(0)], run_of("t"))
        await guarded.deny(f"{parked}-parked")
        with pytest.raises(LogUnavailable, match="where writers hear which threads are quarantined"):
            for n in range(1, 200):
                with suppress(OutcomeUnknown):
                    await writer.checkpoint("t", [said(i) for i in range(n)], run_of("t"))
        with pytest.raises(ConfigError, match="where writers hear which threads are quarantined"):
            async with deployment.store(nats=guarded.limited, flusher=False):
                pass
        await guarded.deny()

        async def written() -> bool:
            with suppress(LogUnavailable):
                await writer.checkpoint("t", [said(0)], run_of("t"))
                return True
            return False

        await eventually(written)
        assert writer.buffer.appender.tip("t") is not None
        await other.buffer.shared.tell_parked("t")

        async def heard() -> bool:
            return writer.buffer.appender.tip("t") is None

        await eventually(heard)


async def test_a_flusher_that_may_not_acknowledge_says_so_and_flushes_on(servers: Servers, guarded: Guarded) -> None:
    """It stood still once the server had delivered as much as may be unacknowledged, and reported no trouble."""
    deployment = Deployment(servers)
    async with deployment.store(nats=guarded.limited, flush_max_entries=20) as store:
        await store.checkpoint("t", [said(0)], run_of("t"))
        await store.force_flush_all()
        await guarded.deny(publishing=["$JS.ACK.>"])
        for n in range(1, 100):  # one after another: each is a message of the log
            await store.checkpoint_append("t", [said(n)], run_of("t"))
        await store.force_flush_all(timeout_s=30)
        trouble = (await store.health()).flush_trouble
        assert "$JS.ACK.>" in trouble, trouble
        await guarded.deny()

        more = count(100)

        async def well() -> bool:
            await store.checkpoint_append("t", [said(next(more))], run_of("t"))
            await store.force_flush_all(timeout_s=30)
            return (await store.health()).flushing

        await eventually(well, 30)


async def test_a_flusher_that_may_make_no_consumer_says_so_once(
    servers: Servers, guarded: Guarded, caplog: pytest.LogCaptureFixture
) -> None:
    deployment = Deployment(servers)
    async with deployment.store(nats=guarded.server.url, flusher=False) as other:
        await other.checkpoint("t", [said(0)], run_of("t"))
    await guarded.deny(publishing=["$JS.API.CONSUMER.CREATE.>"])
    async with deployment.store(nats=guarded.limited) as store:
        with pytest.raises(FlushTimeout):
            await store.force_flush("t", timeout_s=4)
        told = [getattr(r, "action", "") for r in caplog.records if "consumer.create" in r.getMessage()]
        assert sorted(told) == ["flush_failed", "nats_forbidden"]
        trouble = (await store.health()).flush_trouble
        assert f"consumer.create.{deployment.log.stream.lower()}.>" in trouble, trouble
        await guarded.deny()
        await store.force_flush("t", timeout_s=30)


async def test_health_says_what_a_process_may_not_ask(servers: Servers, guarded: Guarded) -> None:
    deployment = Deployment(servers)
    async with (
        deployment.store(nats=guarded.server.url),
        deployment.store(nats=guarded.limited, flusher=False) as store,
    ):
        await store.checkpoint("t", [said(0)], run_of("t"))
        await guarded.deny(publishing=["$JS.API.DIRECT.GET.>"])
        store.buffer.appender.forget("t")
        with pytest.raises(ConfigError, match=r"api\.direct\.get"):
            await store.checkpoint_append("t", [said(1)], run_of("t"))
        with pytest.raises(ConfigError, match=r"api\.direct\.get"):
            await store.load_messages("t")
        health = await store.health()
        assert "api.direct.get" in health.write_trouble
        assert "api.direct.get" in health.read_trouble
        assert health.flush_trouble.startswith("it is not known whether others flush"), health.flush_trouble
        await guarded.deny()
        await store.checkpoint_append("t", [said(1)], run_of("t"))
        await store.load_messages("t")
        assert (await store.health()).ok


async def test_a_notifier_hears_again_when_it_may(guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "_EVERY_S", 0.1)
    heard: list[str] = []
    subject = channel("nn", Event.SCHEDULED, ".")
    async with (
        await NatsNotifier.open(guarded.limited, prefix="nn", timeout_s=10) as listener,
        await NatsNotifier.open(guarded.server.url, prefix="nn", timeout_s=10) as sender,
    ):
        await listener.listen_scheduled(["k"], heard.append)
        broker = listener._broker
        assert isinstance(broker, NatsBroker)
        before = broker.client()

        async def refused() -> bool:
            """True when the subscription is refused on a new connection, too."""
            with suppress(Unavailable):
                client = broker.client()
                return client is not before and refusal(client, "subscription", subject) is not None
            return False

        await guarded.deny("nn.>")
        await eventually(refused)
        await guarded.deny()

        async def hears() -> bool:
            await sender.notify_scheduled("k")
            return bool(heard)

        await eventually(hears)


async def test_a_right_that_was_missing_once_costs_no_connection_later(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "_EVERY_S", 0.0)
    await guarded.deny("nn.>")
    async with await NatsNotifier.open(guarded.limited, prefix="nn", timeout_s=10) as listener:
        with pytest.raises(ConfigError, match="subscribe to"):
            await listener.listen_scheduled(["k"], lambda _: None)
        broker = listener._broker
        assert isinstance(broker, NatsBroker)
        assert isinstance(client := broker.client(), ListeningClient)
        await guarded.deny()
        await listener.listen_scheduled(["k"], lambda _: None)
        asks = asking.Asking()
        assert not any([await asks.permitted(client, now) for now in range(3)])


async def test_a_lock_that_may_not_be_released_hides_no_error_of_its_block(guarded: Guarded) -> None:
    async with await Locks.open(guarded.limited, name="mine") as locks:
        with pytest.raises(KeyError):
            async with await locks.acquire("a"):
                await guarded.deny(publishing=["$JS.API.STREAM.MSG.DELETE.>"])
                raise KeyError
        with pytest.raises(ConfigError, match="does not permit"):
            async with await locks.acquire("b"):
                pass


async def _troubled(worker: Worker, text: str) -> bool:
    return worker.trouble is not None and text in worker.trouble


@pytest.mark.parametrize("right", ["$JS.API.CONSUMER.MSG.NEXT.>", "$JS.ACK.>", "$KV.mailbox.>"])
async def test_a_worker_says_what_it_may_not_do_and_works_on_when_it_may(guarded: Guarded, right: str) -> None:
    """Its pulls were answered by nobody, or brought nothing new, and it reported no trouble."""
    done: set[str] = set()

    async def handle(dispatch: Dispatch) -> None:
        done.add(dispatch.thread_id)

    names = NatsMailboxNames(bucket="mailbox", max_bytes=64 << 20, signals_pending_max=3)
    config = MailboxConfig(signal_ack_wait_s=2.0, signal_fetch_expires_s=1.0, lease_s=2.0)
    async with (
        NatsMailboxStore(guarded.server.url, names=names, config=config) as other,
        NatsMailboxStore(guarded.limited, names=names, config=config) as mailbox,
        Worker(mailbox, "w", handle) as worker,
    ):
        await guarded.deny(publishing=[right])
        for n in range(8):
            await other.enqueue(f"t{n}", b"x")
        await eventually(lambda: _troubled(worker, "does not permit"), 30)
        await guarded.deny()

        async def all_done() -> bool:
            return len(done) == 8 and worker.trouble is None

        await eventually(all_done, 40)


async def test_live_deliveries_that_are_not_permitted_reach_nobody_and_say_so(guarded: Guarded) -> None:
    names = NatsMailboxNames(bucket="mailbox", max_bytes=64 << 20)

    async def heard(_: bytes) -> None:
        raise AssertionError

    async with (
        NatsMailboxStore(guarded.server.url, names=names) as other,
        NatsMailboxStore(guarded.limited, names=names, config=MailboxConfig(live_timeout_s=0.5)) as mailbox,
    ):
        live = f"{names.live_subject}.>"
        await guarded.deny(live, publishing=[live])
        with pytest.raises(ConfigError, match="subscribe to"):
            await mailbox.listen_live("t", heard)
        stop = await other.listen_live("t", heard)
        queued = await mailbox.deliver("t", b"x")
        assert queued is not None
        assert not queued.maybe_delivered
        await stop()


async def test_a_mailbox_works_on_when_answers_may_arrive_again(guarded: Guarded) -> None:
    done: list[bytes] = []

    async def handle(dispatch: Dispatch) -> None:
        done.append(dispatch.payload)

    async def two() -> bool:
        return done == [b"0", b"1"]

    names, config = NatsMailboxNames(bucket="mm", max_bytes=64 << 20), MailboxConfig(timeout_s=3)
    async with (
        NatsMailboxStore(guarded.limited, names=names, config=config) as mailbox,
        NatsMailboxStore(guarded.server.url, names=names, config=config) as other,
        Worker(mailbox, "w", handle),
    ):
        await other.enqueue("t", b"0")
        await guarded.deny("_INBOX.>")
        await guarded.deny()
        await other.enqueue("t", b"1")
        await eventually(two)
