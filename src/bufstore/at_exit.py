"""Event loops in threads of their own, which stand still while the interpreter ends.

Python does not end daemon threads; it lets them run while it takes itself apart. What they then call may be gone:
uvloop's loop asks for a thread state that was freed, and the process, whose work is done, ends with SIGSEGV. OpenSSL
frees what a connection is using, in the same way.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from contextlib import suppress

#: How long, in seconds, the interpreter waits for a loop that is busy.
_BUSY_S = 2.0

#: The loops that run, each with the id of its process: a fork has its parent's loops, but not their threads.
_running: set[tuple[int, asyncio.AbstractEventLoop]] = set()
_came = threading.Event()


def run_until_exit(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop in this thread, a daemon, until the loop is stopped or the interpreter ends.

    In the second case this never returns, so that nothing of the loop is taken apart while it is in use.
    """
    running = (os.getpid(), loop)
    _running.add(running)
    try:
        loop.run_forever()
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
    for stands in held:
        stands.wait(_BUSY_S)


def _stand_still(stands: threading.Event) -> None:
    never = threading.Lock()
    never.acquire()
    stands.set()
    never.acquire()


# Handlers run in reverse order: what the app registers after its imports, such as a store's `close`, still finds the
# loops running.
atexit.register(_hold)
