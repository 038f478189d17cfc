"""What becomes due when, in slots of time: only slots that are over or running are read, however much lies ahead.

Looked at are the slots of the last hour, and with each pass one page of everything: there is what was left for longer,
and what a writer whose clock was far behind has put into an earlier slot.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence

from bufstore.jetstream.errors import TooManyResults
from bufstore.jetstream.fresh_reads import PAGE
from bufstore.jetstream.messages import StoredMessage
from bufstore.mailbox.nats_bucket import Bucket
from bufstore.mailbox.nats_keys import SLOT_MS, Entry

_WINDOW = 3600_000 // SLOT_MS

#: Deals with entries that are due; how much was done in all, and which of these (subjects) stay.
Handle = Callable[[dict[StoredMessage, Entry]], Awaitable[tuple[int, Collection[str]]]]


class Agenda:
    """The keys under ``l`` or ``d``. Any copy is read: what it lacks is at the end, and comes with the next pass."""

    def __init__(self, kind: str, bucket: Bucket) -> None:
        self._kind = kind
        self._bucket = bucket
        self._keys = bucket.keys
        #: How far everything was looked at.
        self._position = 0

    async def sweep(self, now_ms: int, limit: int, handle: Handle) -> None:
        """Give `handle` what is due, the earliest first, until it has done `limit`; remove the slots that are over.

        A slot with an entry that stays is left as it is.
        """
        left: set[int] = set()
        async for page in self._pages(now_ms // SLOT_MS):
            ripe = {m: entry for m in page if (entry := self._keys.entry(m)).at_ms <= now_ms}
            done, kept = await handle(ripe)
            left |= {entry.slot for m, entry in ripe.items() if m.subject in kept}
            await self._remove(page, left, now_ms)
            if done >= limit:
                break

    async def _pages(self, now: int) -> AsyncIterator[list[StoredMessage]]:
        async for page in self._slots(range(now - _WINDOW, now + 1)):
            yield page
        page = await self._bucket.read(self._keys.of(self._kind, ">"), self._position, PAGE // 10)
        self._position = page[-1].seq if page else 0
        yield [m for m in page if m.body and self._slot(m) < now - _WINDOW]

    async def _slots(self, slots: Sequence[int]) -> AsyncIterator[list[StoredMessage]]:
        """What lies in the slots; halved until the server gives it at once."""
        subjects = [self._keys.of(self._kind, str(slot), ">") for slot in slots]
        try:
            yield [m for m in (await self._bucket.stream.last(subjects, self._bucket.timeout_s)).values() if m.body]
        except TooManyResults:
            if len(slots) > 1:
                half = len(slots) // 2
                for part in (slots[:half], slots[half:]):
                    async for page in self._slots(part):
                        yield page
                return
            seq, full = 0, True
            while full:
                page = await self._bucket.read(subjects[0], seq, PAGE)
                seq, full = page[-1].seq if page else 0, len(page) >= PAGE
                yield [m for m in page if m.body]

    async def _remove(self, page: list[StoredMessage], left: Collection[int], now_ms: int) -> None:
        for slot, entries in itertools.groupby(sorted(page, key=self._slot), self._slot):
            messages = list(entries)
            if slot in left or (slot + 1) * SLOT_MS > now_ms:
                continue
            if slot < now_ms // SLOT_MS - _WINDOW:
                # Only a part of the slot may have been seen.
                await self._bucket.put_each(self._keys.gone(m.subject, m.seq) for m in messages)
            else:
                last = max(m.seq for m in messages)
                await self._bucket.stream.purge(self._keys.of(self._kind, str(slot), ">"), last)

    def _slot(self, message: StoredMessage) -> int:
        return self._keys.entry(message).slot
