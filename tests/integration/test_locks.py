"""Locks on a real server."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from bufstore import ConfigError, elapsed
from bufstore.embedded import NatsServer, Servers
from bufstore.errors import LogUnavailable, TokenBusy, TokenLost
from bufstore.jetstream.messages import AppendUnknown
from bufstore.jetstream.questions import Questions
from bufstore.tokens import Locks
from bufstore.tokens.fence import Seen
from helpers import cancel_as_anyio, eventually


@pytest.fixture
async def locks(servers: Servers) -> AsyncIterator[Locks]:
    async with await Locks.open(servers.nats.url, name=f"t{secrets.token_hex(5)}") as opened:
        yield opened


async def test_one_holder_at_a_time(locks: Locks) -> None:
    holding, turns, tokens = 0, 0, list[int]()

    async def one() -> None:
        nonlocal holding, turns
        for _ in range(5):
            async with await locks.acquire("a", wait_s=30) as lock:
                holding += 1
                assert holding == 1
                tokens.append(lock.token)
                await asyncio.sleep(0)
                lock.check()
                holding -= 1
                turns += 1

    await asyncio.gather(*(one() for _ in range(10)))
    assert turns == 50
    assert tokens == sorted(set(tokens))


async def test_busy_until_released(locks: Locks) -> None:
    lock = await locks.acquire("a")
    with pytest.raises(TokenBusy):
        await locks.acquire("a")
    await locks.acquire("b")
    await lock.release()
    await lock.release()
    with pytest.raises(TokenLost):
        lock.check()
    with pytest.raises(TokenLost):
        await lock.extend()
    await (await locks.acquire("a")).release()


@pytest.mark.parametrize("meanwhile", ["nothing", "extended", "another holder"])
async def test_a_release_by_force_takes_the_lock_from_the_holder_that_it_returns(
    locks: Locks, meanwhile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: who acquired the lock after the look at its holder lost it."""
    lock, seen = await locks.acquire("a"), locks._register.seen
    last = lock

    async def late(*which: dict[str, Any]) -> list[Seen]:
        nonlocal last
        found = await seen(*which)
        if meanwhile == "extended":
            await lock.extend()
        elif meanwhile == "another holder":
            await lock.release()
            last = await locks.acquire("a")
        return found

    monkeypatch.setattr(locks._register, "seen", late)
    released = await locks.release("a", force=True)
    assert released is not None and released.token == lock.token
    if meanwhile == "another holder":
        await last.extend()
        await last.release()
    else:
        with pytest.raises(TokenLost):
            await lock.extend()


async def test_who_gives_up_acquiring_leaves_no_lock_behind(locks: Locks) -> None:
    for turns in range(60):
        acquiring = asyncio.create_task(locks.acquire(f"k{turns}", ttl_s=600))
        for _ in range(turns // 2):
            await asyncio.sleep(0)
        await asyncio.sleep(0.0001 * (turns % 10))
        acquiring.cancel()
        for lock in await asyncio.gather(acquiring, return_exceptions=True):
            if not isinstance(lock, BaseException):
                await lock.release()

    async def none_is_held() -> bool:
        return not await locks.held()

    await eventually(none_is_held)


async def test_who_is_cancelled_again_and_again_releases_the_lock(servers: Servers, locks: Locks) -> None:
    other = await Locks.open(servers.nats.url, name=locks._stream.name.removesuffix("-locks"))
    held = asyncio.Event()

    async def hold() -> None:
        async with await other.acquire("a", ttl_s=600):
            held.set()
            await asyncio.Event().wait()

    holding = asyncio.create_task(hold())
    await held.wait()
    await cancel_as_anyio(holding)
    assert holding.cancelled()
    await other.aclose()
    await (await locks.acquire("a")).release()


@pytest.mark.parametrize("stored", [True, False])
async def test_a_release_without_an_answer_may_be_repeated(
    locks: Locks, stored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the second call sent nothing, and the lock was held until its time was over."""
    lock, delete = await locks.acquire("a", ttl_s=600), locks._stream.delete

    async def unanswered(seq: int, timeout_s: float) -> None:
        if stored:
            await delete(seq, timeout_s)
        raise LogUnavailable("no answer")

    monkeypatch.setattr(locks._stream, "delete", unanswered)
    with pytest.raises(LogUnavailable):
        await lock.release()
    with pytest.raises(TokenLost, match="may have been released"):
        lock.check()
    monkeypatch.setattr(locks._stream, "delete", delete)
    await lock.release()
    await (await locks.acquire("a")).release()
    await lock.release()


async def test_a_release_waits_for_its_answer_as_long_as_any_call(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: it waited for 5 s, whatever was set."""
    waited = list[float]()
    async with await Locks.open(servers.nats.url, name=f"t{secrets.token_hex(5)}", timeout_s=7.0) as locks:
        request = locks._connection.request

        async def unanswered(subject: str, payload: bytes, timeout_s: float, **options: Any) -> bytes:
            if ".MSG.DELETE." not in subject and ".PURGE." not in subject:
                return await request(subject, payload, timeout_s, **options)
            waited.append(timeout_s)
            raise AppendUnknown("no answer")

        lock = await locks.acquire("a", ttl_s=600)
        monkeypatch.setattr(locks._connection, "request", unanswered)
        with pytest.raises(LogUnavailable):
            await lock.release()
        with pytest.raises(LogUnavailable):
            await locks.release("a", force=True)
        monkeypatch.undo()
        await lock.release()
    assert waited == [7.0, 7.0]


async def test_a_renewal_that_waits_for_a_release_takes_nothing_back(
    locks: Locks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: after a release without an answer it renewed the lock for its whole time."""
    lock = await locks.acquire("a", ttl_s=600)
    extending = list[asyncio.Task[None]]()

    async def unanswered(seq: int, _: float) -> None:
        extending.append(asyncio.create_task(lock.extend()))
        await asyncio.sleep(0)
        raise LogUnavailable("no answer")

    monkeypatch.setattr(locks._stream, "delete", unanswered)
    with pytest.raises(LogUnavailable):
        await lock.release()
    with pytest.raises(TokenLost):
        await extending[0]
    monkeypatch.undo()
    await lock.release()
    await (await locks.acquire("a")).release()


async def test_locks_that_are_closed_under_a_block_hide_no_error_of_it(servers: Servers, locks: Locks) -> None:
    """Regression: Closed took the place of the block's own error, and of its cancellation."""
    other = await Locks.open(servers.nats.url, name=locks._stream.name.removesuffix("-locks"))
    with pytest.raises(ValueError, match="the block's"):
        async with await other.acquire("a"):
            await other.aclose()
            raise ValueError("the block's")


async def test_free_after_its_time_and_too_late_is_too_late(locks: Locks) -> None:
    first = await locks.acquire("a", ttl_s=1)
    second = await locks.acquire("a", ttl_s=10, wait_s=10)
    assert second.token > first.token
    with pytest.raises(TokenLost):
        first.check()
    with pytest.raises(TokenLost):
        await first.extend()
    with pytest.raises(TokenLost):
        await first.release()
    second.check()
    with pytest.raises(TokenBusy):
        await locks.acquire("a")


async def test_too_late_when_nobody_took_it(locks: Locks) -> None:
    lock = await locks.acquire("a", ttl_s=1)
    await asyncio.sleep(1.6)  # the lock expires by the server's clock, so the test must wait
    with pytest.raises(TokenLost):
        await lock.extend()


async def test_a_check_after_a_suspension_says_that_another_may_have_it(
    locks: Locks, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, before = await locks.acquire("a", ttl_s=30), elapsed.suspended_s()
    lock.check()
    monkeypatch.setattr(elapsed, "suspended_s", lambda: before + 30)
    with pytest.raises(TokenLost):
        lock.check()
    assert lock.lost.is_set()


@pytest.mark.long  # ten seconds
async def test_extending_keeps_it_and_keeps_it_mortal(locks: Locks) -> None:
    lock = await locks.acquire("a", ttl_s=5)
    for _ in range(4):
        await asyncio.sleep(1.5)
        await lock.extend()
    lock.check()
    with pytest.raises(TokenBusy):
        await locks.acquire("a")
    await (await locks.acquire("a", wait_s=10)).release()


async def test_the_block_renews_by_itself(locks: Locks) -> None:
    async with await locks.acquire("a", ttl_s=6) as lock:  # renewed every two seconds
        await asyncio.sleep(7.5)
        lock.check()
        with pytest.raises(TokenBusy):
            await locks.acquire("a")
    await (await locks.acquire("a")).release()


async def test_a_block_that_lost_its_lock_says_so(locks: Locks) -> None:
    with pytest.raises(TokenLost):
        async with await locks.acquire("a", ttl_s=1) as lock:
            assert lock._holding._renewing is not None
            lock._holding._renewing.cancel()
            other = await locks.acquire("a", wait_s=10)
    other.check()


async def test_a_lifetime_is_whole_seconds(locks: Locks) -> None:
    for bad in (0, -1, 0.5, True):
        with pytest.raises(ConfigError):
            await locks.acquire("a", ttl_s=bad)  # type: ignore[arg-type]


async def test_locks_outlive_a_killed_server(tmp_path: Path) -> None:
    server = NatsServer(tmp_path)
    server.start()
    try:
        async with (
            await Locks.open(server.url, timeout_s=4) as mine,
            await Locks.open(server.url, timeout_s=4) as others,
        ):
            lock = await mine.acquire("a", ttl_s=30)
            await asyncio.to_thread(server.kill)
            with pytest.raises(LogUnavailable):
                await asyncio.wait_for(others.acquire("b"), 20)
            await asyncio.to_thread(server.start)

            async def busy() -> bool:
                with contextlib.suppress(LogUnavailable):
                    await others.acquire("a")
                return False

            async with asyncio.timeout(20):
                with pytest.raises(TokenBusy):
                    await eventually(busy)

            async def extended() -> bool:  # the other connection may not be back yet
                with contextlib.suppress(LogUnavailable):
                    await lock.extend()
                    return True
                return False

            await eventually(extended)
            await lock.release()
            await (await others.acquire("a")).release()
    finally:
        server.stop()


@contextlib.contextmanager
def computing_behind_questions(monkeypatch: pytest.MonkeyPatch, name: str, turns: int = 0) -> Iterator[None]:
    """Keep the loop busy for 1.2 s, so many of its turns behind each question about these locks."""
    loop, ask = asyncio.get_running_loop(), Questions.ask

    def ask_and_compute(questions: Questions, subjects: Sequence[str], *more: Any) -> str:
        if subjects[0].startswith(name):
            later(turns)
        return ask(questions, subjects, *more)

    def later(left: int) -> None:
        loop.call_soon(*((later, left - 1) if left else (time.sleep, 1.2)))

    with monkeypatch.context() as busy:
        busy.setattr(Questions, "ask", ask_and_compute)
        yield


@pytest.mark.parametrize("turns", [0, 4])
async def test_who_was_busy_while_its_answer_came_holds_the_lock(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    """Regression: nobody held it then, and nobody could take it, until its time was over."""
    name = f"t{secrets.token_hex(5)}"
    async with await Locks.open(servers.nats.url, name=name, timeout_s=1.0) as locks:
        with computing_behind_questions(monkeypatch, name, turns):
            lock = await locks.acquire("a", ttl_s=10)
        lock.check()
        await lock.release()


@pytest.mark.parametrize("timeout_s", [1.0, 5.0])
async def test_a_lock_whose_time_is_over_before_its_taking_is_known_is_given_to_nobody(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, timeout_s: float
) -> None:
    """Regression: the block began beside that of the next holder."""
    name = f"t{secrets.token_hex(5)}"
    async with await Locks.open(servers.nats.url, name=name, timeout_s=timeout_s) as locks:
        with computing_behind_questions(monkeypatch, name), pytest.raises(LogUnavailable, match="its time was over"):
            await locks.acquire("a", ttl_s=1)
        await (await locks.acquire("a", wait_s=5)).release()
