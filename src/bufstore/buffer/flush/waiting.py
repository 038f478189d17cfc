"""The threads that have to wait, because something about them fails, while the others go on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

#: A thread that fails waits this many seconds, then twice as long each time, up to the maximum.
_FIRST_S = 0.25
_MAX_S = 8.0
_REASONS_SHOWN = 3


@dataclass
class _Wait:
    since: float
    until: float
    pause: float
    tries: int
    reason: str
    #: The cause, which is the same text for all threads that wait for the same thing.
    cause: str
    alone: bool


class Waiting:
    """Knows which threads wait, until when, and why. None stands for entries whose thread is unknown."""

    def __init__(self) -> None:
        self._waits: dict[str | None, _Wait] = {}
        #: A time before which no thread is due.
        self._not_before = float("-inf")

    def __len__(self) -> int:
        return len(self._waits)

    def __contains__(self, thread_id: str | None) -> bool:
        return thread_id in self._waits

    def tries(self, thread_id: str | None) -> int:
        """Return how often the thread was told to wait since it last succeeded."""
        wait = self._waits.get(thread_id)
        return wait.tries if wait is not None else 0

    def since(self, thread_id: str | None) -> float:
        """Return the time since which the thread waits."""
        return self._waits[thread_id].since

    def cause(self, thread_id: str | None) -> str:
        """Return the thread's cause, as given to `add`; empty once some of its waiting entries were settled."""
        return self._waits[thread_id].cause

    def reason(self, thread_id: str | None) -> str:
        """Return the reason for which this thread waits, in words."""
        return self._waits[thread_id].reason

    def alone(self, thread_id: str | None) -> bool:
        """Return whether to try the thread in a transaction of its own."""
        return self._waits[thread_id].alone

    def add(
        self,
        thread_id: str | None,
        reason: str,
        now: float,
        *,
        cause: str = "",
        alone: bool = False,
        longest_s: float = _MAX_S,
    ) -> None:
        """Make the thread wait, longer each time, and behind the threads that wait already."""
        old = self._waits.pop(thread_id, None)
        pause = min(2 * old.pause if old else _FIRST_S, longest_s)
        since, tries = (old.since, old.tries) if old else (now, 0)
        self._waits[thread_id] = _Wait(since, now + pause, pause, tries + 1, reason, cause, alone)
        self._not_before = min(self._not_before, now + pause)

    def postpone(self, cause: str, besides: Collection[str | None], now: float, until: float) -> None:
        """Make all due threads with this cause, except `besides`, wait until then, without counting a try."""
        for thread_id, wait in self._waits.items():
            if wait.cause == cause and wait.until <= now and thread_id not in besides:
                wait.until = until

    def postpone_alone(self, until: float) -> None:
        """Make all threads that are tried alone wait at least until then, without counting a try."""
        for wait in self._waits.values():
            if wait.alone:
                wait.until = max(wait.until, until)

    def hurry(self, cause: str, now: float) -> None:
        """Make the threads with this cause due."""
        self._not_before = min(self._not_before, now)
        for wait in self._waits.values():
            if wait.cause == cause:
                wait.until = now

    def discard(self, thread_ids: Iterable[str | None]) -> None:
        """End the wait of these threads."""
        if self._waits:
            for thread_id in list(thread_ids):
                self._waits.pop(thread_id, None)

    def progress(self, thread_ids: Iterable[str | None], now: float) -> None:
        """Make these threads due, because some of their waiting entries were settled.

        Their next failure counts as the first. What they waited for is over, so they no longer have its cause.
        """
        self._not_before = min(self._not_before, now)
        for thread_id in thread_ids:
            old = self._waits.pop(thread_id)
            self._waits[thread_id] = _Wait(now, now, _FIRST_S / 2, 0, old.reason, cause="", alone=False)

    def due(self, now: float) -> list[str | None]:
        """Return the threads whose wait is over, in the order in which they were told to wait."""
        return [t for t, wait in self._waits.items() if wait.until <= now]

    def soonest(self, now: float) -> float:
        """Return when to look for due threads, no later than the first is due. Cheap, because very many may wait."""
        if self._not_before <= now:
            self._not_before = min((w.until for w in self._waits.values()), default=float("inf"))
        return self._not_before

    def causes(self) -> Counter[str]:
        """Return how many threads wait for each cause."""
        return Counter(w.cause for w in self._waits.values())

    def trouble(self) -> str:
        """Return the reasons in words, the most common first; empty if no thread waits."""
        reasons = Counter(w.reason for w in self._waits.values()).most_common(_REASONS_SHOWN)
        return "; ".join(
            f"{count} {'thread has' if count == 1 else 'threads have'} to wait: {reason}" for reason, count in reasons
        )
