"""What a notifier promises: three events, sent to all listeners, as hints and never as truth.

A notification says "go and look", not "it is so": it may be lost, doubled or late. Listeners also poll, less
often. In return, notifying never fails and never takes long: when the server is away the event is dropped, counted and
logged once, and when it is back every listener is called once, for all that it may have missed.

Against the thundering herd, a notification of `n` scheduled items carries a **hint**: of all listeners, in all
processes, only about `n` are called. So a worker listens only while it is idle (see `bufstore.notify.idle`): a call
that goes to a busy worker is missing for an idle one.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

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

    #: True when the server could be reached when it was last needed, and permits the events that are listened to.
    healthy: bool
    published: int
    #: Events that were dropped because the server did not take them.
    dropped: int
    received: int
    #: Callbacks called.
    woken: int
    #: Callbacks that were not called, because others had used up the hint.
    spared: int
    #: Hints that could not be stored or asked for: all their listeners were called.
    hint_failures: int
    #: How often the connection came back, and everybody was called.
    restored: int
