"""Whose group goes next, among processes that write at the same time.

Writers take turns, and the others hold their groups meanwhile. Then no group is refused because another was faster, and
no writer is always too late because its way is longer. A writer that is far away needs long for its turn. So a writer
that has written lets the others write for most of the time that its own turn takes, before its turn comes again. Of
some writers that are near and one that is far, the far one gets about half of the time, and not nearly all of it.

All this is a hint. A writer that does not know about turns, or is wrong, loses a try. The others no longer wait for a
writer that lets its turn pass without a word. Only a share of all time is spent on waiting for those never seen to
write.

Pure: no I/O, no clock. The order rests on what each writer has announced last, and on nothing before that. So those
that began to listen at different times have the same order as soon as each writer has announced something.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

#: No writer is waited for longer than this, whatever it says that it needs: a way around the world takes less.
NEEDS_MAX_S = 1.0
#: The share of the time that may be spent on waiting for writers that did not write, and how much of it at once.
_VAIN_SHARE = 1 / 8
_VAIN_MAX_S = 1.0
#: For which part of its own turn's time a writer that has written lets others write.
_REST = 3 / 4
#: How long a turn takes at least. Shorter ones would only make those that are far away wait longer.
_TURN_MIN_S = 0.001
#: How many groups later all writers have heard of a wish.
_HEARD_BY = 2
#: How many writers that were never seen to write have their wishes kept.
_STRANGERS_MAX = 64


class Pace(NamedTuple):
    """How fast a writer is."""

    #: The usual time from the group before to the writer's own, as the others see them, in seconds.
    turn_s: float
    #: The time in which the writer's group comes nearly always, in seconds.
    needs_s: float

    def within_limits(self) -> Pace:
        """This pace, as far as it is believed."""
        return Pace(min(max(self.turn_s, _TURN_MIN_S), NEEDS_MAX_S), min(max(self.needs_s, 0.0), NEEDS_MAX_S))


class Usual:
    """How long something takes, nearly always: its mean and four deviations, as TCP's timeout (RFC 6298)."""

    def __init__(self) -> None:
        self._mean_s = self._deviation_s = 0.0

    def note(self, took_s: float) -> None:
        """Note how long it took this time."""
        if not self._mean_s:
            self._mean_s, self._deviation_s = took_s, took_s / 2
        else:
            self._deviation_s += (abs(took_s - self._mean_s) - self._deviation_s) / 4
            self._mean_s += (took_s - self._mean_s) / 8

    @property
    def mean_s(self) -> float:
        """The mean; 0 until anything was noted."""
        return self._mean_s

    @property
    def at_most_s(self) -> float:
        """The time that nearly always suffices; 0 until anything was noted."""
        return self._mean_s + 4 * self._deviation_s


class _Place(NamedTuple):
    """Where a writer stands in the order."""

    #: The sequence of the group that it wrote; if it only wants to write, of the last one that it had seen then.
    behind: int
    pace: Pace
    #: Whether the writer has written there, and rests.
    rests: bool


class Turns:
    """The order of the writers that want to write, as one of them knows it."""

    def __init__(self, me: int) -> None:
        self._me = me
        self._places: dict[int, _Place] = {}
        #: The sequence of the last group that was stored, by any writer.
        self._last = 0
        #: The writers that wrote a group, and have missed no turn since.
        self._trusted: set[int] = set()
        #: When the present turn began: when a group was last stored, or a writer came after none was here.
        self._began = float("-inf")
        #: How long others may be waited for in vain.
        self._vain_s = _VAIN_MAX_S
        #: When a group was last stored, whoever's turn it was.
        self._stored_at = float("inf")
        #: What `_in_order` returned; None: something has changed since.
        self._order: list[int] | None = None

    def wants(self, writer: int, pace: Pace, behind: int, now: float) -> None:
        """Note that a writer wants to write. It comes after the one whose turn it is, and others that came like it.

        `behind`: the last group that it had seen.
        """
        if not self._places:
            self._began = now
        if (place := self._places.get(writer)) is not None:
            self._place(writer, place._replace(pace=pace.within_limits()))
        elif writer == self._me or writer in self._trusted or self._strangers() < _STRANGERS_MAX:
            self._place(writer, _Place(behind, pace.within_limits(), rests=False))

    def passes(self, writer: int) -> None:
        """Note that a writer wants nothing at the moment."""
        self._place(writer, None)

    def wrote(self, writer: int, pace: Pace, seq: int, now: float) -> None:
        """Note that this writer's group was stored. It rests for a while; writers that came too late are left out."""
        if self._in_order()[:1] == [writer]:  # as nearly always: nobody is left out
            self._earn(now)
            first: int | None = writer
        else:
            self._judge(writer, now)
            first = next(iter(self._in_order()), None)
        self._trusted.add(writer)
        self._last = max(self._last, seq)
        self._place(writer, _Place(seq, pace.within_limits(), rests=True))
        if first is None or first == writer:
            self._began = now

    def _judge(self, writer: int, now: float) -> None:
        """Leave out the writers whose time has passed. One that another writer did not wait for keeps its place."""
        elapsed_s = now - self._began if self._places else 0.0
        self._earn(now)
        nobody_came = elapsed_s >= self._patience_s(writer)
        for other, allowed_s in list(self._allowed()):
            if other == writer or (elapsed_s < allowed_s and not nobody_came):
                break
            passed_s = min(allowed_s, max(elapsed_s, 0.0))
            elapsed_s -= passed_s
            self._began += passed_s
            self._vain_s -= passed_s
            self._place(other, None)
            self._trusted.discard(other)

    def _earn(self, now: float) -> None:
        earned_s = _VAIN_SHARE * max(now - self._stored_at, 0.0)
        self._vain_s, self._stored_at = min(self._vain_s + earned_s, _VAIN_MAX_S), now

    def _patience_s(self, writer: int) -> float:
        """After how long without any group no writer before this one is waited for any more, however many there are."""
        allowed = itertools.takewhile(lambda one: one[0] != writer, self._allowed())
        return 2 * max((allowed_s for _, allowed_s in allowed), default=0.0)

    def _place(self, writer: int, place: _Place | None) -> None:
        self._order = None
        if place is not None:
            self._places[writer] = place
        else:
            self._places.pop(writer, None)

    def _in_order(self) -> list[int]:
        if self._order is None:
            turns = [(place.behind, place.pace.turn_s, w) for w, place in self._places.items() if place.rests]
            shortest_s = min([turn_s for _, turn_s, _ in turns], default=_TURN_MIN_S)
            # A rest is counted in groups of others: in shortest turns.
            order = [w for _, w in sorted([(behind + _REST * turn_s / shortest_s, w) for behind, turn_s, w in turns])]
            new = sorted([(place.behind, w) for w, place in self._places.items() if not place.rests])
            # When a new writer came, one writer had its turn, and others followed before all had heard of the new one:
            # their groups are on their way.
            early = [w for behind, w in new if behind + _HEARD_BY <= self._last]
            ahead = 0 if early else 1
            self._order = early + order[:ahead] + [w for _, w in new[len(early) :]] + order[ahead:]
        return self._order

    def _allowed(self) -> Iterator[tuple[int, float]]:
        """The writers in order, and for how long each is waited for."""
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
        mine = (writer, self._me)  # a writer does not pass itself over, as others may
        return next((other for other, allowed_s in self._allowed() if other in mine or allowed_s), writer) == writer

    def wait_s(self, now: float, needs_s: float) -> float:
        """How long to wait before our own group, unless others move on meanwhile; 0 or less: it is our turn.

        `needs_s`: how long a group takes us; others are given at least that time, too.
        """
        total_s = longest_s = apart_s = 0.0
        for writer, allowed_s in self._allowed():
            if writer == self._me:
                break
            if allowed_s:
                total_s += max(allowed_s, needs_s)
                longest_s = max(longest_s, allowed_s, needs_s)
                apart_s += self._places[writer].pace.turn_s
        # Else all that have lost their patience would try at the same moment.
        total_s = min(total_s, 2 * longest_s + apart_s)
        return self._began + total_s - now if total_s else 0.0
