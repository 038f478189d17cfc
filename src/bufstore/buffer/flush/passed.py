"""When a partition's cursor passed which position, and so what of the log may go. Decisions only: no I/O, no clock.

Why Postgres has to confirm. A commit counts from when it was made, not from when its entries were written: a Postgres
that fails over may lose its last commits, those of its last `failover_window_s`, and then needs their entries again.
It may be away for any time before it comes back without them. So what counts is not how long ago a commit was made,
but how long before the last moment at which Postgres was seen with it.

What a confirmation is good for. Postgres was asked at C, and its cursor had passed the commit made at T. So it was not
gone before C, and whatever copy of it takes over has all that was committed before C - failover_window_s. If T is
earlier than that, the commit is in every Postgres there will be: its entries may go at any time after C, also while
Postgres is away, without asking again. A later failover changes nothing: its copy is one of a Postgres that has the
commit. What was committed after C - failover_window_s stays until a later confirmation. That is also never less than
`failover_window_s` ago by the clock, which is what writers and readers rely on.

A new owner of a partition starts anew: what it finds flushed counts as committed when it took the partition. So
Postgres is asked regularly, needed or not, and confirmed entries can go when the space is needed.
"""

from __future__ import annotations

from bisect import bisect_right

#: Commits are told apart down to this part of their age.
_PRECISION = 0.01
_THIN_EVERY = 100
#: The fraction of its bound to which the log is brought back; otherwise every look would purge a little.
_SLACK = 0.9


class Passed:
    """The commits of one partition, in bounded memory, and how far the log is purged of what they passed."""

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
        """A position that was passed by then; 0 for none. Of commits of about the same age only one is known."""
        i = bisect_right(self._times, time)
        return self._positions[i - 1] if i else 0

    def gone(self, below: int) -> None:
        """Everything below the position is gone from the log."""
        self.purged = max(self.purged, below)
        first = bisect_right(self._positions, below)
        del self._times[:first], self._positions[:first]

    def _thin(self, now: float) -> None:
        # A forgotten commit counts from the next one: its entries stay a little longer, never shorter.
        self._new = 0
        kept = [0]
        for i, time in enumerate(self._times[1:-1], 1):
            if time - self._times[kept[-1]] >= _PRECISION * (now - time):
                kept.append(i)
        kept.append(len(self._times) - 1)
        self._times = [self._times[i] for i in kept]
        self._positions = [self._positions[i] for i in kept]


def share_to_go(used: int, limit: int, reserve: float) -> float:
    """The fraction, between 0 and 1, of the removable entries that must go for the log to keep its reserve.

    `used` bytes of `limit` are in the log; the fraction `reserve` must be free when an outage of Postgres begins.
    Unflushed entries count too: the more there are, the fewer flushed ones are retained.
    """
    room = (1 - reserve) * limit
    return 0.0 if used <= room else 1 - _SLACK * room / used


def purgeable(
    passed: Passed, *, confirmed: float, wished: float, to_go: float, archived: int | None = None, unit: int = 1
) -> int | None:
    """Below which position the partition's entries go now; None if they are gone already.

    Only what commits passed by `confirmed`, and only below `archived` if that is given. Of this, what was passed by
    `wished`, and the oldest part `to_go`. Of what stays, a beginning that is no whole `unit` of positions goes too: the
    log lets go of whole units only.
    """
    may_go = passed.before(confirmed)
    if archived is not None:
        may_go = min(may_go, archived)
    below = min(passed.before(wished), may_go)
    if to_go and may_go > passed.purged:
        stays = int((1 - to_go) * (may_go - passed.purged))
        below = max(below, may_go - stays // unit * unit)
    return below if below > passed.purged else None
