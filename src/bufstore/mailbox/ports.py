"""What a mailbox needs of the store that keeps it. Adapters: `bufstore.mailbox.memory`, `.nats`, `.postgres`."""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from bufstore.mailbox.counters import MailboxGauges
from bufstore.mailbox.decisions import Claiming, Step
from bufstore.mailbox.model import Dispatch, MailboxThread, Status


class KeyTaken(Exception):
    """The thread has a dispatch with this id, or a queued or claimed one with this dedupe key."""

    def __init__(self, holder: str, *, same_id: bool) -> None:
        super().__init__(holder)
        self.holder, self.same_id = holder, same_id


class InSteps(Exception):
    """`claim_first` cannot claim in one round trip: read first, then write."""


class Signal:
    """A hint that a thread may have work. Its receiver must answer it, or another worker gets it later."""

    def __init__(self, backend: Backend, thread_id: str, deliveries: int, mark: Any) -> None:
        self._backend = backend
        #: The thread that may have work.
        self.thread_id = thread_id
        #: How many times the signal has come, this time included.
        self.deliveries = deliveries
        #: The mark by which the backend tells this signal from an earlier or later one of the thread.
        self.mark = mark

    async def ack(self) -> bool:
        """End the signal: its receiver found no more work. It comes again if the store sees something to claim.

        Returns False when the thread is claimed, or has moved meanwhile: then nothing was done.
        """
        return await self._backend.ack_signal(self)

    async def nack(self, delay_s: float) -> None:
        """Have the signal come again after `delay_s`, to any worker."""
        await self._backend.put_off(self, delay_s)

    async def working(self) -> None:
        """Keep the signal from other workers for the time being: its receiver works on the thread."""
        await self._backend.put_off(self, None)


class Live(enum.Enum):
    """What is known of a live delivery."""

    DELIVERED = "delivered"
    #: Nobody listens: certainly not delivered.
    NO_SUBSCRIBER = "no subscriber"
    #: No answer came: delivered or not.
    UNKNOWN = "unknown"


LiveHandler = Callable[[bytes], Awaitable[None]]


class Backend(Protocol):
    """The store that keeps the state. Reads show every write that returned before them.

    All methods raise LogUnavailable or StoreUnavailable when nothing was done. `add` and `write` raise Conflict (of
    `bufstore.jetstream.messages`) when the state has moved, and AppendUnknown when no answer came.
    """

    async def open(self) -> None:
        """Connect, and create what is missing. Raises ConfigError, ConfigDrift."""

    def closes_here(self) -> bool:
        """Return False in a forked process. Raises ConfigError on another event loop, unless the store is closed."""
        return True

    async def aclose(self) -> None: ...

    def now_ms(self) -> int:
        """Return the time, as near to the store's own clock as is known."""

    async def add(self, dispatch: Dispatch, *, own_id: bool, now_ms: int) -> Dispatch:
        """Enqueue the dispatch, with the thread's epoch and a position of its own.

        `own_id`: the caller chose the dispatch's id, so the id may be taken. Raises KeyTaken.
        """

    async def write(self, before: MailboxThread, step: Step, now_ms: int) -> MailboxThread:
        """Store the step if the thread's state is still `before` and every `Move.before` is still queued."""

    async def claim_first(self, thread_id: str, claiming: Claiming, step_id: str) -> MailboxThread | None:
        """Claim the first dispatch of the queue, as `decisions.claim` does, in one round trip. Return the new state.

        Returns None when there is nothing to claim, or the thread is not free. A `step_id` that was done before gives
        the same state again. Raises InSteps when the claim takes a read and a write: this store cannot do it at once,
        or the first dispatch is superseded. Raises Conflict and AppendUnknown as `write` does.
        """
        raise InSteps

    async def thread(self, thread_id: str) -> MailboxThread: ...

    async def first(self, thread_id: str, now_ms: int) -> tuple[MailboxThread, Dispatch | None]:
        """Return the thread and, if it is free, the best of its queued dispatches that may be claimed now."""

    async def find(self, thread_id: str, dispatch_id: str) -> tuple[MailboxThread, Dispatch | None]: ...

    async def queued(self, thread_id: str, below_epoch: int, limit: int) -> list[Dispatch]:
        """Return queued dispatches of earlier epochs, in any order; an empty list only if there are none."""

    async def all_of(self, thread_id: str) -> tuple[MailboxThread, list[Dispatch]]:
        """Return everything that is kept of the thread; the active dispatch is in the state only."""

    async def queued_threads(self, limit: int) -> list[str]: ...

    async def finished(self, limit: int) -> list[Dispatch]:
        """Return finished dispatches of all threads, in the order in which they ended."""

    async def counts(self) -> dict[Status, int]: ...

    async def purge(self, finished_before_ms: int, limit: int) -> int:
        """Remove finished dispatches (return how many), the oldest first, and what no thread needs any more."""

    async def expiring(self, now_ms: int, limit: int) -> list[MailboxThread]:
        """Return threads whose claim may be over. The cost depends on what became due, not on what there is."""

    async def signal_due(self, now_ms: int, limit: int) -> int:
        """Signal the threads whose delayed dispatches became due; return how many. 0 where workers see the time."""
        return 0

    async def wake(self, thread_id: str) -> None:
        """Signal a thread, behind those whose signals wait."""

    async def signal_lost(self, due_ms: int, limit: int) -> int:
        """Look at the next `limit` of what is queued, and signal free threads that no signal tells of; return how many.

        In normal life there are none. Superseded dispatches count; delayed ones count if they were due at `due_ms`. A
        store whose signals may go astray disregards a signal that workers have had for too long.
        """

    async def gauges(self) -> MailboxGauges:
        """Return the gauges, without the one that `expiring` tells."""

    async def held(self, thread_ids: Sequence[str]) -> dict[str, tuple[int, int, int]]:
        """Return version, token (0: none) and epoch of each thread. A copy that lags may answer: ask again soon."""

    async def sweeps(self, interval_s: float) -> bool:
        """Return True when it is this instance's turn to sweep."""

    async def signals(self, limit: int, timeout_s: float) -> list[Signal]: ...

    async def ack_signal(self, signal: Signal) -> bool:
        """See `Signal.ack`. Answers are hints, too: when one is lost, the signal comes again."""

    async def put_off(self, signal: Signal, delay_s: float | None) -> None:
        """See `Signal.nack`; without a delay, `Signal.working`."""

    async def deliver_live(self, thread_id: str, payload: bytes, timeout_s: float) -> Live:
        """See `MailboxStore.deliver_live`. This default is for a store that cannot tell whether anybody listens."""
        return Live.NO_SUBSCRIBER

    async def listen_live(self, thread_id: str, handler: LiveHandler) -> Callable[[], Awaitable[None]]:
        """Hand live deliveries to `handler` until the returned function is called."""

        async def stop() -> None: ...

        return stop
