"""Reads threads backwards: from the last entry of each, and each group once for all threads in it."""

from __future__ import annotations

import contextlib
import heapq
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from bufstore.buffer.groups.entries import Entries, Purged
from bufstore.buffer.groups.group import Group
from bufstore.buffer.groups.tail import Tail
from bufstore.buffer.places import group_of, number_of
from bufstore.jetstream.messages import StoredMessage
from bufstore.tasks import together

#: How many groups are read at the same time by a caller that looks for the entries of many threads.
_AT_ONCE = 8
#: How many groups, at most, are read ahead of a walk along a thread.
_AHEAD_MAX = 32


@dataclass(slots=True, eq=False)
class _Walk:
    """One thread, on the way back."""

    subject: str
    #: The place at which the walk ends.
    above: int
    #: The place of the entry that is read next.
    at: int
    found: deque[StoredMessage]
    #: The group that the walk has come from; 0: it begins.
    behind: int = 0
    #: How many groups are read ahead for it.
    ahead: int = 0

    @property
    def goes_on(self) -> bool:
        return self.at > self.above

    def look_ahead(self, seq: int) -> int:
        """How many groups before this one, which the walk comes to now, it wants next."""
        if self.behind:
            # The last entry may stand anywhere. A walk that goes on along a busy thread goes on for longer.
            near = self.behind - seq <= _AHEAD_MAX
            self.ahead = min(max(2 * self.ahead, 1), _AHEAD_MAX) if near else 0
        self.behind = seq
        return self.ahead


class Backwards:
    """See the module's text."""

    def __init__(
        self,
        tail: Tail,
        entries: Entries,
        head: Callable[[str], int],
        forget_purged: Callable[[], Awaitable[None]],
    ) -> None:
        """`head`: the place of a thread's last entry, by subject; 0 for none. `forget_purged`: called when none of the
        entries of a thread are left that were to be read."""
        self._tail, self._entries = tail, entries
        self._head, self._forget_purged = head, forget_purged

    async def after(self, above: Mapping[str, int], first: int = 0) -> dict[str, list[StoredMessage]]:
        """The entries of each thread (by subject) above a place, in order, up to the last that this process has seen.

        `first`: how many of each thread, the first ones; 0: all. Entries before one that was purged are left out.
        Raises LogUnavailable.
        """
        return await self._walked({s: (self._head(s), place) for s, place in above.items()}, first)

    async def last(self, subjects: Sequence[str]) -> dict[str, StoredMessage]:
        """The last entry of each of these threads that has one. Raises LogUnavailable."""
        heads = {subject: head for subject in subjects if (head := self._head(subject))}
        found = await self._walked({s: (head, head - 1) for s, head in heads.items()})
        return {subject: entries[0] for subject, entries in found.items() if entries}

    async def _walked(self, ways: Mapping[str, tuple[int, int]], first: int = 0) -> dict[str, list[StoredMessage]]:
        walks = [_Walk(subject, above, head, deque(maxlen=first or None)) for subject, (head, above) in ways.items()]
        # The last group first: a thread that stands there may also stand in earlier ones, with others' last entries.
        order, waiting = list[int](), dict[int, list[_Walk]]()

        def wait(walk: _Walk) -> None:
            seq = group_of(walk.at)
            if seq not in waiting:
                waiting[seq] = []
                heapq.heappush(order, -seq)
            waiting[seq].append(walk)

        async def look() -> None:
            try:
                while order:
                    seq = -heapq.heappop(order)
                    for walk in await self._step(seq, waiting.pop(seq)):
                        wait(walk)
            except BaseException:
                order.clear()  # the others need not go on
                raise

        for walk in walks:
            if walk.goes_on:
                wait(walk)
        if len(order) <= 1:
            await look()
        else:
            await together(look() for _ in range(min(len(order), _AT_ONCE)))
        if any(walk.goes_on and not walk.found for walk in walks):
            await self._forget_purged()
        return {walk.subject: list(walk.found) for walk in walks}

    async def _step(self, seq: int, walks: Sequence[_Walk]) -> list[_Walk]:
        """Read what these threads have in a group. Returns those that go on before it."""
        found = await self._tail.group(seq, max(walk.look_ahead(seq) for walk in walks))
        if found is None:
            return []
        group, body = found
        going = []
        for walk in walks:
            with contextlib.suppress(Purged):
                if await self._read(walk, group, body):
                    going.append(walk)
        return going

    async def _read(self, walk: _Walk, group: Group, body: bytes) -> bool:
        """Read a thread's entries in a group; whether the walk goes on before it. Raises Purged, LogUnavailable."""
        while walk.goes_on and group_of(walk.at) == group.seq:
            number = number_of(walk.at)
            if number >= len(group.records):
                return False
            walk.found.appendleft(await self._entries.read(group, number, body))
            walk.at = group.records[number].prev
        return walk.goes_on
