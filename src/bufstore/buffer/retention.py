"""Removing flushed entries from the log, when it is time.

Time counts from when a commit passed an entry, not from when it was written: a Postgres that fails over may lose its
last commits, and then needs their entries again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping

from bufstore.buffer.ports import AppendUnknown, Log
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

    def __init__(self, log: Log, config: BufferConfig, shares: Mapping[int, Share]) -> None:
        self._log = log
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
                await self._purge()
            except (BufstoreError, AppendUnknown) as e:
                _log.warning("purging failed: %s", e, extra={"action": "purge_failed"})

    async def _purge(self) -> None:
        used, limit = await self._log.fill()
        pressed = used > _PRESSURE * limit
        keep = self._config.failover_window_s if pressed else self._config.retain_after_flush_s
        for share in list(self._shares.values()):
            below = share.purgeable(asyncio.get_running_loop().time() - keep)
            if below is not None:
                # Strictly below: the entry at a cursor stays, to tell whether the log is still the same.
                reach(Failpoint.PURGE_BEFORE)
                await self._log.purge(share.cursor.partition, below)
                reach(Failpoint.PURGE_DONE)
                share.purged(below)
