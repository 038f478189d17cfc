"""The conformance suites of logs and of the state that instances share, on NATS and in memory."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from bufstore import BufferConfig, LogConfig
from bufstore.buffer.ports.shared_state import Session
from bufstore.config import as_nats_config
from bufstore.embedded import Servers
from bufstore.memory import MemoryNats
from bufstore.nats.session import NatsSession
from bufstore.testing import LOG_CHECKS, SHARED_STATE_CHECKS, Check, Logs


@pytest.fixture(params=["nats", "memory"])
async def logs(request: pytest.FixtureRequest) -> AsyncIterator[Logs]:
    name = f"t{secrets.token_hex(5)}"
    log = LogConfig(stream=f"LOG-{name}", bucket=f"hot-{name}", subject=name, partitions=4, max_bytes=4 << 20)
    config, memory = BufferConfig.fitting(log, flush_max_entries=100), MemoryNats()
    async with AsyncExitStack() as stack:

        async def open_() -> Session:
            if request.param == "memory":
                session = memory.session(config)
            else:
                servers: Servers = request.getfixturevalue("servers")
                session = NatsSession(as_nats_config(servers.nats.url), config, "bufstore-test")
            await session.open()
            stack.push_async_callback(session.aclose)
            return session

        yield Logs(config, open_)


@pytest.mark.parametrize("check", LOG_CHECKS + SHARED_STATE_CHECKS, ids=str)
async def test_conformance(logs: Logs, check: Check) -> None:
    await check(logs)
