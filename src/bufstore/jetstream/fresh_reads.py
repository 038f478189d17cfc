"""Reads of a stream that show every write that returned before them, also on replicas.

A single server answers each at one moment. Of replicas only the leader is up to date, and it shows one message at a
time; any copy shows many, and may lag. So the leader tells how far a copy must be that is to be believed. And a leader
that the others have left answers for seconds: it must show what we have written ourselves.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

from bufstore.errors import LogUnavailable
from bufstore.jetstream.errors import TooManyResults
from bufstore.jetstream.messages import AppendUnknown, Outgoing, StoredMessage
from bufstore.jetstream.stream import NatsStream
from bufstore.newest import Newest

PAGE = 1000
#: How long to wait for a copy that is behind its leader.
_BEHIND_S = 0.005
#: So often a leader is made to prove that it leads before it is believed that a write of ours is gone.
_PROOFS = 2
_REMEMBERED = 10_000


class FreshReads:
    """Reads of one stream. They raise LogUnavailable, TooManyResults, and Closed."""

    def __init__(self, stream: NatsStream, timeout_s: float, unused: str) -> None:
        """`unused`: a subject on which nothing ever is."""
        self.stream = stream
        self.timeout_s = timeout_s
        self._unused = unused
        #: Sequences of this process' last writes, by subject.
        self._written: Newest[str, int] = Newest(_REMEMBERED)

    def wrote(self, messages: Sequence[Outgoing], last: int) -> None:
        """Note what was written here, the last message at `last`: what is read must not be older."""
        if self.stream.replicated:
            for back, m in enumerate(reversed(messages)):
                if m.body:
                    self._written[m.subject] = last - back

    async def last(self, subjects: Sequence[str]) -> dict[str, StoredMessage]:
        """The last message of each, as the leader has it; of one moment, on a stream without replicas."""
        if not self.stream.replicated:
            return await self.stream.last(subjects, self.timeout_s)
        found = await self.stream.last([s for s in subjects if "*" not in s], self.timeout_s)
        for _ in range(_PROOFS):
            older = {s: self._written[s] for s in subjects if self._written.get(s, 0) > _seq_of(found.get(s))}
            if not older:
                break
            # A leader that the others have left; or it is gone since.
            try:
                await self.stream.prove(self._unused, self.timeout_s)
            except AppendUnknown as e:  # of a purge of nothing
                raise LogUnavailable(f"nobody proves to lead the stream: {e}") from None
            found |= await self.stream.last(list(older), self.timeout_s)
        else:
            for s, seq in older.items():
                if self._written.get(s) == seq:  # another read may have found the same, or there is a newer one
                    del self._written[s]
        wild = [s for s in subjects if "*" in s]
        # The leader shows no more than one message of a wildcard. It tells how far a copy must be that shows them all.
        ends = await self.stream.ends(wild, self.timeout_s)
        if wild := [s for s, end in zip(wild, ends, strict=True) if end]:
            found |= await self.copy(wild, max(ends))
        return found

    async def every(self, subjects: Sequence[str], filters: Sequence[str]) -> dict[str, StoredMessage]:
        """The last message of each, as `last`; however many the filters have, and then one filter after the other."""
        try:
            return await self.last([*subjects, *filters])
        except TooManyResults:
            found = await self.last(subjects)
            for each in filters:
                found |= {m.subject: m for m in await self.all(each)}
            return found

    async def copy(self, subjects: Sequence[str], end: int = 0) -> dict[str, StoredMessage]:
        """The same as any copy has it that is as far as `end`; of many subjects not as of one moment."""
        found: dict[str, StoredMessage] = {}
        for i in range(0, len(subjects), PAGE):
            found |= await self._part(subjects[i : i + PAGE], end)
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
                end = await self._end([subject]) if self.stream.replicated else 0
                if seq >= end:
                    break
            else:
                end = await self._behind([subject], end, deadline)
        return messages[:limit]

    async def pages(self, subject: str, size: int = PAGE) -> AsyncIterator[list[StoredMessage]]:
        """All that a filter has, as any copy has it, in pages: a first one of `size`, then large ones."""
        seq, asked = 0, size
        while page := await self.read(subject, seq, asked):
            yield page
            if len(page) < asked:
                return
            seq, asked = page[-1].seq, PAGE

    async def read(self, subject: str, seq: int, limit: int) -> list[StoredMessage]:
        """The first `limit` above a sequence, as any copy has them."""
        return await self.stream.read(subject, seq, self.timeout_s, limit)

    async def _end(self, subjects: Sequence[str]) -> int:
        return max(await self.stream.ends(subjects, self.timeout_s))

    async def _behind(self, subjects: Sequence[str], end: int, deadline: float) -> int:
        """Wait for a copy that is not as far as `end`, as it seems; how far it must be now.

        What the leader had there may be gone since, and a copy that has nothing does not say how far it is.
        """
        if time.monotonic() > deadline:
            raise LogUnavailable("the copies of the stream are behind their leader")
        await asyncio.sleep(_BEHIND_S)
        return min(end, await self._end(subjects))


def _seq_of(found: StoredMessage | None) -> int:
    return found.seq if found is not None else 0
