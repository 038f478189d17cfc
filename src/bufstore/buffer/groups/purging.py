"""Purges the groups that nobody needs, except the last one, and parts that no remaining group names."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from bufstore.buffer.groups.group import group_in
from bufstore.buffer.groups.heads import Heads
from bufstore.buffer.groups.stream import READ_S, GroupsInStream, last_on, messages_on
from bufstore.buffer.subjects import Subjects


class Purging:
    """Purges for `bufstore.buffer.groups.log.GroupLog`, once the owners say what may be purged."""

    def __init__(
        self, stream: GroupsInStream, subjects: Subjects, heads: Heads, see_all: Callable[[], Awaitable[None]]
    ) -> None:
        """`see_all`: sees all that is in the log by now."""
        self._stream, self._subjects, self._heads, self._see_all = stream, subjects, heads, see_all
        #: The group below which the log is purged.
        self.purged = 0
        #: The last group, if nothing is needed any more but that group and parts that it names; else -1.
        self._last_needs_parts = -1
        #: The part that `is_held_up` found last; 0: none.
        self._left = 0

    async def purge(self, below: int) -> None:
        """Purge the groups below this sequence."""
        if below <= self.purged:
            return
        # The last group stays: if none stood there, a late first copy of any group could be stored.
        last = await last_on(self._stream, self._subjects.groups)
        if last is not None:
            needed = await self._first_needed(below)
            await self._stream.purge_below(min(needed, last.seq))
            self.purged = max(self.purged, below)
            self._last_needs_parts = last.seq if needed < last.seq <= below else -1

    async def is_held_up(self, flushed: int) -> bool:
        """Whether parts stay for good unless a group follows the last one, which has this sequence and is flushed.

        The last group is never purged, nor anything behind it, or between it and parts that it names. When parts that
        came to nothing fill the log there, no group with entries fits any more, and the last one stays the last. A
        group without entries fits. Parts before that one are purged like anything before any other group: once all
        cursors have passed it for a failover window, when a group that names the parts can no longer be sent
        (`Sequencer`). So nothing here decides what is needed. Parts behind the last group may belong to a group on its
        way, which then goes behind the empty one, as behind another writer's. To spare it that, they are seen twice.
        """
        parts = await self._stream.after(self._subjects.parts, flushed, READ_S, limit=1)
        before, self._left = self._left, parts[0].seq if parts else 0
        if not (parts and parts[0].seq == before) and flushed != self._last_needs_parts:
            return False
        return not await self._stream.after(self._subjects.groups, flushed, READ_S, limit=1)

    async def _first_needed(self, below: int) -> int:
        """The first sequence that the groups from `below` on need."""
        # If the answer can be trusted, and there are no parts, a process that only flushes need not see all groups:
        # that would read the log once more. On replicas, the node that answers may lead no more, and lack the parts.
        if not self._stream.may_lag and await self._first_part(below) == below:
            return below
        await self._see_all()
        needed = self._heads.first_needed(below)
        if needed is not None:
            return needed
        # Some group that this process has not seen may name parts that stand far below. Look once: it reads the log.
        first_part = await self._first_part(below)
        if first_part == below:
            return below
        began, life = self._heads.began, self._heads.life
        named: list[tuple[int, int]] = []
        async for message in messages_on(self._stream, self._subjects.groups, below - 1):
            if message.seq > began:
                break
            if (group := group_in(message)) is not None and group.parts:
                named.append((group.seq, group.parts))
        if life != self._heads.life:
            return first_part
        self._heads.looked_back(below, named)
        return self._heads.first_needed(below) or below

    async def _first_part(self, below: int) -> int:
        """The sequence of the first part of a large entry, if it is below `below`; else `below`."""
        parts = await self._stream.after(self._subjects.parts, 0, READ_S, limit=1)
        return min(parts[0].seq, below) if parts else below
