"""Whose group goes next, among processes that write at the same time.

They take turns, and the others hold their groups meanwhile: then nobody's group is refused because another was faster,
and nobody is always too late because its way is longer. Who is far away needs long for its turn. So who has written
lets the others write for most of the time that its own turn takes, before it is its turn again: of some that are near
and one that is far, the far one gets about half of the time, and not nearly all of it.

All this is a hint. Who knows nothing of turns, or is wrong, loses a try. Who lets its turn pass without a word is
waited for no more, and of all time only a share is spent on waiting for those who were never seen to write.

Pure: no I/O, no clock. Those who heard the same have the same order: it rests on what was told, not on their clocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

#: Nobody is waited for longer than this, whatever he says that he needs: a way around the world takes less.
NEEDS_MAX_S = 1.0
#: Of the time, this share may be spent on waiting for those who did not write, and so much of it at once.
_VAIN_SHARE = 1 / 8
_VAIN_MAX_S = 1.0
#: Who has written lets others write for this part of what its turn takes.
_REST = 3 / 4
#: What a turn takes at least. Shorter ones would only make those who are far away wait longer.
_TURN_MIN_S = 0.001
#: Of so many who were never seen to write wishes are kept.
_STRANGERS_MAX = 64


class Pace(NamedTuple):
    """How fast a writer is."""

    #: From the group before it to its own, as the others see them: usually, s.
    turn_s: float
    #: The same, nearly always.
    needs_s: float

    def within_limits(self) -> Pace:
        """The same, as far as it is believed."""
        return Pace(min(max(self.turn_s, _TURN_MIN_S), NEEDS_MAX_S), min(max(self.needs_s, 0.0), NEEDS_MAX_S))


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
    def mean_s(self) -> float:
        """0 until anything was noted."""
        return self._mean_s

    @property
    def at_most_s(self) -> float:
        """0 until anything was noted."""
        return self._mean_s + 4 * self._deviation_s


class _Place(NamedTuple):
    """Where a writer stands in the order: the lowest is next, and of equals the one that came first."""

    at_us: int
    pace: Pace


class Turns:
    """The order of those who want to write, as one of them knows it."""

    def __init__(self, me: int) -> None:
        self._me = me
        self._places: dict[int, _Place] = {}
        #: What is counted up by each group that is stored, whoever's: so much as the shortest turn takes.
        self._at_us = 0
        #: Who wrote a group, and has missed no turn since.
        self._trusted: set[int] = set()
        #: When the present turn began: when a group was stored last, or somebody came after nobody was here.
        self._began = float("-inf")
        #: How long may be waited for others in vain.
        self._vain_s = _VAIN_MAX_S
        #: When a group was stored last, whoever's turn it was.
        self._stored_at = float("inf")

    def wants(self, writer: int, pace: Pace, now: float) -> None:
        """A writer wants to write. It is next after the one whose turn it is, and after others who came so."""
        if not self._places:
            self._began = now
        if (place := self._places.get(writer)) is not None:
            self._places[writer] = place._replace(pace=pace.within_limits())
        elif writer == self._me or writer in self._trusted or self._strangers() < _STRANGERS_MAX:
            at_us = min((place.at_us for place in self._places.values()), default=self._at_us)
            self._places[writer] = _Place(at_us, pace.within_limits())

    def passes(self, writer: int) -> None:
        """A writer wants nothing at the moment."""
        self._places.pop(writer, None)

    def wrote(self, writer: int, pace: Pace, now: float) -> None:
        """A group of this writer was stored. It rests for a while; who did not come in time is left out."""
        self._judge(writer, now)
        first = next(iter(self._in_order()), None)
        self._places.pop(writer, None)
        pace = pace.within_limits()
        self._trusted.add(writer)
        turns = [place.pace.turn_s for other, place in self._places.items() if other in self._trusted]
        self._at_us += round(1e6 * min([pace.turn_s, *turns]))
        self._places[writer] = _Place(self._at_us + round(1e6 * _REST * pace.turn_s), pace)
        if first is None or first == writer:
            self._began = now

    def _judge(self, writer: int, now: float) -> None:
        """Leave out those whose time has passed. Whoever another one did not wait for keeps its place."""
        elapsed_s = now - self._began if self._places else 0.0
        earned_s = _VAIN_SHARE * max(now - self._stored_at, 0.0)
        self._vain_s, self._stored_at = min(self._vain_s + earned_s, _VAIN_MAX_S), now
        for other, allowed_s in list(self._allowed()):
            if other == writer or elapsed_s < allowed_s:
                break
            elapsed_s -= allowed_s
            self._began += allowed_s
            self._vain_s -= allowed_s
            del self._places[other]
            self._trusted.discard(other)

    def _in_order(self) -> list[int]:
        return sorted(self._places, key=lambda writer: self._places[writer].at_us)

    def _allowed(self) -> Iterator[tuple[int, float]]:
        """Who comes one after the other, and how long each is waited for."""
        vain_s = self._vain_s
        for writer in self._in_order():
            needs_s = self._places[writer].pace.needs_s
            if writer in self._trusted:
                yield writer, needs_s
            elif vain_s > 0:
                vain_s -= needs_s
                yield writer, needs_s
            else:
                yield writer, 0.0

    def _strangers(self) -> int:
        return sum(writer not in self._trusted for writer in self._places)

    def knows(self, writer: int) -> bool:
        """Whether a writer has a place in the order."""
        return writer in self._places

    @property
    def others(self) -> bool:
        """Whether anybody else has a place in the order."""
        return any(writer != self._me for writer in self._places)

    def is_first(self, writer: int) -> bool:
        """Whether it is this writer's turn."""
        mine = (writer, self._me)  # who wants to write does not pass itself over, as others may
        return next((other for other, allowed_s in self._allowed() if other in mine or allowed_s), writer) == writer

    def wait_s(self, now: float, needs_s: float) -> float:
        """How long to wait before the own group, unless others move on meanwhile; 0 or less: it is our turn.

        `needs_s`: how long a group takes us, which others are given, too.
        """
        total_s = 0.0
        for writer, allowed_s in self._allowed():
            if writer == self._me:
                break
            total_s += max(allowed_s, needs_s) if allowed_s else 0.0
        return self._began + total_s - now if total_s else 0.0
