"""Exclusive work on a real server: order, exclusion, policies, and holders that come back too late."""

from __future__ import annotations

import asyncio
import math
import random
from collections import defaultdict
from datetime import timedelta
from typing import Any

import pytest

import token_instances
from bufstore import (
    BufstoreError,
    ConfigDrift,
    ConfigError,
    InvalidId,
    InvalidRecord,
    LogFull,
    LogUnavailable,
    TooLarge,
)
from bufstore.embedded import Servers
from bufstore.errors import TokenBusy, TokenLost, TokenQueueFull
from bufstore.jetstream.messages import AppendUnknown, Outgoing
from bufstore.jetstream.pulls import Delivery
from bufstore.tokens import Policy, Task
from bufstore.tokens import work as work_module
from bufstore.tokens.fence import Seen
from helpers import cancel_as_anyio, eventually
from token_instances import Open, nothing_left, stall, took, working

name, opened = token_instances.name, token_instances.opened


# Order and exclusion.


async def test_items_of_a_key_are_worked_on_in_order_and_one_at_a_time(opened: Open) -> None:
    instances = [await opened() for _ in range(3)]
    busy, overlaps, worked = set[str](), list[str](), defaultdict[str, list[int]](list)

    async def handler(task: Task) -> None:
        if task.key in busy:  # an error here would only have the item tried again
            overlaps.append(task.key)
        busy.add(task.key)
        await asyncio.sleep(random.random() * 0.005)
        worked[task.key].append(int(task.payload))
        busy.discard(task.key)

    async def submit(key: str) -> None:
        for i in range(25):
            await random.choice(instances).submit(key, str(i).encode())

    keys = [f"key {i}" for i in range(5)]
    async with working(handler, *instances, concurrency=4):
        await asyncio.gather(*(submit(key) for key in keys))
        await eventually(lambda: nothing_left(instances[0]), 120)  # nothing may be found by looking: see below
    assert worked == {key: list(range(25)) for key in keys}
    assert overlaps == []
    assert [(await instance.statistics()).found for instance in instances] == [0, 0, 0]


async def _gives_up_done(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    """Call `done`, and cancel that call once it is stored; its answer comes a moment later."""
    write, stored, answered = task._register.write, asyncio.Event(), asyncio.Event()

    async def late(*arguments: Any) -> int:
        seq = await write(*arguments)
        stored.set()
        await answered.wait()
        return seq

    monkeypatch.setattr(task._register, "write", late)
    ending = asyncio.create_task(task.done())
    await stored.wait()
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    asyncio.get_running_loop().call_later(0.1, answered.set)


async def test_what_is_done_stays_done_though_its_caller_gave_up(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: leaving the block gave the item back, whose `done` was stored already, and it was done again."""
    work = await opened()
    await work.submit("key")
    async with await took(work) as task:
        await _gives_up_done(task, monkeypatch)
    await eventually(lambda: nothing_left(work))
    assert await work.take(0.2) is None


async def test_done_may_be_called_again_while_an_earlier_call_goes_on(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: TokenLost, though the item was done: whoever saw it took the item for one that is done again."""
    work = await opened()
    await work.submit("key")
    async with await took(work) as task:
        await _gives_up_done(task, monkeypatch)
        await asyncio.gather(task.done(), task.done())
        await task.done()
    await eventually(lambda: nothing_left(work))


async def test_a_worker_that_is_to_stop_does_so_in_an_outage(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: it tried to mark its item as done for as long as it held it."""
    monkeypatch.setattr(work_module, "_ENDING_S", 0.3)
    work, stopping = await opened(ttl_s=3600), asyncio.Event()

    async def handler(task: Task) -> None:
        async def away() -> None:
            stopping.set()
            raise LogUnavailable("away")

        monkeypatch.setattr(task, "done", away)

    await work.submit("key")
    await work.run(handler, stopping)
    async with await took(work) as given_back:
        assert given_back.attempt == 2


async def test_a_release_by_force_takes_the_key_from_nobody_else(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: who took the key between the look at its holder and the release lost it."""
    work = await opened()
    for payload in (b"1", b"2"):
        await work.submit("key", payload)
    first, seen = await took(work), work._register.seen
    second: Task | None = None

    async def late(*which: dict[str, Any]) -> list[Seen]:
        nonlocal second
        found = await seen(*which)
        monkeypatch.undo()
        await first.done()
        second = await took(work)
        return found

    monkeypatch.setattr(work._register, "seen", late)
    released = await work.release("key", force=True)
    assert released is not None and released.token == first.token
    assert second is not None and second.payload == b"2"
    second.check()
    await second.done()
    await eventually(lambda: nothing_left(work))


async def test_a_release_without_force_takes_the_key_from_nobody(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: whoever took the key after the look, and before the release was written, lost it."""
    work = await opened()
    await work.submit("key")
    await (await took(work)).release()
    waiting = work._waiting
    task: Task | None = None

    async def late(name: str, limit: int) -> list[Any]:
        nonlocal task
        found = await waiting(name, limit)
        monkeypatch.undo()
        task = await took(work)
        return found

    monkeypatch.setattr(work, "_waiting", late)
    assert await work.release("key") is None
    assert task is not None
    await task.done()
    await eventually(lambda: nothing_left(work))


async def test_a_release_by_force_that_meets_a_renewal_is_repeated(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: it returned the holder, who kept the key."""
    work = await opened()
    await work.submit("key")
    task, write = await took(work), work._register.write

    async def late(*arguments: Any) -> int:
        monkeypatch.undo()
        await task.extend()
        return await write(*arguments)

    monkeypatch.setattr(work._register, "write", late)
    released = await work.release("key", force=True)
    assert released is not None and released.token == task.token
    with pytest.raises(TokenLost):
        await task.done()
    async with await took(work) as again:
        await again.done()


async def test_what_was_given_back_is_not_taken_back_by_a_renewal(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a heartbeat between the two writes of a `retry` held the key for its whole time."""
    work = await opened(policy=Policy.REPLACE, ttl_s=3600)
    await work.submit("key")
    task, is_replaced = await took(work), work._is_replaced

    async def late(given_back: Task) -> bool:
        with pytest.raises(TokenLost):
            await given_back.extend()
        await work.submit("key", b"newer")
        return await is_replaced(given_back)

    monkeypatch.setattr(task, "_afterwards", task._afterwards._replace(is_replaced=late))
    await task.retry(3000)
    async with await took(work) as newer:
        assert newer.payload == b"newer"
        await newer.done()


async def test_what_was_found_and_given_back_is_told_of(opened: Open) -> None:
    """Regression: without a delivery of its own it was found again only after `ttl_s`."""
    work = await opened(ttl_s=3600)
    await work.submit("key")
    task = await took(work)
    await work._drop(task.delivery)  # as if the delivery had been lost, and the item found
    task.delivery = None
    await task.release()
    async with await took(work) as again:
        await again.done()


@pytest.mark.parametrize("policy", [Policy.QUEUE, Policy.REFUSE])
async def test_what_was_found_and_given_back_with_a_delay_waits_no_longer(opened: Open, policy: Policy) -> None:
    """Regression: it waited for `ttl_s` more."""
    work, loop = await opened(ttl_s=3600, policy=policy), asyncio.get_running_loop()
    await work.submit("key")
    task = await took(work)
    await work._drop(task.delivery)  # as if the delivery had been lost, and the item found
    task.delivery = None
    began = loop.time()
    await task.retry(0.5)
    async with await took(work) as again:
        assert (loop.time() - began >= 0.5, again.attempt) == (True, 2)
        await again.done()
    assert await nothing_left(work)


@pytest.mark.parametrize("error", [LogUnavailable, LogFull, ConfigError])
async def test_what_ends_in_an_outage_is_not_done_again(
    error: type[BufstoreError], opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: one `done` that NATS did not answer, and the item was tried again, or was a dead letter."""
    work = await opened(max_attempts=1)
    handled, refused = [], []

    async def handler(task: Task) -> None:
        handled.append(task.attempt)
        done = task.done

        async def away() -> None:
            if len(refused) < 2:
                refused.append(task.attempt)
                raise error("away")
            await done()

        monkeypatch.setattr(task, "done", away)

    async def dead(task: Task) -> None:
        handled.append(-task.attempt)

    await work.submit("key")
    async with working(handler, work, dead_letter=dead):
        await eventually(lambda: nothing_left(work))
    assert (handled, refused) == ([1], [1, 1])


@pytest.mark.long  # ten seconds
async def test_no_item_is_left_lying(opened: Open) -> None:
    """Items arrive as a holder finds no more; with a TTL of 30 s a missed one would exceed the timeout."""
    work = await opened(ttl_s=30)
    other = await opened(ttl_s=30)
    worked = 0

    async def handler(task: Task) -> None:
        nonlocal worked
        worked += 1

    rng = random.Random(11)

    async def submitter(n: int) -> None:
        for _ in range(60):
            await (work, other)[n % 2].submit(f"key {n % 2}")
            await asyncio.sleep(rng.random() * 0.006)

    async with working(handler, work, other, concurrency=3), asyncio.timeout(25):
        await asyncio.gather(*(submitter(n) for n in range(4)))
        await eventually(lambda: nothing_left(work))
    assert worked == 240


async def test_who_is_cancelled_again_and_again_gives_the_item_back(opened: Open) -> None:
    work, other = await opened(ttl_s=600), await opened(ttl_s=600)
    await work.submit("a")
    held = asyncio.Event()

    async def hold() -> None:
        async with await took(work):
            held.set()
            await asyncio.Event().wait()

    holding = asyncio.create_task(hold())
    await held.wait()
    await cancel_as_anyio(holding)
    assert holding.cancelled()
    await work.aclose()
    async with await took(other) as task:
        assert task.attempt == 2
        await task.done()


async def test_a_busy_key_holds_up_no_other(opened: Open) -> None:
    work = await opened()
    for key in ("a", "a", "b", "a", "c"):
        await work.submit(key)
    tasks = [await took(work) for _ in range(3)]
    assert [task.key for task in tasks] == ["a", "b", "c"]
    assert await work.take(0.2) is None
    for task in tasks:
        await task.done()
    assert (await took(work)).key == "a"


async def test_any_text_is_a_key_and_any_bytes_a_payload(opened: Open) -> None:
    work = await opened()
    keys = ["a.b.>*", " ", "größe 🙂", "\n", "x" * 1000]
    for key in keys:
        await work.submit(key, key.encode() + b"\0\xff")
    for key in keys:
        async with await took(work) as task:
            assert (task.key, task.payload) == (key, key.encode() + b"\0\xff")
            await task.done()
    alike: Any
    for alike in (bytearray(b"ab"), memoryview(b"ab")):
        await work.submit("a", alike)
        async with await took(work) as task:
            assert task.payload == b"ab"
            await task.done()
    for bad in ("", "\0", "\ud800"):
        with pytest.raises(InvalidId):
            await work.submit(bad)
    with pytest.raises(TooLarge):
        await work.submit("a", b"x" * (1 << 20))
    await work.submit("a", b"x" * ((1 << 20) - 2000))


# Policies.


async def test_refused_while_the_key_is_busy(opened: Open) -> None:
    work = await opened(policy=Policy.REFUSE)
    await work.submit("a")
    with pytest.raises(TokenBusy):
        await work.submit("a")
    task = await took(work)
    with pytest.raises(TokenBusy):
        await work.submit("a")
    await task.done()
    await work.submit("a")
    async with await took(work) as task:
        await task.done()


async def test_a_queue_has_a_bound(opened: Open) -> None:
    work = await opened(waiting_max=3)
    for i in range(3):
        await work.submit("a", bytes([i]))
    with pytest.raises(TokenQueueFull):
        await work.submit("a")
    await work.submit("b")
    await (await took(work)).done()
    loop = asyncio.get_running_loop()
    began = loop.time()
    await work.submit("a", b"\x03")
    assert loop.time() - began < 10  # no worker needs to take the key first


async def test_the_newest_replaces_what_waits(opened: Open) -> None:
    work = await opened(policy=Policy.REPLACE)
    await work.submit("a", b"1")
    task = await took(work)
    for payload in (b"2", b"3", b"4"):
        await work.submit("a", payload)
    assert task.payload == b"1"
    await task.done()
    async with await took(work) as task:
        assert task.payload == b"4"
        await task.done()
    assert await work.take(0.1) is None


@pytest.mark.parametrize("how", ["left", "released", "tried later"])
async def test_the_newest_is_taken_at_once_when_the_older_is_given_back(opened: Open, how: str) -> None:
    """Regression: its delivery had been put off until the end of the holder's time, and nothing else told of it."""
    work = await opened(policy=Policy.REPLACE, ttl_s=60)
    await work.submit("a", b"1")
    task = await took(work)
    await work.submit("a", b"2")
    assert await work.take(0.3) is None
    match how:
        case "left":
            async with task:
                pass
        case "released":
            await task.release()
        case "tried later":
            await task.retry(30.0)
    async with await took(work) as task:
        assert task.payload == b"2"
        await task.done()
    assert await work.take(0.1) is None


# The token.


async def test_the_tokens_of_a_key_grow_with_every_holder(opened: Open, servers: Servers) -> None:
    work = await opened()
    tokens = []
    for _ in range(3):
        await work.submit("a")
        task = await took(work)
        tokens.append(task.token)
        await task.retry()
        async with await took(work) as task:
            tokens.append(task.token)
            await task.done()
    # Tokens also grow when the streams are deleted and recreated.
    for stream in ("items", "fence"):
        await work._items.api(f"STREAM.DELETE.{work._config.name}-{stream}")
    again = await opened()
    await again.submit("a")
    tokens.append((await took(again)).token)
    assert tokens == sorted(set(tokens))


async def test_a_long_task_stays_its_holders(opened: Open) -> None:
    work = await opened(ttl_s=6)  # renewed every two seconds
    await work.submit("a")
    async with await took(work) as task:
        assert await work.take(7.5) is None
        task.check()
        assert not task.lost.is_set()
        await task.done()
    assert await work.take(0.1) is None


async def test_a_holder_that_stalled_finds_its_token_lost(opened: Open) -> None:
    work, other = await opened(ttl_s=4), await opened(ttl_s=4)
    await work.submit("a", b"1")
    stalled = await took(work)
    stall(stalled)
    second = await took(other)
    assert (second.payload, second.attempt) == (b"1", 2)
    assert second.token > stalled.token
    with pytest.raises(TokenLost):
        stalled.check()
    with pytest.raises(TokenLost):
        await stalled.done()
    with pytest.raises(TokenLost):
        await stalled.retry()
    # The stalled holder's calls have freed nothing.
    third = await other.take(0.3)
    second.check()
    assert third is None
    await second.done()
    assert await other.take(4.5) is None


async def test_a_renewal_finds_that_another_has_the_key(opened: Open) -> None:
    work, other = await opened(ttl_s=6), await opened(ttl_s=6)  # renewed every 2 s
    await work.submit("a")
    first = await took(work)
    await other.release("a", force=True)
    second = await took(other)
    async with asyncio.timeout(20):
        await first.lost.wait()
    with pytest.raises(TokenLost, match="another holder took it"):
        first.check()
    second.check()
    await second.done()


async def test_a_late_delivery_does_not_steal_the_key(opened: Open) -> None:
    """A worker gets a delivery of the key and sleeps before it writes its name; then another worker holds the key."""
    work, other = await opened(ttl_s=4), await opened(ttl_s=4)
    await work.submit("a")
    early = await work._pulls.next(5)
    assert early is not None
    holder = await took(other)
    assert await work._begin("a", "YQ", early) is None
    holder.check()
    await holder.done()


async def test_done_is_done_whatever_becomes_of_the_ack(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    work = await opened(ttl_s=4)
    await work.submit("a", b"1")
    task = await took(work)

    async def dies(task: Task) -> None:
        """Stand for a process that ends between the write and the clean-up."""

    monkeypatch.setattr(task, "_afterwards", task._afterwards._replace(finish=dies))
    await task.done()
    await task.done()  # the caller may repeat it
    await work.submit("a", b"2")
    async with await took(work) as task:
        assert task.payload == b"2"
        await task.done()
    assert await work.take(4.5) is None


@pytest.mark.parametrize("how", ["retry", "release", "done"])
async def test_a_check_after_the_end_says_that_another_may_have_the_key(opened: Open, how: str) -> None:
    """Regression: it passed until the lease was over, though the next holder was at work."""
    work = await opened()
    for item in (b"1", b"2"):
        await work.submit("a", item)
    first = await took(work)
    first.check()
    await getattr(first, how)()
    second = await took(work)
    second.check()
    with pytest.raises(TokenLost, match="completed or given back"):
        first.check()
    await second.done()


async def test_an_end_that_failed_is_in_doubt_until_the_key_is_extended(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = await opened()
    await work.submit("a")
    task = await took(work)

    async def away(*_: Any) -> int:
        raise LogUnavailable("no answer in time")

    for end in (task.retry, task.done):
        with monkeypatch.context() as patched:
            patched.setattr(work._register, "write", away)
            with pytest.raises(LogUnavailable):
                await end()
        with pytest.raises(TokenLost, match="may already"):
            task.check()
        await task.extend()  # nothing that was sent before can take effect any more
        task.check()
    await task.done()


async def test_leaving_without_a_word_gives_the_item_back_at_once(opened: Open) -> None:
    work = await opened()
    await work.submit("a")
    async with await took(work) as task:
        pass
    with pytest.raises(TokenLost):
        await task.done()
    async with await took(work) as task:
        assert task.attempt == 2
        await task.done()


async def test_a_retry_waits_and_keeps_the_key_busy(opened: Open) -> None:
    work = await opened(policy=Policy.REFUSE)
    await work.submit("a")
    task, loop = await took(work), asyncio.get_running_loop()
    began = loop.time()  # the delay counts from the retry's write, whose answer may come long after
    await task.retry(0.5)
    with pytest.raises(TokenBusy):
        await work.submit("a")
    again = await took(work)
    assert loop.time() - began >= 0.5
    await again.done()


async def test_a_retry_does_not_wait_for_a_clock_that_went_back(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody holds the item, and its record was stored in what is the future now."""
    work = await opened()
    await work.submit("a")
    task, get = await took(work), work._register._get

    async def in_the_future(which: dict[str, Any]) -> tuple[int, bytes, float]:
        seq, body, stored_s = await get(which)
        return seq, body, stored_s + 3600

    monkeypatch.setattr(work._register, "_get", in_the_future)
    await task.retry(0.5)
    await (await took(work)).done()


async def test_a_delay_that_is_none_is_refused_and_the_item_is_still_held(opened: Open) -> None:
    work = await opened()
    await work.submit("a")
    async with await took(work) as task:
        wrong: Any
        for wrong in (-1, math.nan, math.inf, 1e300, 7 * 24 * 3600, None, "5", timedelta(seconds=5)):
            with pytest.raises(InvalidRecord):
                await task.retry(wrong)
        await task.done()


@pytest.mark.parametrize("concurrency", [0, -1, 1.5, True])
async def test_a_run_that_would_work_on_nothing_is_refused(opened: Open, concurrency: Any) -> None:
    """Such a run once returned at once, which a supervisor took for the end of a run."""

    async def handler(_: Task) -> None: ...

    work, stopping = await opened(), asyncio.Event()
    stopping.set()
    with pytest.raises(ConfigError, match="concurrency must be an int, at least 1"):
        await work.run(handler, stopping, concurrency=concurrency)


async def test_a_retry_waits_also_when_its_answer_and_its_delivery_go_astray(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The delay is in the key's record and counts from its write; late answers and early deliveries do not matter."""
    work = await opened()
    await work.submit("a")
    task, loop = await took(work), asyncio.get_running_loop()
    publish, hand_back = work._fences.publish, work._pulls.hand_back

    async def unanswered(message: Outgoing, timeout_s: float) -> int:
        monkeypatch.setattr(work._fences, "publish", publish)
        await publish(message, timeout_s)
        await asyncio.sleep(0.2)
        raise AppendUnknown("the leader has gone")

    async def at_once(delivery: Delivery, delay_s: float) -> None:
        monkeypatch.setattr(work._pulls, "hand_back", hand_back)
        await hand_back(delivery)

    monkeypatch.setattr(work._fences, "publish", unanswered)
    monkeypatch.setattr(work._pulls, "hand_back", at_once)
    began = loop.time()
    await task.retry(0.5)
    again = await took(work)
    assert loop.time() - began >= 0.5
    assert again.attempt == 2
    await again.done()


async def test_a_cancelled_take_leaves_nothing_taken(opened: Open) -> None:
    work, other = await opened(), await opened()
    for pause in (0, 0.001, 0.002, 0.004, 0.01):
        taking = asyncio.ensure_future(work.take(10))
        await asyncio.sleep(0.01)
        await other.submit("a")
        await asyncio.sleep(pause)
        taking.cancel()
        outcome = (await asyncio.gather(taking, return_exceptions=True))[0]
        task = outcome if isinstance(outcome, Task) else await took(other)
        await task.done()


async def test_a_run_that_is_cancelled_as_it_takes_an_item_hands_it_back(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelled between a take's end and the worker's next turn, the run once held the key until its process ended."""
    work, other = await opened(), await opened()
    take, worked = work.take, list[str]()

    async def handler(task: Task) -> None:
        worked.append(task.key)

    async def taken(wait_s: float = 5.0) -> Task | None:
        task: Task | None = await take(wait_s)
        asyncio.get_running_loop().call_soon(running.cancel)
        return task

    monkeypatch.setattr(work, "take", taken)
    await other.submit("a")
    running = asyncio.create_task(work.run(handler, asyncio.Event()))
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not worked
    async with asyncio.timeout(15):  # half of the TTL
        task = await took(other)
    assert task.attempt == 1
    await task.done()


@pytest.mark.parametrize("cancels", [1, 2, 3])
async def test_a_run_that_is_cancelled_hands_back_all_that_it_works_on(opened: Open, cancels: int) -> None:
    """One cancel of `run` once reached its workers twice, the second time while they handed back."""
    work, other, keys = await opened(), await opened(), [f"key {i}" for i in range(8)]
    at_work = asyncio.Semaphore(0)

    async def handler(task: Task) -> None:
        at_work.release()
        await asyncio.Event().wait()

    running = asyncio.create_task(work.run(handler, asyncio.Event(), concurrency=len(keys)))
    for key in keys:
        await other.submit(key)
    for _ in keys:
        await at_work.acquire()
    for _ in range(cancels):
        running.cancel()
        for _ in range(4):  # turns of the event loop
            await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await running
    await work.aclose()  # waits for the items that are still being handed back
    async with asyncio.timeout(15):  # half of the TTL
        tasks = [await took(other) for _ in keys]
    assert sorted(task.key for task in tasks) == keys
    for task in tasks:
        await task.done()


@pytest.mark.parametrize("error", [RuntimeError("not yet"), asyncio.CancelledError()], ids=lambda e: type(e).__name__)
async def test_a_handler_that_fails_is_tried_again(
    opened: Open, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    work = await opened()
    stopping, attempts = asyncio.Event(), []

    async def handler(task: Task) -> None:
        attempts.append(task.attempt)
        if task.attempt < 3:
            raise error
        stopping.set()

    await work.submit("a")
    async with asyncio.timeout(10):
        await work.run(handler, stopping)
    assert attempts == [1, 2, 3]
    assert caplog.messages.count("work on 'a' failed") == 2
    assert await work.take(0.1) is None


async def test_a_handler_whose_token_is_lost_is_cancelled(opened: Open) -> None:
    work, other = await opened(ttl_s=4), await opened(ttl_s=4)
    stopping, released, cancelled = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def handler(task: Task) -> None:
        await other.release("a", force=True)
        released.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            stopping.set()
            raise

    await work.submit("a")
    async with asyncio.TaskGroup() as runs, asyncio.timeout(20):
        runs.create_task(work.run(handler, stopping))
        await released.wait()
        task = await took(other)
        await cancelled.wait()
    await task.done()


async def test_what_anybody_publishes_into_the_streams_is_removed_or_not_looked_at(opened: Open, name: str) -> None:
    work = await opened()
    await work._items.publish(Outgoing(f"{name}.item.!", b"?"), 5)
    await work._items.publish(Outgoing(f"{name}.turn.YQ", b"?"), 5)  # of key "a", which has no items
    await work._fences.publish(Outgoing(f"{name}.fence.YQ", b"?"), 5)
    assert await work.take(0.3) is None
    assert (await work.statistics()).stored == 0
    await work.submit("a")
    await (await took(work)).done()


async def test_another_configuration_is_refused(opened: Open) -> None:
    await opened()
    for other in (
        {"policy": Policy.REPLACE},
        {"ttl_s": 7},
        {"waiting_max": 5},
        {"max_bytes": 5},
        {"storage": "memory"},
    ):
        with pytest.raises(ConfigDrift):
            await opened(**other)
