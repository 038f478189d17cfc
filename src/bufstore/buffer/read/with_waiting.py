"""Reads a thread as the store will have it once the entries that wait in the ledger are flushed.

Entries move from the ledger's waiting entries into the row. So the waiting entries are read first and the row after
them: an entry that has left the former is in the latter. An entry that began to wait in between is still in the log,
for as long as any read may take.
"""

from __future__ import annotations

from typing import Any, Generic

import msgspec

from bufstore.buffer.chain import Watermark
from bufstore.buffer.domain import Coalesce, S, StateReader
from bufstore.buffer.flush.deciding import decide_thread
from bufstore.buffer.parts import Parts
from bufstore.buffer.ports.ledger import Ledger
from bufstore.buffer.read.overlay import overlay
from bufstore.buffer.read.restored import Restored


class WithWaiting(Generic[S]):
    """See `bufstore.buffer.domain.StateReader`. If nothing waits, which the row says, this costs nothing extra."""

    def __init__(self, parts: Parts[Any, S, Any], reader: StateReader[S], restored: Restored) -> None:
        self._domain, self._ledger = parts.domain, parts.ledger
        self._reader, self._restored = reader, restored

    async def state(self, thread_id: str) -> S:
        return await self._restored.counting(lambda: self._state(thread_id))

    async def _state(self, thread_id: str) -> S:
        state = await self._reader.state(thread_id)
        if not state.watermark.waits_to:
            return state
        items = await self._ledger.waiting.of_thread(thread_id)
        state = await self._reader.state(thread_id)
        return _without_mark(overlay(self._domain, state, thread_id, items))

    async def watermark(self, thread_id: str) -> Watermark:
        """Return the watermark alone. Raises what the ledger raises."""
        return await self._restored.counting(
            lambda: watermark_with_waiting(self._ledger, self._domain.coalesce, thread_id)
        )

    async def answers(self) -> None:
        await self._restored.prepared()
        await self._reader.answers()
        await self._restored.counts_since(self._restored.era)


async def watermark_with_waiting(ledger: Ledger, coalesce: Coalesce, thread_id: str) -> Watermark:
    """Return the watermark that the thread has once its entries in the ledger are flushed."""
    row = await ledger.watermark(thread_id)
    if not row.waits_to:
        return row
    items = await ledger.waiting.of_thread(thread_id)
    row = await ledger.watermark(thread_id)
    todo, _ = decide_thread(thread_id, row, items, {}, coalesce, complete=True)
    return msgspec.structs.replace(todo.watermark, waits_to=0)


def _without_mark(state: S) -> S:
    return msgspec.structs.replace(state, watermark=msgspec.structs.replace(state.watermark, waits_to=0))
