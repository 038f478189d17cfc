"""A server of groups that fails in all ways in which a real one can, and the entries in its groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from bufstore.buffer import recent_keys
from bufstore.buffer.entry import Base, Entry, decode, encode
from bufstore.buffer.groups.group import Draft, Group, NewEntry, decode_entry, decode_header
from bufstore.buffer.groups.log import GroupLog
from bufstore.buffer.groups.oversize import joined
from bufstore.buffer.places import group_of, place
from bufstore.buffer.ports.log import Floor
from bufstore.buffer.subjects import Subjects
from bufstore.config import BufferConfig
from bufstore.errors import MalformedEntry
from bufstore.jetstream.messages import Outgoing, StoredMessage
from bufstore.memory.shared_state import MemoryBucket, MemorySharedState
from bufstore.threads.model import Run, encode_messages, encode_run
from bufstore.threads.payload import Payload, encode_payload
from bufstore.threads.write import save_of
from unit.fake_log import FakeLog

SUBJECTS = Subjects("thread", 4)


class GroupServer(FakeLog):
    """A `FakeLog` below the groups. It shows entries with their places, and other processes write groups, too."""

    #: The class of a process's log.
    kind: Callable[[Any, MemorySharedState, BufferConfig, str], GroupLog] = GroupLog

    def __init__(self, message_bytes_max: int = 1 << 20) -> None:
        super().__init__(message_bytes_max)
        self.store = self._store
        self.last_of = self._last_of
        self.bucket = MemoryBucket()
        #: The logs of the processes.
        self.opened: list[GroupLog] = []
        #: The entries of groups without parts, because tests ask for them again and again.
        self._shown: dict[int, tuple[StoredMessage, list[StoredMessage]]] = {}

    def open(self, config: BufferConfig) -> GroupLog:
        """Open the log of one more process."""
        config = dataclasses.replace(config, log=dataclasses.replace(config.log, partitions=SUBJECTS.partitions))
        log = self.kind(self, MemorySharedState(self.bucket), config, f"process{len(self.opened)}")
        self.opened.append(log)
        return log

    async def publish(self, message: Outgoing, timeout_s: float) -> int:
        if message.subject == SUBJECTS.groups:
            self.batches.append(len(decode_header(StoredMessage("", 1 << 50, message.header, b"")).records))
        return await self._send("publish", [message])

    @property
    def messages(self) -> list[StoredMessage]:
        """All entries that are stored."""
        parts = {m.seq: m for m in self.stream.messages if m.subject == SUBJECTS.parts}
        return [entry for message in self.stream.messages for entry in self._entries(message, parts)]

    def _entries(self, message: StoredMessage, parts: dict[int, StoredMessage]) -> list[StoredMessage]:
        known = self._shown.get(message.seq)
        if known is not None and known[0] is message:
            return known[1]
        group = _group(message)
        found, whole = [], True
        for number in range(len(group.records) if group is not None else 0):
            assert group is not None
            entry = decode_entry(group, number, message.body)
            payload = _joined(entry.payload, parts) if entry.elsewhere else entry.payload
            whole = whole and not entry.elsewhere
            at = place(group.seq, number)
            found.append(StoredMessage(SUBJECTS.of(entry.thread_id), at, entry.header, payload))
        if whole:
            self._shown[message.seq] = message, found
        return found

    @property
    def last_seq(self) -> int:
        """The place of the last entry."""
        return max((m.seq for m in self.messages), default=0)

    def _last_of(self, subject: str) -> int:
        return max((m.seq for m in self.messages if m.subject == subject), default=0)

    def _store(self, messages: Sequence[Outgoing]) -> int:
        """Store groups and parts as they are, and threads' entries in a group, as another process does."""
        if messages[0].subject not in (SUBJECTS.groups, SUBJECTS.parts):
            entries = [
                NewEntry(
                    thread_id := SUBJECTS.thread_id(m.subject),
                    SUBJECTS.partition(thread_id),
                    self._last_of(m.subject),
                    m.header,
                    m.body,
                )
                for m in messages
            ]
            before = next((m for m in reversed(self.stream.messages) if m.subject == SUBJECTS.groups), None)
            group = _group(before) if before is not None else None
            draft = Draft(next(self._ids), entries)
            seq = before.seq if before is not None else 0
            header = draft.header(group.id if group is not None else 0, seq, 0)
            messages = [Outgoing(SUBJECTS.groups, draft.body, header, seq)]
        return self.stream.store(messages)

    def intrude(self, subject: str, content: str = "intruder") -> int:
        if subject in (SUBJECTS.groups, SUBJECTS.parts):
            subject = SUBJECTS.of("t")
        there = [m for m in self.messages if m.subject == subject]
        before = decode(there[-1]) if there else None
        id_ = next(self._ids)
        run_ = Run(run_id=f"intruder-{id_}", thread_id="t")
        entry = Entry(
            id=id_,
            prev_id=before.id if before else 0,
            base=Base.CHAINED if before else Base.UNKNOWN,
            seen=0 if before else self.last_seq,
            version=1,
            self_contained=True,
            keys=recent_keys.add(before.keys if before else b"", recent_keys.item(recent_keys.key_of(id_), b"")),
            # Like any writer, the intruder knows all keys only if the writer before it did.
            keys_complete=before is not None and before.keys_complete,
            payload=encode_payload(Payload(0, encode_messages([f"{content} {id_}"]), encode_run(run_), save_of(run_))),
        )
        header, body = encode(entry)
        self._store([Outgoing(subject, body, header)])
        return id_

    def expire_below(self, seq: int) -> None:
        """Remove everything below this place, as retention does, and tell every process."""
        last = max((m.seq for m in self.stream.messages if m.subject == SUBJECTS.groups), default=0)
        below = min(group_of(seq), last)
        left = [g for m in self.stream.messages if m.seq >= below and (g := _group(m)) is not None]
        self.stream.purge(min([below, *(g.parts for g in left if g.parts)]))
        for partition in range(SUBJECTS.partitions):
            self.bucket.put("floor", partition, Floor(seq, seq))
        for log in self.opened:
            log._forgetting.forget(seq)


def _group(message: StoredMessage) -> Group | None:
    try:
        return decode_header(message) if message.subject == SUBJECTS.groups else None
    except MalformedEntry:
        return None


def _joined(reference: bytes, parts: dict[int, StoredMessage]) -> bytes:
    async def read(seq: int) -> StoredMessage | None:
        return parts.get(seq)

    try:
        joined(reference, read).send(None)  # type: ignore[attr-defined]
    except StopIteration as e:
        payload: bytes = e.value
        return payload
    raise AssertionError("what is in memory is waited for")
