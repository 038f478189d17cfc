"""One mailbox for every backend: reads a thread, decides a step, writes it if the thread is still the same.

All that could differ between stores is in the backends; what a step means is in `bufstore.mailbox.decisions`, and how
long it is tried is here.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence, Set
from contextlib import suppress
from typing import Any, Self

from msgspec.structs import replace

from bufstore.errors import AlreadyExists, BufstoreError, InvalidQuery, StaleClaim, StepUnknown
from bufstore.jetstream.messages import AppendUnknown, Conflict
from bufstore.mailbox import decisions, model
from bufstore.mailbox.config import MailboxConfig
from bufstore.mailbox.counters import Counters, MailboxGauges, MailboxStatistics
from bufstore.mailbox.decisions import Claiming, Step, as_seen, is_same, is_stale
from bufstore.mailbox.model import DEFAULT_PRIORITY, Dispatch, Interruption, MailboxThread, Status
from bufstore.mailbox.ports import Backend, InSteps, KeyTaken, Live, LiveHandler, Signal
from bufstore.mailbox.steps import AT_ONCE, Done, Steps
from bufstore.takes import Takes
from bufstore.tasks import Closing
from bufstore.types import check_choice, check_id

Find = Callable[[], Awaitable[tuple[MailboxThread, Dispatch | None]]]

#: After so many claims that could not be taken back, the rest waits for the next call.
_FAILURES = 3


class MailboxStore:
    """A durable queue of dispatches per thread, claimed by one worker per thread at a time.

    A *claim* is the dispatch that `claim` returned. It carries a fencing token, higher than that of every earlier
    claim, and each later step of its holder is done only if that token still holds the thread: else StaleClaim.

    `now_ms` is the time that a step goes by; without it, the store's clock. Every method raises InvalidId and
    InvalidRecord before any I/O, LogUnavailable or StoreUnavailable (nothing was done), StepUnknown (a step may have
    been done) and Closed.

    The stores of each kind make one and give it its backend.
    """

    def __init__(self, backend: Backend, config: MailboxConfig | None = None) -> None:
        self.config = config or MailboxConfig()
        self.backend = backend
        self.counters = Counters()
        self._closing = Closing()
        self._steps = Steps(backend, self.counters, self.config.timeout_s)
        #: Threads whose expired claims could not be taken back, as far as they are still found.
        self._not_reclaimed: Set[str] = frozenset()
        #: What is taken, and ends, when whoever waited for it is gone.
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
        """Counters and timings of this instance."""
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
            if unsure:  # with any id: an earlier attempt may have put it there, and it may have ended since
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
                e.add_note(f"ask load_dispatch({thread_id!r}, {draft.dispatch_id!r})")
                e.dispatch_id = draft.dispatch_id
                raise
        self.counters.count("enqueued")
        return stored

    async def _check_taken(self, draft: Dispatch, taken: KeyTaken, unsure: bool, now_ms: int) -> None:
        """Raise AlreadyExists, unless nothing stands in the way of `draft` any more."""
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

        None when none is available, or the thread has a claim (also one whose lease is over: `reclaim_expired`).
        """
        now, deadline = self._now(now_ms), time.monotonic() + self.config.timeout_s

        async def find() -> tuple[MailboxThread, Dispatch | None]:
            thread, first = await self.backend.first(thread_id, now)
            while thread.active is None and first is not None and is_stale(first, thread):
                if time.monotonic() > deadline:
                    raise Conflict("all that could be looked at in time is superseded")
                await self._steps.drop_stale(thread, await self.backend.queued(thread_id, thread.epoch, AT_ONCE), now)
                thread, first = await self.backend.first(thread_id, now)
            return thread, first

        return await self._claim(thread_id, holder, lease_s, now, find, at_once=True)

    async def claim_dispatch(
        self, thread_id: str, dispatch_id: str, holder: str, *, lease_s: float | None = None, now_ms: int | None = None
    ) -> Dispatch | None:
        """Claim this one, whatever its time and place; None when it is not queued or the thread has a claim."""
        check_id(dispatch_id, "dispatch_id")

        async def find() -> tuple[MailboxThread, Dispatch | None]:
            thread, found = await self.backend.find(thread_id, dispatch_id)
            return thread, found if found is not None and found.status is Status.QUEUED else None

        return await self._claim(thread_id, holder, lease_s, self._now(now_ms), find, at_once=False)

    async def _claim(
        self, thread_id: str, holder: str, lease_s: float | None, now: int, find: Find, *, at_once: bool
    ) -> Dispatch | None:
        check_id(thread_id, "thread_id")
        claiming = Claiming(check_id(holder, "holder"), self._until(now, lease_s), now)
        step_id = secrets.token_hex(8)
        again = False

        async def attempt(_: bool) -> MailboxThread | None:
            nonlocal again
            if at_once:
                with suppress(InSteps):
                    return await self._steps.noted(thread_id, self.backend.claim_first(thread_id, claiming, step_id))
            thread, head = await find()
            if again and head is None and thread.step != step_id:
                # An earlier attempt may have been stored after the thread was read, and before its queue was.
                thread = await self.backend.thread(thread_id)
            again = True
            if thread.step == step_id:  # an earlier attempt, whose answer was lost
                return thread
            if thread.active is not None or head is None or is_stale(head, thread):
                return None
            return await self._steps.write(thread, decisions.claim(thread, head, claiming), step_id, now)

        async def release(after: MailboxThread) -> None:
            if after.active is not None:
                await self._as_holder(after.active, now, decisions.release)

        with self.counters.timed("claim"):
            # Of a claim that is done for a cancelled caller nobody would know; the end of its lease is an attempt.
            after = await self.takes.take(self._steps.tried(attempt), release)
        if after is None or after.active is None:
            self.counters.count("claims_empty")
            return None
        claimed = after.active
        self.counters.count("claimed")
        self.counters.took("waited", max(0, now - max(claimed.created_at_ms, claimed.available_at_ms)) / 1000)
        return claimed

    async def ack(self, claim: Dispatch, *, now_ms: int | None = None) -> Dispatch:
        """The work is done, also if the thread was interrupted meanwhile. Repeating it returns the same."""
        now = self._now(now_ms)
        try:
            with self.counters.timed("ack"):
                ended = await self._as_holder(claim, now, decisions.ack)
        except (StaleClaim, StepUnknown) as e:  # its answer may be lost, and the thread another's since
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
        """Hand it back: queued again at its old place, available from `retry_at_ms` on.

        Dead after `max_attempts` claims; superseded when the thread was interrupted.
        """
        retry_at = 0 if retry_at_ms is None else model.check_ms(retry_at_ms, "retry_at_ms")
        ended = await self._as_holder(claim, now_ms, decisions.nack, retry_at, model.clean(error, "error"))
        self.counters.count("nacked" if ended.status is Status.QUEUED else _counted(ended))
        return ended

    async def dead_letter(self, claim: Dispatch, *, error: str | None = None, now_ms: int | None = None) -> Dispatch:
        """Give it up for good."""
        ended = await self._as_holder(claim, now_ms, decisions.dead_letter, model.clean(error, "error"))
        self.counters.count("dead_lettered")
        return ended

    async def extend_lease(
        self, claim: Dispatch, *, lease_s: float | None = None, now_ms: int | None = None
    ) -> Dispatch:
        """Hold the claim longer. Raises ClaimInterrupted when its holder shall stop."""
        now = self._now(now_ms)
        extended = await self._as_holder(claim, now, decisions.extend, self._until(now, lease_s))
        self.counters.count("extended")
        return extended

    async def record_start(self, claim: Dispatch, instance_id: str, *, now_ms: int | None = None) -> Dispatch:
        """Record the worker that begins. Raises ClaimInterrupted when none must begin."""
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
        """Note what came of it, before the ack."""
        if result is not None:
            model.check_bytes(result, "result", self.config.payload_max)
        said = {"run_status": run_status, "termination": termination, "error": error}
        status, ended, failed = (model.clean(text, what) for what, text in said.items())
        return await self._as_holder(claim, now_ms, decisions.finish, status, ended, result, failed)

    async def cancel(self, thread_id: str, dispatch_id: str, *, now_ms: int | None = None) -> Dispatch | None:
        """Take a queued dispatch out; None when it is not queued."""
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
        """Supersede all that is queued now, in one write, and tell the holder of a claim with its next step to stop.

        What it superseded is listed as far as the call's time allows (`Interruption.complete`).
        """
        check_id(thread_id, "thread_id")
        now, deadline = self._now(now_ms), time.monotonic() + self.config.timeout_s
        done = await self._steps.change(thread_id, now, decisions.interrupt)
        assert done is not None
        thread = done.thread
        self.counters.count("interrupted")
        superseded: list[Dispatch] = []
        # The one write above has superseded them; this takes them out of the way, a part at a time.
        current, complete = thread, False
        with suppress(Conflict, AppendUnknown, BufstoreError):
            while not complete and time.monotonic() < deadline:
                queued = await self.backend.queued(thread_id, thread.epoch, AT_ONCE)
                current, dropped = await self._steps.drop_stale(current, queued, now)
                superseded += dropped
                complete = not queued
        if not complete:  # then whoever claims next goes on
            with suppress(BufstoreError):
                await self.wake(thread_id)
        return Interruption(epoch=thread.epoch, active=thread.active, superseded=superseded, complete=complete)

    async def current_epoch(self, thread_id: str) -> int:
        """A number that grows with each interrupt; 0 when there was none, or long ago."""
        return (await self.backend.thread(check_id(thread_id, "thread_id"))).epoch

    async def supersede_claimed(self, thread_id: str, *, now_ms: int | None = None) -> Dispatch | None:
        """End the thread's claim as superseded and fence its holder off; None when there is none."""
        check_id(thread_id, "thread_id")
        now = self._now(now_ms)
        done = await self._steps.change(thread_id, now, lambda thread: decisions.supersede_claimed(thread, now))
        return self._ended(done, "superseded")

    async def load_dispatch(self, thread_id: str, dispatch_id: str) -> Dispatch | None:
        """The dispatch as it is now; None if the id is unknown or was purged. Raises Unavailable."""
        check_id(dispatch_id, "dispatch_id")
        thread, found = await self.backend.find(check_id(thread_id, "thread_id"), dispatch_id)
        return None if found is None else as_seen(found, thread)

    async def list_dispatches(
        self, thread_id: str, statuses: Collection[Status] | None = None, *, limit: int = 100, offset: int = 0
    ) -> list[Dispatch]:
        """The thread's dispatches, in the order of claims. Costs what is kept of the thread."""
        limit, offset = model.check_limit(limit), model.check_limit(offset, "offset")
        chosen = list(Status) if statuses is None else [*statuses]
        for status in chosen:
            check_choice(status, Status, "a status", InvalidQuery)
        thread, found = await self.backend.all_of(check_id(thread_id, "thread_id"))
        shown = [as_seen(d, thread) for d in found] + ([thread.active] if thread.active is not None else [])
        wanted = [d for d in shown if d.status in chosen]
        return sorted(wanted, key=lambda d: d.order)[offset : offset + limit]

    async def list_finished(self, *, limit: int = 100) -> list[Dispatch]:
        """Finished dispatches of all threads, the oldest first."""
        return await self.backend.finished(model.check_limit(limit))

    async def count_by_status(self, thread_id: str | None = None) -> dict[Status, int]:
        """How many there are; of one thread, or of all (which costs what is kept)."""
        if thread_id is None:
            return await self.backend.counts()
        listed = await self.list_dispatches(thread_id, limit=1 << 30)
        return {**dict.fromkeys(Status, 0), **Counter(d.status for d in listed)}

    async def queued_thread_ids(self, *, limit: int = 1000) -> list[str]:
        """Threads that have queued dispatches, sorted."""
        return sorted(await self.backend.queued_threads(model.check_limit(limit)))

    async def reclaim_expired(self, *, limit: int = 1000, now_ms: int | None = None) -> list[Dispatch]:
        """Take back claims whose lease is over: queued again, dead or superseded, as with `nack`.

        Fewer than there are when the store goes away meanwhile; the rest is found again. One that cannot be taken back
        holds up no other: it comes last from then on. Raises what the first said when nothing could be taken back.
        """
        now = self._now(now_ms)
        reclaimed: list[Dispatch] = []
        expiring = await self.backend.expiring(now, model.check_limit(limit))
        failed: dict[str, BufstoreError] = {}
        for found in sorted(expiring, key=lambda t: t.thread_id in self._not_reclaimed):
            try:
                done = await self._steps.change(found.thread_id, now, lambda t: decisions.expire(t, now), known=found)
            except BufstoreError as e:
                failed[found.thread_id] = e
                if len(failed) == _FAILURES:  # most likely it is the store, and each failure may take `timeout_s`
                    break
                continue
            if done is None:
                continue  # its holder or another sweeper was faster
            reclaimed.append(done.dispatch)
            self.counters.count("reclaimed")
            if done.dispatch.status is not Status.QUEUED:
                self.counters.count(_counted(done.dispatch))
        ended = {d.thread_id for d in reclaimed}
        self._not_reclaimed = (self._not_reclaimed & {t.thread_id for t in expiring} | failed.keys()) - ended
        if failed and not reclaimed:
            raise next(iter(failed.values()))
        return reclaimed

    async def purge_finished(self, finished_before_ms: int, *, limit: int = 1000) -> int:
        """Remove what finished before that time, the oldest first; how many."""
        before_ms = model.check_ms(finished_before_ms, "finished_before_ms")
        purged = await self.backend.purge(before_ms, model.check_limit(limit))
        self.counters.count("purged", purged)
        return purged

    async def gauges(self) -> MailboxGauges:
        """How things stand now, for dashboards and alerts."""
        now = self.backend.now_ms()
        ends = [t.active.lease_until_ms or now for t in await self.backend.expiring(now, 100) if t.active is not None]
        return replace(await self.backend.gauges(), oldest_lease_over_s=(now - min(ends)) / 1000 if ends else None)

    async def pull_signals(self, limit: int | None = None, timeout_s: float | None = None) -> Sequence[Signal]:
        """Which threads may have work: each signal goes to one worker, over all instances, until it is answered."""
        c = self.config
        limit = model.check_limit(limit or c.signal_batch_size)
        signals = await self.backend.signals(limit, c.signal_fetch_expires_s if timeout_s is None else timeout_s)
        self.counters.count("signals", len(signals))
        return signals

    async def wake(self, thread_id: str) -> None:
        """Signal a thread, whatever the store takes to be its state. A needless signal does no harm."""
        check_id(thread_id, "thread_id")
        await self._steps.tried(lambda _: self.backend.wake(thread_id))

    async def deliver_live(self, thread_id: str, payload: bytes, *, timeout_s: float | None = None) -> Live:
        """Hand something to the present listener of the thread; nothing is kept."""
        check_id(thread_id, "thread_id")
        model.check_bytes(payload, "payload")
        timeout_s = self.config.live_timeout_s if timeout_s is None else timeout_s
        with self.counters.timed("live"):
            live = await self.backend.deliver_live(thread_id, payload, timeout_s)
        self.counters.count(f"live_{live.name.lower()}")
        return live

    async def listen_live(self, thread_id: str, handler: LiveHandler) -> Callable[[], Awaitable[None]]:
        """Take live deliveries until the returned function is called. Each is answered before `handler` runs."""
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
        """Live if somebody listens (None), else enqueued. What could not be enqueued is not delivered either.

        A live delivery without an answer may have arrived: what is enqueued then says ``maybe_delivered``.
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

    async def _as_holder(
        self, claim: Dispatch, now_ms: int | None, decide: Callable[..., Step], *words: object
    ) -> Dispatch:
        """A step of a claim's holder: `decide` gets the thread, the claim, `words`, and the time."""
        now, known = self._now(now_ms), self._steps.known(model.check_claim(claim))
        done = await self._steps.change(
            claim.thread_id, now, lambda thread: decide(thread, claim, *words, now), known=known
        )
        assert done is not None
        return done.dispatch


def _counted(ended: Dispatch) -> str:
    return "superseded" if ended.status is Status.SUPERSEDED else "dead_lettered"
