"""What becomes due when, in slots of time: only slots that are over or running are read, however much lies ahead.

Looked at are the slots of the last hour, and with each pass one page of everything: there is what was left for longer,
and what a writer whose clock was far behind has put into an earlier slot.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Collection, Sequence

from bufstore.jetstream.errors import TooManyResults
from bufstore.jetstream.messages import StoredMessage
from bufstore.mailbox.nats_bucket import PAGE, Bucket
from bufstore.mailbox.nats_keys import SLOT_MS

_WINDOW = 3600_000 // SLOT_MS


class Agenda:
    """The keys under ``l`` or ``d``. Any copy is read: what it lacks is at the end, and comes with the next pass."""

    def __init__(self, kind: str, bucket: Bucket) -> None:
        self._kind = kind
        self._bucket = bucket
        self._keys = bucket.keys
        #: How far everything was looked at.
        self._position = 0

    async def due(self, now_ms: int) -> AsyncIterator[list[StoredMessage]]:
        """What may be due, a page at a time, the earliest slots first. `settle` each page."""
        now = now_ms // SLOT_MS
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

    async def settle(self, page: list[StoredMessage], kept: Collection[str], now_ms: int, left: set[int]) -> None:
        """Remove what is over of a page, but for the slots that have an entry of `kept` (subjects): they join `left`.

        `left` is one set for all pages of a pass: a slot may come in several.
        """
        old = now_ms // SLOT_MS - _WINDOW
        left |= {self._slot(m) for m in page if m.subject in kept}
        for slot, entries in itertools.groupby(sorted(page, key=self._slot), self._slot):
            seqs = [m.seq for m in entries]
            if slot in left or (slot + 1) * SLOT_MS > now_ms:
                continue
            if slot < old:
                # Only a part of the slot may have been seen.
                await self._bucket.put_each(self._keys.gone(m.subject, m.seq) for m in page if self._slot(m) == slot)
            else:
                await self._bucket.remove(self._keys.of(self._kind, str(slot), ">"), max(seqs))

    def _slot(self, message: StoredMessage) -> int:
        return self._keys.entry(message).slot
