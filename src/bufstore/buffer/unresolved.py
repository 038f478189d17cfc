"""Writes that ended as unknown, so that a retry with their key is exact however much others have written since.

The ring of a thread's entries knows its last 16 keys; a writer that got OutcomeUnknown while others go on writing may
come back later than that. The process that sent the write remembers which entry it was sent behind: if it was stored it
stands behind that one, as long as the log holds it. If it does not and anything else stands there, it never will; if
nothing does, the compare-and-set decides between it and the retry.
"""

from __future__ import annotations

from collections import OrderedDict

from bufstore.buffer import ring as rings
from bufstore.buffer.entry import StoredEntry, assemble
from bufstore.buffer.ports import Log
from bufstore.buffer.subjects import Subjects

_REMEMBERED = 10_000


class Unresolved:
    """Per thread and idempotency key: the position that the first sending of a write stood behind."""

    def __init__(self, log: Log, subjects: Subjects) -> None:
        self._log = log
        self._subjects = subjects
        self._behind: OrderedDict[tuple[str, bytes], int] = OrderedDict()

    def remember(self, thread_id: str, item: bytes, behind: int) -> None:
        """A write with this ring item ended as unknown, sent behind this position."""
        key = thread_id, rings.hash_of(item)
        self._behind.setdefault(key, behind)
        self._behind.move_to_end(key)
        while len(self._behind) > _REMEMBERED:
            self._behind.popitem(last=False)

    def __contains__(self, write: tuple[str, bytes]) -> bool:
        """Whether a write to the thread with this ring item ended as unknown."""
        thread_id, item = write
        return (thread_id, rings.hash_of(item)) in self._behind

    async def find(self, thread_id: str, item: bytes, timeout_s: float) -> tuple[StoredEntry, bool] | None:
        """The entry that the write has become, and whether it has the same content; None if there is none (yet).

        Raises LogUnavailable.
        """
        behind = self._behind.get((thread_id, rings.hash_of(item)))
        if behind is None:
            return None
        messages = await self._log.after(self._subjects.of(thread_id), behind, timeout_s)
        for found in assemble(messages, thread_id):
            if isinstance(found, StoredEntry):
                same = rings.find(rings.newest(found.entry.ring), item)
                if same is not None:
                    return found, same
        return None
