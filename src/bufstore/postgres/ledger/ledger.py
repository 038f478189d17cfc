"""The ledger in Postgres: watermarks, cursors, terms, and the one flush transaction."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Self

import msgspec
from psycopg import AsyncConnection

from bufstore.buffer.chain import Watermark
from bufstore.buffer.domain import Applies
from bufstore.buffer.lanes import Layout
from bufstore.buffer.ports.ledger import Cursor, Decision, Flushed, FlushFailed, NotOwner
from bufstore.buffer.target import Made, Target
from bufstore.config import BufferConfig
from bufstore.errors import StoreMisconfigured, StoreUnavailable
from bufstore.failpoints import Failpoint, reach
from bufstore.log_lines import LogLines
from bufstore.postgres.connection import arrays
from bufstore.postgres.connection.pool import connections_made
from bufstore.postgres.connection.session import changes_of_database
from bufstore.postgres.ledger.applying import apply_batch, flush_errors, probe_batch, transaction_ended
from bufstore.postgres.ledger.frozen import OpenFlush, StandingStill, idle_max, is_frozen, may_be_frozen
from bufstore.postgres.ledger.quarantine import PostgresParked, row_columns
from bufstore.postgres.ledger.tables import LedgerTables
from bufstore.postgres.ledger.waiting import PostgresWaiting

_log = LogLines(__name__)

#: Seconds after which a flush says that Postgres is away. The flush is tried again, and meanwhile people are told.
_AWAY_S = 5.0
#: Takes that find rows held at most this many seconds apart are taken to meet the same holder.
_SAME_HOLDER_S = 5.0
#: How long a flush, and a probe, waits for a lock of the store's own tables. A probe waits for each of them.
_LOCK, _PROBE_LOCK = "100ms", "1ms"


class PostgresLedger:
    """See `bufstore.buffer.ports.ledger.Ledger`. Its tables stand in `schema`, beside those of the store."""

    def __init__(
        self,
        conninfo: str,
        target: Applies[Any],
        *,
        schema: str = "bufstore",
        timeout_s: float = 30.0,
        quarantine_max: int = BufferConfig.quarantine_max,
        lease_s: float = BufferConfig.lease_s,
        way_out: str | None = None,
    ) -> None:
        """`way_out`: what a role is told that may not create the tables; None: what sets them up for threads."""
        self._tables = LedgerTables(conninfo, schema, timeout_s, way_out)
        self.schema = self._tables.schema
        self._target = target
        #: The lease, in seconds. A process that stops inside a transaction gives its locks back after two thirds of it:
        #: before its lease is over, which begins up to a third of it earlier.
        self._lease_s = lease_s
        self.parked = PostgresParked(self._tables, target, quarantine_max, idle_max(lease_s))
        self.waiting = PostgresWaiting(self._tables)
        #: By partition: the owner for which this process took it last.
        self._owners: dict[int, str] = {}
        #: When takes began to find rows held by other sessions, and when one last did.
        self._held_since, self._held_at = 0.0, float("-inf")
        self._standing_still = StandingStill()

    @classmethod
    def configured(
        cls,
        config: BufferConfig,
        conninfo: str,
        target: Applies[Any],
        schema: str,
        timeout_s: float = 30.0,
        way_out: str | None = None,
    ) -> Self:
        """Return the ledger of a buffer with this configuration. `way_out`: see `__init__`."""
        most, lease_s = config.quarantine_max, config.lease_s
        return cls(
            conninfo,
            target,
            schema=schema,
            timeout_s=timeout_s,
            quarantine_max=most,
            lease_s=lease_s,
            way_out=way_out,
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}(schema={self.schema!r})"

    @property
    def connections(self) -> int:
        return connections_made()

    @property
    def changes_of_database(self) -> int:
        return changes_of_database()

    async def server_run(self) -> str:
        return str((await self._tables.run("server_run"))[0][0])

    async def open(self) -> None:
        """Open the pool; Postgres need not be up."""
        await self._tables.pool.open(wait=False)

    async def aclose(self) -> None:
        await self._tables.pool.close()

    async def setup(self, away_s: float | None = None) -> None:
        await self._tables.setup(away_s)

    async def look(self) -> bool:
        return await self._tables.look()

    async def epoch(self) -> int | None:
        rows = await self._tables.run("epoch")
        return int(rows[0][0]) if rows else None

    async def set_epoch(self, epoch: int) -> None:
        await self._tables.run("set_epoch", epoch)

    async def target(self) -> Target | None:
        rows = await self._tables.run("target")
        return Target(*rows[0]) if rows else None

    async def claim(self, epoch: int, target: Target) -> Target:
        return Target(*(await self._tables.run("claim", epoch, target.domain, target.store, target.id))[0])

    async def layout(self) -> Layout | None:
        rows = await self._tables.run("layout")
        return Layout(*rows[0]) if rows else None

    async def set_layout(self, layout: Layout) -> None:
        await self._tables.run("set_layout", *layout)

    async def made(self) -> Made | None:
        rows = await self._tables.run("made")
        return Made(*rows[0]) if rows else None

    async def note_made(self, made: Made) -> None:
        await self._tables.run("note_made", *made)

    async def begin_erasure(self, thread_id: str, descendants: Collection[str]) -> list[str]:
        if descendants:
            # Sorted, so that two calls that insert the same rows do not wait for each other.
            await self._tables.run("begin_erasure", thread_id, arrays.texts(sorted(descendants)))
        return [row[0] for row in await self._tables.run("erasing", thread_id)]

    async def end_erasure(self, thread_id: str, descendants: Collection[str]) -> None:
        if descendants:
            await self._tables.run("end_erasure", thread_id, arrays.texts(descendants))

    async def take(self, partitions: Sequence[int], owner: str) -> list[Cursor]:
        rows = await self._tables.run("take", arrays.ints(sorted(partitions)), owner)
        self._owners |= {row[0]: owner for row in rows}
        if len(rows) < len(set(partitions)):
            await self._end_frozen(refused=not rows)
        return [Cursor(*row) for row in sorted(rows)]

    async def _end_frozen(self, *, refused: bool) -> None:
        """End the sessions of flushes that stand still for longer than they may.

        Postgres ends those that stand still between two statements (`idle_in_transaction_session_timeout`), but not in
        a pipeline: until its end, a session that waits for the next statement counts as busy.
        Raises StoreUnavailable for one that our role may not look at or end, if `refused`: if nothing could be taken.
        """
        now = time.monotonic()
        if now - self._held_at > _SAME_HOLDER_S:
            self._held_since = now
        self._held_at = now
        rows = await self._tables.run("open_flushes")
        for flush in self._standing_still.timed([OpenFlush(*row) for row in rows], now, time.monotonic()):
            if refused and may_be_frozen(flush, held_s := now - self._held_since):
                raise StoreUnavailable(
                    f"a flush of role {flush.role} has held rows of buffer_partitions for {held_s:.0f} s; if its "
                    f"process is frozen, end that, or run SELECT pg_terminate_backend({flush.pid}) as {flush.role}"
                )
            if not is_frozen(flush):
                continue
            try:
                ended = await self._tables.run("end_flush", flush.pid, flush.transaction)
            except StoreMisconfigured as e:
                if refused:
                    raise StoreUnavailable(
                        "a flusher is frozen and holds rows of buffer_partitions, and this role may not end its "
                        f"session: end its process, or run SELECT pg_terminate_backend({flush.pid}) as {flush.role}"
                    ) from e
            else:
                if ended:
                    _log.warning(
                        "ended Postgres session %d: it was stuck in a flush and held rows of buffer_partitions",
                        flush.pid,
                        extra={"action": "frozen_flush_ended"},
                    )

    async def cursors(self) -> dict[int, Cursor]:
        return {row[0]: Cursor(*row) for row in await self._tables.first("cursors")}

    async def flushed(self) -> dict[int, int]:
        return dict(await self._tables.run("flushed"))

    async def watermark(self, thread_id: str) -> Watermark:
        ((*row, waits_to),) = await self._tables.run("row", thread_id)
        return watermark_of(row, waits_to)

    async def tombstones(self, below: int, after: str, limit: int) -> list[tuple[int, str]]:
        return [(seq, t) for t, seq in await self._tables.run("tombstones", below, after, limit)]

    async def bury(self, tombstones: Sequence[tuple[int, str]]) -> None:
        await self._tables.run("bury", arrays.texts(t for _, t in tombstones), arrays.longs(s for s, _ in tombstones))

    async def archived(self) -> int:
        rows = await self._tables.run("archived")
        return int(rows[0][0]) if rows else 0

    async def set_archived(self, position: int) -> None:
        await self._tables.run("set_archived", position)

    async def begin_archiving(self, position: int) -> None:
        await self._tables.run("begin_archiving", position)

    async def may_be_archived(self) -> int:
        rows = await self._tables.run("may_be_archived")
        return int(rows[0][0]) if rows else 0

    async def quarantined(self) -> int:
        return int((await self._tables.run("quarantined"))[0][0])

    async def watermarks(self, thread_ids: Sequence[str]) -> dict[str, tuple[Watermark, int]]:
        found = await self._tables.run("rows", arrays.texts(thread_ids))
        return {thread_id: (watermark_of(row, waits), given_up) for thread_id, given_up, *row, waits in found}

    async def broken(self) -> frozenset[str]:
        return frozenset(row[0] for row in await self._tables.run("broken"))

    async def flush(
        self,
        held: Sequence[Cursor],
        threads: Sequence[str],
        decide: Callable[[Mapping[str, Watermark]], Decision],
        *,
        probe: int = 0,
        size: int = 0,
    ) -> Flushed:
        await self.setup()
        refused: dict[str, FlushFailed] = {}
        untried: set[str] = set()
        async with self._tables.lend(_AWAY_S) as connection:
            with flush_errors():
                async with connection.transaction():
                    times = idle_max(self._lease_s, size), _PROBE_LOCK if probe else _LOCK
                    rows = await self._lock(connection, held, threads, *times)
                    reach(Failpoint.FLUSH_LOCKED)
                    decision = decide(rows)
                    if decision.batch and probe:
                        refused, untried = await probe_batch(self._target, connection, decision.batch, probe)
                        if refused or untried:
                            decision = decide({t: rows[t] for t in rows.keys() - refused.keys() - untried})
                    if decision.parked:
                        await self.parked.park(connection, decision.parked)
                        reach(Failpoint.PARK_WRITTEN)
                    if decision.batch and not probe:
                        await apply_batch(self._target, connection, decision.batch)
                    reach(Failpoint.FLUSH_APPLIED)
                    await self.waiting.write(connection, decision.waiting, decision.left)
                    if decision.waiting:
                        reach(Failpoint.QUEUE_WRITTEN)
                    if decision.left:
                        reach(Failpoint.QUEUE_LEFT)
                    await self._advance(connection, decision)
                    reach(Failpoint.FLUSH_ADVANCED)
        return Flushed(decision, set(threads) - rows.keys(), refused, untried)

    async def _lock(
        self,
        connection: AsyncConnection[Any],
        held: Sequence[Cursor],
        threads: Sequence[str],
        idle: int,
        lock_timeout: str,
    ) -> dict[str, Watermark]:
        """Lock the rows of the threads and return them, without those that another session holds."""
        # One round trip: the partitions first, so that a fenced owner creates no rows.
        async with connection.pipeline():
            partitions = arrays.ints(cursor.partition for cursor in held)
            await self._tables.send(connection, "open_flush", lock_timeout)
            found = await self._tables.send(connection, "lock_partitions", partitions, idle)
            names = arrays.texts(threads)
            await self._tables.send(connection, "insert_missing", names)
            rows = await self._tables.send(connection, "lock_threads", names)
        locked = {row[0]: (Cursor(*row[:4]), row[4]) for row in await found.fetchall()}
        for cursor in held:
            # A higher term is another owner's. The same term with an older cursor is a Postgres that has failed over to
            # a copy, where another owner may have come to the same term since. In any case the partition is taken
            # again, from where the row says.
            there, owner = locked.get(cursor.partition, (None, ""))
            if there != cursor or owner != self._owners.get(cursor.partition, owner):
                raise NotOwner(cursor.partition, there, cursor)
        return {row[0]: Watermark(*row[1:]) for row in await rows.fetchall()}

    async def _advance(self, connection: AsyncConnection[Any], decision: Decision) -> None:
        async with connection.pipeline():
            still_open = await self._tables.send(connection, "still_open")
            if decision.watermarks:
                await self._tables.send(connection, "advance_threads", *row_columns(dict(decision.watermarks)))
            await self._tables.send(
                connection,
                "advance_cursors",
                arrays.ints(cursor.partition for cursor in decision.cursors),
                arrays.longs(cursor.seq for cursor in decision.cursors),
                arrays.longs(cursor.id for cursor in decision.cursors),
                arrays.longs(cursor.term for cursor in decision.cursors),
            )
        if await still_open.fetchall() != [(True,)]:  # the app's apply() has begun another, which must not be committed
            raise transaction_ended()


def watermark_of(row: Sequence[Any], waits_to: int | None = None) -> Watermark:
    """Return the watermark from a row of ``buffer_threads`` (nulls: there is none) and the last position that waits."""
    watermark = Watermark() if row[0] is None else Watermark(*row)
    return msgspec.structs.replace(watermark, waits_to=waits_to) if waits_to is not None else watermark
