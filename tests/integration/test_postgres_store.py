"""PostgresThreadStore on a real Postgres: the contract, and faults that only a database has."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from psycopg import sql
from psycopg.errors import InvalidBinaryRepresentation

from bufstore.buffer.chain import Watermark
from bufstore.embedded import PostgresServer
from bufstore.errors import (
    AlreadyExists,
    BufstoreError,
    Closed,
    ConfigError,
    IdempotencyConflict,
    LineageError,
    OutcomeUnknown,
    StoreMisconfigured,
    StoreUnavailable,
    VersionConflict,
)
from bufstore.postgres.connection import alarm, arrays
from bufstore.postgres.connection.errors import map_errors, mapped_error
from bufstore.postgres.connection.migrate import migrate
from bufstore.postgres.connection.pool import open_pool
from bufstore.testing import APPLY_CHECKS, CHECKS, Applier, Check
from bufstore.testing.applying import change
from bufstore.testing.basics import fresh, run_of
from bufstore.threads.coalesce import Fold
from bufstore.threads.lineage import Children, LineageChange
from bufstore.threads.memory_store import MemoryThreadStore
from bufstore.threads.model import (
    RunStatus,
    ThreadChange,
    ThreadMetadata,
    decode_message,
    decode_run,
    encode_messages,
)
from bufstore.threads.payload import Removal
from bufstore.threads.postgres import columns
from bufstore.threads.postgres.copying import COPY_FROM
from bufstore.threads.postgres.store import PostgresThreadStore
from bufstore.threads.queries import ThreadQuery
from bufstore.threads.state import ThreadState
from bufstore.types import Receipt
from fault_proxy.proxy import FaultProxy
from helpers import eventually
from thorough import examples
from transaction_pooler import TransactionPooler


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """A Postgres of this module's own, which tests kill, pause and restart."""
    data = Path(tempfile.gettempdir()) / f"bufstore-{uuid.uuid4().hex}"
    postgres = PostgresServer(data)
    postgres.temporary = True
    postgres.start()
    yield postgres
    postgres.stop()
    shutil.rmtree(data)


@contextlib.asynccontextmanager
async def ready(dsn: str, **options: Any) -> AsyncIterator[PostgresThreadStore]:
    async with PostgresThreadStore(dsn, **options) as store:
        await store.setup()
        yield store


@pytest.fixture(scope="module")
async def shared(server: PostgresServer) -> AsyncIterator[PostgresThreadStore]:
    async with ready(server.dsn) as store:
        yield store


@pytest.fixture(scope="module")
async def applied(server: PostgresServer) -> AsyncIterator[PostgresThreadStore]:
    async with ready(server.dsn, schema="applied") as store:
        yield store


async def apply_to(store: PostgresThreadStore, *batch: ThreadChange) -> None:
    async with store.pool.lend(60) as connection, connection.transaction():
        await store.apply(connection, batch)


def applier(store: PostgresThreadStore) -> Applier:
    return Applier(store, lambda batch: apply_to(store, *batch))


async def rows(store: PostgresThreadStore, query: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
    async with store.pool.lend(10) as connection:
        cursor = await connection.execute(
            sql.SQL(query).format(schema=sql.Identifier(store.schema)),
            parameters or None,
        )
        return await cursor.fetchall() if cursor.description else []


# -- the contract ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", CHECKS, ids=str)
async def test_direct_writes(check: Check, shared: PostgresThreadStore) -> None:
    await check(shared)


@pytest.mark.parametrize("check", APPLY_CHECKS, ids=str)
async def test_batches(check: Check, shared: PostgresThreadStore) -> None:
    await check(applier(shared))


@pytest.mark.long  # the same contract, through a pooler
@pytest.mark.parametrize("check", CHECKS + APPLY_CHECKS, ids=str)
async def test_behind_a_transaction_pooler(check: Check, server: PostgresServer) -> None:
    async with (
        TransactionPooler(server.dsn, servers=2) as pooler,
        ready(pooler.dsn, schema="pooled", pool_size=20) as store,
    ):
        await check(applier(store) if check in APPLY_CHECKS else store)
        assert pooler.prepared == []


async def test_applied_messages_have_ids(shared: PostgresThreadStore) -> None:
    thread_id = fresh()
    await apply_to(shared, change(thread_id, 0, [{"id": "a"}], run_of(thread_id)))
    with pytest.raises(AlreadyExists):
        await shared.checkpoint_append(thread_id, [{"id": "a"}], run_of(thread_id))


async def test_20_clients_share_2_server_connections(server: PostgresServer) -> None:
    async with TransactionPooler(server.dsn, servers=2) as pooler, contextlib.AsyncExitStack() as stack:
        stores = [
            await stack.enter_async_context(PostgresThreadStore(pooler.dsn, schema="pooled", pool_size=1))
            for _ in range(20)
        ]
        await asyncio.gather(*(store.setup() for store in stores))
        common = fresh()

        async def client(n: int, store: PostgresThreadStore) -> None:
            own = fresh(f"{n}")
            for i in range(5):
                await store.checkpoint(own, list(range(i + 1)), run_of(own))
                await store.checkpoint_append(common, [{"id": f"{n}-{i}"}], run_of(common))
                await apply_to(store, change(own, i + 1, [{"id": f"{own}-{i}"}], run_of(own)))
                assert await store.load_messages(own) == [*range(i + 1), {"id": f"{own}-{i}"}]

        await asyncio.gather(*(client(n, store) for n, store in enumerate(stores)))
        messages = await stores[0].load_messages(common)
        assert messages is not None
        assert len(messages) == 100
        assert pooler.prepared == []


async def test_a_deletion_that_is_flushed_takes_what_somebody_wrote_past_it(shared: PostgresThreadStore) -> None:
    """The thread's row was locked, and the rows of the lock's holder, not in the deletion's snapshot, once stayed."""
    thread_id = fresh()
    await shared.checkpoint(thread_id, [1], run_of(thread_id))
    fold = Fold(thread_id, 1)
    fold.add(Removal(), 1, self_contained=True)
    async with shared.pool.lend(10) as connection:
        async with connection.transaction():
            await shared.apply(connection, [change(thread_id, 1, [2, 3], run_of(thread_id, f"late-{thread_id}"))])
            deletion = asyncio.create_task(apply_to(shared, fold.change()))
            await eventually(lambda: _waits_for_a_lock(shared))
        await deletion
    assert await shared.load_thread(thread_id) is None
    assert await shared.load_run(f"late-{thread_id}") is None
    await shared.checkpoint(thread_id, [9], run_of(thread_id))
    assert await shared.load_messages(thread_id) == [9]


async def _waits_for_a_lock(store: PostgresThreadStore) -> bool:
    async with store.pool.lend(10) as connection:
        found = await connection.execute("SELECT FROM pg_locks WHERE NOT granted AND locktype = 'transactionid'")
        return bool(found.rowcount)


async def test_edits_beside_deletions_of_their_thread_make_it_anew(shared: PostgresThreadStore) -> None:
    for _ in range(30):
        thread_id = fresh()
        await shared.save_thread(thread_id)
        await asyncio.gather(
            shared.delete_thread(thread_id),
            shared.append_messages(thread_id, [1]),
            shared.save_thread(thread_id),
            shared.create_run(run_of(thread_id)),
        )


async def test_a_version_that_no_thread_has_is_a_conflict(shared: PostgresThreadStore) -> None:
    thread_id = fresh()
    await shared.checkpoint(thread_id, [1], run_of(thread_id))
    for version in (2, -1, 1 << 31, 1 << 70):
        with pytest.raises(VersionConflict) as raised:
            await shared.checkpoint_append(thread_id, [2], run_of(thread_id), expected_version=version)
        assert raised.value.expected == version


# -- one result, however it is written -------------------------------------------------------------------------

messages_ = st.lists(st.integers(0, 3), max_size=5)
operations = st.lists(
    st.tuples(
        st.sampled_from(("checkpoint", "append", "change")),
        st.integers(0, 2),  # thread
        st.integers(0, 5),  # messages kept, of a change
        messages_,
        st.integers(0, 1),  # run of the thread
        st.sampled_from(RunStatus),
        st.sampled_from((None, "parent-1", "parent-2")),
    ),
    max_size=12,
)


def fold(first: ThreadChange, then: ThreadChange) -> ThreadChange:
    """Return the two changes as one."""
    runs = {k: v for k, v in first.runs.items() if k not in then.runs} | dict(then.runs)
    whole, keep = then.whole, then.keep
    messages = then.messages
    if then.keep >= first.keep and not then.whole:
        whole, keep = first.whole, first.keep
        messages = [*first.messages[: then.keep - first.keep], *then.messages]
    return ThreadChange(
        thread_id=then.thread_id,
        keep=keep,
        messages=messages,
        whole=whole,
        runs=runs,
        saves=[*first.saves, *then.saves],
    )


@examples(50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=operations, flushes=st.lists(st.booleans(), min_size=12, max_size=12))
async def test_all_ways_to_write_agree(
    operations: list[tuple[str, int, int, list[int], int, RunStatus, str | None]],
    flushes: list[bool],
    shared: PostgresThreadStore,
    applied: PostgresThreadStore,
) -> None:
    threads = [fresh() for _ in range(3)]
    memory, memory_applied = MemoryThreadStore(), MemoryThreadStore()
    for store in (memory, shared):
        for parent in ("parent-1", "parent-2"):
            await store.save_thread(parent)
    pending: dict[str, ThreadChange] = {}
    for (kind, n, keep, messages, run_number, status, parent), flush in zip(operations, flushes, strict=False):
        thread_id = threads[n]
        run = run_of(thread_id, f"{run_number}-{thread_id}", status=status, parent_thread_id=parent)
        before = await memory.load_messages(thread_id) or []
        if kind == "append":
            for store in (memory, shared):
                await store.checkpoint_append(thread_id, messages, run)
            changed = change(thread_id, len(before), messages, run)
        else:
            whole = kind == "checkpoint"
            keep = 0 if whole else min(keep, len(before))
            for store in (memory, shared):
                await store.checkpoint(thread_id, before[:keep] + messages, run)
            changed = change(thread_id, keep, messages, run, whole=whole)
        await memory_applied.apply(None, [changed])
        earlier = pending.get(thread_id)
        pending[thread_id] = fold(earlier, changed) if earlier else changed
        if flush:
            await apply_to(applied, *pending.values())
            pending.clear()
    await apply_to(applied, *pending.values())
    for thread_id in threads:
        expected = await memory.load_checkpoint(thread_id)
        for store in (memory_applied, shared, applied):
            assert await store.load_checkpoint(thread_id) == expected
        for number in (0, 1):
            run_id = f"{number}-{thread_id}"
            for store in (memory_applied, shared, applied):
                assert await store.load_run(run_id) == await memory.load_run(run_id)


# -- what a call costs -----------------------------------------------------------------------------------------


async def test_every_call_is_one_round_trip(server: PostgresServer) -> None:
    async with (
        TransactionPooler(server.dsn, servers=1) as pooler,
        ready(pooler.dsn, schema="counted", pool_size=1) as store,
    ):
        thread_id = fresh()
        run = run_of(thread_id)
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: store.checkpoint(thread_id, [1], run),
            lambda: store.checkpoint(thread_id, list(range(1000)), run),
            lambda: store.checkpoint_append(thread_id, [{"id": "a"}], run, expected_version=1000),
            lambda: store.load_checkpoint(thread_id),
            lambda: store.load_thread(thread_id),
            lambda: store.load_run(run.run_id),
            lambda: store.latest_run(thread_id),
        ]
        for call in calls:
            before = pooler.round_trips
            await call()
            assert pooler.round_trips == before + 1


async def test_a_batch_is_one_round_trip(server: PostgresServer) -> None:
    async with (
        TransactionPooler(server.dsn, servers=1) as pooler,
        ready(pooler.dsn, schema="counted", pool_size=1) as store,
        store.pool.lend(10) as connection,
        connection.transaction(),
    ):
        batch = [change(fresh(), 0, [1, 2], whole=bool(n % 2)) for n in range(200)]
        await connection.execute("SELECT 1")  # opens the transaction, so that BEGIN is not counted
        before = pooler.round_trips
        await store.apply(connection, batch)
        assert pooler.round_trips == before + 1


async def stamps(store: PostgresThreadStore, thread_id: str) -> list[tuple[Any, ...]]:
    """Return the transaction that wrote each message, and the one that touched it last."""
    query = "SELECT xmin::text, xmax::text FROM {schema}.messages WHERE thread_id = %s ORDER BY seq"
    return await rows(store, query, [thread_id])


@pytest.mark.parametrize("how", ["checkpoint", "apply"])
async def test_only_messages_that_differ_are_written(how: str, shared: PostgresThreadStore) -> None:
    thread_id = fresh()
    run = run_of(thread_id)

    async def save(messages: list[Any]) -> None:
        if how == "checkpoint":
            await shared.checkpoint(thread_id, messages, run)
        else:
            await apply_to(shared, change(thread_id, 0, messages, run, whole=True))

    messages: list[Any] = list(range(50))
    await save(messages)
    first = await stamps(shared, thread_id)
    messages[10] = "ten"
    await save([*messages, "new"])
    second = await stamps(shared, thread_id)
    assert [n for n in range(50) if first[n] != second[n]] == [10]
    await save(messages[:20])
    assert await stamps(shared, thread_id) == second[:20]


async def test_statements_of_a_large_batch_are_split(
    shared: PostgresThreadStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrays, "STATEMENT_BYTES", 100)
    statements: list[int] = []
    chunks = columns.chunks

    def counted(*arguments: Any) -> Iterator[Any]:
        found = list(chunks(*arguments))
        statements.append(len(found))
        return iter(found)

    monkeypatch.setattr(columns, "chunks", counted)
    threads = [fresh() for _ in range(5)]
    await apply_to(shared, *(change(t, 0, ["x" * 90, "y" * 200, 1, 2], run_of(t)) for t in threads))
    for thread_id in threads:
        assert await shared.load_messages(thread_id) == ["x" * 90, "y" * 200, 1, 2]
        assert await shared.latest_run(thread_id) == run_of(thread_id)
    # The messages: two large ones and two small ones of each thread. The runs: more than one statement for all.
    assert max(statements) >= 10
    assert len([n for n in statements if n > 1]) >= 2


async def test_a_large_message_is_stored(shared: PostgresThreadStore) -> None:
    thread_id = fresh()
    messages = [random.Random(1).randbytes(n) for n in (7000, 9000, 20 << 20)]
    await shared.checkpoint(thread_id, messages, run_of(thread_id))
    assert await shared.load_messages(thread_id) == messages
    await apply_to(shared, change(thread_id, 1, messages, run_of(thread_id)))
    assert await shared.load_messages(thread_id) == [messages[0], *messages]


# -- many new messages are copied -------------------------------------------------------------------------------


def new_messages(n: int) -> list[Any]:
    """Messages of all kinds, with and without ids, one of them empty."""
    kinds: list[Any] = [{"id": f"é-{n}", "n": n}, {"role": "user"}, None, "", b"\0\xff", [n], {1: 2}, n]
    return [*kinds, *range(COPY_FROM // 8)]


async def stored(store: PostgresThreadStore, thread_id: str) -> list[tuple[Any, ...]]:
    return await rows(
        store, "SELECT seq, payload, id_hash FROM {schema}.messages WHERE thread_id = %s ORDER BY seq", [thread_id]
    )


async def test_a_copied_message_is_as_one_that_was_inserted(shared: PostgresThreadStore) -> None:
    names = [fresh(f"naïve {n}") for n in range(10)]
    one_by_one = [fresh() for _ in names]
    for thread_id in names[:5]:  # half of the threads have a message already
        await apply_to(shared, change(thread_id, 0, ["first"], run_of(thread_id)))
    batch = [change(t, int(n < 5), new_messages(n), run_of(t), appends=True) for n, t in enumerate(names)]
    await apply_to(shared, *batch)
    for n, (copied, inserted) in enumerate(zip(names, one_by_one, strict=True)):
        before = ["first"] * (n < 5)
        await apply_to(shared, change(inserted, 0, [*before, *new_messages(n)], run_of(inserted)))
        assert await stored(shared, copied) == await stored(shared, inserted)
        assert await shared.load_messages(copied) == [*before, *new_messages(n)]
        found = await shared.load_message(copied, f"é-{n}")
        assert found is not None
        assert found.message == {"id": f"é-{n}", "n": n}
        assert await shared.latest_run(copied) == run_of(copied)


async def test_messages_that_were_there_all_the_same_are_replaced(shared: PostgresThreadStore) -> None:
    names = [fresh() for _ in range(10)]
    await apply_to(shared, change(names[3], 0, ["a", "b", "c"], run_of(names[3])))
    await apply_to(shared, *(change(t, 0, new_messages(n), run_of(t), appends=True) for n, t in enumerate(names)))
    for n, thread_id in enumerate(names):
        assert await shared.load_messages(thread_id) == new_messages(n)


async def test_a_copy_that_cannot_be_made_leaves_nothing(shared: PostgresThreadStore) -> None:
    good, bad = fresh(), fresh()
    batch = [change(t, 0, new_messages(0), run_of(t), appends=True) for t in (good, bad)]
    batch[1] = msgspec.structs.replace(batch[1], messages=[*batch[1].messages, b"\xc1"])
    with pytest.raises(InvalidBinaryRepresentation):
        await apply_to(shared, *batch)
    assert await shared.load_messages(good) is None
    await apply_to(shared, batch[0])
    assert await shared.load_messages(good) == new_messages(0)


# -- concurrency -----------------------------------------------------------------------------------------------


async def test_overlapping_batches_do_not_deadlock(shared: PostgresThreadStore) -> None:
    threads = [fresh() for _ in range(30)]
    order = random.Random(7)

    async def writer(n: int) -> None:
        for i in range(10):
            some = order.sample(threads, 20)
            batch = [change(t, 0, [n, i], run_of(t), run_of(t, f"{n}-{t}"), whole=True) for t in some]
            await apply_to(shared, *batch)

    await asyncio.gather(*(writer(n) for n in range(6)))
    for thread_id in threads:
        messages = await shared.load_messages(thread_id)
        assert messages is not None
        assert len(messages) == 2


async def test_a_parent_that_is_deleted_while_a_run_names_it_is_checked_again(
    shared: PostgresThreadStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: later steps were accepted, and gave their thread a parent that was gone."""
    parent, child = fresh(), fresh()
    named = msgspec.structs.replace(run_of(child), parent_thread_id=parent)
    await shared.checkpoint(parent, [], run_of(parent))
    await shared.checkpoint(child, [1], named)
    change_of = shared._edits.change

    async def beside(wanted: LineageChange) -> Receipt:
        monkeypatch.undo()
        await shared.checkpoint(child, [1, 2], named)
        return await change_of(wanted)

    monkeypatch.setattr(shared._edits, "change", beside)
    await shared.delete_thread(parent, children=Children.DETACH)
    with pytest.raises(LineageError):
        await shared.checkpoint(child, [1, 2, 3], named)
    assert await shared.load_messages(child) == [1, 2]


async def test_a_refused_parent_makes_nobody_look_at_the_parents_of_others_again(
    shared: PostgresThreadStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: one refusal forgot the parents of all threads."""
    parent, child, other = fresh(), fresh(), fresh()
    for thread_id in (parent, other):
        await shared.checkpoint(thread_id, [], run_of(thread_id))
    named = msgspec.structs.replace(run_of(child), parent_thread_id=parent)
    await shared.checkpoint(child, [1], named)
    with pytest.raises(LineageError):
        await shared.checkpoint(other, [1], msgspec.structs.replace(run_of(other), parent_thread_id=fresh()))
    with pytest.raises(VersionConflict):
        run = msgspec.structs.replace(run_of(other), parent_thread_id=parent)
        await shared.checkpoint_append(other, [1], run, expected_version=7)
    with pytest.raises(LineageError):
        await shared.set_parent(parent, child)

    async def unasked(thread_id: str) -> None:
        raise AssertionError(f"nobody has to look at {thread_id}")

    monkeypatch.setattr(shared._parents, "_thread", unasked)
    await shared.checkpoint(child, [1, 2], named)


async def test_a_parent_that_there_is_none_of_is_refused_also_while_others_change_the_lineage_for_long(
    server: PostgresServer,
) -> None:
    """Regression: the checkpoint waited for its turn, and ended as if Postgres were away."""
    async with ready(server.dsn, schema="held", timeout_s=20) as store:
        hasty = PostgresThreadStore(pool=store.pool, schema="held", timeout_s=2)
        there, parent, gone = fresh(), fresh(), fresh()
        for thread_id in (there, parent, gone):
            await store.checkpoint(thread_id, [1], run_of(thread_id))
        repeated = msgspec.structs.replace(run_of(there, "repeated"), parent_thread_id=gone)
        await store.checkpoint(there, [1], repeated, idempotency_key="k")
        await store.delete_thread(gone, children=Children.DETACH)
        async with store.pool.lend(60) as connection, connection.transaction():
            await store._sql.on(connection, "lock_lineage", store.schema)
            for thread_id in (there, fresh()):
                named = msgspec.structs.replace(run_of(thread_id), parent_thread_id=fresh())
                before = time.monotonic()
                with pytest.raises(LineageError):
                    await store.checkpoint(thread_id, [2], named)
                assert time.monotonic() < before + 10, "half of what it waits for its turn"
                with pytest.raises(VersionConflict):
                    await store.checkpoint_append(thread_id, [2], named, expected_version=7)
            assert (await store.checkpoint(there, [1], repeated, idempotency_key="k")).repeated
            with pytest.raises(StoreUnavailable):
                await hasty.checkpoint(there, [2], msgspec.structs.replace(run_of(there), parent_thread_id=parent))
        thread = await store.load_thread(there)
        assert thread is not None
        assert (thread.parent_thread_id, await store.load_messages(there)) == (None, [1])


@pytest.mark.parametrize("append", [False, True])
async def test_a_repeat_is_recognized_though_its_parent_is_gone(append: bool, shared: PostgresThreadStore) -> None:
    """Regression: the repeat of a stored write was refused, as if nothing were stored."""
    parent, child = fresh(), fresh()
    await shared.checkpoint(parent, [], run_of(parent))
    save = shared.checkpoint_append if append else shared.checkpoint

    async def write(thread_id: str, messages: list[Any], key: str | None) -> Receipt:
        named = msgspec.structs.replace(run_of(thread_id), parent_thread_id=parent)
        return await save(thread_id, messages, named, idempotency_key=key)

    await write(child, [1], "key")
    await shared.delete_thread(parent, children=Children.DETACH)
    assert (await write(child, [1], "key")).repeated
    with pytest.raises(IdempotencyConflict):
        await write(child, [2], "key")
    new = fresh()
    for thread_id, key in [(child, "another key"), (child, None), (new, "key")]:
        with pytest.raises(LineageError):
            await write(thread_id, [2], key)
    assert await shared.load_messages(child) == [1]
    assert await shared.load_thread(new) is None


async def test_setup_by_many_processes_at_once(server: PostgresServer) -> None:
    schema = "together-" + uuid.uuid4().hex
    async with contextlib.AsyncExitStack() as stack:
        stores = [await stack.enter_async_context(PostgresThreadStore(server.dsn, schema=schema)) for _ in range(8)]
        await asyncio.gather(*(store.setup() for store in stores))
        applied = await rows(stores[0], "SELECT room, version FROM {schema}.bufstore_migrations ORDER BY version")
        assert applied == [("threads", n) for n in range(1, 5)]


async def test_a_cancelled_call_leaves_nothing_behind(shared: PostgresThreadStore) -> None:
    thread_id = fresh()
    await shared.checkpoint(thread_id, [1], run_of(thread_id))
    async with shared.pool.lend(10) as connection, connection.transaction():
        await connection.execute("SELECT FROM bufstore.threads WHERE thread_id = %s FOR UPDATE", [thread_id])
        call = asyncio.ensure_future(shared.checkpoint(thread_id, [2], run_of(thread_id)))
        waiting = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%checkpoint_v1%'"
        while not await rows(shared, waiting):
            pass
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await rows(shared, waiting) == []
    assert await shared.load_messages(thread_id) == [1]
    assert await rows(shared, "SELECT 1 FROM pg_stat_activity WHERE state LIKE 'idle in transaction%'") == []
    stats = shared.pool.get_stats()
    assert stats["pool_available"] == stats["pool_size"]


async def test_a_statement_out_of_time_is_cancelled(
    shared: PostgresThreadStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alarm, "_GRACE_S", 5.0)  # Postgres may stand still when it is to cancel
    thread_id = fresh()
    await shared.checkpoint(thread_id, [1], run_of(thread_id))
    hasty = PostgresThreadStore(pool=shared.pool, timeout_s=2)
    async with shared.pool.lend(10) as connection, connection.transaction():
        await connection.execute("SELECT FROM bufstore.threads WHERE thread_id = %s FOR UPDATE", [thread_id])
        # The server confirms the cancellation, so it is known that nothing was stored.
        with pytest.raises(StoreUnavailable, match=r"longer than 2 s.*was cancelled"):
            await hasty.checkpoint(thread_id, [2], run_of(thread_id))
    assert await shared.load_messages(thread_id) == [1]


async def test_a_statement_out_of_time_is_cancelled_in_a_server_far_away(
    shared: PostgresThreadStore, server: PostgresServer
) -> None:
    """Regression: the cancel request was given up, and the statement waited on for its lock; each retry left another.

    With TLS, a request takes so long in half the distance.
    """
    port, thread_id = server.port, fresh()
    await shared.checkpoint(thread_id, [1], run_of(thread_id))
    async with FaultProxy("127.0.0.1", port) as proxy:
        proxy.to_server.delay_s = proxy.to_client.delay_s = 0.15
        dsn = server.dsn.replace(f":{port}", f":{proxy.port}")
        async with PostgresThreadStore(dsn, pool_size=1, timeout_s=20) as far:
            assert await far.load_messages(thread_id) == [1]
            hasty = PostgresThreadStore(pool=far.pool, timeout_s=2)
            async with shared.pool.lend(20) as connection, connection.transaction():
                await connection.execute("SELECT FROM bufstore.threads WHERE thread_id = %s FOR UPDATE", [thread_id])
                with pytest.raises(StoreUnavailable, match=r"longer than 2 s.*was cancelled"):
                    await hasty.checkpoint(thread_id, [2], run_of(thread_id))
                waiting = "SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%checkpoint_v1%'"
                assert await rows(shared, waiting) == []
    assert await shared.load_messages(thread_id) == [1]


# -- when Postgres is away -------------------------------------------------------------------------------------


async def test_connections_that_died_in_the_pool_are_not_noticed(server: PostgresServer) -> None:
    async with ready(server.dsn) as store:
        thread_id = fresh()
        run = run_of(thread_id)
        await asyncio.gather(*(store.checkpoint_append(thread_id, [n], run) for n in range(16)))
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        # One after the other, or a call's second try could meet the next dead connection.
        for n in range(16):
            await store.checkpoint_append(thread_id, [n], run)
        thread = await store.load_thread(thread_id)
        assert thread is not None
        assert thread.version == 32


@pytest.mark.alone
async def test_a_store_opens_while_postgres_is_down(server: PostgresServer) -> None:
    await asyncio.to_thread(server.kill)
    try:
        async with PostgresThreadStore(server.dsn, timeout_s=1) as store:
            for _ in range(2):
                begin = time.monotonic()
                with pytest.raises(StoreUnavailable, match="refused"):
                    await store.load_checkpoint("t")
                assert time.monotonic() - begin < 8
            with pytest.raises(StoreUnavailable):
                await store.checkpoint("t", [], run_of("t"))
            patient = PostgresThreadStore(server.dsn, timeout_s=30)
            async with patient:
                call = asyncio.ensure_future(patient.setup())
                await asyncio.to_thread(server.start)
                await call
    finally:
        await asyncio.to_thread(server.start)


async def test_a_lost_reply_is_found_out(server: PostgresServer) -> None:
    async with (
        TransactionPooler(server.dsn) as pooler,
        ready(pooler.dsn, schema="lossy", pool_size=2) as store,
    ):
        thread_id = fresh()
        run = run_of(thread_id)
        for key in (None, "k"):
            pooler.replies_to_lose = 1
            receipt = await store.checkpoint_append(thread_id, [key], run, idempotency_key=key)
            assert not receipt.repeated
        assert await store.load_messages(thread_id) == [None, "k"]
        pooler.replies_to_lose = 1
        assert await store.load_messages(thread_id) == [None, "k"]

        pooler.replies_to_lose = 2
        with pytest.raises(OutcomeUnknown) as unknown:
            await store.checkpoint_append(thread_id, [3], run)
        again = await store.checkpoint_append(thread_id, [3], run, idempotency_key=unknown.value.token)
        assert again.repeated
        assert await store.load_messages(thread_id) == [None, "k", 3]


@pytest.mark.alone
async def test_calls_end_in_time_when_postgres_hangs(server: PostgresServer) -> None:
    async with ready(server.dsn, timeout_s=3) as store:
        thread_id = fresh()
        await store.checkpoint(thread_id, [1], run_of(thread_id))
        server.pause()
        try:
            begin = time.monotonic()
            with pytest.raises(OutcomeUnknown):
                await store.checkpoint(thread_id, [2], run_of(thread_id))
            with pytest.raises(StoreUnavailable):
                await store.load_thread(thread_id)
            assert time.monotonic() - begin < 12
        finally:
            server.resume()
        async with ready(server.dsn) as patient:
            assert await patient.load_messages(thread_id) in ([1], [2])


# -- configuration, errors, secrets ----------------------------------------------------------------------------


@pytest.mark.parametrize("schema", ['We"ird', "UPPER lower", "%s {schema} $1", "a'b;--", "é" * 31, "$$"])
async def test_any_schema_name(schema: str, server: PostgresServer) -> None:
    async with ready(server.dsn, schema=schema) as store:
        await store.setup()
        thread_id = fresh()
        await store.checkpoint(thread_id, [1], run_of(thread_id))
        await apply_to(store, change(thread_id, 1, [2], run_of(thread_id)))
        checkpoint = await store.load_checkpoint(thread_id)
        assert checkpoint is not None
        assert checkpoint.messages == [1, 2]


@pytest.mark.parametrize("schema", ["", "x" * 64, "pg_own", "nul\0", "$body$"])
def test_names_that_cannot_be_a_schema(schema: str) -> None:
    with pytest.raises(ConfigError):
        PostgresThreadStore("", schema=schema)


async def test_tables_of_a_newer_release_are_refused(server: PostgresServer) -> None:
    async with ready(server.dsn, schema="newer") as store:
        await rows(store, "INSERT INTO {schema}.bufstore_migrations (room, version) VALUES ('threads', 99)")
        with pytest.raises(ConfigError, match=r"version 99.*up to 4"):
            await store.setup()


async def test_tables_of_the_first_release_are_upgraded(server: PostgresServer) -> None:
    """The tables contain rows of that release's checkpoints (its function still exists) and of its flushes."""
    schema = f"upgraded-{uuid.uuid4().hex}"
    thread_id = fresh()
    async with PostgresThreadStore(server.dsn, schema=schema) as store:
        async with store.pool.lend(10) as connection:
            await migrate(connection, schema, FirstRelease(), "threads")
        await store.checkpoint(thread_id, [{"id": "old"}], run_of(thread_id))
        with pytest.raises(StoreMisconfigured):
            await store.query_threads()
        await store.setup()
        found = await store.load_checkpoint(thread_id)
        assert found is not None
        assert (found.messages, found.state, found.thread.metadata) == ([{"id": "old"}], None, ThreadMetadata())
        await store.checkpoint_append(thread_id, [{"id": "new"}], run_of(thread_id), expected_version=1)
        await store.update_metadata(thread_id, ThreadMetadata(resource_id="r"))
        (thread,) = (await store.query_threads(ThreadQuery(resource_id="r"))).threads
        assert (thread.thread_id, thread.version) == (thread_id, 2)
        assert await store.load_message(thread_id, "old") is not None


@pytest.mark.parametrize("ends", [True, False])
async def test_a_migration_that_meets_a_long_query_holds_nobody_else_up(
    server: PostgresServer, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    monkeypatch.setattr("bufstore.postgres.connection.migrate._LOCK_S", 0.3, raising=False)
    monkeypatch.setattr("bufstore.postgres.connection.migrate._LOCKS_S", 30.0 if ends else 1.0, raising=False)
    schema = f"locked-{uuid.uuid4().hex}"
    async with PostgresThreadStore(server.dsn, schema=schema) as store:
        async with store.pool.lend(10) as connection:
            await migrate(connection, schema, FirstRelease(), "threads")
        async with store.pool.lend(60) as connection, connection.transaction():
            await connection.execute(f'SELECT FROM "{schema}".threads')
            setup = asyncio.create_task(store.setup())
            waits = (
                "SELECT l.pid FROM pg_locks AS l JOIN pg_class AS c ON c.oid = l.relation"
                f" JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE n.nspname = '{schema}' AND NOT l.granted"
            )
            while not setup.done() and not await rows(store, waits):
                pass
            # This query waits behind the migration, which cannot get its lock, but not as long as the long query takes.
            await rows(store, "SELECT count(*) FROM {schema}.threads")
            if not ends:
                with pytest.raises(StoreUnavailable, match="pg_stat_activity"):
                    await setup
                assert await rows(store, "SELECT max(version) FROM {schema}.bufstore_migrations") == [(1,)]
        if ends:
            await setup
            await store.query_threads()


class FirstRelease:
    """The first release's folder of SQL files, with the methods that migrations use."""

    def iterdir(self) -> Iterator[Any]:
        return iter([files("bufstore.threads.postgres") / "sql" / "0001_threads.sql"])


LISTS = [
    ("query_threads", ("r", None, False, None, None, None, None, 51), "threads_by_resource"),
    ("query_threads", (None, "p", False, None, None, None, None, 51), "threads_by_parent"),
    ("query_threads", (None, None, False, None, None, 10**15, "x", 51), "threads_by_last_change"),
    ("query_threads", (None, None, False, "t500", "t501", None, None, 51), "threads_pkey"),
    ("query_runs", ("t7", None, None, None, None, None, 51), "runs_by_thread"),
    ("query_runs", (None, "waiting", None, None, None, None, 51), "runs_by_status"),
    ("query_runs", (None, None, None, None, 10**15, "x", 51), "runs_by_creation"),
    ("messages_oldest_first", ("t1", 500, 900, 51), "messages_pkey"),
    ("messages_newest_first", ("t1", 500, 900, 51), "messages_pkey"),
    ("messages_by_id", ("t1", 17), "messages_pkey"),
]


@pytest.fixture(scope="module")
async def many_rows(server: PostgresServer) -> AsyncIterator[PostgresThreadStore]:
    async with ready(server.dsn, schema="many") as store:
        for statement in (
            "INSERT INTO {schema}.threads (thread_id, resource_id, parent_thread_id, updated_at)"
            " SELECT 't' || n, 'r' || n % 500, 'p' || n % 500, timestamptz 'epoch' + n * interval '1 day'"
            " FROM generate_series(1, 20000) AS n",
            "INSERT INTO {schema}.runs (run_id, thread_id, record, status, created_at)"
            " SELECT 'r' || n, 't' || n % 5000, '', CASE WHEN n % 500 = 0 THEN 'waiting' ELSE 'done' END,"
            " timestamptz 'epoch' + n * interval '1 day' FROM generate_series(1, 20000) AS n",
            "INSERT INTO {schema}.messages SELECT 't' || t, n, 'payload', n"
            " FROM generate_series(1, 20) AS t, generate_series(0, 999) AS n",
            "ANALYZE {schema}.threads",
            "ANALYZE {schema}.runs",
            "ANALYZE {schema}.messages",
        ):
            await rows(store, statement)
        yield store


@pytest.mark.parametrize(("name", "parameters", "index"), LISTS, ids=lambda value: value if type(value) is str else "")
async def test_lists_are_served_by_an_index(
    many_rows: PostgresThreadStore, name: str, parameters: tuple[Any, ...], index: str
) -> None:
    async with many_rows.pool.lend(10) as connection:
        cursor = arrays.ArrayCursor(connection)
        await cursor.execute("EXPLAIN " + many_rows._sql.texts[name], parameters)
        plan = "\n".join(row[0] for row in await cursor.fetchall())
    assert index in plan
    assert "Seq Scan" not in plan


async def test_a_role_without_ddl_rights_can_start(server: PostgresServer) -> None:
    async with ready(server.dsn, schema="granted") as store:
        await rows(store, "DROP ROLE IF EXISTS app")
        await rows(store, "CREATE ROLE app LOGIN PASSWORD 'pass-word'")
        await rows(store, "GRANT USAGE ON SCHEMA {schema} TO app")
        await rows(store, "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO app")
        dsn = psycopg.conninfo.make_conninfo(server.dsn, user="app", password="pass-word")
        async with ready(dsn, schema="granted") as limited:
            thread_id = fresh()
            await limited.checkpoint(thread_id, [1], run_of(thread_id))
            assert await store.load_messages(thread_id) == [1]


async def test_what_an_operator_must_mend_is_said_so(server: PostgresServer) -> None:
    async with PostgresThreadStore(server.dsn, schema="never set up") as store:
        with pytest.raises(StoreMisconfigured, match="3F000"):
            await store.checkpoint("t", [], run_of("t"))
    wrong = psycopg.conninfo.make_conninfo(server.dsn, password="not-the-word")
    missing = psycopg.conninfo.make_conninfo(server.dsn, dbname="nowhere")
    for dsn in (wrong, missing):
        async with PostgresThreadStore(dsn) as store:
            with pytest.raises(StoreMisconfigured) as refused:
                await store.load_checkpoint("t")
            assert "not-the-word" not in f"{refused.value!r} {store!r} {store.pool!r}"
    read_only = psycopg.conninfo.make_conninfo(server.dsn, options="-c default_transaction_read_only=on")
    async with PostgresThreadStore(read_only) as store:
        with pytest.raises(StoreMisconfigured, match="25006"):
            await store.checkpoint("t", [], run_of("t"))


async def test_a_store_that_is_not_open(server: PostgresServer) -> None:
    store = PostgresThreadStore(server.dsn)
    with pytest.raises(Closed):
        await store.load_thread("t")
    async with store:
        await store.load_thread("t")
    await store.aclose()
    with pytest.raises(Closed):
        await store.load_thread("t")


async def test_a_shared_pool_stays_open(server: PostgresServer) -> None:
    async with ready(server.dsn) as store:
        async with PostgresThreadStore(pool=store.pool) as second:
            assert await second.load_thread("t") is None
        assert await store.load_thread("t") is None
    pool = await open_pool(server.dsn, size=1)
    async with pool.lend(5) as connection:
        assert connection.autocommit
    await pool.close()


def test_a_connection_string_never_shows() -> None:
    with pytest.raises(ConfigError) as error:
        PostgresThreadStore("host=db password=very-secret oops")
    assert "very-secret" not in repr(error.value)
    assert error.value.__cause__ is None
    store = PostgresThreadStore("postgresql://me:very-secret@db/x")
    assert "very-secret" not in f"{store!r}{store.pool!r}"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (psycopg.errors.AdminShutdown(), StoreUnavailable),
        (psycopg.errors.DiskFull(), StoreUnavailable),
        (psycopg.errors.TooManyConnections(), StoreUnavailable),
        (psycopg.errors.DeadlockDetected(), StoreUnavailable),
        (psycopg.errors.IoError(), StoreUnavailable),
        (psycopg.OperationalError(), StoreUnavailable),
        (psycopg.DatabaseError(), StoreUnavailable),  # a connection that was lost within a pipeline
        (TimeoutError(), StoreUnavailable),
        (ConnectionResetError(), StoreUnavailable),
        (psycopg.errors.InvalidPassword(), StoreMisconfigured),
        (psycopg.errors.UndefinedTable(), StoreMisconfigured),
        (psycopg.errors.InvalidCatalogName(), StoreMisconfigured),
        (psycopg.errors.ReadOnlySqlTransaction(), StoreMisconfigured),
        (psycopg.errors.DataCorrupted(), StoreMisconfigured),
        (psycopg.errors.IndexCorrupted(), StoreMisconfigured),
        (psycopg.errors.UniqueViolation(), None),
        (psycopg.errors.CharacterNotInRepertoire(), None),
        (psycopg.ProgrammingError(), None),
    ],
)
def test_errors_are_mapped(error: psycopg.Error | OSError, expected: type[BufstoreError] | None) -> None:
    """Regression: callers got psycopg's own errors when Postgres' disk failed or its data was damaged."""
    mapped = mapped_error(error)
    assert mapped is None if expected is None else isinstance(mapped, expected)
    with pytest.raises(expected or type(error)) as raised, map_errors():
        raise error
    assert raised.value.__cause__ is (error if expected else None)


# -- rows for the buffer ---------------------------------------------------------------------------------------


async def test_encoded_rows(shared: PostgresThreadStore) -> None:
    thread_id = fresh()
    assert await shared.load_state(thread_id) == ThreadState(watermark=Watermark())
    await shared.checkpoint(thread_id, [1, {"id": "a"}], run_of(thread_id))
    loaded = await shared.load_state(thread_id)
    assert [decode_message(m) for m in loaded.messages] == [1, {"id": "a"}]
    assert loaded.messages == encode_messages([1, {"id": "a"}])
    assert loaded.watermark == Watermark(version=2)
    assert loaded.latest_run is not None
    assert await shared.load_run(f"run-of-{thread_id}") == decode_run(loaded.latest_run)
    with pytest.raises(AttributeError):
        loaded.messages = []  # type: ignore[misc]


async def test_rows_with_the_watermark(server: PostgresServer) -> None:
    async with ready(server.dsn, schema="buffered") as store:
        await rows(
            store,
            'CREATE TABLE IF NOT EXISTS {schema}.buffer_threads (thread_id text COLLATE "C" PRIMARY KEY, '
            "flushed_seq bigint, applied_id bigint, version bigint, ring bytea, broken_since bigint, sources bytea)",
        )
        await rows(store, 'CREATE TABLE {schema}.buffer_waiting (thread_id text COLLATE "C", seq bigint)')
        known, only_thread, only_watermark, waits = fresh(), fresh(), fresh(), fresh()
        for thread_id in (known, only_thread):
            await store.checkpoint(thread_id, [1, 2], run_of(thread_id))
        for thread_id in (known, only_watermark):
            row = [thread_id, 7, 8, 2, b"ring", None, b"sources"]
            await rows(store, "INSERT INTO {schema}.buffer_threads VALUES (%s, %s, %s, %s, %s, %s, %s)", row)
        both = await store.load_state(known, with_watermark=True)
        assert both.watermark == Watermark(7, 8, 2, b"ring", None, producers=b"sources")
        assert len(both.messages) == 2
        thread = await store.load_state(only_thread, with_watermark=True)
        assert thread.watermark == Watermark(version=2)
        left = await store.load_state(only_watermark, with_watermark=True)
        assert (left.thread, left.messages, left.latest_run) == (None, [], None)
        assert left.watermark.gone
        for thread_id, seq in ((known, 9), (known, 11), (waits, 10)):
            await rows(store, "INSERT INTO {schema}.buffer_waiting VALUES (%s, %s)", [thread_id, seq])
        both = await store.load_state(known, with_watermark=True)
        assert both.watermark == Watermark(7, 8, 2, b"ring", None, producers=b"sources", waits_to=11)
        new = await store.load_state(waits, with_watermark=True)
        assert (new.thread, new.watermark) == (None, Watermark(waits_to=10))
        nothing = ThreadState(watermark=Watermark())
        assert await store.load_state(fresh(), with_watermark=True) == nothing
        assert await store.load_state(only_watermark) == nothing


async def test_a_kept_plan_of_a_read_uses_the_indexes(server: PostgresServer) -> None:
    """The session's plans were made while the tables were small, and are still used when they have grown."""
    async with ready(server.dsn, schema="kept") as store, store.pool.lend(30) as connection:
        cursor = arrays.ArrayCursor(connection)
        await cursor.execute("INSERT INTO \"kept\".threads (thread_id) VALUES ('t0')")
        await cursor.execute('ANALYZE "kept".threads')
        read = store._sql.texts["load_state"]
        for _ in range(10):
            await cursor.execute(read, ("t0", False))
        await cursor.execute(
            "INSERT INTO \"kept\".threads (thread_id) SELECT 'u' || n FROM generate_series(1, 5000) AS n"
        )
        scans = "SELECT pg_stat_get_xact_numscans('\"kept\".threads'::regclass)"
        async with connection.transaction():
            for _ in range(10):
                await cursor.execute(read, ("t0", False))
            assert len(await cursor.fetchall()) == 1
            await cursor.execute(scans)
            assert await cursor.fetchall() == [(0,)]


_PARTITIONED = """
ALTER TABLE {schema}.messages RENAME TO before;
CREATE TABLE {schema}.messages (LIKE {schema}.before, PRIMARY KEY (thread_id, seq)) PARTITION BY HASH (thread_id);
CREATE TABLE {schema}.messages_0 PARTITION OF {schema}.messages FOR VALUES WITH (MODULUS 2, REMAINDER 0);
CREATE TABLE {schema}.messages_1 PARTITION OF {schema}.messages FOR VALUES WITH (MODULUS 2, REMAINDER 1);
"""
_INHERITED = "CREATE TABLE {schema}.more () INHERITS ({schema}.messages)"


@pytest.mark.parametrize("shape", [_PARTITIONED, _INHERITED], ids=["partitioned", "inherited"])
async def test_a_thread_that_is_shortened_takes_nothing_from_others(server: PostgresServer, shape: str) -> None:
    """A ctid identifies a row only within one table, and `messages` may consist of several."""
    async with ready(server.dsn, schema=fresh("shape")) as store:
        for statement in shape.strip().split(";"):
            await rows(store, statement)
        threads = [fresh() for _ in range(20)]
        await apply_to(store, *(change(t, 0, [1, 2, 3], run_of(t)) for t in threads))
        if shape is _INHERITED:
            move = "WITH m AS (DELETE FROM ONLY {schema}.messages WHERE thread_id = ANY (%s) RETURNING *) "
            await rows(store, move + "INSERT INTO {schema}.more SELECT * FROM m", [threads[10:]])
        await apply_to(store, change(threads[0], 0, [9], run_of(threads[0])))
        assert await store.load_messages(threads[0]) == [9]
        for t in threads[1:]:
            assert await store.load_messages(t) == [1, 2, 3]


async def test_messages_are_cut_in_one_pass_also_where_threads_are_short(server: PostgresServer) -> None:
    """With statistics of a row or two per thread, the planner once compared each row with the whole array."""
    async with ready(server.dsn, schema=fresh("short")) as store:
        insert = "INSERT INTO {schema}.messages (thread_id, seq, payload) SELECT 't' || n, 0, '' "
        await rows(store, insert + "FROM generate_series(1, 50000) AS n")
        await rows(store, "ANALYZE {schema}.messages")
        async with store.pool.lend(10) as connection:
            cursor = arrays.ArrayCursor(connection)
            cut: Any = "EXPLAIN (COSTS OFF) " + store._sql.texts["apply_cut"]
            await cursor.execute(cut, (arrays.texts(["t1"]), arrays.ints([0])))
            plan = "\n".join(line for (line,) in await cursor.fetchall())
        assert "Tid Scan on messages" in plan
