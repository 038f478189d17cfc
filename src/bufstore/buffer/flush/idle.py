"""Moves the cursors of partitions to which nothing is written, past parts of the log that hold nothing of theirs.

All partitions share the log, and it is purged only as far as every cursor has come. So now and then the cursors that
stay behind move to the last entry that was delivered, whichever partition it is of, in one small transaction.

Partitions share a delivery, and one that passes nothing is set aside when another acknowledges a later position
(`bufstore.buffer.groups.delivery`). A partition that has reached the point where the delivery stopped gets nothing more
to acknowledge. So now and then a partition that has nothing open, and waits only for others, acknowledges its cursor
again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

from bufstore.buffer.entry import entry_id
from bufstore.buffer.flush.owned_partition import OwnedPartition
from bufstore.buffer.parts import AnyParts
from bufstore.buffer.ports.ledger import Cursor, Decision, FlushFailed, NotOwner
from bufstore.errors import BufstoreError
from bufstore.failpoints import Failpoint, reach
from bufstore.log_lines import LogLines

_log = LogLines(__name__)

_INTERVAL_S = 5.0


class IdleCursors:
    """Moves the idle cursors of one owner, between its flushes."""

    def __init__(self, parts: AnyParts, owned_partitions: Mapping[int, OwnedPartition]) -> None:
        self._ledger = parts.ledger
        self._owned = owned_partitions
        self._interval = min(_INTERVAL_S, parts.config.log.failover_window_s / 8)
        self._loop = asyncio.get_running_loop()
        self._due_at = 0.0

    @property
    def due(self) -> bool:
        """Whether it is time to move them again."""
        return self._loop.time() >= self._due_at

    async def advance(self) -> None:
        """Move the idle cursors. Call this when it is `due`, all that arrived is collected, and no flush runs."""
        self._due_at = self._loop.time() + self._interval
        await self._acknowledge_again()
        moved = [(owned, cursor) for owned in self._owned.values() if (cursor := idle_cursor(owned)) is not None]
        if not moved:
            return
        cursors = [cursor for _, cursor in moved]
        try:
            await self._ledger.flush(
                [owned.cursor for owned, _ in moved],
                [],
                lambda _: Decision(cursors=cursors),
            )
            reach(Failpoint.IDLE_MOVED)
            for owned, cursor in moved:
                owned.settle(frozenset(), cursor, self._loop.time())
                owned.feed.passed(cursor.seq)
            for owned, cursor in moved:
                await owned.feed.ack(cursor.seq)
        except NotOwner as e:
            # Another owner has the partition, or a commit whose answer was lost has moved the cursor.
            if (doubtful := self._owned.get(e.partition)) is not None:
                doubtful.doubt = str(e)
        except (BufstoreError, FlushFailed) as e:
            _log.debug("idle cursors stay where they are for now: %s", e, extra={"action": "idle_cursors"})

    async def _acknowledge_again(self) -> None:
        for owned in list(self._owned.values()):
            if not owned.pending and owned.doubt is None and owned.feed.crowded:
                with contextlib.suppress(BufstoreError):
                    await owned.feed.ack(owned.cursor.seq)


def idle_cursor(owned: OwnedPartition) -> Cursor | None:
    """Return the cursor to which the partition may move without a flush; None if there is none.

    Entries that wait in the ledger do not hold the cursor: it has passed them.
    """
    through = owned.feed.through
    if owned.pending or owned.doubt is not None or through is None or through.seq <= owned.cursor.seq:
        return None
    return Cursor(owned.cursor.partition, owned.cursor.term, through.seq, entry_id(through))
