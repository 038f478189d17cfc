"""Reads and writes of a mailbox's bucket. A read shows every write that returned before it, also on replicas.

A single server answers each at one moment. Of replicas only the leader is up to date, and it shows one message at a
time; any copy shows many, and may lag. So the leader tells how far a copy must be that is to be believed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

from bufstore.errors import Closed, LogFull, LogUnavailable, MalformedEntry, TooLarge
from bufstore.jetstream.connection import Connection
from bufstore.jetstream.group_commit import GroupCommit
from bufstore.jetstream.messages import AppendUnknown, BatchRefused, Conflict, Outgoing, StoredMessage
from bufstore.jetstream.stream import NatsStream
from bufstore.jetstream.subject_tokens import untoken
from bufstore.mailbox.decisions import is_stale
from bufstore.mailbox.model import Dispatch, MailboxThread
from bufstore.mailbox.nats_keys import Keys
from bufstore.mailbox.nats_room import while_full

_log = logging.getLogger(__name__)

PAGE = 1000
#: Every step reads before it writes, which takes less than this share of a group's time.
_LINGER = 0.3
_OVERHEAD = 512
#: How long to wait for a copy that is behind its leader.
_BEHIND_S = 0.005
#: So often a leader is made to prove that it leads before it is believed that a write of ours is gone.
_PROOFS = 2
_REMEMBERED = 10_000


class Bucket:
    """What all parts of a mailbox on NATS stand on.

    Reads raise LogUnavailable, TooManyResults, and Closed while it is not open.
    """

    def __init__(
        self, connection: Connection, stream: NatsStream, keys: Keys, replicated: bool, timeout_s: float
    ) -> None:
        self.connection = connection
        self.stream = stream
        self.keys = keys
        self.replicated = replicated
        self.timeout_s = timeout_s
        self._writes = GroupCommit(stream, linger=_LINGER)
        self._alone = asyncio.Lock()
        self._open = False
        #: Sequences of this instance's last writes, by subject.
        self._written: OrderedDict[str, int] = OrderedDict()
        #: Sequences of messages that cannot be read, of which was told.
        self._set_aside: set[int] = set()

    def open(self) -> None:
        self._writes.start()
        self._open = True

    async def aclose(self) -> None:
        self._open = False
        await self._writes.aclose()

    def check_open(self) -> None:
        if not self._open:
            raise Closed("the mailbox is closed or not open")

    async def info(self) -> dict[str, Any]:
        """What the server says of the stream."""
        return await self.stream.api(f"STREAM.INFO.{self.keys.stream}")

    def check_size(self, body: bytes) -> None:
        """Raise TooLarge for what no message can hold."""
        limit = self.connection.client().max_payload - _OVERHEAD
        if len(body) > limit:
            raise TooLarge(len(body), limit)

    async def put(self, messages: Sequence[Outgoing]) -> int:
        """Write all or none, as neighbours; the last sequence. Raises Conflict, AppendUnknown, LogFull, TooLarge."""
        self.check_open()
        for message in messages:
            self.check_size(message.body)
        try:
            last = await self._writes.submit(messages)
        except LogFull:
            last = await while_full(self.timeout_s)(self._put_alone, messages)
        self._wrote(messages, last)
        return last

    async def _put_alone(self, messages: Sequence[Outgoing]) -> int:
        # A step makes room when it is done, and needs some before: many at once need more than one after the other.
        async with self._alone:
            try:
                return await self.stream.publish_batch(messages, self.timeout_s)
            except BatchRefused as e:
                raise LogUnavailable(f"the server accepts no batch now: {e}") from None

    async def put_each(self, messages: Iterable[Outgoing]) -> set[str]:
        """Write each by itself; the subjects of those that were not, or not surely."""
        each = list(messages)
        failed = set()
        for m, outcome in zip(
            each, await asyncio.gather(*(self.put([m]) for m in each), return_exceptions=True), strict=True
        ):
            if isinstance(outcome, (Conflict, AppendUnknown)):
                failed.add(m.subject)
            elif isinstance(outcome, BaseException):
                raise outcome
        return failed

    async def remove(self, subject: str, seq: int) -> None:
        """Remove what a filter has, up to a sequence. It stores nothing."""
        await self.stream.api(f"STREAM.PURGE.{self.keys.stream}", {"filter": subject, "seq": seq + 1})

    async def read(self, subject: str, seq: int, limit: int) -> list[StoredMessage]:
        """The first `limit` above a sequence, as any copy has them."""
        return await self.stream.read(subject, seq, self.timeout_s, limit)

    async def last(self, subjects: Sequence[str]) -> dict[str, StoredMessage]:
        """The last message of each, as the leader has it; of one moment, on a stream without replicas."""
        self.check_open()
        if not self.replicated:
            return await self.stream.last(subjects, self.timeout_s)
        found = await self.stream.last([s for s in subjects if "*" not in s], self.timeout_s)
        for _ in range(_PROOFS):
            older = [s for s in subjects if self._written.get(s, 0) > (found[s].seq if s in found else 0)]
            if not older:
                break
            # A leader that the others have left answers for seconds; or it is gone since.
            try:
                await self.stream.prove(self.keys.of("unused", "*"), self.timeout_s)
            except AppendUnknown as e:  # of a purge of nothing
                raise LogUnavailable(f"nobody proves to lead the mailbox: {e}") from None
            found |= await self.stream.last(older, self.timeout_s)
        else:
            for s in older:
                del self._written[s]
        wild = [s for s in subjects if "*" in s]
        # The leader shows no more than one message of a wildcard. It tells how far a copy must be that shows them all.
        ends = await self.stream.ends(wild, self.timeout_s)
        if wild := [s for s, end in zip(wild, ends, strict=True) if end]:
            found |= await self.copy(wild, max(ends))
        return found

    def _wrote(self, messages: Sequence[Outgoing], last: int) -> None:
        """Note what this instance has written, the last message at `last`: what it reads must not be older."""
        if self.replicated:
            for back, m in enumerate(reversed(messages)):
                if m.body:
                    self._written[m.subject] = last - back
                    self._written.move_to_end(m.subject)
            while len(self._written) > _REMEMBERED:
                self._written.popitem(last=False)

    async def copy(self, subjects: Sequence[str], end: int = 0) -> dict[str, StoredMessage]:
        """The same as any copy has it that is as far as `end`. At most 1024 messages."""
        found: dict[str, StoredMessage] = {}
        deadline = time.monotonic() + self.timeout_s
        start = 0
        while True:
            messages, more, reached = await self.stream.shown(subjects, start, self.timeout_s)
            if reached < end and not more:
                if end := await self._behind(subjects, end, deadline):
                    continue
                return {}
            found |= {m.subject: m for m in messages}
            if not more or not messages:
                return found
            start = messages[-1].seq + 1

    async def all(self, subject: str, limit: int | None = None) -> list[StoredMessage]:
        """All (or the first `limit`) that a filter has, in the stream's order."""
        messages: list[StoredMessage] = []
        deadline = time.monotonic() + self.timeout_s
        seq = end = 0
        while limit is None or len(messages) < limit:
            page = await self.read(subject, seq, PAGE)
            messages += [m for m in page if m.body]
            seq = page[-1].seq if page else seq
            if len(page) >= PAGE:
                deadline = time.monotonic() + self.timeout_s
            elif seq >= end:
                end = await self._end([subject]) if self.replicated else 0
                if seq >= end:
                    break
            else:
                end = await self._behind([subject], end, deadline)
        return messages[:limit]

    async def _end(self, subjects: Sequence[str]) -> int:
        return max(await self.stream.ends(subjects, self.timeout_s))

    async def _behind(self, subjects: Sequence[str], end: int, deadline: float) -> int:
        """Wait for a copy that is not as far as `end`, as it seems; how far it must be now.

        What the leader had there may be gone since, and a copy that has nothing does not say how far it is.
        """
        if time.monotonic() > deadline:
            raise LogUnavailable("the copies of the mailbox are behind their leader")
        await asyncio.sleep(_BEHIND_S)
        return min(end, await self._end(subjects))

    def dispatches(self, found: Iterable[StoredMessage]) -> Iterator[tuple[Dispatch, StoredMessage]]:
        """What can be read; what cannot is set aside: it stands where it is, and nothing waits for it."""
        for message in found:
            try:
                if message.body:
                    yield self.keys.dispatch(message), message
            except MalformedEntry as e:
                if message.seq not in self._set_aside:
                    _log.warning("%s; it is set aside", e, extra={"action": "mailbox_foreign"})
                self._set_aside = {message.seq, *islice(self._set_aside, 1000)}

    async def states(self, thread_ids: Iterable[str]) -> dict[str, MailboxThread]:
        """As any copy has them; of those that cannot be read the empty one."""
        states = {t: MailboxThread(thread_id=t) for t in thread_ids}
        for message in (await self._copies(list(map(self.keys.thread, states)))).values():
            with suppress(MalformedEntry):
                state = self.keys.state(message, untoken(message.subject.rpartition(".")[2]))
                states[state.thread_id] = state
        return states

    async def _copies(self, subjects: Sequence[str]) -> dict[str, StoredMessage]:
        found: dict[str, StoredMessage] = {}
        for i in range(0, len(subjects), PAGE):
            found |= await self.copy(subjects[i : i + PAGE])
        return found

    async def waiting(self, found: Iterable[StoredMessage]) -> list[Dispatch]:
        """Dispatches of messages under ``q`` and ``r``; without what is superseded, and what a killed server brought
        back of those that have ended or are claimed."""
        queued = {(d.thread_id, d.dispatch_id): d for d, _ in self.dispatches(found)}
        states = await self.states({thread_id for thread_id, _ in queued})
        ended = await self._copies([self.keys.ended(d) for d in queued.values()])
        waiting = []
        for d in queued.values():
            active = states[d.thread_id].active
            claimed = active is not None and active.dispatch_id == d.dispatch_id
            if not claimed and not is_stale(d, states[d.thread_id]) and self.keys.ended(d) not in ended:
                waiting.append(d)
        return waiting
