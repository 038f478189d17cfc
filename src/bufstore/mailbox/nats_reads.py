"""Reads of a mailbox's bucket that show every write that returned before them, also on replicas.

A single server answers each at one moment. Of replicas only the leader is up to date, and it shows one message at a
time; any copy shows many, and may lag. So the leader tells how far a copy must be that is to be believed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from bufstore.errors import Closed, LogUnavailable
from bufstore.jetstream.messages import StoredMessage
from bufstore.jetstream.stream import NatsStream

PAGE = 1000
#: How long to wait for a copy that is behind its leader.
_BEHIND_S = 0.005


class NatsReads:
    """What is read of one bucket. All methods raise LogUnavailable, TooManyResults, and Closed while it is not open."""

    def __init__(self, stream: NatsStream, replicated: bool, timeout_s: float) -> None:
        self._stream = stream
        self.replicated = replicated
        self._timeout_s = timeout_s
        self.open = False

    async def last(self, subjects: Sequence[str]) -> dict[str, StoredMessage]:
        """The last message of each, as the leader has it; of one moment, on a stream without replicas."""
        self.check_open()
        if not self.replicated:
            return await self._stream.last(subjects, self._timeout_s)
        found = await self._stream.last([s for s in subjects if "*" not in s], self._timeout_s)
        wild = [s for s in subjects if "*" in s]
        # The leader shows no more than one message of a wildcard. It tells how far a copy must be that shows them all.
        ends = await self._stream.ends(wild, self._timeout_s)
        if wild := [s for s, end in zip(wild, ends, strict=True) if end]:
            found |= await self.copy(wild, max(ends))
        return found

    async def copy(self, subjects: Sequence[str], end: int = 0) -> dict[str, StoredMessage]:
        """The same as any copy has it that is as far as `end`. At most 1024 messages."""
        found: dict[str, StoredMessage] = {}
        deadline = time.monotonic() + self._timeout_s
        start = 0
        while True:
            messages, more, reached = await self._stream.shown(subjects, start, self._timeout_s)
            if reached < end and not more:
                if time.monotonic() > deadline:
                    raise LogUnavailable("the copies of the mailbox are behind their leader")
                await asyncio.sleep(_BEHIND_S)
                continue
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
                continue
            if self.replicated and seq >= end:
                (end,) = await self._stream.ends([subject], self._timeout_s)
            if seq >= end:
                break
            if time.monotonic() > deadline:
                raise LogUnavailable("the copies of the mailbox are behind their leader")
            await asyncio.sleep(_BEHIND_S)
        return messages[:limit]

    def check_open(self) -> None:
        if not self.open:
            raise Closed("the mailbox is closed or not open")
