"""Notes when a partition's cursor passed which position, and decides which entries may leave the log. No I/O, no clock.

Why Postgres has to confirm. A commit counts from when it was made, not from when its entries were written: a Postgres
that fails over may lose its last commits, those of its last `failover_window_s`, and then needs their entries again.
It may be away for any time before it comes back without them. So the age of a commit does not count. What counts is by
how much the commit is older than the last look that saw Postgres with it.

What a confirmation is good for. We asked Postgres at C, and its cursor had passed the commit made at T. So it was still
there at C, and any copy of it that takes over has everything that was committed before
C - failover_window_s. If T is earlier than that, the commit is in Postgres for good: its entries may go at any time
after C, even while Postgres is away, without asking again. A later failover changes nothing: its copy is one
of a Postgres that has the commit. Entries committed after C - failover_window_s stay until a later confirmation. So
entries that go were committed at least `failover_window_s` ago by the clock, which writers and readers rely on.

A new owner of a partition starts over: whatever it finds flushed counts as committed when it took the partition. So
Postgres is asked regularly, needed or not, and confirmed entries can go when the space is needed.
"""

from __future__ import annotations

from bisect import bisect_right

#: Commits closer together than this fraction of their age may be merged.
_PRECISION = 0.01
_THIN_EVERY = 100
#: The log is brought back to this fraction of its bound; otherwise every look would purge a little.
_SLACK = 0.9


class Passed:
    """The commits of one partition, in bounded memory, and how far the log is purged of the entries they passed."""

    def __init__(self) -> None:
        #: Commit times and cursor positions, oldest first.
        self._times: list[float] = []
        self._positions: list[int] = []
        self._new = 0
        #: Everything below this position is gone from the log.
        self.purged = 0

    def __len__(self) -> int:
        return len(self._times)

    def note(self, now: float, position: int) -> None:
        """Note that a commit passed everything up to this position."""
        self._times.append(now)
        self._positions.append(position)
        self._new += 1
        if self._new >= _THIN_EVERY:
            self._thin(now)

    def before(self, time: float) -> int:
        """Return the last known position that was passed by then; 0: none. Commits of about the same age are merged."""
        i = bisect_right(self._times, time)
        return self._positions[i - 1] if i else 0

    def gone(self, below: int) -> None:
        """Note that everything below the position is gone from the log."""
        self.purged = max(self.purged, below)
        first = bisect_right(self._positions, below)
        del self._times[:first], self._positions[:first]

    def _thin(self, now: float) -> None:
        # A forgotten commit counts as made when the next one was: its entries stay a little longer, never shorter.
        self._new = 0
        kept = [0]
        for i, time in enumerate(self._times[1:-1], 1):
            if time - self._times[kept[-1]] >= _PRECISION * (now - time):
                kept.append(i)
        kept.append(len(self._times) - 1)
        self._times = [self._times[i] for i in kept]
        self._positions = [self._positions[i] for i in kept]


def share_to_go(used: int, limit: int, reserve: float) -> float:
    """Return the fraction, between 0 and 1, of the removable entries that must go so that the log keeps its reserve.

    The log has `used` of `limit` bytes; the fraction `reserve` must be free when an outage of Postgres begins.
    Unflushed entries count too: the more there are, the fewer flushed ones are retained.
    """
    room = (1 - reserve) * limit
    return 0.0 if used <= room else 1 - _SLACK * room / used


def purgeable(
    passed: Passed, *, confirmed: float, wished: float, to_go: float, archived: int | None = None, unit: int = 1
) -> int | None:
    """Return the position below which the partition's entries go now; None if they are already gone.

    Only entries that commits passed by the time `confirmed` may go, and only below `archived` if that is given. Of
    these, the ones that were passed by the time `wished` go, and at least the oldest fraction `to_go`. The log lets go
    of whole units only, so the part that stays for `to_go` is rounded down to whole `unit`s of positions.
    """
    may_go = passed.before(confirmed)
    if archived is not None:
        may_go = min(may_go, archived)
    below = min(passed.before(wished), may_go)
    if to_go and may_go > passed.purged:
        stays = int((1 - to_go) * (may_go - passed.purged))
        below = max(below, may_go - stays // unit * unit)
    return below if below > passed.purged else None
