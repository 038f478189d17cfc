"""`open` and `aclose` are cancelled at each of their steps, once or twice: they leave no task and no socket."""

from __future__ import annotations

import asyncio
import stat
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import AsyncExitStack, suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from bufstore import BufferedThreadStore, LogUnavailable
from bufstore.embedded import Servers
from bufstore.langgraph import AsyncBufferedSaver, MemoryCheckpointStore, PostgresCheckpointStore
from bufstore.memory import MemoryNats
from bufstore.memory.shared_state import MemorySharedState
from bufstore.notify import NatsNotifier, PostgresNotifier
from bufstore.tokens import ExclusiveWork, Locks, TokensConfig
from conftest import Deployment
from helpers import eventually, fresh
from mailboxes import Mailboxes
from thorough import seldom

Open = Callable[[], Awaitable[Any]]


def _store(servers: Servers, **log: Any) -> Open:
    deployment = Deployment(servers, **log)
    return lambda: BufferedThreadStore.open(deployment.inner(), nats=servers.nats.url, config=deployment.config())


def _saver(servers: Servers) -> Open:
    deployment, dsn = Deployment(servers), servers.postgres.dsn
    tables, ledger = f"l{deployment.name}", f"b{deployment.name}"
    return lambda: AsyncBufferedSaver.open(
        PostgresCheckpointStore(dsn, schema=tables, buffer_schema=ledger, pool_size=4),
        nats=servers.nats.url,
        config=deployment.config(),
    )


def _inner(servers: Servers) -> Open:
    deployment = Deployment(servers)

    async def opened() -> Any:
        async with AsyncExitStack() as stack:
            store = await stack.enter_async_context(deployment.inner())
            await store.setup()
            stack.pop_all()
            return store

    return opened


def _mailbox(kind: str) -> Callable[[Servers], Open]:
    def of(servers: Servers) -> Open:
        mailboxes = Mailboxes(kind, servers)
        return lambda: mailboxes.store().__aenter__()

    return of


def _work(servers: Servers) -> Open:
    config = TokensConfig(name=fresh("work"))
    return lambda: ExclusiveWork.open(servers.nats.url, config)


def _locks(servers: Servers) -> Open:
    name = fresh("locks")
    return lambda: Locks.open(servers.nats.url, name=name)


def _notifier(make: Callable[[Servers], Awaitable[Any]]) -> Callable[[Servers], Open]:
    def of(servers: Servers) -> Open:
        async def opened() -> Any:
            async with AsyncExitStack() as stack:
                notifier = await stack.enter_async_context(await make(servers))
                await notifier.listen_completed("work", lambda: None)
                stack.pop_all()
                return notifier

        return opened

    return of


KINDS: dict[str, Callable[[Servers], Open]] = {
    "store": lambda servers: _store(servers, lanes=2),
    "saver": _saver,
    "inner": _inner,
    "mailbox on NATS": _mailbox("nats"),
    "mailbox on Postgres": _mailbox("postgres"),
    "work": _work,
    "locks": _locks,
    "notifier on NATS": _notifier(lambda servers: NatsNotifier.open(servers.nats.url, timeout_s=10)),
    "notifier on Postgres": _notifier(lambda servers: PostgresNotifier.open(servers.postgres.dsn, timeout_s=10)),
}


@types.coroutine
def _cancelled(work: Coroutine[Any, Any, Any], at: set[int], late: bool) -> Generator[Any, Any, Any]:
    """Return the result of `work`; cancel its task when it waits for these times, which are removed from `at`.

    `late`: cancel it only when the awaited result is there, before the task goes on.
    """
    task, resume, value = asyncio.current_task(), work.send, None
    assert task is not None
    for step in count(1):
        try:
            waited = resume(value)
        except StopIteration as e:
            return e.value
        if step in at:
            at.remove(step)
            if late and waited is not None:
                waited.add_done_callback(lambda _: task.cancel())
            else:
                asyncio.get_running_loop().call_soon(task.cancel)
        try:
            resume, value = work.send, (yield waited)
        except BaseException as e:
            resume, value = work.throw, e


async def _given_up(call: Open, at: set[int], *, late: bool = False) -> Any:
    """Return the call's result, or None if it was cancelled first."""

    async def work() -> Any:
        return await call()

    async def main() -> Any:
        return await _cancelled(work(), at, late)

    with suppress(asyncio.CancelledError):
        return await asyncio.create_task(main())


def _there() -> set[Any]:
    """Return the tasks of this loop and the sockets of this process."""
    sockets = set()
    for fd in Path("/dev/fd").iterdir():
        with suppress(OSError):  # the listing's own descriptor is closed by now
            found = fd.stat()
            if stat.S_ISSOCK(found.st_mode):
                sockets.add(found.st_ino)
    return sockets | asyncio.all_tasks()


async def _nothing_left(before: set[Any], step: int) -> None:
    async def gone() -> bool:
        return _there() <= before | {asyncio.current_task()}

    try:
        await eventually(gone)
    except TimeoutError:
        pytest.fail(f"cancelled at step {step}, it left {_there() - before}")


@pytest.mark.parametrize("times", [1, *seldom(2)])
@pytest.mark.parametrize("kind", KINDS)
async def test_an_open_that_is_given_up_leaves_nothing(servers: Servers, kind: str, times: int) -> None:
    open_ = KINDS[kind](servers)
    await (await open_()).aclose()
    before = _there()
    for step in count(1):
        at = {step, step + times - 1}
        opened = await _given_up(open_, at)
        if opened is not None:
            await opened.aclose()
        await _nothing_left(before, step)
        if step in at:
            break


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
async def test_an_aclose_that_is_given_up_goes_on_to_its_end(servers: Servers, kind: str, times: int) -> None:
    open_ = KINDS[kind](servers)
    await (await open_()).aclose()
    before = _there()
    for step in count(1):
        at = {step, step + times - 1}
        opened = await open_()
        await _given_up(opened.aclose, at)
        await _nothing_left(before, step)
        await opened.aclose()
        if step in at:
            break


async def test_a_saver_whose_open_fails_last_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, on_parked = count(1), MemorySharedState.on_parked

    async def fails_last(shared: MemorySharedState, callback: Callable[[str], None]) -> None:
        if next(calls) == 2:
            raise LogUnavailable("the connection was lost")
        await on_parked(shared, callback)

    monkeypatch.setattr(MemorySharedState, "on_parked", fails_last)
    before = _there()
    with pytest.raises(LogUnavailable):
        await AsyncBufferedSaver.open(MemoryCheckpointStore(), nats=MemoryNats())
    await _nothing_left(before, 0)


async def test_a_cancellation_is_not_swallowed_while_connecting(servers: Servers) -> None:
    open_ = _locks(servers)
    await (await open_()).aclose()
    for step in count(1):
        at = {step}
        opened = await _given_up(open_, at, late=True)
        if opened is not None:
            await opened.aclose()
        if at:
            break
        assert opened is None, f"cancelled at step {step}"
