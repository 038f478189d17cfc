"""One subscription for any number of callbacks: made for the first callback, ended after the last has gone.

The callbacks live in a table of their own, whatever state the subscription is in: a message that arrives while it
starts or stops finds everybody registered, and nobody stays in a table that is no longer used. Only the
subscription's own steps take turns, in tasks that go on when their caller is cancelled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, Generic, TypeVar

from bufstore.errors import Closed
from bufstore.log_lines import LogLines
from bufstore.notify.broker import Teardown
from bufstore.notify.protocol import Unlisten
from bufstore.tasks import outlasted, see_error, spawn

_log = LogLines(__name__)

P = TypeVar("P")
C = TypeVar("C")

Deliver = Callable[[P], None]

#: How long a callback that was picked counts as busy: the time that its owner needs to leave.
BUSY_S = 0.1


class _Member(Generic[C]):
    def __init__(self, keys: tuple[str, ...], callback: C) -> None:
        self.keys = keys
        self.callback = callback
        self.present = True
        #: Until when the callback counts as busy with what it was called for (monotonic seconds).
        self.busy_until = 0.0


class SharedListener(Generic[P, C]):
    """Callbacks of type C by key, and one subscription that delivers payloads of type P to `deliver`.

    `open_` makes the subscription and returns the function that ends it. It gets the function to call with each
    payload; that function does nothing once the subscription has been given up.
    """

    def __init__(self, name: str, open_: Callable[[Deliver[P]], Awaitable[Teardown]], deliver: Deliver[P]) -> None:
        self._name = name
        self._open = open_
        self._deliver = deliver
        self._members: dict[str, dict[_Member[C], None]] = {}
        self._moving = asyncio.Lock()
        self._moves: set[asyncio.Task[None]] = set()
        #: Ends the subscription; None: there is none.
        self._teardown: Teardown | None = None
        self._generation = 0
        self._failures = 0
        self._failure: Exception | None = None
        self._closed = False

    def count(self, key: str) -> int:
        """Return how many callbacks there are for a key."""
        return len(self._members.get(key, ()))

    def idle(self, key: str) -> int:
        """Return how many callbacks of a key were not just picked. One that was will leave if it listens while idle."""
        now = time.monotonic()
        return sum(member.busy_until <= now for member in self._members.get(key, ()))

    def pick(self, key: str, most: int) -> list[C]:
        """Pick up to `most` callbacks of a key: idle ones first, of these the ones not picked for the longest time."""
        members, now = self._members.get(key, {}), time.monotonic()
        picked = sorted(members, key=lambda member: member.busy_until > now)[:most]
        for member in picked:
            member.busy_until = now + BUSY_S
            if most < len(members):
                members[member] = members.pop(member)
        return [member.callback for member in picked]

    def everyone(self) -> list[tuple[str, C]]:
        """Return every callback with each of its keys."""
        return [(key, member.callback) for key, members in self._members.items() for member in members]

    async def subscribe(self, keys: Iterable[str], callback: C) -> Unlisten:
        """Register a callback and return when the subscription runs. Raises what `open_` raises, and Closed."""
        self._check_open()
        member = _Member(tuple(dict.fromkeys(keys)), callback)
        for key in member.keys:
            self._members.setdefault(key, {})[member] = None
        try:
            await self._move(self._start())
            self._check_open()
        except BaseException:
            await self._leave(member)
            raise

        async def unlisten() -> None:
            await self._leave(member)

        return unlisten

    async def aclose(self) -> None:
        """Forget all callbacks and end the subscription. May be called twice."""
        self._closed = True
        for member in {m for members in self._members.values() for m in members}:
            self._remove(member)
        await self._move(self._stop())
        await asyncio.gather(*self._moves, return_exceptions=True)

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the notifier is closed")

    def _remove(self, member: _Member[C]) -> None:
        member.present = False
        for key in member.keys:
            members = self._members[key]
            del members[member]
            if not members:
                del self._members[key]

    async def _leave(self, member: _Member[C]) -> None:
        if member.present:
            self._remove(member)
        if not self._members:
            await self._move(self._stop())

    async def _move(self, step: Coroutine[Any, Any, None]) -> None:
        """Let a step of the subscription run to its end, even if its caller is cancelled."""
        task = spawn(step, apart=True, among=self._moves)
        task.add_done_callback(see_error)
        await outlasted(task)

    async def _start(self) -> None:
        failures = self._failures
        async with self._moving:
            # A callback that left meanwhile needs no subscription; one that came meanwhile needs no second one.
            if self._teardown is not None or not self._members:
                return
            if self._failure is not None and self._failures != failures:
                raise self._failure  # another attempt hung while this one waited: one such wait is enough for all
            self._generation += 1
            generation = self._generation

            def deliver(payload: P) -> None:
                if generation == self._generation:
                    self._deliver(payload)

            began = time.monotonic()
            try:
                self._teardown = await self._open(deliver)
            except Exception as e:
                if time.monotonic() > began + BUSY_S:
                    self._failures += 1
                    self._failure = e
                raise

    async def _stop(self) -> None:
        async with self._moving:
            if self._teardown is None or self._members:
                return
            try:
                await self._teardown()
            except Exception as e:
                _log.warning("%s: cannot unsubscribe: %s", self._name, e, extra={"action": "notify_unsubscribe"})
            finally:
                # A callback that is registered while this subscription ends waits for a new one.
                self._generation += 1
                self._teardown = None
