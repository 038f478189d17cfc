"""Decides whether a refusal of the store is the fault of the entries, or of something that concerns all threads.

A new NOT NULL column makes the store refuse every thread; a value that a column does not accept, only its own thread.
So the threads that are refused for one reason are compared with the threads from which the store has taken something
since: while more are refused than taken, no entry is to blame. Where little is written, threads come one at a time; so
a thread that was parked for the reason still counts until the store has taken something after it. No I/O and no clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

#: Fewer threads than this may be refused for one reason by chance.
THREADS_MIN = 3
#: Entries that the store took more than this many seconds ago say nothing about its present state.
_FRESH_S = 300.0


@dataclass
class _Case:
    """One reason for which threads are refused."""

    refused: set[str] = field(default_factory=set)
    #: Threads parked for this reason, each until something else is taken; at most as many as chance may explain.
    parked: set[str] = field(default_factory=set)
    #: Threads of which the store took something since the first refusal, and when; at most as many as are needed.
    taken: dict[str, float] = field(default_factory=dict)
    most: int = 0
    at_least: int = THREADS_MIN
    last: float = 0.0

    @property
    def against(self) -> int:
        """How many threads are evidence that the reason concerns everybody."""
        return len(self.refused | self.parked)


class Blame:
    """Counts the threads that are refused and taken, by reason."""

    def __init__(self) -> None:
        self._cases: dict[str, _Case] = {}

    def refused(self, thread_id: str, cause: str, now: float, *, at_least: int = THREADS_MIN) -> None:
        """Note that the store refuses the thread for this reason; from `at_least` threads on it may be everybody's."""
        case = self._cases.setdefault(cause, _Case())
        case.refused.add(thread_id)
        case.at_least = at_least
        case.most, case.last = max(case.most, case.against), now

    def parked(self, thread_id: str, cause: str) -> None:
        """Note that the thread's entry, refused for this reason, is blamed and parked."""
        case = self._cases[cause]
        if len(case.parked) < THREADS_MIN - 1:
            case.parked.add(thread_id)

    def taken(self, thread_ids: Iterable[str], now: float) -> None:
        """Note that the store has taken entries of these threads."""
        if not self._cases:
            return
        thread_ids = list(thread_ids)
        for cause, case in list(self._cases.items()):
            for thread_id in thread_ids:
                if case.parked:
                    case.parked.pop()
                if thread_id in case.taken or len(case.taken) < case.most:
                    case.taken[thread_id] = now
            if not case.refused and now - case.last > _FRESH_S:
                del self._cases[cause]

    def settled(self, thread_ids: Iterable[str | None]) -> None:
        """Note that no entry of these threads is refused any more: all were taken or parked, or have another owner."""
        if self._cases:
            gone = set(thread_ids)
            for case in self._cases.values():
                case.refused -= gone

    def everybodys(self, cause: str, now: float) -> bool:
        """Return whether enough threads are refused for this reason, and more than the store has taken since."""
        case = self._cases.get(cause)
        if case is None or not case.refused or case.against < case.at_least:
            return False
        case.taken = {t: at for t, at in case.taken.items() if now - at <= _FRESH_S}
        return case.against > len(case.taken)
