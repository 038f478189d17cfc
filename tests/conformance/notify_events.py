"""The conformance suite of notifiers, second part: completions, losses, failing callbacks, closing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from bufstore.errors import Closed
from bufstore.notify.notifier import Notifier
from bufstore.notify.protocol import Unlisten
from bufstore.testing.basics import Check, raises, registrar
from conformance.notify_schedulings import Heard, Notifiers, fresh_name

CHECKS: list[Check] = []
_WHO: ContextVar[str] = ContextVar("who", default="nobody")
_check = registrar(CHECKS)

# Work completed and ownership lost: both kinds of event pass the same four checks.


@dataclass(frozen=True)
class _Kind:
    listen: Callable[[Notifier], Callable[[str, Callable[[], None]], Awaitable[Unlisten]]]
    notify: Callable[[Notifier], Callable[[str], Awaitable[None]]]


_COMPLETED = _Kind(lambda n: n.listen_completed, lambda n: n.notify_completed)
_LOST = _Kind(lambda n: n.listen_ownership_lost, lambda n: n.notify_ownership_lost)


async def _heard_for_its_id(subject: Notifiers, event: _Kind) -> None:
    async with subject.two() as (here, there):
        heard, work = Heard(), fresh_name("work")
        await event.listen(here)(work, heard.now)
        await event.notify(there)(work)
        await heard.until(1)
        assert len(heard) == 1


async def _not_heard_for_another(subject: Notifiers, event: _Kind) -> None:
    async with subject.two() as (here, there):
        heard, other, work = Heard(), Heard(), fresh_name("work")
        await event.listen(here)(work, heard.now)
        await event.listen(here)(work + ":", other.now)
        await event.notify(there)(work + ":")
        await other.until(1)
        assert heard == []


async def _heard_by_all(subject: Notifiers, event: _Kind) -> None:
    async with subject.two() as (here, there):
        heard, work = Heard(), fresh_name("work")
        for notifier in (here, here, there):
            await event.listen(notifier)(work, heard.now)
        await event.notify(there)(work)
        await heard.until(3)
        assert len(heard) == 3


async def _not_heard_after_leaving(subject: Notifiers, event: _Kind) -> None:
    async with subject.two() as (here, there):
        gone, still, work = Heard(), Heard(), fresh_name("work")
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
        scheduled, completed, lost, name = Heard(), Heard(), Heard(), fresh_name("name")
        await here.listen_scheduled([name], scheduled.kind)
        await here.listen_completed(name, completed.now)
        await here.listen_ownership_lost(name, lost.now)
        await there.notify_ownership_lost(name)
        await there.notify_completed(name)
        await there.notify_scheduled(name)
        for heard in (scheduled, completed, lost):
            await heard.until(1)
        assert (len(scheduled), len(completed), len(lost)) == (1, 1, 1)


# Events arrive in time, and callbacks may fail.


@_check()
async def events_arrive_while_more_are_sent(subject: Notifiers) -> None:
    """A publisher in a loop does not delay all events until the loop ends."""
    async with subject.two() as (here, there):
        heard = Heard()
        works = [fresh_name("work") for _ in range(50)]
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
            heard, work = Heard(), fresh_name("work")
            unlisten = await here.listen_completed(work, heard.now)
            await there.notify_completed(work)
            await heard.until(1)
            await unlisten()


@_check()
async def leaving_may_be_repeated(subject: Notifiers) -> None:
    async with subject.two() as (here, there):
        heard, name = Heard(), fresh_name("name")
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
        first, second, kind = Heard(), Heard(), fresh_name("kind")
        await (await here.listen_scheduled([kind], first.kind))()
        await here.listen_scheduled([kind], second.kind)
        await there.notify_scheduled(kind)
        await second.until(1)
        assert first == []


@_check()
async def the_same_callback_twice_is_two_listeners(subject: Notifiers) -> None:
    async with subject.two() as (here, there):
        heard, kind = Heard(), fresh_name("kind")
        unlisten = await here.listen_scheduled([kind], heard.kind)
        await here.listen_scheduled([kind], heard.kind)
        await unlisten()
        await there.notify_scheduled(kind, 2)
        await heard.until(1)
        assert len(heard) == 1


@_check()
async def a_callback_has_the_context_of_its_listener(subject: Notifiers) -> None:
    async with subject.two() as (here, there):
        heard, work = Heard(), fresh_name("work")

        async def listens(who: str, listen: Callable[[str, Callable[[], None]], Awaitable[Unlisten]]) -> None:
            _WHO.set(who)
            await listen(work, lambda: heard.kind(f"{who} as {_WHO.get()}"))

        for who in ("alice", "bob"):
            await asyncio.create_task(listens(who, here.listen_completed))
            await asyncio.create_task(listens(who, here.listen_ownership_lost))
        await there.notify_completed(work)
        await heard.until(2)
        await there.notify_ownership_lost(work)
        await heard.until(4)
        assert sorted(heard) == ["alice as alice"] * 2 + ["bob as bob"] * 2


@_check()
async def a_callback_that_fails_disturbs_nobody(subject: Notifiers) -> None:
    async with subject.two() as (here, there):
        heard, kind, work = Heard(), fresh_name("kind"), fresh_name("work")

        def fails(*_: str) -> None:
            raise RuntimeError("a callback that fails")

        def cancelled(*_: str) -> None:  # as the callback of a cancelled future would
            raise asyncio.CancelledError

        await here.listen_scheduled([kind], fails)
        await here.listen_scheduled([kind], cancelled)
        await here.listen_scheduled([kind], heard.kind)
        await here.listen_completed(work, fails)
        await here.listen_completed(work, cancelled)
        await here.listen_completed(work, heard.now)
        for n in (1, 2):
            await there.notify_scheduled(kind, 3)
            await there.notify_completed(work)
            await heard.until(2 * n)
        assert here.statistics().dropped == there.statistics().dropped == 0


@_check()
async def a_callback_may_leave_while_it_is_called(subject: Notifiers) -> None:
    """The other callbacks are called all the same."""
    async with subject.two() as (here, there):
        heard, work, leaving = Heard(), fresh_name("work"), list[asyncio.Task[None]]()

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
    """Ordinary use leaves no failed task whose exception nobody retrieved."""
    loop, unseen = asyncio.get_running_loop(), list[dict[str, Any]]()
    before = loop.get_exception_handler()
    loop.set_exception_handler(lambda _, context: unseen.append(context))
    try:
        async with subject.two() as (here, there):
            heard, kind = Heard(), fresh_name("kind")
            for _ in range(3):
                unlisten = await here.listen_scheduled([kind], heard.kind)
                await there.notify_scheduled(kind)
                await unlisten()
        await asyncio.sleep(0)
    finally:
        loop.set_exception_handler(before)
    assert unseen == []


# Closing.


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
        heard, kind = Heard(), fresh_name("kind")
        await here.listen_scheduled([kind], heard.kind)
        third = await subject.open()
        await third.listen_scheduled([kind], print)
        await third.aclose()
        await there.notify_scheduled(kind)
        await heard.until(1)
