"""The ledger in Postgres: watermarks, cursors, terms, and the one flush transaction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from typing import Any

from psycopg import AsyncConnection

from bufstore.buffer.chain import Row
from bufstore.buffer.ports import Cursor, Decision, Move, NotOwner
from bufstore.config import BufferConfig
from bufstore.failpoints import Failpoint, reach
from bufstore.postgres import columns
from bufstore.postgres.applying import Applies, apply_batch, flush_errors, probe_batch
from bufstore.postgres.migrate import check_schema, migrate, queries
from bufstore.postgres.pool import Pool, new_pool
from bufstore.postgres.quarantine import PostgresParked, row_columns

_FOLDER = files("bufstore.postgres") / "buffer"
#: Enough for one flush and the reads of waiters beside it.
_CONNECTIONS = 3


class PostgresLedger:
    """See `bufstore.buffer.ports.Ledger`. Its tables stand in `schema`, beside those of the store it flushes into."""

    def __init__(
        self,
        conninfo: str,
        target: Applies,
        *,
        schema: str = "bufstore",
        timeout_s: float = 30.0,
        quarantine_max: int = BufferConfig.quarantine_max,
    ) -> None:
        self.schema = check_schema(schema)
        self._target = target
        self._timeout_s = timeout_s
        self._pool: Pool = new_pool(conninfo, size=_CONNECTIONS)
        self._sql = queries(_FOLDER, schema)
        self._parked = PostgresParked(self._pool, self.setup, self._sql, target, timeout_s, quarantine_max)
        self._ready = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}(schema={self.schema!r})"

    async def open(self) -> None:
        """Open the pool; Postgres need not be up."""
        await self._pool.open(wait=False)

    async def aclose(self) -> None:
        await self._pool.close()

    async def setup(self) -> None:
        if not self._ready:
            async with self._pool.lend(self._timeout_s) as connection:
                await migrate(connection, self.schema, _FOLDER, "buffer")
            self._ready = True

    async def epoch(self) -> int | None:
        rows = await self._fetch("epoch")
        return int(rows[0][0]) if rows else None

    async def set_epoch(self, epoch: int) -> None:
        await self._fetch("set_epoch", epoch)

    async def take(self, partitions: Sequence[int], owner: str) -> list[Cursor]:
        rows = await self._fetch("take", columns.ints(sorted(partitions)), owner)
        return [Cursor(*row) for row in sorted(rows)]

    async def cursors(self) -> dict[int, Cursor]:
        return {row[0]: Cursor(*row) for row in await self._fetch("cursors")}

    async def row(self, thread_id: str) -> Row:
        rows = await self._fetch("row", thread_id)
        return Row(*rows[0]) if rows else Row()

    async def tombstones(self, below: int, after: str, limit: int) -> list[tuple[int, str]]:
        return [(seq, t) for t, seq in await self._fetch("tombstones", below, after, limit)]

    async def bury(self, tombstones: Sequence[tuple[int, str]]) -> None:
        await self._fetch("bury", columns.texts(t for _, t in tombstones), columns.longs(s for s, _ in tombstones))

    async def archived(self) -> int:
        rows = await self._fetch("archived")
        return int(rows[0][0]) if rows else 0

    async def set_archived(self, position: int) -> None:
        await self._fetch("set_archived", position)

    async def erase_set_aside(self, thread_ids: Sequence[str]) -> int:
        if not (await self._fetch("has_set_aside", self.schema))[0][0]:
            return 0
        return len(await self._fetch("erase_set_aside", columns.texts(thread_ids)))

    async def quarantined(self) -> int:
        return int((await self._fetch("quarantined"))[0][0])

    async def rows(self, thread_ids: Sequence[str]) -> dict[str, tuple[Row, int]]:
        found = await self._fetch("rows", columns.texts(thread_ids))
        return {thread_id: (Row(*row), given_up) for thread_id, given_up, *row in found}

    async def broken(self) -> frozenset[str]:
        return frozenset(row[0] for row in await self._fetch("broken"))

    async def has_threads(self) -> bool:
        """Whether a PostgresThreadStore has its tables in the same schema."""
        return bool((await self._fetch("has_threads", self.schema))[0][0])

    async def versions(self, thread_ids: Sequence[str]) -> dict[str, tuple[int, int | None, int]]:
        """Where the store is a PostgresThreadStore in the same schema: see `bufstore.buffer.verify.Versions`."""
        return {t: (a, b, c) for t, a, b, c in await self._fetch("counts", columns.texts(thread_ids))}

    @property
    def parked(self) -> PostgresParked:
        return self._parked

    async def flush(
        self,
        moves: Sequence[Move],
        threads: Sequence[str],
        decide: Callable[[Mapping[str, Row]], Decision],
        *,
        probe: bool = False,
    ) -> Decision:
        await self.setup()
        async with self._pool.lend(self._timeout_s) as connection:
            with flush_errors():
                async with connection.transaction():
                    rows = await self._lock(connection, moves, threads)
                    reach(Failpoint.FLUSH_LOCKED)
                    decision = decide(rows)
                    if decision.parked:
                        await self._parked.park(connection, decision.parked)
                        reach(Failpoint.PARK_WRITTEN)
                    if decision.batch and probe:
                        await probe_batch(self._target, connection, decision.batch)
                    elif decision.batch:
                        await apply_batch(self._target, connection, decision.batch)
                    reach(Failpoint.FLUSH_APPLIED)
                    await self._advance(connection, moves, decision)
                    reach(Failpoint.FLUSH_ADVANCED)
        return decision

    async def _lock(
        self, connection: AsyncConnection[Any], moves: Sequence[Move], threads: Sequence[str]
    ) -> dict[str, Row]:
        # One round trip: the partitions first, so that a fenced owner creates no rows.
        async with connection.pipeline():
            partitions = columns.ints(move.before.partition for move in moves)
            held = await self._send(connection, "lock_partitions", partitions)
            rows = await self._lock_threads(connection, threads)
        cursors = {row[0]: Cursor(*row[:4]) for row in await held.fetchall()}
        for move in moves:
            found = cursors.get(move.before.partition)
            if found != move.before:
                # A higher term is another owner's; the same term with an older cursor is a Postgres that has failed
                # over to a copy. Either way the partition is taken again, from where the row says.
                raise NotOwner(f"the row of partition {move.before.partition} is {found}, not {move.before}")
        locked = {row[0]: Row(*row[1:]) for row in await rows.fetchall()}
        while len(locked) < len(threads):  # a tombstone was removed between making the rows and locking them
            async with connection.pipeline():
                rows = await self._lock_threads(connection, threads)
            locked = {row[0]: Row(*row[1:]) for row in await rows.fetchall()}
        return locked

    async def _lock_threads(self, connection: AsyncConnection[Any], threads: Sequence[str]) -> columns.Cursor:
        names = columns.texts(threads)
        await self._send(connection, "insert_missing", names)
        return await self._send(connection, "lock_threads", names)

    async def _advance(self, connection: AsyncConnection[Any], moves: Sequence[Move], decision: Decision) -> None:
        async with connection.pipeline():
            if decision.rows:
                await self._send(connection, "advance_threads", *row_columns(dict(decision.rows)))
            await self._send(
                connection,
                "advance_cursors",
                columns.ints(move.after.partition for move in moves),
                columns.longs(move.after.seq for move in moves),
                columns.longs(move.after.id for move in moves),
            )

    async def _send(self, connection: AsyncConnection[Any], name: str, *parameters: Any) -> columns.Cursor:
        cursor = columns.Cursor(connection)
        await cursor.execute(self._sql[name], parameters, binary=True)
        return cursor

    async def _fetch(self, name: str, *parameters: Any) -> list[tuple[Any, ...]]:
        await self.setup()
        async with self._pool.lend(self._timeout_s) as connection:
            cursor = await self._send(connection, name, *parameters)
            return await cursor.rows()
