"""Whether Postgres still has what nobody looks for in the log any more.

What stands below the log's floor is in every Postgres there will be, so reads and writers ask Postgres alone for it.
That does not hold of a Postgres that was restored from a backup, or failed over to a copy that had missed more than
`failover_window_s`. Its cursors say so: one of them stands below the floor, and the log has an entry in between. Such a
Postgres counts as away, for all but flushers. These go on from its cursors, and once they are past the floor it counts
again. If the log does not reach back to a cursor, they refuse the log.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from bufstore.buffer import elapsed
from bufstore.buffer.flush.takeover import mismatch, never_flushed
from bufstore.buffer.parts import AnyParts
from bufstore.buffer.ports.ledger import Cursor
from bufstore.errors import StoreUnavailable
from bufstore.shared_call import SharedCall

T = TypeVar("T")

#: Before anything was found to fit.
_NEVER = (-1, float("-inf"), 0)
#: A pooler may lead an old connection to another Postgres: so often it is asked although no connection is new.
_AGAIN_S = 5.0
_OLDER = "Postgres seems to be older than the log reaches back, so it counts as away: {}; see `bufstore repair`"


class Restored:
    """Asks Postgres for its cursors, once for each new connection to it, and now and then."""

    def __init__(self, parts: AnyParts) -> None:
        self._log, self._ledger, self._subjects = parts.log, parts.ledger, parts.subjects
        self._look = SharedCall(self._compare)
        #: How many connections there were and when, and up to where Postgres had everything then.
        self._fits = _NEVER
        #: Grows whenever it is found to have everything and was not known to: what was answered before may lack some.
        #: A floor that rises later is told by who has seen that much in this Postgres.
        self.era = 0

    async def aclose(self) -> None:
        """Ask no more."""
        await self._look.aclose()

    async def counting(self, ask: Callable[[], Awaitable[T]]) -> T:
        """What Postgres answers, asked again if the answer may be older than what it had when that was looked at.

        Raises StoreUnavailable.
        """
        while True:
            if self._fits[0] != self._ledger.connections:
                await self._look()  # first, or what may take long would be asked for twice
            era = self.era
            answer = await ask()
            if await self.counts_since(era):
                return answer

    async def counts_since(self, era: int) -> bool:
        """Whether what both answered since `era` began counts. Raises StoreUnavailable if nothing does now."""
        connections, at, reached = self._fits
        fits = connections == self._ledger.connections and elapsed.now_s() - at < _AGAIN_S
        if not fits or self._log.floor > reached:
            await self._look()
        return self.era == era

    async def _compare(self) -> None:
        before, (connections, at, floor) = self._fits, (self._ledger.connections, elapsed.now_s(), self._log.floor)
        try:
            reached = await self._reached(floor)
        except BaseException:
            self._fits = _NEVER
            raise
        if before[0] != connections or floor > before[2]:
            self.era += 1
        self._fits = connections, at, reached

    async def _reached(self, floor: int) -> int:
        """Up to where Postgres has everything, at least the floor. Raises StoreUnavailable if it has not."""
        if floor <= self._log.generation_start:
            return floor
        cursors = await self._ledger.cursors()
        if (trouble := await never_flushed(self._log, cursors.values())) is not None:
            raise StoreUnavailable(_OLDER.format(trouble))
        all_ = [cursors.get(p, Cursor(p, 0, 0, 0)) for p in range(self._subjects.partitions)]
        for cursor in all_:
            if cursor.seq < floor:
                await self._compare_with(cursor, floor)
        return max(floor, min(cursor.seq for cursor in all_))

    async def _compare_with(self, cursor: Cursor, floor: int) -> None:
        """A cursor below the floor: nothing was written to its partition in between, or Postgres is old."""
        if (trouble := await mismatch(self._log, cursor)) is not None:
            raise StoreUnavailable(_OLDER.format(trouble))
        async for _, message in self._log.scan(cursor.seq, partitions=[cursor.partition]):
            if message.seq < floor:
                raise StoreUnavailable(
                    f"Postgres went back (was it restored from a backup?): partition {cursor.partition} was flushed "
                    f"to {floor} and is at {cursor.seq}; what it lacks is in the log and is flushed again, and until "
                    "then Postgres counts as away"
                )
            return
