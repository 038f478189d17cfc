"""Whether a refusal of the store is the fault of the entries, or of something that concerns all threads.

A new NOT NULL column refuses every thread; a value that a column does not accept refuses only its own thread. So the
threads that are refused for one reason are compared with the threads of which the store took something since: while
more are refused than taken, no entry is to blame. Where little is written, threads come one at a time; so a thread that
was parked for the reason still counts, until the store has taken something in its place. No I/O and no clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

#: Fewer threads than this may be refused for one reason by chance.
THREADS_MIN = 3
#: What the store took longer ago says nothing about its present state.
_FRESH_S = 300.0


@dataclass
class _Case:
    """One reason for which threads are refused."""

    refused: set[str] = field(default_factory=set)
    #: Threads parked for this reason, each until something else is taken; no more than chance may explain.
    parked: set[str] = field(default_factory=set)
    #: Threads of which the store took something since the first refusal, and when; no more than are needed.
    taken: dict[str, float] = field(default_factory=dict)
    most: int = 0
    at_least: int = THREADS_MIN
    last: float = 0.0

    @property
    def against(self) -> int:
        """How many threads are evidence that the reason concerns everybody."""
        return len(self.refused | self.parked)


class Blame:
    """What is refused and what is taken, by reason."""

    def __init__(self) -> None:
        self._cases: dict[str, _Case] = {}

    def refused(self, thread_id: str, cause: str, now: float, *, at_least: int = THREADS_MIN) -> None:
        """The store refuses the thread's entries for this reason, which may be everybody's from so many threads on."""
        case = self._cases.setdefault(cause, _Case())
        case.refused.add(thread_id)
        case.at_least = at_least
        case.most, case.last = max(case.most, case.against), now

    def parked(self, thread_id: str, cause: str) -> None:
        """The thread's entry, refused for this reason, is held to be at fault."""
        case = self._cases[cause]
        if len(case.parked) < THREADS_MIN - 1:
            case.parked.add(thread_id)

    def taken(self, thread_ids: Iterable[str], now: float) -> None:
        """The store has taken entries of these threads."""
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
        """Nothing of these threads is refused any more: it was taken or parked, or has another owner."""
        if self._cases:
            gone = set(thread_ids)
            for case in self._cases.values():
                case.refused -= gone

    def everybodys(self, cause: str, now: float) -> bool:
        """Whether enough threads are refused for this, and more than the store took since."""
        case = self._cases.get(cause)
        if case is None or not case.refused or case.against < case.at_least:
            return False
        case.taken = {t: at for t, at in case.taken.items() if now - at <= _FRESH_S}
        return case.against > len(case.taken)
