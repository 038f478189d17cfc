"""What becomes due when, in slots of time: only slots that are over or running are read, however much lies ahead.

Looked at are the slots of the last hour, and once an hour everything, for what a writer whose clock was far behind has
put into an earlier one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence

from bufstore.errors import MalformedEntry
from bufstore.jetstream.errors import TooManyResults
from bufstore.jetstream.messages import AppendUnknown, Conflict, Outgoing, StoredMessage
from bufstore.jetstream.stream import NatsStream
from bufstore.jetstream.subject_tokens import untoken
from bufstore.mailbox.nats_keys import SLOT_MS, Keys

_WINDOW_MS = 3600_000
_PAGE = 1000


class Agenda:
    """The keys under ``l`` and ``d``."""

    def __init__(
        self, stream: NatsStream, keys: Keys, put: Callable[[Sequence[Outgoing]], Awaitable[int]], timeout_s: float
    ) -> None:
        self._stream = stream
        self._keys = keys
        self._put = put
        self._timeout_s = timeout_s
        #: When everything was last looked at, by kind.
        self._complete: dict[str, int] = {}

    async def leases(self, now_ms: int, limit: int) -> dict[str, list[StoredMessage]]:
        """The entries of at most `limit` threads whose lease may be over."""
        return await self._due("l", now_ms, limit)

    async def settle(self, looked_at: dict[str, list[StoredMessage]], expired: Collection[str], now_ms: int) -> None:
        """Remove entries that are over and have nothing more to say; those of expired claims stay until reclaimed."""
        past = [
            self._keys.gone(m.subject, m.seq)
            for thread_id, entries in looked_at.items()
            if thread_id not in expired
            for m in entries
            if (self._slot(m) + 1) * SLOT_MS <= now_ms
        ]
        await self._put_each([[message] for message in past])

    async def signal(self, now_ms: int, limit: int) -> int:
        """Signal threads whose time has come; each entry once, even if others look at it too."""
        due = await self._due("d", now_ms, limit)
        units = []
        for thread_id, entries in due.items():
            ripe = [m for m in entries if int(m.body) <= now_ms]
            if ripe:
                signal = Outgoing(self._keys.of("s", self._keys.thread(thread_id).rpartition(".")[2]), b"")
                units.append([*(self._keys.gone(m.subject, m.seq) for m in ripe), signal])
        return await self._put_each(units)

    async def _put_each(self, units: Sequence[Sequence[Outgoing]]) -> int:
        done = 0
        for outcome in await asyncio.gather(*(self._put(unit) for unit in units), return_exceptions=True):
            if isinstance(outcome, (Conflict, AppendUnknown)):
                continue
            if isinstance(outcome, BaseException):
                raise outcome
            done += 1
        return done

    def _slot(self, message: StoredMessage) -> int:
        return int(message.subject.split(".")[-2])

    async def _due(self, kind: str, now_ms: int, limit: int) -> dict[str, list[StoredMessage]]:
        now = now_ms // SLOT_MS
        if now_ms >= self._complete.get(kind, 0) + _WINDOW_MS:
            self._complete[kind] = now_ms
            found = await self._all(self._keys.of(kind, "*", "*"), None)
        else:
            first = (now_ms - _WINDOW_MS) // SLOT_MS
            found = await self._slots(kind, range(first, now + 1), limit)
        due: dict[str, list[StoredMessage]] = {}
        for message in found:
            try:
                thread_id = untoken(message.subject.rpartition(".")[2])
            except MalformedEntry:
                continue
            if self._slot(message) <= now and message.body.isdigit() and (len(due) < limit or thread_id in due):
                due.setdefault(thread_id, []).append(message)
        return due

    async def _slots(self, kind: str, slots: Sequence[int], limit: int) -> list[StoredMessage]:
        """What lies in the slots, the earliest first; halved until the server gives it at once."""
        try:
            subjects = [self._keys.of(kind, str(slot), "*") for slot in slots]
            return [m for m in (await self._stream.last(subjects, self._timeout_s)).values() if m.body]
        except TooManyResults:
            if len(slots) == 1:
                return await self._all(self._keys.of(kind, str(slots[0]), "*"), limit)
            half = len(slots) // 2
            early = await self._slots(kind, slots[:half], limit)
            return early if len(early) >= limit else early + await self._slots(kind, slots[half:], limit)

    async def _all(self, subject: str, limit: int | None) -> list[StoredMessage]:
        messages: list[StoredMessage] = []
        seq = 0
        while limit is None or len(messages) < limit:
            page = await self._stream.after(subject, seq, self._timeout_s, _PAGE)
            messages += [m for m in page if m.body]
            if len(page) < _PAGE:
                break
            seq = page[-1].seq
        return messages
