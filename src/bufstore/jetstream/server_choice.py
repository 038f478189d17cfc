"""Which of several servers to connect to, and when to leave one. Pure: no I/O, no clock.

A node that is cut off from its cluster takes connections and answers PINGs, but nobody there leads a stream: requests
get an error, or no answer. The others may do well, so after some time of nothing but that the next one is tried. When
no server does better, the cluster has no leaders; then each is given more time than the last one.
"""

from __future__ import annotations

from dataclasses import dataclass

#: How long a server may serve nothing, at first and at most.
_PATIENCE_S, _PATIENCE_MAX_S = 3.0, 60.0
#: What failed longer ago than this says nothing of now.
_GAP_S = 10.0
#: Who has left no server for so long (and may only read) has forgotten how patient it has become.
_CALM_S = 600.0
_NEVER = float("-inf")
#: JetStream's errors for "no leader", or none that is known: 10008 and 10009; an answer with one is short.
_UNAVAILABLE, _NO_LEADER = b'"err_code":10008', b'"err_code":10009'
_ERROR_BYTES_MAX = 512


def leaderless(answer: bytes) -> bool:
    """Whether JetStream says that nobody leads, instead of answering."""
    return len(answer) < _ERROR_BYTES_MAX and (_UNAVAILABLE in answer or _NO_LEADER in answer)


@dataclass(slots=True)
class ServerChoice:
    """Among so many servers."""

    count: int
    #: The one that was connected to last; at first any, so that a process that starts again may begin with another.
    last: int
    #: Since when it serves nothing, when that was noticed last, when it took a write last, and when one was left last.
    _failing_since: float = _NEVER
    _failed_at: float = _NEVER
    _wrote_at: float = _NEVER
    _left_at: float = float("inf")
    _patience_s: float = _PATIENCE_S

    def order(self) -> list[int]:
        """All of them, as they are to be tried: beginning behind the one that was lost."""
        return [(self.last + 1 + n) % self.count for n in range(self.count)]

    def connected(self, number: int) -> None:
        """This one is the server from now on."""
        self.last, self._failed_at = number, _NEVER

    def wrote(self, now: float) -> None:
        """A write was answered, for which a leader needs others: reads are answered by one that was left, too."""
        self._failed_at, self._wrote_at, self._patience_s = _NEVER, now, _PATIENCE_S

    def failed(self, since: float, now: float) -> bool:
        """It did not serve a request that was sent at `since`; whether to leave it."""
        if self.count == 1 or since < self._wrote_at:
            return False
        if since - self._failed_at > _GAP_S:
            self._failing_since = since
        self._failed_at = now
        if now - self._left_at > _CALM_S:
            self._patience_s = _PATIENCE_S
        if now - self._failing_since < self._patience_s:
            return False
        self._failed_at, self._left_at = _NEVER, now
        self._patience_s = min(2 * self._patience_s, _PATIENCE_MAX_S)
        return True
