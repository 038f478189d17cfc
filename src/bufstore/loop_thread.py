"""An event loop in a thread of its own, for code that has none: each call runs there while its caller waits."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from bufstore.errors import CallTimeout, Closed, ConfigError

R = TypeVar("R")

#: The longest time for which a call may wait: half of what a thread can wait (some 290 years).
_OWN_MAX_S = threading.TIMEOUT_MAX / 2


class LoopThread:
    """A store on an event loop of a thread of its own.

    `open_store` makes the store, on the loop; its errors pass through. A call raises CallTimeout when it takes longer
    than `call_timeout_s` plus its own time within the store; Closed after `close`, or when `close` overtakes
    it; ConfigError on the loop's own thread, where it would wait for itself, and in a forked process: it has no loop.
    """

    def __init__(self, open_store: Callable[[], Awaitable[Any]], *, call_timeout_s: float) -> None:
        if isinstance(call_timeout_s, bool) or not isinstance(call_timeout_s, int | float) or not call_timeout_s > 0:
            raise ConfigError(f"{type(self).__name__}.call_timeout_s must be a number above 0, not {call_timeout_s!r}")
        self._timeout_s = min(call_timeout_s, _OWN_MAX_S)
        # A signal handler may close the store while its thread holds the lock in a call.
        self._lock = threading.RLock()
        self._pending: set[Future[Any]] = set()
        self._closing = self._stopped = False
        self._process = os.getpid()
        self._loop = asyncio.new_event_loop()
        # A daemon: an interpreter that ends without `close` need not wait, because the log has what was acknowledged.
        self._thread = threading.Thread(target=self._serve, name="bufstore-blocking", daemon=True)
        self._thread.start()
        try:
            self._store = self._call(open_store, self._timeout_s)
        except BaseException:
            self._stop()
            raise

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._store!r})"

    def close(self) -> None:
        """Close the store (it drains what it can, within its own times) and end the thread. Idempotent.

        Does nothing in a forked process, because the store is its parent's, and nothing while the interpreter ends,
        because no other thread runs then; the log has what was acknowledged.
        """
        self._check_thread()
        if os.getpid() != self._process or sys.is_finalizing():
            return
        with self._lock:
            if self._closing:
                return
            self._closing = True
        try:
            self._call(self._store.aclose, self._timeout_s, closing=True)
        finally:
            self._stop()

    def _serve(self) -> None:
        loop = self._loop
        try:
            loop.run_forever()
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            if tasks:
                loop.run_until_complete(asyncio.wait(tasks, timeout=5))
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()

    def _stop(self) -> None:
        with self._lock:
            self._closing = True
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(self._timeout_s)
        with self._lock:
            self._stopped = True
            left, self._pending = self._pending, set()
        for future in left:  # scheduled too late to begin
            future.cancel()

    def _call(self, work: Callable[[], Awaitable[R]], timeout_s: float | None, *, closing: bool = False) -> R:
        self._check_thread()
        if os.getpid() != self._process:
            raise ConfigError("a blocking store does not outlive a fork: open one in each process")
        begun = _begin(work)
        with self._lock:
            if self._closing is not closing:
                begun.close()
                raise Closed("the store is closed")
            try:
                future = asyncio.run_coroutine_threadsafe(begun, self._loop)
            except RuntimeError:  # a signal handler has closed the loop since
                begun.close()
                raise Closed("the store is closed") from None
            self._pending.add(future)
            if self._stopped:  # the loop has just stopped, before the call could begin
                future.cancel()
        try:
            return future.result(timeout_s)
        except CancelledError:
            raise Closed("the store was closed before the call ended; a write may or may not be stored") from None
        except TimeoutError:
            if future.done() and not future.cancelled():
                return future.result()  # the call has ended just now, or the error is the store's own
            raise CallTimeout(
                f"the call did not end within {timeout_s:g} s; a write may or may not be stored"
            ) from None
        finally:
            future.cancel()  # a call whose caller gave up (or was interrupted) ends, too
            with self._lock:
                self._pending.discard(future)

    def _check_thread(self) -> None:
        if threading.current_thread() is self._thread:
            raise ConfigError("a blocking store cannot be called from its own event-loop thread")


def own_time_s(timeout_s: object) -> float:
    """Return how long a call may wait within the store, by its `timeout_s`, before `call_timeout_s` begins to count."""
    return min(timeout_s, _OWN_MAX_S) if isinstance(timeout_s, int | float) and timeout_s > 0 else 0.0


async def _begin(work: Callable[[], Awaitable[R]]) -> R:
    # The caller does not call `work` itself: here, code that needs a running loop finds one.
    return await work()
