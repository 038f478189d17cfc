"""An outage slows a query down, but does not end it: a call that failed is tried again until it gets through.

The log takes writes while Postgres is away, and a full log has room again when Postgres is back. A batch that failed
meanwhile would end the query, and somebody would have to start it again.
"""

from __future__ import annotations

import asyncio
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
from bufstore.log_lines import LogLines

_log = LogLines(__name__)

T = TypeVar("T")

#: The longest pause between two tries, in seconds: a server that is back is noticed within this time.
_PAUSE_MAX_S = 5.0
_SAY_EVERY_S = 30.0


def is_outage(error: BaseException, *, numbered: bool) -> bool:
    """Return whether the same call may succeed later, and trying it again stores nothing twice.

    `numbered`: the call's rows carry numbers, so rows that may already be stored are recognized.
    """
    if isinstance(error, OutcomeUnknown):
        return numbered
    return isinstance(error, (Unavailable, LogFull, ReadNotFresh, FlushTimeout)) and not isinstance(error, Closed)


#: The errors that a task reports to the driver as what they are; every other outage is reported as LogUnavailable.
_TOLD: tuple[type[BufstoreError], ...] = (LogFull, StoreUnavailable)


class GaveUp(msgspec.Struct, frozen=True):
    """The outage for which a task waited as long as it may, in the form in which the task reports it to the driver.

    The task does not fail: Spark would try it again, four times by default, and each try would wait as long again.
    """

    error: str
    text: str

    @classmethod
    def of(cls, error: BufstoreError) -> GaveUp:
        kind = next((kind for kind in _TOLD if isinstance(error, kind)), LogUnavailable)
        return cls(kind.__name__, "; ".join([str(error), *getattr(error, "__notes__", ())]))

    def as_error(self) -> BufstoreError:
        """Return the outage as LogFull or StoreUnavailable, if it was one of these; else as LogUnavailable."""
        kinds = {kind.__name__: kind for kind in _TOLD}
        return kinds.get(self.error, LogUnavailable)(self.text)


class Patience:
    """Tries again while nothing gets through, up to a time limit; one object for one batch or task."""

    def __init__(
        self, timeout_s: float, who: str, *, numbered: bool, stopped: Callable[[], bool] = lambda: False
    ) -> None:
        """`who`: the name of the batch or task, for log lines. `stopped`: whether nobody waits for the outcome."""
        #: The seconds in which nothing got through, in all.
        self.waited_s = 0.0
        self._timeout_s = timeout_s
        self._who = who
        self._numbered = numbered
        self._stopped = stopped
        #: When something last got through, or when the first try began, which may take long before it fails.
        self._through = float("-inf")
        #: When the present outage began (None: there is none), and when a log line last reported it.
        self._since: float | None = None
        self._said = float("-inf")

    async def until_through(self, work: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `work`. Raises its error if it is no outage, or nothing gets through for `timeout_s`."""
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
        """Note that something got through: the time limit starts again."""
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
