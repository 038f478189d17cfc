"""An event loop in a thread of its own, for code that has none: each call runs there while its caller waits."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Generic, TypeVar, cast

from bufstore.at_exit import exit_came, held_at_exit
from bufstore.errors import BufstoreError, CallTimeout, Closed, ConfigError
from bufstore.lasting_executor import LastingExecutor
from bufstore.tasks import own_cancels_only, set_within, spawn

R = TypeVar("R")

#: The longest time for which a call may wait: half of what a thread can wait (some 290 years).
_OWN_MAX_S = threading.TIMEOUT_MAX / 2
#: How often, in seconds, a waiting caller looks whether the loop still runs.
_LOOKS_S = 1.0
#: How long, in seconds, the loop waits for cancelled tasks before it ends.
_ENDS_S = 5.0
#: Why a call ended that was not cancelled by its caller.
_ENDED = "the store was closed before the call ended; a write may or may not be stored"
#: How much of that the others have in any case, when a call that was given up does not end.
_LEAST_S = 0.5


class Call(Generic[R]):
    """A call that one thread makes on the event loop of another.

    At any moment a signal handler may raise an error in the caller (Ctrl-C, Celery's time limits). In a future of
    concurrent.futures this can leave a lock held, for which the loop would wait forever. The lock of a SimpleQueue is
    not held while Python code runs.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        work: Callable[[], Awaitable[R]],
        serves: Callable[[], bool] = lambda: True,
        tell: Callable[[], None] = lambda: None,
    ) -> None:
        """`serves`: whether the loop still begins calls; asked there. `tell`: called there once the call has ended."""
        self._loop, self._work, self._serves, self._tell = loop, work, serves, tell
        self._task: asyncio.Task[tuple[R | None, BaseException | None]] | None = None
        self._done = False
        #: Gets the result and the error, of which one is None.
        self._ended: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def begin(self) -> None:
        """Have the loop begin. Raises RuntimeError when the loop is closed."""
        self._loop.call_soon_threadsafe(self._begin)

    def result(self, runs: Callable[[], bool], timeout_s: float | None = None) -> R:
        """Wait for the result. Raises CallTimeout; CancelledError when the loop ended the call, or no longer `runs`."""
        ends_at = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s, goes_on = ends_at - time.monotonic(), runs()
            try:
                found = self._ended.get(timeout=max(min(left_s, _LOOKS_S), 0) if goes_on else 0)
                break
            except queue.Empty:
                self._check(timeout_s, left_s, goes_on)
        return self._of(found)

    async def result_elsewhere(self, told: asyncio.Event, runs: Callable[[], bool], timeout_s: float) -> R:
        """`result`, for a caller on another loop, where `told` is set once the call has ended."""
        ends_at = time.monotonic() + timeout_s
        while True:
            left_s, goes_on = ends_at - time.monotonic(), runs()
            if goes_on:
                await set_within(told, max(min(left_s, _LOOKS_S), 0))
            try:
                found = self._ended.get_nowait()
                break
            except queue.Empty:
                self._check(timeout_s, left_s, goes_on)
        return self._of(found)

    @staticmethod
    def _check(timeout_s: float | None, left_s: float, goes_on: bool) -> None:
        if left_s <= 0:
            raise CallTimeout(
                f"the call did not end within {timeout_s:g} s; a write may or may not be stored"
            ) from None
        if not goes_on:
            raise asyncio.CancelledError from None

    @staticmethod
    def _of(found: tuple[Any, BaseException | None]) -> R:
        result, error = found
        if error is not None:
            raise error
        return cast(R, result)

    def cancel(self) -> None:
        """Cancel the call, unless it has ended."""
        if not self._done:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._cancel)

    def _begin(self) -> None:
        if not self._serves():
            self._put(None, asyncio.CancelledError())
            return
        self._task = spawn(self._run())
        self._task.add_done_callback(self._end)

    async def _run(self) -> tuple[R | None, BaseException | None]:
        try:
            with own_cancels_only():
                # The caller does not call `work` itself: here, code that needs a running loop finds one.
                return await self._work(), None
        except (SystemExit, KeyboardInterrupt) as e:  # raised by the task, it would end the loop, and so every call
            return None, e

    def _end(self, task: asyncio.Task[tuple[R | None, BaseException | None]]) -> None:
        # The task itself is for this thread alone. In the caller asyncio would note its end in a finalizer, and Python
        # drops what a signal handler raises there.
        self._task = None
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        self._put(*(task.result() if error is None else (None, error)))

    def _put(self, result: R | None, error: BaseException | None) -> None:
        self._done = True
        self._ended.put((result, error))
        self._tell()

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


class LoopThread:
    """A store on an event loop of a thread of its own.

    `open_store` makes the store, on the loop; its errors pass through. A call raises CallTimeout when it takes longer
    than `call_timeout_s` plus its own time within the store; Closed after `close`, or when `close` overtakes
    it; ConfigError on the loop's own thread, where it would wait for itself, and in a forked process: it has no loop.
    """

    def __init__(self, open_store: Callable[[], Awaitable[Any]], *, call_timeout_s: float) -> None:
        if isinstance(call_timeout_s, bool) or not isinstance(call_timeout_s, int | float) or not call_timeout_s > 0:
            raise ConfigError(f"call_timeout_s must be a number above 0, not {call_timeout_s!r}")
        self._timeout_s = min(call_timeout_s, _OWN_MAX_S)
        # No lock guards these: a signal handler's error at the beginning of a `with` would leave it held (Python 3.14).
        self._closing = self._stopped = False
        #: Counts the calls of `close`: of threads that come at once, one closes.
        self._closes = itertools.count()
        #: Whether the loop begins calls.
        self._serves = True
        #: Why the loop could not begin.
        self._unfit: RuntimeError | None = None
        self._process = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(LastingExecutor(thread_name_prefix="bufstore-blocking"))
        # A daemon: an interpreter that ends without `close` need not wait, because the log has what was acknowledged.
        self._thread = threading.Thread(target=self._serve, name="bufstore-blocking", daemon=True)
        try:
            self._thread.start()
            self._store = self._call(open_store, self._timeout_s)
        except BaseException:
            self._stop()
            raise

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._store!r})"

    def close(self) -> None:
        """Close the store and end the thread. Idempotent. The store drains what it can in `call_timeout_s`.

        Raises CallTimeout if that was not enough: the log has the rest.
        Does nothing in a forked process, because the store is its parent's, and nothing once the interpreter ends
        (`bufstore.at_exit`), because the loop runs no more; the log has what was acknowledged.
        """
        self._check_thread()
        if os.getpid() != self._process or exit_came():
            return
        self._closing = True  # before the count: a signal handler's error behind it leaves a store that takes no calls
        if next(self._closes):
            return
        try:
            self._call(self._store.aclose, self._timeout_s, closing=True)
        finally:
            self._stop()

    def _serve(self) -> None:
        loop = self._loop
        with held_at_exit(loop):
            try:
                try:
                    loop.run_forever()
                except RuntimeError as e:  # another loop runs in this thread
                    self._unfit = e
                    return
                except SystemExit:  # of a task of the app's; outside the main thread it ends the thread, and no more
                    pass
                self._serves = False
                until = loop.time() + _ENDS_S
                # A call that was given up gives back what it has, and may need the other tasks for that.
                self._wait((task for task in asyncio.all_tasks(loop) if task.cancelling()), until)
                left = asyncio.all_tasks(loop)
                for task in left:
                    task.cancel()
                self._wait(left, max(until, loop.time() + _LEAST_S))
                loop.run_until_complete(loop.shutdown_asyncgens())
            finally:
                self._stopped = True  # not `Thread.is_alive`: an error of a signal handler in it ends the thread for it
                loop.close()

    def _wait(self, tasks: Iterable[asyncio.Task[Any]], until: float) -> None:
        if ending := [*tasks]:
            self._loop.run_until_complete(asyncio.wait(ending, timeout=max(until - self._loop.time(), 0)))

    def _stop(self) -> None:
        self._closing = True
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(self._loop.stop)
        try:
            with contextlib.suppress(RuntimeError):  # it never began, or will find the loop stopped
                self._thread.join(self._timeout_s)
        finally:
            self._stopped = True

    def _call(self, work: Callable[[], Awaitable[R]], timeout_s: float | None, *, closing: bool = False) -> R:
        self._check_caller()
        call = Call(self._loop, work, lambda: self._serves)
        try:
            self._begin(call, closing=closing)
            return call.result(self._goes_on, timeout_s)
        except asyncio.CancelledError:
            raise self._over(_ENDED) from None
        finally:
            call.cancel()  # a call whose caller gave up (or was interrupted) ends, too

    async def _call_elsewhere(self, work: Callable[[], Awaitable[R]], timeout_s: float) -> R:
        """`_call`, for a caller on another loop, which goes on meanwhile."""
        self._check_caller()
        loop, told = asyncio.get_running_loop(), asyncio.Event()
        task = asyncio.current_task()
        cancels = task.cancelling() if task is not None else 0

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # the caller's loop is closed
                loop.call_soon_threadsafe(told.set)

        call = Call(self._loop, work, lambda: self._serves, tell)
        try:
            self._begin(call)
            return await call.result_elsewhere(told, self._goes_on, timeout_s)
        except asyncio.CancelledError:
            if task is not None and task.cancelling() > cancels:
                raise
            raise self._over(_ENDED) from None
        finally:
            call.cancel()

    def _check_caller(self) -> None:
        self._check_thread()
        if os.getpid() != self._process:
            raise ConfigError("a blocking store cannot be used after a fork: open one in each process")
        if exit_came():
            raise Closed("the interpreter is shutting down: use and close the store before that")

    def _goes_on(self) -> bool:
        return not (self._stopped or exit_came())

    def _begin(self, call: Call[Any], *, closing: bool = False) -> None:
        # A call that begins behind a `close` is refused by the store, or by the loop.
        if self._closing is not closing:
            raise Closed("the store is closed")
        try:
            call.begin()
        except RuntimeError:  # the loop was closed since
            raise self._over("the store is closed") from None

    def _over(self, why: str) -> BufstoreError:
        if self._unfit is None:
            return Closed(why)
        return ConfigError(
            f"no event loop can run here: {self._unfit}. (gevent runs all patched threads as one: in such a process "
            "only one blocking store can be open, and nothing else with an event loop.)"
        )

    def _check_thread(self) -> None:
        if threading.current_thread() is self._thread:
            raise ConfigError("a blocking store cannot be called from its own event-loop thread")


def own_time_s(timeout_s: object) -> float:
    """Return how long a call may wait within the store, by its `timeout_s`, before `call_timeout_s` begins to count."""
    return min(timeout_s, _OWN_MAX_S) if isinstance(timeout_s, int | float) and timeout_s > 0 else 0.0
