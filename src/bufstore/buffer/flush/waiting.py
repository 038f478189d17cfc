"""Threads that have to wait: something about them fails, and the others go on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

#: A thread that fails waits this long, then twice as long each time, up to the maximum.
_FIRST_S = 0.25
_MAX_S = 8.0
_REASONS_SHOWN = 3


@dataclass
class _Wait:
    until: float
    pause: float
    tries: int
    reason: str
    #: The same for all threads that wait for the same thing.
    cause: str
    alone: bool


class Waiting:
    """Which threads wait, until when, and why. None stands for entries whose thread is unknown."""

    def __init__(self) -> None:
        self._waits: dict[str | None, _Wait] = {}
        #: Threads whose entries are not in memory: their time is not over before the entries are back.
        self.absent: set[str | None] = set()

    def __len__(self) -> int:
        return len(self._waits)

    def __contains__(self, thread_id: str | None) -> bool:
        return thread_id in self._waits

    def tries(self, thread_id: str | None) -> int:
        """How often the thread was told to wait since it last succeeded."""
        wait = self._waits.get(thread_id)
        return wait.tries if wait is not None else 0

    def cause(self, thread_id: str | None) -> str:
        """What the thread waits for, as given to `add`."""
        return self._waits[thread_id].cause

    def alone(self, thread_id: str | None) -> bool:
        """Whether to try the thread in a transaction of its own."""
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
        """Wait, each time longer, and behind those that wait already."""
        old = self._waits.pop(thread_id, None)
        pause = min(2 * old.pause if old else _FIRST_S, longest_s)
        self._waits[thread_id] = _Wait(now + pause, pause, old.tries + 1 if old else 1, reason, cause, alone)

    def postpone(self, cause: str, besides: Collection[str | None], now: float, until: float) -> None:
        """Let all but some of the due threads with this cause wait until then, without counting a try."""
        for thread_id, wait in self._waits.items():
            if wait.cause == cause and wait.until <= now and thread_id not in besides:
                wait.until = until

    def hurry(self, cause: str, now: float) -> None:
        """Make the threads with this cause due."""
        for wait in self._waits.values():
            if wait.cause == cause:
                wait.until = now

    def discard(self, thread_ids: Iterable[str | None]) -> None:
        """End the wait of these threads."""
        if self._waits:
            for thread_id in list(thread_ids):
                self._waits.pop(thread_id, None)

    def due(self, now: float) -> list[str | None]:
        """The threads whose time is over, in the order in which they were told to wait."""
        return [t for t, wait in self._waits.items() if wait.until <= now and t not in self.absent]

    def until(self, thread_id: str | None) -> float:
        """Until when it has to wait; 0 if it does not."""
        wait = self._waits.get(thread_id)
        return wait.until if wait is not None else 0.0

    def __iter__(self) -> Iterator[str | None]:
        return iter(self._waits)

    def soonest(self, otherwise: float) -> float:
        """When the next one is due."""
        return min((w.until for t, w in self._waits.items() if t not in self.absent), default=otherwise)

    def causes(self) -> Counter[str]:
        """How many wait for what."""
        return Counter(w.cause for w in self._waits.values())

    def trouble(self) -> str:
        """In words, the commonest reasons first, or nothing."""
        reasons = Counter(w.reason for w in self._waits.values()).most_common(_REASONS_SHOWN)
        return "; ".join(f"{count} threads have to wait: {reason}" for reason, count in reasons)
