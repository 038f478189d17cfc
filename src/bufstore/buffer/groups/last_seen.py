"""Is the last group that this process has seen still in the log, and was it ever?

A group that this process has read or stored is certain. When the log holds something else in its place, or ends before
it, the log went back: acknowledged entries are gone, and used positions are used again. Then the log is refused. The
process looks before it sends the first group on each new connection, and when a group is refused although nothing
follows the one before it. A group that others only announced need not be there. It is compared with the log at the next
look; if it is not there, everything is read again.

A node that lags, or no longer leads, may answer that there is nothing. So an absence is believed only of a log whose
leader has proved itself. Retention never takes the last group, so a group that it took has others behind it.
"""

from __future__ import annotations

import asyncio
import enum
from typing import NamedTuple

from bufstore.buffer.groups.group import Group, decode_header, group_in
from bufstore.buffer.groups.heads import Heads
from bufstore.buffer.groups.stream import GroupsInStream, last_on
from bufstore.errors import LogRolledBack, LogUnavailable, MalformedEntry
from bufstore.jetstream.messages import AppendUnknown, StoredMessage

#: For how long nobody is listened to after something false was told: the log itself is read instead.
_DEAF_S = 10.0


class Seen(NamedTuple):
    """A message of the groups' subject; sequence 0: none."""

    seq: int
    #: The group's id; 0 for what is not a group.
    id: int


class Standing(enum.Enum):
    """What became of a message that was seen in the log."""

    THERE = enum.auto()
    #: Others stand behind it, so it may be purged: they tell what they stand behind.
    PASSED = enum.auto()
    #: It was the last one, and somebody took it out.
    REMOVED = enum.auto()
    #: The log went back to before it, and may have gone on differently.
    LOST = enum.auto()


async def standing(log: GroupsInStream, subject: str, seen: Seen, timeout_s: float) -> Standing:
    """What became of the message that was seen. Raises LogUnavailable while nobody can tell."""
    if not seen.seq:
        return Standing.THERE
    found = await log.identity(seen.seq)
    if found is None:
        if await _ends_before(log, seen.seq, timeout_s):
            return Standing.LOST
        last = await _last(log, subject, timeout_s)
        if last > seen.seq:
            return Standing.PASSED
        found = await log.identity(seen.seq)
        if found is None and last == seen.seq:
            raise LogUnavailable("a node that does not lead the log answered for it")
        if found is None:
            return Standing.REMOVED
    return Standing.THERE if found.subject == subject and id_of(found) == seen.id else Standing.LOST


async def holds_up_to(log: GroupsInStream, subject: str, seen: Seen, timeout_s: float) -> int:
    """Up to which sequence the log holds what was seen, or has let go of it in order; below `seen` if it lost its end.

    A server that lost the end of its file goes on behind what is missing. Raises LogUnavailable while nobody can tell.
    """
    found = await standing(log, subject, seen, timeout_s)
    if found is Standing.THERE or found is Standing.LOST:
        return seen.seq
    await log.epoch(checked=False)
    if seen.seq < log.generation_start:  # a repair has applied or parked what the log had, and begun a new one
        return seen.seq
    if found is Standing.REMOVED:
        return min(await _last(log, subject, timeout_s), seen.seq)
    behind = (await log.part(subject, seen.seq, timeout_s, 1)).messages
    if not behind:
        raise LogUnavailable("the replica that answered does not show yet what follows the last group seen")
    group = group_in(behind[0])
    return min(group.before, seen.seq) if group is not None else seen.seq


async def _last(log: GroupsInStream, subject: str, timeout_s: float) -> int:
    """The sequence of the last group; 0 if there is none."""
    if end := await log.fresh_end(timeout_s):
        return end
    found = await last_on(log, subject, timeout_s)
    return found.seq if found is not None else 0


async def _ends_before(log: GroupsInStream, seq: int, timeout_s: float) -> bool:
    """Whether the log never reached this sequence, or no longer does."""
    if await log.end(timeout_s) >= seq:
        return False
    try:
        # Everything that was ever acknowledged stands below what is stored now. A single server always knows: 0.
        return await log.barrier(timeout_s) <= seq
    except AppendUnknown:
        raise LogUnavailable("no node proves that it leads the log") from None


def id_of(message: StoredMessage) -> int:
    """The id of the group that a message is; 0 if it is no group."""
    try:
        return decode_header(message).id
    except MalformedEntry:
        return 0


class LastSeen:
    """See the module's text."""

    def __init__(self, log: GroupsInStream, subject: str, heads: Heads, timeout_s: float) -> None:
        self._log, self._subject, self._heads, self._timeout_s = log, subject, heads, timeout_s
        #: The last message that was read, or stored by this process.
        self._certain = Seen(0, 0)
        #: The same, as of the last connection on which the log was found to be the same.
        self._witness = Seen(0, 0)
        #: That connection; -1: none, or it is in doubt.
        self._confirmed_on = -1
        #: The groups behind the last certain one that were only told of: id by sequence.
        self._heard: dict[int, int] = {}
        self._deaf_until = float("-inf")

    @property
    def certain(self) -> Seen:
        """The last message that was read, or stored by this process."""
        return self._certain

    @property
    def confirmed(self) -> bool:
        """Whether the log was found to be the same since the process has connected, and nothing was in doubt since."""
        return self._confirmed_on == self._log.connections

    async def confirm(self) -> bool:
        """Ask whether the last certain group is in the log still. False: it was removed, and nothing stands behind it.

        Raises LogRolledBack when the log went back, and is refused from now on; LogUnavailable.
        """
        connection, seen = self._log.connections, self._certain if self.confirmed else self._witness
        found = await standing(self._log, self._subject, seen, self._timeout_s)
        if found is Standing.LOST:
            self._witness, self._confirmed_on = seen, -1
            self._log.refuse(LogRolledBack(_reason(seen)))
            raise LogRolledBack(_reason(seen))
        self._confirmed_on, self._witness = connection, self._certain
        return found is not Standing.REMOVED or seen != self._certain

    async def mismatch(self) -> str | None:
        """Why this log is not the one that was seen; None when it is. Raises LogUnavailable."""
        found = await standing(self._log, self._subject, self._witness, self._timeout_s)
        return _reason(self._witness) if found is Standing.LOST else None

    def doubt(self) -> None:
        """Note that something does not fit what was seen: `confirm` comes before the next group is sent."""
        self._confirmed_on = -1

    def begin(self, seen: Seen, connection: int) -> None:
        """Begin anew behind this message, as it was found on this connection."""
        self._certain = seen
        self._heard.clear()
        if not self._witness.seq:
            self._confirmed_on = connection
        self._attest()

    def is_certain(self, seq: int, id_: int) -> None:
        """Note that this message was read, or stored by this process."""
        if seq > self._certain.seq:
            self._certain = Seen(seq, id_)
            if self._heard:
                self._heard = {heard: id_ for heard, id_ in self._heard.items() if heard > seq}
            self._attest()

    def _attest(self) -> None:
        if self.confirmed:
            self._witness = self._certain

    # --- what others tell -------------------------------------------------------------------------------------

    @property
    def listens(self) -> bool:
        """Whether what others tell is believed until the next look."""
        return asyncio.get_running_loop().time() >= self._deaf_until

    def hear(self, group: Group) -> None:
        """Note that this group, now noted as the last one, was only told of."""
        self._heard[group.seq] = group.id

    @property
    def only_heard(self) -> bool:
        """Whether the last group that is noted was only told of."""
        return self._heads.seen in self._heard

    def fits(self, message: StoredMessage) -> bool:
        """Whether what was told agrees with this message."""
        if not self._certain.seq < message.seq <= self._heads.seen or not self._heard:
            return True
        return self._heard.get(message.seq) == id_of(message)

    async def is_there(self) -> bool:
        """Whether the last group, which was only told of, is in the log. Raises LogUnavailable."""
        seen = Seen(self._heads.seen, self._heads.seen_id)
        if await standing(self._log, self._subject, seen, self._timeout_s) is not Standing.THERE:
            return False
        self.is_certain(*seen)
        return True

    def misheard(self) -> None:
        """Note that something false was told: listen to nobody for a while."""
        self._deaf_until = asyncio.get_running_loop().time() + _DEAF_S


def _reason(seen: Seen) -> str:
    return f"the log went back: it does not hold the group {seen.seq} that this process has seen in it"
