"""The event loop and the process in which something was opened, the only ones that may use it.

A forked process has copies of everything and shares the sockets with its parent, so that the reads and writes of the
two would mix. So the child lets go of the sockets, and uses nothing that its parent has opened.
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
FORKED = "a store cannot be used after a fork: open one in each process"


class Connected(Protocol):
    """Something with a socket."""

    def fileno(self) -> int:
        """Return the socket's descriptor. A negative number, or any error, means that there is no socket now."""


#: The connections of each process: of this one, and of those that it was forked off from.
_connected: dict[int, weakref.WeakSet[Connected]] = {}


def owned_here(connected: Connected) -> None:
    """Note a connection of this process, so that a forked process cuts its copy of the socket off."""
    _cut_off()
    _connected.setdefault(os.getpid(), weakref.WeakSet()).add(connected)


class Home:
    """The event loop that runs, and the process that it runs in, when this object is made."""

    __slots__ = ("_loop", "_process")

    def __init__(self) -> None:
        try:
            self._loop, self._process = asyncio.get_running_loop(), os.getpid()
        except RuntimeError:
            raise ConfigError("no asyncio event loop runs here (on trio: use a blocking store in a thread)") from None
        _cut_off()

    @property
    def left(self) -> bool:
        """Whether this process was forked off since: then everything that was opened belongs to its parent."""
        if self._process == os.getpid():
            return False
        _cut_off()
        return True

    def check(self) -> None:
        """Raise ConfigError in another process or on another loop, where what is kept for later calls would break."""
        # Every write asks this, so the usual case comes first and calls as little as it can.
        if self._process != os.getpid():
            _cut_off()
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


def _cut_off() -> None:
    """Let go of the sockets of the processes that this one was forked off from.

    A host in C that forks tells Python of it only if it is asked to (uWSGI: --py-call-osafterfork). So this is also
    called before anything of this process is connected, and when something of another is used.
    """
    others = [_connected.pop(process, ()) for process in list(_connected) if process != os.getpid()]
    theirs = [connected for each in others for connected in each]
    if not theirs:
        return
    # A socket without a peer replaces each of them: reads end, and writes fail. Closing the sockets instead would free
    # their numbers for later sockets, while the copies still use them. Shutting the sockets down would end the parent's
    # connections.
    ours, other = socket.socketpair()
    other.close()
    with ours:
        ours.setblocking(False)
        for connected in theirs:
            with suppress(Exception):
                if (number := connected.fileno()) >= 0:
                    os.dup2(ours.fileno(), number, inheritable=False)


os.register_at_fork(after_in_child=_cut_off)
