"""A mailbox in memory: for tests of apps, and what the other two are compared with.

Several stores on one `MemoryMailbox` are several instances of one deployment.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from msgspec.structs import replace

from bufstore.errors import Closed
from bufstore.jetstream.messages import Conflict
from bufstore.mailbox.config import MailboxConfig
from bufstore.mailbox.counters import MailboxGauges
from bufstore.mailbox.decisions import Claiming, Step, as_seen, is_expired
from bufstore.mailbox.model import OWN, Dispatch, MailboxThread, Status
from bufstore.mailbox.ports import InSteps, KeyTaken, Live, LiveHandler, Signal
from bufstore.mailbox.store import MailboxStore

_log = logging.getLogger(__name__)

_SOON_MS = 30_000
#: What the wall clock said when our own clock, which does not jump, stood at 0.
_EPOCH_S = time.time() - time.monotonic()


@dataclass(eq=False)
class _Wake:
    """That a thread may have work, from a time on. Each new signal is another: an answer to an earlier one is void."""

    due: float
    deliveries: int = 0


class MemoryMailbox:
    """What a server would hold: shared by the stores that are given it."""

    def __init__(self) -> None:
        self.threads: dict[str, MailboxThread] = {}
        self.dispatches: dict[str, dict[str, Dispatch]] = defaultdict(dict)
        #: Those of them that are queued: a claim must not look through all that ever was.
        self.queued: dict[str, dict[str, Dispatch]] = defaultdict(dict)
        self.wakes: dict[str, _Wake] = {}
        self.delayed: dict[str, int] = {}
        self.listeners: dict[str, list[LiveHandler]] = defaultdict(list)
        self.news = asyncio.Event()
        self.swept = float("-inf")
        self._number = 0

    def number(self) -> int:
        """The next of the one growing sequence."""
        self._number += 1
        return self._number

    def wake(self, thread_id: str) -> None:
        """Signal a thread."""
        self.wakes[thread_id] = _Wake(time.monotonic())
        self.news.set()


class MemoryBackend:
    """See `bufstore.mailbox.ports.Backend`."""

    def __init__(self, shared: MemoryMailbox, clock: Callable[[], float], ack_wait_s: float) -> None:
        self.shared = self._shared = shared
        self._clock = clock
        self._ack_wait_s = ack_wait_s
        self._closed = False
        #: Up to where lost signals were looked for.
        self._looked = 0

    async def open(self) -> None:
        self._closed = False

    async def aclose(self) -> None:
        self._closed = True
        self._shared.news.set()

    def now_ms(self) -> int:
        return int(1000 * self._clock())

    def _state(self) -> MemoryMailbox:
        if self._closed:
            raise Closed("the mailbox is closed")
        return self._shared

    async def add(self, dispatch: Dispatch, *, own_id: bool, now_ms: int) -> Dispatch:
        shared = self._state()
        thread = self._thread(dispatch.thread_id)
        known = shared.dispatches[dispatch.thread_id]
        active = [thread.active] if thread.active is not None else []
        if dispatch.dispatch_id in known or any(d.dispatch_id == dispatch.dispatch_id for d in active):
            raise KeyTaken(dispatch.dispatch_id, same_id=True)
        for d in [*known.values(), *active] if dispatch.dedupe_key is not None else ():
            if d.dedupe_key == dispatch.dedupe_key and not d.status.finished:
                raise KeyTaken(d.dispatch_id, same_id=False)
        stored = replace(dispatch, epoch=thread.epoch, position=shared.number())
        known[stored.dispatch_id] = shared.queued[stored.thread_id][stored.dispatch_id] = stored
        self._announce(stored, now_ms)
        return stored

    def _announce(self, queued: Dispatch, now_ms: int) -> None:
        if queued.available_at_ms <= now_ms:
            self._shared.wake(queued.thread_id)
        else:
            due = self._shared.delayed.get(queued.thread_id, queued.available_at_ms)
            self._shared.delayed[queued.thread_id] = min(due, queued.available_at_ms)

    async def write(self, before: MailboxThread, step: Step, now_ms: int) -> MailboxThread:
        shared = self._state()
        thread_id = before.thread_id
        known = shared.dispatches[thread_id]
        if self._thread(thread_id).version != before.version:
            raise Conflict("the thread has moved")
        if any(m.before is not None and known.get(m.before.dispatch_id) != m.before for m in step.moves):
            raise Conflict("the queue has moved")
        number = shared.number()
        after = replace(step.thread, version=number)
        if after.epoch == OWN:
            after = replace(after, epoch=number)
        if after.active is not None and after.active.token == OWN:
            after = replace(after, active=replace(after.active, token=number))
        shared.threads[thread_id] = after
        for move in step.moves:
            if move.before is not None:
                del known[move.before.dispatch_id], shared.queued[thread_id][move.before.dispatch_id]
            if move.after is not None:
                known[move.after.dispatch_id] = move.after
                if move.after.status is Status.QUEUED:
                    shared.queued[thread_id][move.after.dispatch_id] = move.after
                    self._announce(move.after, now_ms)
        if step.wake:
            shared.wake(thread_id)
        return after

    def _thread(self, thread_id: str) -> MailboxThread:
        return self._shared.threads.get(thread_id) or MailboxThread(thread_id=thread_id)

    async def claim_first(self, thread_id: str, claiming: Claiming, step_id: str) -> MailboxThread | None:
        raise InSteps

    async def thread(self, thread_id: str) -> MailboxThread:
        self._state()
        return self._thread(thread_id)

    async def first(self, thread_id: str, now_ms: int) -> tuple[MailboxThread, Dispatch | None]:
        ready = [d for d in self.waiting(thread_id) if d.available_at_ms <= now_ms]
        return self._thread(thread_id), min(ready, key=lambda d: d.order, default=None)

    def waiting(self, thread_id: str) -> list[Dispatch]:
        """What is queued, superseded or delayed or not."""
        return list(self._state().queued.get(thread_id, {}).values())

    async def find(self, thread_id: str, dispatch_id: str) -> tuple[MailboxThread, Dispatch | None]:
        thread = await self.thread(thread_id)
        if thread.active is not None and thread.active.dispatch_id == dispatch_id:
            return thread, thread.active
        return thread, self._shared.dispatches.get(thread_id, {}).get(dispatch_id)

    async def queued(self, thread_id: str, below_epoch: int, limit: int) -> list[Dispatch]:
        return [d for d in self.waiting(thread_id) if d.epoch < below_epoch][:limit]

    async def all_of(self, thread_id: str) -> tuple[MailboxThread, list[Dispatch]]:
        return await self.thread(thread_id), list(self._shared.dispatches.get(thread_id, {}).values())

    async def queued_threads(self, limit: int) -> list[str]:
        threads = list(self._state().queued)
        return [t for t in threads if any(d.epoch >= self._thread(t).epoch for d in self.waiting(t))][:limit]

    async def finished(self, limit: int) -> list[Dispatch]:
        every = [d for known in self._state().dispatches.values() for d in known.values() if d.status.finished]
        return sorted(every, key=lambda d: d.completed_at_ms or 0)[:limit]

    async def counts(self) -> dict[Status, int]:
        counts = dict.fromkeys(Status, 0)
        for thread in self._state().threads.values():
            counts[Status.CLAIMED] += thread.active is not None
        for thread_id, known in self._shared.dispatches.items():
            for d in known.values():
                counts[as_seen(d, self._thread(thread_id)).status] += 1
        return counts

    async def purge(self, finished_before_ms: int, limit: int) -> int:
        old = [d for d in await self.finished(limit) if (d.completed_at_ms or 0) < finished_before_ms]
        for d in old:
            del self._shared.dispatches[d.thread_id][d.dispatch_id]
            if not self._shared.dispatches[d.thread_id]:
                del self._shared.dispatches[d.thread_id]
                self._shared.queued.pop(d.thread_id, None)
                if self._thread(d.thread_id).active is None:
                    self._shared.threads.pop(d.thread_id, None)
        return len(old)

    async def expiring(self, now_ms: int, limit: int) -> list[MailboxThread]:
        return [t for t in self._state().threads.values() if is_expired(t, now_ms)][:limit]

    async def signal_due(self, now_ms: int, limit: int) -> int:
        due = [t for t, at in self._state().delayed.items() if at <= now_ms][:limit]
        for thread_id in due:
            del self._shared.delayed[thread_id]
            later = [d.available_at_ms for d in self.waiting(thread_id) if d.available_at_ms > now_ms]
            if later:
                self._shared.delayed[thread_id] = min(later)
            self._shared.wake(thread_id)
        return len(due)

    async def wake(self, thread_id: str) -> None:
        self._state().wake(thread_id)

    async def signal_lost(self, due_ms: int, limit: int) -> int:
        shared = self._state()
        next_ones = list(islice(shared.queued, self._looked, self._looked + limit))
        self._looked = self._looked + limit if len(next_ones) == limit else 0
        free = [t for t in next_ones if t not in shared.wakes and self._thread(t).active is None]
        lost = [t for t in free if any(d.available_at_ms <= due_ms for d in self.waiting(t))]
        for thread_id in lost:
            shared.wake(thread_id)
        return len(lost)

    async def gauges(self) -> MailboxGauges:
        queued = [d.created_at_ms for t in self._state().queued for d in self.waiting(t)]
        now, due = time.monotonic(), [w for w in self._shared.wakes.values() if w.deliveries]
        return MailboxGauges(
            oldest_queued_s=(self.now_ms() - min(queued)) / 1000 if queued else None,
            signals_waiting=sum(w.due <= now for w in self._shared.wakes.values()),
            signals_out=sum(w.due > now for w in due),
            signals_again=sum(w.deliveries > 1 for w in due),
        )

    async def held(self, thread_ids: Sequence[str]) -> dict[str, tuple[int, int, int]]:
        threads = [await self.thread(t) for t in thread_ids]
        return {t.thread_id: (t.version, t.active.token if t.active is not None else 0, t.epoch) for t in threads}

    async def sweeps(self, interval_s: float) -> bool:
        now = time.monotonic()
        if now < self._state().swept + interval_s / 2:
            return False
        self._shared.swept = now
        return True

    async def signals(self, limit: int, timeout_s: float) -> list[Signal]:
        shared = self._state()
        deadline = time.monotonic() + timeout_s
        while True:
            shared.news.clear()
            now = time.monotonic()
            due = sorted((t for t, w in shared.wakes.items() if w.due <= now), key=lambda t: shared.wakes[t].due)
            if due or self._closed or now >= deadline:
                return [self._deliver(t, now + self._ack_wait_s) for t in due[:limit]]
            next_due = min([w.due for w in shared.wakes.values()], default=deadline)
            try:
                async with asyncio.timeout(max(0.0, min(next_due, deadline) - now)):
                    await shared.news.wait()
            except TimeoutError:
                pass

    def _deliver(self, thread_id: str, until: float) -> Signal:
        wake = self._shared.wakes[thread_id]
        wake.due = until
        wake.deliveries += 1
        return Signal(self, thread_id, wake.deliveries, wake)

    async def ack_signal(self, signal: Signal) -> bool:
        thread_id = signal.thread_id
        if self._shared.wakes.get(thread_id) is not signal.mark:
            return True
        if (await self.thread(thread_id)).active is not None:
            return False
        waits = [d.available_at_ms - self.now_ms() for d in self.waiting(thread_id)]
        # A sweeper whose clock is ahead of ours has signalled what is not due here yet, and looks no more.
        if min(waits, default=_SOON_MS) < _SOON_MS:
            await self.put_off(signal, max(0, min(waits)) / 1000)
        else:
            del self._shared.wakes[thread_id]
        return True

    async def put_off(self, signal: Signal, delay_s: float | None) -> None:
        wake = self._shared.wakes.get(signal.thread_id)
        if wake is not None and wake is signal.mark:
            wake.due = time.monotonic() + (self._ack_wait_s if delay_s is None else delay_s)
            self._shared.news.set()

    async def deliver_live(self, thread_id: str, payload: bytes, timeout_s: float) -> Live:
        handlers = list(self._state().listeners.get(thread_id, ()))
        for handler in handlers:
            try:
                await handler(payload)
            except Exception:  # the listener's trouble, as on every store: a sender would enqueue what has arrived
                _log.exception("a live handler failed", extra={"action": "mailbox_live_failed"})
        return Live.DELIVERED if handlers else Live.NO_SUBSCRIBER

    async def listen_live(self, thread_id: str, handler: LiveHandler) -> Callable[[], Awaitable[None]]:
        listeners = self._state().listeners
        listeners[thread_id].append(handler)

        async def stop() -> None:
            if handler in listeners.get(thread_id, ()):
                listeners[thread_id].remove(handler)
                if not listeners[thread_id]:
                    del listeners[thread_id]

        return stop


class MemoryMailboxStore(MailboxStore):
    """A `MailboxStore` in memory. Give several stores one `MemoryMailbox` to have several instances of one."""

    def __init__(
        self,
        shared: MemoryMailbox | None = None,
        *,
        config: MailboxConfig | None = None,
        clock: Callable[[], float] = lambda: _EPOCH_S + time.monotonic(),
    ) -> None:
        config = config or MailboxConfig()
        super().__init__(MemoryBackend(shared or MemoryMailbox(), clock, config.signal_ack_wait_s), config)
