"""The groups that a process has at hand: it looks at those of others when it must, and keeps the last ones whole."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

from bufstore.buffer.groups.group import Group, decode_header, group_in, stored_bytes
from bufstore.buffer.groups.heads import Gap, Heads
from bufstore.buffer.groups.last_seen import LastSeen, Seen, holds_up_to
from bufstore.buffer.groups.stream import GroupsInStream, last_on
from bufstore.buffer.places import group_of, last_place
from bufstore.errors import BufstoreError, LogRolledBack, LogUnavailable, MalformedEntry
from bufstore.jetstream.messages import Part, StoredMessage
from bufstore.log_lines import LogLines
from bufstore.shared_call import SharedCall

_log = LogLines(__name__)

#: How many groups are asked for at a time, and about how many bytes of them: at first, at least, at most.
_AT_ONCE = 1000
_BYTES, _BYTES_MIN, _BYTES_MAX = 1 << 20, 128 << 10, 8 << 20
#: When an answer takes longer than this, less is asked for: what has not come within a read's time comes for nothing.
_ANSWER_S = 1.0
#: For how long Postgres may think about what it has of a lost end: a write waits meanwhile.
_FLUSHED_S = 2.0
#: How many bytes of the groups seen last are kept: reads of what is not flushed yet want them.
_KEPT_BYTES = 32 << 20
#: The pause before the same gap is looked at once more.
_AGAIN_S = 0.1
#: How many bytes a record takes in memory.
_RECORD_BYTES = 256


class Written(NamedTuple):
    """A group that is stored, and the message that it is."""

    group: Group
    message: StoredMessage


class Behind(NamedTuple):
    """What stands behind a group: a message of the log."""

    seq: int
    #: The group's id; 0 for what is not a group.
    id: int
    #: The sequence of the group before it.
    before: int


class Tail:
    """The end of the log's groups, as far as this process has seen it."""

    def __init__(
        self,
        log: GroupsInStream,
        subject: str,
        heads: Heads,
        floor: Callable[[], Awaitable[int]],
        lost: Callable[[], None],
        timeout_s: float,
    ) -> None:
        """`floor`: the place from which on the log must be known. `lost`: called when `heads` had to begin anew."""
        self._log, self._subject, self._heads = log, subject, heads
        self._floor, self._lost = floor, lost
        self._timeout_s = timeout_s
        self._kept: OrderedDict[int, tuple[Group, bytes]] = OrderedDict()
        self._kept_bytes = 0
        #: How many bytes of groups are asked for at a time.
        self._bytes = _BYTES
        self.last_seen = LastSeen(log, subject, heads, timeout_s)
        #: Says whether these partitions are flushed up to these places, none of which is above the given one. None: no
        #: Postgres can be asked.
        self.flushed: Callable[[Mapping[int, int], int], Awaitable[bool]] | None = None
        #: The group that was seen last when the log was refused because it had lost its end.
        self._refused_at: Seen | None = None
        #: Whether the group that was seen last is not in the log, so that everything must begin anew.
        self._anew = False
        self._one_read = asyncio.Lock()
        #: Calls that come while a read is on its way must not rest on what it read before they came.
        self._see = SharedCall(self._see_all)

    async def see_all(self) -> None:
        """Return once everything has been seen that was in the log when this was called. Raises LogUnavailable."""
        await self._see()

    async def confirm(self) -> None:
        """Make sure that the group seen last is in the log; begin anew if it was removed, or was never there.

        Raises LogRolledBack when the log went back, LogUnavailable.
        """
        if not await self.last_seen.confirm():
            await self._refuse_if_lost()
            text = "the last group was removed from the log; reading the log again"
            _log.error(text, extra={"action": "log_group_removed"})
            self._anew = True
        elif self.last_seen.only_heard and not await self.last_seen.is_there():
            self._misheard()
            self._anew = True
        if self._anew:
            await self.see_all()

    async def _refuse_if_lost(self) -> None:
        """Refuse the log if groups at its end are gone that were seen, and were not flushed.

        The server has lost the end of its files, or somebody purged it. Nothing else shows that: the log goes on behind
        what is missing, and what is left of a thread is a state that it had. Raises LogRolledBack, LogUnavailable.
        """
        seen = self.last_seen.certain
        if self.flushed is None or (self._refused_at == seen and self._log.refused is None):  # accepted since
            return
        behind = await holds_up_to(self._log, self._subject, seen, self._timeout_s)
        if behind == seen.seq:
            return
        gone = f"the log lost its end: groups {behind + 1} to {seen.seq} are gone"
        try:
            async with asyncio.timeout(_FLUSHED_S):
                flushed = await self.flushed(self._heads.last_between(behind, seen.seq), last_place(seen.seq))
        except (BufstoreError, TimeoutError) as e:
            why = str(e) or "it does not answer"
            raise LogUnavailable(f"{gone}, and Postgres must say whether they were flushed: {why}") from e
        if not flushed:
            reason = f"{gone}, and Postgres does not show that all of their entries were flushed"
            self._refused_at = seen
            self._log.refuse(LogRolledBack(reason))
            raise LogRolledBack(reason)

    def at_hand(self, seq: int) -> tuple[Group, bytes] | None:
        """The group with this sequence and its body, if this process has it in memory."""
        return self._kept.get(seq)

    def _misheard(self) -> None:
        text = "another process announced a group that is not in the log; reading the log itself for a while"
        _log.warning(text, extra={"action": "log_misheard"})
        self.last_seen.misheard()

    async def aclose(self) -> None:
        """Look no more: what runs fails with Closed."""
        await self._see.aclose()

    async def first_behind(self, seq: int) -> Behind | None:
        """What stands behind the group with this sequence; None if nothing does. Sees everything first."""
        await self.see_all()
        if self._heads.seen <= seq:
            return None
        for known, _ in reversed(self._kept.values()):
            if known.before == seq:
                return Behind(known.seq, known.id, known.before)
            if known.seq <= seq:
                break
        found = (await self._log.part(self._subject, seq, self._timeout_s, 1)).messages
        if not found:
            return None
        group = group_in(found[0])
        return Behind(found[0].seq, 0, seq) if group is None else Behind(group.seq, group.id, group.before)

    def hear(self, seq: int, header: str, body_bytes: int, body: bytes | None) -> int | None:
        """Note a group that was just stored, and keep it if its body is here. Returns its id; None: it is no group."""
        message = StoredMessage(self._subject, seq, header, b"")
        try:
            group = decode_header(message)
        except MalformedEntry as e:  # anybody may tell anything, also a later release
            _log.debug("heard of something that is not a group: %s", e, extra={"action": "group_malformed"})
            return None
        # The next look at the log shows a group that is not noted here. Only its body tells what large entries take.
        if self._heads.life and not group.parts and self.last_seen.listens:
            with contextlib.suppress(Gap):
                if self._heads.observe(group, stored_bytes(group, message) + body_bytes):
                    self.last_seen.hear(group)
                    if body is not None:
                        self._keep(group, body)
                elif not self.last_seen.fits(message):  # two have told of this sequence, and one of them was wrong
                    self.last_seen.doubt()
        return group.id

    def note(self, written: Written) -> None:
        """Keep a group that this process wrote."""
        self.last_seen.is_certain(written.group.seq, written.group.id)
        self._keep(written.group, written.message.body)

    async def group(self, seq: int, ahead: int = 0) -> tuple[Group, bytes] | None:
        """The group with this sequence and its body; None if it may be gone by now, and is.

        `ahead`: how many groups before it are wanted next, and are read and kept, too. With 0, nothing is kept: a
        caller that looks for idle threads' last entries wants groups anywhere, and not in place of those seen last.
        Raises LogUnavailable also if the group must be in the log, and nobody shows it.
        """
        if seq not in self._kept:
            if not ahead:
                return await self._sure(seq)
            async with self._one_read:  # many threads may want the same group
                if seq not in self._kept:
                    return await self._read(seq, ahead)
        self._kept.move_to_end(seq)
        return self._kept[seq]

    async def _read(self, seq: int, ahead: int) -> tuple[Group, bytes] | None:
        first = max(seq - ahead - 1, 0)
        above = next((known for known in range(seq - 1, first, -1) if known in self._kept), first)
        while above < seq:
            messages, more = await self._some(above, seq - above)
            for message in messages:
                if (group := group_in(message)) is not None:
                    self._keep(group, message.body)
                if message.seq == seq:
                    return (group, message.body) if group is not None else None
                above = message.seq
            if not (messages and more):
                break
        return await self._sure(seq)

    async def _sure(self, seq: int) -> tuple[Group, bytes] | None:
        """Read a group from any replica, else from the leader. A node that does not show it lags, or it is gone."""
        found = (await self._log.part(self._subject, seq - 1, self._timeout_s, 1)).messages
        if not found:
            message = await self._log.identity(seq)
            found = [message] if message is not None else []
        if not found and seq >= group_of(await self._floor()):
            # A node that believes that it leads may lag, too.
            raise LogUnavailable(f"group {seq} must be in the log, but no node shows it")
        # A replica that shows a later group has had this one, which is gone.
        if not found or found[0].seq > seq or (group := group_in(found[0])) is None:
            return None
        return group, found[0].body

    async def _some(self, seq: int, limit: int) -> Part:
        """The first groups above a sequence, as any replica has them: as many as come in a short time."""
        clock = asyncio.get_running_loop().time
        began, full = clock(), False
        try:
            part = await self._log.part(self._subject, seq, self._timeout_s, limit, self._bytes)
            full = part.more > 0 and len(part.messages) < limit
        finally:
            if clock() - began > _ANSWER_S:
                self._bytes = max(self._bytes // 2, _BYTES_MIN)
            elif full:
                self._bytes = min(self._bytes * 2, _BYTES_MAX)
        return part

    async def _see_all(self) -> None:
        if not self._heads.life or self._anew:
            await self._begin()
        #: Whether this has begun anew because groups were missing. They are missing for a reader that did not begin
        #: well, or that a purge has overtaken. Groups above the floor that are still missing after that are lost,
        #: unless they are missing behind a group that was only told of.
        anew = False
        #: How many of the groups that were there at the first answer are left; None: no answer yet. What comes later is
        #: for a later call: somebody else may write as fast as this process reads.
        left: int | None = None
        while True:
            heard = self.last_seen.only_heard  # then look whether that group is there, too
            part = await self._some(self._heads.seen - heard, _AT_ONCE)
            try:
                if not await self._is_as_told(part.messages, heard=heard):
                    self._misheard()
                    await self._begin()
                    left = None
                    continue
                self._observe(part.messages)
            except Gap as e:
                again = anew and not self.last_seen.only_heard
                if self.last_seen.only_heard:
                    self.last_seen.misheard()
                if again and e.group.before >= group_of(await self._floor()):
                    _log.error("the log has lost groups: %s", e, extra={"action": "log_gap"})
                    self._heads.observe_behind_gap(e.group)
                    self.last_seen.is_certain(e.group.seq, e.group.id)
                else:
                    if again:  # what is missing was purged or erased since: the floor is above it now
                        await asyncio.sleep(_AGAIN_S)
                    anew = True
                    self.last_seen.doubt()
                    await self._begin()
                    _log.warning("following the log again: %s", e, extra={"action": "log_gap"})
                    left = None
                continue
            left = part.more if left is None else left - len(part.messages)
            if left <= 0 or not (part.messages and part.more):
                return

    async def _is_as_told(self, shown: Sequence[StoredMessage], *, heard: bool) -> bool:
        """Whether what was told agrees with what the log shows. `heard`: the first shown should be a group told of."""
        return all(map(self.last_seen.fits, shown)) and (bool(shown) or not heard or await self.last_seen.is_there())

    async def _begin(self) -> None:
        """Begin behind what lies below the floor. Raises LogRolledBack, LogUnavailable."""
        await self._refuse_if_lost()
        connection, floor = self._log.connections, await self._floor()
        last = await last_on(self._log, self._subject, self._timeout_s)
        below = group_of(floor) - 1
        if last is None:
            self._heads.start(floor, 0, 0)
        elif last.seq <= below:
            group = group_in(last)
            self._heads.start(floor, last.seq, group.id if group is not None else 0)
        else:
            self._heads.start(floor, max(below, 0), None)
        known = last is None or last.seq <= below
        self.last_seen.begin(Seen(self._heads.seen, self._heads.seen_id) if known else Seen(0, 0), connection)
        self._anew = False
        self._kept.clear()
        self._kept_bytes = 0
        self._lost()

    def _observe(self, messages: Sequence[StoredMessage]) -> None:
        for message in messages:
            group = group_in(message)
            if group is None:
                self._heads.skip(message.seq)
                self.last_seen.is_certain(message.seq, 0)
                continue
            self._heads.observe(group, stored_bytes(group, message))
            self.last_seen.is_certain(group.seq, group.id)
            self._keep(group, message.body)

    def _keep(self, group: Group, body: bytes) -> None:
        if group.seq not in self._kept:
            self._kept[group.seq] = group, body
            self._kept_bytes += _memory_of(group, body)
            while self._kept_bytes > _KEPT_BYTES and len(self._kept) > 1:
                _, oldest = self._kept.popitem(last=False)
                self._kept_bytes -= _memory_of(*oldest)


def _memory_of(group: Group, body: bytes) -> int:
    """About how many bytes of memory a group takes: with small entries, the records take most."""
    return len(body) + _RECORD_BYTES * len(group.records)
