"""Computes how much space the log has and for how long it lasts, from its unflushed part and how fast that grows."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, NamedTuple

from bufstore.buffer.ports.log import Log
from bufstore.buffer.ports.shared_state import SharedState
from bufstore.errors import BufstoreError, LogFull
from bufstore.jetstream.messages import Held
from bufstore.tasks import end, outlasted, see_error, spawn

#: The ages, in seconds, of the look that a look is compared with: the highest, the lowest if possible, and the lowest.
_REMEMBERED_S = 120.0
_APART_S = 5.0
_APART_MIN_S = 1.0
#: When flushers keep up, no more is unflushed than is written in this many seconds: one window gathers while another
#: commits.
_KEEPS_UP_S = 5.0
#: One explanation serves all writes that the log refuses within this many seconds.
_EXPLAINED_S = 1.0
_EXPLAINING_S = 1.0


class LogFill(NamedTuple):
    """The result of a look at the log."""

    #: The time of the look, by the clock of the event loop.
    at: float
    held: Held

    @property
    def unflushed(self) -> int:
        """About how many bytes of the log are not flushed."""
        return self.held.above_bytes


def full_in_s(earlier: Iterable[LogFill], now: LogFill) -> float | None:
    """Return in how many seconds the log is full if its unflushed part goes on growing; None if it does not grow.

    This is the shortest time: flushed entries may make space until then. `earlier`: earlier looks, the oldest first.
    """
    known = [fill for fill in earlier if _APART_MIN_S <= now.at - fill.at <= _REMEMBERED_S]
    if not known:
        return None
    # Compare with the newest look that is not too new: older looks would hide the present rate.
    before = next((fill for fill in reversed(known) if now.at - fill.at >= _APART_S), known[0])
    apart = now.at - before.at
    rate = (now.unflushed - before.unflushed) / apart
    written = (now.held.seen - before.held.seen) / apart
    if rate <= 0 or now.held.above.total() <= _KEEPS_UP_S * written:
        return None
    return max(0, now.held.limit - now.held.bytes) / rate


def why_full(said: str, fill: LogFill) -> str:
    """Return a text that says what the server said of a full log, what is in the log, and what to do."""
    flushed = fill.held.bytes - fill.unflushed
    held = f"{said}: it holds {fill.held.bytes} of {fill.held.limit} bytes, about {fill.unflushed} of them not flushed"
    if fill.unflushed >= flushed:
        return (
            f"{held}; slow down and retry later, or raise LogConfig.max_bytes; `bufstore status` and health() say why "
            "these bytes are not flushed"
        )
    return (
        f"{held}; the rest is flushed, but stays in the log for LogConfig.failover_window_s after the flush, until it "
        "is archived (if LogConfig.archive is set), and as long as no flusher of its partition reaches Postgres: see "
        "`bufstore status`, retry later, or raise LogConfig.max_bytes"
    )


async def look(log: Log, shared: SharedState, flushed: Mapping[int, int]) -> LogFill:
    """Look at the log. `flushed`: the positions up to which partitions are known to be flushed; reports may tell more.

    Asks NATS only. Raises LogUnavailable.
    """
    reports = await shared.progress()
    held = await log.held({p: max(flushed.get(p, 0), reports.get(p, 0)) for p in {*flushed, *reports}})
    return LogFill(asyncio.get_running_loop().time(), held)


class FillForecast:
    """Looks at one log, and remembers the looks for a while."""

    def __init__(self, look: Callable[[], Coroutine[Any, Any, LogFill]]) -> None:
        self._look = look
        self._earlier: deque[LogFill] = deque()
        self._explaining: asyncio.Task[LogFill] | None = None
        self._explained_at = 0.0

    async def now(self) -> tuple[LogFill, float | None]:
        """Look at the log, and return in how many seconds it is full; None: unknown, or never at this rate.

        Growth is measured since an earlier call, at most two minutes ago. Raises LogUnavailable.
        """
        fill = await self._look()
        full = full_in_s(self._earlier, fill)
        while self._earlier and fill.at - self._earlier[0].at > _REMEMBERED_S:
            self._earlier.popleft()
        if not self._earlier or fill.at - self._earlier[-1].at >= _APART_MIN_S:
            self._earlier.append(fill)
        return fill, full

    async def measured(self) -> tuple[LogFill, float | None]:
        """As `now`, for a caller that looks only once: if something is not flushed, look again a second later."""
        fill, full = await self.now()
        if fill.unflushed:
            await asyncio.sleep(_APART_MIN_S)
            fill, full = await self.now()
        return fill, full

    async def explain(self, error: LogFull) -> LogFull:
        """Return the error with a text that says what fills the log; unchanged when the log does not answer in time."""
        task = self._explaining
        now = asyncio.get_running_loop().time()
        if task is None or (task.done() and now - self._explained_at > _EXPLAINED_S):
            task = self._explaining = spawn(self._look(), name="bufstore-why-full")
            task.add_done_callback(see_error)
            self._explained_at = now
        with contextlib.suppress(TimeoutError, BufstoreError):
            async with asyncio.timeout(_EXPLAINING_S):
                return type(error)(why_full(str(error), await outlasted(task)))
        return error

    async def aclose(self) -> None:
        """Stop looking at the log."""
        await end(self._explaining)
