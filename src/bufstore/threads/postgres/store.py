"""Threads, messages and runs in Postgres: a store of its own, and the target that the buffer flushes into."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, Self

from psycopg import AsyncConnection, sql
from psycopg.errors import UniqueViolation

from bufstore.buffer.domain import Backing
from bufstore.buffer.lanes import ledger_schema
from bufstore.config import BufferConfig, check_timeout
from bufstore.errors import (
    AlreadyExists,
    BufstoreError,
    ConfigError,
    IdempotencyConflict,
    OutcomeUnknown,
    TooLarge,
    VersionConflict,
)
from bufstore.postgres.connection import arrays
from bufstore.postgres.connection.errors import NoAnswer
from bufstore.postgres.connection.migrate import check_schema, has_table
from bufstore.postgres.connection.pool import ANOTHER, Pool, new_pool
from bufstore.postgres.connection.statements import Statements
from bufstore.postgres.ledger.ledger import PostgresLedger
from bufstore.threads.edited_store import EditedStore
from bufstore.threads.edits import WantedEdit
from bufstore.threads.lineage import LineageChange, NamedParents
from bufstore.threads.model import (
    Checkpoint,
    Run,
    RunStatus,
    Thread,
    ThreadChange,
    check_run,
    check_version,
    decode_message,
    decode_run,
    encode_messages,
    encode_run,
)
from bufstore.threads.postgres import columns
from bufstore.threads.postgres.copying import COPY_FROM, copied, copy
from bufstore.threads.postgres.edits import DirectEdits
from bufstore.threads.postgres.lists import ListedStore
from bufstore.threads.postgres.rows import thread_of, thread_state
from bufstore.threads.postgres.statements import ThreadStatements
from bufstore.threads.protocol import kind_of
from bufstore.threads.state import ThreadState
from bufstore.threads.state_readers import PROBE
from bufstore.types import Message, Receipt, check_id

#: Largest call that is written straight to Postgres: a parameter has to stay below 1 GB.
_CALL_BYTES = 512 << 20


class PostgresThreadStore(ListedStore, EditedStore):
    """A `ThreadRunStore` on a Postgres of version 15 or later.

    `conninfo` is a URL or key=value string; `timeout_s` bounds every call, waiting for a connection included.
    Give `pool` to share another store's (``other.pool``), which then opens and closes it. Works behind a pooler
    in transaction mode. Call `setup` once per release, `open` (or ``async with``) before use.

    Reads and writes raise StoreUnavailable when Postgres cannot be reached, StoreMisconfigured when it refuses
    (login, missing tables, read-only) and Closed.
    """

    #: See `WrappableStore`.
    store_kind = "bufstore.postgres"

    def __init__(
        self,
        conninfo: str = "",
        *,
        schema: str = "bufstore",
        pool_size: int = 16,
        timeout_s: float = 10.0,
        pool: Pool | None = None,
    ) -> None:
        check_timeout(timeout_s, "PostgresThreadStore.timeout_s")
        self.schema = check_schema(schema)
        self.pool = pool or new_pool(conninfo, size=pool_size, connect_timeout_s=min(5.0, timeout_s))
        self._owns_pool = pool is None
        #: Whether a buffer has opened this store; the buffer then closes it.
        self._behind = False
        self._sql: ThreadStatements = ThreadStatements(self.pool, schema, timeout_s)
        self._edits = DirectEdits(self._sql, schema, self.apply)
        self._parents = NamedParents(self.load_thread)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(schema={self.schema!r}, pool={self.pool!r})"

    async def open(self) -> None:
        """Open the pool. Returns at once: Postgres need not be up yet."""
        if self._owns_pool:
            await self.pool.open(wait=False)

    async def _open_behind(self) -> None:
        self._behind = True
        await self.open()

    async def aclose(self) -> None:
        """Close the pool (unless it is another store's). Idempotent."""
        if self._owns_pool:
            await self.pool.close()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def setup(self) -> None:
        """Create or update the tables. Safe to call again and by several processes at once.

        Raises ConfigError when a newer release has changed them so that this one cannot work with them.
        """
        await self._sql.setup()

    def behind(
        self, postgres: str | None, config: BufferConfig, timeout_s: float
    ) -> tuple[PostgresLedger, Backing[ThreadState]]:
        """What a buffer in front of this store works with: a ledger in the same schema, and what this store offers.

        The ledger of each lane but the first has a schema of its own (`bufstore.buffer.lanes.ledger_schema`).
        `postgres`: another way to the same database, for the ledger's connections.
        """
        if self._behind and self._owns_pool:
            raise ConfigError(f"this PostgresThreadStore is already in use or was closed: {ANOTHER}")
        dsn = postgres or str(self.pool.conninfo)
        schema = check_schema(ledger_schema(self.schema, config.log))
        reader = _SnapshotReader(self, schema)
        return PostgresLedger.configured(config, dsn, self, schema, timeout_s), Backing(
            kind_of(self),
            reader,
            open=self._open_behind,
            setup=self.setup,
            aclose=self.aclose,
            held=self.versions,
            versions=reader.counts,
            erase_set_aside=self._erase_set_aside,
        )

    async def _erase_set_aside(self, thread_ids: Sequence[str]) -> int:
        """See `bufstore.buffer.domain.Backing`: erases rows that a Spark sink has set aside in this store's schema."""
        if not await self._has_table("spark_quarantine"):
            return 0
        return len(await self._sql.read("erase_set_aside", arrays.texts(thread_ids)))

    async def _has_table(self, table: str) -> bool:
        return await self._sql.answered(lambda connection: has_table(connection, self.schema, table))

    # -- writes ------------------------------------------------------------------------------------------------

    async def checkpoint(
        self, thread_id: str, messages: Sequence[Message], run: Run, *, idempotency_key: str | None = None
    ) -> Receipt:
        """Make `messages` the thread's whole list and save `run`: see `ThreadRunStore.checkpoint`.

        One round trip; only messages that differ are written. Raises OutcomeUnknown when the connection was lost
        and a second try could not find out what became of the first.
        """
        call = _Call.of(thread_id, messages, run, idempotency_key)
        return await self._save(call, run, append=False, expected=None)

    async def checkpoint_append(
        self,
        thread_id: str,
        delta: Sequence[Message],
        run: Run,
        *,
        expected_version: int | None = None,
        idempotency_key: str | None = None,
    ) -> Receipt:
        """Append `delta` to the thread's messages and save `run`: see `ThreadRunStore.checkpoint_append`.

        One round trip. Raises OutcomeUnknown like `checkpoint`.
        """
        call = _Call.of(thread_id, delta, run, idempotency_key)
        check_version(expected_version)
        ids = [h for h in call.id_hashes if h is not None]
        if len(set(ids)) < len(ids):
            raise AlreadyExists(f"thread {thread_id!r}: two of the messages to append have the same id")
        return await self._save(call, run, append=True, expected=expected_version)

    async def _save(self, call: _Call, run: Run, *, append: bool, expected: int | None) -> Receipt:
        agreed = await self._parents.agreed(run)
        # If the caller gave no key, a random one makes the second try below exactly-once.
        key = call.key if call.key is not None else secrets.token_hex(8)
        entry_id = secrets.randbits(63)
        parameters = call.parameters(append=append, expected=expected, key=key, entry_id=entry_id)
        with contextlib.nullcontext() if agreed else self._parents.changing():
            row = await self._exactly_once(call.thread_id, key, parameters, None if agreed else run)
            outcome, saves, last_id, version = row
            if outcome not in ("stored", "repeated"):
                raise _refusal(outcome, call, expected, version)
        # If the second try finds what the first one has stored, that is no repetition.
        repeated = outcome == "repeated" and last_id != entry_id and call.key is not None
        return Receipt(call.thread_id, saves, last_id if repeated else entry_id, version, repeated)

    async def _exactly_once(
        self, thread_id: str, key: str, parameters: Sequence[Any], in_turn: Run | None
    ) -> list[Any]:
        """Run the checkpoint function. When no answer comes, run it once more with the same key.

        `in_turn`: the call's run if it changes the lineage, or cannot; see `DirectEdits.checkpoint`.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._sql.timeout_s
        unanswered = False
        while True:
            try:
                async with self._sql.lend(timeout_s=deadline - loop.time()) as connection:
                    if in_turn is not None:
                        return await self._edits.checkpoint(connection, parameters, in_turn)
                    ((*row,),) = await self._sql.on(connection, "checkpoint", *parameters)
            except NoAnswer as e:
                if unanswered or loop.time() >= deadline:
                    raise OutcomeUnknown(thread_id, key) from e
                unanswered = True
            except UniqueViolation:
                # Two new checkpoints at the same moment, on two threads, with one run id: ours came second.
                raise AlreadyExists(f"the run id belongs to a thread other than {thread_id!r}") from None
            except BufstoreError as e:
                # The second try is refused, but what the first one did is still not known.
                if unanswered:
                    raise OutcomeUnknown(thread_id, key) from e
                raise
            else:
                return row

    async def apply(self, connection: AsyncConnection[Any], batch: Sequence[ThreadChange]) -> None:
        """Write `batch` (at most one change per thread) on `connection`, in the caller's transaction.

        A fixed number of statements in one round trip, whatever the size (a large batch: one per 16 MiB); many new
        messages go as a COPY, which takes two more.
        psycopg's errors pass through; a run id of another thread is a UniqueViolation.
        """
        # One order for all writers: batches that lock rows in different orders deadlock. Code points and
        # COLLATE "C" agree on it.
        changes = sorted(batch, key=lambda change: change.thread_id)
        if not changes:
            return
        deleted = [change.thread_id for change in changes if change.deleted]
        changes = [change for change in changes if not change.gone]
        new = [change for change in changes if change.appends]
        if sum(len(change.messages) for change in new) < COPY_FROM:
            new = []
        with arrays.unstorable():
            runs = columns.run_columns(changes)
            async with connection.pipeline():
                no_copy = await self._sql.send(connection, "takes_no_copy", self.schema) if new else None
                if deleted:
                    await self._sql.send(connection, "lock_removals", arrays.texts(deleted))
                    await self._sql.send(connection, "apply_removals", arrays.texts(deleted))
                await self._sql.send(connection, "apply_threads", *columns.thread_columns(changes))
                # COPY has no ON CONFLICT: rows that somebody else put where it will write are deleted first.
                ends = arrays.ints(c.keep if new and c.appends else c.version for c in changes)
                await self._sql.send(connection, "apply_cut", arrays.texts(c.thread_id for c in changes), ends)
                for name, whole in (("apply_messages", False), ("apply_whole_messages", True)):
                    some = (c for c in changes if c.whole is whole and not (new and c.appends))
                    for messages in columns.message_columns(some):
                        await self._sql.send(connection, name, *messages)
                for records in runs:
                    await self._sql.send(connection, "apply_runs", *records)
            if no_copy is not None and (await no_copy.fetchone()) == (True,):
                for messages in columns.message_columns(new):
                    await self._sql.send(connection, "apply_messages", *messages)
            elif new:
                await copy(connection, self._sql.texts["copy_messages"], copied(new))

    # -- reads -------------------------------------------------------------------------------------------------

    async def load_checkpoint(self, thread_id: str) -> Checkpoint | None:
        """The thread, its messages and its latest run, all as of one moment; None if there is no such thread."""
        return (await self.load_state(thread_id)).checkpoint()

    async def versions(self, thread_ids: Sequence[str]) -> dict[str, int]:
        """How many messages each of these threads has; threads that do not exist are left out."""
        return dict(await self._sql.read("versions", arrays.texts(thread_ids)))

    async def load_thread(self, thread_id: str) -> Thread | None:
        """The thread without its messages."""
        rows = await self._sql.read("load_thread", check_id(thread_id, "thread_id"))
        return thread_of(thread_id, rows[0]) if rows else None

    async def load_messages(self, thread_id: str) -> list[Message] | None:
        """The thread's messages, oldest first; None if there is no such thread."""
        state = await self.load_state(thread_id)
        return None if state.thread is None else [decode_message(m) for m in state.messages]

    async def load_run(self, run_id: str) -> Run | None:
        """A run as it was last saved."""
        rows = await self._sql.read("load_run", check_id(run_id, "run_id"))
        return decode_run(rows[0][0]) if rows else None

    async def latest_run(self, thread_id: str) -> Run | None:
        """The run of the thread's newest checkpoint."""
        rows = await self._sql.read("latest_run", check_id(thread_id, "thread_id"))
        return decode_run(rows[0][0]) if rows else None

    async def load_thread_state(self, thread_id: str) -> Any:
        """See `ThreadReader.load_thread_state`."""
        rows = await self._sql.read("load_kept_state", check_id(thread_id, "thread_id"))
        return decode_message(rows[0][0]) if rows else None

    async def load_state(self, thread_id: str, *, with_watermark: bool = False) -> ThreadState:
        """The thread, encoded, as of one snapshot; an empty state when Postgres does not have it.

        `with_watermark`: read the buffer's row for the thread, too (its tables must be in the same schema).
        """
        rows = await self._sql.read("load_state", check_id(thread_id, "thread_id"), with_watermark)
        return thread_state(thread_id, rows)

    # -- edits -------------------------------------------------------------------------------------------------

    async def _edit(self, wanted: WantedEdit) -> Receipt:
        return await self._edits.edit(wanted)

    async def _change(self, wanted: LineageChange) -> Receipt:
        with self._parents.changing():
            return await self._edits.change(wanted)


class _SnapshotReader:
    """See `bufstore.buffer.domain.StateReader`: one statement, one snapshot."""

    def __init__(self, store: PostgresThreadStore, schema: str) -> None:
        """`schema`: the schema of the buffer's tables."""
        self._store, self._beside = store, schema == store.schema
        named, ledger = store._sql, sql.Identifier(schema).as_string()
        texts = {name: text.replace("{ledger}", ledger) for name, text in named.texts.items()}
        self._sql = Statements(named.pool, texts, named.timeout_s)

    async def state(self, thread_id: str) -> ThreadState:
        if self._beside:
            return await self._store.load_state(thread_id, with_watermark=True)
        return thread_state(thread_id, await self._read("load_state_of_lane", thread_id))

    async def counts(self, thread_ids: Sequence[str]) -> dict[str, tuple[int, int | None, int]]:
        """See `bufstore.buffer.domain.Versions`; empty when the store's schema has no table of messages."""
        if not await self._store._has_table("messages"):
            return {}
        return {t: (a, b, c) for t, a, b, c in await self._read("counts", arrays.texts(thread_ids))}

    async def _read(self, name: str, *parameters: Any) -> list[tuple[Any, ...]]:
        # On a connection as the store uses it: its functions name its schema.
        return await self._store._sql.answered(lambda connection: self._sql.on(connection, name, *parameters))

    async def answers(self) -> None:
        await self._store._sql.ping("load_run", PROBE)


class _Call(NamedTuple):
    """One checkpoint, checked and encoded: nothing of the caller's objects is left in it."""

    thread_id: str
    payloads: list[bytes]
    id_hashes: list[int | None]
    run_id: str
    record: bytes
    status: RunStatus
    parent_thread_id: str | None
    key: str | None

    @classmethod
    def of(cls, thread_id: str, messages: Sequence[Message], run: Run, key: str | None) -> _Call:
        check_id(thread_id, "thread_id")
        check_run(run, thread_id)
        if key is not None:
            check_id(key, "idempotency_key")
        payloads = encode_messages(messages)
        record = encode_run(run)
        size = sum(map(len, payloads)) + len(record)
        if size > _CALL_BYTES:
            raise TooLarge(size, _CALL_BYTES, "of one call that writes to Postgres")
        hashes = [columns.id_hash(p) for p in payloads]
        return cls(thread_id, payloads, hashes, run.run_id, record, run.status, run.parent_thread_id, key)

    def parameters(self, *, append: bool, expected: int | None, key: str, entry_id: int) -> tuple[Any, ...]:
        content = blake2b(b"append" if append else b"whole", digest_size=4)
        for part in (self.record, *self.payloads):
            content.update(len(part).to_bytes(8))
            content.update(part)
        return (
            self.thread_id,
            append,
            expected if expected is None or 0 <= expected < 1 << 31 else -1,
            arrays.blobs(self.payloads),
            arrays.longs(self.id_hashes),
            self.run_id,
            self.record,
            self.status.value,
            self.parent_thread_id,
            blake2b(key.encode(), digest_size=8).digest(),
            content.digest(),
            entry_id,
        )


def _refusal(outcome: str, call: _Call, expected: int | None, version: int) -> BufstoreError:
    match outcome:
        case "run taken":
            return AlreadyExists(f"run {call.run_id!r} belongs to a thread other than {call.thread_id!r}")
        case "message exists":
            return AlreadyExists(f"thread {call.thread_id!r} already has a message with the id of an appended one")
        case "version conflict":
            assert expected is not None
            return VersionConflict(call.thread_id, expected=expected, actual=version)
        case "other content":
            return IdempotencyConflict(f"thread {call.thread_id!r}: this key was used with different content")
    raise AssertionError(f"checkpoint_v1 returned {outcome!r}")
