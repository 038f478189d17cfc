"""Decides which flush has been stuck for so long that its process counts as frozen; see `PostgresLedger.take`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

#: The bytes per second that a process short of processor time works through, between two statements of a flush.
_BYTES_PER_S = 4 << 20


def idle_max(lease_s: float, size: int = 0) -> int:
    """Return for how many milliseconds a transaction may stand still: 2/3 of the lease, and time for `size` bytes.

    A frozen process must give its locks back within the lease. A process that decodes a large window on a busy machine
    is not frozen; without that time it would begin again and again.
    """
    return round(1000 * (lease_s * 2 / 3 + size / _BYTES_PER_S))


class OpenFlush(NamedTuple):
    """A flush transaction that has not ended; a row of the statement ``open_flushes``."""

    pid: int
    #: Names this transaction among all of the server.
    transaction: str
    role: str
    #: For how long it may stand still.
    may_s: float
    #: For how long it has stood still within a pipeline. 0: it goes on. None: another role's, and we may not see that.
    still_s: float | None
    #: Names its last statement within the transaction.
    statement: str = ""


class StandingStill:
    """Times flushes by the observer's own clock, too: Postgres' clock may be set back while one stands still."""

    def __init__(self) -> None:
        self._since: dict[tuple[int, str, str], float] = {}

    def timed(self, flushes: Sequence[OpenFlush], asked_at: float, answered_at: float) -> list[OpenFlush]:
        """Return the flushes with the longer of both times. When they were asked for: a monotonic clock, in seconds."""
        still = {(f.pid, f.transaction, f.statement): f.still_s for f in flushes if f.still_s}
        self._since = {key: self._since.get(key, answered_at) for key in still}
        longer = {key: max(still_s, asked_at - self._since[key]) for key, still_s in still.items()}
        return [f._replace(still_s=longer.get((f.pid, f.transaction, f.statement), f.still_s)) for f in flushes]


def is_frozen(flush: OpenFlush) -> bool:
    """Return whether a flush is known to have stood still for longer than it may."""
    return flush.still_s is not None and flush.still_s > flush.may_s


def may_be_frozen(flush: OpenFlush, held_s: float) -> bool:
    """Return whether a flush that we cannot look at may be frozen. `held_s`: for how long we have found rows held."""
    return flush.still_s is None and held_s > flush.may_s
