"""Fixtures and helpers for tests of exclusive work; a test file imports the fixtures by name."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from bufstore.embedded import Servers
from bufstore.tokens import ExclusiveWork, Task, TokensConfig

Open = Callable[..., Any]


@pytest.fixture
def name() -> str:
    """The prefix of this test's subjects and streams."""
    return f"t{secrets.token_hex(5)}"


@pytest.fixture
async def opened(servers: Servers, name: str) -> AsyncIterator[Open]:
    """A function that opens instances for this test; they are closed at its end."""
    async with contextlib.AsyncExitStack() as stack:

        async def open_(url: str = "", **config: Any) -> ExclusiveWork:
            work = await ExclusiveWork.open(url or servers.nats.url, TokensConfig(**{"name": name} | config))
            return await stack.enter_async_context(work)

        yield open_


async def took(work: ExclusiveWork, wait_s: float = 30) -> Task:
    """Take a task, and fail if none comes."""
    task = await work.take(wait_s)
    assert task is not None
    return task


def stall(task: Task) -> None:
    """Stop renewing the task's lease, as if the holder's process were paused."""
    assert task._holding._renewing is not None
    task._holding._renewing.cancel()


async def nothing_left(work: ExclusiveWork) -> bool:
    """True when all items are done and nothing is stored for them."""
    return (await work.statistics()).stored == 0


@contextlib.asynccontextmanager
async def working(
    handler: Callable[[Task], Awaitable[None]], *instances: ExclusiveWork, concurrency: int = 1, **options: Any
) -> AsyncIterator[None]:
    """Let the instances work within the block. They stop before they are closed, also when the block fails."""
    stopping = asyncio.Event()
    async with asyncio.TaskGroup() as runs:
        for instance in instances:
            runs.create_task(instance.run(handler, stopping, concurrency=concurrency, **options))
        yield
        stopping.set()
