"""The notifier on any broker: routes payloads to callbacks, asks for hints, and keeps all trouble to itself.

Hints fail open: when one cannot be stored, asked for or understood, everybody is called. One claim is made for all
callbacks of a process, so a hundred workers in a process cost one question.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextvars import copy_context
from typing import Any, ParamSpec, Self, TypeVar

from bufstore.errors import Closed, ConfigError, InvalidQuery, StoreMisconfigured
from bufstore.home import Home
from bufstore.log_lines import LogLines
from bufstore.notify.broker import Broker, HintUnavailable
from bufstore.notify.listener import BUSY_S, SharedListener
from bufstore.notify.payload import pack, unpack
from bufstore.notify.protocol import Event, NotifierStatistics, Unlisten
from bufstore.tasks import Closing, end, no_cancel_lost, own_cancels_only, spawn
from bufstore.types import check_id, check_ids

_log = LogLines(__name__)

#: How many hints may be asked about at once; beyond that, listeners are called without asking.
_CLAIMS_MAX = 256

P = ParamSpec("P")
C = TypeVar("C", bound=Callable[..., None])


class Notifier:
    """Announces work, and hears of it. All adapters pass the `NOTIFY_CHECKS` of `tests/conformance`.

    Kinds and ids are any text that `bufstore.types.check_id` takes; what it refuses raises InvalidId. After `aclose`
    every call raises Closed. `notify_*` raises nothing else but InvalidQuery, for a wrong count. `listen_*` raises
    Unavailable when the server cannot be asked to deliver, ConfigError (StoreMisconfigured on Postgres) when it refuses
    to; once it has returned, what is published later is heard, and lost connections heal themselves.

    A callback is a plain function that returns at once (it sets an event, say). It is called on the event loop, with
    the context variables of its `listen_*`; what it raises is logged and disturbs nobody.

    `timeout_s` bounds every publish and every question about a hint.
    """

    def __init__(self, broker: Broker, *, timeout_s: float = 2.0) -> None:
        self._broker = broker
        self._timeout_s = timeout_s
        self._scheduled: SharedListener[str, Callable[[str], None]] = self._listener(
            Event.SCHEDULED, self._on_scheduled
        )
        self._completed: SharedListener[str, Callable[[], None]] = self._listener(
            Event.COMPLETED, lambda work_id: self._call_all(self._completed, work_id)
        )
        self._lost: SharedListener[str, Callable[[], None]] = self._listener(
            Event.OWNERSHIP_LOST, lambda work_id: self._call_all(self._lost, work_id)
        )
        self._claims: set[asyncio.Task[None]] = set()
        self._closed = False
        self._closing = Closing()
        #: The event loop and process in which the notifier has sent or listened; None: it has done neither.
        self._home: Home | None = None
        self._healthy = True
        #: The events that the server refuses to deliver.
        self._refused: set[Event] = set()
        self._published = self._dropped = self._received = self._woken = self._spared = 0
        self._hint_failures = self._restored = 0
        broker.restored = self._on_restored

    def _listener(self, event: Event, deliver: Callable[[str], None]) -> SharedListener[str, C]:
        async def open_(heard: Callable[[str], None]) -> Callable[[], Awaitable[None]]:
            try:
                unlisten = await self._broker.subscribe(event, heard)
            except (ConfigError, StoreMisconfigured) as e:  # the server refuses until somebody reconfigures it
                if event not in self._refused:
                    _log.warning("cannot listen; relying on polling: %s", e, extra={"action": "notify_refused"})
                self._refused.add(event)
                raise
            self._refused.discard(event)
            self._home = self._home or Home()
            return unlisten

        return SharedListener(f"listener of {event.name.lower()}", open_, deliver)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def notify_scheduled(self, kind: str, count: int = 1) -> None:
        """Tell that `count` items of a kind are ready; this wakes about as many of the kind's listeners."""
        check_id(kind, "the kind")
        if type(count) is not int or count < 0:
            raise InvalidQuery(f"count must be an int, 0 or more, not {count!r}")
        if count:
            await self._tell(self._schedule(kind, count))

    async def _schedule(self, kind: str, count: int) -> None:
        # Random, and long enough that two never collide: all users of the server see the same hints.
        hint = secrets.token_hex(16)
        try:
            await self._broker.publish_hinted(hint, count, pack(hint, kind))
        except HintUnavailable as e:
            if str(e):  # without a text: there are no hints at all, as configured
                self._hint_failures += 1
                _log.debug("cannot store a hint; all workers wake: %s", e, extra={"action": "notify_hint"})
            await self._broker.publish(Event.SCHEDULED, pack("", kind))

    async def listen_scheduled(self, kinds: Iterable[str], callback: Callable[[str], None]) -> Unlisten:
        """Call back with the kind when work of one of `kinds` (a str is one) is ready. Call the result to end this."""
        wanted = [check_id(k, "the kind") for k in ([kinds] if isinstance(kinds, str) else check_ids(kinds, "kinds"))]
        if not wanted:
            raise InvalidQuery("name at least one kind to listen for")
        return await self._scheduled.subscribe(wanted, _here(callback))

    async def notify_completed(self, work_id: str) -> None:
        """Tell all listeners for this id that its work is done."""
        await self._tell(self._broker.publish(Event.COMPLETED, check_id(work_id, "the work id")))

    async def listen_completed(self, work_id: str, callback: Callable[[], None]) -> Unlisten:
        """Call back when this work is reported as done."""
        return await self._completed.subscribe([check_id(work_id, "the work id")], _here(callback))

    async def notify_ownership_lost(self, work_id: str) -> None:
        """Tell the worker on this id that it may have lost the work."""
        await self._tell(self._broker.publish(Event.OWNERSHIP_LOST, check_id(work_id, "the work id")))

    async def listen_ownership_lost(self, work_id: str, callback: Callable[[], None]) -> Unlisten:
        """Call back when this work is reported as somebody else's: check whether it is, then stop."""
        return await self._lost.subscribe([check_id(work_id, "the work id")], _here(callback))

    def statistics(self) -> NotifierStatistics:
        """Return what has been sent, heard and dropped."""
        return NotifierStatistics(
            healthy=self._healthy and not self._refused,
            published=self._published,
            dropped=self._dropped,
            received=self._received,
            woken=self._woken,
            spared=self._spared,
            hint_failures=self._hint_failures,
            restored=self._restored,
        )

    async def aclose(self) -> None:
        """Stop listening and let go of what the notifier opened itself. May be called twice."""
        used_here = self._closed or self._home is None or self._home.closes_here()
        if used_here and self._broker.closes_here():
            await self._closing(self._close)

    async def _close(self) -> None:
        self._closed = True
        for listener in (self._scheduled, self._completed, self._lost):
            await listener.aclose()
        await end(*self._claims)
        await self._broker.aclose()

    async def _tell(self, sending: Coroutine[Any, Any, None]) -> None:
        if self._closed:
            sending.close()
            raise Closed("the notifier is closed")
        await self._send(sending)

    async def _send(self, sending: Coroutine[Any, Any, None]) -> None:
        """Send, and ignore failures: waiting workers poll as well."""
        with no_cancel_lost():  # nats-py, and Python's wait_for before 3.12, may swallow a cancellation
            try:
                async with asyncio.timeout(self._timeout_s):
                    await sending
            except Exception as e:
                self._dropped += 1
                self._trouble(e)
            else:
                self._published += 1
                self._healthy = True
                self._home = self._home or Home()

    def _trouble(self, error: Exception) -> None:
        if self._healthy:  # log once per outage
            text = str(error) or type(error).__name__
            _log.warning(
                "dropping notifications; listeners rely on polling: %s", text, extra={"action": "notify_dropped"}
            )
        self._healthy = False

    def _on_restored(self) -> None:
        """Call everybody once: they may have missed something."""
        self._healthy = True
        self._restored += 1
        for kind, callback in self._scheduled.everyone():
            self._call(callback, kind)
        for listener in (self._completed, self._lost):
            for _, each in listener.everyone():
                self._call(each)

    def _call_all(self, listener: SharedListener[str, Callable[[], None]], work_id: str) -> None:
        self._received += 1
        for callback in listener.pick(work_id, listener.count(work_id)):
            self._call(callback)

    def _on_scheduled(self, payload: str) -> None:
        self._received += 1
        parts = unpack(payload)
        if parts is None:
            return
        hint, kind = parts
        wanted, idle = self._scheduled.count(kind), self._scheduled.idle(kind)
        if not wanted:
            return
        if not hint or len(self._claims) >= _CLAIMS_MAX:
            self._wake(kind, wanted)
            return
        # What this process claims is missing for idle callbacks of another: callbacks that were just called stand back.
        granted = self._broker.claim(hint, idle) if idle else 0
        if isinstance(granted, int) and (granted < idle or idle == wanted):
            self._wake(kind, granted)
            self._spared += wanted - granted
            return
        spawn(self._ask(kind, hint, wanted, idle, granted), among=self._claims)

    async def _ask(self, kind: str, hint: str, wanted: int, idle: int, granted: int | Awaitable[int]) -> None:
        """Wake idle callbacks, then as many of those just called as the hint has left after all idle ones claimed."""
        granted = await self._granted(granted, idle)
        woken = self._wake(kind, granted)
        if granted > woken:  # a callback left while we asked
            spawn(self._pass_on(kind, granted - woken), among=self._claims)
        elif granted == idle < wanted:
            await asyncio.sleep(BUSY_S)
            if there := min(self._scheduled.count(kind), wanted - idle):
                woken += self._wake(kind, await self._granted(self._broker.claim(hint, there), there))
        self._spared += max(0, wanted - woken)

    async def _pass_on(self, kind: str, count: int) -> None:
        """Schedule again what was claimed and has no callback left. Nobody sees this fail: a close may have begun."""
        await self._send(self._schedule(kind, count))

    async def _granted(self, claim: int | Awaitable[int], wanted: int) -> int:
        if isinstance(claim, int):
            return claim
        try:
            async with asyncio.timeout(self._timeout_s):
                return await claim
        except Exception as e:
            self._hint_failures += 1
            _log.debug("cannot ask for a hint; all workers wake: %s", e, extra={"action": "notify_hint"})
            return wanted

    def _wake(self, kind: str, most: int) -> int:
        callbacks = self._scheduled.pick(kind, most)
        for callback in callbacks:
            self._call(callback, kind)
        return len(callbacks)

    def _call(self, callback: Callable[..., None], *args: str) -> None:
        self._woken += 1
        try:
            with own_cancels_only():
                callback(*args)
        except Exception:
            _log.exception("a callback of a notifier failed", extra={"action": "notify_callback"})


def _here(callback: Callable[P, None]) -> Callable[P, None]:
    """Return the callback bound to the present context: its later caller has another context, or none."""
    context = copy_context()

    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        context.copy().run(callback, *args, **kwargs)  # in a copy each: a context can be entered only once at a time

    return call
