"""The end of a statement whose time is over: it is cancelled, or else its connection is ended."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import psycopg
from psycopg import AsyncConnection

from bufstore.tasks import spawn

#: After the end of a call's time: how long answers that have arrived are still read, and in how many steps.
_READ_S, _READ_STEPS = 0.05, 10
#: After that: how long the cancel request may take, at least and at most, and then how long the statement to end.
_GRACE_S, _CANCEL_MAX_S = 0.25, 1.0


def cancel_time_s(connected_in_s: float) -> float:
    """Return how long a cancel request may take, where making the connection took so long.

    The request has a connection of its own. It makes at most as many round trips as the connection made: as many where
    the login takes none, as with trust, or with a client's certificate over TLS 1.3. So it has more time than that,
    unless that was a second or more, or a link that is a little slower by now would decide. If it were given up too
    early, the statement would go on in the server, with its locks.
    """
    return max(_GRACE_S, min(connected_in_s + _GRACE_S, _CANCEL_MAX_S))


class Alarm:
    """Ends the connection's statement when its time is over.

    It does not cancel our task: psycopg would then wait for the server up to ten seconds. And a statement that the
    server ends with an error certainly did nothing, but an abandoned one may have done its work. A statement that ends
    without an error after the cancel request says nothing: a commit that waits for a synchronous standby, and is
    cancelled, counts as done on this server alone.

    On a loop that stood still past the deadline, the answer may have come in time: it is read first.
    """

    def __init__(
        self,
        connection: AsyncConnection[Any],
        deadline: float,
        limit: asyncio.Timeout | None = None,
        connected_in_s: float = 0.0,
    ) -> None:
        """`limit` ends the block if it goes on although its statement was ended.

        `connected_in_s`: how long it took to make the connection, if that is known.
        """
        self._connection = connection
        self._limit, self._cancel_s = limit, cancel_time_s(connected_in_s)
        self._timer = asyncio.get_running_loop().call_at(deadline, self._ring)
        self._task: asyncio.Task[None] | None = None
        #: Whether a cancel request was sent: a statement that ends without an error after that says nothing.
        self.rung = False

    def ring_in(self, seconds: float) -> None:
        """Ring in so many seconds, unless the alarm has rung."""
        if self._task is None:
            self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_later(seconds, self._ring)

    def off(self) -> bool:
        """Disarm the alarm; return whether it has rung."""
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
        return self.rung

    def _ring(self) -> None:
        self._task = spawn(self._end())
        if self._limit is not None:
            # Counted from now, and not from the deadline: a loop that stood still has yet to read.
            self._limit.reschedule(asyncio.get_running_loop().time() + self._cancel_s + 2 * _GRACE_S)

    async def _end(self) -> None:
        # A commit may follow what is read, and be answered at once. Read in steps: the loop may stand still again.
        for _ in range(_READ_STEPS):
            await asyncio.sleep(_READ_S / _READ_STEPS)
        self.rung = True
        with suppress(psycopg.Error):
            await self._connection.cancel_safe(timeout=self._cancel_s)
            await asyncio.sleep(_GRACE_S)
        # The server is gone, or too busy to cancel: hang up, which wakes psycopg at once.
        with suppress(OSError, psycopg.Error):
            connected = socket.socket(fileno=os.dup(self._connection.pgconn.socket))
            with connected:
                connected.shutdown(socket.SHUT_RDWR)


@asynccontextmanager
async def in_time(connection: AsyncConnection[Any], seconds: float) -> AsyncIterator[None]:
    """End the block's statement within the time, or the connection; a cancelled psycopg may wait for long."""
    alarm = Alarm(connection, asyncio.get_running_loop().time() + seconds)
    try:
        yield
    finally:
        if alarm.off():
            await connection.close()
