"""The ledger's tables, which are made before the first statement."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from bufstore.errors import ConfigError
from bufstore.postgres.connection.migrate import check_schema, look, migrate, queries
from bufstore.postgres.connection.pool import new_pool
from bufstore.postgres.connection.statements import Statements

_FOLDER = files("bufstore.postgres.ledger") / "sql"
#: The connections in the pool: enough for one flush and the reads of waiters beside it.
_CONNECTIONS = 3


class LedgerTables(Statements):
    """The statements of the ledger, with a pool of their own. Postgres need not be up before the first of them."""

    def __init__(self, conninfo: str, schema: str, timeout_s: float, way_out: str | None = None) -> None:
        """`way_out`: see `migrate`."""
        self.schema = check_schema(schema)
        self._way_out = way_out
        super().__init__(new_pool(conninfo, size=_CONNECTIONS), queries(_FOLDER, schema), timeout_s)
        self._ready = self._looks = False

    async def look(self) -> bool:
        """Make and migrate nothing from now on; return whether there are tables. Raises like `migrate.look`."""
        self._looks = True
        async with self.lend() as connection:
            self._ready = await look(connection, self.schema, _FOLDER, "buffer")
        return self._ready

    async def setup(self, away_s: float | None = None) -> None:
        """Create or migrate the tables, once. `away_s`: see `Pool.lend`. Raises like `migrate`; after `look` as that.

        After `look` it makes none: ConfigError if there are none.
        """
        if self._looks and not (self._ready or await self.look()):
            raise ConfigError(f"there are no buffer tables in schema {self.schema!r}")
        if not self._ready:
            async with self.lend(away_s) as connection:
                await migrate(connection, self.schema, _FOLDER, "buffer", self._way_out)
            self._ready = True

    async def run(self, name: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """See `Statements.run`."""
        await self.setup()
        return await super().run(name, *parameters)
