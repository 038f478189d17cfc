"""Notifiers on NATS: a failed listen leaves nothing behind, and missing permissions are reported."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.client import Client

from bufstore import ConfigError
from bufstore.embedded import NatsServer
from bufstore.errors import Unavailable
from bufstore.notify import Hints, NatsNotifier
from bufstore.notify.nats import NatsBroker
from bufstore.notify.protocol import Event
from helpers import eventually


@pytest.fixture
def prefix() -> str:
    return f"t{secrets.token_hex(4)}"


@pytest.fixture
async def hanging(tmp_path: Path) -> AsyncIterator[tuple[NatsServer, Client]]:
    """A server, and an app's client connected to it."""
    server = NatsServer(tmp_path)
    server.start()
    try:
        client = await nats.connect(server.url)
        yield server, client
        await client.close()
    finally:
        server.stop()


async def test_a_listen_that_fails_leaves_nothing_on_an_apps_client(
    hanging: tuple[NatsServer, Client], prefix: str
) -> None:
    server, client = hanging
    async with await NatsNotifier.open(client, prefix=prefix, hints=Hints.NONE, timeout_s=0.2) as notifier:
        broker = NatsBroker(client, prefix, None, timeout_s=60)
        server.pause()
        try:
            for _ in range(3):
                with pytest.raises(Unavailable):
                    await notifier.listen_scheduled(["kind"], print)
            waiting = asyncio.create_task(broker.subscribe(Event.COMPLETED, print))
            while not client._subs:  # noqa: ASYNC110
                await asyncio.sleep(0)
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await waiting
            assert client._subs == {}
        finally:
            server.resume()
        heard = asyncio.Event()

        async def listens() -> bool:  # its calls have 0.2 s each
            with contextlib.suppress(Unavailable):
                await notifier.listen_completed("work", heard.set)
                return True
            return False

        async def hears() -> bool:
            await notifier.notify_completed("work")
            return heard.is_set()

        await eventually(listens)
        await eventually(hears)


EVENTS = ("sched", "chainc", "owls")


def rights(prefix: str, hints: Hints) -> str:
    """Users with the rights of docs/NOTIFY.md: one may notify, one may listen, one may do both."""
    stream = f"{prefix}-hints" if hints is Hints.COUNTERS else f"KV_{prefix}_hints"
    kept = (
        [f"{prefix}.hint.*"]
        if hints is Hints.COUNTERS
        else [f"$KV.{prefix}_hints.>", f"$JS.API.STREAM.MSG.GET.{stream}"]
    )
    subjects = [f"{prefix}.{event}" for event in EVENTS]
    may_hint = [*kept, f"$JS.API.STREAM.CREATE.{stream}"]

    def user(name: str, publish: list[str], subscribe: list[str]) -> str:
        both = f"publish: {json.dumps(publish)}, subscribe: {json.dumps(subscribe)}"
        return f"{{ user: {name}, password: x, permissions: {{ {both} }} }}"

    users = [
        user("tells", subjects + may_hint, ["_INBOX.>"]),
        user("hears", may_hint, ["_INBOX.>", *subjects]),
        user("all", subjects + may_hint, ["_INBOX.>", *subjects]),
    ]
    return f"accounts {{ P {{ jetstream: enabled, users: [ {', '.join(users)} ] }} }}"


@pytest.fixture(params=[Hints.COUNTERS, Hints.KV])
def permitting(request: pytest.FixtureRequest, tmp_path: Path, prefix: str) -> Iterator[tuple[NatsServer, Hints]]:
    server = NatsServer(tmp_path, extra_config=rights(prefix, request.param))
    server.start()
    try:
        yield server, request.param
    finally:
        server.stop()


async def silent(error: Exception) -> None:
    pass


@pytest.mark.parametrize("apps", [False, True], ids=["own connection", "app's client"])
async def test_what_nats_does_not_permit_is_said(
    permitting: tuple[NatsServer, Hints], prefix: str, apps: bool, caplog: pytest.LogCaptureFixture
) -> None:
    server, hints = permitting
    async with contextlib.AsyncExitStack() as stack:

        async def open_(user: str) -> NatsNotifier:
            url: Any = f"nats://{user}:x@127.0.0.1:{server.port}"
            if apps:
                url = await nats.connect(url, error_cb=silent)
                stack.push_async_callback(url.close)
            notifier = await NatsNotifier.open(url, prefix=prefix, hints=hints, timeout_s=10)
            return await stack.enter_async_context(notifier)

        tells, hears, all_ = await open_("tells"), await open_("hears"), await open_("all")
        for _ in range(2):
            refused = await asyncio.gather(
                tells.listen_scheduled(["kind"], print),
                tells.listen_completed("work", print),
                tells.listen_ownership_lost("work", print),
                return_exceptions=True,
            )
            assert [type(error) for error in refused] == [ConfigError] * 3
            for error, event in zip(refused, EVENTS, strict=True):
                assert f"subscribe to '{prefix}.{event}'" in str(error)
            assert not tells.statistics().healthy
        await hears.notify_scheduled("kind")
        await hears.notify_completed("work")
        told = hears.statistics()
        assert (told.healthy, told.published, told.dropped, told.hint_failures) == (False, 0, 2, 0)
        # What is permitted still works, with hints.
        caplog.clear()
        heard: list[str] = []
        for notifier in (hears, hears, all_):
            await notifier.listen_scheduled(["kind"], heard.append)
        await all_.listen_completed("work", lambda: heard.append("work"))
        await tells.notify_scheduled("kind", 1)
        await all_.notify_scheduled("kind", 1)
        await tells.notify_completed("work")
        await eventually(lambda: _answered(hears, all_, heard))
        assert sorted(heard) == ["kind", "kind", "work"]
        assert [n.statistics().healthy for n in (tells, hears, all_)] == [False, False, True], "some may not do all"
        assert [n.statistics().hint_failures for n in (tells, all_)] == [0, 0]
        assert [r.getMessage() for r in caplog.records if getattr(r, "action", "") == "nats_forbidden"] == []


async def _answered(one: NatsNotifier, other: NatsNotifier, heard: list[str]) -> bool:
    """True when each of three listeners was woken or spared for both items, and the completion was heard."""
    told = [notifier.statistics() for notifier in (one, other)]
    return sum(each.spared for each in told) == 4 and heard.count("kind") >= 2 and "work" in heard
