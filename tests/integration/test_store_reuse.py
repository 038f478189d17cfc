"""A store that opens its own pool is wrapped by one buffer only, because the first to close would close the pool."""

from __future__ import annotations

import secrets

import pytest

from bufstore import BufferConfig, BufferedThreadStore, ConfigError, LogConfig, LogUnavailable
from bufstore.embedded import Servers
from bufstore.langgraph import AsyncBufferedSaver, PostgresCheckpointStore
from bufstore.mailbox import PostgresMailboxStore
from conftest import Deployment
from helpers import run_of

NOWHERE = "nats://127.0.0.1:1"


async def test_a_second_buffer_in_front_of_a_store_is_refused_and_takes_nothing_from_the_first(
    deployment: Deployment,
) -> None:
    inner = deployment.inner()
    with pytest.raises(LogUnavailable):
        await BufferedThreadStore.open(inner, nats=NOWHERE, config=deployment.config())  # a failed open may be repeated
    async with deployment.store(inner) as store:
        await store.checkpoint("t", [1], run_of("t"))
        with pytest.raises(ConfigError, match="in use or was closed: make a new one each time you open a store"):
            await BufferedThreadStore.open(inner, nats=deployment.servers.nats.url, config=deployment.config())
        await store.force_flush("t")
        assert await store.load_messages("t") == [1]
    with pytest.raises(ConfigError, match="in use or was closed"):
        await BufferedThreadStore.open(inner, nats=deployment.servers.nats.url, config=deployment.config())
    with pytest.raises(ConfigError, match="this store was closed: make a new one each time"):
        await inner.open()


async def test_a_store_that_the_app_has_open_may_be_wrapped(deployment: Deployment) -> None:
    async with deployment.inner() as inner:
        await inner.setup()
        async with deployment.store(inner) as store:
            await store.checkpoint("t", [1], run_of("t"))
            await store.force_flush("t")
            assert await inner.load_messages("t") == [1]


async def test_the_same_holds_for_savers_and_mailboxes(servers: Servers) -> None:
    name, nats = f"s{secrets.token_hex(5)}", servers.nats.url
    config = BufferConfig(log=LogConfig(stream=name, bucket=name, subject=name, max_bytes=64 << 20))
    inner = PostgresCheckpointStore(servers.postgres.dsn, schema=name, buffer_schema=f"{name}_b", pool_size=4)
    saver = await AsyncBufferedSaver.open(inner, nats=nats, config=config)
    with pytest.raises(ConfigError, match="in use or was closed"):
        await AsyncBufferedSaver.open(inner, nats=nats, config=config)
    assert [found async for found in saver.alist(None)] == [], "the first one works on"
    await saver.aclose()

    mailbox = PostgresMailboxStore(servers.postgres.dsn, schema=name, pool_size=1)
    async with mailbox:
        await mailbox.enqueue("t", b"x")
    with pytest.raises(ConfigError, match="this store was closed"):
        await mailbox.__aenter__()
