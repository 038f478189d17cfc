"""What jobs keep in Postgres: the query of each app id, its progress, rows that could not become checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Any, NamedTuple

import msgspec

from bufstore.postgres.connection import arrays
from bufstore.postgres.connection.migrate import migrate, queries
from bufstore.postgres.connection.pool import Pool, new_pool

_FOLDER = files("bufstore.spark") / "sql"
_TIMEOUT_S = 30.0


class Holder(NamedTuple):
    """The query that has an app id."""

    query_id: str
    batch_id: int
    #: Of that batch, if it was done.
    fingerprint: int | None


class SparkLedger:
    """Raises StoreUnavailable when Postgres cannot be reached."""

    def __init__(self, conninfo: str, schema: str) -> None:
        self._pool: Pool = new_pool(conninfo, size=1)
        self._schema = schema
        self._sql = queries(_FOLDER, schema)

    async def open(self) -> None:
        await self._pool.open(wait=False)

    async def aclose(self) -> None:
        await self._pool.close()

    async def setup(self) -> None:
        async with self._pool.lend(_TIMEOUT_S) as connection:
            await migrate(connection, self._schema, _FOLDER, "spark")

    async def begin(self, app_id: str, query_id: str, batch_id: int) -> Holder:
        """Take the app id for the batch of a query, unless another query has it. Returns its holder."""
        return Holder(*(await self._fetch("begin", app_id, query_id, batch_id))[0])

    async def done(self, app_id: str, batch_id: int, fingerprint: int, rows: int, repeated: int, bad: int) -> None:
        await self._fetch("done", app_id, batch_id, fingerprint, rows, repeated, bad)

    async def quarantine(self, app_id: str, batch_id: int, rank: int, row: Mapping[str, Any], cause: str) -> None:
        """Keep a row that cannot become a checkpoint; once, however often it comes."""
        text = msgspec.json.encode(row, enc_hook=str).decode()
        thread_id = (row["thread_id"] or "").replace("\0", "\N{REPLACEMENT CHARACTER}")
        await self._fetch("quarantine", app_id, batch_id, thread_id, rank, text, cause.replace("\0", ""))

    async def _fetch(self, name: str, *parameters: Any) -> list[tuple[Any, ...]]:
        async with self._pool.lend(_TIMEOUT_S) as connection:
            cursor = arrays.ArrayCursor(connection)
            await cursor.execute(self._sql[name], parameters, binary=True)
            return await cursor.rows()
