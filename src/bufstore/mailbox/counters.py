"""What a mailbox counts and times, for dashboards and alerts."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

_KEPT = 1000


class Timing(msgspec.Struct, frozen=True):
    """Of the last thousand, in milliseconds."""

    count: int
    p50_ms: float
    p99_ms: float
    max_ms: float


class MailboxStatistics(msgspec.Struct, frozen=True):
    """A copy of the counters of one instance."""

    counts: dict[str, int]
    timings: dict[str, Timing]


class Counters:
    """Counts since the start, and the last durations of each kind."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._times: dict[str, tuple[Counter[str], deque[float]]] = {}

    def count(self, what: str, n: int = 1) -> None:
        self._counts[what] += n

    def took(self, what: str, seconds: float) -> None:
        """Note one duration."""
        total, last = self._times.setdefault(what, (Counter(), deque(maxlen=_KEPT)))
        total["n"] += 1
        last.append(1000 * seconds)

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Note how long the block took, if it did not fail."""
        began = time.perf_counter()
        yield
        self.took(what, time.perf_counter() - began)

    def read(self) -> MailboxStatistics:
        """What was counted until now."""
        timings = {}
        for what, (total, last) in self._times.items():
            ordered = sorted(last)
            timings[what] = Timing(
                total["n"], ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.99)], ordered[-1]
            )
        return MailboxStatistics(dict(self._counts), timings)
