"""What a flusher did and where it stands, for monitoring."""

from __future__ import annotations

import logging
from dataclasses import dataclass

_log = logging.getLogger(__name__)


@dataclass
class FlusherState:
    """What the flusher did and where it stands; counters since the start."""

    running: bool = False
    partitions: tuple[int, ...] = ()
    transactions: int = 0
    entries: int = 0
    changes: int = 0
    parked: int = 0
    retries: int = 0
    takeovers: int = 0
    pending: int = 0
    #: Why nothing is flushed at the moment; empty when all is well.
    trouble: str = ""
    #: True when the trouble needs an operator.
    stopped: bool = False

    def report(self, error: BaseException, *, stopped: bool) -> None:
        """Note that nothing is flushed because of `error`; logged once."""
        text = f"{type(error).__name__}: {error}"
        if text != self.trouble:
            level = logging.ERROR if stopped else logging.WARNING
            _log.log(level, "cannot flush: %s", text, extra={"action": "flush_failed"})
        self.trouble, self.stopped = text, stopped

    def clear(self, waiting: str, *, stopped: bool = False) -> None:
        """Note that flushing goes on; `waiting` names the threads that wait, if any."""
        self.trouble, self.stopped = waiting, stopped
