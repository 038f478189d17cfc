"""The conformance suite of notifiers, first part: work scheduled, and hints. The rest: `notify_events`.

Each check takes a `Notifiers`, which opens instances on the same channels, as two processes would. No check waits to
see that an event does not arrive: it sends another event after it, which must arrive.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from bufstore.errors import InvalidId, InvalidQuery
from bufstore.notify.idle import wait_for_work
from bufstore.notify.notifier import Notifier
from bufstore.notify.protocol import Unlisten
from bufstore.testing.basics import Check, raises, registrar

_PATIENCE_S = 20.0

CHECKS: list[Check] = []
_check = registrar(CHECKS)


@dataclass(frozen=True)
class Notifiers:
    """Opens the notifiers that the checks run on."""

    #: Opens one more instance, with its own connections, on the same server and prefix.
    open: Callable[[], Awaitable[Notifier]]
    #: Whether schedulings carry hints. Without hints, every listener is called.
    hints: bool = True

    @asynccontextmanager
    async def two(self) -> AsyncIterator[tuple[Notifier, Notifier]]:
        """Open two instances: one to listen, one to notify."""
        async with AsyncExitStack() as stack:
            here, there = await self.open(), await self.open()
            stack.push_async_callback(here.aclose)
            stack.push_async_callback(there.aclose)
            yield here, there


class Heard(list[str]):
    """Collects the arguments of a listener's calls."""

    def kind(self, kind: str) -> None:
        """The callback for schedulings."""
        self.append(kind)

    def now(self) -> None:
        """The callback for the other events."""
        self.append("")

    async def until(self, n: int) -> None:
        """Wait until there were `n` calls."""
        await eventually(lambda: len(self) >= n)


async def eventually(check: Callable[[], bool]) -> None:
    """Wait until `check` is true; fail after `_PATIENCE_S`."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _PATIENCE_S
    while not check():
        assert loop.time() < deadline, "not heard in time"
        await asyncio.sleep(0.005)


def fresh_name(what: str) -> str:
    """A kind or id that nothing else uses."""
    return f"{what} {uuid.uuid4().hex}"


# Work scheduled.


@_check()
async def a_listener_hears_of_its_kind(subject: Notifiers) -> None:
    async with subject.two() as (here, there):
        heard, kind = Heard(), fresh_name("kind")
        await here.listen_scheduled([kind], heard.kind)
        await there.notify_scheduled(kind)
        await heard.until(1)
        assert heard == [kind]


@_check()
async def who_tells_may_listen_too(subject: Notifiers) -> None:
    async with subject.two() as (here, _):
        heard, kind = Heard(), fresh_name("kind")
        await here.listen_scheduled([kind], heard.kind)
        await here.notify_scheduled(kind)
        await heard.until(1)


@_check()
async def every_scheduling_is_heard(subject: Notifiers) -> None:
    async with subject.two() as (here, there):
        heard, kind = Heard(), fresh_name("kind")
        await here.listen_scheduled([kind], heard.kind)
        for _ in range(3):
            await there.notify_scheduled(kind)
        await heard.until(3)
        assert heard == [kind] * 3


@_check()
async def other_kinds_are_not_heard(subject: Notifiers) -> None:
    async with subject.two() as (here, there):
        mine, all_, kind, other = Heard(), Heard(), fresh_name("kind"), fresh_name("other")
        await here.listen_scheduled([kind], mine.kind)
        await here.listen_scheduled([other], all_.kind)
        await there.notify_scheduled(other)
        await all_.until(1)
        assert mine == []


@_check()
async def a_listener_of_several_kinds_hears_each(subject: Notifiers) -> None:
    async with subject.two() as (here, there):
        heard, one, two = Heard(), fresh_name("one"), fresh_name("two")
        await here.listen_scheduled([one, two, one], heard.kind)
        await there.notify_scheduled(one)
        await there.notify_scheduled(two)
        await heard.until(2)
        assert sorted(heard) == sorted([one, two])


@_check()
async def who_has_left_hears_nothing_of_schedulings(subject: Notifiers) -> None:
    async with subject.two() as (here, there):
        gone, there_still, kind = Heard(), Heard(), fresh_name("kind")
        unlisten = await here.listen_scheduled([kind], gone.kind)
        await here.listen_scheduled([kind], there_still.kind)
        await unlisten()
        await there.notify_scheduled(kind, 2)
        await there_still.until(1)
        assert gone == []


@_check()
async def telling_nobody_is_fine(subject: Notifiers) -> None:
    async with subject.two() as (here, _):
        await here.notify_scheduled(fresh_name("kind"), 3)
        await here.notify_completed(fresh_name("work"))
        await here.notify_ownership_lost(fresh_name("work"))
        told = here.statistics()
        assert (told.published, told.dropped, told.hint_failures) == (3, 0, 0)
        assert told.healthy


@_check()
async def any_text_is_a_kind(subject: Notifiers) -> None:
    """Kinds with colons, spaces, dots, wildcards, quotes and other alphabets."""
    async with subject.two() as (here, there):
        heard = Heard()
        kinds = [
            f"{text}-{uuid.uuid4().hex}" for text in ("a:b::c", "a b", "a.*.>", "'\"\\$1\n", "größe 數量 🙂", "x" * 900)
        ]
        await here.listen_scheduled(kinds, heard.kind)
        for kind in kinds:
            await there.notify_scheduled(kind)
        await heard.until(len(kinds))
        assert sorted(heard) == sorted(kinds)


@_check()
async def what_is_no_text_is_refused(subject: Notifiers) -> None:
    async with subject.two() as (here, _):
        for bad in ("", "\0", "\ud800", "x" * 2000):
            with raises(InvalidId):
                await here.notify_scheduled(bad)
            with raises(InvalidId):
                await here.listen_scheduled([bad], print)
            with raises(InvalidId):
                await here.notify_completed(bad)
            with raises(InvalidId):
                await here.listen_ownership_lost(bad, print)
        with raises(InvalidQuery):
            await here.listen_scheduled([], print)
        wrong: list[Any] = [-1, "3", 1.5, True, None]
        for count in wrong:
            with raises(InvalidQuery):
                await here.notify_scheduled("kind", count)


@_check()
async def no_items_are_no_event(subject: Notifiers) -> None:
    async with subject.two() as (here, there):
        heard, kind = Heard(), fresh_name("kind")
        await here.listen_scheduled([kind], heard.kind)
        await there.notify_scheduled(kind, 0)
        await there.notify_scheduled(kind, 1)
        await heard.until(1)
        assert len(heard) == 1


# Hints.


async def _idle(notifier: Notifier, kind: str, heard: Heard) -> Unlisten:
    """Start an idle worker: after one call it is busy, and stops listening."""
    state: dict[str, Any] = {}

    def wake(kind: str) -> None:
        heard.append(kind)
        state["leaving"] = asyncio.ensure_future(state["unlisten"]())

    state["unlisten"] = await notifier.listen_scheduled([kind], wake)

    async def leave() -> None:
        await state["unlisten"]()
        if "leaving" in state:
            await state["leaving"]

    return leave


async def _settled(notifiers: list[Notifier], answers: int) -> None:
    """Wait until `answers` listeners were called or spared."""

    def done() -> bool:
        seen = [notifier.statistics() for notifier in notifiers]
        return sum(each.woken + each.spared for each in seen) >= answers

    await eventually(done)


@_check()
async def more_items_than_workers_wake_all(subject: Notifiers) -> None:
    async with subject.two() as (here, there):
        heard, kind = Heard(), fresh_name("kind")
        for _ in range(3):
            await here.listen_scheduled([kind], heard.kind)
        await there.notify_scheduled(kind, 1000)
        await heard.until(3)


@_check()
async def a_hint_wakes_as_many_as_there_are_items(subject: Notifiers) -> None:
    async with subject.two() as (here, there):
        heard, kind = Heard(), fresh_name("kind")
        for notifier in (here, here, there):
            await notifier.listen_scheduled([kind], heard.kind)
        await there.notify_scheduled(kind, 2)
        await _settled([here, there], 3)
        assert len(heard) == (2 if subject.hints else 3)


@_check()
async def hints_of_several_schedulings_add_up(subject: Notifiers) -> None:
    async with subject.two() as (here, there):
        heard, kind = Heard(), fresh_name("kind")
        leaves = [await _idle(notifier, kind, heard) for notifier in (here, there) * 3]
        await here.notify_scheduled(kind, 2)
        await _settled([here, there], 6)
        await there.notify_scheduled(kind, 3)
        await _settled([here, there], 10 if subject.hints else 6)
        assert len(heard) == (5 if subject.hints else 6)
        for leave in leaves:
            await leave()


@_check()
async def single_schedulings_in_a_row_each_wake_an_idle_worker(subject: Notifiers) -> None:
    """In one process or in several, however fast events come: a worker that was called is no longer idle."""
    for processes in (1, 5):
        async with AsyncExitStack() as stack:
            notifiers = []
            for _ in range(processes):
                notifiers.append(await subject.open())
                stack.push_async_callback(notifiers[-1].aclose)
            heard, kind = Heard(), fresh_name("kind")
            leaves = [await _idle(notifiers[i % processes], kind, heard) for i in range(5)]
            for _ in range(5):
                await notifiers[0].notify_scheduled(kind)
            await heard.until(5)
            for leave in leaves:
                await leave()


@_check()
async def who_was_called_just_now_is_called_again_if_nobody_else_is_there(subject: Notifiers) -> None:
    async with subject.two() as (here, there):
        heard, kind = Heard(), fresh_name("kind")
        await here.listen_scheduled([kind], heard.kind)
        for _ in range(3):
            await there.notify_scheduled(kind)
        await heard.until(3)


@_check()
async def a_worker_that_stops_when_it_is_called_passes_it_on(subject: Notifiers) -> None:
    async with subject.two() as (here, there):
        kind, stopping = fresh_name("kind"), asyncio.Event()

        async def nothing_due() -> float | None:
            return None

        waiting = asyncio.create_task(wait_for_work(here, [kind], nothing_due, stopping=stopping))
        await eventually(lambda: here._scheduled.count(kind) == 1 and here._scheduled._teardown is not None)
        call, passed_on = here._call, Heard()

        def call_and_stop(callback: Callable[..., None], *args: str) -> None:
            call(callback, *args)
            stopping.set()

        async def pass_on(kind: str, count: int = 1) -> None:
            passed_on.kind(kind)

        here._call, here.notify_scheduled = call_and_stop, pass_on  # type: ignore[method-assign]
        await there.notify_scheduled(kind)
        async with asyncio.timeout(_PATIENCE_S):
            assert not await waiting
        assert passed_on == [kind]


@_check()
async def a_hundred_workers_and_some_items(subject: Notifiers) -> None:
    """As many workers are woken as there are items, however many are listening."""
    async with AsyncExitStack() as stack:
        notifiers = []
        for _ in range(4):
            notifiers.append(await subject.open())
            stack.push_async_callback(notifiers[-1].aclose)
        for items in (10, 100):
            heard, kind = Heard(), fresh_name("kind")
            leaves = [await notifiers[i % 4].listen_scheduled([kind], heard.kind) for i in range(100)]
            before = sum(n.statistics().woken + n.statistics().spared for n in notifiers)
            await notifiers[0].notify_scheduled(kind, items)
            await _settled(notifiers, before + 100)
            assert len(heard) == (items if subject.hints else 100)
            for leave in leaves:
                await leave()


@_check()
async def each_gets_a_turn(subject: Notifiers) -> None:
    """Among the listeners of one process, the one that was called longest ago is called next."""
    async with subject.two() as (here, there):
        kind = fresh_name("kind")
        workers = [Heard() for _ in range(4)]
        for worker in workers:
            await here.listen_scheduled([kind], worker.kind)
        for i in range(4):
            await there.notify_scheduled(kind)
            await _settled([here], 4 * (i + 1))
        assert [len(worker) for worker in workers] == [1 if subject.hints else 4] * 4
