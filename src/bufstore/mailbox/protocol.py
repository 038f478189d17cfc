"""The contract of a mailbox. `tests/conformance` has a check for each of its promises."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Protocol, runtime_checkable

from bufstore.mailbox.counters import MailboxStatistics
from bufstore.mailbox.model import Dispatch, Interruption, Status
from bufstore.mailbox.ports import Live, LiveHandler, Signal


@runtime_checkable
class MailboxStore(Protocol):
    """A durable queue of dispatches per thread, claimed by one worker per thread at a time.

    A *claim* is the dispatch that `claim` returned. It carries a fencing token, higher than that of every earlier
    claim, and each later step of its holder is done only if that token still holds the thread: else StaleClaim.

    `now_ms` is the time that a step goes by; without it, the store's clock. Every method raises InvalidId and
    InvalidRecord before any I/O, LogUnavailable or StoreUnavailable (nothing was done), StepUnknown (a step may have
    been done) and Closed.
    """

    async def enqueue(
        self,
        thread_id: str,
        payload: bytes = b"",
        *,
        run_id: str | None = None,
        priority: int = 128,
        available_at_ms: int | None = None,
        dedupe_key: str | None = None,
        max_attempts: int = 5,
        dispatch_id: str | None = None,
        maybe_delivered: bool = False,
        now_ms: int | None = None,
    ) -> Dispatch:
        """Put a dispatch into the thread's queue; it is durable when this returns.

        Raises AlreadyExists when the thread has a dispatch with `dispatch_id`, or one queued or claimed with
        `dedupe_key`.
        """
        ...

    async def claim(
        self, thread_id: str, holder: str, *, lease_s: float | None = None, now_ms: int | None = None
    ) -> Dispatch | None:
        """Claim the best available dispatch: lowest priority number, then longest in the queue.

        None when none is available, or the thread has a claim (also one whose lease is over: `reclaim_expired`).
        """
        ...

    async def claim_dispatch(
        self, thread_id: str, dispatch_id: str, holder: str, *, lease_s: float | None = None, now_ms: int | None = None
    ) -> Dispatch | None:
        """Claim this one, whatever its time and place; None when it is not queued or the thread has a claim."""
        ...

    async def ack(self, claim: Dispatch, *, now_ms: int | None = None) -> Dispatch:
        """The work is done, also if the thread was interrupted meanwhile. Repeating it returns the same."""
        ...

    async def nack(
        self, claim: Dispatch, *, retry_at_ms: int | None = None, error: str | None = None, now_ms: int | None = None
    ) -> Dispatch:
        """Hand it back: queued again at its old place, available from `retry_at_ms` on.

        Dead after `max_attempts` claims; superseded when the thread was interrupted.
        """
        ...

    async def dead_letter(self, claim: Dispatch, *, error: str | None = None, now_ms: int | None = None) -> Dispatch:
        """Give it up for good."""
        ...

    async def cancel(self, thread_id: str, dispatch_id: str, *, now_ms: int | None = None) -> Dispatch | None:
        """Take a queued dispatch out; None when it is not queued."""
        ...

    async def extend_lease(
        self, claim: Dispatch, *, lease_s: float | None = None, now_ms: int | None = None
    ) -> Dispatch:
        """Hold the claim longer. Raises ClaimInterrupted when its holder shall stop."""
        ...

    async def record_start(self, claim: Dispatch, instance_id: str, *, now_ms: int | None = None) -> Dispatch:
        """Record the worker that begins. Raises ClaimInterrupted when none must begin."""
        ...

    async def record_result(
        self,
        claim: Dispatch,
        run_status: str,
        *,
        termination: str | None = None,
        result: bytes | None = None,
        error: str | None = None,
        now_ms: int | None = None,
    ) -> Dispatch:
        """Note what came of it, before the ack."""
        ...

    async def interrupt(self, thread_id: str, *, now_ms: int | None = None) -> Interruption:
        """Supersede all that is queued now, in one write, and tell the holder of a claim with its next step to stop."""
        ...

    async def current_epoch(self, thread_id: str) -> int:
        """A number that grows with each interrupt; 0 when there was none, or long ago."""
        ...

    async def supersede_claimed(self, thread_id: str, *, now_ms: int | None = None) -> Dispatch | None:
        """End the thread's claim as superseded and fence its holder off; None when there is none."""
        ...

    async def load_dispatch(self, thread_id: str, dispatch_id: str) -> Dispatch | None:
        """The dispatch as it is now; None if the id is unknown or was purged. Raises Unavailable."""
        ...

    async def list_dispatches(
        self, thread_id: str, statuses: Collection[Status] | None = None, *, limit: int = 100, offset: int = 0
    ) -> list[Dispatch]:
        """The thread's dispatches, in the order of claims. Costs what is kept of the thread."""
        ...

    async def list_finished(self, *, limit: int = 100) -> list[Dispatch]:
        """Finished dispatches of all threads, the oldest first."""
        ...

    async def count_by_status(self, thread_id: str | None = None) -> dict[Status, int]:
        """How many there are; of one thread, or of all (which costs what is kept)."""
        ...

    async def queued_thread_ids(self, *, limit: int = 1000) -> list[str]:
        """Threads that have queued dispatches, sorted."""
        ...

    async def reclaim_expired(self, *, limit: int = 1000, now_ms: int | None = None) -> list[Dispatch]:
        """Take back claims whose lease is over: queued again, dead or superseded, as with `nack`."""
        ...

    async def purge_finished(self, finished_before_ms: int, *, limit: int = 1000) -> int:
        """Remove what finished before that time, the oldest first; how many."""
        ...

    async def pull_signals(self, limit: int | None = None, timeout_s: float | None = None) -> Sequence[Signal]:
        """Which threads may have work: each signal goes to one worker, over all instances, until it is answered."""
        ...

    async def deliver_live(self, thread_id: str, payload: bytes, *, timeout_s: float | None = None) -> Live:
        """Hand something to the present listener of the thread; nothing is kept."""
        ...

    async def listen_live(self, thread_id: str, handler: LiveHandler) -> Callable[[], Awaitable[None]]:
        """Take live deliveries until the returned function is called. Each is answered before `handler` runs."""
        ...

    async def deliver(self, thread_id: str, payload: bytes, **enqueue: object) -> Dispatch | None:
        """Live if somebody listens (None), else enqueued.

        A live delivery without an answer may have arrived: what is enqueued then says ``maybe_delivered``.
        """
        ...

    def statistics(self) -> MailboxStatistics:
        """Counters and timings of this instance."""
        ...

    async def aclose(self) -> None:
        """Close the connections; what is stored stays. Later calls raise Closed."""
        ...
