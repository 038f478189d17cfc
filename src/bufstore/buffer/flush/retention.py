"""Removes flushed entries from the log when it is time, and then the tombstones that only guarded against them.

`bufstore.buffer.flush.passed` says when it is time, and why Postgres must confirm that first. Two aims meet here:
flushed entries are retained for readers of the log, and the log needs space for entries that cannot be flushed while
Postgres is away. The second aim wins: retained entries give way long before the log is full, because nobody purges a
partition whose owner goes away during an outage until Postgres is back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from bufstore.buffer.flush.owned_partition import OwnedPartition
from bufstore.buffer.flush.passed import purgeable, share_to_go
from bufstore.buffer.parts import AnyParts
from bufstore.buffer.places import first_place
from bufstore.buffer.ports.ledger import Cursor, FlushFailed, passed_by_all
from bufstore.buffer.ports.log import Floor
from bufstore.errors import BufstoreError, Closed
from bufstore.failpoints import Failpoint, reach
from bufstore.jetstream.messages import AppendUnknown
from bufstore.log_lines import LogLines
from bufstore.tasks import set_within

_log = LogLines(__name__)

_INTERVAL_S = 5.0
_TOMBSTONES_AT_ONCE = 1000


class Retention:
    """Purges the partitions of one owner."""

    def __init__(
        self,
        parts: AnyParts,
        owned_partitions: Mapping[int, OwnedPartition],
        compare: Callable[[], Awaitable[Mapping[int, Cursor]]],
    ) -> None:
        self._log, self._ledger = parts.log, parts.ledger
        self._subjects, self._config = parts.subjects, parts.config
        self._owned = owned_partitions
        self._compare = compare
        self._loop = asyncio.get_running_loop()
        #: When Postgres last confirmed that it had everything it should have.
        self._confirmed_at = float("-inf")
        #: The position up to which Postgres had all partitions then.
        self._reached = 0
        self._archived = 0
        #: Why Postgres does not confirm anything at the moment; empty if it does.
        self._unconfirmed = ""
        #: Why the last look could not purge; empty if it could.
        self._failed = ""
        self._to_bury = False
        #: The floors that were last computed for our partitions.
        self._floors: dict[int, Floor] = {}

    async def keep(self, stopping: asyncio.Event) -> None:
        """Purge now and then, until `stopping`."""
        interval = min(_INTERVAL_S, self._config.log.failover_window_s / 4)
        while not stopping.is_set():
            await set_within(stopping, interval)
            try:
                await self._purge()
            except Closed:
                return  # the store closes: the next owners purge
            except (BufstoreError, FlushFailed, AppendUnknown) as e:
                why = str(e) or type(e).__name__
                if why != self._failed:
                    _log.warning(
                        "cannot purge flushed entries; they stay in the log: %s", why, extra={"action": "purge_failed"}
                    )
                self._failed = why
            else:
                self._failed = ""

    async def _purge(self) -> None:
        await self._confirm(archives=self._log.windows.archives)
        used, limit = await self._log.fill()
        windows = self._log.windows  # `fill` has just read them anew
        to_go = share_to_go(used, limit, self._config.outage_reserve)
        if to_go:
            first, _ = await self._log.bounds()
            for owned in self._owned.values():
                owned.passed.gone(first)
        wished = self._loop.time() - self._config.retain_after_flush_s
        confirmed = self._confirmed_at - windows.keep_s
        archived = self._archived if windows.archives else None
        floors = {}
        for partition, owned in self._owned.items():
            if owned.doubt is None:
                # Strictly below: the entry at a cursor stays, so that it shows whether the log is still the same.
                below = purgeable(
                    owned.passed,
                    confirmed=confirmed,
                    wished=wished,
                    to_go=to_go,
                    archived=archived,
                    unit=first_place(1),
                )
                floor = Floor(owned.passed.before(confirmed), below or owned.passed.purged)
                floors[partition] = floor.raised(self._floors.get(partition, floor))
        self._floors = floors
        reach(Failpoint.PURGE_BEFORE)
        purged = await self._log.let_go(floors, self._reached)
        reach(Failpoint.PURGE_DONE)
        for owned in self._owned.values():
            if purged > owned.passed.purged:
                owned.passed.gone(purged)
                self._to_bury = True
        if self._to_bury and not self._unconfirmed:
            await self._bury()
            self._to_bury = False

    async def _confirm(self, *, archives: bool) -> None:
        """Let Postgres confirm what it has, for times when it cannot be asked."""
        asked_at = self._loop.time()
        try:
            cursors = await self._compare()
            if archives:
                self._archived = await self._ledger.archived()
        except (BufstoreError, FlushFailed) as e:
            why = str(e) or type(e).__name__
            if why != self._unconfirmed:
                self._unconfirmed = why
                _log.warning(
                    "Postgres does not confirm its commits; only what it confirmed earlier is purged: %s",
                    why,
                    extra={"action": "purge_unconfirmed"},
                )
        else:
            self._confirmed_at, self._unconfirmed = asked_at, ""
            self._reached = passed_by_all(cursors, self._subjects.partitions)

    async def _bury(self) -> None:
        """Remove the rows of deleted threads whose entries the log has purged: they cannot come again."""
        after = ""
        below = max((owned.passed.purged for owned in self._owned.values()), default=0)
        while found := await self._ledger.tombstones(below, after, _TOMBSTONES_AT_ONCE):
            mine = [(seq, thread_id) for seq, thread_id in found if seq < self._purged_below(thread_id)]
            if mine:
                await self._log.fence(max(seq for seq, _ in mine) + 1)
            # Entries that the log has of such a thread were written since, and may build on the deletion.
            subjects = {self._subjects.of(thread_id): (seq, thread_id) for seq, thread_id in mine}
            written = await self._log.last(list(subjects)) if subjects else {}
            if mine := [tombstone for subject, tombstone in subjects.items() if subject not in written]:
                await self._ledger.bury(mine)
            after = found[-1][1]

    def _purged_below(self, thread_id: str) -> int:
        owned = self._owned.get(self._subjects.partition(thread_id))
        return owned.passed.purged if owned is not None else 0
