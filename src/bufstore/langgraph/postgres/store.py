"""LangGraph's tables in Postgres: what the buffered saver reads of them and flushes into them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any, LiteralString

from psycopg import AsyncConnection, errors, sql

from bufstore.buffer.domain import Backing
from bufstore.buffer.lanes import ledger_schema
from bufstore.buffer.target import Kind
from bufstore.config import BufferConfig, LogConfig, check_timeout
from bufstore.errors import ConfigError, StoreMisconfigured
from bufstore.langgraph.domain import DOMAIN, Tail, stored_tail
from bufstore.langgraph.folded import Folded
from bufstore.langgraph.history import History, check_history, thin
from bufstore.langgraph.model import (
    BlobKey,
    BlobRow,
    CheckpointKey,
    CheckpointRow,
    LangGraphChange,
    Tables,
    WriteRow,
    takes_sends,
)
from bufstore.langgraph.outlines import outline_of
from bufstore.langgraph.postgres.columns import parameters
from bufstore.langgraph.protocol import Cursor, Outline, Part, Query
from bufstore.postgres.connection import arrays
from bufstore.postgres.connection.migrate import (
    check_rows_shown,
    check_schema,
    has_table,
    make_schema,
    queries,
    rendered,
)
from bufstore.postgres.connection.pool import ANOTHER, Pool, new_pool
from bufstore.postgres.connection.statements import Statements
from bufstore.postgres.ledger.ledger import PostgresLedger, watermark_of

_PACKAGE = files("bufstore.langgraph.postgres")
#: The prefix of the kind of a log that is flushed into LangGraph's tables; the name of their schema follows.
_KIND = "bufstore.langgraph.postgres:"
#: Where a saver's buffer keeps its tables, unless a caller says otherwise.
BUFFER_SCHEMA = "bufstore_langgraph"
#: Where a saver looks for LangGraph's tables, unless a caller says otherwise.
_PUBLIC = "public"
#: What a role is told that may not create a saver's tables.
_SET_UP = (
    "start a saver once with their owner's rights, then give this role those that it needs (docs/LANGGRAPH.md, Rights)"
)
#: LangGraph's migration whose tables this release reads and writes.
MIGRATION = 9
#: The privileges that the statements need on each of LangGraph's tables.
PRIVILEGES = {
    "checkpoint_migrations": ("SELECT",),
    "checkpoints": ("SELECT", "INSERT", "UPDATE", "DELETE"),
    "checkpoint_blobs": ("SELECT", "INSERT", "DELETE"),
    "checkpoint_writes": ("SELECT", "INSERT", "UPDATE", "DELETE"),
}
#: Whether the database sorts ids of checkpoints, as LangGraph makes them, by time: Czech sorts digits behind letters,
#: Danish and Norwegian "aa" behind all, Welsh "dd" behind "df". Constants: where it does, the planner uses the index.
_IN_ORDER = "('9'::text < 'a'::text AND 'aa'::text < 'ab'::text AND 'dd'::text < 'de'::text)"
_LEDGERS = """
SELECT schemaname FROM pg_catalog.pg_tables
WHERE tablename = 'buffer_threads' AND (schemaname = %s OR starts_with(schemaname, %s || '_lane'))
"""
#: The schema of the tables that LangGraph's own saver uses on this connection.
_IN_SEARCH_PATH = """
SELECT nspname FROM pg_catalog.pg_class JOIN pg_catalog.pg_namespace ON pg_namespace.oid = relnamespace
WHERE relname = 'checkpoint_migrations' AND relkind IN ('r', 'p') AND pg_catalog.pg_table_is_visible(pg_class.oid)
"""
#: The key of the lock with which one process at a time creates the tables: any fixed number.
_LOCK = 0x6C61_6E67_6772_6170


class PostgresCheckpointStore:
    """A `CheckpointStore` on the tables of LangGraph's own saver for Postgres.

    `schema`: where they are. None: in `public`, unless LangGraph's own saver uses others on this connection.
    `buffer_schema`: where the buffer keeps its watermarks, in the same database: both change in one transaction.
    `history`: how much of a thread's history is written (docs/LANGGRAPH.md, Growth). `timeout_s` bounds every call.
    """

    def __init__(
        self,
        conninfo: str,
        *,
        schema: str | None = None,
        buffer_schema: str = BUFFER_SCHEMA,
        history: History = "all",
        pool_size: int = 16,
        timeout_s: float = 10.0,
    ) -> None:
        self.history = check_history(history)
        check_timeout(timeout_s, "PostgresCheckpointStore.timeout_s")
        self._chosen = schema is not None
        self.schema, self.buffer_schema = (
            check_schema(_PUBLIC if schema is None else schema),
            check_schema(buffer_schema),
        )
        #: The first lane's buffer_schema.
        self._first = buffer_schema
        self._conninfo = conninfo
        #: Whether a buffer has opened this store; the buffer also closes it.
        self._behind = False
        self.pool: Pool = new_pool(conninfo, size=pool_size, connect_timeout_s=min(5.0, timeout_s))
        self._sql = Statements(self.pool, _statements(self.schema, buffer_schema), timeout_s)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(schema={self.schema!r}, pool={self.pool!r})"

    def of_lane(self, log: LogConfig) -> PostgresCheckpointStore:
        """See `CheckpointStore.of_lane`. The watermarks of every lane but the first are in a schema of their own."""
        if not log.lane:
            return self
        lane = copy.copy(self)  # with the same pool
        lane.buffer_schema = check_schema(ledger_schema(self.buffer_schema, log))
        lane._sql = Statements(self.pool, _statements(self.schema, lane.buffer_schema), self._sql.timeout_s)
        return lane

    def behind(self, config: BufferConfig) -> tuple[PostgresLedger, Backing[Tail]]:
        if self._behind:
            raise ConfigError(f"this PostgresCheckpointStore is already in use or was closed: {ANOTHER}")
        ledger = PostgresLedger.configured(config, self._conninfo, self, self.buffer_schema, way_out=_SET_UP)
        return ledger, Backing(
            Kind(DOMAIN, f"{_KIND}{self.schema}"),
            self,
            open=self._open_behind,
            setup=self.setup,
            aclose=self.aclose,
        )

    async def open(self) -> None:
        """Open the pool. Returns at once: Postgres need not be up yet."""
        await self.pool.open(wait=False)

    async def _open_behind(self) -> None:
        self._behind = True
        await self.open()

    async def aclose(self) -> None:
        """Close the pool. Idempotent."""
        await self.pool.close()

    async def setup(self) -> None:
        """Create LangGraph's tables if there are none; otherwise check that they are of the version of this release.

        Runs none of LangGraph's migrations. Raises ConfigError for tables of another version, StoreMisconfigured when
        row level security hides rows, when the role may not create the tables, and when the tables are gone into which
        threads were flushed; ConfigError also when nobody chose a schema, and LangGraph's own saver would use tables in
        another one than `public`.
        """
        async with self._sql.lend() as connection, connection.transaction():
            if not self._chosen:
                await check_not_elsewhere(connection, self._first)
            if not await has_table(connection, self.schema, "checkpoint_migrations"):
                await connection.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
                if not await has_table(connection, self.schema, "checkpoint_migrations"):
                    await check_never_flushed(connection, self.schema, self._first)
                    await self._make_tables(connection)
            await check_rows_shown(connection, self.schema, PRIVILEGES)
            version = (await self._sql.on(connection, "version"))[0][0]
        check_migration(self.schema, version)

    async def _make_tables(self, connection: AsyncConnection[Any]) -> None:
        script = (_PACKAGE / "tables.sql").read_text(encoding="utf-8")
        try:
            await make_schema(connection, self.schema)
            await connection.execute(rendered(script, self.schema))
        except errors.InsufficientPrivilege as e:
            raise StoreMisconfigured(
                f"LangGraph's tables in schema {self.schema!r} are missing, and this role may not create them "
                f"({e.diag.message_primary}): {_SET_UP}"
            ) from e

    async def apply(self, connection: AsyncConnection[Any], batch: Sequence[LangGraphChange]) -> None:
        """See `CheckpointStore.apply`. At most eight statements in one round trip (a large batch: one per 16 MiB)."""
        folded = [
            Folded(change.thread_id, (operation for _, operation in change.operations))
            for change in sorted(batch, key=lambda change: change.thread_id)
        ]
        with arrays.unstorable():
            for each in folded:
                thin(each, self.history)
            async with connection.pipeline():
                for name, columns in parameters(folded):
                    await self._sql.send(connection, name, *columns)

    # --- reads ------------------------------------------------------------------------------------------------

    async def state(self, thread_id: str) -> Tail:
        """See `bufstore.buffer.domain.StateReader`."""
        ((*row, waits_to, there),) = await self._sql.read("state", thread_id)
        return stored_tail(watermark_of(row, waits_to), there=there)

    async def answers(self) -> None:
        """See `bufstore.buffer.domain.StateReader`."""
        await self._sql.ping("state", "bufstore-probe")

    async def latest(self, thread_id: str, ns: str, namespaces_max: int) -> Part:
        ((*row, namespaces, waits_to, there),) = await self._sql.read("latest", thread_id, ns, namespaces_max + 1)
        known = namespaces is not None and len(namespaces) <= namespaces_max
        return _part(ns, row, waits_to, there, frozenset(namespaces) if known else None)

    async def one(self, thread_id: str, ns: str, checkpoint_id: str) -> Part:
        ((*row, waits_to, there),) = await self._sql.read("one", thread_id, ns, checkpoint_id)
        return _part(ns, row, waits_to, there)

    async def ancestors(self, thread_id: str, ns: str, at: str, channels: Sequence[str], limit: int) -> Part:
        ((*row,),) = await self._sql.read("ancestors", thread_id, ns, at, arrays.texts(channels), limit)
        tables = Tables()
        tables.add(
            (
                CheckpointRow(ns, id_, parent, checkpoint.encode(), b"{}")
                for id_, parent, checkpoint in _rows(row[7:10])
            ),
            (BlobRow(ns, *blob) for blob in _rows(row[10:14])),
            (WriteRow(ns, *write) for write in _rows(row[14:21])),
        )
        return Part(watermark_of(row[:7]), tables)

    async def rows(self, thread_id: str, blobs: Sequence[BlobKey], writes_of: Sequence[CheckpointKey]) -> Part:
        ((*row,),) = await self._sql.read("rows", thread_id, *_texts(blobs, 3), *_texts(writes_of, 2))
        tables = Tables()
        tables.add((), (BlobRow(*blob) for blob in _rows(row[7:12])), (WriteRow(*w) for w in _rows(row[12:20])))
        return Part(watermark_of(row[:7]), tables)

    async def page(self, query: Query, after: Cursor | None, limit: int) -> list[tuple[str, Tables]]:
        async def of_one_moment(connection: AsyncConnection[Any]) -> list[tuple[str, Tables]]:
            async with connection.transaction():
                await connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
                return await self._page(connection, query, after, limit)

        return await self._sql.answered(of_one_moment)

    async def _page(
        self, connection: AsyncConnection[Any], query: Query, after: Cursor | None, limit: int
    ) -> list[tuple[str, Tables]]:
        wanted = query.metadata.decode() if query.metadata is not None else None
        where = (query.thread_id, query.ns, query.checkpoint_id, wanted, query.before)
        found = await self._sql.on(connection, "page", *where, *(after or (None, None, None)), limit)
        if not found:
            return []
        pages: dict[tuple[str, str, str], Tables] = {}
        names: dict[tuple[str, str, str], list[tuple[str, str, str]]] = {}
        keys = set()
        for thread_id, ns, id_, parent, checkpoint, metadata in found:
            tables = pages[thread_id, ns, id_] = Tables()
            row = CheckpointRow(ns, id_, parent, checkpoint.encode(), metadata.encode())
            tables.add([row])
            keys.add((thread_id, ns, id_))
            for of in {id_, parent if takes_sends(row) else id_}:
                names.setdefault((thread_id, ns, of), []).append((thread_id, ns, id_))
        blobs = await self._sql.on(connection, "blobs_of", *_texts(sorted(keys), 3))
        writes = await self._sql.on(connection, "writes_of", *_texts(sorted(names), 3))
        kept: dict[tuple[str, str, str, str], BlobRow] = {}
        for thread_id, *blob in blobs:
            kept[thread_id, *blob[:3]] = BlobRow(*blob)
        for (thread_id, _, _), tables in pages.items():
            tables.add((), [kept[thread_id, *key] for key in tables.known if (thread_id, *key) in kept])
        for thread_id, *write in writes:
            for place in names[thread_id, write[0], write[1]]:
                pages[place].add(writes=[WriteRow(*write)])
        return [(thread_id, tables) for (thread_id, _, _), tables in pages.items()]

    async def outlines(self, thread_id: str) -> list[Outline]:
        return [
            outline_of(
                CheckpointRow(ns, id_, parent, checkpoint.encode(), metadata.encode()), _Any(), parent_sends=sends
            )
            for ns, id_, parent, checkpoint, metadata, sends in await self._sql.read("outlines", thread_id)
        ]

    async def now(self) -> datetime:
        ((epoch_s,),) = await self._sql.read("now")
        return datetime.fromtimestamp(epoch_s, UTC)

    async def idle(self, before: str) -> list[str]:
        return [thread_id for (thread_id,) in await self._sql.read("idle", before)]

    async def of_runs(self, run_ids: Sequence[str]) -> list[tuple[str, str, str]]:
        return [(t, ns, id_) for t, ns, id_ in await self._sql.read("of_runs", arrays.texts(run_ids))]


def schema_of(kind: Kind) -> str | None:
    """Return the schema of the tables that a log of this kind is flushed into; None for any other log."""
    return kind.store.removeprefix(_KIND) if kind.domain == DOMAIN and kind.store.startswith(_KIND) else None


def check_migration(schema: str, version: int | None) -> None:
    """Raise ConfigError unless this release reads and writes tables of this migration. None: of no migration."""
    if version == MIGRATION:
        return
    found = f"LangGraph's tables in schema {schema!r} are at migration {version}, but this release of bufstore"
    if version is None or version < MIGRATION:
        raise ConfigError(f"{found} needs {MIGRATION}: call `setup()` of langgraph-checkpoint-postgres once")
    raise ConfigError(f"{found} supports only {MIGRATION}: upgrade bufstore")


async def check_not_elsewhere(connection: AsyncConnection[Any], buffer_schema: str) -> None:
    """Raise ConfigError if LangGraph's own saver finds its tables in another schema than the default one.

    It goes by the search path of the connection. Whoever only swaps the class expects the same tables, and would find
    all threads empty. A buffer that has flushed into the default schema goes on with that one.
    """
    found = await (await connection.execute(_IN_SEARCH_PATH)).fetchone()
    if found is None or found[0] == _PUBLIC or await _flushed(connection, buffer_schema, gone=True) is not None:
        return
    raise ConfigError(
        f"this connection's search path leads LangGraph's own saver to its tables in schema {found[0]!r}; give "
        f"schema={found[0]!r} to go on with those, or schema={_PUBLIC!r} if you mean the ones there"
    )


async def check_never_flushed(connection: AsyncConnection[Any], schema: str, buffer_schema: str) -> None:
    """Raise StoreMisconfigured if threads were flushed: then LangGraph's tables, which are not there, had rows.

    Nobody may create them anew: all of these threads would be read as if they had never been, and be written on.
    `buffer_schema`: the first lane's; those of the others are found.
    """
    ledger = await _flushed(connection, buffer_schema)
    if ledger is not None:
        raise StoreMisconfigured(
            f"LangGraph's tables are not in schema {schema!r}, although threads were flushed into them, as schema "
            f"{ledger!r} says: restore all schemas from one backup, or give the tables' schema its name back. To "
            "go on without what was flushed, call `setup()` of langgraph-checkpoint-postgres once"
        )


async def _flushed(connection: AsyncConnection[Any], buffer_schema: str, *, gone: bool = False) -> str | None:
    """Return the schema of a lane's ledger that says that threads were flushed; None: no lane's does.

    `gone`: whether threads count that were deleted since.
    """
    for (ledger,) in await (await connection.execute(_LEDGERS, [buffer_schema, buffer_schema])).fetchall():
        # Without parameters: with any, a % in the schema's name would need care.
        flushed = sql.SQL("SELECT FROM {}.buffer_threads WHERE flushed_seq > 0 AND ({} OR NOT gone) LIMIT 1")
        if (await connection.execute(flushed.format(sql.Identifier(ledger), gone))).rowcount:
            return str(ledger)
    return None


def _statements(schema: str, buffer_schema: str) -> dict[str, LiteralString]:
    buffer = sql.Identifier(buffer_schema).as_string()
    return {
        name: text.replace("{buffer}", buffer).replace("{in_order}", _IN_ORDER)
        for name, text in queries(_PACKAGE / "sql", schema).items()
    }


class _Any(frozenset[BlobKey]):
    """A set that has every blob: the statement has already looked which of them are there."""

    def __contains__(self, key: object) -> bool:
        return True


def _part(
    ns: str, row: Sequence[Any], waits_to: int | None, there: bool, namespaces: frozenset[str] | None = None
) -> Part:
    tables = Tables()
    id_, parent, checkpoint, metadata = row[7:11]
    tables.add(
        [CheckpointRow(ns, id_, parent, checkpoint.encode(), metadata.encode())] if id_ is not None else (),
        (BlobRow(ns, *blob) for blob in _rows(row[11:15])),
        (WriteRow(ns, *write) for write in _rows(row[15:22])),
    )
    state = stored_tail(watermark_of(row[:7], waits_to), there=there)
    return Part(state.watermark, tables, namespaces, state)


def _rows(columns: Sequence[Sequence[Any] | None]) -> Iterable[tuple[Any, ...]]:
    """Return the rows of columns that are arrays; a column is null when there is no row."""
    return zip(*(column or () for column in columns), strict=True)


def _texts(keys: Sequence[tuple[str, ...]], width: int) -> list[arrays.Array]:
    """Return the columns of keys that have this many parts each."""
    return [arrays.texts(key[i] for key in keys) for i in range(width)]
