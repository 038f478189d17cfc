"""Event loops in threads of their own, which are halted while the interpreter shuts down.

Python does not end daemon threads; it lets them run while it shuts down. What they then call may be gone:
uvloop's loop asks for a thread state that was freed, and the process, whose work is done, ends with SIGSEGV. OpenSSL
frees what a connection is using, in the same way.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

#: How long, in seconds, the interpreter waits for loops that are busy.
_BUSY_S = 2.0

#: The loops that run, each with the id of its process: a fork has its parent's loops, but not their threads.
_running: set[tuple[int, asyncio.AbstractEventLoop]] = set()
_came = threading.Event()


@contextmanager
def held_at_exit(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Run the loop in the block, in a daemon thread. It never returns once the interpreter ends.

    So nothing of the loop is taken apart while it is in use.
    """
    running = (os.getpid(), loop)
    _running.add(running)
    try:
        yield
    finally:
        _running.discard(running)


def exit_came() -> bool:
    """Return whether the interpreter ends, so that loops in threads of their own run nothing more."""
    return _came.is_set()


def _hold() -> None:
    _came.set()
    held = []
    for process, loop in tuple(_running):
        if process == os.getpid():
            with suppress(RuntimeError):  # the loop is closed
                stands = threading.Event()
                loop.call_soon_threadsafe(_stand_still, stands)
                held.append(stands)
    until = time.monotonic() + _BUSY_S
    for stands in held:
        stands.wait(max(0.0, until - time.monotonic()))


def _stand_still(stands: threading.Event) -> None:
    never = threading.Lock()
    never.acquire()
    stands.set()
    never.acquire()


# Handlers run in reverse order. So `bufstore` imports this module at once, and what the app registers later, such as a
# store's `close`, still finds the loops running.
atexit.register(_hold)
