"""Tasks and concurrent calls: nothing that was begun goes on after its owner has ended."""

from __future__ import annotations

import asyncio
import re
import warnings
from collections.abc import Awaitable, Generator
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from types import coroutine
from typing import Any

import pytest

import bufstore
from bufstore import (
    BufferConfig,
    BufferedThreadStore,
    Closed,
    Consistency,
    LogUnavailable,
    MemoryThreadStore,
    ReadNotFresh,
)
from bufstore.memory import MemoryNats
from bufstore.shared_call import SharedCall
from bufstore.tasks import (
    LATE_S,
    Closing,
    Lasting,
    StrayCancelledError,
    end,
    own_cancels_only,
    spawn,
    together,
    unless,
    what_came,
    while_awake,
)
from helpers import run_of
from unit.fake_log import JumpingLoop, run


def eager_task_factory(loop: asyncio.AbstractEventLoop, work: Any, **_: Any) -> asyncio.Task[Any]:
    """A task whose work begins before its maker goes on, as in Python from 3.12 on."""
    if not loop.is_running():
        return asyncio.Task(work, loop=loop)
    first: list[Any] = []
    task = asyncio.Task(_rest(work, first), loop=loop)
    maker = asyncio.current_task()
    if maker is not None:
        asyncio.tasks._leave_task(loop, maker)
    asyncio.tasks._enter_task(loop, task)
    try:
        first.append(work.send(None))
    except StopIteration as e:
        first.extend(("ended", e.value))
    except BaseException as e:
        first.extend(("failed", e))
    finally:
        asyncio.tasks._leave_task(loop, task)
        if maker is not None:
            asyncio.tasks._enter_task(loop, maker)
    return task


async def _rest(work: Any, first: list[Any]) -> Any:
    if len(first) == 1:
        return await _going_on(work, first[0])
    if first[0] == "failed":
        raise first[1]
    return first[1]


@coroutine
def _going_on(work: Any, waits_for: Any) -> Generator[Any, Any, Any]:
    while True:
        try:
            got = yield waits_for
        except BaseException as e:
            step = partial(work.throw, e)
        else:
            step = partial(work.send, got)
        try:
            waits_for = step()
        except StopIteration as e:
            return e.value


#: Python's own factory, where there is one.
EAGER: Any = getattr(asyncio, "eager_task_factory", eager_task_factory)


async def test_an_error_is_raised_when_all_calls_have_ended() -> None:
    ended: list[str] = []

    async def call(name: str, turns: int, error: Exception | None = None) -> str:
        for _ in range(turns):
            await asyncio.sleep(0)
        ended.append(name)
        if error is not None:
            raise error
        return name

    with pytest.raises(ValueError, match="first"):
        await together([call("a", 5), call("b", 1, ValueError("first")), call("c", 0, TypeError("later"))])
    assert sorted(ended) == ["a", "b", "c"]
    assert await together([call("d", 2), call("e", 0)]) == ["d", "e"]


async def test_tasks_that_are_ended_have_ended_whatever_they_raise() -> None:
    closed = asyncio.Event()

    async def stubborn() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0)
            closed.set()
            raise ValueError("on the way out")

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    await end(task, None)
    assert closed.is_set()
    assert task.done()


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("fails", [False, True])
async def test_work_goes_on_unless_an_event_is_set(stopped: bool, fails: bool) -> None:
    event, begun, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
    before = asyncio.all_tasks()

    async def work() -> None:
        begun.set()
        try:
            if stopped:
                await asyncio.sleep(3600)
            if fails:
                raise ValueError("it failed")
        finally:
            ended.set()

    async def stop() -> None:
        await begun.wait()
        if stopped:
            event.set()

    stopper = asyncio.create_task(stop())
    if fails and not stopped:
        with pytest.raises(ValueError, match="it failed"):
            await unless(event, work())
    else:
        await unless(event, work())
    await stopper
    assert ended.is_set()
    assert asyncio.all_tasks() == before


async def test_a_cancel_of_something_else_is_an_error_and_one_of_the_task_ends_it() -> None:
    async def guarded(awaited: Awaitable[Any]) -> str:
        try:
            with own_cancels_only():
                await awaited
        except StrayCancelledError:
            return "stray"
        return "done"

    elsewhere = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(guarded(elsewhere))
    await asyncio.sleep(0)
    elsewhere.cancel()
    assert await waiting == "stray"
    waiting = asyncio.create_task(guarded(asyncio.get_running_loop().create_future()))
    await asyncio.sleep(0)
    await end(waiting)
    assert waiting.cancelled()

    async def cancelled_before() -> None:
        own = asyncio.current_task()
        assert own is not None
        own.cancel()
        await guarded(asyncio.get_running_loop().create_future())

    task = asyncio.create_task(cancelled_before())
    await asyncio.wait([task])
    assert task.cancelled()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await guarded(asyncio.Event().wait())


async def test_a_closing_goes_on_whoever_is_cancelled_and_a_failed_one_is_tried_again() -> None:
    began, may_end, closed = asyncio.Event(), asyncio.Event(), 0

    async def close() -> None:
        nonlocal closed
        began.set()
        await may_end.wait()
        closed += 1
        if closed == 1:
            raise ValueError("at first")

    closing = Closing()
    first, second = spawn(closing(close)), spawn(closing(close))
    await began.wait()
    await end(first)
    assert first.cancelled()
    may_end.set()
    with pytest.raises(ValueError, match="at first"):
        await second
    assert closed == 1
    await closing(close)
    assert closed == 2


def _traced(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
    return asyncio.Task(work, loop=loop, **options)


@pytest.mark.parametrize("factory", [None, _traced, EAGER])
def test_a_spawned_task_begins_when_its_maker_has_it(factory: Any) -> None:
    # It has its own loop, because the factory would stay for later tests.
    with asyncio.Runner() as runner:
        runner.run(_spawned(factory))


async def _spawned(factory: Any) -> None:
    asyncio.get_running_loop().set_task_factory(factory)
    made: list[asyncio.Task[None]] = []
    found: list[asyncio.Task[None] | None] = []

    async def work() -> None:
        found.append(made[0] if made else None)

    made.append(spawn(work(), name="work"))
    assert not found
    await made[0]
    assert found == made
    assert made[0].get_name() == "work"
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    future.set_result(1)
    assert await spawn(future) == 1
    asyncio.get_running_loop().set_task_factory(None)  # closing the loop makes tasks, too


def test_a_task_apart_knows_nothing_of_its_callers_context() -> None:
    who: ContextVar[str] = ContextVar("who", default="nobody")

    async def look() -> str:
        return who.get()

    async def main() -> None:
        who.set("the caller")
        assert (await spawn(look()), await spawn(look(), apart=True)) == ("the caller", "nobody")

    asyncio.run(main())


def test_tasks_are_made_in_one_place() -> None:
    """Regression: on a loop with eager tasks a writer's task ended before it was kept, and nothing more was written."""
    made = re.compile(r"(asyncio|loop|get_running_loop\(\))\.create_task\(|\bTask\(.*loop=|ensure_future\(")
    files = Path(bufstore.__file__).parent.rglob("*.py")
    assert [f.name for f in files if made.search(f.read_text())] == ["tasks.py"]


@pytest.mark.parametrize("factory", [EAGER, partial(EAGER), lambda *args, **more: EAGER(*args, **more)])
def test_a_store_works_where_tasks_are_eager(factory: Any) -> None:
    asyncio.run(_eager_store(factory))


async def _eager_store(factory: Any) -> None:
    config = BufferConfig(flush_interval_s=0.05, lease_s=4)
    asyncio.get_running_loop().set_task_factory(factory)
    async with await BufferedThreadStore.open(MemoryThreadStore(), nats=MemoryNats(), config=config) as store:
        for number in range(3):
            written = (store.checkpoint_append(f"t{n}", [{"n": number}], run_of(f"t{n}", number)) for n in range(5))
            await asyncio.gather(*written)
        await store.force_flush("t0")
        for level in Consistency:
            assert len(await store.load_messages("t0", consistency=level) or ()) == 3


async def test_a_look_at_health_that_is_cancelled_as_it_begins_leaves_nothing_that_never_began() -> None:
    async with await BufferedThreadStore.open(MemoryThreadStore(), nats=MemoryNats()) as store:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for turns in range(6):
                looking = spawn(store.health())
                for _ in range(turns):
                    await asyncio.sleep(0)
                await end(looking)
        assert [str(w.message) for w in warned] == []


@pytest.mark.parametrize("closes", [False, True])
async def test_who_shares_a_call_that_somebody_cancels_is_not_told_that_the_store_was_closed(closes: bool) -> None:
    shared = SharedCall(asyncio.Event().wait)
    caller = spawn(shared())
    await asyncio.sleep(0.01)
    if closes:
        await shared.aclose()
    else:
        assert shared._running is not None
        shared._running.cancel()
    with pytest.raises(Closed if closes else LogUnavailable):
        await asyncio.wait_for(caller, 1)


@pytest.mark.parametrize(
    ("fails", "at_s", "calls"),
    [
        (LogUnavailable("away"), 0.5, 1),
        (LogUnavailable("away"), 1.0 + LATE_S / 2, 1),
        (LogUnavailable("away"), 1.0 + 2 * LATE_S, 2),
        (ReadNotFresh("late"), 1.0 + 2 * LATE_S, 2),
        (ValueError("no outage"), 1.0 + 2 * LATE_S, 1),
        (None, 1.0 + 2 * LATE_S, 1),
    ],
)
def test_a_call_is_repeated_only_if_the_loop_stood_still_when_its_time_was_over(
    fails: Exception | None, at_s: float, calls: int
) -> None:
    async def main() -> None:
        loop, made = asyncio.get_running_loop(), 0
        assert isinstance(loop, JumpingLoop)
        began = loop.time()

        async def call() -> int:
            nonlocal made
            made += 1
            if made == 1:
                loop.jumping.now = began + at_s
                await what_came()
                if fails is not None:
                    raise fails
            return made

        if fails is None or calls == 2:
            assert await while_awake(call, 1.0) == calls
        else:
            with pytest.raises(type(fails)):
                await while_awake(call, 1.0)
        assert made == calls

    run(main())


def test_a_call_that_fails_again_is_not_repeated_again() -> None:
    async def main() -> None:
        loop, made = asyncio.get_running_loop(), 0
        assert isinstance(loop, JumpingLoop)

        async def call() -> None:
            nonlocal made
            made += 1
            loop.jumping.now += 2.0
            await what_came()
            raise LogUnavailable("away")

        with pytest.raises(LogUnavailable):
            await while_awake(call, 1.0)
        assert made == 2

    run(main())


def test_a_lasting_task_begins_anew_after_an_error_and_tells_the_loop_of_it() -> None:
    """Regression: it ended for good, and nobody was told."""
    told, begun = list[Any](), list[float]()

    async def work() -> None:
        begun.append(asyncio.get_running_loop().time())
        if len(begun) < 3:
            raise ValueError(f"number {len(begun)}")
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("while it is closed")

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: told.append(str(context["exception"])))
        began, lasting = loop.time(), Lasting(work, name="lasting")
        await asyncio.sleep(10)
        await lasting.aclose()
        await asyncio.sleep(10)
        assert [round(at - began, 1) for at in begun] == [0.0, 0.5, 1.0]
        assert told == ["number 1", "number 2"]

    run(main())
