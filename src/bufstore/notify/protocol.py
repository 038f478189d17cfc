"""What a notifier promises: three events, told to all listeners, as hints and never as truth.

A notification says "go and look", not "it is so": it may be lost, doubled or late. Listeners also poll, less
often. In return, notifying never fails and never takes long: when the server is away the event is dropped, counted and
logged once, and when it is back every listener is called once, for all that it may have missed.

Against the thundering herd a scheduling of `n` items carries a **hint**: of all listeners, in all processes, only
about `n` are called. So a worker listens while it is idle and only then (see `bufstore.notify.idle`): a call that a
busy worker gets is one that an idle one does not get.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

#: Ends a registration; may be called twice, and after the notifier is closed.
Unlisten = Callable[[], Awaitable[None]]


class Event(enum.Enum):
    """The three events; each value is the last word of the event's subject or channel."""

    SCHEDULED = "sched"
    COMPLETED = "chainc"
    OWNERSHIP_LOST = "owls"


@dataclass(frozen=True)
class NotifierStatistics:
    """Counted since the start, in this process."""

    #: Whether the server could be reached when it was last needed.
    healthy: bool
    published: int
    #: Events that were dropped because the server did not take them.
    dropped: int
    received: int
    #: Callbacks called.
    woken: int
    #: Callbacks not called because the hint was used up by others.
    spared: int
    #: Hints that could not be stored or asked: their listeners were all called.
    hint_failures: int
    #: Times the connection came back, and everybody was called.
    restored: int


@runtime_checkable
class Notifier(Protocol):
    """Tells and hears of work. All adapters pass the `NOTIFY_CHECKS` of `tests/conformance`.

    Kinds and ids are any text that `bufstore.types.check_id` takes; what it refuses raises InvalidId. After `aclose`
    every call raises Closed. `notify_*` raises nothing else. `listen_*` raises Unavailable when the server cannot be
    asked to deliver; once it has returned, what is published later is heard, and lost connections heal themselves.

    A callback is a plain function that returns at once (it sets an event, say). It is called on the event loop; what
    it raises is logged and disturbs nobody.
    """

    async def notify_scheduled(self, kind: str, count: int = 1) -> None:
        """Tell that `count` items of a kind are ready: wakes about as many of its listeners."""

    async def listen_scheduled(self, kinds: Iterable[str], callback: Callable[[str], None]) -> Unlisten:
        """Call back with the kind when work of one of `kinds` is ready, until the result is called."""

    async def notify_completed(self, work_id: str) -> None:
        """Tell all listeners for this id that its work is done."""

    async def listen_completed(self, work_id: str, callback: Callable[[], None]) -> Unlisten:
        """Call back when this work is said to be done."""

    async def notify_ownership_lost(self, work_id: str) -> None:
        """Tell the worker on this id that it may have lost it."""

    async def listen_ownership_lost(self, work_id: str, callback: Callable[[], None]) -> Unlisten:
        """Call back when this work is said to be somebody else's: look, then stop."""

    def statistics(self) -> NotifierStatistics:
        """What has been told, heard and dropped."""

    async def aclose(self) -> None:
        """Stop listening and let go of what the notifier opened itself. May be called twice."""
