"""The effect of a run on its thread's row, compared field by field in the three places that implement it.

`Thread.with_run` implements it for reads, ``checkpoint_v1`` for direct writes, and ``apply_threads`` with its columns
for flushes.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from msgspec.structs import fields, replace
from psycopg import sql

from bufstore.embedded import Servers
from bufstore.testing.applying import change
from bufstore.testing.basics import fresh, run_of
from bufstore.threads.model import NO_METADATA, Run, RunStatus, Thread, ThreadMetadata, encode_metadata
from bufstore.threads.postgres.store import PostgresThreadStore
from thorough import examples

PARENTS = ("row-parent-1", "row-parent-2")
#: Columns that count direct writes, or hold the time of a write.
OF_THE_WRITER = ["saves", "last_id", "ring", "created_at", "updated_at"]


class Step(NamedTuple):
    """A checkpoint. `flush`: apply all checkpoints since the last flush, as one change per thread."""

    thread: int
    messages: list[int]
    run: int
    status: RunStatus
    parent: str | None
    flush: bool


class Three:
    """Two threads that are written directly, applied by flushes, and followed by `Thread.with_run`."""

    def __init__(
        self, direct: PostgresThreadStore, applied: PostgresThreadStore, metadata: ThreadMetadata | None
    ) -> None:
        self.direct, self.applied = direct, applied
        self._metadata = metadata
        self.expected = [Thread(thread_id=fresh(), metadata=metadata or NO_METADATA) for _ in range(2)]
        self._messages: list[list[int]] = [[], []]
        self._pending: dict[int, list[Run]] = {}
        self._flushed: set[int] = set()

    async def take(self, step: Step) -> None:
        thread = self.expected[step.thread]
        run = run_of(
            thread.thread_id, f"{step.run}-{thread.thread_id}", status=step.status, parent_thread_id=step.parent
        )
        if thread.latest_run_id is None and self._metadata is not None:
            await self.direct.save_thread(thread.thread_id, self._metadata)
        await self.direct.checkpoint(thread.thread_id, step.messages, run)
        self.expected[step.thread] = replace(thread.with_run(run), version=len(step.messages))
        self._messages[step.thread] = step.messages
        self._pending.setdefault(step.thread, []).append(run)
        await self._compare(self.direct, step.thread)
        if step.flush:
            await self.flush()

    async def flush(self) -> None:
        batch = []
        for n, runs in self._pending.items():
            made = change(self.expected[n].thread_id, 0, self._messages[n], *runs, whole=True)
            if self._metadata is not None and n not in self._flushed:
                made = replace(made, metadata=encode_metadata(self._metadata))
            batch.append(made)
        async with self.applied.pool.lend(30) as connection, connection.transaction():
            await self.applied.apply(connection, batch)
        for n in self._pending:
            await self._compare(self.applied, n)
            assert await row(self.applied, self.expected[n]) == await row(self.direct, self.expected[n])
        self._flushed |= self._pending.keys()
        self._pending.clear()

    async def _compare(self, store: PostgresThreadStore, n: int) -> None:
        expected = self.expected[n]
        checkpoint = await store.load_checkpoint(expected.thread_id)
        assert checkpoint is not None
        for found in (await store.load_thread(expected.thread_id), checkpoint.thread):
            for field in fields(Thread):
                assert getattr(found, field.name) == getattr(expected, field.name), (store.schema, field.name)


async def row(store: PostgresThreadStore, thread: Thread) -> dict[str, Any]:
    """Return all columns of the thread's row except those of the writer."""
    query = sql.SQL("SELECT to_jsonb(t) - %s::text[] FROM {}.threads AS t WHERE thread_id = %s")
    async with store.pool.lend(30) as connection:
        cursor = await connection.execute(query.format(sql.Identifier(store.schema)), [OF_THE_WRITER, thread.thread_id])
        ((found,),) = await cursor.fetchall()
    assert isinstance(found, dict)
    return found


@contextlib.asynccontextmanager
async def opened(servers: Servers, schema: str) -> AsyncIterator[PostgresThreadStore]:
    async with PostgresThreadStore(servers.postgres.dsn, schema=schema) as store:
        await store.setup()
        for parent in PARENTS:
            await store.save_thread(parent)
        yield store


@pytest.fixture(scope="module")
async def stores(servers: Servers) -> AsyncIterator[tuple[PostgresThreadStore, PostgresThreadStore]]:
    async with opened(servers, fresh("direct")) as direct, opened(servers, fresh("applied")) as applied:
        yield direct, applied


steps = st.builds(
    Step,
    thread=st.integers(0, 1),
    messages=st.lists(st.integers(0, 3), max_size=2),
    run=st.integers(0, 2),
    status=st.sampled_from(RunStatus),
    parent=st.sampled_from((None, *PARENTS)),
    flush=st.booleans(),
)


@examples(50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(taken=st.lists(steps, min_size=1, max_size=10), titled=st.booleans())
async def test_a_run_does_the_same_to_its_threads_row_everywhere(
    taken: Sequence[Step], titled: bool, stores: tuple[PostgresThreadStore, PostgresThreadStore]
) -> None:
    three = Three(*stores, ThreadMetadata(title="t", resource_id="r") if titled else None)
    for step in taken:
        await three.take(step)
    await three.flush()


async def test_every_field_of_a_thread_is_among_those_compared(
    stores: tuple[PostgresThreadStore, PostgresThreadStore],
) -> None:
    """A field that no checkpoint sets would be equal everywhere. For a new field, add the step that sets it."""
    three = Three(*stores, ThreadMetadata(title="t", resource_id="r"))
    await three.take(Step(0, [1], 0, RunStatus.RUNNING, PARENTS[0], flush=True))
    for store in stores:
        found = await store.load_thread(three.expected[0].thread_id)
        for field in fields(Thread):
            assert getattr(found, field.name) != field.default, field.name
