"""What a mailbox counts and times, for dashboards and alerts."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

_KEPT = 1000

#: Everything that is counted and timed. All start at 0: an alert must find a counter before its first event, too.
_COUNTED = (
    *("enqueued", "duplicates", "claimed", "claims_empty"),
    *("acked", "nacked", "dead_lettered", "cancelled", "superseded", "interrupted"),
    *("stale_claims", "reclaimed", "work_lost", "work_interrupted", "conflicts", "extended"),
    *("signals", "signals_nacked", "due_signalled", "resignalled"),
    *("live_delivered", "live_no_subscriber", "live_unknown"),
    *("sweeps", "sweep_failures", "purged"),
)
_TIMED = ("enqueue", "claim", "ack", "sweep", "live", "waited", "worked")


class Timing(msgspec.Struct, frozen=True):
    """How many durations there were, and how long the last thousand took, in milliseconds; 0 before the first."""

    count: int
    p50_ms: float
    p99_ms: float
    max_ms: float


class MailboxStatistics(msgspec.Struct, frozen=True):
    """A copy of the counters of one instance."""

    counts: dict[str, int]
    timings: dict[str, Timing]


class MailboxGauges(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a mailbox now; asking costs no scan. A value that the store cannot tell is None."""

    #: How long the oldest queued dispatch has been queued; in Postgres, how long the thread that waits longest waits.
    oldest_queued_s: float | None = None
    #: How long ago the lease that ran out first did so; above a sweep interval or two, nobody sweeps.
    oldest_lease_over_s: float | None = None
    #: Signals that no worker has yet; signals that a worker has, or that are delayed; those of the latter that came
    #: again.
    signals_waiting: int = 0
    signals_out: int | None = None
    signals_again: int | None = None
    #: How many bytes the bucket holds, and may hold (-1: no limit).
    bytes: int | None = None
    bytes_max: int | None = None


class Counters:
    """Counts since the start, and the last durations of each kind."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter(dict.fromkeys(_COUNTED, 0))
        self._took: Counter[str] = Counter(dict.fromkeys(_TIMED, 0))
        self._last: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_KEPT))

    def count(self, what: str, n: int = 1) -> None:
        self._counts[what] += n

    def took(self, what: str, seconds: float) -> None:
        """Note one duration."""
        self._took[what] += 1
        self._last[what].append(1000 * seconds)

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Note how long the block took, if it did not fail."""
        began = time.perf_counter()
        yield
        self.took(what, time.perf_counter() - began)

    def read(self) -> MailboxStatistics:
        """Return the counts and timings until now."""
        timings = {}
        for what, count in self._took.items():
            last = sorted(self._last[what]) or [0.0]
            timings[what] = Timing(count, last[len(last) // 2], last[int(len(last) * 0.99)], last[-1])
        return MailboxStatistics(dict(self._counts), timings)
