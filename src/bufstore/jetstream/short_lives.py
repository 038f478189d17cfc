"""Connections that end soon after they were made, one after the other: how long to wait. Pure: no I/O, no clock."""

from __future__ import annotations

from dataclasses import dataclass

#: A connection that lived for so many seconds ends a series.
_LONG_S = 5.0
#: The pause after the first short life, which doubles with each further one, and the longest, in seconds.
_PAUSE_S, _PAUSE_MAX_S = 0.01, 2.0


@dataclass(slots=True)
class ShortLives:
    """A series of connections that lived for a short time."""

    _made_at: float = float("-inf")
    _pause_s: float = 0.0
    _reason: str = ""

    def made(self, now: float) -> None:
        """Note that a connection was made."""
        self._made_at = now

    def ended(self, now: float, reason: str) -> tuple[float, bool]:
        """Note that it ended; return how many seconds to wait, and whether the log should tell of it."""
        short = now - self._made_at < _LONG_S
        news = not short or reason != self._reason
        self._pause_s = min(max(2 * self._pause_s, _PAUSE_S), _PAUSE_MAX_S) if short else 0.0
        self._reason = reason
        return self._pause_s, news
