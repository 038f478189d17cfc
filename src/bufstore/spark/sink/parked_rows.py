"""The way back for rows that were set aside (`bad_rows="quarantine"`): list, correct, replay or discard them. No Spark.

A replay writes a row's checkpoint, once, behind whatever its thread holds by then. Each row gets a number among all
replays before it is written (docs/adr/0014), and is removed after it is written. So if a replay dies in between, the
next replay of its thread, which knows the number, finishes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import msgspec

from bufstore.buffer import producers
from bufstore.errors import InvalidRecord, LogFull, NotFound, Rejected
from bufstore.postgres.connection import arrays
from bufstore.postgres.connection.migrate import queries
from bufstore.postgres.connection.pool import new_pool
from bufstore.postgres.connection.statements import Statements
from bufstore.spark.sink.checkpoint_rows import COLUMNS, CheckpointRow, row_of_json, wanted_of
from bufstore.spark.sink.spark_ledger import FOLDER, shown_thread
from bufstore.threads.buffered import BufferedThreadStore
from bufstore.threads.edits import WantedEdit
from bufstore.threads.lineage import LineageChange
from bufstore.types import ProducerSequence

_TIMEOUT_S = 60.0
#: The name of the producer of all replays.
PRODUCER = "bufstore spark quarantine"


class ParkedRow(msgspec.Struct, frozen=True):
    """A row that was set aside."""

    id: int
    app_id: str
    batch_id: int
    thread_id: str
    #: The row as JSON.
    row: str
    cause: str
    parked_at: datetime


class RowReplay(msgspec.Struct, frozen=True):
    """What became of a row."""

    id: int
    thread_id: str
    #: Why the row stays in quarantine; None: it is written.
    refused: str | None = None


class ParkedRows(Statements):
    """The rows that sinks set aside. Raises StoreUnavailable when Postgres does not answer."""

    def __init__(self, conninfo: str, schema: str) -> None:
        super().__init__(new_pool(conninfo, size=2), queries(FOLDER, schema), _TIMEOUT_S)
        self._schema = schema

    async def __aenter__(self) -> ParkedRows:
        await self.pool.open(wait=False)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.pool.close()

    async def there(self) -> bool:
        """Return whether a sink has made its tables here."""
        return bool((await self.run("tables", self._schema))[0][0])

    async def count(self) -> int:
        return int((await self.run("count"))[0][0])

    async def page(
        self, *, thread_id: str | None = None, app_id: str | None = None, after: int = 0, limit: int = 100
    ) -> list[ParkedRow]:
        """Return the next rows behind id `after`, oldest first."""
        return [ParkedRow(*found) for found in await self.run("page", after, thread_id, app_id, limit)]

    async def threads_of(self, ids: Sequence[int]) -> list[str]:
        """Return the threads of these rows."""
        return [thread_id for (thread_id,) in await self.run("threads_of", arrays.longs(ids))]

    async def threads(self, after: str) -> list[str]:
        """Return a page of the threads of which rows are set aside, those behind thread `after`."""
        return [thread_id for (thread_id,) in await self.run("next_threads", after)]

    async def discard(self, ids: Sequence[int]) -> int:
        """Forget rows. Returns how many there were."""
        return len(await self.run("discard", arrays.longs(ids)))

    async def correct(self, id_: int, row: str) -> None:
        """Put another row (JSON) in the place of this one.

        Raises InvalidRecord when the JSON is no checkpoint; NotFound when there is no such row, or when a replay of it
        has begun and so may have written it.
        """
        found = row_of_json(row)
        unknown = found.keys() - COLUMNS.keys()
        if unknown:
            raise InvalidRecord(f"{min(unknown)} is not a column of a checkpoint: {', '.join(COLUMNS)}")
        wanted_of(found)
        if not await self.run("correct", id_, row, shown_thread(found["thread_id"])):
            raise NotFound(f"no row {id_} waits in spark_quarantine (or a replay of it has begun: replay it first)")

    async def replay(self, store: BufferedThreadStore, thread_id: str, ids: Sequence[int] | None) -> list[RowReplay]:
        """Write rows of a thread (`ids`, or all), and those whose replay had begun before. Each is written once.

        A refused row stays, with its new cause. Raises the errors of `BufferedThreadStore.checkpoint` that are not the
        row's fault.
        """
        async with self.lend() as connection, connection.transaction():
            await self.on(connection, "lock_replays", self._schema, thread_id)
            wanted = arrays.longs(ids) if ids is not None else None
            highest = await _highest(store, thread_id)
            await self.on(connection, "number", thread_id, wanted, self._schema, highest)
        done: list[RowReplay] = []
        while (one := await self._replay_one(store, thread_id)) is not None:
            done.append(one)
        return done

    async def _replay_one(self, store: BufferedThreadStore, thread_id: str) -> RowReplay | None:
        """Write the thread's first row that has a number; None: there is none.

        A refusal must be durable before a higher number is written: after that, the refused row's number, which was
        never written, would be taken for a written one.
        """
        async with self.lend() as connection, connection.transaction():
            await self.on(connection, "lock_replays", self._schema, thread_id)
            found = await self.on(connection, "numbered", thread_id)
            if not found:
                return None
            ((id_, row, number),) = found
            try:
                wanted = wanted_of(row_of_json(row))
                repeated = await _write(store, wanted, ProducerSequence(PRODUCER, number))
                if repeated and await _highest(store, wanted.thread_id) > number:
                    # Postgres has failed over, or is a copy: it lost whether this one was written or refused.
                    raise Rejected(
                        "a later row of the thread was written, and this one may have been, too: look whether the "
                        "thread has it, then discard it or replay it"
                    )
            except LogFull:
                raise
            except Rejected as e:
                await self.on(connection, "refused", id_, str(e).replace("\0", ""))
                return RowReplay(id_, thread_id, str(e))
            await self.on(connection, "discard", arrays.longs([id_]))
            return RowReplay(id_, thread_id)


async def _write(
    store: BufferedThreadStore, wanted: CheckpointRow | WantedEdit | LineageChange, number: ProducerSequence
) -> bool:
    """Write what a row asks for. Returns whether the thread has its number or a higher one already."""
    if isinstance(wanted, WantedEdit):
        return (await store.bulk.edit(wanted, number)).repeated
    if isinstance(wanted, LineageChange):
        return bool(await store.bulk.delete(wanted, number))  # a thread that is not there is as it should be
    write = store.checkpoint if wanted.whole else store.checkpoint_append
    return (await write(wanted.thread_id, wanted.messages, wanted.run, producer=number)).repeated


async def _highest(store: BufferedThreadStore, thread_id: str) -> int:
    """Return the highest number that a replay has written to the thread; 0: none has, or no thread has this id."""
    if not thread_id:
        return 0
    state, _ = await store.lanes.of(thread_id).reads.joined(thread_id, proven=True)
    return producers.highest(state.watermark.producers, PRODUCER)
