"""Fixtures and helpers of the tests of exclusive work; a test file takes the fixtures over by name."""

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
    """The first word of this test's own subjects and streams."""
    return f"t{secrets.token_hex(5)}"


@pytest.fixture
async def opened(servers: Servers, name: str) -> AsyncIterator[Open]:
    """Opens instances of this test's own work; closes them in the end."""
    async with contextlib.AsyncExitStack() as stack:

        async def open_(url: str = "", **config: Any) -> ExclusiveWork:
            work = await ExclusiveWork.open(url or servers.nats.url, TokensConfig(**{"name": name} | config))
            return await stack.enter_async_context(work)

        yield open_


async def took(work: ExclusiveWork, wait_s: float = 30) -> Task:
    """The next task, which must come."""
    task = await work.take(wait_s)
    assert task is not None
    return task


def stall(task: Task) -> None:
    """The holder shows no sign of life any more, as if its process were paused."""
    assert task._holding._renewing is not None
    task._holding._renewing.cancel()


async def nothing_left(work: ExclusiveWork) -> bool:
    """Whether all items are done, and nothing is stored for them."""
    return (await work.statistics()).stored == 0


@contextlib.asynccontextmanager
async def working(
    handler: Callable[[Task], Awaitable[None]], *instances: ExclusiveWork, concurrency: int
) -> AsyncIterator[None]:
    """The instances work until the block ends, and have stopped before they are closed, also when it fails."""
    stopping = asyncio.Event()
    async with asyncio.TaskGroup() as runs:
        for instance in instances:
            runs.create_task(instance.run(handler, stopping, concurrency=concurrency))
        yield
        stopping.set()
