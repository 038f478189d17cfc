"""Reads of a stream that show every write that returned before them, also on replicas.

A single server answers each read as of one moment. Of replicas, only the leader is up to date, and it shows one message
at a time; any copy shows many, and may lag. So the leader says how far a copy must be to be believed. A leader that
the others have left still answers for seconds: so its answer must show what we have written ourselves.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

from bufstore.errors import LogUnavailable
from bufstore.jetstream.errors import TooManyResults
from bufstore.jetstream.messages import Outgoing, StoredMessage
from bufstore.jetstream.stream import NatsStream
from bufstore.newest import Newest

PAGE = 1000
#: How long to wait for a copy that is behind its leader.
_BEHIND_S = 0.005
#: How many times a leader must prove that it leads before it is believed when it says that a write of ours is gone.
_PROOFS = 2
_REMEMBERED = 10_000


class FreshReads:
    """Reads of one stream. They raise LogUnavailable, TooManyResults, and Closed."""

    def __init__(self, stream: NatsStream, timeout_s: float, unused: str) -> None:
        """`unused`: a subject that never has a message."""
        self.stream = stream
        self.timeout_s = timeout_s
        self._unused = unused
        #: The sequences of this process' last writes, by subject.
        self._written: Newest[str, int] = Newest(_REMEMBERED)

    def wrote(self, messages: Sequence[Outgoing], last: int) -> None:
        """Note the messages that were written here, the last one at `last`: later reads must not be older.

        An empty message removes something, and removes itself after a time: it is not noted.
        """
        if self.stream.replicated:
            for back, m in enumerate(reversed(messages)):
                if m.body:
                    self._written[m.subject] = last - back

    async def last(self, subjects: Sequence[str]) -> dict[str, StoredMessage]:
        """Return the last message of each subject from the leader. Without replicas, all are as of one moment."""
        if not self.stream.replicated:
            return await self.stream.last(subjects, self.timeout_s)
        found = await self.stream.last([s for s in subjects if "*" not in s], self.timeout_s)
        for _ in range(_PROOFS):
            older = {s: self._written[s] for s in subjects if self._written.get(s, 0) > _seq_of(found.get(s))}
            if not older:
                break
            # Either the others have left this leader, or the message is gone since.
            await self.stream.prove(self._unused, self.timeout_s)
            found = {s: m for s, m in found.items() if s not in older}
            found |= await self.stream.last(list(older), self.timeout_s)
        else:
            for s, seq in older.items():
                gone = seq > _seq_of(found.get(s))
                if gone and self._written.get(s) == seq:  # another read may have found so, or there is a newer write
                    del self._written[s]
        wild = [s for s in subjects if "*" in s]
        # The leader shows only one message of a wildcard. It tells how far a copy must be to show them all.
        ends = await self.stream.ends(wild, self.timeout_s)
        if wild := [s for s, end in zip(wild, ends, strict=True) if end]:
            found |= await self.copy(wild, max(ends))
        return found

    async def every(self, subjects: Sequence[str], filters: Sequence[str]) -> dict[str, StoredMessage]:
        """Return the same as `last`, however many messages the filters match: if too many, filter by filter."""
        try:
            return await self.last([*subjects, *filters])
        except TooManyResults:
            found = await self.last(subjects)
            for each in filters:
                found |= {m.subject: m for m in await self.all(each)}
            return found

    async def copy(self, subjects: Sequence[str], end: int = 0) -> dict[str, StoredMessage]:
        """Return the same from any copy that is as far as `end`; not as of one moment when the subjects are many."""
        found: dict[str, StoredMessage] = {}
        for some in self.stream.portions(subjects):
            found |= await self._part(some, end)
        return found

    async def _part(self, subjects: Sequence[str], end: int) -> dict[str, StoredMessage]:
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
        """Return all messages (or the first `limit`) that match a filter, in the stream's order."""
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
                end = await self._end([subject]) if self.stream.replicated else 0
                if seq >= end:
                    break
            else:
                end = await self._behind([subject], end, deadline)
        return messages[:limit]

    async def pages(self, subject: str, size: int = PAGE) -> AsyncIterator[list[StoredMessage]]:
        """Yield all messages that match a filter, from any copy, in pages: the first of `size`, then large ones."""
        seq, asked = 0, size
        while page := await self.read(subject, seq, asked):
            yield page
            if len(page) < asked:
                return
            seq, asked = page[-1].seq, PAGE

    async def read(self, subject: str, seq: int, limit: int) -> list[StoredMessage]:
        """Return the first `limit` messages above a sequence, from any copy."""
        return await self.stream.read(subject, seq, self.timeout_s, limit)

    async def _end(self, subjects: Sequence[str]) -> int:
        return max(await self.stream.ends(subjects, self.timeout_s))

    async def _behind(self, subjects: Sequence[str], end: int, deadline: float) -> int:
        """Wait for a copy that seems not to be as far as `end`. Returns how far it must be now.

        The leader's message there may be gone since, and a copy that has no message does not say how far it is.
        """
        if time.monotonic() > deadline:
            raise LogUnavailable("the copies of the stream are behind their leader")
        await asyncio.sleep(_BEHIND_S)
        return min(end, await self._end(subjects))


def _seq_of(found: StoredMessage | None) -> int:
    return found.seq if found is not None else 0
