"""One mailbox for every backend: reads a thread, decides a step, writes it if the thread is still the same.

Everything that differs between stores is in the backends. `bufstore.mailbox.decisions` says what a step means, and
`bufstore.mailbox.steps` how long it is tried.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import Any, Self

from msgspec.structs import replace

from bufstore.config import as_seconds
from bufstore.errors import AlreadyExists, BufstoreError, InvalidQuery, StaleClaim, StepUnknown, TooLarge
from bufstore.jetstream.messages import Conflict
from bufstore.mailbox import decisions, model
from bufstore.mailbox.config import MailboxConfig
from bufstore.mailbox.counters import Counters, MailboxGauges, MailboxStatistics
from bufstore.mailbox.decisions import Claiming, Step, as_seen, is_same, is_stale
from bufstore.mailbox.model import DEFAULT_PRIORITY, Dispatch, Interruption, MailboxThread, Status
from bufstore.mailbox.ports import Backend, InSteps, KeyTaken, Live, LiveHandler, Signal
from bufstore.mailbox.reclaims import Reclaims, how_given_up
from bufstore.mailbox.steps import AT_ONCE, Done, Steps
from bufstore.takes import Takes
from bufstore.tasks import Closing
from bufstore.types import check_choice, check_id

#: How many characters are kept of an error that no message has room for.
_SHORT_ERROR = 200

Find = Callable[[], Awaitable[tuple[MailboxThread, Dispatch | None]]]


class MailboxStore:
    """A durable queue of dispatches per thread, claimed by one worker per thread at a time.

    A *claim* is the dispatch that `claim` returned. It carries a fencing token, higher than that of every earlier
    claim. Each later step of the holder is done only if that token still holds the thread; otherwise it raises
    StaleClaim.

    `now_ms` is the time that a step goes by; without it, the store's clock. Every method raises InvalidId and
    InvalidRecord before any I/O, LogUnavailable or StoreUnavailable (nothing was done), StepUnknown (a step may have
    been done) and Closed. A subclass for each kind of store gives the mailbox its backend.
    """

    def __init__(self, backend: Backend, config: MailboxConfig | None = None) -> None:
        self.config = config or MailboxConfig()
        self.backend = backend
        self.counters = Counters()
        self._closing = Closing()
        self._steps = Steps(backend, self.counters, self.config.timeout_s)
        self._reclaims = Reclaims(backend, self._steps, self.counters)
        #: Claims and tasks whose callers are gone: they are handed back, or come to their end, before the store closes.
        self.takes = Takes()

    async def __aenter__(self) -> Self:
        await self.backend.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections; what is stored stays. Later calls raise Closed."""
        if self.backend.closes_here():
            await self._closing(self._close)

    async def _close(self) -> None:
        await self.takes.aclose()
        await self.backend.aclose()

    def statistics(self) -> MailboxStatistics:
        """Return the counters and timings of this instance."""
        return self.counters.read()

    async def enqueue(
        self,
        thread_id: str,
        payload: bytes = b"",
        *,
        run_id: str | None = None,
        priority: int = DEFAULT_PRIORITY,
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
        now = self._now(now_ms)
        draft = model.draft(
            thread_id,
            payload,
            now,
            self.config.payload_max,
            run_id=run_id,
            priority=priority,
            available_at_ms=available_at_ms,
            dedupe_key=dedupe_key,
            max_attempts=max_attempts,
            dispatch_id=dispatch_id,
            maybe_delivered=maybe_delivered,
        )

        async def attempt(unsure: bool) -> Dispatch:
            if unsure:  # whoever chose the id: an earlier attempt may have stored it, and it may have ended since
                _, found = await self.backend.find(thread_id, draft.dispatch_id)
                if found is not None and is_same(found, draft):
                    return found
            try:
                return await self.backend.add(draft, own_id=dispatch_id is not None, now_ms=now)
            except KeyTaken as e:
                await self._check_taken(draft, e, unsure, now)
                raise Conflict("the key is free again, or the dispatch is there") from None

        with self.counters.timed("enqueue"):
            try:
                stored = await self._steps.tried(attempt)
            except StepUnknown as e:
                e.add_note(f"call load_dispatch({thread_id!r}, {draft.dispatch_id!r}) to find out")
                e.dispatch_id = draft.dispatch_id
                raise
        self.counters.count("enqueued")
        return stored

    async def _check_taken(self, draft: Dispatch, taken: KeyTaken, unsure: bool, now_ms: int) -> None:
        """Raise AlreadyExists if another dispatch still stands in the way of `draft`."""
        thread, found = await self.backend.find(draft.thread_id, taken.holder)
        if unsure and found is not None and is_same(found, draft):
            return
        if not taken.same_id:
            if found is None or found.status.finished:
                return
            if found.status is Status.QUEUED and is_stale(found, thread):
                await self._steps.drop_stale(thread, [found], now_ms)
                return
        self.counters.count("duplicates")
        what = f"id {draft.dispatch_id!r}" if taken.same_id else f"dedupe key {draft.dedupe_key!r}"
        raise AlreadyExists(f"thread {draft.thread_id!r} has a dispatch with {what}: {taken.holder!r}")

    async def claim(
        self, thread_id: str, holder: str, *, lease_s: float | None = None, now_ms: int | None = None
    ) -> Dispatch | None:
        """Claim the best available dispatch: lowest priority number, then longest in the queue.

        Returns None when none is available, or the thread has a claim (even if its lease is over: `reclaim_expired`).
        """
        now, deadline = self._now(now_ms), time.monotonic() + self.config.timeout_s

        async def find() -> tuple[MailboxThread, Dispatch | None]:
            thread, first = await self.backend.first(thread_id, now)
            while thread.active is None and first is not None and is_stale(first, thread):
                if time.monotonic() > deadline:
                    raise Conflict("every dispatch that could be read in time is superseded")
                await self._steps.drop_stale(thread, await self.backend.queued(thread_id, thread.epoch, AT_ONCE), now)
                thread, first = await self.backend.first(thread_id, now)
            return thread, first

        return await self._claim(thread_id, holder, lease_s, now_ms, find, at_once=True)

    async def claim_dispatch(
        self, thread_id: str, dispatch_id: str, holder: str, *, lease_s: float | None = None, now_ms: int | None = None
    ) -> Dispatch | None:
        """Claim this dispatch, whatever its time and position; None when it is not queued or the thread has a claim."""
        check_id(dispatch_id, "dispatch_id")

        async def find() -> tuple[MailboxThread, Dispatch | None]:
            thread, found = await self.backend.find(thread_id, dispatch_id)
            return thread, found if found is not None and found.status is Status.QUEUED else None

        return await self._claim(thread_id, holder, lease_s, now_ms, find, at_once=False)

    async def _claim(
        self, thread_id: str, holder: str, lease_s: float | None, now_ms: int | None, find: Find, *, at_once: bool
    ) -> Dispatch | None:
        check_id(thread_id, "thread_id")
        check_id(holder, "holder")
        self._until(self._now(now_ms), lease_s)
        step_id = secrets.token_hex(8)

        async def attempt(unsure: bool) -> MailboxThread | None:
            now = self._now(now_ms)
            claiming = Claiming(holder, self._until(now, lease_s), now, step_id)
            if at_once:
                with suppress(InSteps):
                    after = await self._steps.noted(thread_id, self.backend.claim_first(thread_id, claiming, step_id))
                    if after is not None or not unsure:
                        return after
            thread, head = await find()
            if unsure and head is None:
                # An earlier attempt may have been stored after the thread was read, and before its queue was read.
                thread = await self.backend.thread(thread_id)
            if thread.active is not None:
                # An earlier attempt may have been stored, its answer lost, and the thread interrupted since.
                return thread if thread.active.claim_id == step_id else None
            if head is None or is_stale(head, thread):
                return None
            return await self._steps.write(thread, decisions.claim(thread, head, claiming), step_id, now)

        async def release(after: MailboxThread) -> None:
            if after.active is not None:
                await self._as_holder(after.active, now_ms, decisions.release)

        with self.counters.timed("claim"):
            # Nobody would know of a claim for a cancelled caller, and the end of its lease would count as an attempt.
            after = await self.takes.take(self._steps.tried(attempt), release)
        if after is None or after.active is None:
            self.counters.count("claims_empty")
            return None
        claimed = after.active
        self.counters.count("claimed")
        waited_ms = (claimed.claimed_at_ms or 0) - max(claimed.created_at_ms, claimed.available_at_ms)
        self.counters.took("waited", max(0, waited_ms) / 1000)
        return claimed

    async def ack(self, claim: Dispatch, *, now_ms: int | None = None) -> Dispatch:
        """End the claim: the work is done, even if the thread was interrupted. Repeating the ack returns the same."""
        now = self._now(now_ms)
        try:
            with self.counters.timed("ack"):
                ended = await self._as_holder(claim, now, decisions.ack)
        except (StaleClaim, StepUnknown) as e:  # the ack's answer may be lost, and another may hold the thread since
            try:
                _, found = await self.backend.find(claim.thread_id, claim.dispatch_id)
            except BufstoreError as now_away:
                raise (e if isinstance(e, StepUnknown) else now_away) from None
            if found is None or found.status is not Status.ACKED or found.ended_by != claim.token:
                raise
            return found
        self.counters.count("acked")
        if claim.claimed_at_ms is not None:
            self.counters.took("worked", max(0, now - claim.claimed_at_ms) / 1000)
        return ended

    async def nack(
        self, claim: Dispatch, *, retry_at_ms: int | None = None, error: str | None = None, now_ms: int | None = None
    ) -> Dispatch:
        """Hand the claim back: its dispatch is queued again at its old position, available from `retry_at_ms` on.

        After `max_attempts` claims the dispatch is dead; when the thread was interrupted, it is superseded.
        """
        retry_at = 0 if retry_at_ms is None else model.check_ms(retry_at_ms, "retry_at_ms")
        ended = await self._failed(claim, now_ms, decisions.nack, retry_at, error=error)
        self.counters.count("nacked" if ended.status is Status.QUEUED else how_given_up(ended))
        return ended

    async def dead_letter(self, claim: Dispatch, *, error: str | None = None, now_ms: int | None = None) -> Dispatch:
        """Give the dispatch up for good."""
        ended = await self._failed(claim, now_ms, decisions.dead_letter, error=error)
        self.counters.count("dead_lettered")
        return ended

    async def extend_lease(
        self, claim: Dispatch, *, lease_s: float | None = None, now_ms: int | None = None
    ) -> Dispatch:
        """Hold the claim longer. Raises ClaimInterrupted when its holder must stop."""
        now = self._now(now_ms)
        extended = await self._as_holder(claim, now, decisions.extend, self._until(now, lease_s))
        self.counters.count("extended")
        return extended

    async def record_start(self, claim: Dispatch, instance_id: str, *, now_ms: int | None = None) -> Dispatch:
        """Record the worker that begins. Raises ClaimInterrupted when the work must not begin."""
        return await self._as_holder(claim, now_ms, decisions.start, check_id(instance_id, "instance_id"))

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
        """Record the outcome of the work, before the ack."""
        if result is not None:
            model.check_bytes(result, "result", self.config.payload_max)
        said = {"run_status": run_status, "termination": termination, "error": error}
        status, ended, failed = (model.clean(text, what) for what, text in said.items())
        return await self._as_holder(claim, now_ms, decisions.finish, status, ended, result, failed)

    async def cancel(self, thread_id: str, dispatch_id: str, *, now_ms: int | None = None) -> Dispatch | None:
        """Take a queued dispatch out of the queue; None when it is not queued."""
        check_id(thread_id, "thread_id")
        check_id(dispatch_id, "dispatch_id")
        now = self._now(now_ms)
        found: Dispatch | None = None

        async def load() -> MailboxThread:
            nonlocal found
            thread, found = await self.backend.find(thread_id, dispatch_id)
            return thread

        done = await self._steps.change(thread_id, now, lambda thread: decisions.cancel(thread, found, now), load=load)
        return self._ended(done, "cancelled")

    async def interrupt(self, thread_id: str, *, now_ms: int | None = None) -> Interruption:
        """Supersede all that is queued now, in one write. A claim's holder is told to stop when it extends or starts.

        Takes the superseded dispatches out of the queue, and lists them, as far as the call's time allows
        (`Interruption.complete`) and no claim takes them out before: `list_dispatches` shows all. A thread that the
        mailbox does not know stays as it is: its epoch is 0.
        """
        check_id(thread_id, "thread_id")
        now, deadline = self._now(now_ms), time.monotonic() + self.config.timeout_s
        waits = False

        async def load() -> MailboxThread:
            nonlocal waits
            thread = await self.backend.thread(thread_id)
            if not thread.step:
                _, first = await self.backend.first(thread_id, model.MS_MAX)
                # What waited when the thread was read may be claimed by now.
                waits, thread = first is not None, await self.backend.thread(thread_id)
            return thread

        done = await self._steps.change(thread_id, now, lambda t: decisions.interrupt(t, waits=waits), load=load)
        if done is None:
            return Interruption(epoch=0, active=None, superseded=[])
        thread = done.thread
        self.counters.count("interrupted")
        # The one write above has superseded the dispatches; this takes them out of the queue.
        superseded, complete = await self._steps.drop_all_stale(thread, now, deadline)
        if not complete:  # claims take the rest out, when it is due
            with suppress(BufstoreError):
                await self.wake(thread_id)
        return Interruption(epoch=thread.epoch, active=thread.active, superseded=superseded, complete=complete)

    async def current_epoch(self, thread_id: str) -> int:
        """Return a number that grows with each interrupt; 0 when there was none, or the thread is unknown."""
        return (await self.backend.thread(check_id(thread_id, "thread_id"))).epoch

    async def supersede_claimed(self, thread_id: str, *, now_ms: int | None = None) -> Dispatch | None:
        """End the thread's claim as superseded and fence its holder off; None when there is none."""
        check_id(thread_id, "thread_id")
        now = self._now(now_ms)
        done = await self._steps.change(thread_id, now, lambda thread: decisions.supersede_claimed(thread, now))
        return self._ended(done, "superseded")

    async def load_dispatch(self, thread_id: str, dispatch_id: str) -> Dispatch | None:
        """Return the dispatch as it is now; None if the id is unknown or was purged. Raises Unavailable."""
        check_id(dispatch_id, "dispatch_id")
        thread, found = await self.backend.find(check_id(thread_id, "thread_id"), dispatch_id)
        return None if found is None else as_seen(found, thread)

    async def list_dispatches(
        self, thread_id: str, statuses: Collection[Status] | None = None, *, limit: int = 100, offset: int = 0
    ) -> list[Dispatch]:
        """Return the thread's dispatches, in the order of claims. The cost grows with what is kept of the thread."""
        limit, offset = model.check_limit(limit), model.check_limit(offset, "offset")
        if statuses is not None and not isinstance(statuses, Iterable):
            raise InvalidQuery(f"statuses must be a list, as in [Status.QUEUED], not {statuses!r}")
        chosen = list(Status) if statuses is None else [*statuses]
        for status in chosen:
            check_choice(status, Status, "a status", InvalidQuery)
        thread, found = await self.backend.all_of(check_id(thread_id, "thread_id"))
        shown = [as_seen(d, thread) for d in found] + ([thread.active] if thread.active is not None else [])
        wanted = [d for d in shown if d.status in chosen]
        return sorted(wanted, key=lambda d: d.order)[offset : offset + limit]

    async def list_finished(self, *, limit: int = 100) -> list[Dispatch]:
        """Return finished dispatches of all threads, the oldest first."""
        return await self.backend.finished(model.check_limit(limit))

    async def count_by_status(self, thread_id: str | None = None) -> dict[Status, int]:
        """Return how many dispatches have each status; of one thread, or of all (the cost grows with what is kept)."""
        if thread_id is None:
            return await self.backend.counts()
        listed = await self.list_dispatches(thread_id, limit=1 << 30)
        return {**dict.fromkeys(Status, 0), **Counter(d.status for d in listed)}

    async def queued_thread_ids(self, *, limit: int = 1000) -> list[str]:
        """Return the threads that have queued dispatches, sorted."""
        return sorted(await self.backend.queued_threads(model.check_limit(limit)))

    async def reclaim_expired(self, *, limit: int = 1000, now_ms: int | None = None) -> list[Dispatch]:
        """Take back claims whose lease is over; their dispatches are queued again, dead or superseded, as with `nack`.

        Takes back fewer when the store goes away meanwhile; a later call finds the rest. A claim that cannot be taken
        back holds up no other: later calls try it last. Raises the first error when nothing could be taken back.
        """
        return await self._reclaims.reclaim(self._now(now_ms), model.check_limit(limit))

    async def purge_finished(self, finished_before_ms: int, *, limit: int = 1000) -> int:
        """Remove dispatches that finished before that time, the oldest first; return how many."""
        before_ms = model.check_ms(finished_before_ms, "finished_before_ms")
        purged = await self.backend.purge(before_ms, model.check_limit(limit))
        self.counters.count("purged", purged)
        return purged

    async def gauges(self) -> MailboxGauges:
        """Return the state of the mailbox now, for dashboards and alerts."""
        now = self.backend.now_ms()
        ends = [t.active.lease_until_ms or now for t in await self.backend.expiring(now, 100) if t.active is not None]
        return replace(await self.backend.gauges(), oldest_lease_over_s=(now - min(ends)) / 1000 if ends else None)

    async def pull_signals(self, limit: int | None = None, timeout_s: float | None = None) -> Sequence[Signal]:
        """Return signals of threads that may have work. Each goes to one worker, over all instances, until answered."""
        limit = self.config.signal_batch_size if limit is None else model.check_limit(limit)
        wait_s = self.config.signal_fetch_expires_s if timeout_s is None else as_seconds(timeout_s, "timeout_s")
        signals = await self.backend.signals(limit, wait_s) if limit else []
        self.counters.count("signals", len(signals))
        return signals

    async def wake(self, thread_id: str) -> None:
        """Signal a thread, whatever its state seems to be. A needless signal does no harm."""
        check_id(thread_id, "thread_id")
        await self._steps.tried(lambda _: self.backend.wake(thread_id))

    async def deliver_live(self, thread_id: str, payload: bytes, *, timeout_s: float | None = None) -> Live:
        """Hand `payload` to the present listener of the thread; nothing is stored."""
        check_id(thread_id, "thread_id")
        model.check_bytes(payload, "payload")
        wait_s = self.config.live_timeout_s if timeout_s is None else as_seconds(timeout_s, "timeout_s")
        with self.counters.timed("live"):
            live = await self.backend.deliver_live(thread_id, payload, wait_s)
        self.counters.count(f"live_{live.name.lower()}")
        return live

    async def listen_live(self, thread_id: str, handler: LiveHandler) -> Callable[[], Awaitable[None]]:
        """Hand each live delivery to `handler`, after answering it, until the returned function is called.

        On NATS this function, and a lost connection, cancel a handler that runs: it is not for the handler to call.
        """
        return await self.backend.listen_live(check_id(thread_id, "thread_id"), handler)

    async def deliver(
        self,
        thread_id: str,
        payload: bytes,
        *,
        run_id: str | None = None,
        priority: int = DEFAULT_PRIORITY,
        available_at_ms: int | None = None,
        dedupe_key: str | None = None,
        max_attempts: int = 5,
        dispatch_id: str | None = None,
        now_ms: int | None = None,
    ) -> Dispatch | None:
        """Deliver live if somebody listens (None), else enqueue. What could not be enqueued is not delivered either.

        A live delivery without an answer may have arrived: the dispatch that is enqueued then says ``maybe_delivered``.
        """
        said: dict[str, Any] = {"run_id": run_id, "priority": priority, "available_at_ms": available_at_ms}
        said |= {"dedupe_key": dedupe_key, "max_attempts": max_attempts, "dispatch_id": dispatch_id}
        model.draft(thread_id, payload, self._now(now_ms), self.config.payload_max, **said)
        live = await self.deliver_live(thread_id, payload)
        if live is Live.DELIVERED:
            return None
        return await self.enqueue(thread_id, payload, **said, now_ms=now_ms, maybe_delivered=live is Live.UNKNOWN)

    def _now(self, now_ms: int | None) -> int:
        return self.backend.now_ms() if now_ms is None else model.check_ms(now_ms, "now_ms")

    def _ended(self, done: Done | None, how: str) -> Dispatch | None:
        if done is None:
            return None
        self.counters.count(how)
        return done.dispatch

    def _until(self, now: int, lease_s: float | None) -> int:
        wanted_ms = model.lease_ms(self.config.lease_s if lease_s is None else lease_s)
        return model.check_ms(now + wanted_ms, "the end of the lease")

    async def _failed(
        self, claim: Dispatch, now_ms: int | None, decide: Callable[..., Step], *words: object, error: str | None
    ) -> Dispatch:
        text = model.clean(error, "error")
        try:
            return await self._as_holder(claim, now_ms, decide, *words, text)
        except TooLarge:  # what is not handed back holds its thread until the lease is over
            return await self._as_holder(claim, now_ms, decide, *words, text and text[:_SHORT_ERROR])

    async def _as_holder(
        self, claim: Dispatch, now_ms: int | None, decide: Callable[..., Step], *words: object
    ) -> Dispatch:
        """Do a step of a claim's holder: `decide` gets the thread, the claim, `words`, and the time."""
        now, known = self._now(now_ms), self._steps.known(model.check_claim(claim))
        done = await self._steps.change(
            claim.thread_id, now, lambda thread: decide(thread, claim, *words, now), known=known
        )
        assert done is not None
        return done.dispatch
