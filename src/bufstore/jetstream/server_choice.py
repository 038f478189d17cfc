"""Which of several servers to connect to, and when to leave one. Pure: no I/O, no clock.

A node that is cut off from its cluster takes connections and answers PINGs, but no node that it reaches leads a stream:
requests get an error, or no answer. The other nodes may do well, so after some time without a success the next one is
tried. When no server does better, the cluster has no leaders; then each server gets more time than the one before.
A single server is left, too: its address may stand for several nodes, and a new connection reaches another one.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Seconds for which a server may serve nothing, at first and at most.
_PATIENCE_S, _PATIENCE_MAX_S = 3.0, 60.0
#: A failure longer ago than this says nothing about now.
_GAP_S = 10.0
#: A process that has left no server for so long (and may only read) begins with the first patience again.
_CALM_S = 600.0
_NEVER = float("-inf")
#: JetStream's errors for "no leader", or no known leader: 10008 and 10009. An answer with such an error is short.
_UNAVAILABLE, _NO_LEADER = b'"err_code":10008', b'"err_code":10009'
_ERROR_BYTES_MAX = 512


def leaderless(answer: bytes) -> bool:
    """Return whether JetStream says that no node leads, instead of answering."""
    return len(answer) < _ERROR_BYTES_MAX and (_UNAVAILABLE in answer or _NO_LEADER in answer)


@dataclass(slots=True)
class ServerChoice:
    """The choice among `count` servers."""

    count: int
    #: The server that was connected to last; at first a random one, so that a restarted process may begin with another.
    last: int
    #: When it began to serve nothing, when that was last noticed, when it last took a write, when one was last left.
    _failing_since: float = _NEVER
    _failed_at: float = _NEVER
    _wrote_at: float = _NEVER
    _left_at: float = float("inf")
    _patience_s: float = _PATIENCE_S

    def order(self) -> list[int]:
        """Return all servers in the order in which to try them, beginning behind the one that was lost."""
        return [(self.last + 1 + n) % self.count for n in range(self.count)]

    def connected(self, number: int) -> None:
        """Note that this server is the connected one from now on."""
        self.last, self._failed_at = number, _NEVER

    def wrote(self, now: float) -> None:
        """Note that a write was answered. A leader needs others for a write; one that was left answers reads, too."""
        self._failed_at, self._wrote_at, self._patience_s = _NEVER, now, _PATIENCE_S

    def failed(self, since: float, now: float) -> bool:
        """Note that the server did not serve a request that was sent at `since`; return whether to leave the server."""
        if since < self._wrote_at:
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
