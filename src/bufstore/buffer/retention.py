"""Removing flushed entries from the log, when it is time, and with them the rows that only guarded against them.

Time counts from when a commit passed an entry, not from when it was written: a Postgres that fails over may lose its
last commits, and then needs their entries again. So it is asked first whether it still has them: one that is away may
come back without, however long that takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping

from bufstore.buffer.ports import AppendUnknown, FlushFailed, Ledger, Log
from bufstore.buffer.share import Share
from bufstore.buffer.subjects import Subjects
from bufstore.config import BufferConfig
from bufstore.errors import BufstoreError
from bufstore.failpoints import Failpoint, reach

_log = logging.getLogger(__name__)

_INTERVAL_S = 5.0
#: Above this part of max_bytes the wish to retain flushed entries gives way.
_PRESSURE = 0.7
_TOMBSTONES_AT_ONCE = 1000
_TIMEOUT_S = 10.0


class Retention:
    """Purges the partitions of one owner."""

    def __init__(
        self,
        log: Log,
        ledger: Ledger,
        subjects: Subjects,
        config: BufferConfig,
        shares: Mapping[int, Share],
        compare: Callable[[], Awaitable[None]],
    ) -> None:
        self._log = log
        self._ledger = ledger
        self._subjects = subjects
        self._config = config
        self._shares = shares
        self._compare = compare

    async def keep(self, stopping: asyncio.Event) -> None:
        """Purge now and then, until `stopping`."""
        interval = min(_INTERVAL_S, self._config.retain_after_flush_s / 4)
        while not stopping.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval):
                    await stopping.wait()
            try:
                await self._purge()
            except (BufstoreError, FlushFailed, AppendUnknown) as e:
                _log.warning("purging failed: %s", e, extra={"action": "purge_failed"})

    async def _purge(self) -> None:
        # What was committed long enough before Postgres confirms it is safe, whatever becomes of it then.
        confirmed_at = asyncio.get_running_loop().time()
        await self._compare()
        used, limit = await self._log.fill()
        pressed = used > _PRESSURE * limit
        windows = self._log.windows  # as `fill` has just read them
        keep = windows.keep_s if pressed else max(self._config.retain_after_flush_s, windows.keep_s)
        archived = await self._ledger.archived() if windows.archives else None
        purged = False
        for share in list(self._shares.values()):
            below = share.purgeable(confirmed_at - keep)
            if below is not None and archived is not None:
                below = min(below, archived) if archived > share.purged_below else None
            if below is not None and share.doubt is None:
                # Strictly below: the entry at a cursor stays, to tell whether the log is still the same.
                reach(Failpoint.PURGE_BEFORE)
                await self._log.purge(share.cursor.partition, below)
                reach(Failpoint.PURGE_DONE)
                share.purged(below)
                purged = True
        if purged:
            await self._bury()

    async def _bury(self) -> None:
        """Remove the rows of deleted threads whose entries the log has purged: they cannot come again."""
        after = ""
        below = max((share.purged_below for share in self._shares.values()), default=0)
        while found := await self._ledger.tombstones(below, after, _TOMBSTONES_AT_ONCE):
            mine = [(seq, thread_id) for seq, thread_id in found if seq < self._purged_below(thread_id)]
            # What is in the log of such a thread was written since, and maybe builds on the deletion.
            subjects = {self._subjects.of(thread_id): (seq, thread_id) for seq, thread_id in mine}
            written = await self._log.last(list(subjects), _TIMEOUT_S) if subjects else {}
            if mine := [tombstone for subject, tombstone in subjects.items() if subject not in written]:
                await self._ledger.bury(mine)
            after = found[-1][1]

    def _purged_below(self, thread_id: str) -> int:
        share = self._shares.get(self._subjects.partition(thread_id))
        return share.purged_below if share is not None else 0
