"""Accepted items are done, also when requesters or holders stop halfway and streams are recreated or full."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections import Counter, defaultdict
from typing import Any

import pytest
from msgspec.structs import replace

import token_instances
from bufstore import ConfigError, InvalidId, LogFull
from bufstore.embedded import NatsServer
from bufstore.errors import LogUnavailable, TokenBusy, TokenLost, TokenQueueFull
from bufstore.tokens import ExclusiveWork, Locks, Policy, Storage, Task, TokensConfig
from bufstore.tokens.fence import Register
from helpers import eventually
from token_instances import Open, nothing_left, stall, took, working

name, opened = token_instances.name, token_instances.opened

#: So long that an item which waits for it fails the test's timeout.
_TTL_S = 30


# Processes that stop halfway.


@pytest.mark.parametrize("config", [{"policy": Policy.REFUSE}, {"waiting_max": 1}, {"policy": Policy.REPLACE}, {}])
async def test_a_requester_that_dies_leaves_no_key_busy(opened: Open, config: dict[str, Any]) -> None:
    """The requester is cancelled at a random moment: its item is worked on, or was never stored."""
    work = await opened(ttl_s=_TTL_S, **config)
    rng, worked = random.Random(7), Counter[str]()

    async def handler(task: Task) -> None:
        worked[task.key] += 1

    keys = [f"key {i}" for i in range(40)]
    for key in keys:
        submitting = asyncio.ensure_future(work.submit(key))
        await asyncio.sleep(rng.random() * 0.003)
        submitting.cancel()
        await asyncio.gather(submitting, return_exceptions=True)
    async with working(handler, work, concurrency=4), asyncio.timeout(_TTL_S / 2):
        for key in keys:
            while True:
                try:
                    await work.submit(key)
                    break
                except (TokenBusy, TokenQueueFull):
                    await asyncio.sleep(0.01)
        await eventually(lambda: nothing_left(work))
    assert len(worked) == len(keys)


async def test_a_holder_that_pauses_before_its_ack_keeps_no_item_from_others(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, other = await opened(ttl_s=_TTL_S), await opened(ttl_s=_TTL_S)
    await work.submit("a", b"1")
    task = await took(work)
    looked, go_on = asyncio.Event(), asyncio.Event()
    look = work._waiting

    async def looks_and_pauses(name: str, limit: int) -> Any:
        found = await look(name, limit)
        looked.set()
        await go_on.wait()
        return found

    monkeypatch.setattr(work, "_waiting", looks_and_pauses)
    ending = asyncio.ensure_future(task.done())
    await looked.wait()
    await other.submit("a", b"2")
    async with asyncio.timeout(_TTL_S / 2), await took(other) as second:
        assert second.payload == b"2"
        go_on.set()
        await ending
        await second.done()
    assert await nothing_left(other)


async def test_an_item_that_nobody_was_told_of_is_found(opened: Open) -> None:
    """The delivery went to a worker that acknowledged it and did nothing."""
    work, other = await opened(ttl_s=4), await opened(ttl_s=4)
    await work.submit("a", b"1")
    delivery = await work._pulls.next(5)
    await work._pulls.answer(delivery, b"+ACK")
    async with await took(other) as task:
        assert (task.payload, task.attempt) == (b"1", 1)
        await task.done()
    assert (await other.statistics()).found == 1
    assert await nothing_left(other)


async def test_items_that_wait_long_for_busy_workers_are_not_taken_for_overlooked(opened: Open) -> None:
    """Regression: what had waited for longer than `ttl_s` was reported as work that nobody had been told of."""
    work, worked = await opened(ttl_s=1), list[str]()
    for key in ("a", "a", "b", "c"):
        await work.submit(key)
    first = await took(work)
    await first.done()  # the turn of the key's other item is behind "c"

    async def is_old() -> bool:
        (seen,) = await work._register.seen({"last_by_subj": work._subject("a")})
        return seen.age_s > 2  # twice `ttl_s`: what was stored before it is older still

    await eventually(is_old)
    for _ in range(3):
        async with await took(work) as task:
            worked.append(task.key)
            await task.done()
    assert worked == ["b", "c", "a"]
    assert (await work.statistics()).found == 0


async def test_an_item_behind_as_many_as_workers_may_be_told_of_is_found(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a lone worker did not do it until one of those was done, however much later they were due."""
    monkeypatch.setattr("bufstore.tokens.work._TOLD_MAX", 2)
    work = await opened(ttl_s=1)
    for key in ("a", "b"):
        await work.submit(key)
        await (await took(work)).retry(3600)
    await work.submit("c")
    async with await took(work, 10) as task:
        assert task.key == "c"
        await task.done()


async def test_a_turn_that_could_not_be_removed_goes_later(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    work = await opened(ttl_s=4)
    await work.submit("a")
    await work.submit("a")
    async with await took(work) as task:
        await task.done()
    async with await took(work) as task:
        delivery, remove, failed = task.delivery, work._remove, list[int]()
        assert delivery is not None
        assert ".turn." in delivery.subject

        async def fails_once(seq: int) -> None:
            if seq == delivery.seq and not failed:
                failed.append(seq)
                raise LogUnavailable("away")
            await remove(seq)

        monkeypatch.setattr(work, "_remove", fails_once)
        await task.done()
    assert failed
    assert await work.take(6) is None
    assert await nothing_left(work)


async def test_a_look_at_large_items_reads_few_of_them(opened: Open) -> None:
    work = await opened(ttl_s=4)
    for i in range(30):
        await work.submit(f"key {i}", b"x" * 100_000)
    for _ in range(30):
        await work._pulls.answer(await work._pulls.next(5), b"+ACK")
    for _ in range(30):
        async with await took(work) as task:
            await task.done()
    assert await nothing_left(work)
    assert work._walk._size <= 10


@pytest.mark.long  # two leases
async def test_a_key_whose_holder_and_delivery_are_gone_is_found(opened: Open) -> None:
    work, other = await opened(ttl_s=4), await opened(ttl_s=4)
    await work.submit("a", b"1")
    task = await took(work)
    stall(task)
    await work._pulls.answer(task.delivery, b"+ACK")
    async with await took(other) as second:
        assert second.attempt == 2
        with pytest.raises(TokenLost):
            await task.done()
        await second.done()


@pytest.mark.long  # two leases
async def test_what_is_to_be_done_is_done_after_the_consumer_was_removed(opened: Open, name: str) -> None:
    work = await opened(ttl_s=4)
    for key in ("a", "a", "b"):
        await work.submit(key)
    first = await took(work)
    stall(first)
    await work._items.api(f"CONSUMER.DELETE.{name}-items.workers")
    other = await opened(ttl_s=4)
    for _ in range(3):
        async with await took(other) as task:
            await task.done()
    assert await nothing_left(other)


async def test_who_runs_works_on_after_the_consumer_was_removed(opened: Open, name: str) -> None:
    """Regression: items waited until somebody opened another instance, or for their time as overlooked ones."""
    work, worked = await opened(ttl_s=_TTL_S), asyncio.Queue[str]()

    async def handler(task: Task) -> None:
        worked.put_nowait(task.key)

    async with working(handler, work), asyncio.timeout(_TTL_S / 2):
        for key in ("a", "b", "c"):
            await work.submit(key)
            assert await worked.get() == key
            await work._items.api(f"CONSUMER.DELETE.{name}-items.workers")


async def test_what_got_no_answer_can_be_repeated(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost call can be repeated whether or not it was stored, and also after a renewal without an answer."""
    work, write = await opened(), Register.write
    outcomes = list[str]()

    async def loses(self: Register, *arguments: Any) -> int:
        if outcomes == ["refused"]:
            raise LogUnavailable(outcomes.pop())
        seq = await write(self, *arguments)
        if outcomes:
            raise LogUnavailable(outcomes.pop())
        return seq

    monkeypatch.setattr(Register, "write", loses)
    for lost in ("refused", "stored"):
        await work.submit("a")
        task = await took(work)
        for change, outcome in ((task.extend, "stored"), (task.done, lost)):
            outcomes.append(outcome)
            with pytest.raises(LogUnavailable):
                await change()
        await task.done()
        assert await nothing_left(work)


async def test_what_a_leader_that_lags_still_shows_is_not_done_again(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = await opened()
    for payload in (b"1", b"2", b"3"):
        await work.submit("a", payload)
    look, shown = work._items.after, await work._items.after(f"{work._config.name}.item.YQ", 0, 5)
    for _ in range(2):
        async with await took(work) as task:
            await task.done()
    lagging = iter([shown, shown[1:]])

    async def after(subject: str, seq: int, timeout_s: float, limit: int = 0) -> Any:
        return next(lagging, None) or await look(subject, seq, timeout_s, limit)

    monkeypatch.setattr(work._items, "after", after)
    async with await took(work) as task:
        assert task.payload == b"3"
        await task.done()
    assert await work.take(0.1) is None


# Recreated streams.


@pytest.mark.parametrize("stream", ["items", "fence"])
async def test_a_stream_that_is_made_anew_refuses_no_key(opened: Open, name: str, stream: str) -> None:
    work = await opened(ttl_s=_TTL_S)
    for _ in range(3):
        await work.submit("a")
        async with await took(work) as task:
            await task.done()
    await work._items.api(f"STREAM.DELETE.{name}-{stream}")
    again = await opened(ttl_s=_TTL_S)
    await again.submit("a", b"new")
    async with await took(again) as later:
        assert (later.payload, later.attempt) == (b"new", 1)
        assert later.token > task.token
        await later.done()


async def test_tokens_never_go_down_whatever_the_clock_of_the_creator_says(
    opened: Open, servers: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    async def tokens() -> tuple[int, int]:
        work = await opened()
        async with await Locks.open(servers.nats.url, name=name) as locks:
            lock = await locks.acquire("a")
            await work.submit("a")
            async with await took(work) as task:
                await task.done()
            for stream in ("items", "fence", "locks"):
                await work._items.api(f"STREAM.DELETE.{name}-{stream}")
            return task.token, lock.token

    before = await tokens()
    monkeypatch.setattr("bufstore.jetstream.ensure.time.time_ns", lambda: 1_700_000_000_000_000_000)
    after = await tokens()
    assert after[0] > before[0]
    assert after[1] > before[1]


# Attempts.


async def test_attempts_are_the_items_own(opened: Open) -> None:
    work, attempts = await opened(), []
    for i in range(5):
        await work.submit("a", str(i).encode())
    for _ in range(5):
        async with await took(work) as task:
            attempts.append(task.attempt)
            if task.payload == b"3":
                await task.retry()
                task = await took(work)
                attempts.append(task.attempt)
            await task.done()
    assert attempts == [1, 1, 1, 1, 2, 1]


async def test_a_cancelled_take_is_no_attempt(opened: Open) -> None:
    work = await opened()
    for pause in (0.0, 0.0005, 0.001, 0.002, 0.004):
        await work.submit("a")
        taking = asyncio.ensure_future(work.take(10))
        await asyncio.sleep(pause)
        taking.cancel()
        outcome = (await asyncio.gather(taking, return_exceptions=True))[0]
        async with outcome if isinstance(outcome, Task) else await took(work) as task:
            assert task.attempt == 1
            await task.done()


async def test_poison_goes_to_the_dead_letters_and_blocks_its_key_no_longer(opened: Open) -> None:
    work = await opened(max_attempts=3, ttl_s=4)
    dead, worked, stopping = list[tuple[bytes, int]](), list[bytes](), asyncio.Event()

    async def handler(task: Task) -> None:
        if task.payload == b"poison":
            raise RuntimeError("always")
        worked.append(task.payload)
        stopping.set()

    async def dead_letter(task: Task) -> None:
        dead.append((task.payload, task.attempt))

    with pytest.raises(ConfigError):
        await work.run(handler, stopping)
    await work.submit("a", b"poison")
    await work.submit("a", b"good")
    stall(await took(work))  # a process that dies of the item counts as an attempt
    async with asyncio.timeout(20):
        await work.run(handler, stopping, dead_letter=dead_letter)
    assert (dead, worked) == ([(b"poison", 4)], [b"good"])


async def test_a_delay_without_end_that_is_stored_stops_no_worker(opened: Open) -> None:
    """An older release stored such delays, and each worker that met the item ended with an OverflowError."""
    work = await opened(ttl_s=4)
    await work.submit("a", b"1")
    task = await took(work)
    await task._holding.aclose()
    await task._change(replace(task._record, holder="", lease_s=math.inf))
    await work._pulls.hand_back(task.delivery)
    assert await work.take(1) is None
    await work.submit("b")
    async with await took(work) as other:
        assert other.key == "b"
        await other.done()
    assert await work.release("a") is None
    async with await took(work) as task:
        assert (task.payload, task.attempt) == (b"1", 2)
        await task.done()


# Turns.


async def test_keys_take_turns(opened: Open) -> None:
    """One worker; two keys with long queues, one key that always has work, and a fourth that comes last."""
    work, worked, stopping = await opened(), list[str](), asyncio.Event()

    async def handler(task: Task) -> None:
        worked.append(task.key)
        if task.key == "always":
            await work.submit("always")
        if task.key == "last" or len(worked) > 50:
            stopping.set()

    for key in ["a"] * 100 + ["b"] * 100 + ["always", "last"]:
        await work.submit(key)
    async with asyncio.timeout(30):
        await work.run(handler, stopping)
    assert "last" in worked
    assert len(worked) <= 6
    assert (await work.statistics()).found == 0


# Full streams.


@pytest.mark.long
@pytest.mark.parametrize("policy", Policy)
async def test_what_a_full_stream_holds_is_worked_off(opened: Open, policy: Policy) -> None:
    """The stream is filled again and again, and every worker dies; all items are worked off anyway."""
    work = await opened(policy=policy, max_bytes=6000, ttl_s=1)
    accepted, worked = defaultdict[str, list[int]](list), defaultdict[str, set[int]](set)

    async def fill(start: int) -> None:
        for i in range(start, start + 300):
            key = f"key {i % 20}"
            try:
                await work.submit(key, f"{i}".encode() + b"x" * (i % 7))
            except LogFull:
                return
            except (TokenBusy, TokenQueueFull):
                continue
            accepted[key].append(i)

    await fill(0)
    with pytest.raises(LogFull):
        for i in range(1000):
            await work.submit(f"other {i}", b"x")
            accepted[f"other {i}"].append(i)
    for _ in range(5):
        stall(await took(work))

    async def handler(task: Task) -> None:
        worked[task.key].add(int(task.payload.rstrip(b"x") or b"0") if task.key.startswith("key") else 0)

    async with working(handler, work, concurrency=3):
        for start in (300, 600, 900):
            await fill(start)
        # Tokens of a second are often lost on three replicas and a busy machine. What is stuck stays.
        await eventually(lambda: nothing_left(work), 120)
    for key, items in accepted.items():
        if key.startswith("key"):
            assert worked[key] >= set(items if policy is not Policy.REPLACE else items[-1:])
        else:
            assert worked[key]


# Operator commands.


async def test_who_holds_it_is_shown_and_it_can_be_taken_away(opened: Open, name: str, servers: Any) -> None:
    work = await ExclusiveWork.open(servers.nats.url, (await opened(policy=Policy.REFUSE))._config, holder="host 7")
    async with work:
        assert await work.who("a") is None
        assert await work.release("a", force=True) is None
        assert (await work.statistics()).stored == 0, "there is nothing to tell anybody of"
        await work.submit("a", b"1")
        task = await took(work)
        held = await work.who("a")
        assert held is not None
        assert (held.name, held.token) == ("host 7", task.token)
        with pytest.raises(TokenBusy, match="host 7") as busy:
            await work.submit("a")
        assert busy.value.holder == "host 7"
        with pytest.raises(TokenBusy, match="host 7"):
            await work.release("a")
        assert (await work.release("a", force=True)) is not None
        assert await work.who("a") is None
        async with await took(work) as second:
            assert (second.payload, second.attempt) == (b"1", 2)
            with pytest.raises(TokenLost):
                await task.done()
            await second.done()


async def test_who_holds_a_lock_is_shown_and_it_can_be_taken_away(servers: Any, name: str) -> None:
    async with await Locks.open(servers.nats.url, name=name, storage=Storage(storage="memory")) as locks:
        assert await locks.who("a") is None
        lock = await locks.acquire("a", holder="host 7")
        await lock.extend()
        held = await locks.who("a")
        assert held is not None
        assert (held.name, held.token) == ("host 7", lock.token)
        with pytest.raises(TokenBusy, match="host 7"):
            await locks.acquire("a", holder="host 8")
        with pytest.raises(TokenBusy, match="host 7"):
            await locks.release("a")
        assert await locks.held() == 1
        await locks.release("a", force=True)
        assert await locks.held() == 0
        other = await locks.acquire("a")
        with pytest.raises(TokenLost):
            await lock.extend()
        assert lock.lost.is_set()
        assert other.token > lock.token
        assert (held := await locks.who("a")) is not None  # a holder without a given name gets one
        assert held.name


async def test_a_holder_that_is_no_name_is_refused_and_takes_nothing(servers: Any, name: str) -> None:
    """The record of such a holder could not be read, so a key that it held was taken for free."""
    async with await Locks.open(servers.nats.url, name=name) as locks:
        wrong: Any
        for wrong in (7, None, b"me", "\ud800", "a\0b", "x" * 2_000_000):
            with pytest.raises(InvalidId):
                await ExclusiveWork.open(servers.nats.url, TokensConfig(name=name), holder=wrong)
            with pytest.raises(InvalidId):
                await locks.acquire("a", holder=wrong)
        assert await locks.held() == 0


async def test_statistics_and_settings(opened: Open, name: str) -> None:
    work = await opened(storage="memory", max_bytes=1 << 20)
    for key in ("a", "a", "b"):
        await work.submit(key, b"x" * 100)
    async with await took(work) as task:
        found = await work.statistics()
        assert (found.stored, found.untold, found.told, found.found) == (3, 2, 1, 0)
        assert found.bytes > 300
        assert 0 < found.oldest_s < 10
        await task.done()
    info = await work._items.api(f"STREAM.INFO.{name}-items")
    assert (info["config"]["storage"], info["config"]["max_bytes"]) == ("memory", 1 << 20)


# A silent server.


async def _told(told: list[bool]) -> list[bool]:
    return told


@pytest.mark.alone
async def test_a_holder_stops_in_time_when_the_server_is_silent(opened: Open, tmp_path: Any) -> None:
    server = NatsServer(tmp_path)
    server.start()
    try:
        work = await opened(server.url, ttl_s=3, timeout_s=5)
        locks = await Locks.open(server.url, timeout_s=5)
        await work.submit("a")
        task = await took(work)
        lock = await (await locks.acquire("a", ttl_s=3)).__aenter__()
        loop, told = asyncio.get_running_loop(), list[bool]()
        await asyncio.to_thread(server.pause)
        try:
            # All renewals that were answered had begun by now. Timers go off in their order, however late the loop is.
            loop.call_later(3, lambda: told.extend(held.lost.is_set() for held in (task, lock)))
            async with asyncio.timeout(20):
                await asyncio.gather(task.lost.wait(), lock.lost.wait())
            assert await eventually(lambda: _told(told)) == [True, True]
            for held in (task, lock):
                with pytest.raises(TokenLost):
                    held.check()
        finally:
            await asyncio.to_thread(server.resume)
        with contextlib.suppress(TokenLost, LogUnavailable):
            await lock.release()
        await locks.aclose()
        await work.aclose()
    finally:
        server.stop()
