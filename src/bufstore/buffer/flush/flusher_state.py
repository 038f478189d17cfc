"""The counters and the present state of a flusher, for monitoring."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from bufstore.buffer.ports.ledger import FlushFailed
from bufstore.errors import LogRolledBack, StoreMisconfigured
from bufstore.log_lines import LogLines

_log = LogLines(__name__)


@dataclass
class FlusherState:
    """The counters of a flusher since its start, and its present state."""

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

    def report(self, error: Exception) -> None:
        """Note that nothing is flushed because of `error`, and log it once."""
        stopped = _needs_operator(error)
        text = f"{type(error).__name__}: {error}"
        if text != self.trouble:
            level = logging.ERROR if stopped else logging.WARNING
            _log.log(level, "cannot flush: %s", text, extra={"action": "flush_failed"})
        self.trouble, self.stopped = text, stopped

    def clear(self, waiting: str, *, stopped: bool) -> None:
        """Note that flushing goes on; `waiting` names the threads that wait, if any."""
        self.trouble, self.stopped = waiting, stopped


def _needs_operator(error: Exception) -> bool:
    if isinstance(error, FlushFailed):
        return error.verdict.needs_operator
    return isinstance(error, (StoreMisconfigured, LogRolledBack))


def state_of_all(lanes: Sequence[FlusherState]) -> FlusherState:
    """Combine the states of several lanes' flushers in one process: sums, and everything that is wrong.

    The result names no partitions, because each lane numbers its own from 0.
    """
    added = {f.name: sum(getattr(s, f.name) for s in lanes) for f in fields(FlusherState) if f.type == "int"}
    return FlusherState(
        **added,
        running=all(s.running for s in lanes),
        trouble=of_all([s.trouble for s in lanes]),
        stopped=any(s.stopped for s in lanes),
    )


def of_all(troubles: Sequence[str]) -> str:
    """Return what is wrong with the lanes, in one text that numbers them; empty if nothing is."""
    return "; ".join(f"lane {lane}: {trouble}" for lane, trouble in enumerate(troubles) if trouble)


def told_by_flushers(troubles: Mapping[str, str]) -> str:
    """Return what flushers report, by their names, in one text."""
    return "; ".join(f"flusher {member}: {why}" for member, why in troubles.items())
