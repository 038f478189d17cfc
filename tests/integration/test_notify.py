"""The conformance suite of notifiers on real servers, for all of them."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator

import pytest

from bufstore.embedded import RedisServer, Servers
from bufstore.notify import Hints, MemoryBroker, MemoryNotifier, NatsNotifier, Notifier, PostgresNotifier, RedisNotifier
from bufstore.testing import Check
from conformance import NOTIFY_CHECKS, Notifiers

ADAPTERS = [
    "memory", "nats-counters", "nats-kv", "nats-without-hints", "redis", "redis-without-hints", "postgres",
]  # fmt: skip


@pytest.fixture(scope="module", params=ADAPTERS)
async def notifiers(request: pytest.FixtureRequest, servers: Servers) -> AsyncIterator[Notifiers]:
    adapter = request.param
    prefix = f"t{secrets.token_hex(4)}" + (".notifications" if adapter == "nats-kv" else "")
    broker = MemoryBroker()
    nats_hints = {"nats-counters": Hints.AUTO, "nats-kv": Hints.KV, "nats-without-hints": Hints.NONE}
    redis = request.getfixturevalue("redis_server") if adapter.startswith("redis") else None

    async def open_() -> Notifier:
        if adapter == "memory":
            return MemoryNotifier(broker)
        if adapter in nats_hints:
            # A long timeout, because a hint that cannot be claimed in time wakes everybody.
            return await NatsNotifier.open(servers.nats.url, prefix=prefix, hints=nats_hints[adapter], timeout_s=10)
        if adapter == "postgres":
            return await PostgresNotifier.open(servers.postgres.dsn, prefix=prefix, timeout_s=10)
        assert isinstance(redis, RedisServer)
        return await RedisNotifier.open(redis.url, prefix=prefix, hints=adapter == "redis", timeout_s=10)

    yield Notifiers(open_, hints=adapter not in ("nats-without-hints", "redis-without-hints", "postgres"))


@pytest.mark.parametrize("check", NOTIFY_CHECKS, ids=str)
async def test_conformance(notifiers: Notifiers, check: Check) -> None:
    await check(notifiers)
