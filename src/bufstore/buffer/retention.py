"""Removing flushed entries from the log, when it is time.

Time counts from when a commit passed an entry, not from when it was written: a Postgres that fails over may lose its
last commits, and then needs their entries again. A flush would notice that, but a partition nobody writes to is not
flushed. So before anything is removed, Postgres is asked how far it has got, and a partition of which it has less than
was committed is taken again. While Postgres does not answer, nothing is removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping

from bufstore.buffer.ports import AppendUnknown, FlushFailed, Ledger, Log
from bufstore.buffer.share import Share
from bufstore.config import BufferConfig
from bufstore.errors import BufstoreError
from bufstore.failpoints import Failpoint, reach

_log = logging.getLogger(__name__)

_INTERVAL_S = 5.0
#: Above this part of max_bytes the wish to retain flushed entries gives way.
_PRESSURE = 0.7


class Retention:
    """Purges the partitions of one owner."""

    def __init__(self, log: Log, ledger: Ledger, config: BufferConfig, shares: Mapping[int, Share]) -> None:
        self._log = log
        self._ledger = ledger
        self._config = config
        self._shares = shares

    async def keep(self, stopping: asyncio.Event) -> None:
        """Purge now and then, until `stopping`."""
        interval = min(_INTERVAL_S, self._config.retain_after_flush_s / 4)
        while not stopping.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval):
                    await stopping.wait()
            try:
                await self._look_at_cursors()
                await self._purge()
            except (BufstoreError, FlushFailed, AppendUnknown) as e:
                _log.warning("purging failed: %s", e, extra={"action": "purge_failed"})

    async def _look_at_cursors(self) -> None:
        """Doubt the partitions of which Postgres has less than was committed."""
        committed = [(share, share.cursor.seq) for share in self._shares.values()]
        if not committed:
            return
        found = await self._ledger.cursors()
        for share, seq in committed:
            cursor = found.get(share.cursor.partition)
            if cursor is None or cursor.seq < seq:
                share.doubt = f"Postgres went back to {cursor.seq if cursor is not None else 'nothing'} from {seq}"

    async def _purge(self) -> None:
        used, limit = await self._log.fill()
        pressed = used > _PRESSURE * limit
        keep = self._config.failover_window_s if pressed else self._config.retain_after_flush_s
        for share in list(self._shares.values()):
            below = share.purgeable(asyncio.get_running_loop().time() - keep)
            if below is not None and share.doubt is None:
                # Strictly below: the entry at a cursor stays, to tell whether the log is still the same.
                reach(Failpoint.PURGE_BEFORE)
                await self._log.purge(share.cursor.partition, below)
                reach(Failpoint.PURGE_DONE)
                share.purged(below)
