"""What jobs keep in Postgres: the query of each app id, its progress, and rows that could not become checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from importlib.resources import files
from typing import Any, NamedTuple

import msgspec

from bufstore.errors import ConfigError
from bufstore.postgres.connection.migrate import migrate, queries
from bufstore.postgres.connection.pool import new_pool
from bufstore.postgres.connection.statements import Statements
from bufstore.spark.sink.checkpoint_rows import UNREADABLE
from bufstore.spark.sink.lines import shown
from bufstore.spark.sink.parts import Part
from bufstore.spark.sink.settled import THREAD
from bufstore.types import MAX_ID_BYTES

FOLDER = files("bufstore.spark") / "sql"
_TIMEOUT_S = 30.0
#: How much is shown of an id that is too long for a thread.
_SHOWN_BYTES = 64


class Query(NamedTuple):
    """A streaming query, as Spark names it; empty where Spark does not tell (Connect), and outside of a query."""

    query_id: str = ""
    #: Spark's id of the query's present run.
    run_id: str = ""

    @classmethod
    def of(cls, context: Any) -> Query:
        """Return the query of the batch that is written in a context of Spark: the driver's, or a task's."""
        query_id = context.getLocalProperty("sql.streaming.queryId") if context is not None else None
        return cls(query_id, context.getLocalProperty("spark.jobGroup.id") or "") if query_id else cls()


class Holder(NamedTuple):
    """The query that has an app id."""

    query_id: str
    batch_id: int
    #: A sum over that batch's rows, once it is done; None: not noted. (An earlier release noted it before that, too.)
    planned: int | None = None
    done: bool = False
    #: The packed keys of that batch's written rows, if it ended with bad rows: see `bufstore.spark.sink.settled`.
    settled: bytes | None = None
    #: The parts of that batch of which rows may be written.
    parts: Sequence[Part] = ()


class SparkLedger:
    """The jobs' tables. Raises StoreUnavailable when Postgres cannot be reached."""

    def __init__(self, conninfo: str, schema: str) -> None:
        self._sql = Statements(new_pool(conninfo, size=1), queries(FOLDER, schema), _TIMEOUT_S)
        self._schema = schema

    async def open(self) -> None:
        await self._sql.pool.open(wait=False)

    async def aclose(self) -> None:
        await self._sql.pool.close()

    async def setup(self, timeout_s: float = _TIMEOUT_S) -> None:
        async with self._sql.lend(timeout_s=timeout_s) as connection:
            await migrate(connection, self._schema, FOLDER, "spark")

    async def ping(self, timeout_s: float) -> None:
        """Return when Postgres answers."""
        await self._fetch("ping", timeout_s=timeout_s)

    async def renamed(self, app_id: str, query: Query, batch_id: int, timeout_s: float) -> tuple[str, int] | None:
        """Return another app id under which an earlier run of the query began this batch or a later one, and which."""
        found = await self._fetch("renamed", app_id, *query, batch_id, timeout_s=timeout_s)
        return (found[0][0], found[0][1]) if found else None

    async def begin(self, app_id: str, query: Query, batch_id: int, timeout_s: float) -> Holder:
        """Take the app id for the batch of a query, unless another query has it. Returns its holder."""
        holder = Holder(*(await self._fetch("begin", app_id, *query, batch_id, timeout_s=timeout_s))[0])
        begun = await self._fetch("begun", app_id, batch_id, timeout_s=timeout_s)
        return holder._replace(parts=[Part(*row) for row in begun])

    async def plan(self, app_id: str, batch_id: int, part: Part, timeout_s: float) -> tuple[int, Part]:
        """Note a part before its first row is written. Returns what was noted first, and for which batch."""
        found = await self._fetch("plan", app_id, part.number, batch_id, part.of, part.planned, timeout_s=timeout_s)
        noted_batch, of, planned = found[0]
        return noted_batch, Part(part.number, of, planned)

    async def done(
        self, app_id: str, query: Query, batch_id: int, planned: int, *,
        rows: int, repeated: int, bad: int, waited_ms: int, timeout_s: float,
    ) -> None:  # fmt: skip
        """Note what became of a batch, whether or not its beginning was noted."""
        of = (app_id, *query, batch_id)
        await self._fetch("done", *of, planned, rows, repeated, bad, waited_ms, timeout_s=timeout_s)

    async def stop(self, app_id: str, query: Query, batch_id: int, settled: bytes) -> None:
        """Note which rows are written of a batch that ended with bad rows, whether or not its beginning was noted."""
        await self._fetch("stop", app_id, *query, batch_id, settled)

    async def quarantine(
        self, app_id: str, batch_id: int | None, rank: int, row: Mapping[str, Any], cause: str, key: bytes
    ) -> None:
        """Keep a row that cannot become a checkpoint: once, however often it comes, and whatever became of it.

        `batch_id`: None for a batch without a number, of which no later attempt knows what became of its rows. `key`:
        see `row_key`. Raises ConfigError when a later batch was begun: people have dealt with the row by then.
        """
        row = shown(row)
        text = msgspec.json.encode(row, enc_hook=str).decode()
        of = (app_id, batch_id or 0, shown_thread(row["thread_id"]), rank, text, cause.replace("\0", ""), key)
        ((late,),) = await self._fetch("quarantine", *of, batch_id is not None)
        if late:
            raise ConfigError(f"a later batch was begun than batch {batch_id} of app id {app_id!r}: it was done before")

    async def set_aside(self, app_id: str, batch_id: int, timeout_s: float) -> set[bytes]:
        """Return the keys (`row_key`) of a batch's rows that were set aside, even if they have left quarantine."""
        return {key for (key,) in await self._fetch("set_aside", app_id, batch_id, timeout_s=timeout_s)}

    async def _fetch(self, name: str, *parameters: Any, timeout_s: float = _TIMEOUT_S) -> list[tuple[Any, ...]]:
        async with self._sql.lend(timeout_s=timeout_s) as connection:
            return await self._sql.on(connection, name, *parameters)


def row_key(app_id: str, batch: int | bytes, row: Mapping[str, Any], rank: int) -> bytes:
    """Return a row's key, made of its place among its thread's rows in the batch: the same for each try.

    `batch`: its number; of a batch without one, bytes that no other has.
    """
    of: tuple[Any, ...] = (app_id, batch, row["thread_id"], rank)
    if UNREADABLE in row:  # what is shown of its bytes may be another thread's id
        of += (row.get(THREAD),)
    return blake2b(msgspec.json.encode(of), digest_size=16).digest()


def shown_thread(thread_id: str | None) -> str:
    """Return a thread's id for a text column with an index, which holds no NUL, and no id that no thread can have.

    Spark may have null in place of an id.
    """
    text = (thread_id or "").replace("\0", "\N{REPLACEMENT CHARACTER}")
    whole = text.encode()
    if len(whole) <= MAX_ID_BYTES:
        return text
    return f"{whole[:_SHOWN_BYTES].decode(errors='ignore')}…{blake2b(whole, digest_size=8).hexdigest()}"
