"""The notifier in memory, and what all notifiers share: routing, hints that fail open, waiting for work."""

from __future__ import annotations

import asyncio
import gc
import math
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from bufstore import BufstoreError, ConfigError
from bufstore.errors import Closed, NotifyUnavailable
from bufstore.mailbox import NatsMailboxNames
from bufstore.mailbox.nats_signals import NatsLive
from bufstore.notify import MemoryBroker, MemoryNotifier, Notifier, wait_for_work
from bufstore.notify.broker import Broker, HintUnavailable, Teardown
from bufstore.notify.nats_hints import _BIAS, granted
from bufstore.notify.payload import channel, check_prefix, hint_key, pack, unpack
from bufstore.notify.protocol import Event, Unlisten
from bufstore.notify.subscription import HealingBroker
from helpers import eventually
from unit.fake_log import run


def test_the_payload_is_split_at_the_first_colon() -> None:
    assert pack("abc", "a:b") == "abc:a:b"
    assert unpack("abc:a:b") == ("abc", "a:b")
    assert unpack(":a") == ("", "a")
    assert unpack("nothing") is None


def test_names_and_keys() -> None:
    assert channel("my.app", Event.SCHEDULED, ".") == "my.app.sched"
    assert channel("my", Event.COMPLETED, ":") == "my:chainc"
    assert channel("my", Event.OWNERSHIP_LOST, "_") == "my_owls"
    assert hint_key("my.app", "0a", "_") == "my.app_hint_0a"
    assert hint_key("my", "0a", ":") == "my:hint:0a"


@pytest.mark.parametrize("prefix", ["", ".", "a.", ".a", "a..b", "a b", "a.*", "a>", "a:b", "ä", "a.b.c.d.e", "x" * 49])
def test_a_prefix_must_fit_everywhere(prefix: str) -> None:
    with pytest.raises(ConfigError):
        check_prefix(prefix)


@pytest.mark.parametrize(
    ("value", "wanted", "expected"),
    [
        (_BIAS + 2, 1, 1),  # 3 were left
        (_BIAS, 1, 1),  # one was left
        (_BIAS - 1, 1, 0),  # none was left
        (_BIAS - 1, 3, 2),  # two were left
        (_BIAS - 500, 100, 0),
        (-1, 1, 1),  # unknown hint
        (-300, 100, 100),
    ],
)
def test_what_a_counter_grants(value: int, wanted: int, expected: int) -> None:
    assert granted(value, wanted) == expected


@pytest.mark.long
async def test_the_cost_of_an_event_does_not_grow_with_other_listeners() -> None:
    async def cost(others: int) -> float:
        async with MemoryNotifier() as notifier:
            for i in range(others):
                await notifier.listen_completed(f"other-{i}", lambda: None)
            await notifier.listen_completed("mine", lambda: None)
            began = time.process_time()
            for _ in range(300):
                await notifier.notify_completed("mine")
            return time.process_time() - began

    few, many = min([await cost(1) for _ in range(3)]), min([await cost(5000) for _ in range(3)])
    assert many < 10 * few


async def test_callbacks_are_called_before_the_call_returns() -> None:
    async with MemoryNotifier() as notifier:
        heard: list[str] = []
        await notifier.listen_scheduled(["kind"], heard.append)
        await notifier.notify_scheduled("kind")
        assert heard == ["kind"]


async def test_a_hint_is_forgotten_after_its_time() -> None:
    now = 0.0
    broker = MemoryBroker(clock=lambda: now)
    await broker.publish_hinted("h", 1, "h:kind")
    assert [broker.claim("h", 1), broker.claim("h", 1)] == [1, 0]
    now = 61.0
    assert broker.claim("h", 3) == 3
    await broker.publish_hinted("i", 1, "i:kind")
    assert list(broker._hints) == ["i"]  # no hint is kept for ever


class Broken(Broker):
    """A broker whose parts fail as told."""

    def __init__(self) -> None:
        self.memory = MemoryBroker()
        self.no_hints = False
        self.no_claims = False
        self.no_publish = False
        self.slow = False
        self.claim_turns = 0  # turns of the loop before a claim is answered

    async def publish(self, event: Event, payload: str) -> None:
        if self.slow:
            await asyncio.sleep(60)
        if self.no_publish:
            raise NotifyUnavailable("away")
        await self.memory.publish(event, payload)

    async def publish_hinted(self, hint: str, count: int, payload: str) -> None:
        if self.no_hints:
            raise HintUnavailable("the store is away")
        await self.memory.publish_hinted(hint, count, payload)

    def claim(self, hint: str, wanted: int) -> Awaitable[int]:
        async def ask() -> int:
            if self.slow:
                await asyncio.sleep(60)
            for _ in range(self.claim_turns):
                await asyncio.sleep(0)
            if self.no_claims:
                raise NotifyUnavailable("away")
            return self.memory.claim(hint, wanted)

        return ask()

    async def subscribe(self, event: Event, deliver: Callable[[str], None]) -> Teardown:
        return await self.memory.subscribe(event, deliver)

    async def aclose(self) -> None:
        pass


@pytest.fixture
async def broken() -> Broken:
    return Broken()


async def _all_heard(heard: list[str], n: int) -> None:
    async with asyncio.timeout(5):
        while True:
            if len(heard) >= n:
                return
            await asyncio.sleep(0)


async def test_a_hint_that_cannot_be_stored_wakes_everybody(broken: Broken) -> None:
    broken.no_hints = True
    async with Notifier(broken) as notifier:
        heard: list[str] = []
        for _ in range(5):
            await notifier.listen_scheduled(["kind"], heard.append)
        await notifier.notify_scheduled("kind", 1)
        assert len(heard) == 5
        assert notifier.statistics().hint_failures == 1
        assert (notifier.statistics().published, notifier.statistics().dropped) == (1, 0)


async def test_a_hint_that_cannot_be_asked_wakes_everybody(broken: Broken) -> None:
    broken.no_claims = True
    async with Notifier(broken) as notifier:
        heard: list[str] = []
        for _ in range(5):
            await notifier.listen_scheduled(["kind"], heard.append)
        await notifier.notify_scheduled("kind", 1)
        await _all_heard(heard, 5)
        assert notifier.statistics().hint_failures == 1


async def test_a_hint_that_is_answered_too_late_wakes_everybody(broken: Broken) -> None:
    async with Notifier(broken, timeout_s=0.05) as notifier:
        heard: list[str] = []
        for _ in range(5):
            await notifier.listen_scheduled(["kind"], heard.append)
        broken.slow = True
        await notifier.notify_scheduled("kind", 1)
        await _all_heard(heard, 5)


async def test_more_questions_than_may_be_open_wake_everybody(broken: Broken) -> None:
    async with Notifier(broken, timeout_s=30) as notifier:
        heard: list[str] = []
        await notifier.listen_scheduled(["kind"], heard.append)
        broken.slow = True
        for _ in range(300):
            await notifier.notify_scheduled("kind", 1)
        assert len(heard) == 300 - 256
        assert len(notifier._claims) == 256


async def test_telling_never_fails_and_ends_in_time(broken: Broken, caplog: pytest.LogCaptureFixture) -> None:
    async with Notifier(broken, timeout_s=0.05) as notifier:
        broken.no_publish = broken.no_hints = True
        for _ in range(3):
            await notifier.notify_scheduled("kind")
            await notifier.notify_completed("work")
        assert notifier.statistics().dropped == 6
        assert not notifier.statistics().healthy
        assert sum(r.levelname == "WARNING" for r in caplog.records) == 1  # once per outage
        broken.slow = True
        async with asyncio.timeout(5):
            await notifier.notify_ownership_lost("work")
        broken.slow = broken.no_publish = False
        await notifier.notify_completed("work")
        assert notifier.statistics().healthy


async def test_everybody_is_called_once_when_the_connection_is_back(broken: Broken) -> None:
    async with Notifier(broken) as notifier:
        heard: list[str] = []
        await notifier.listen_scheduled(["a", "b"], heard.append)
        await notifier.listen_completed("c", lambda: heard.append("c"))
        await notifier.listen_ownership_lost("d", lambda: heard.append("d"))
        broken.tell_restored()
        assert sorted(heard) == ["a", "b", "c", "d"]
        assert notifier.statistics().restored == 1


async def test_what_anybody_publishes_disturbs_nobody(broken: Broken) -> None:
    async with Notifier(broken) as notifier:
        heard: list[str] = []
        await notifier.listen_scheduled(["kind"], heard.append)
        for payload in ("", "nothing", ":", "unknown-hint:kind", ":kind"):
            await broken.memory.publish(Event.SCHEDULED, payload)
        await _all_heard(heard, 2)  # an unknown hint wakes, and a missing one


async def test_a_close_while_a_call_is_passed_on_leaves_no_failed_task(broken: Broken) -> None:
    unseen = list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
    for turns in range(10):
        async with Notifier(broken) as notifier:
            await notifier.listen_scheduled(["kind"], lambda _: None)
            broken.claim_turns = turns
            await notifier.notify_scheduled("kind")
    gc.collect()  # reports tasks whose error nobody retrieved
    assert unseen == []


# Waiting for work.


async def _never() -> float | None:
    return None


@pytest.mark.parametrize("kinds", [["other", "kind"], "kind"])
async def test_waiting_ends_with_a_notification(kinds: list[str] | str) -> None:
    async with MemoryNotifier() as notifier:
        waiting = asyncio.ensure_future(wait_for_work(notifier, kinds, _never, poll_s=60))
        await asyncio.sleep(0)
        async with asyncio.timeout(5):
            while not waiting.done():
                await notifier.notify_scheduled("kind")
                await asyncio.sleep(0)
        assert await waiting


async def test_work_that_comes_between_look_and_sleep_is_not_missed() -> None:
    async with MemoryNotifier() as notifier:

        async def look() -> float | None:
            await notifier.notify_scheduled("kind")  # the worker does not know of it when the look ends
            return None

        async with asyncio.timeout(5):
            assert await wait_for_work(notifier, ["kind"], look, poll_s=60)


async def test_waiting_ends_when_work_is_due_and_when_it_is_time_to_poll() -> None:
    async with MemoryNotifier() as notifier:
        for due, poll in ((0.0, 60.0), (0.01, 60.0), (None, 0.01), (60.0, 0.01)):

            async def look(due: float | None = due) -> float | None:
                return due

            async with asyncio.timeout(5):
                assert await wait_for_work(notifier, ["kind"], look, poll_s=poll)


async def test_waiting_ends_when_stopping() -> None:
    stopping = asyncio.Event()
    async with MemoryNotifier() as notifier:
        waiting = asyncio.ensure_future(wait_for_work(notifier, ["kind"], _never, stopping=stopping))
        await asyncio.sleep(0)
        stopping.set()
        async with asyncio.timeout(5):
            assert not await waiting


@pytest.mark.parametrize("how", ["stopped", "cancelled"])
async def test_who_was_called_ends_well_when_the_notifier_is_closed(how: str) -> None:
    """Regression: Closed came out of it, in place of its result or its cancellation."""
    stopping, notifier = asyncio.Event(), MemoryNotifier()
    waiting = asyncio.create_task(wait_for_work(notifier, ["k"], _never, stopping=stopping))
    await eventually(lambda: _listening(notifier, 1))
    await notifier.notify_scheduled("k")
    if how == "stopped":
        stopping.set()
    else:
        waiting.cancel()
    await notifier.aclose()
    (ended,) = await asyncio.gather(waiting, return_exceptions=True)
    assert ended is False if how == "stopped" else isinstance(ended, asyncio.CancelledError)


async def test_who_is_cancelled_while_it_begins_to_listen_passes_the_call_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a call that had come already was passed on to nobody."""
    async with MemoryNotifier() as notifier:
        listen = notifier.listen_scheduled

        async def late(*arguments: Any) -> Unlisten:
            unlisten = await listen(*arguments)
            await notifier.notify_scheduled("k")
            await asyncio.Event().wait()
            return unlisten

        monkeypatch.setattr(notifier, "listen_scheduled", late)
        first = asyncio.create_task(wait_for_work(notifier, ["k"], _never))
        await eventually(lambda: _listening(notifier, 1))
        monkeypatch.undo()
        second = asyncio.create_task(wait_for_work(notifier, ["k"], _never))
        await eventually(lambda: _listening(notifier, 2))
        first.cancel()
        async with asyncio.timeout(5):
            assert await second
        await asyncio.gather(first, return_exceptions=True)


@pytest.mark.parametrize("poll_s", [-1, 0, math.nan, "1"])
async def test_a_poll_interval_is_a_time(poll_s: Any) -> None:
    """Regression: it looked without a pause, or never."""
    async with MemoryNotifier() as notifier:
        with pytest.raises(ConfigError, match="poll_s"):
            await wait_for_work(notifier, ["k"], _never, poll_s=poll_s)


async def test_who_is_called_and_cancelled_passes_the_call_on() -> None:
    """Regression: the only call for an item was lost, and another idle worker slept until it polled."""
    async with MemoryNotifier() as notifier:
        first = asyncio.create_task(wait_for_work(notifier, ["k"], _never, poll_s=600))
        await eventually(lambda: _listening(notifier, 1))
        second = asyncio.create_task(wait_for_work(notifier, ["k"], _never, poll_s=600))
        await eventually(lambda: _listening(notifier, 2))
        await notifier.notify_scheduled("k")
        first.cancel()
        async with asyncio.timeout(5):
            assert await second
        assert (await asyncio.gather(first, return_exceptions=True))[0].__class__ is asyncio.CancelledError


async def _passes_the_call_on(turns: int, *, again: bool) -> None:
    """Cancel who was called after so many turns of the loop, once or (`again`) at every turn until it has ended."""
    async with MemoryNotifier() as notifier:
        tell = notifier.notify_scheduled

        async def told_later(kind: str) -> None:
            for _ in range(3):  # as over a network
                await asyncio.sleep(0)
            await tell(kind)

        if again:
            notifier.notify_scheduled = told_later  # type: ignore[method-assign, assignment]
        first = asyncio.create_task(wait_for_work(notifier, ["k"], _never, poll_s=600))
        await eventually(lambda: _listening(notifier, 1))
        await tell("k")
        second = asyncio.create_task(wait_for_work(notifier, ["k"], _never, poll_s=600))
        for _ in range(turns):
            await asyncio.sleep(0)
        first.cancel()
        while again and not first.done():
            await asyncio.sleep(0)
            first.cancel()
        (took,) = await asyncio.gather(first, return_exceptions=True)
        if took is not True:
            async with asyncio.timeout(5):
                assert await second
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)


async def test_who_is_called_and_cancelled_at_any_moment_passes_the_call_on() -> None:
    """Regression: a call was lost if its worker was cancelled just while it stopped listening."""
    for turns in range(12):
        await _passes_the_call_on(turns, again=False)


async def swallows_cancels(*_: object, **__: object) -> None:
    """As nats-py does, and Python's wait_for before 3.12, when an answer comes in the turn of the cancel."""
    with suppress(asyncio.CancelledError):
        await asyncio.sleep(3600)


async def test_a_cancel_that_a_client_swallows_ends_a_call_all_the_same() -> None:
    """Else a loop of such calls would go on, and the TaskGroup that it is in never end."""
    broker = MemoryBroker()
    broker.publish_hinted = swallows_cancels  # type: ignore[method-assign]
    client = SimpleNamespace(request=swallows_cancels, last_error=None)
    connection = SimpleNamespace(client=lambda: client, on_connect=lambda _: None)
    bucket: Any = SimpleNamespace(connection=connection, stream=SimpleNamespace(check_size=lambda _: None))
    async with Notifier(broker, timeout_s=3600) as notifier:
        live = NatsLive(bucket, NatsMailboxNames())
        for call in (notifier.notify_scheduled("k"), live.deliver("t", b"", 3600)):
            task = asyncio.create_task(call)
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task


async def test_who_is_called_and_cancelled_again_and_again_passes_the_call_on() -> None:
    """As anyio does it: at every turn of the loop, until the task has ended."""
    for turns in range(12):
        await _passes_the_call_on(turns, again=True)


def test_a_server_that_hangs_up_at_once_is_not_asked_as_fast_as_can_be(caplog: pytest.LogCaptureFixture) -> None:
    """Regression: each time, everybody was told to look."""

    class Gone:
        async def next(self) -> None:
            raise OSError("gone")

        async def aclose(self) -> None: ...

    class Hangs(HealingBroker):
        made = 0

        async def _attach(self) -> Any:
            self.made += 1
            return Gone()

    async def main() -> None:
        broker = Hangs("test")
        teardown = await broker.subscribe(Event.SCHEDULED, lambda _: None)
        await asyncio.sleep(60)
        await teardown()
        await broker.aclose()
        assert 10 < broker.made < 60

    run(main())
    assert len(caplog.records) < 5


async def test_who_is_idle_is_called_before_who_was_called_just_now() -> None:
    called: list[str] = []
    async with MemoryNotifier() as notifier:
        await notifier.listen_scheduled(["k"], lambda _: called.append("first"))
        await notifier.notify_scheduled("k")
        await notifier.listen_scheduled(["k"], lambda _: called.append("second"))
        await notifier.notify_scheduled("k")

        async def both() -> bool:
            return len(called) == 2

        await eventually(both)
        assert called == ["first", "second"]


async def _listening(notifier: MemoryNotifier, count: int) -> bool:
    return notifier._scheduled.count("k") == count


async def test_waiting_can_be_cancelled_and_leaves_no_listener() -> None:
    async with MemoryNotifier() as notifier:
        waiting = asyncio.ensure_future(wait_for_work(notifier, ["kind"], _never))
        for _ in range(5):
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert notifier._scheduled.everyone() == []


@pytest.mark.parametrize("error", [NotifyUnavailable("away"), ConfigError("not permitted")])
async def test_waiting_goes_on_without_notifications(error: BufstoreError) -> None:
    class Away(MemoryBroker):
        async def subscribe(self, event: Event, deliver: Callable[[str], None]) -> Teardown:
            raise error

    async with MemoryNotifier(Away()) as notifier, asyncio.timeout(5):
        assert await wait_for_work(notifier, ["kind"], _never, poll_s=0.01)
    with pytest.raises(Closed):
        await wait_for_work(notifier, ["kind"], _never)


async def test_what_may_not_be_listened_to_is_said_once_and_until_it_may(caplog: pytest.LogCaptureFixture) -> None:
    class Refusing(MemoryBroker):
        refuses = True

        async def subscribe(self, event: Event, deliver: Callable[[str], None]) -> Teardown:
            if self.refuses:
                raise ConfigError("not permitted")
            return await super().subscribe(event, deliver)

    broker = Refusing()
    async with MemoryNotifier(broker) as notifier:
        for _ in range(3):
            with pytest.raises(ConfigError):
                await notifier.listen_scheduled(["kind"], lambda _: None)
            await notifier.notify_completed("work")  # this is permitted
            assert not notifier.statistics().healthy
        assert [r.levelname for r in caplog.records] == ["WARNING"]
        broker.refuses = False
        await notifier.listen_scheduled(["kind"], lambda _: None)
        assert notifier.statistics().healthy


def test_the_adapters_are_notifiers() -> None:
    assert isinstance(MemoryNotifier(), Notifier)


async def _work_off(notifier: Notifier, jobs: list[int], workers: int, poll_s: float) -> list[list[int]]:
    """Let workers do the jobs, to which others may be added. Returns each worker's jobs."""
    stopping, got = asyncio.Event(), [list[int]() for _ in range(workers)]

    async def due() -> float | None:
        return 0 if jobs else None

    async def worker(mine: list[int]) -> None:
        while await wait_for_work(notifier, ["kind"], due, poll_s=poll_s, stopping=stopping):
            while jobs:
                mine.append(jobs.pop())
                await asyncio.sleep(0.01)
                if sum(map(len, got)) == 20:
                    stopping.set()

    async with asyncio.timeout(20):
        await asyncio.gather(*(worker(mine) for mine in got))
    return got


async def test_jobs_are_spread_over_idle_workers() -> None:
    async with MemoryNotifier() as notifier:
        jobs: list[int] = []
        working = asyncio.ensure_future(_work_off(notifier, jobs, 5, poll_s=60))
        await asyncio.sleep(0.02)  # all idle: only notifications can start them
        for i in range(4):
            jobs.extend(range(5 * i, 5 * i + 5))
            await notifier.notify_scheduled("kind", 5)
            await asyncio.sleep(0.03)
        got = await working
        assert sorted(job for mine in got for job in mine) == list(range(20))
        assert all(got)


async def test_all_work_is_done_whatever_the_notifier_fails_at() -> None:
    """Every call has good and bad times of random length."""
    rng = random.Random(3)
    failures = 0

    class Flaky(MemoryBroker):
        _left, _bad = 0, True

        def _maybe(self) -> None:
            nonlocal failures
            if not self._left:
                self._bad = not self._bad
                self._left = rng.randint(1, 20) if self._bad else rng.randint(4, 15)
            self._left -= 1
            if self._bad:
                failures += 1
                raise NotifyUnavailable("away")

        async def publish(self, event: Event, payload: str) -> None:
            self._maybe()
            await super().publish(event, payload)

        async def publish_hinted(self, hint: str, count: int, payload: str) -> None:
            self._maybe()
            await super().publish_hinted(hint, count, payload)

        async def subscribe(self, event: Event, deliver: Callable[[str], None]) -> Teardown:
            self._maybe()
            return await super().subscribe(event, deliver)

    async with MemoryNotifier(Flaky()) as notifier:
        jobs: list[int] = []
        working = asyncio.ensure_future(_work_off(notifier, jobs, 3, poll_s=0.03))
        for i in range(20):
            jobs.append(i)
            await notifier.notify_scheduled("kind")
            await asyncio.sleep(0.005)
        got = await working
        assert sorted(job for mine in got for job in mine) == list(range(20))
        assert failures > 5
