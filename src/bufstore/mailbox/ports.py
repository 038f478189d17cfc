"""What a mailbox needs of the place where it is kept. Adapters: `bufstore.mailbox.memory`, `.nats`, `.postgres`."""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from bufstore.mailbox.counters import MailboxGauges
from bufstore.mailbox.decisions import Claiming, Step
from bufstore.mailbox.model import Dispatch, MailboxThread, Status


class KeyTaken(Exception):
    """The thread has a dispatch with this id, or one in work with this dedupe key."""

    def __init__(self, holder: str, *, same_id: bool) -> None:
        super().__init__(holder)
        self.holder, self.same_id = holder, same_id


class InSteps(Exception):
    """Look first, then write."""


class Signal:
    """A hint that a thread may have work. Its receiver must answer it, or it goes to another one later."""

    def __init__(self, backend: Backend, thread_id: str, deliveries: int, mark: Any) -> None:
        self._backend = backend
        #: The thread that may have work.
        self.thread_id = thread_id
        #: How many times the signal has come, this time included.
        self.deliveries = deliveries
        #: By which the backend knows it from an earlier or later one of the thread.
        self.mark = mark

    async def ack(self) -> bool:
        """The receiver found no more work: end the signal, unless the store sees something to claim (see `nack`).

        False when the thread is claimed, or has moved meanwhile: then nothing was done.
        """
        return await self._backend.ack_signal(self)

    async def nack(self, delay_s: float) -> None:
        """Come again after `delay_s`, to anybody."""
        await self._backend.put_off(self, delay_s)

    async def working(self) -> None:
        """Do not come to others for the time being: I am at it."""
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
    """Where the state is. Reads show every write that returned before them.

    All raise LogUnavailable or StoreUnavailable when nothing was done. `add` and `write` raise Conflict (of
    `bufstore.buffer.ports`) when the state has moved, and AppendUnknown when no answer came.
    """

    async def open(self) -> None:
        """Connect; make what is missing. Raises ConfigError, ConfigDrift."""
        ...

    def closes_here(self) -> bool:
        """False in a process that was forked off. Raises ConfigError on another event loop, unless it is closed."""
        return True

    async def aclose(self) -> None: ...

    def now_ms(self) -> int:
        """The time, as near to the store's own clock as is known."""
        ...

    async def add(self, dispatch: Dispatch, *, own_id: bool, now_ms: int) -> Dispatch:
        """Enqueue it, stamped with the thread's epoch and its position.

        `own_id`: its id is the caller's, so it may be taken. Raises KeyTaken.
        """
        ...

    async def write(self, before: MailboxThread, step: Step, now_ms: int) -> MailboxThread:
        """Store the step if the thread is still as it was `before` and every `Move.before` is still queued."""
        ...

    async def claim_first(self, thread_id: str, claiming: Claiming, step_id: str) -> MailboxThread | None:
        """Claim what is first in the queue, as `decisions.claim` has it, in one round trip: the state after it.

        None when there is nothing to claim, or the thread is not free. The same again with a `step_id` that was done.
        Raises InSteps when it must be done in two: this store cannot, or what is first is superseded. Conflict,
        AppendUnknown as `write`.
        """
        raise InSteps

    async def thread(self, thread_id: str) -> MailboxThread: ...

    async def first(self, thread_id: str, now_ms: int) -> tuple[MailboxThread, Dispatch | None]:
        """The thread and, if it is free, the best of its queued dispatches that may be claimed now."""
        ...

    async def find(self, thread_id: str, dispatch_id: str) -> tuple[MailboxThread, Dispatch | None]: ...

    async def queued(self, thread_id: str, below_epoch: int, limit: int) -> list[Dispatch]:
        """Queued dispatches of earlier epochs, in any order; none only if there are none."""
        ...

    async def all_of(self, thread_id: str) -> tuple[MailboxThread, list[Dispatch]]:
        """Everything that is kept of the thread; the active one is in the state only."""
        ...

    async def queued_threads(self, limit: int) -> list[str]: ...

    async def finished(self, limit: int) -> list[Dispatch]:
        """Finished dispatches of all threads, those first that ended first."""
        ...

    async def counts(self) -> dict[Status, int]: ...

    async def purge(self, finished_before_ms: int, limit: int) -> int:
        """Remove finished dispatches, oldest first, and what no thread needs any more."""
        ...

    async def expiring(self, now_ms: int, limit: int) -> list[MailboxThread]:
        """Threads whose claim may be over. Costs what became due, not what there is."""
        ...

    async def signal_due(self, now_ms: int, limit: int) -> int:
        """Signal the threads whose delayed dispatches became due; how many. None where workers see the time."""
        return 0

    async def wake(self, thread_id: str) -> None:
        """Signal a thread, behind those that wait."""
        ...

    async def signal_lost(self, due_ms: int, limit: int) -> int:
        """Go on to the next `limit` of what is queued, and signal free threads of which no signal tells; how many.

        In normal life there are none. What is superseded counts, what is delayed does if it was due at `due_ms`. A
        store whose signals may go astray takes one that workers have had for too long for none.
        """
        ...

    async def gauges(self) -> MailboxGauges:
        """How things stand; without what `expiring` tells."""
        ...

    async def held(self, thread_ids: Sequence[str]) -> dict[str, tuple[int, int, int]]:
        """Version, token (0: none) and epoch of each thread, for whoever asks again soon: a copy may tell, and lag."""
        ...

    async def sweeps(self, interval_s: float) -> bool:
        """True when this instance is the one to sweep now."""
        ...

    async def signals(self, limit: int, timeout_s: float) -> list[Signal]: ...

    async def ack_signal(self, signal: Signal) -> bool:
        """See `Signal.ack`. Answers are hints, too: a lost one makes the signal come again."""
        ...

    async def put_off(self, signal: Signal, delay_s: float | None) -> None:
        """See `Signal.nack`; without a delay, `Signal.working`."""
        ...

    async def deliver_live(self, thread_id: str, payload: bytes, timeout_s: float) -> Live:
        """See `MailboxStore.deliver_live`. As it is here: where nobody can tell whether anybody listens."""
        return Live.NO_SUBSCRIBER

    async def listen_live(self, thread_id: str, handler: LiveHandler) -> Callable[[], Awaitable[None]]:
        """Hand live deliveries to `handler` until the returned function is called."""

        async def stop() -> None: ...

        return stop
