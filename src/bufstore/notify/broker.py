"""What the notifier needs of a server, and nothing else: each adapter is a `Broker`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from bufstore.notify.protocol import Event

#: Ends a subscription.
Teardown = Callable[[], Awaitable[None]]


class Broker(Protocol):
    """Publishes, subscribes and keeps hints. Failures raise Unavailable, ConfigError or StoreMisconfigured.

    The caller cancels calls that take too long, except `subscribe`.
    """

    #: Called whenever the connection was lost and subscriptions are in place again. The notifier on the broker sets it;
    #: of several, as on a `MemoryBroker`, which loses nothing, the last.
    restored: Callable[[], None] | None = None

    async def publish(self, event: Event, payload: str) -> None:
        """Send a payload to all present subscribers of the event, in any process."""

    async def publish_hinted(self, hint: str, count: int, payload: str) -> None:
        """Store a hint of `count` for 60 s, and then publish a scheduling that names it.

        Raises HintUnavailable when nothing was published because the hint could not be stored.
        """

    def claim(self, hint: str, wanted: int) -> int | Awaitable[int]:
        """Take up to `wanted` of what is left of a hint and return how many: all of them if the hint is unknown."""

    async def subscribe(self, event: Event, deliver: Callable[[str], None]) -> Teardown:
        """Deliver the event's payloads from now on: what is published after this returned arrives."""

    def tell_restored(self) -> None:
        """Call `restored`, for the brokers themselves."""
        if self.restored is not None:
            self.restored()

    def closes_here(self) -> bool:
        """Return False in a forked process. Raises ConfigError on another event loop, unless the broker is closed."""
        return True

    async def aclose(self) -> None:
        """Release the connections that the broker owns."""


class HintUnavailable(Exception):
    """The hint could not be stored, or there is nowhere to store it: publish without."""
