"""Taking partitions, following them, giving them up.

Any doubt about a partition ends in the same way: it is given up with all that is in memory, and taken again from the
cursor in Postgres, with a higher term. So nothing is ever repaired in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from bufstore.buffer.entry import entry_id
from bufstore.buffer.flusher_state import FlusherState
from bufstore.buffer.ports import AppendUnknown, Cursor, FlushFailed, Ledger, Log
from bufstore.buffer.share import Share
from bufstore.buffer.subjects import Subjects
from bufstore.errors import BufstoreError, LogRolledBack, LogUnavailable, StoreMisconfigured
from bufstore.failpoints import Failpoint, reach

_log = logging.getLogger(__name__)

_TAKE_RETRY_S = 0.5
#: Who asks for a flush of what is flushed makes us look into Postgres, but not more often than this.
_COMPARE_S = 0.5
#: So many partitions are looked at and followed at the same time.
_AT_ONCE = 16
_BARRIER_S = 5.0


async def mismatch(log: Log, cursor: Cursor) -> str | None:
    """Why the log is not the one that the cursor speaks of; None when it is. Raises LogUnavailable."""
    end = await log.end(5.0)
    if end < cursor.seq:
        return f"the log ends at {end}, Postgres has applied partition {cursor.partition} to {cursor.seq}"
    if cursor.id and cursor.seq >= log.generation_start:
        # The entry at the cursor is never purged: if it is not there, the log was purged further than this Postgres
        # has got, or it is not the same log.
        found = await log.identity(cursor.seq)
        if found is None or entry_id(found) != cursor.id:
            return f"position {cursor.seq} no longer holds the entry at the cursor of partition {cursor.partition}"
    return None


async def proven(log: Log, look: Callable[[], Awaitable[str | None]]) -> str | None:
    """What `look` finds wrong with the log, also once its leader has proved that it leads.

    One that the others have left shows an old end for some seconds. Raises LogUnavailable when there is no proof.
    """
    if await look() is None:
        return None
    try:
        stored = await log.barrier(_BARRIER_S)
    except AppendUnknown:
        raise LogUnavailable("the log does not look right, and its leader cannot prove that it leads") from None
    found = await look()
    if found is not None and stored and await log.end(_BARRIER_S) < stored:
        raise LogUnavailable("the log does not look right to one who does not lead it any more")
    return found


class Takeover:
    """The partitions of one owner: `shares` holds those it follows, and changes in `adjust` and `drop` only."""

    def __init__(
        self,
        log: Log,
        ledger: Ledger,
        subjects: Subjects,
        member: str,
        prepare: Callable[[], Awaitable[None]],
        wake: Callable[[], None],
        state: FlusherState,
    ) -> None:
        self._log = log
        self._ledger = ledger
        self._subjects = subjects
        self._member = member
        self._prepare = prepare
        self._prepared = False
        self._wake = wake
        self._state = state
        self._loop = asyncio.get_running_loop()
        self._wanted: frozenset[int] = frozenset()
        #: Partitions that could not be taken, and when to try again.
        self._untakeable: dict[int, float] = {}
        self._at_once = asyncio.Semaphore(_AT_ONCE)
        self._compared_at = float("-inf")
        self.shares: dict[int, Share] = {}

    @property
    def complete(self) -> bool:
        """Whether all partitions that are ours are followed, as far as has been tried."""
        return self._wanted.isdisjoint(self._untakeable)

    def want(self, partitions: frozenset[int]) -> None:
        """These are ours from now on; `adjust` sees to it."""
        if partitions != self._wanted:
            self._wanted = partitions
            self._wake()

    async def adjust(self) -> None:
        """Give up what is not ours (any more) or lost, take what is."""
        given_up = []
        for partition, share in list(self.shares.items()):
            lost = share.feed.lost or share.doubt
            if lost is not None:
                given_up.append(self.drop(share, lost))
            elif partition not in self._wanted:
                given_up.append(self.drop(share, "another member owns it"))
        await asyncio.gather(*given_up)
        now = self._loop.time()
        missing = sorted(p for p in self._wanted - self.shares.keys() if self._untakeable.get(p, 0.0) <= now)
        if not missing:
            return
        try:
            if not self._prepared:
                await self._prepare()
                self._prepared = True
            cursors = await self._ledger.take(missing, self._member)
        except (BufstoreError, FlushFailed) as e:
            self._state.report(e, stopped=isinstance(e, (StoreMisconfigured, LogRolledBack)))
            self._untakeable.update(dict.fromkeys(missing, now + _TAKE_RETRY_S))
            return
        reach(Failpoint.TAKE_RAISED)
        # All at once: while a cluster elects its leaders each of them may wait for an answer that does not come.
        await asyncio.gather(*(self._try_to_follow(cursor) for cursor in cursors))

    async def _try_to_follow(self, cursor: Cursor) -> None:
        try:
            async with self._at_once:
                await self._follow(cursor)
            self._untakeable.pop(cursor.partition, None)
        except (BufstoreError, AppendUnknown) as e:
            # One partition that cannot be followed delays no other.
            self._state.report(e, stopped=isinstance(e, LogRolledBack))
            self._untakeable[cursor.partition] = self._loop.time() + _TAKE_RETRY_S

    async def _follow(self, cursor: Cursor) -> None:
        """Check that the log still is the one that the cursor speaks of, and follow it from there."""
        trouble = await proven(self._log, lambda: mismatch(self._log, cursor))
        if trouble is not None:
            self._log.refuse(trouble)
            raise LogRolledBack(trouble)
        feed = await self._log.feed(cursor.partition, cursor.term, cursor.seq + 1, self._wake)
        share = self.shares[cursor.partition] = Share(cursor, feed, self._subjects)
        if cursor.seq:
            # Committed by now, whenever that was: retention counts from here.
            share.passed.note(self._loop.time(), cursor.seq)
        self._state.takeovers += 1
        self._state.partitions = tuple(sorted(self.shares))

    async def compare(self) -> None:
        """Doubt the partitions whose cursors Postgres no longer knows: it went back, or somebody else has them.

        Without this, a partition to which nothing is written would not notice. Raises what `Ledger.cursors` raises.
        """
        known = {p: (share, share.cursor) for p, share in self.shares.items()}
        cursors = await self._ledger.cursors()
        for partition, (share, ours) in known.items():
            found = cursors.get(partition, Cursor(partition, 0, 0, 0))
            # It may be ahead: of a flush that is on its way.
            if found.term != ours.term or found.seq < ours.seq or (found.seq == ours.seq and found.id != ours.id):
                share.doubt = f"Postgres has {found}, not {ours}"
                self._wake()

    async def compare_for_asker(self) -> None:
        """`compare`, now and then: somebody asks for a flush, and there is nothing that is not flushed."""
        if self.shares and self._loop.time() - self._compared_at >= _COMPARE_S:
            self._compared_at = self._loop.time()
            with contextlib.suppress(BufstoreError, FlushFailed):
                await self.compare()

    async def drop(self, share: Share, reason: str) -> None:
        """Give the partition up: its memory is void."""
        _log.info("partition %d: %s", share.cursor.partition, reason, extra={"action": "partition_dropped"})
        self.shares.pop(share.cursor.partition, None)
        self._state.partitions = tuple(sorted(self.shares))
        reach(Failpoint.SHARE_DROPPED)
        await share.feed.close()
