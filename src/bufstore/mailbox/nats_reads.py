"""Reads of a mailbox's bucket that show every write that returned before them, also on replicas.

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

from bufstore.errors import Closed, LogUnavailable, MalformedEntry
from bufstore.jetstream.messages import AppendUnknown, Outgoing, StoredMessage
from bufstore.jetstream.stream import NatsStream
from bufstore.jetstream.subject_tokens import untoken
from bufstore.mailbox.decisions import is_stale
from bufstore.mailbox.model import Dispatch, MailboxThread
from bufstore.mailbox.nats_keys import Keys

_log = logging.getLogger(__name__)

PAGE = 1000
#: How long to wait for a copy that is behind its leader.
_BEHIND_S = 0.005
#: So often a leader is made to prove that it leads before it is believed that a write of ours is gone.
_PROOFS = 2
_REMEMBERED = 10_000


class NatsReads:
    """What is read of one bucket. All methods raise LogUnavailable, TooManyResults, and Closed while it is not open."""

    def __init__(self, stream: NatsStream, keys: Keys, replicated: bool, timeout_s: float) -> None:
        self._stream = stream
        self._keys = keys
        self.replicated = replicated
        self._timeout_s = timeout_s
        self.open = False
        #: Sequences of this instance's last writes, by subject.
        self._written: OrderedDict[str, int] = OrderedDict()
        #: Sequences of messages that cannot be read, of which was told.
        self._set_aside: set[int] = set()

    async def last(self, subjects: Sequence[str]) -> dict[str, StoredMessage]:
        """The last message of each, as the leader has it; of one moment, on a stream without replicas."""
        self.check_open()
        if not self.replicated:
            return await self._stream.last(subjects, self._timeout_s)
        found = await self._stream.last([s for s in subjects if "*" not in s], self._timeout_s)
        for _ in range(_PROOFS):
            older = [s for s in subjects if self._written.get(s, 0) > (found[s].seq if s in found else 0)]
            if not older:
                break
            # A leader that the others have left answers for seconds; or it is gone since.
            try:
                await self._stream.prove(self._keys.of("unused", "*"), self._timeout_s)
            except AppendUnknown as e:  # of a purge of nothing
                raise LogUnavailable(f"nobody proves to lead the mailbox: {e}") from None
            found |= await self._stream.last(older, self._timeout_s)
        else:
            for s in older:
                del self._written[s]
        wild = [s for s in subjects if "*" in s]
        # The leader shows no more than one message of a wildcard. It tells how far a copy must be that shows them all.
        ends = await self._stream.ends(wild, self._timeout_s)
        if wild := [s for s, end in zip(wild, ends, strict=True) if end]:
            found |= await self.copy(wild, max(ends))
        return found

    def wrote(self, messages: Sequence[Outgoing], last: int) -> None:
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
        deadline = time.monotonic() + self._timeout_s
        start = 0
        while True:
            messages, more, reached = await self._stream.shown(subjects, start, self._timeout_s)
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
        deadline = time.monotonic() + self._timeout_s
        seq = end = 0
        while limit is None or len(messages) < limit:
            page = await self._stream.read(subject, seq, self._timeout_s, PAGE)
            messages += [m for m in page if m.body]
            seq = page[-1].seq if page else seq
            if len(page) >= PAGE:
                deadline = time.monotonic() + self._timeout_s
            elif seq >= end:
                end = await self._end([subject]) if self.replicated else 0
                if seq >= end:
                    break
            else:
                end = await self._behind([subject], end, deadline)
        return messages[:limit]

    async def _end(self, subjects: Sequence[str]) -> int:
        return max(await self._stream.ends(subjects, self._timeout_s))

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
                    yield self._keys.dispatch(message), message
            except MalformedEntry as e:
                if message.seq not in self._set_aside:
                    _log.warning("%s; it is set aside", e, extra={"action": "mailbox_foreign"})
                self._set_aside = {message.seq, *islice(self._set_aside, 1000)}

    async def states(self, thread_ids: Iterable[str]) -> dict[str, MailboxThread]:
        """As any copy has them; of those that cannot be read the empty one."""
        states = {t: MailboxThread(thread_id=t) for t in thread_ids}
        for message in (await self._copies(list(map(self._keys.thread, states)))).values():
            with suppress(MalformedEntry):
                state = self._keys.state(message, untoken(message.subject.rpartition(".")[2]))
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
        ended = await self._copies([self._keys.ended(d) for d in queued.values()])
        waiting = []
        for d in queued.values():
            active = states[d.thread_id].active
            claimed = active is not None and active.dispatch_id == d.dispatch_id
            if not claimed and not is_stale(d, states[d.thread_id]) and self._keys.ended(d) not in ended:
                waiting.append(d)
        return waiting

    def check_open(self) -> None:
        if not self.open:
            raise Closed("the mailbox is closed or not open")
