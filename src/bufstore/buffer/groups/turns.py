"""Whose group goes next, among processes that write at the same time.

Of those who want to write, the one that wrote longest ago goes first, and the others let it: then nobody's group is
refused because another was faster, and nobody is always too late because its way is longer. All this is a hint. Who
knows nothing of turns, or is wrong, loses a try; who lets his turn pass is waited for only so long as he needs.

Pure: no I/O, no clock.
"""

from __future__ import annotations

#: Nobody is waited for longer than this, whatever he says that he needs: a way around the world takes less.
NEEDS_MAX_S = 0.25


class Usual:
    """How long something takes, nearly always: its mean and four deviations, as TCP's timeout (RFC 6298)."""

    def __init__(self) -> None:
        self._mean_s = self._deviation_s = 0.0

    def note(self, took_s: float) -> None:
        """It took so long now."""
        if not self._mean_s:
            self._mean_s, self._deviation_s = took_s, took_s / 2
        else:
            self._deviation_s += (abs(took_s - self._mean_s) - self._deviation_s) / 4
            self._mean_s += (took_s - self._mean_s) / 8

    @property
    def at_most_s(self) -> float:
        """0 until anything was noted."""
        return self._mean_s + 4 * self._deviation_s


class Turns:
    """The order of those who want to write, as one of them knows it."""

    def __init__(self, me: int) -> None:
        self._me = me
        #: Who has waited longest comes first: how long each needs for a group, s.
        self._needs: dict[int, float] = {}
        #: When the present turn began: when a group was stored last, or somebody came after nobody was here.
        self._began = float("-inf")

    def wants(self, writer: int, needs_s: float, now: float) -> None:
        """A writer wants to write, and needs so long once it is its turn. It goes behind all who are here."""
        if not self._needs:
            self._began = now
        self._needs[writer] = min(max(needs_s, 0.0), NEEDS_MAX_S)  # in its old place, if it has one

    def passes(self, writer: int) -> None:
        """A writer wants nothing at the moment."""
        self._needs.pop(writer, None)

    def wrote(self, writer: int, now: float) -> None:
        """A group of this writer was stored. It goes behind the others; whose turn it was instead lost it."""
        if writer in self._needs and (first := next(iter(self._needs))) != writer:
            del self._needs[first]
        self._needs[writer] = self._needs.pop(writer, 0.0)
        self._began = now

    def knows(self, writer: int) -> bool:
        """Whether a writer has a place in the order."""
        return writer in self._needs

    def is_first(self, writer: int) -> bool:
        """Whether it is this writer's turn."""
        return next(iter(self._needs), writer) == writer

    def wait_s(self, now: float, needs_s: float) -> float:
        """How long to wait before the own group, unless others move on meanwhile; 0 or less: it is our turn.

        `needs_s`: how long a group takes us, which others are given, too.
        """
        allowed = 0.0
        for writer, needs in self._needs.items():
            if writer == self._me:
                break
            allowed += max(needs, needs_s)
        return self._began + allowed - now if allowed else 0.0
