"""Exclusive work when processes are paused or killed, a server is killed, and holders stall at random."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import token_instances
import token_sink
from bufstore.embedded import NatsServer, Servers
from bufstore.errors import LogUnavailable, SubmitUnknown, TokenLost
from bufstore.jetstream.questions import Questions
from bufstore.tokens import ExclusiveWork, Locks, Policy, Task
from fault_proxy.proxy import FaultProxy
from helpers import elsewhere, eventually, query
from rights import guarded
from token_instances import Open, nothing_left, stall, took, working

#: These tests measure time or wait for timeouts.
pytestmark = pytest.mark.alone

name, opened = token_instances.name, token_instances.opened


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    """A server that the test may kill."""
    server = NatsServer(tmp_path)
    server.start()
    yield server
    server.stop()


async def test_a_paused_process_does_not_pass_the_fence(opened: Open, servers: Servers, name: str) -> None:
    await token_sink.create(servers.postgres.dsn, name)
    work = await opened(ttl_s=6)
    await work.submit("a")
    holder = Path(token_sink.__file__).with_name("token_holder.py")
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(holder), servers.nats.url, name, "6", servers.postgres.dsn, name,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=dict(os.environ),
    )  # fmt: skip
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        async with asyncio.timeout(30):
            word, token = (await process.stdout.readline()).split()
        assert word == b"took"
        process.send_signal(signal.SIGSTOP)
        async with await took(work) as task:
            assert task.token > int(token)
            assert await token_sink.write(servers.postgres.dsn, name, "a", task.token, "the other")
            process.stdin.write(b"\n")
            process.send_signal(signal.SIGCONT)
            async with asyncio.timeout(30):
                answer = await process.stdout.readline()
            # Refused by the sink, the holder's own check and the fence.
            assert answer.split() == [b"sink", b"False", b"lost", b"lost"]
            task.check()
            await task.done()
        assert await query(servers.postgres.dsn, f"SELECT value FROM {name}") == [("the other",)]
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def test_a_killed_process_loses_its_key_after_its_time(opened: Open, servers: Servers, name: str) -> None:
    work = await opened(ttl_s=6)
    await work.submit("a", b"1")
    holder = Path(token_sink.__file__).with_name("token_holder.py")
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(holder), servers.nats.url, name, "6", servers.postgres.dsn, name,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=dict(os.environ),
    )  # fmt: skip
    assert process.stdout is not None
    async with asyncio.timeout(30):
        await process.stdout.readline()
    process.kill()
    await process.wait()
    async with await took(work) as task:
        assert task.payload == b"1"
        await task.done()


async def test_the_server_is_killed_and_nothing_is_lost_or_done_twice(opened: Open, nats_server: NatsServer) -> None:
    instances = [await opened(nats_server.url, ttl_s=2) for _ in range(2)]
    submitted = set[tuple[str, int]]()
    handled, completed = set[tuple[str, int]](), defaultdict[str, list[int]](list)

    async def handler(task: Task) -> None:
        await asyncio.sleep(0.01)
        handled.add((task.key, int(task.payload)))

    for instance in instances:
        finish = instance._finish

        async def noted(task: Task, finish: Any = finish) -> None:
            completed[task.key].append(int(task.payload))  # `done` was answered; a kill may lose the answer
            await finish(task)

        instance._finish = noted

    async def submit(n: int) -> None:
        key = f"key {n}"
        for i in range(30):
            with contextlib.suppress(SubmitUnknown):
                while True:
                    try:
                        await instances[n % 2].submit(key, str(i).encode())
                        submitted.add((key, i))
                        break
                    except LogUnavailable:
                        await asyncio.sleep(0.05)

    async def is_all_done() -> bool:
        with contextlib.suppress(LogUnavailable):
            return await nothing_left(instances[0])
        return False

    async with working(handler, *instances, concurrency=2):
        async with asyncio.TaskGroup() as submitting:
            for n in range(4):
                submitting.create_task(submit(n))
            for _ in range(2):
                await asyncio.sleep(0.15)
                await asyncio.to_thread(nats_server.kill)
                await asyncio.to_thread(nats_server.start)
        await eventually(is_all_done, 60)
    assert submitted <= handled
    for items in completed.values():
        assert items == sorted(set(items))  # in order and without repeats


async def _logged(caplog: pytest.LogCaptureFixture, action: str) -> list[str]:
    return [r.getMessage() for r in caplog.records if getattr(r, "action", "") == action]


async def test_a_submission_without_an_answer_may_come_behind_later_ones(
    opened: Open, servers: Servers, name: str
) -> None:
    """What SubmitUnknown and docs/TOKENS.md say: a stalled link gives what it holds when the caller has gone on."""
    near = await opened(policy=Policy.REPLACE)
    async with FaultProxy("127.0.0.1", servers.nats.port, protocol="nats") as proxy:
        url = servers.nats.url.replace(f":{servers.nats.port}", f":{proxy.port}")
        far = await opened(url, policy=Policy.REPLACE, timeout_s=1)
        proxy.to_server.hold()
        with pytest.raises(SubmitUnknown, match="behind items that are submitted later"):
            await far.submit("a", b"old")
        await near.submit("a", b"new")
        async with await took(near) as task:
            assert task.payload == b"new"
            await task.done()
        assert await nothing_left(near)
        proxy.heal()

        async def came() -> bool:
            return (await near.statistics()).stored > 0

        await eventually(came)
        await near.submit("a", b"new")  # the newest once more: with REPLACE that is what is worked on
        async with await took(near) as task:
            assert task.payload == b"new"
            await task.done()
        assert await nothing_left(near)


@pytest.mark.long  # ten seconds
async def test_rights_that_are_taken_for_a_while_end_no_worker(
    opened: Open, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    began, go_on, handled = asyncio.Event(), asyncio.Event(), list[str]()

    async def handler(task: Task) -> None:
        began.set()
        await go_on.wait()
        handled.append(task.key)

    with guarded(tmp_path) as rights:
        other, work = await opened(rights.server.url, ttl_s=9), await opened(rights.url, ttl_s=9)
        async with working(handler, work, concurrency=2):
            await other.submit("a")
            await began.wait()
            await rights.deny(f"{name}.fence.>")
            await eventually(lambda: _logged(caplog, "token_renew"))  # in the middle of the work
            await other.submit("b")
            await eventually(lambda: _logged(caplog, "token_take"))
            await rights.deny()
            go_on.set()
            await eventually(lambda: nothing_left(other), 60)
            assert sorted(handled) == ["a", "b"]
            began.clear()
            go_on.clear()
            await other.submit("c")
            await began.wait()
            await rights.deny(f"{name}.fence.>", "$JS.API.STREAM.INFO.>")
            go_on.set()
            await eventually(lambda: _logged(caplog, "token_lost"), 60)  # the item could not be marked done
            await rights.deny()
            await eventually(lambda: nothing_left(other), 60)
            assert set(handled) == {"a", "b", "c"}
            await elsewhere(lambda: work.run(handler, asyncio.Event()))


@pytest.mark.long
async def test_holders_that_stall_at_random_never_pass_the_fence(opened: Open) -> None:
    """Some of many holders sleep past their lease and go on as if nothing had happened."""
    instances = [await opened(ttl_s=1, timeout_s=5) for _ in range(3)]
    rng = random.Random(5)
    keys, items = ["a", "b", "c"], 12
    sink: dict[str, int] = defaultdict(int)
    written, completed = defaultdict[str, list[tuple[int, int]]](list), defaultdict[str, list[int]](list)
    refused = 0

    async def worker(work: ExclusiveWork) -> None:
        nonlocal refused
        while sum(map(len, completed.values())) < len(keys) * items:
            task = await work.take(0.5)
            if task is None:
                continue
            if rng.random() < 0.25:
                stall(task)
                await asyncio.sleep(1.2)
            if task.token < sink[task.key]:
                refused += 1  # refused by the sink; this holder goes on anyway
            else:
                sink[task.key] = task.token
                written[task.key].append((task.token, int(task.payload)))
            try:
                await task.done()
                completed[task.key].append(int(task.payload))
            except TokenLost:
                pass

    for i in range(items):
        for key in keys:
            await instances[0].submit(key, str(i).encode())
    async with asyncio.timeout(60):
        await asyncio.gather(*(worker(instance) for instance in instances for _ in range(2)))
    assert completed == {key: list(range(items)) for key in keys}
    assert refused > 0  # otherwise the test has tested nothing
    for history in written.values():
        tokens = [token for token, _ in history]
        assert tokens == sorted(tokens)
        # No earlier item is written after a later one.
        assert [item for _, item in history] == sorted(item for _, item in history)


async def test_who_misses_a_stream_says_which(servers: Servers, name: str) -> None:
    """Regression: "stream not found", beside other streams, told nobody what was removed, or lost with its storage."""
    async with await Locks.open(servers.nats.url, name=name) as locks:
        await locks._stream.api(f"STREAM.DELETE.{name}-locks")
        with pytest.raises(LogUnavailable, match=f"{name}-locks"):
            await locks.who("a")


async def test_who_submits_to_a_stream_that_is_gone_hears_which(opened: Open, name: str) -> None:
    """Regression: JetStream did not answer, as if it were away."""
    work = await opened()
    await work._items.api(f"STREAM.DELETE.{work._items.name}")
    with pytest.raises(LogUnavailable, match=f"stream not found: {work._items.name}"):
        await work.submit("a")


async def test_an_item_whose_time_is_over_before_its_taking_is_known_is_not_begun(
    opened: Open, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: its handler began beside the next one, and was cancelled; that counted as an attempt."""
    loop, ask, stood = asyncio.get_running_loop(), Questions.ask, list[str]()

    def ask_and_compute(questions: Questions, subjects: Sequence[str], *more: Any) -> str:
        if subjects[0].startswith(f"{name}.fence.") and not stood:
            stood.append(subjects[0])
            loop.call_soon(time.sleep, 1.2)
        return ask(questions, subjects, *more)

    work = await opened(ttl_s=1)
    await work.submit("a")
    monkeypatch.setattr(Questions, "ask", ask_and_compute)
    async with await took(work) as task:
        assert stood
        task.check()
        assert task.attempt == 1
        await task.done()
