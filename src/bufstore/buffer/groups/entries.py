"""The entries of a group, each as the message of its thread that the buffer knows."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Collection, Sequence

from bufstore.buffer.entry import Base, header_of
from bufstore.buffer.groups.group import Group, body_of, decode_entry, group_in
from bufstore.buffer.groups.oversize import in_front_of, joined
from bufstore.buffer.places import first_place, place
from bufstore.buffer.subjects import Subjects
from bufstore.errors import LogUnavailable, MalformedEntry
from bufstore.jetstream.messages import StoredMessage

#: The partition of a group without entries.
_NO_PARTITION = -1


class Purged(LogUnavailable):
    """What was read is not in the log any more, nor anything before it."""


class Entries:
    """Finds entries in their groups, and the payloads of large ones beside them."""

    def __init__(self, subjects: Subjects, held: Callable[[int], Awaitable[StoredMessage | None]]) -> None:
        """`held`: the message of the stream at a sequence that was there once."""
        self._subjects, self._held = subjects, held

    async def read(self, group: Group, number: int, body: bytes) -> StoredMessage:
        """One entry of a group. Raises Purged, LogUnavailable."""
        entry, elsewhere = self._in_place(group, number, body)
        return await self._with_payload(group, entry) if elsewhere else entry

    async def split(
        self, message: StoredMessage, partitions: Collection[int]
    ) -> tuple[int, Sequence[tuple[int, StoredMessage]]]:
        """See `bufstore.buffer.groups.delivery.Split`. Raises Purged, LogUnavailable.

        The last entry, if it belongs to another partition, has no payload that stands elsewhere.
        """
        group = group_in(message)
        if group is None:  # anybody may publish: the message belongs to no thread, and somebody must look at it
            return 0, [(0, self.foreign(message))]
        if not group.records:
            return group.before, [(_NO_PARTITION, self.mark(group))]
        found = []
        last = len(group.records) - 1
        for number, record in enumerate(group.records):
            if record.partition in partitions or number == last:
                entry, elsewhere = self._in_place(group, number, message.body)
                if elsewhere and record.partition in partitions:
                    entry = await self._with_payload(group, entry)
                found.append((record.partition, entry))
        return group.before, found

    def foreign(self, message: StoredMessage) -> StoredMessage:
        """A message among the groups that is no group, as if it were an entry."""
        return StoredMessage(message.subject, first_place(message.seq), message.header, message.body)

    def mark(self, group: Group) -> StoredMessage:
        """The stand-in for a group without entries, at its place, for cursors that pass it. It has the group's id."""
        header = header_of(group.id, 0, Base.UNKNOWN, 0, 0, False, b"", True, None, b"")
        return StoredMessage(self._subjects.groups, first_place(group.seq), header, b"")

    def head(self, group: Group, number: int, body: bytes) -> StoredMessage:
        """One entry of a group, whose payload may only say where the real payload stands."""
        return self._in_place(group, number, body)[0]

    def _in_place(self, group: Group, number: int, body: bytes) -> tuple[StoredMessage, bool]:
        """An entry as it stands in its group, and whether its payload only says where the real payload stands."""
        at = place(group.seq, number)
        try:
            entry = decode_entry(group, number, body)
        except MalformedEntry:
            # Only the hash of its thread is known. It gets no more of the group's body than its own part.
            subject = f"{self._subjects.prefix}.{group.records[number].partition}."
            return StoredMessage(subject, at, None, body_of(group, number, body)), False
        return StoredMessage(self._subjects.of(entry.thread_id), at, entry.header, entry.payload), entry.elsewhere

    async def _with_payload(self, group: Group, entry: StoredMessage) -> StoredMessage:
        payload, part = entry.body, in_front_of(group.seq, self._held)
        try:
            payload = await joined(payload, part)
        except MalformedEntry:  # a part is missing, or the parts do not fit the checksum
            if await self._held(group.seq) is None:
                raise Purged("a large entry was purged while it was read") from None
            # A node that has the group has the parts before it. So the one that lacked a part led no more: ask again.
            with contextlib.suppress(MalformedEntry):
                payload = await joined(payload, part)
        return StoredMessage(entry.subject, entry.seq, entry.header, payload)
