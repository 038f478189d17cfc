"""A thread pool that still does its work while the interpreter ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class LastingExecutor(ThreadPoolExecutor):
    """When the main thread has ended, no pool takes work any more; then the caller's thread does it.

    An event loop looks up host names in its pool. Without one, a store that is used or closed after that (by a thread
    that goes on, or in an `atexit` handler) could not connect again.
    """

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        try:
            return super().submit(call, *args, **kwargs)
        except RuntimeError:
            if threading.main_thread().is_alive():
                raise  # the pool was shut down, or no thread could be started: its other threads may do the call, too
            done: Future[Any] = Future()
            try:
                done.set_result(call(*args, **kwargs))
            except Exception as e:
                done.set_exception(e)
            return done
