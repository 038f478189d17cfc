"""A stream in memory that passes every entry of its groups to the archive."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from bufstore.buffer.groups.group import Draft, Group, NewEntry, decode_entry, decode_header
from bufstore.buffer.groups.oversize import joined
from bufstore.buffer.places import last_place, place
from bufstore.buffer.subjects import Subjects
from bufstore.buffer.target import Target
from bufstore.config import LogConfig
from bufstore.errors import MalformedEntry
from bufstore.jetstream.messages import Outgoing, StoredMessage
from bufstore.memory.log import MemoryStream

_ids = itertools.count(1 << 60)


class ArchivingStream(MemoryStream):
    """A stream of groups that archives each entry with its place, and keeps it there when it is purged."""

    def __init__(
        self, config: LogConfig, archive: list[StoredMessage], epoch: int = 0, target: Target | None = None
    ) -> None:
        super().__init__(config, epoch, target)
        self._subjects = Subjects(config.subject, config.partitions)
        self._archive = archive
        #: The entries of each group, by the group's sequence; the parts of large entries.
        self._entries: dict[int, list[StoredMessage]] = {}
        self._parts: dict[int, StoredMessage] = {}

    def store(self, messages: Sequence[Outgoing]) -> int:
        end = super().store(messages)
        for message in self.messages[-len(messages) :]:
            if message.subject == self._subjects.parts:
                self._parts[message.seq] = message
            elif message.subject == self._subjects.groups:
                self._entries[message.seq] = self._explode(message)
                self._archive += self._entries[message.seq]
        return end

    def _explode(self, message: StoredMessage) -> list[StoredMessage]:
        group = _group(message)
        found = []
        for number in range(len(group.records) if group is not None else 0):
            assert group is not None
            entry = decode_entry(group, number, message.body)
            payload = _driven(joined(entry.payload, self._part)) if entry.elsewhere else entry.payload
            found.append(
                StoredMessage(self._subjects.of(entry.thread_id), place(group.seq, number), entry.header, payload)
            )
        return found

    async def _part(self, seq: int) -> StoredMessage | None:
        return self._parts.get(seq)

    @property
    def last_place(self) -> int:
        """An upper bound of the places in the stream."""
        return last_place(self.end)

    def end_of(self, thread_id: str) -> int:
        """The place of the thread's last entry that is still there; 0 if there is none."""
        subject = self._subjects.of(thread_id)
        return max((e.seq for e in self._there() if e.subject == subject), default=0)

    @property
    def end_of_entries(self) -> int:
        """The place of the last entry that is still there; 0 if there is none."""
        return max((e.seq for e in self._there()), default=0)

    def _there(self) -> list[StoredMessage]:
        return [entry for m in self.messages for entry in self._entries.get(m.seq, ())]

    def lose_end(self, count: int) -> None:
        """Remove the last messages, as a power failure does."""
        left = self.messages[:-count]
        self.end = self.messages[-count].seq - 1
        self.messages, self._of_subject = left, {}
        for message in left:
            self._of_subject.setdefault(message.subject, []).append(message)

    def write_entries(self, entries: Sequence[tuple[str, str | None, bytes]]) -> None:
        """Store a valid group with these entries: thread, header and payload of each."""
        before = 0, 0
        if (last := self.last_of(self._subjects.groups)) and self.messages:
            group = _group(next(m for m in reversed(self.messages) if m.seq == last))
            before = (group.id if group is not None else 0), last
        new = [
            NewEntry(thread_id, self._subjects.partition(thread_id), self.end_of(thread_id), header, payload)
            for thread_id, header, payload in entries
        ]
        draft = Draft(next(_ids), new)
        self.store([Outgoing(self._subjects.groups, draft.body, draft.header(*before, 0), before[1])])


def _group(message: StoredMessage) -> Group | None:
    try:
        return decode_header(message)
    except MalformedEntry:
        return None


def _driven(work: object) -> bytes:
    """Run a coroutine that never waits."""
    try:
        work.send(None)  # type: ignore[attr-defined]
    except StopIteration as e:
        payload: bytes = e.value
        return payload
    raise AssertionError("what is in memory is waited for")
