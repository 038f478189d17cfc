"""A worker: pulls signals, claims the dispatches of their threads, hands each to a function, and ends each claim.

While the function runs, lease and signal are renewed, and every half second one read shows for all claims whether
they are still held. When the claim is lost or the thread interrupted, the function is cancelled: whatever it still does
is no longer this worker's work. A signal is answered only when its thread has nothing left to claim: if the worker
dies, another finishes the queue. A worker without a free slot works on a thread for a turn, and then takes the next.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Literal, Self
from weakref import WeakKeyDictionary

from bufstore import elapsed
from bufstore.errors import (
    BufstoreError,
    ClaimInterrupted,
    ConfigError,
    LogFull,
    StaleClaim,
    StepUnknown,
    StoreMisconfigured,
    Unavailable,
)
from bufstore.holding import Holding, while_held
from bufstore.log_lines import LogLines
from bufstore.mailbox.model import Dispatch
from bufstore.mailbox.ports import Signal
from bufstore.mailbox.store import MailboxStore
from bufstore.tasks import Lasting, end, own_cancels_only, spawn
from bufstore.types import check_id

_log = LogLines(__name__)

#: How long a worker stays with one thread while it has no slot for another. It leaves only between two dispatches.
_TURN_S = 0.2
#: The longest time that a thread waits after a step that the store did not answer: the store may be back at once.
_AWAY_S = 5.0
#: How often a worker looks whether it still holds its claims.
_WATCH_S = 0.5
#: For how long a failed step counts as a worker's trouble. Its thread may go on with another worker.
_STEP_TROUBLE_S = 30.0
#: Errors of a step that any other step of the worker may meet, too.
_EVERYBODYS = (Unavailable, StepUnknown, ConfigError, StoreMisconfigured, LogFull)
_STOPPED = "the worker was stopped"

#: Does the work of a claimed dispatch. Returning acks it; raising hands it back, to be retried. So does returning after
#: the worker was stopped and has cancelled it: nobody knows then whether the work is done.
Handler = Callable[[Dispatch], Awaitable[None]]


def backoff_s(attempt: int, base_s: float, max_s: float) -> float:
    """Return how long to wait after the `attempt`-th failure, from 1: doubled each time, up to `max_s`."""
    return min(max_s, base_s * 2.0 ** min(attempt - 1, 60))


def _text_of(error: BaseException) -> str:
    with suppress(Exception):  # the text is made by foreign code, too
        return f"{type(error).__name__}: {error}"
    return type(error).__name__


class Worker:
    """Works on a mailbox until it is closed. ``async with Worker(mailbox, "host 1", handle): …``"""

    def __init__(self, mailbox: MailboxStore, name: str, handler: Handler) -> None:
        """`name` is the holder of its claims. Raises InvalidId."""
        self._mailbox = mailbox
        self._name = check_id(name, "name")
        self._handler = handler
        self._config = mailbox.config
        self._pulling: Lasting | None = None
        self._watching: Lasting | None = None
        self._running: set[asyncio.Task[None]] = set()
        #: The claims that are worked on, and their handlers, by token: a thread may have a claim that is lost and still
        #: ends, and the next one.
        self._claims: dict[int, tuple[Dispatch, asyncio.Task[None]]] = {}
        #: Why this worker cancelled a handler, which an app's own code may cancel, too.
        self._broken_off: WeakKeyDictionary[asyncio.Task[None], str] = WeakKeyDictionary()
        self._room = asyncio.Semaphore(self._config.max_concurrent_handlers)
        self._closing = self._stopped = False
        #: Why the last pull of signals failed; None when it did not.
        self._pull_trouble: str | None = None
        #: Why a step of a claim failed, and until when that counts.
        self._step_trouble: tuple[str, float] | None = None

    @property
    def trouble(self) -> str | None:
        """Why this worker cannot fetch signals, or lately could not claim, ack or nack; None while nothing is wrong."""
        if self._pull_trouble is not None:
            return self._pull_trouble
        return self._step_trouble[0] if self._step_trouble and elapsed.now_s() < self._step_trouble[1] else None

    async def __aenter__(self) -> Self:
        self._pulling = Lasting(self._pull, name="bufstore-mailbox-worker")
        self._watching = Lasting(self._watch, name="bufstore-mailbox-watch")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self, drain_s: float = 10.0) -> None:
        """Take nothing new; give what runs `drain_s` to end, then cancel it: its claims are handed back.

        Cancelling this call ends the wait: what runs is then cancelled at once.
        """
        self._closing = True
        try:
            if self._pulling is not None:
                await self._pulling.aclose()
            if self._running:
                await asyncio.wait(self._running, timeout=drain_s)
        finally:
            self._stopped = True
            for _, task in self._claims.values():
                task.cancel()  # only the handlers: every claim is still acked or handed back
            for thread in self._running:
                self._mailbox.takes.leave(thread)
            if self._watching is not None:
                await self._watching.aclose()
            if self._running:
                await asyncio.wait(self._running)

    async def _pull(self) -> None:
        failures = 0
        room = self._room
        while True:
            await room.acquire()
            room.release()
            free = self._config.max_concurrent_handlers - len(self._running)
            try:
                with own_cancels_only():
                    signals = await self._mailbox.pull_signals(max(1, min(free, self._config.signal_batch_size)))
            except Exception as e:
                failures += 1
                text = str(e) if isinstance(e, BufstoreError) else f"unexpected {type(e).__name__}"
                if self._pull_trouble is None:
                    _log.warning(
                        "cannot fetch signals; will try again: %s", text, extra={"action": "mailbox_pull_failed"}
                    )
                self._pull_trouble = text
                await asyncio.sleep(backoff_s(failures, 0.1, 5.0))
                continue
            failures, self._pull_trouble = 0, None
            for signal in signals:
                await room.acquire()
                task = spawn(self._thread(signal), name="bufstore-mailbox-thread", among=self._running)
                task.add_done_callback(lambda _: room.release())

    async def _thread(self, signal: Signal) -> None:
        """Work off a thread's queue, for one turn, then answer its signal."""
        c = self._config
        began, longest_s = time.monotonic(), c.signal_nack_max_delay_s
        try:
            while not self._closing and (claim := await self._mailbox.claim(signal.thread_id, self._name)) is not None:
                await self._work(claim, signal)
                if self._closing or (self._room.locked() and time.monotonic() > began + _TURN_S):
                    await self._mailbox.wake(signal.thread_id)
                    break
            if await signal.ack():
                return
        except asyncio.CancelledError:
            with suppress(BufstoreError):
                await signal.nack(0)
            raise
        except BufstoreError as e:
            _log.info("thread %r: %s", signal.thread_id, e, extra={"action": "mailbox_step_failed"})
            self._note_step(e)
            if isinstance(e, (Unavailable, StepUnknown)):
                longest_s = min(longest_s, _AWAY_S)
        self._mailbox.counters.count("signals_nacked")
        delay = backoff_s(signal.deliveries, c.signal_nack_base_delay_s, longest_s)
        with suppress(BufstoreError):  # an unanswered signal comes again by itself
            await signal.nack(0 if self._closing else delay)

    async def _work(self, claim: Dispatch, signal: Signal) -> None:
        task = spawn(self._called(claim))
        if self._stopped:
            task.cancel()  # the handler does not begin
        self._claims[claim.token] = claim, task
        c, late_ms = self._config, self._mailbox.backend.now_ms() - (claim.claimed_at_ms or 0)
        began = elapsed.now_s() - max(0, late_ms) / 1000  # the answer to the claim may have come late
        holding = Holding(c.lease_s, began, lambda: self._lost(task, "lost"))
        holding.keep(lambda: self._renew(claim, signal, task, holding), min(c.lease_s, c.signal_ack_wait_s) / 3)
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            await end(task)
            await self._mailbox.nack(claim, error=_STOPPED)
            raise
        finally:
            del self._claims[claim.token]
            holding.stop()
            await holding.aclose()
        ending = self._ending(claim, task)
        try:
            async for attempt in while_held(lambda _: self._stopped or holding.is_over):
                with attempt:
                    try:
                        await ending()
                    except BufstoreError as e:
                        self._note_step(e)
                        raise
                    self._step_trouble = None
        except StaleClaim as e:
            _log.warning("%s", e, extra={"action": "mailbox_claim_lost"})

    def _note_step(self, error: BufstoreError) -> None:
        """Note why a step failed, unless it is the thread's own."""
        if not isinstance(error, _EVERYBODYS):
            return
        if self.trouble is None:
            _log.warning("a step failed; will try again: %s", error, extra={"action": "mailbox_step_failed"})
        self._step_trouble = str(error), elapsed.now_s() + _STEP_TROUBLE_S

    async def _called(self, claim: Dispatch) -> None:
        await self._handler(claim)  # here, because a handler may also fail before it returns its awaitable

    def _ending(self, claim: Dispatch, task: asyncio.Task[None]) -> Callable[[], Awaitable[object]]:
        """Return what ends the claim, now that its handler has ended."""
        error = None if task.cancelled() else task.exception()
        if self._stopped and task.cancelling():
            return lambda: self._mailbox.nack(claim, error=_STOPPED)
        if not task.cancelled() and error is None:
            return lambda: self._mailbox.ack(claim)
        text = "cancelled" if error is None else _text_of(error)
        if error is None and (how := self._broken_off.get(task)) is not None:
            _log.info(
                "dispatch %r of thread %r: its handler was cancelled, because the claim is %s",
                claim.dispatch_id,
                claim.thread_id,
                how,
                extra={"action": "mailbox_interrupted" if how == "interrupted" else "mailbox_claim_lost"},
            )
        else:
            _log.warning(
                "dispatch %r of thread %r failed: %s",
                claim.dispatch_id,
                claim.thread_id,
                text,
                exc_info=error,
                extra={"action": "mailbox_handler_failed"},
            )
        c = self._config
        delay = backoff_s(claim.attempts + 1, c.signal_nack_base_delay_s, c.signal_nack_max_delay_s)
        retry_at = self._mailbox.backend.now_ms() + round(1000 * delay)
        return lambda: self._mailbox.nack(claim, retry_at_ms=retry_at, error=text)

    async def _renew(self, claim: Dispatch, signal: Signal, task: asyncio.Task[None], holding: Holding) -> bool:
        began = elapsed.now_s()
        try:
            await self._mailbox.extend_lease(claim)
            holding.confirm(began)
            await signal.working()
        except StaleClaim as e:
            self._lost(task, "interrupted" if isinstance(e, ClaimInterrupted) else "lost")
            return False
        except BufstoreError as e:
            _log.info("cannot renew a claim; will try again: %s", e, extra={"action": "mailbox_renew_failed"})
        return True

    async def _watch(self) -> None:
        """Soon cancel handlers whose claim is interrupted or lost, however long its lease."""
        while True:
            await asyncio.sleep(_WATCH_S)
            working = dict(self._claims)
            if not working:
                continue
            with suppress(Exception), own_cancels_only():  # when this read fails, the renewal finds out
                held = await self._mailbox.backend.held(list({claim.thread_id for claim, _ in working.values()}))
                for claim, task in working.values():
                    # A claim's token is the version that the claim made: an older version does not know of the claim.
                    version, token, epoch = held.get(claim.thread_id, (0, 0, 0))
                    known = version >= claim.token and not task.done()
                    if known and (token != claim.token or epoch > claim.epoch):
                        self._lost(task, "lost" if token != claim.token else "interrupted")

    def _lost(self, task: asyncio.Task[None], how: Literal["lost", "interrupted"]) -> None:
        if task in self._broken_off or (self._stopped and task.cancelling()):
            return  # the handler is cancelled once, and may take its time to end
        self._broken_off[task] = how
        self._mailbox.counters.count(f"work_{how}")
        task.cancel()
