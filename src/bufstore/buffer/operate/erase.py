"""Erases a thread's entries from the log, before retention would purge them.

The same rule as for a purge (`bufstore.buffer.flush.retention`): an entry may leave the log when it stands below a
cursor that was committed `failover_window_s` ago and that Postgres still has. Then no failover needs the entry again,
no read that took an older state from Postgres still runs, and the entry at the cursor, which tells whether the log is
still the same one, stays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from bufstore.buffer.parts import AnyParts
from bufstore.buffer.read.flush_waiter import FlushWaiter
from bufstore.errors import FlushTimeout


class Eraser:
    """Removes flushed entries of single threads."""

    def __init__(self, parts: AnyParts, waiter: FlushWaiter) -> None:
        self._log, self._ledger = parts.log, parts.ledger
        self._subjects, self._config = parts.subjects, parts.config
        self._waiter = waiter

    async def erase(self, threads: Mapping[str, int]) -> int:
        """Remove each thread's messages below its position, once that is allowed. Returns how many there were.

        Returns after `failover_window_s` at the earliest, unless there is nothing to remove. Raises FlushTimeout when
        removal is not allowed within twice the window and `flush_timeout_s`; LogUnavailable, StoreUnavailable.
        """
        targets: dict[int, int] = {}
        for thread_id, below in threads.items():
            if await self._log.after(self._subjects.of(thread_id), 0, self._config.append_timeout_s, limit=1):
                partition = self._subjects.partition(thread_id)
                targets[partition] = max(below, targets.get(partition, 0))
        if not targets:
            return 0
        window, patience = await self._window(), self._config.flush_timeout_s
        try:
            # Twice the window: partitions may have moved to another owner meanwhile, which looks the same.
            async with asyncio.timeout(2 * window + patience):
                while not await self._passed(targets):
                    pass
        except TimeoutError:
            reason = "the partition changed hands, or Postgres went back, before its commit was old enough"
            raise FlushTimeout(None, target=max(targets.values()), flushed=0, reason=reason) from None
        removed = 0
        for thread_id, below in threads.items():
            removed += await self._log.erase(self._subjects.of(thread_id), below)
        return removed

    async def _passed(self, targets: Mapping[int, int]) -> bool:
        """Wait until the cursors have passed the targets, and a window longer; False if the history is another one."""
        await self._waiter.partitions(targets, self._config.flush_timeout_s)
        before = await self._ledger.cursors()
        window = await self._window()
        await asyncio.sleep(window)
        if await self._window() > window:
            return False  # it was raised meanwhile
        now = await self._ledger.cursors()
        # When Postgres went back, its partitions are taken again, with other terms.
        return all(now[p].term == before[p].term and now[p].seq >= target for p, target in targets.items())

    async def _window(self) -> float:
        """How long entries must stay, as the log says now."""
        await self._log.fill()
        return self._log.windows.keep_s
