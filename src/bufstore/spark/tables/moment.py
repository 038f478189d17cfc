"""A moment of Postgres: a transaction that sees one state of all tables, from its first statement on.

Another transaction can see the same moment (`hold_position`), as in parallel dumps of a database.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from types import TracebackType
from typing import Any, LiteralString, NamedTuple, Self

import psycopg
from psycopg import AsyncConnection, capabilities

from bufstore.buffer.lanes import ledger_schema
from bufstore.buffer.target import Target
from bufstore.config import LANES_MAX, LogConfig
from bufstore.errors import ConfigError
from bufstore.postgres.connection import arrays
from bufstore.postgres.connection.alarm import in_time
from bufstore.postgres.connection.errors import map_errors
from bufstore.postgres.connection.functions import made_elsewhere, not_ours
from bufstore.postgres.connection.migrate import check_known, queries
from bufstore.postgres.connection.pool import Pool, new_pool
from bufstore.spark.sink.spark_ledger import FOLDER
from bufstore.threads.postgres.tables import LEDGER, PARTS, folder_of, lanes

#: How many seconds each of these may take: the connection, a lock, and an answer that is no stream.
_ANSWER_S = 30.0
#: The first version of Postgres that has a timeout of transactions.
_TRANSACTION_TIMEOUT = 170000
#: How many rows of a stream are in memory at a time, where libpq can do that (from 17 on); else one.
_ROWS = 50
#: What our statements call, and what to do when it reads another schema.
_FUNCTIONS = ("thread_row_v2",)
_WAY_OUT = "Run `bufstore setup`, or open the store once, with their owner's rights"


class Ledger(NamedTuple):
    """What the buffer's tables of a lane say."""

    #: The cursor of each partition: everything up to it is in the threads' rows, or waits, or is in quarantine.
    cursors: Mapping[int, int]
    target: Target | None


class Moment:
    """For ``async with``.

    Raises StoreUnavailable, StoreMisconfigured, and ConfigError when the snapshot is over, or when this release cannot
    read the tables.
    """

    def __init__(self, conninfo: str, schema: str, snapshot: str | None = None) -> None:
        self._pool: Pool = new_pool(conninfo, size=1)
        self._schema = schema
        #: The statements for the tables of each lane that was asked for; the first one's have the store's, too.
        self._sql: dict[int, Mapping[str, LiteralString]] = {}
        self._watermarks: LiteralString = ""
        self._snapshot = snapshot
        self._connection: AsyncConnection[Any] | None = None

    async def __aenter__(self) -> Self:
        try:
            await self._begin()
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def _begin(self) -> None:
        await self._pool.open(wait=False)
        self._connection = connection = await self._pool.take(_ANSWER_S)
        # A stream lasts as long as Spark takes to read its rows, and the transaction is idle while the log is read or
        # somebody holds it. It locks nothing that others write, so only its wait for a lock has a timeout.
        off = ["idle_in_transaction_session_timeout", "statement_timeout"]
        if connection.info.server_version >= _TRANSACTION_TIMEOUT:
            off.append("transaction_timeout")
        settings = [*(f"SET LOCAL {name} = 0" for name in off), f"SET LOCAL lock_timeout = {round(_ANSWER_S * 1000)}"]
        with map_errors():
            async with in_time(connection, _ANSWER_S):
                if self._snapshot is None:
                    await self._check_known(connection)
                await connection.execute("; ".join(["BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY", *settings]))
                if self._snapshot is None:  # else whoever holds it has looked
                    strange = await made_elsewhere(connection, self._schema, _FUNCTIONS)
                    if strange:
                        raise not_ours(self._schema, strange, _WAY_OUT)
                    return
                try:
                    await connection.execute(f"SET TRANSACTION SNAPSHOT '{self._snapshot}'")
                except (psycopg.errors.InvalidParameterValue, psycopg.errors.UndefinedObject):
                    raise ConfigError(
                        "the position is no longer held, or another server holds it: read within the block of "
                        "hold_position"
                    ) from None

    async def _check_known(self, connection: AsyncConnection[Any]) -> None:
        """Raise ConfigError for tables of a newer release that this one cannot read, as a store does that opens."""
        # Outside of the transaction, which may last long: its lock would stop migrations of all other parts, too.
        await check_known(connection, self._schema, {part: folder_of(part) for part in PARTS})
        for lane in range(1, await lanes(connection, self._schema) or 1):
            await check_known(connection, self._ledger_schema(lane), {part: folder_of(part) for part in LEDGER})

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._connection is not None:
            with suppress(psycopg.Error, OSError):
                await self._connection.close()
            await self._pool.putconn(self._connection)  # type: ignore[arg-type]
        await self._pool.close()

    def watermarks_of(self, lanes: int) -> None:
        """Have the threads' rows show the watermarks of this many lanes."""
        self._watermarks = " UNION ALL ".join(self._text("watermarks", lane) for lane in range(lanes))

    def _text(self, name: str, lane: int) -> LiteralString:
        if lane not in self._sql:
            self._sql[lane] = queries(FOLDER, self._ledger_schema(lane))
        return self._sql[lane][name].replace("{watermarks}", self._watermarks)

    def _ledger_schema(self, lane: int) -> str:
        return ledger_schema(self._schema, LogConfig(lanes=LANES_MAX, lane=lane))

    async def rows(self, name: str, *parameters: Any, lane: int = 0) -> list[tuple[Any, ...]]:
        """Return all rows of a statement that finds its few rows at once; `lane`: in whose tables."""
        assert self._connection is not None
        with map_errors():
            async with in_time(self._connection, _ANSWER_S):
                return await arrays.rows_of(self._connection, self._text(name, lane), parameters)

    async def stream(self, name: str, *parameters: Any, lane: int = 0) -> AsyncGenerator[tuple[Any, ...]]:
        """Yield the rows of a statement that may read whole tables, some at a time; `lane`: in whose tables.

        Nothing limits the time until the first row, or the next one: a read may want few rows of a large table, and
        Spark takes rows when it wants them.
        """
        assert self._connection is not None
        size = _ROWS if capabilities.has_stream_chunked() else 1
        with map_errors():
            cursor = arrays.ArrayCursor(self._connection)
            found = cursor.stream(self._text(name, lane), parameters, binary=True, size=size)
            async with aclosing(found) as rows:  # type: ignore[type-var]
                async for row in rows:
                    yield row

    async def ledger(self, lane: int) -> Ledger:
        partitions, cursors, domain, store, target = (await self.rows("cursors_and_target", lane=lane))[0]
        named = Target(domain, store, target) if target is not None else None
        return Ledger(dict(zip(partitions or (), cursors or (), strict=True)), named)

    async def export(self) -> str:
        """Return the name under which other transactions can see this moment, for as long as this one lasts."""
        return str((await self.rows("export_snapshot"))[0][0])
