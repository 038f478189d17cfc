"""The statements of the store in Postgres. Some of them call functions, whose texts name the schema."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib.resources import files
from typing import Any

from psycopg import AsyncConnection

from bufstore.postgres.connection.migrate import migrate, own_functions, queries
from bufstore.postgres.connection.pool import Pool
from bufstore.postgres.connection.statements import Statements

_FOLDER = files("bufstore.threads.postgres") / "sql"


class ThreadStatements(Statements):
    """The statements of a schema. A store that was not set up looks before the first one whether its functions name it.

    A buffer that opens while Postgres is away reads before anybody has set the store up, and so does a store whose
    tables the owner has made.
    """

    def __init__(self, pool: Pool, schema: str, timeout_s: float) -> None:
        super().__init__(pool, queries(_FOLDER, schema), timeout_s)
        self._schema = schema
        #: Whether the functions are known to name the schema.
        self._own = False

    def lend(
        self, away_s: float | None = None, timeout_s: float | None = None
    ) -> AbstractAsyncContextManager[AsyncConnection[Any]]:
        """See `Statements.lend`."""
        lent = super().lend(away_s, timeout_s)
        return lent if self._own else self._looked_at(lent)

    @asynccontextmanager
    async def _looked_at(
        self, lent: AbstractAsyncContextManager[AsyncConnection[Any]]
    ) -> AsyncIterator[AsyncConnection[Any]]:
        async with lent as connection:
            await own_functions(connection, self._schema, _FOLDER, "threads")
            self._own = True
            yield connection

    async def setup(self) -> None:
        """Create or migrate the tables. Raises as `migrate`."""
        async with super().lend() as connection:
            await migrate(connection, self._schema, _FOLDER, "threads")
        self._own = True
