"""The groups that a process has at hand: it looks at those of others when it must, and keeps the last ones whole."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from bufstore.buffer.groups.group import Group, decode_header, stored_bytes
from bufstore.buffer.groups.heads import Gap, Heads
from bufstore.buffer.groups.written import Behind, Written
from bufstore.buffer.places import group_of
from bufstore.buffer.shared_call import SharedCall
from bufstore.errors import MalformedEntry
from bufstore.jetstream.messages import StoredMessage

_log = logging.getLogger(__name__)

#: How many groups are asked for at a time.
_AT_ONCE = 64
#: Of the groups seen last, so many bytes are kept: reads of what is not flushed yet want them.
_KEPT_BYTES = 32 << 20
#: What a record takes in memory.
_RECORD_BYTES = 256


class Subject(Protocol):
    """A subject of the log, as it is read here."""

    async def last(self, subjects: Sequence[str], timeout_s: float) -> dict[str, StoredMessage]:
        """See `bufstore.jetstream.messages.Stream`."""
        ...

    async def read(self, subject: str, seq: int, timeout_s: float, limit: int = 0) -> list[StoredMessage]:
        """See `bufstore.buffer.groups.log.GroupsInStream`."""
        ...


class Tail:
    """The end of the log's groups, as far as this process has seen it."""

    def __init__(
        self,
        log: Subject,
        subject: str,
        heads: Heads,
        floor: Callable[[], Awaitable[int]],
        erased: Callable[[], Awaitable[int]],
        lost: Callable[[], None],
        timeout_s: float,
    ) -> None:
        """`floor`: from where on what is in the log must be known. `erased`: up to where groups may be gone below it.

        `lost`: told when `heads` had to begin anew.
        """
        self._log, self._subject, self._heads = log, subject, heads
        self._floor, self._erased, self._lost = floor, erased, lost
        self._timeout_s = timeout_s
        self._kept: OrderedDict[int, tuple[Group, bytes]] = OrderedDict()
        self._kept_bytes = 0
        self._one_read = asyncio.Lock()
        #: Calls that come while one is on its way must not rest on what it read before they came.
        self._see = SharedCall(self._see_all)

    async def see_all(self) -> None:
        """Return once everything has been seen that was in the log when this was called. Raises LogUnavailable."""
        await self._see()

    async def first_behind(self, seq: int) -> Behind | None:
        """What stands behind the group with this sequence; None if nothing does. Sees everything."""
        await self.see_all()
        if self._heads.seen <= seq:
            return None
        for known, _ in reversed(self._kept.values()):
            if known.before == seq:
                return Behind(known.seq, known.id, known.before)
            if known.seq <= seq:
                break
        found = await self._log.read(self._subject, seq, self._timeout_s, limit=1)
        if not found:
            return None
        group = self.decoded(found[0])
        return Behind(found[0].seq, 0, seq) if group is None else Behind(group.seq, group.id, group.before)

    def hear(self, message: StoredMessage, body_bytes: int) -> int | None:
        """Note a group that was just stored, whose body is not here. Returns its id; None: it is no group."""
        group = self.decoded(message)
        # The next look shows what is not taken from here: what large entries take is told by the body.
        if group is not None and self._heads.life and not group.parts:
            with contextlib.suppress(Gap):
                self._heads.observe(group, stored_bytes(group, message) + body_bytes)
        return group.id if group is not None else None

    def note(self, written: Written) -> None:
        """Keep a group that this process wrote."""
        self._keep(written.group, written.message.body)

    async def group(self, seq: int) -> tuple[Group, bytes] | None:
        """The group with this sequence and its body; None if it is not in the log any more, or not a group."""
        if seq not in self._kept:
            async with self._one_read:  # many threads may have their last entries in one group
                if seq not in self._kept:
                    return await self._read(seq)
        self._kept.move_to_end(seq)
        return self._kept[seq]

    async def _read(self, seq: int) -> tuple[Group, bytes] | None:
        # Who wants one group wants its neighbours next, those that are not here.
        first = max(seq - _AT_ONCE // 2, 0)
        behind = next((known for known in range(seq - 1, first, -1) if known in self._kept), first)
        found = None
        for message in await self._log.read(self._subject, behind, self._timeout_s, limit=_AT_ONCE // 2):
            group = self.decoded(message)
            if group is not None:
                self._keep(group, message.body)
                found = (group, message.body) if message.seq == seq else found
        return found

    async def _see_all(self) -> None:
        if not self._heads.life:
            await self._begin()
        began_before = 0
        while True:
            behind = await self._log.read(self._subject, self._heads.seen, self._timeout_s, limit=_AT_ONCE)
            try:
                self._observe(behind)
            except Gap as e:
                if e.group.seq == began_before and e.group.before > group_of(await self._erased()):
                    _log.error("the log has lost groups: %s", e, extra={"action": "log_gap"})
                    self._heads.observe_behind_gap(e.group)
                else:
                    _log.warning("begins to follow the log anew: %s", e, extra={"action": "log_gap"})
                    began_before = e.group.seq
                    await self._begin()
                continue
            if len(behind) < _AT_ONCE:
                return

    async def _begin(self) -> None:
        """Begin behind what lies below the floor."""
        floor = await self._floor()
        last = (await self._log.last([self._subject], self._timeout_s)).get(self._subject)
        below = group_of(floor) - 1
        if last is None:
            self._heads.start(floor, 0, 0)
        elif last.seq <= below:
            group = self.decoded(last)
            self._heads.start(floor, last.seq, group.id if group is not None else 0)
        else:
            self._heads.start(floor, max(below, 0), None)
        self._kept.clear()
        self._kept_bytes = 0
        self._lost()

    def _observe(self, messages: Sequence[StoredMessage]) -> None:
        for message in messages:
            group = self.decoded(message)
            if group is None:
                self._heads.skip(message.seq)
                continue
            self._heads.observe(group, stored_bytes(group, message))
            self._keep(group, message.body)

    def decoded(self, message: StoredMessage) -> Group | None:
        """The group that a message is; None if it is none."""
        try:
            return decode_header(message)
        except MalformedEntry as e:
            _log.error("message %d of the log is not a group: %s", message.seq, e, extra={"action": "group_malformed"})
            return None

    def _keep(self, group: Group, body: bytes) -> None:
        if group.seq not in self._kept:
            self._kept[group.seq] = group, body
            self._kept_bytes += _memory_of(group, body)
            while self._kept_bytes > _KEPT_BYTES and len(self._kept) > 1:
                _, oldest = self._kept.popitem(last=False)
                self._kept_bytes -= _memory_of(*oldest)


def _memory_of(group: Group, body: bytes) -> int:
    """About how much memory a group takes: of small entries the records are most."""
    return len(body) + _RECORD_BYTES * len(group.records)
