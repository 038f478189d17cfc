"""The notifier in one process: callbacks are called before `notify_*` returns. For tests, and apps of one process."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from bufstore.notify.broker import Broker, Teardown
from bufstore.notify.notifier import Notifier
from bufstore.notify.payload import HINT_TTL_S
from bufstore.notify.protocol import Event


class MemoryBroker(Broker):
    """See `bufstore.notify.broker.Broker`. Several notifiers on one broker hear each other."""

    def __init__(self, *, hint_ttl_s: float = HINT_TTL_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._ttl_s = hint_ttl_s
        self._clock = clock
        self._hearers: dict[Event, dict[object, Callable[[str], None]]] = {event: {} for event in Event}
        #: What is left of each hint, and until when the hint is known; the oldest first.
        self._hints: OrderedDict[str, tuple[int, float]] = OrderedDict()

    async def publish(self, event: Event, payload: str) -> None:
        for deliver in list(self._hearers[event].values()):
            deliver(payload)

    async def publish_hinted(self, hint: str, count: int, payload: str) -> None:
        now = self._clock()
        while self._hints and next(iter(self._hints.values()))[1] <= now:
            self._hints.popitem(last=False)
        self._hints[hint] = (count, now + self._ttl_s)
        await self.publish(Event.SCHEDULED, payload)

    def claim(self, hint: str, wanted: int) -> int:
        left, until = self._hints.get(hint, (wanted, 0.0))
        if until <= self._clock():
            return wanted
        granted = min(left, wanted)
        self._hints[hint] = (left - granted, until)
        return granted

    async def subscribe(self, event: Event, deliver: Callable[[str], None]) -> Teardown:
        token = object()
        self._hearers[event][token] = deliver

        async def teardown() -> None:
            self._hearers[event].pop(token, None)

        return teardown

    async def aclose(self) -> None:
        """Do nothing: memory has no connections to release."""


class MemoryNotifier(Notifier):
    """A notifier for the callbacks of one process, or for those that share a `MemoryBroker`."""

    def __init__(self, broker: MemoryBroker | None = None) -> None:
        super().__init__(broker or MemoryBroker())
