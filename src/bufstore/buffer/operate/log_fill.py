"""How much space the log has, and for how long: its unflushed part, and how fast that grows."""

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
from bufstore.tasks import end, spawn

#: A look is compared with one of at most, and if possible at least, this long ago.
_REMEMBERED_S = 120.0
_APART_S = 5.0
_APART_MIN_S = 1.0
#: A flusher that keeps up has no more unflushed than is written in this time: one window gathers while another commits.
_KEEPS_UP_S = 5.0
#: One explanation serves all writes that the log refuses within this time.
_EXPLAINED_S = 1.0
_EXPLAINING_S = 1.0


class LogFill(NamedTuple):
    """A look at the log."""

    #: When, by the clock of the event loop.
    at: float
    held: Held

    @property
    def unflushed(self) -> int:
        """About how many bytes are not flushed."""
        return self.held.above_bytes


def full_in_s(earlier: Iterable[LogFill], now: LogFill) -> float | None:
    """In how many seconds the log is full if the unflushed part keeps growing as it did; None when it does not grow.

    It takes at least that long: flushed entries may make space until then. `earlier`: looks, the oldest first.
    """
    known = [fill for fill in earlier if _APART_MIN_S <= now.at - fill.at <= _REMEMBERED_S]
    if not known:
        return None
    # The newest that is not too new: old looks hide the present rate.
    before = next((fill for fill in reversed(known) if now.at - fill.at >= _APART_S), known[0])
    apart = now.at - before.at
    rate = (now.unflushed - before.unflushed) / apart
    written = (now.held.seen - before.held.seen) / apart
    if rate <= 0 or now.held.above.total() <= _KEEPS_UP_S * written:
        return None
    return max(0, now.held.limit - now.held.bytes) / rate


def why_full(said: str, fill: LogFill) -> str:
    """What the server said of a full log, what is in the log, and what to do."""
    flushed = fill.held.bytes - fill.unflushed
    held = f"{said}: it holds {fill.held.bytes} of {fill.held.limit} bytes, about {fill.unflushed} of them not flushed"
    if fill.unflushed >= flushed:
        return (
            f"{held}; slow down and retry later, see `bufstore status` and health() for why they are not, "
            "or raise LogConfig.max_bytes"
        )
    return (
        f"{held}; the others are flushed, and stay for LogConfig.failover_window_s after it, until they are archived "
        "(LogConfig.archive), and while their partitions have no flusher that reaches Postgres: see `bufstore status`, "
        "retry later, or raise LogConfig.max_bytes"
    )


async def look(log: Log, shared: SharedState, flushed: Mapping[int, int]) -> LogFill:
    """Look at the log. `flushed`: how far partitions are known to be flushed; progress reports tell more.

    Asks NATS only. Raises LogUnavailable.
    """
    reports = await shared.progress()
    held = await log.held({p: max(flushed.get(p, 0), reports.get(p, 0)) for p in {*flushed, *reports}})
    return LogFill(asyncio.get_running_loop().time(), held)


class FillForecast:
    """Looks at one log, and remembers them for a while."""

    def __init__(self, look: Callable[[], Coroutine[Any, Any, LogFill]]) -> None:
        self._look = look
        self._earlier: deque[LogFill] = deque()
        self._explaining: asyncio.Task[LogFill] | None = None
        self._explained_at = 0.0

    async def now(self) -> tuple[LogFill, float | None]:
        """The space left, and in how many seconds there is none; None: unknown, or never at this rate.

        Growth is seen between calls, of up to two minutes ago. Raises LogUnavailable.
        """
        fill = await self._look()
        full = full_in_s(self._earlier, fill)
        while self._earlier and fill.at - self._earlier[0].at > _REMEMBERED_S:
            self._earlier.popleft()
        if not self._earlier or fill.at - self._earlier[-1].at >= _APART_MIN_S:
            self._earlier.append(fill)
        return fill, full

    async def measured(self) -> tuple[LogFill, float | None]:
        """The same for a caller that looks once: if something is not flushed, look again a second later."""
        fill, full = await self.now()
        if fill.unflushed:
            await asyncio.sleep(_APART_MIN_S)
            fill, full = await self.now()
        return fill, full

    async def explain(self, error: LogFull) -> LogFull:
        """The same error with what fills the log added; unchanged when the log does not tell in time."""
        task = self._explaining
        now = asyncio.get_running_loop().time()
        if task is None or (task.done() and now - self._explained_at > _EXPLAINED_S):
            task = self._explaining = spawn(self._look(), name="bufstore-why-full")
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # or nobody looks at it
            self._explained_at = now
        with contextlib.suppress(TimeoutError, BufstoreError):
            async with asyncio.timeout(_EXPLAINING_S):
                return type(error)(why_full(str(error), await asyncio.shield(task)))
        return error

    async def aclose(self) -> None:
        """Look no more."""
        await end(self._explaining)
