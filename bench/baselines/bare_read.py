"""*limit*, for reads: one SELECT of a thread's messages on one connection, prepared, decoded."""

from __future__ import annotations

from bench.baselines.connections import Connections
from bench.contestant import Contestant, Place
from bufstore import decode_message


class BareRead(Contestant):
    """Reads the tables of the store in `schema`."""

    def __init__(self, place: Place, *, schema: str) -> None:
        super().__init__(place)
        self._sql = f"SELECT payload FROM {schema}.messages WHERE thread_id = %s ORDER BY seq"

    async def open(self) -> None:
        self._connections = await Connections.open(self.place.dsn, 1)

    async def close(self) -> None:
        await self._connections.close()

    async def read(self, thread: str) -> int:
        """Read the thread, and return the number of its messages."""
        rows = await self._connections.execute(self._sql, [thread])
        return len([decode_message(row[0]) for row in rows])
