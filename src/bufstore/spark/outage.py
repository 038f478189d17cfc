"""An outage slows a query down, and does not end it: what failed is tried again until it gets through.

The log takes writes while Postgres is away, and a full log has room again when Postgres is back. A batch that failed
meanwhile would end the query, which somebody would have to start again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, wait_random_exponential

from bufstore.errors import (
    BufstoreError,
    Closed,
    FlushTimeout,
    LogFull,
    LogUnavailable,
    OutcomeUnknown,
    ReadNotFresh,
    StoreUnavailable,
    Unavailable,
)

_log = logging.getLogger(__name__)

T = TypeVar("T")

#: A server that is back is noticed within these seconds.
_PAUSE_MAX_S = 5.0
_SAY_EVERY_S = 30.0


def is_outage(error: BaseException, *, numbered: bool) -> bool:
    """Whether the same call may succeed later, and trying it again stores nothing twice.

    `numbered`: its rows carry numbers, so what may be stored already is recognized.
    """
    if isinstance(error, OutcomeUnknown):
        return numbered
    return isinstance(error, (Unavailable, LogFull, ReadNotFresh, FlushTimeout)) and not isinstance(error, Closed)


#: What a task tells the driver besides LogUnavailable.
_TOLD: tuple[type[BufstoreError], ...] = (LogFull, StoreUnavailable)


class GaveUp(msgspec.Struct, frozen=True):
    """The outage for which a task waited as long as it may, as it tells the driver.

    A task that fails is begun anew, four times by default, and each try would wait as long again.
    """

    error: str
    text: str

    @classmethod
    def of(cls, error: BufstoreError) -> GaveUp:
        kind = next((kind for kind in _TOLD if isinstance(error, kind)), LogUnavailable)
        return cls(kind.__name__, "; ".join([str(error), *getattr(error, "__notes__", ())]))

    def as_error(self) -> BufstoreError:
        """LogFull or StoreUnavailable, if it was that; else LogUnavailable."""
        kinds = {kind.__name__: kind for kind in _TOLD}
        return kinds.get(self.error, LogUnavailable)(self.text)


class Patience:
    """Tries again for as long as nothing gets through, up to a bound; one object for one batch or task."""

    def __init__(
        self, timeout_s: float, who: str, *, numbered: bool, stopped: Callable[[], bool] = lambda: False
    ) -> None:
        """`who`: what waits, for the log of the process. `stopped`: whether nobody waits for the outcome any more."""
        #: Seconds in which nothing got through.
        self.waited_s = 0.0
        self._timeout_s = timeout_s
        self._who = who
        self._numbered = numbered
        self._stopped = stopped
        #: When something got through last, or the first try began: that one may take long before it fails.
        self._through = float("-inf")
        #: Since when nothing gets through, and when that was said last.
        self._since: float | None = None
        self._said = float("-inf")

    async def until_through(self, work: Callable[[], Awaitable[T]]) -> T:
        """The result of `work`. Raises its error when it is no outage, or nothing got through for `timeout_s`."""
        retrying = AsyncRetrying(
            retry=retry_if_exception(lambda e: is_outage(e, numbered=self._numbered)),
            wait=wait_random_exponential(multiplier=0.25, max=_PAUSE_MAX_S),
            stop=self._is_over,
            before_sleep=self._say,
            reraise=True,
        )
        self._through = asyncio.get_running_loop().time()
        async for attempt in retrying:
            with attempt:
                found = await work()
        self.progressed()
        return found

    def progressed(self) -> None:
        """Something got through: the time begins anew."""
        self._through = asyncio.get_running_loop().time()
        if self._since is not None:
            waited = self._through - self._since
            self.waited_s += waited
            self._since = None
            self._said = float("-inf")
            _log.info("%s goes on after %.1f s", self._who, waited, extra={"action": "spark_outage"})

    def _is_over(self, state: RetryCallState) -> bool:
        now = asyncio.get_running_loop().time()
        self._since = self._since if self._since is not None else self._through
        over = now - self._since >= self._timeout_s or self._stopped()
        error = state.outcome.exception() if state.outcome is not None else None
        if over and error is not None:
            error.add_note(f"waited {now - self._since:.0f} s (outage_timeout_s is {self._timeout_s:.0f} s)")
        return over

    def _say(self, state: RetryCallState) -> None:
        now = asyncio.get_running_loop().time()
        if self._since is None or state.outcome is None or now - self._said < _SAY_EVERY_S:
            return
        self._said = now
        left = self._timeout_s - (now - self._since)
        _log.warning(
            "%s waits, and fails in %.0f s if nothing gets through: %s",
            self._who,
            left,
            state.outcome.exception(),
            extra={"action": "spark_outage"},
        )
