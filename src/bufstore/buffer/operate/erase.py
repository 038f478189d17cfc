"""Erases threads' entries from the log, before retention would purge them.

The rule is the same as for a purge (`bufstore.buffer.flush.passed`): a group of entries may leave the log when the
owners of all partitions have said that everything in the group and before it is in Postgres for good. Then
no failover needs the group again, and no cursor stands in it. Entries of other threads in the group go with it:
Postgres has them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from bufstore.buffer.parts import AnyParts
from bufstore.buffer.ports.ledger import passed_by_all
from bufstore.buffer.ports.log import Remains
from bufstore.buffer.read.flush_waiter import FlushWaiter
from bufstore.errors import FlushTimeout, LogUnavailable
from bufstore.jetstream.messages import AppendUnknown, Conflict

_LOOK_S = 0.25


class Eraser:
    """Removes flushed entries of single threads."""

    def __init__(self, parts: AnyParts, waiter: FlushWaiter) -> None:
        self._log, self._ledger = parts.log, parts.ledger
        self._subjects, self._config = parts.subjects, parts.config
        self._waiter = waiter

    async def erase(self, threads: Mapping[str, int]) -> int:
        """Remove each thread's entries below its position, once that is allowed. Returns how many there were.

        Returns after `failover_window_s` at the earliest, unless there is nothing to remove. Raises FlushTimeout when
        removal is still not allowed after twice the window plus `flush_timeout_s`; LogUnavailable, StoreUnavailable.
        """
        remains = await self._log.remains(threads)
        if not remains.entries:
            return 0
        if remains.ends_log:
            await self._write_behind()
        await self._flushed(remains)
        await self._settled(remains)
        await self._log.erase(remains)
        return remains.entries

    async def _write_behind(self) -> None:
        """Store a group without entries, because the last message of the log never goes. Raises LogUnavailable."""
        try:
            await self._log.publish_batch([], self._config.append_timeout_s)
        except (Conflict, AppendUnknown) as e:
            raise LogUnavailable(f"the erasure could not begin; erase again: {e}") from None

    async def _flushed(self, remains: Remains) -> None:
        """Return once everything that goes is flushed. Owners that would wait for more entries are asked not to."""
        ends = await self._log.partition_ends()
        targets = {p: min(end, remains.settled_from - 1) for p, end in enumerate(ends) if end}
        await self._waiter.partitions(targets, self._config.flush_timeout_s)

    async def _settled(self, remains: Remains) -> None:
        """Return once everything that goes is in Postgres for good, and in the archive if there is one."""
        await self._log.fill()
        windows, settled = self._log.windows, 0
        try:
            # Wait for twice the window: a partition may have moved to another owner, which begins to count anew.
            async with asyncio.timeout(2 * windows.keep_s + self._config.flush_timeout_s):
                while (settled := await self._settled_to()) < remains.settled_from:  # noqa: ASYNC110 - others say it
                    await asyncio.sleep(_LOOK_S)
                while windows.archives and await self._ledger.archived() < remains.settled_from:  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            reason = (
                "the log is not archived up to there"
                if settled >= remains.settled_from
                else "a partition changed owners, or Postgres went back, before the commit was older than the failover "
                "window"
            )
            raise FlushTimeout(None, target=remains.settled_from, flushed=settled, reason=reason) from None

    async def _settled_to(self) -> int:
        """Return the position up to which the owners have called everything settled, and this Postgres has it too."""
        settled, cursors = await self._log.settled(), await self._ledger.cursors()
        return min(settled, passed_by_all(cursors, self._subjects.partitions))
