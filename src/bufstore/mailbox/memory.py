"""A mailbox in memory: for tests of apps, and the model that the other two stores are compared with.

Several stores on one `MemoryMailbox` are several instances of one deployment. As in Postgres, each thread has a time
at which it is looked at next, so nobody needs to signal it when delayed work becomes due.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from bufstore.elapsed import since_start_s
from bufstore.errors import Closed
from bufstore.jetstream.messages import Conflict
from bufstore.log_lines import LogLines
from bufstore.mailbox.config import MailboxConfig
from bufstore.mailbox.counters import MailboxGauges
from bufstore.mailbox.decisions import Step, as_seen, is_expired
from bufstore.mailbox.model import Dispatch, MailboxThread, Status, numbered
from bufstore.mailbox.ports import Backend, KeyTaken, Live, LiveHandler, Signal
from bufstore.mailbox.store import MailboxStore
from bufstore.tasks import own_cancels_only, set_within, spawn

_log = LogLines(__name__)

#: What the wall clock said, in seconds, when our own clock, which does not jump, stood at 0.
_EPOCH_S = time.time() - since_start_s()


@dataclass(eq=False)
class _Thread:
    """A thread's state with its claimed dispatch, and its other dispatches by id, in the order in which they came."""

    state: MailboxThread
    queued: dict[str, Dispatch] = field(default_factory=dict)
    finished: dict[str, Dispatch] = field(default_factory=dict)


@dataclass(eq=False)
class _Wake:
    """When a thread is looked at. Each new signal is a new object: an answer to an earlier one changes nothing."""

    due_ms: float
    deliveries: int = 0


class _Listener:
    """Hands live deliveries to a handler, one after the other, and answers each just before."""

    def __init__(self, handler: LiveHandler) -> None:
        #: Each with its answer, whether the handler gets it; None: the end.
        self._waiting: asyncio.Queue[tuple[bytes, asyncio.Future[bool]] | None] = asyncio.Queue()
        self._task = spawn(self._run(handler), name="bufstore-mailbox-live")

    def deliver(self, payload: bytes) -> asyncio.Future[bool]:
        answer = asyncio.get_running_loop().create_future()
        self._waiting.put_nowait((payload, answer))
        return answer

    def stop(self) -> None:
        """Refuse what waits, and end when the handler has returned; it may be the handler that calls this."""
        while not self._waiting.empty():
            if (left := self._waiting.get_nowait()) is not None:
                left[1].set_result(False)
        self._waiting.put_nowait(None)

    async def _run(self, handler: LiveHandler) -> None:
        while (delivery := await self._waiting.get()) is not None:
            payload, answer = delivery
            answer.set_result(True)
            try:
                with own_cancels_only():
                    await handler(payload)
            except Exception:  # not the sender's trouble, on any store: it would enqueue what has already arrived
                _log.exception("a live handler failed", extra={"action": "mailbox_live_failed"})


class MemoryMailbox:
    """What a server would hold: shared by the stores that are given it."""

    def __init__(self) -> None:
        self.threads: dict[str, _Thread] = {}
        self.wakes: dict[str, _Wake] = {}
        self.listeners: dict[str, list[_Listener]] = defaultdict(list)
        self.news = asyncio.Event()
        self.swept = float("-inf")
        #: The one growing sequence, of positions, versions, tokens and epochs.
        self.numbers = itertools.count(1)

    def of(self, thread_id: str) -> _Thread:
        """Return the thread; an unknown one is empty, and is not kept."""
        return self.threads.get(thread_id) or _Thread(MailboxThread(thread_id=thread_id))

    def wake(self, thread_id: str, at_ms: float) -> None:
        """Set the time of the next look at the thread to `at_ms`, unless the thread is looked at before."""
        known = self.wakes.get(thread_id)
        if known is None or at_ms < known.due_ms:
            self.wakes[thread_id] = _Wake(at_ms)
            self.news.set()


class MemoryBackend(Backend):
    """A backend that does at once everything that a server would do."""

    def __init__(
        self, shared: MemoryMailbox, clock: Callable[[], float], ack_wait_s: float, *, opened: bool = True
    ) -> None:
        """`opened`: False for one that is used as a server's is, which must be opened first."""
        self.shared = shared
        self._clock = clock
        self._ack_wait_s = ack_wait_s
        self._closed = not opened
        #: Each ends a listener of this instance.
        self._stops: list[Callable[[], Awaitable[None]]] = []
        #: How many threads were looked at for lost signals in this round.
        self._looked = 0

    async def open(self) -> None:
        self._closed = False

    async def aclose(self) -> None:
        self._closed = True
        for stop in tuple(self._stops):
            await stop()
        self.shared.news.set()

    def now_ms(self) -> int:
        return int(1000 * self._clock())

    def _state(self) -> MemoryMailbox:
        if self._closed:
            raise Closed("the mailbox is closed or not open")
        return self.shared

    async def add(self, dispatch: Dispatch, *, own_id: bool, now_ms: int) -> Dispatch:
        shared = self._state()
        thread = shared.of(dispatch.thread_id)
        _, found = await self.find(dispatch.thread_id, dispatch.dispatch_id)
        if found is not None:
            raise KeyTaken(dispatch.dispatch_id, same_id=True)
        for d in (thread.state.active, *thread.queued.values()) if dispatch.dedupe_key is not None else ():
            if d is not None and d.dedupe_key == dispatch.dedupe_key:
                raise KeyTaken(d.dispatch_id, same_id=False)
        stored = replace(dispatch, epoch=thread.state.epoch, position=next(shared.numbers))
        thread.queued[stored.dispatch_id] = stored
        shared.threads[stored.thread_id] = thread
        shared.wake(stored.thread_id, max(stored.available_at_ms, now_ms))
        return stored

    async def write(self, before: MailboxThread, step: Step, now_ms: int) -> MailboxThread:
        shared = self._state()
        thread = shared.of(before.thread_id)
        if thread.state.version != before.version:
            raise Conflict("the thread has moved")
        if any(m.before is not None and thread.queued.get(m.before.dispatch_id) != m.before for m in step.moves):
            raise Conflict("the queue has moved")
        thread.state = numbered(step.thread, next(shared.numbers))
        shared.threads[before.thread_id] = thread
        for move in step.moves:
            if move.before is not None:
                del thread.queued[move.before.dispatch_id]
            if move.after is not None:
                place = thread.finished if move.after.status.finished else thread.queued
                place[move.after.dispatch_id] = move.after
        if step.wake:
            shared.wake(before.thread_id, self.now_ms())
        return thread.state

    async def thread(self, thread_id: str) -> MailboxThread:
        return self._state().of(thread_id).state

    async def first(self, thread_id: str, now_ms: int) -> tuple[MailboxThread, Dispatch | None]:
        thread = self._state().of(thread_id)
        ready = [d for d in thread.queued.values() if d.available_at_ms <= now_ms]
        return thread.state, min(ready, key=lambda d: d.order, default=None)

    async def find(self, thread_id: str, dispatch_id: str) -> tuple[MailboxThread, Dispatch | None]:
        thread = self._state().of(thread_id)
        active = thread.state.active
        if active is not None and active.dispatch_id == dispatch_id:
            return thread.state, active
        return thread.state, thread.queued.get(dispatch_id) or thread.finished.get(dispatch_id)

    async def queued(self, thread_id: str, below_epoch: int, limit: int) -> list[Dispatch]:
        return [d for d in self._state().of(thread_id).queued.values() if d.epoch < below_epoch][:limit]

    async def all_of(self, thread_id: str) -> tuple[MailboxThread, list[Dispatch]]:
        thread = self._state().of(thread_id)
        return thread.state, [*thread.queued.values(), *thread.finished.values()]

    async def queued_threads(self, limit: int) -> list[str]:
        threads = self._state().threads.items()
        return [t for t, it in threads if any(d.epoch >= it.state.epoch for d in it.queued.values())][:limit]

    async def finished(self, limit: int) -> list[Dispatch]:
        every = [d for thread in self._state().threads.values() for d in thread.finished.values()]
        return sorted(every, key=lambda d: d.completed_at_ms or 0)[:limit]

    async def counts(self) -> dict[Status, int]:
        threads = self._state().threads.values()
        found = [as_seen(d, t.state) for t in threads for d in [*t.queued.values(), *t.finished.values()]]
        found += [t.state.active for t in threads if t.state.active is not None]
        return {**dict.fromkeys(Status, 0), **Counter(d.status for d in found)}

    async def purge(self, finished_before_ms: int, limit: int) -> int:
        old = [d for d in await self.finished(limit) if (d.completed_at_ms or 0) < finished_before_ms]
        for d in old:
            thread = self.shared.of(d.thread_id)
            del thread.finished[d.dispatch_id]
            if not thread.finished and not thread.queued and thread.state.active is None:
                del self.shared.threads[d.thread_id]
        return len(old)

    async def expiring(self, now_ms: int, limit: int) -> list[MailboxThread]:
        return [t.state for t in self._state().threads.values() if is_expired(t.state, now_ms)][:limit]

    async def wake(self, thread_id: str) -> None:
        self._state().wakes.pop(thread_id, None)  # even if a worker has the signal now
        self.shared.wake(thread_id, self.now_ms())

    async def signal_lost(self, due_ms: int, limit: int) -> int:
        shared = self._state()
        page = list(itertools.islice(shared.threads.items(), self._looked, self._looked + limit))
        self._looked = self._looked + limit if len(page) == limit else 0
        free = [(t, it.queued.values()) for t, it in page if t not in shared.wakes and it.state.active is None]
        lost = [t for t, queued in free if any(d.available_at_ms <= due_ms for d in queued)]
        for thread_id in lost:
            shared.wake(thread_id, self.now_ms())
        return len(lost)

    async def gauges(self) -> MailboxGauges:
        queued = [d.created_at_ms for thread in self._state().threads.values() for d in thread.queued.values()]
        now, out = self.now_ms(), [w for w in self.shared.wakes.values() if w.deliveries]
        return MailboxGauges(
            oldest_queued_s=(now - min(queued)) / 1000 if queued else None,
            signals_waiting=sum(w.due_ms <= now for w in self.shared.wakes.values()),
            signals_out=sum(w.due_ms > now for w in out),
            signals_again=sum(w.deliveries > 1 for w in out),
        )

    async def held(self, thread_ids: Sequence[str]) -> dict[str, tuple[int, int, int]]:
        states = [self._state().of(t).state for t in thread_ids]
        return {s.thread_id: (s.version, s.active.token if s.active is not None else 0, s.epoch) for s in states}

    async def sweeps(self, interval_s: float) -> bool:
        now = time.monotonic()
        if now < self._state().swept + interval_s / 2:
            return False
        self.shared.swept = now
        return True

    async def signals(self, limit: int, timeout_s: float) -> list[Signal]:
        shared = self._state()
        deadline = time.monotonic() + timeout_s
        while True:
            shared.news.clear()
            now, left = self.now_ms(), deadline - time.monotonic()
            due = sorted((w.due_ms, t) for t, w in shared.wakes.items() if w.due_ms <= now)
            if due or self._closed or left <= 0:
                return [self._deliver(t, now) for _, t in due[:limit]]
            soonest = min((w.due_ms - now for w in shared.wakes.values()), default=1000 * left) / 1000
            await set_within(shared.news, min(soonest, left))

    def _deliver(self, thread_id: str, now_ms: int) -> Signal:
        wake = self.shared.wakes[thread_id]
        wake.due_ms = now_ms + 1000 * self._ack_wait_s
        wake.deliveries += 1
        return Signal(self, thread_id, wake.deliveries, wake)

    async def ack_signal(self, signal: Signal) -> bool:
        thread = self._state().of(signal.thread_id)
        if self.shared.wakes.get(signal.thread_id) is not signal.mark:
            return True
        if thread.state.active is not None:
            return False
        del self.shared.wakes[signal.thread_id]
        if thread.queued:
            self.shared.wake(signal.thread_id, min(d.available_at_ms for d in thread.queued.values()))
        return True

    async def put_off(self, signal: Signal, delay_s: float | None) -> None:
        wake = self.shared.wakes.get(signal.thread_id)
        if wake is not None and wake is signal.mark:
            wake.due_ms = self.now_ms() + 1000 * (self._ack_wait_s if delay_s is None else delay_s)
            self.shared.news.set()

    async def deliver_live(self, thread_id: str, payload: bytes, timeout_s: float) -> Live:
        answers = [listener.deliver(payload) for listener in self._state().listeners.get(thread_id, ())]
        try:
            async with asyncio.timeout(timeout_s):
                for answer in asyncio.as_completed(answers):
                    if await answer:
                        return Live.DELIVERED
        except TimeoutError:
            return Live.UNKNOWN
        return Live.NO_SUBSCRIBER

    async def listen_live(self, thread_id: str, handler: LiveHandler) -> Callable[[], Awaitable[None]]:
        all_listeners, listener = self._state().listeners, _Listener(handler)
        all_listeners[thread_id].append(listener)

        async def stop() -> None:
            listeners = all_listeners.get(thread_id, [])
            if listener in listeners:
                listeners.remove(listener)
                if not listeners:
                    del all_listeners[thread_id]
                self._stops.remove(stop)
                listener.stop()

        self._stops.append(stop)
        return stop


class MemoryMailboxStore(MailboxStore):
    """A `MailboxStore` in memory. Stores that share a `MemoryMailbox` are several instances of one mailbox."""

    def __init__(
        self,
        shared: MemoryMailbox | None = None,
        *,
        config: MailboxConfig | None = None,
        clock: Callable[[], float] = lambda: _EPOCH_S + since_start_s(),
    ) -> None:
        config = config or MailboxConfig()
        super().__init__(
            MemoryBackend(shared or MemoryMailbox(), clock, config.signal_ack_wait_s, opened=False), config
        )
