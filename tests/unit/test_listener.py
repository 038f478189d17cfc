"""The shared listener: one subscription for many callbacks, and every race of its start and stop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from bufstore import BufstoreError
from bufstore.errors import Closed
from bufstore.notify.listener import SharedListener, Teardown


class Server:
    """The subscriptions that a listener opens: they are counted, and can be held up and fail."""

    def __init__(self) -> None:
        self.opened = 0
        self.closed = 0
        self.most = 0
        self.opening = self.closing = False
        self.deliver: list[Callable[[str], None]] = []
        #: Set: opening and closing do not wait.
        self.may_open = asyncio.Event()
        self.may_close = asyncio.Event()
        self.may_open.set()
        self.may_close.set()
        self.fail_opens = 0
        self.fail_closes = 0
        self.heard: list[tuple[str, str]] = []
        self.listener: SharedListener[str, Callable[[str], None]] = SharedListener("test", self.open, self.dispatch)

    @property
    def live(self) -> int:
        return self.opened - self.closed

    async def open(self, deliver: Callable[[str], None]) -> Teardown:
        attempt_fails = self.fail_opens > 0
        self.fail_opens -= attempt_fails
        self.opening = True
        await self.may_open.wait()
        self.opening = False
        if attempt_fails:
            raise ConnectionError("refused")
        self.opened += 1
        self.most = max(self.most, self.live)
        self.deliver.append(deliver)

        async def teardown() -> None:
            self.closing = True
            await self.may_close.wait()
            self.closing = False
            self.closed += 1
            if self.fail_closes:
                self.fail_closes -= 1
                raise ConnectionError("no answer")

        return teardown

    def dispatch(self, payload: str) -> None:
        for callback in self.listener.pick(payload, self.listener.count(payload)):
            callback(payload)

    def send(self, payload: str) -> None:
        """Deliver on the last subscription, as the server would."""
        self.deliver[-1](payload)

    def hearing(self, name: str) -> Callable[[str], None]:
        return lambda payload: self.heard.append((name, payload))


@pytest.fixture
async def server() -> Server:
    return Server()


async def _until(there: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not there():  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_opens_with_the_first_and_closes_with_the_last(server: Server) -> None:
    assert server.opened == 0
    one = await server.listener.subscribe(["a"], server.hearing("one"))
    two = await server.listener.subscribe(["b"], server.hearing("two"))
    assert server.opened == 1
    await one()
    assert server.closed == 0
    await two()
    assert server.closed == 1


async def test_many_callbacks_of_one_key_share_a_subscription(server: Server) -> None:
    for name in "xyz":
        await server.listener.subscribe(["a"], server.hearing(name))
    server.send("a")
    assert server.heard == [("x", "a"), ("y", "a"), ("z", "a")]
    assert server.opened == 1


async def test_only_the_matching_key_is_called_and_an_unknown_one_is_nothing(server: Server) -> None:
    await server.listener.subscribe(["a"], server.hearing("x"))
    await server.listener.subscribe(["b", "c"], server.hearing("y"))
    for payload in ("c", "unknown", "a"):
        server.send(payload)
    assert server.heard == [("y", "c"), ("x", "a")]


async def test_opens_again_after_it_was_idle(server: Server) -> None:
    await (await server.listener.subscribe(["a"], server.hearing("x")))()
    await server.listener.subscribe(["a"], server.hearing("y"))
    server.send("a")
    assert server.heard == [("y", "a")]
    assert (server.opened, server.closed) == (2, 1)


async def test_one_start_for_many_that_come_at_once(server: Server) -> None:
    server.may_open.clear()
    coming = [asyncio.ensure_future(server.listener.subscribe(["a"], server.hearing(str(i)))) for i in range(20)]
    await _until(lambda: server.opening)
    server.may_open.set()
    await asyncio.gather(*coming)
    server.send("a")
    assert server.opened == 1
    assert len(server.heard) == 20


async def test_a_message_that_arrives_while_starting_is_heard(server: Server) -> None:
    """The server may deliver before the client has said that it is subscribed."""
    seen = []

    async def open_(deliver: Callable[[str], None]) -> Teardown:
        deliver("early")
        return await server.open(deliver)

    listener: SharedListener[str, Callable[[str], None]] = SharedListener("test", open_, seen.append)
    await listener.subscribe(["early"], print)
    assert seen == ["early"]


async def test_who_comes_while_it_stops_gets_a_new_start(server: Server) -> None:
    unlisten = await server.listener.subscribe(["a"], server.hearing("old"))
    server.may_close.clear()
    leaving = asyncio.ensure_future(unlisten())
    await _until(lambda: server.closing)
    coming = asyncio.ensure_future(server.listener.subscribe(["a"], server.hearing("new")))
    await asyncio.sleep(0)
    server.send("a")  # still delivered by the old subscription
    assert server.heard == [("new", "a")]
    server.may_close.set()
    await asyncio.gather(leaving, coming)
    server.send("a")
    assert (server.opened, server.closed, server.most) == (2, 1, 1)
    assert server.heard == [("new", "a"), ("new", "a")]


async def test_who_left_is_not_called(server: Server) -> None:
    one = await server.listener.subscribe(["a"], server.hearing("one"))
    await server.listener.subscribe(["a"], server.hearing("two"))
    await one()
    server.send("a")
    assert server.heard == [("two", "a")]


async def test_a_subscription_that_was_given_up_is_not_heard(server: Server) -> None:
    """Unsubscribing failed, or the server is slow: what the old one still delivers must not be heard twice."""
    server.fail_closes = 1
    await (await server.listener.subscribe(["a"], server.hearing("x")))()
    await server.listener.subscribe(["a"], server.hearing("x"))
    old, new = server.deliver
    old("a")
    assert server.heard == []
    new("a")
    assert server.heard == [("x", "a")]


async def test_a_refused_start_leaves_it_idle_for_the_next(server: Server) -> None:
    server.fail_opens = 1
    with pytest.raises(ConnectionError):
        await server.listener.subscribe(["a"], server.hearing("x"))
    assert server.live == 0
    assert server.listener.everyone() == []
    await server.listener.subscribe(["a"], server.hearing("y"))
    server.send("a")
    assert server.heard == [("y", "a")]


async def test_a_refused_start_fails_only_who_asked(server: Server) -> None:
    server.fail_opens = 1
    server.may_open.clear()
    coming = [asyncio.ensure_future(server.listener.subscribe(["a"], server.hearing(str(i)))) for i in range(3)]
    await _until(lambda: server.opening)
    server.may_open.set()
    outcomes = await asyncio.gather(*coming, return_exceptions=True)
    assert [isinstance(outcome, ConnectionError) for outcome in outcomes] == [True, False, False]
    server.send("a")
    assert server.heard == [("1", "a"), ("2", "a")]
    assert server.opened == 1


async def test_a_failed_unsubscribe_leaves_it_idle(server: Server) -> None:
    server.fail_closes = 1
    await (await server.listener.subscribe(["a"], server.hearing("x")))()
    assert server.live == 0
    await (await server.listener.subscribe(["a"], server.hearing("x")))()
    assert server.opened == server.closed == 2


async def test_closing_ends_it_and_forgets_everybody(server: Server) -> None:
    unlisten = await server.listener.subscribe(["a"], server.hearing("x"))
    await server.listener.aclose()
    assert server.live == 0
    server.send("a")
    assert server.heard == []
    await unlisten()
    await server.listener.aclose()
    with pytest.raises(Closed):
        await server.listener.subscribe(["a"], server.hearing("x"))


async def test_closing_what_never_started(server: Server) -> None:
    await server.listener.aclose()
    assert server.opened == 0


async def test_closing_while_it_starts(server: Server) -> None:
    server.may_open.clear()
    coming = asyncio.ensure_future(server.listener.subscribe(["a"], server.hearing("x")))
    await _until(lambda: server.opening)
    closing = asyncio.ensure_future(server.listener.aclose())
    await asyncio.sleep(0)
    server.may_open.set()
    await closing
    with pytest.raises(BufstoreError):
        await coming
    assert server.live == 0


async def test_closing_while_a_start_fails_does_not_hang(server: Server) -> None:
    server.fail_opens = 1
    server.may_open.clear()
    coming = asyncio.ensure_future(server.listener.subscribe(["a"], server.hearing("x")))
    await _until(lambda: server.opening)
    closing = asyncio.ensure_future(server.listener.aclose())
    await asyncio.sleep(0)
    server.may_open.set()
    async with asyncio.timeout(5):
        await closing
    with pytest.raises((ConnectionError, Closed)):
        await coming
    assert server.live == 0


async def test_leaving_twice_takes_nobody_along(server: Server) -> None:
    one = await server.listener.subscribe(["a"], server.hearing("one"))
    await one()
    await server.listener.subscribe(["a"], server.hearing("two"))
    await one()
    server.send("a")
    assert server.heard == [("two", "a")]
    assert server.live == 1


async def test_who_leaves_between_start_and_return_leaves_no_dead_listener(server: Server) -> None:
    """One leaves at the moment in which another arrives: the new one must hear."""
    for pause in range(6):
        leaving = await server.listener.subscribe(["a"], server.hearing("old"))
        coming = asyncio.ensure_future(server.listener.subscribe(["a"], server.hearing("new")))
        for _ in range(pause):
            await asyncio.sleep(0)
        await leaving()
        unlisten = await coming
        server.heard.clear()
        server.send("a")
        assert server.heard == [("new", "a")]
        await unlisten()
        assert server.live == 0


async def test_a_cancelled_subscriber_leaves_nothing_behind(server: Server) -> None:
    server.may_open.clear()
    coming = asyncio.ensure_future(server.listener.subscribe(["a"], server.hearing("x")))
    await _until(lambda: server.opening)
    coming.cancel()
    await asyncio.sleep(0)
    server.may_open.set()
    with pytest.raises(asyncio.CancelledError):
        await coming
    assert server.live == 0
    assert server.opened == 1


async def test_a_cancelled_leaver_still_leaves(server: Server) -> None:
    unlisten = await server.listener.subscribe(["a"], server.hearing("x"))
    server.may_close.clear()
    leaving = asyncio.ensure_future(unlisten())
    await _until(lambda: server.closing)
    leaving.cancel()
    await asyncio.sleep(0)
    server.may_close.set()
    await _until(lambda: server.live == 0)
    await asyncio.gather(leaving, return_exceptions=True)


async def test_any_order_of_coming_and_going_ends_well(server: Server) -> None:
    """Many come and go at once, and starts and stops fail: there are never two subscriptions, and none is left over."""
    import random

    rng = random.Random(7)
    for round_ in range(60):
        server.fail_opens = rng.randrange(2)
        server.fail_closes = rng.randrange(2)

        async def one(name: str, delays: list[int]) -> None:
            for delay in delays:
                try:
                    unlisten = await server.listener.subscribe([name], server.hearing(name))
                except ConnectionError:
                    continue
                for _ in range(delay):
                    await asyncio.sleep(0)
                before = len(server.heard)
                server.send(name)
                assert server.heard[before:] == [(name, name)]
                await unlisten()

        names = [f"{round_}-{i}" for i in range(8)]
        await asyncio.gather(*(one(name, [rng.randrange(4) for _ in range(4)]) for name in names))
        assert (server.live, server.most) == (0, 1)


async def test_picks_in_turn(server: Server) -> None:
    for name in "abc":
        await server.listener.subscribe(["k"], server.hearing(name))
    for _ in range(6):
        for callback in server.listener.pick("k", 1):
            callback("k")
    assert [name for name, _ in server.heard] == ["a", "b", "c", "a", "b", "c"]
    assert len(server.listener.pick("k", 2)) == 2
    assert len(server.listener.pick("k", 9)) == 3
    assert server.listener.pick("k", 0) == server.listener.pick("none", 1) == []
