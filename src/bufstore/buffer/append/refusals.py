"""Why the log refused a write lately: for health, and for the caller of that write."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from bufstore.errors import ConfigError, LogFull
from bufstore.jetstream.errors import StorageFull, TooManyMessages

#: How long a log counts as one that takes no writes after it refused one for lack of space, or of a right.
_REFUSED_FOR_S = 10.0


class Refusals:
    """Remembers the last refusal, until an entry is appended."""

    def __init__(self, explain: Callable[[LogFull], Awaitable[LogFull]] | None) -> None:
        """`explain`: says more of a full log than the server does."""
        self._explain = explain
        self._loop = asyncio.get_running_loop()
        #: When the log last refused a write, how many entries had been appended by then, and why.
        self._last = (float("-inf"), 0, "")

    def note(self, why: str, appended: int) -> None:
        """Note that the log refused a write. `appended`: how many entries it has taken so far."""
        self._last = self._loop.time(), appended, why

    def look(self, error: Exception, appended: int) -> None:
        """Note it if the log refused something that a write needs. `appended`: see `note`."""
        if isinstance(error, ConfigError):  # of the log: what a caller got wrong ends before the log is asked
            self.note(str(error), appended)

    def lately(self, appended: int) -> str:
        """Why the log refused the last write, if that was not long ago; else empty. `appended`: see `note`."""
        at, before, why = self._last
        return why if before == appended and self._loop.time() - at < _REFUSED_FOR_S else ""

    async def explained(self, error: LogFull, appended: int) -> LogFull:
        """Note this refusal, and return the error that says most about it."""
        elsewhere = isinstance(error, (StorageFull, TooManyMessages))  # then the bytes in the log explain nothing
        self.note(str(error) if elsewhere else "the log is full: it has just refused a write", appended)
        return error if elsewhere or self._explain is None else await self._explain(error)
