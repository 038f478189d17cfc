"""Remembers writes that ended as unknown, so that a retry with their key is exact whatever others have written since.

A thread's entries carry its last 16 keys; a writer that got OutcomeUnknown while others go on writing may come back
later than that. The process that sent the write remembers which entry it was to follow. If the write was stored, it
follows that entry, as long as the log holds it. If something else does, the write never will be stored.
If nothing does, the compare-and-set decides between the write and its retry.

Once all entries of a thread are in Postgres for good, the log shows nothing of the thread, though it holds them for
long after that. Then Postgres shows whether anything was written after that entry. If so, and others have written so
much since that the thread's keys do not show it, the log is read from that entry on. That is rare, and may take
more time than a call has.

An entry that expected nothing in the log may have landed late and be superseded: the watermark tells whether it counts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from bufstore.buffer import recent_keys
from bufstore.buffer.chain import Watermark, counts
from bufstore.buffer.entry import Base, Item, StoredEntry, items_of
from bufstore.buffer.ports.log import Log
from bufstore.buffer.subjects import Subjects
from bufstore.jetstream.messages import AppendUnknown, StoredMessage
from bufstore.newest import Newest

_REMEMBERED = 10_000


class _Found(NamedTuple):
    """An entry with the key, whether its content is the same, and what follows it."""

    entry: StoredEntry
    same: bool
    behind: Item | None


class Unresolved:
    """Remembers, per thread and idempotency key, the position behind which a write was first sent."""

    def __init__(self, log: Log, subjects: Subjects, load_watermark: Callable[[str], Awaitable[Watermark]]) -> None:
        self._log = log
        self._subjects = subjects
        self._load_watermark = load_watermark
        self._behind: Newest[tuple[str, bytes], int] = Newest(_REMEMBERED)

    def remember(self, thread_id: str, item: bytes, behind: int) -> None:
        """Note that a write with this key item, sent behind this position, ended as unknown."""
        key = thread_id, recent_keys.hash_of(item)
        self._behind[key] = self._behind.get(key, behind)

    def __contains__(self, write: tuple[str, bytes]) -> bool:
        """Whether a write to the thread with this key item ended as unknown."""
        thread_id, item = write
        return (thread_id, recent_keys.hash_of(item)) in self._behind

    async def find(self, thread_id: str, item: bytes) -> tuple[StoredEntry, bool] | None:
        """The entry that the write has become, and whether its content is the same; None if it is not there (yet).

        Raises LogUnavailable; StoreUnavailable when only Postgres can tell; AppendUnknown when nothing tells any more.
        """
        found = await self._last(thread_id, item)
        if found is not None and found.entry.entry.base is not Base.CHAINED:
            watermark = await self._load_watermark(thread_id)
            found = await self._last(thread_id, item)  # in this order: see `counts`
            stands = found is None or counts(found.entry, watermark, found.behind)
            if stands is None:
                raise AppendUnknown(
                    "its outcome can no longer be determined: the entry was flushed and too much was written since, or "
                    "the thread is in quarantine"
                )
            if not stands:
                return None
        return (found.entry, found.same) if found is not None else None

    async def _last(self, thread_id: str, item: bytes) -> _Found | None:
        """The last entry with the key: a repeat may have followed a superseded one."""
        behind = self._behind.get((thread_id, recent_keys.hash_of(item)))
        if behind is None:
            return None
        found: _Found | None = None
        for entry in items_of(await self._behind_of(thread_id, behind, item), thread_id):
            if found is not None and found.behind is None:
                found = found._replace(behind=entry)
            if isinstance(entry, StoredEntry):
                same = recent_keys.find(recent_keys.newest(entry.entry.keys), item)
                found = found if same is None else _Found(entry, same, None)
        return found

    async def _behind_of(self, thread_id: str, behind: int, item: bytes) -> list[StoredMessage]:
        """The thread's entries that the log holds behind a position, also those that it does not show any more."""
        subject = self._subjects.of(thread_id)
        messages = await self._log.after(subject, behind)
        if messages:
            if self._are_all(items_of(messages, thread_id), behind, item):
                return messages
        elif (await self._log.ends([subject]))[0]:
            return messages
        watermark = await self._load_watermark(thread_id)
        # Nothing was written behind the position; or the row has the key, and no entry stands behind the row: then the
        # thread's next writer knows the key.
        if watermark.flushed_seq <= behind or (not messages and recent_keys.find(watermark.keys, item) is not None):
            return messages
        return [message async for _, message in self._log.scan(behind, threads=[thread_id])]

    def _are_all(self, items: Sequence[Item], behind: int, item: bytes) -> bool:
        """Whether nothing that matters stands between `behind` and these items, which the log shows behind it.

        A writer begins anew if the log shows nothing because its floor has passed all of the thread's entries. The
        writer's entry then hides those.
        """
        first = items[0]
        anew = isinstance(first, StoredEntry) and first.entry.base in (Base.UNKNOWN, Base.STORED)
        if not anew or self._log.floor <= behind:
            return True
        keys = [recent_keys.newest(one.entry.keys) for one in items if isinstance(one, StoredEntry)]
        return any(recent_keys.find(key, item) is not None for key in keys)
