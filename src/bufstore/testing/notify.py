"""The conformance suite of notifiers: one check per promise of `bufstore.notify.Notifier`.

Each takes a `Notifiers`: what opens instances on the same channels, as two processes would have them. What must not be
heard is not waited for: something that must be heard is sent after it.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from bufstore.errors import Closed, InvalidId, InvalidQuery
from bufstore.notify.protocol import Notifier, Unlisten
from bufstore.testing.basics import Check, raises, registrar

_PATIENCE_S = 20.0

NOTIFY_CHECKS: list[Check] = []
_check = registrar(NOTIFY_CHECKS)


@dataclass(frozen=True)
class Notifiers:
    """What the checks are run against."""

    #: Opens one more instance, with connections of its own, on the same server and the same prefix.
    open: Callable[[], Awaitable[Notifier]]
    #: Whether schedulings carry hints. Without, everybody who listens is called.
    hints: bool = True

    @asynccontextmanager
    async def two(self) -> AsyncIterator[tuple[Notifier, Notifier]]:
        """Two instances: one to listen, one to tell."""
        async with AsyncExitStack() as stack:
            here, there = await self.open(), await self.open()
            stack.push_async_callback(here.aclose)
            stack.push_async_callback(there.aclose)
            yield here, there


class _Heard(list[str]):
    """Collects what a listener is called with."""

    def kind(self, kind: str) -> None:
        self.append(kind)

    def now(self) -> None:
        self.append("")

    async def until(self, n: int) -> None:
        await _eventually(lambda: len(self) >= n)


async def _eventually(check: Callable[[], bool]) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _PATIENCE_S
    while not check():
        assert loop.time() < deadline, "not heard in time"
        await asyncio.sleep(0.005)


def _fresh(what: str) -> str:
    return f"{what} {uuid.uuid4().hex}"


# Work scheduled.


@_check()
async def a_listener_hears_of_its_kind(subject: Notifiers) -> None:
    async with subject.two() as (here, there):
        heard, kind = _Heard(), _fresh("kind")
        await here.listen_scheduled([kind], heard.kind)
        await there.notify_scheduled(kind)
        await heard.until(1)
        assert heard == [kind]


@_check()
async def who_tells_may_listen_too(subject: Notifiers) -> None:
    async with subject.two() as (here, _):
        heard, kind = _Heard(), _fresh("kind")
        await here.listen_scheduled([kind], heard.kind)
        await here.notify_scheduled(kind)
        await heard.until(1)


@_check()
async def every_scheduling_is_heard(subject: Notifiers) -> None:
    async with subject.two() as (here, there):
        heard, kind = _Heard(), _fresh("kind")
        await here.listen_scheduled([kind], heard.kind)
        for _ in range(3):
            await there.notify_scheduled(kind)
        await heard.until(3)
        assert heard == [kind] * 3


@_check()
async def other_kinds_are_not_heard(subject: Notifiers) -> None:
    async with subject.two() as (here, there):
        mine, all_, kind, other = _Heard(), _Heard(), _fresh("kind"), _fresh("other")
        await here.listen_scheduled([kind], mine.kind)
        await here.listen_scheduled([other], all_.kind)
        await there.notify_scheduled(other)
        await all_.until(1)
        assert mine == []


@_check()
async def a_listener_of_several_kinds_hears_each(subject: Notifiers) -> None:
    async with subject.two() as (here, there):
        heard, one, two = _Heard(), _fresh("one"), _fresh("two")
        await here.listen_scheduled([one, two, one], heard.kind)
        await there.notify_scheduled(one)
        await there.notify_scheduled(two)
        await heard.until(2)
        assert sorted(heard) == sorted([one, two])


@_check()
async def who_has_left_hears_nothing_of_schedulings(subject: Notifiers) -> None:
    async with subject.two() as (here, there):
        gone, there_still, kind = _Heard(), _Heard(), _fresh("kind")
        unlisten = await here.listen_scheduled([kind], gone.kind)
        await here.listen_scheduled([kind], there_still.kind)
        await unlisten()
        await there.notify_scheduled(kind, 2)
        await there_still.until(1)
        assert gone == []


@_check()
async def telling_nobody_is_fine(subject: Notifiers) -> None:
    async with subject.two() as (here, _):
        await here.notify_scheduled(_fresh("kind"), 3)
        await here.notify_completed(_fresh("work"))
        await here.notify_ownership_lost(_fresh("work"))
        told = here.statistics()
        assert (told.published, told.dropped, told.hint_failures) == (3, 0, 0)
        assert told.healthy


@_check()
async def any_text_is_a_kind(subject: Notifiers) -> None:
    """Colons, spaces, dots, wildcards, quotes and other alphabets."""
    async with subject.two() as (here, there):
        heard = _Heard()
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
        with raises(InvalidQuery):
            await here.notify_scheduled("kind", -1)


@_check()
async def no_items_are_no_event(subject: Notifiers) -> None:
    async with subject.two() as (here, there):
        heard, kind = _Heard(), _fresh("kind")
        await here.listen_scheduled([kind], heard.kind)
        await there.notify_scheduled(kind, 0)
        await there.notify_scheduled(kind, 1)
        await heard.until(1)
        assert len(heard) == 1


# Hints.


async def _idle(notifier: Notifier, kind: str, heard: _Heard) -> Unlisten:
    """An idle worker: called once, it is busy and listens no more."""
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
    """Until all listeners were called or spared."""

    def done() -> bool:
        seen = [notifier.statistics() for notifier in notifiers]
        return sum(each.woken + each.spared for each in seen) >= answers

    await _eventually(done)


@_check()
async def more_items_than_workers_wake_all(subject: Notifiers) -> None:
    async with subject.two() as (here, there):
        heard, kind = _Heard(), _fresh("kind")
        for _ in range(3):
            await here.listen_scheduled([kind], heard.kind)
        await there.notify_scheduled(kind, 1000)
        await heard.until(3)


@_check()
async def a_hint_wakes_as_many_as_there_are_items(subject: Notifiers) -> None:
    async with subject.two() as (here, there):
        heard, kind = _Heard(), _fresh("kind")
        for notifier in (here, here, there):
            await notifier.listen_scheduled([kind], heard.kind)
        await there.notify_scheduled(kind, 2)
        await _settled([here, there], 3)
        assert len(heard) == (2 if subject.hints else 3)


@_check()
async def hints_of_several_schedulings_add_up(subject: Notifiers) -> None:
    async with subject.two() as (here, there):
        heard, kind = _Heard(), _fresh("kind")
        leaves = [await _idle(notifier, kind, heard) for notifier in (here, there) * 3]
        await here.notify_scheduled(kind, 2)
        await _settled([here, there], 6)
        await there.notify_scheduled(kind, 3)
        await _settled([here, there], 10 if subject.hints else 6)
        assert len(heard) == (5 if subject.hints else 6)
        for leave in leaves:
            await leave()


@_check()
async def a_hundred_workers_and_some_items(subject: Notifiers) -> None:
    """Exactly as many are woken as there are items, however many ask at once."""
    async with AsyncExitStack() as stack:
        notifiers = []
        for _ in range(4):
            notifiers.append(await subject.open())
            stack.push_async_callback(notifiers[-1].aclose)
        for items in (10, 100):
            heard, kind = _Heard(), _fresh("kind")
            leaves = [await notifiers[i % 4].listen_scheduled([kind], heard.kind) for i in range(100)]
            before = sum(n.statistics().woken + n.statistics().spared for n in notifiers)
            await notifiers[0].notify_scheduled(kind, items)
            await _settled(notifiers, before + 100)
            assert len(heard) == (items if subject.hints else 100)
            for leave in leaves:
                await leave()


@_check()
async def each_gets_a_turn(subject: Notifiers) -> None:
    """Of those who listen in one process, whoever was called longest ago is called next."""
    async with subject.two() as (here, there):
        kind = _fresh("kind")
        workers = [_Heard() for _ in range(4)]
        for worker in workers:
            await here.listen_scheduled([kind], worker.kind)
        for i in range(4):
            await there.notify_scheduled(kind)
            await _settled([here], 4 * (i + 1))
        assert [len(worker) for worker in workers] == [1 if subject.hints else 4] * 4


# Work completed, ownership lost: the same four for both.


@dataclass(frozen=True)
class _Kind:
    listen: Callable[[Notifier], Callable[[str, Callable[[], None]], Awaitable[Unlisten]]]
    notify: Callable[[Notifier], Callable[[str], Awaitable[None]]]


_COMPLETED = _Kind(lambda n: n.listen_completed, lambda n: n.notify_completed)
_LOST = _Kind(lambda n: n.listen_ownership_lost, lambda n: n.notify_ownership_lost)


async def _heard_for_its_id(subject: Notifiers, event: _Kind) -> None:
    async with subject.two() as (here, there):
        heard, work = _Heard(), _fresh("work")
        await event.listen(here)(work, heard.now)
        await event.notify(there)(work)
        await heard.until(1)
        assert len(heard) == 1


async def _not_heard_for_another(subject: Notifiers, event: _Kind) -> None:
    async with subject.two() as (here, there):
        heard, other, work = _Heard(), _Heard(), _fresh("work")
        await event.listen(here)(work, heard.now)
        await event.listen(here)(work + ":", other.now)
        await event.notify(there)(work + ":")
        await other.until(1)
        assert heard == []


async def _heard_by_all(subject: Notifiers, event: _Kind) -> None:
    async with subject.two() as (here, there):
        heard, work = _Heard(), _fresh("work")
        for notifier in (here, here, there):
            await event.listen(notifier)(work, heard.now)
        await event.notify(there)(work)
        await heard.until(3)
        assert len(heard) == 3


async def _not_heard_after_leaving(subject: Notifiers, event: _Kind) -> None:
    async with subject.two() as (here, there):
        gone, still, work = _Heard(), _Heard(), _fresh("work")
        unlisten = await event.listen(here)(work, gone.now)
        await event.listen(here)(work, still.now)
        await unlisten()
        await event.notify(there)(work)
        await still.until(1)
        assert gone == []


@_check()
async def a_completion_is_heard_for_its_id(subject: Notifiers) -> None:
    await _heard_for_its_id(subject, _COMPLETED)


@_check()
async def a_completion_is_not_heard_for_another_id(subject: Notifiers) -> None:
    await _not_heard_for_another(subject, _COMPLETED)


@_check()
async def a_completion_is_heard_by_all_who_wait(subject: Notifiers) -> None:
    await _heard_by_all(subject, _COMPLETED)


@_check()
async def a_completion_is_not_heard_after_leaving(subject: Notifiers) -> None:
    await _not_heard_after_leaving(subject, _COMPLETED)


@_check()
async def a_loss_is_heard_for_its_id(subject: Notifiers) -> None:
    await _heard_for_its_id(subject, _LOST)


@_check()
async def a_loss_is_not_heard_for_another_id(subject: Notifiers) -> None:
    await _not_heard_for_another(subject, _LOST)


@_check()
async def a_loss_is_heard_by_all_who_listen(subject: Notifiers) -> None:
    await _heard_by_all(subject, _LOST)


@_check()
async def a_loss_is_not_heard_after_leaving(subject: Notifiers) -> None:
    await _not_heard_after_leaving(subject, _LOST)


@_check()
async def the_three_events_are_apart(subject: Notifiers) -> None:
    async with subject.two() as (here, there):
        scheduled, completed, lost, name = _Heard(), _Heard(), _Heard(), _fresh("name")
        await here.listen_scheduled([name], scheduled.kind)
        await here.listen_completed(name, completed.now)
        await here.listen_ownership_lost(name, lost.now)
        await there.notify_ownership_lost(name)
        await there.notify_completed(name)
        await there.notify_scheduled(name)
        for heard in (scheduled, completed, lost):
            await heard.until(1)
        assert (len(scheduled), len(completed), len(lost)) == (1, 1, 1)


# In time, and whatever callbacks do.


@_check()
async def events_arrive_while_more_are_sent(subject: Notifiers) -> None:
    """A publisher in a loop does not keep them all to its end."""
    async with subject.two() as (here, there):
        heard = _Heard()
        works = [_fresh("work") for _ in range(50)]
        for work in works:
            await here.listen_completed(work, heard.now)
        for work in works[:25]:
            await there.notify_completed(work)
        await heard.until(1)
        for work in works[25:]:
            await there.notify_completed(work)
        await heard.until(50)
        assert len(heard) == 50


@_check()
async def listening_is_in_place_when_the_call_returns(subject: Notifiers) -> None:
    async with subject.two() as (here, there):
        for _ in range(20):
            heard, work = _Heard(), _fresh("work")
            unlisten = await here.listen_completed(work, heard.now)
            await there.notify_completed(work)
            await heard.until(1)
            await unlisten()


@_check()
async def leaving_may_be_repeated(subject: Notifiers) -> None:
    async with subject.two() as (here, there):
        heard, name = _Heard(), _fresh("name")
        for unlisten in [
            await here.listen_scheduled([name], heard.kind),
            await here.listen_completed(name, heard.now),
            await here.listen_ownership_lost(name, heard.now),
        ]:
            await unlisten()
            await unlisten()
        await here.listen_completed(name, heard.now)
        await there.notify_completed(name)
        await heard.until(1)


@_check()
async def who_has_left_may_come_back(subject: Notifiers) -> None:
    async with subject.two() as (here, there):
        first, second, kind = _Heard(), _Heard(), _fresh("kind")
        await (await here.listen_scheduled([kind], first.kind))()
        await here.listen_scheduled([kind], second.kind)
        await there.notify_scheduled(kind)
        await second.until(1)
        assert first == []


@_check()
async def the_same_callback_twice_is_two_listeners(subject: Notifiers) -> None:
    async with subject.two() as (here, there):
        heard, kind = _Heard(), _fresh("kind")
        unlisten = await here.listen_scheduled([kind], heard.kind)
        await here.listen_scheduled([kind], heard.kind)
        await unlisten()
        await there.notify_scheduled(kind, 2)
        await heard.until(1)
        assert len(heard) == 1


@_check()
async def a_callback_that_fails_disturbs_nobody(subject: Notifiers) -> None:
    async with subject.two() as (here, there):
        heard, kind, work = _Heard(), _fresh("kind"), _fresh("work")

        def fails(*_: str) -> None:
            raise RuntimeError("a callback that fails")

        await here.listen_scheduled([kind], fails)
        await here.listen_scheduled([kind], heard.kind)
        await here.listen_completed(work, fails)
        await here.listen_completed(work, heard.now)
        for n in (1, 2):
            await there.notify_scheduled(kind, 2)
            await there.notify_completed(work)
            await heard.until(2 * n)
        assert here.statistics().dropped == there.statistics().dropped == 0


@_check()
async def a_callback_may_leave_while_it_is_called(subject: Notifiers) -> None:
    """Its peers are called all the same."""
    async with subject.two() as (here, there):
        heard, work, leaving = _Heard(), _fresh("work"), list[asyncio.Task[None]]()

        def leave() -> None:
            leaving.extend(asyncio.ensure_future(each()) for each in unlistens)
            heard.now()

        unlistens = [await here.listen_completed(work, leave) for _ in range(3)]
        await there.notify_completed(work)
        await heard.until(3)
        await asyncio.gather(*leaving)
        assert len(heard) == 3


@_check()
async def nothing_fails_unseen(subject: Notifiers) -> None:
    """An ordinary life leaves no task that failed without anybody looking."""
    loop, unseen = asyncio.get_running_loop(), list[dict[str, Any]]()
    before = loop.get_exception_handler()
    loop.set_exception_handler(lambda _, context: unseen.append(context))
    try:
        async with subject.two() as (here, there):
            heard, kind = _Heard(), _fresh("kind")
            for _ in range(3):
                unlisten = await here.listen_scheduled([kind], heard.kind)
                await there.notify_scheduled(kind)
                await unlisten()
        await asyncio.sleep(0)
    finally:
        loop.set_exception_handler(before)
    assert unseen == []


# The end.


@_check()
async def a_closed_notifier_says_so(subject: Notifiers) -> None:
    notifier = await subject.open()
    unlisten = await notifier.listen_scheduled(["kind"], print)
    await notifier.aclose()
    await notifier.aclose()
    await unlisten()
    for call in (
        lambda: notifier.notify_scheduled("kind"),
        lambda: notifier.notify_completed("work"),
        lambda: notifier.notify_ownership_lost("work"),
        lambda: notifier.listen_scheduled(["kind"], print),
        lambda: notifier.listen_completed("work", print),
        lambda: notifier.listen_ownership_lost("work", print),
    ):
        with raises(Closed):
            await call()


@_check()
async def closing_one_leaves_the_other(subject: Notifiers) -> None:
    async with subject.two() as (here, there):
        heard, kind = _Heard(), _fresh("kind")
        await here.listen_scheduled([kind], heard.kind)
        third = await subject.open()
        await third.listen_scheduled([kind], print)
        await third.aclose()
        await there.notify_scheduled(kind)
        await heard.until(1)
