"""Small helpers for tests."""

from __future__ import annotations

import asyncio
import sys
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import psycopg
import pytest

from bufstore import ConfigError, LogUnavailable, Run, RunStatus
from bufstore.buffer.ports.log import Floor

#: JDK_JAVA_OPTIONS that halve Java's start: a short job does not regain the time that full optimisation costs.
JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


def fresh(what: str = "thread") -> str:
    """Return a unique id."""
    return f"{what}-{uuid.uuid4().hex}"


def run_of(thread_id: str, n: int = 0, **fields: Any) -> Run:
    """Return a run of the thread."""
    return Run(run_id=f"run-{n}-of-{thread_id}", thread_id=thread_id, **fields)


def done(run: Run) -> Run:
    """Return the run as finished."""
    return Run(run_id=run.run_id, thread_id=run.thread_id, status=RunStatus.DONE)


def said(n: int, size: int = 20) -> dict[str, Any]:
    """Return message number `n`."""
    return {"role": "user", "content": f"{n}:" + "x" * size, "id": f"m{n}"}


async def elsewhere(call: Callable[[], Awaitable[Any]]) -> None:
    """Make the call on another thread's event loop, and assert that it is refused."""

    async def refused() -> None:
        async with asyncio.timeout(10):
            with pytest.raises(ConfigError, match="another event loop"):
                await call()

    await asyncio.to_thread(asyncio.run, refused())


async def let_all_go(*stores: Any) -> None:
    """Flush everything and purge the log, as retention would do later."""
    for store in stores:
        await store.force_flush_all()
        past = 1 + await store.buffer.log.end(5.0)
        partitions = range(store.buffer.subjects.partitions)
        cursors = await store.buffer.ledger.cursors()
        floors = {p: Floor(past, cursors[p].seq if p in cursors else 0) for p in partitions}
        await store.buffer.log.let_go(floors)


async def eventually(check: Callable[[], Awaitable[Any]], timeout_s: float = 20.0) -> Any:
    """Repeat `check` until its answer is true, and return the answer. Fails after `timeout_s`."""
    async with asyncio.timeout(timeout_s):
        while True:
            answer = await check()
            if answer:
                return answer
            await asyncio.sleep(0.02)


async def healthy(store: Any) -> None:
    """Wait until nothing is wrong with a store. It asks the servers for two seconds, and the machine may pause."""

    async def well() -> bool:
        return bool((await store.health()).ok)

    await eventually(well)


async def writable(store: Any) -> None:
    """Wait until a store says that it takes writes."""

    async def takes_writes() -> bool:
        return bool((await store.health()).can_write)

    await eventually(takes_writes, 60)


async def flush_all(store: Any, timeout_s: float = 120.0) -> None:
    """Flush everything, again when the log was away meanwhile: a node that comes back deposes leaders."""

    async def flushed() -> bool:
        try:
            await store.force_flush_all(timeout_s=60)
        except LogUnavailable:
            return False
        return True

    await eventually(flushed, timeout_s)


async def cancel_as_anyio(task: asyncio.Task[Any]) -> None:
    """Cancel the task at every turn of the loop until it has ended, as anyio does."""
    async with asyncio.timeout(10):
        while not task.done():
            task.cancel()
            await asyncio.sleep(0)


class Soft(Exception):
    """The error that Celery's signal handler raises at a task's soft time limit."""


def interrupted_at(moment: int, call: Callable[[], Any], error: type[Exception]) -> bool:
    """Make the call; raise the error at the n-th point where a signal handler may run. False if the call ended."""
    left = moment

    def look(_frame: object, event: str, _arg: object) -> None:
        nonlocal left
        left -= event != "c_call"  # Python handles signals after a call and at the start of a function
        if not left:
            raise error("the signal handler's")

    try:
        sys.setprofile(look)
        call()
    except error as e:
        assert e.args == ("the signal handler's",)
        return True
    finally:
        sys.setprofile(None)
    return False


async def query(dsn: str, sql: str, *parameters: Any) -> list[tuple[Any, ...]]:
    """Return a query's rows, read on a connection of its own."""
    assert not sql.startswith("SELECT FROM"), "select a column: psycopg returns no rows of a query without columns"
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        cursor = await connection.execute(sql, parameters)  # type: ignore[arg-type]
        return await cursor.fetchall() if cursor.description else []
