"""Where something was opened, and alone may be used: on its event loop, and in its process.

A process that is forked off has copies of everything, and shares the sockets with its parent: what the one writes or
reads is in the way of the other's. So it lets go of them, and uses nothing that its parent has opened.
"""

from __future__ import annotations

import asyncio
import os
import socket
import weakref
from contextlib import suppress
from typing import Protocol

from bufstore.errors import ConfigError

#: What a call says in a process that was forked off.
FORKED = "a store does not outlive a fork: open one in each process"
#: How many forks lead from the process that imported this to the one that it is in now.
_forks = 0


class Connected(Protocol):
    """Something with a socket."""

    def fileno(self) -> int:
        """The socket. Negative, or any error, if there is none now."""


_connected: weakref.WeakSet[Connected] = weakref.WeakSet()


def owned_here(connected: Connected) -> None:
    """In a process that is forked off, its socket leads nowhere, and its end ends nothing."""
    _connected.add(connected)


class Home:
    """The running loop, in this process."""

    __slots__ = ("_forks", "_loop")

    def __init__(self) -> None:
        self._loop, self._forks = asyncio.get_running_loop(), _forks

    @property
    def left(self) -> bool:
        """Whether this is another process, forked off since: all that was opened is its parent's."""
        return self._forks != _forks

    def check(self) -> None:
        """Raise ConfigError elsewhere: what is kept for later calls belongs there, and would break."""
        if self._forks != _forks:
            raise ConfigError(FORKED)
        if asyncio.get_running_loop() is not self._loop:
            raise ConfigError("this store was opened on another event loop: use it there, or a blocking one")

    def closes_here(self) -> bool:
        """Whether this process closes it: that of which it was forked off does. Raises ConfigError on another loop."""
        if self.left:
            return False
        self.check()
        return True


def _forked() -> None:
    global _forks
    _forks += 1
    if not _connected:
        return
    # An end without another one: what is read ends, and what is written fails. Closing the sockets instead would have
    # later ones get their numbers, which the copies still use; shutting them down would end the parent's connections.
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
