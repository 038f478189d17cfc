"""The event loop and the process in which something was opened, the only ones that may use it.

A forked process has copies of everything and shares the sockets with its parent, so that the reads and writes of the
two would mix. So it lets go of the sockets, and uses nothing that its parent has opened.
"""

from __future__ import annotations

import asyncio
import os
import socket
import weakref
from contextlib import suppress
from typing import Protocol

from bufstore.errors import ConfigError

#: The message of the error that a call raises in a forked process.
FORKED = "a store does not outlive a fork: open one in each process"
#: The number of forks from the process that imported this module to the current process.
_forks = 0
#: The process that has counted them.
_counted_by = os.getpid()


class Connected(Protocol):
    """Something with a socket."""

    def fileno(self) -> int:
        """Return the socket's descriptor. A negative number, or any error, means that there is no socket now."""


_connected: weakref.WeakSet[Connected] = weakref.WeakSet()


def owned_here(connected: Connected) -> None:
    """Note a connection of this process, so that a forked process cuts its copy of the socket off."""
    _connected.add(connected)


class Home:
    """The event loop that runs, and the process that it runs in, when this object is made."""

    __slots__ = ("_forks", "_loop")

    def __init__(self) -> None:
        try:
            self._loop, self._forks = asyncio.get_running_loop(), _forks_here()
        except RuntimeError:
            raise ConfigError("no asyncio event loop runs here (on trio: use a blocking store in a thread)") from None

    @property
    def left(self) -> bool:
        """Whether this process was forked off since: then everything that was opened belongs to its parent."""
        return self._forks != _forks_here()

    def check(self) -> None:
        """Raise ConfigError in another process or on another loop, where what is kept for later calls would break."""
        if self.left:
            raise ConfigError(FORKED)
        if asyncio.get_running_loop() is not self._loop:
            raise ConfigError(
                "this store was opened on another event loop: use it on that loop, or use a blocking store"
            )

    def closes_here(self) -> bool:
        """Whether this process has to close what it uses; a forked one has not. Raises ConfigError on another loop."""
        if self.left:
            return False
        self.check()
        return True


def _forks_here() -> int:
    # A host in C that forks tells Python of it only if it is asked to (uWSGI: --py-call-osafterfork).
    if os.getpid() != _counted_by:
        _forked()
    return _forks


def _forked() -> None:
    global _forks, _counted_by
    _forks, _counted_by = _forks + 1, os.getpid()
    if not _connected:
        return
    # A socket without a peer replaces each of them: reads end, and writes fail. Closing the sockets instead would free
    # their numbers for later sockets, while the copies still use them. Shutting the sockets down would end the parent's
    # connections.
    ours, other = socket.socketpair()
    other.close()
    with ours:
        ours.setblocking(False)
        for connected in list(_connected):
            with suppress(Exception):
                if (theirs := connected.fileno()) >= 0:
                    os.dup2(ours.fileno(), theirs, inheritable=False)
    _connected.clear()


os.register_at_fork(after_in_child=_forked)
