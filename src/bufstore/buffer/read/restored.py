"""Decides whether Postgres still has the entries below the log's floor, which nobody looks for in the log.

Everything below the log's floor is in Postgres for good, so reads and writers ask Postgres alone for it. Yet a Postgres
may lack some of it when it was restored from a backup, or failed over to a copy that had missed more than
`failover_window_s`. Then one of its cursors stands below the floor, and the log has an entry in between. Such a
Postgres counts as away, for all but flushers. The flushers go on from its cursors, and once they are past the floor it
counts again. If the log does not reach back to a cursor, the flushers refuse the log.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVar

from bufstore import elapsed
from bufstore.buffer.flush.takeover import mismatch, never_flushed, proven
from bufstore.buffer.parts import AnyParts
from bufstore.buffer.ports.ledger import Cursor, passed_by_all
from bufstore.errors import StoreUnavailable
from bufstore.shared_call import SharedCall

T = TypeVar("T")

#: Seconds after which Postgres is compared again although no connection is new: a pooler may lead an old connection to
#: another Postgres.
_AGAIN_S = 5.0
_OLDER = (
    "Postgres is treated as unavailable: it seems to have gone back further than the log reaches ({}); see `bufstore "
    "repair`"
)


class _Fit(NamedTuple):
    """A comparison after which Postgres had everything."""

    #: How many connections there had been, and how often one had led to another database.
    connections: int
    changes: int
    #: When it was.
    at: float
    #: Up to which position Postgres had everything.
    reached: int


#: There was none, or the last one failed.
_NEVER = _Fit(-1, -1, float("-inf"), 0)


class Restored:
    """Asks Postgres for its cursors, once for each new connection to it, and now and then."""

    def __init__(self, parts: AnyParts) -> None:
        self._log, self._ledger, self._subjects = parts.log, parts.ledger, parts.subjects
        self._look, self._preparing = SharedCall(self._compare), SharedCall(self._prepare)
        #: Makes sure that tables and log belong together, which nobody could while Postgres was away; None: it is done.
        self.prepare: Callable[[], Awaitable[None]] | None = None
        #: The last comparison, if it succeeded.
        self._fits = _NEVER
        #: When a mismatch of log and Postgres was proven last.
        self._proven_at = float("-inf")
        #: Grows whenever Postgres is found to have everything and that was not known before: earlier answers may lack
        #: something. A floor that rises later was told by an owner that has seen as much in this Postgres.
        self.era = 0

    async def aclose(self) -> None:
        """Stop asking Postgres."""
        await self._look.aclose()
        await self._preparing.aclose()

    async def prepared(self) -> None:
        """Return once no answer of Postgres lacks its preparation. Raises what that raises."""
        if self.prepare is not None:
            await self._preparing()

    async def _prepare(self) -> None:
        if self.prepare is not None:
            await self.prepare()
            self.prepare = None

    async def counting(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Return the answer of Postgres; ask again if it may come from before the last comparison.

        Raises StoreUnavailable.
        """
        while True:
            if self._is_new():
                await self._look()  # before `ask`, which may take long and would have to be repeated
            era = self.era
            answer = await ask()
            if await self.counts_since(era):
                return answer

    async def counts_since(self, era: int) -> bool:
        """Return whether answers count that log and Postgres gave since `era` began.

        Raises StoreUnavailable if no answer counts now.
        """
        old = elapsed.now_s() - self._fits.at >= _AGAIN_S
        if old or self._is_new() or self._log.floor > self._fits.reached:
            await self._look()
        return self.era == era

    def _is_new(self) -> bool:
        """Whether answers may come from a Postgres that was not compared yet."""
        now = self._ledger.connections, self._ledger.changes_of_database
        return now != (self._fits.connections, self._fits.changes)

    async def _compare(self) -> None:
        if self.prepare is not None:
            await self._ledger.setup()  # rides out a restart, as any question does; `prepare` gives up sooner
            await self.prepared()
        before, floor = self._fits, self._log.floor
        now = _Fit(self._ledger.connections, self._ledger.changes_of_database, elapsed.now_s(), floor)
        try:
            self._fits = now._replace(reached=await self._reached(floor))
        except BaseException:
            self._fits = _NEVER
            raise
        # A new connection to the database of the others may say what they say: a pool that grows spoils no answer.
        if before.changes != now.changes or floor > before.reached:
            self.era += 1

    async def _reached(self, floor: int) -> int:
        """Return up to which position Postgres has everything. Raises StoreUnavailable if that is below the floor."""
        if floor <= self._log.generation_start:
            return floor
        cursors = await self._ledger.cursors()
        if (trouble := await never_flushed(self._log, cursors.values())) is not None:
            raise StoreUnavailable(_OLDER.format(trouble))
        for partition in range(self._subjects.partitions):
            cursor = cursors.get(partition, Cursor(partition, 0, 0, 0))
            if cursor.seq < floor:
                await self._compare_with(cursor, floor)
        return max(floor, passed_by_all(cursors, self._subjects.partitions))

    async def _compare_with(self, cursor: Cursor, floor: int) -> None:
        """Raise StoreUnavailable if the partition has an entry between its cursor and the floor, which is above it."""
        if elapsed.now_s() - self._proven_at < _AGAIN_S:  # a proof is a message of the log, and every read comes here
            trouble = await mismatch(self._log, cursor)
        else:
            trouble = await proven(self._log, lambda reached: mismatch(self._log, cursor, reached))
            if trouble is not None:
                self._proven_at = elapsed.now_s()
        if trouble is not None:
            raise StoreUnavailable(_OLDER.format(trouble))
        async for _, message in self._log.scan(cursor.seq, partitions=[cursor.partition]):
            if message.seq < floor:
                raise StoreUnavailable(
                    f"Postgres went back (was it restored from a backup?): partition {cursor.partition} was flushed "
                    f"up to {floor}, but Postgres is at {cursor.seq}. The log still has the missing entries and they "
                    "will be flushed again; until then Postgres is treated as unavailable"
                )
            return
