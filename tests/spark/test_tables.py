"""Threads, runs and messages as tables, without Spark, compared with the store's own answers for random histories."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from bufstore import BufferedThreadStore, ConfigError, NotFound, Run, RunStatus, StoreUnavailable, ThreadMetadata
from bufstore.buffer.entry import bytes_of
from bufstore.buffer.lanes import lane_logs, lane_of, ledger_schema
from bufstore.buffer.places import group_of
from bufstore.embedded import Servers
from bufstore.nats.ranges import LogReader, LogState
from bufstore.postgres.connection.migrate import newest
from bufstore.spark import DataLoss, PositionPassed, hold_position
from bufstore.spark.sink.bufstore_format import BufstoreFormat
from bufstore.spark.tables import moment, table_scan, tail
from bufstore.spark.tables.moment import Moment
from bufstore.spark.tables.shares import Share
from bufstore.spark.tables.tail_pieces import TailPieces
from bufstore.threads import edits
from conftest import Deployment
from helpers import eventually, fresh, query, run_of, said
from hostile import publish_entry
from integration.test_upgrades import FOLDERS, upgrade
from spark.jobs import purge, settings_of, where
from thorough import seldom


@pytest.fixture
def deployment(request: pytest.FixtureRequest, servers: Servers) -> Deployment:
    """A deployment of this test only; a test's parameter says how many lanes it has."""
    return Deployment(servers, lanes=getattr(request, "param", 1), max_bytes=64 << 20)


def options(deployment: Deployment, table: str, **more: Any) -> dict[str, str]:
    settings = settings_of(deployment)
    found = {
        "natsUrl": settings["nats"],
        "postgresUrl": settings["postgres"],
        "schema": settings["schema"],
        "stream": settings["stream"],
        "table": table,
        "numPartitions": 3,
    } | more
    return {name: str(value) for name, value in found.items()}


def rows_of(reader: Any) -> list[dict[str, Any]]:
    return [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]


async def read(deployment: Deployment, table: str, **more: Any) -> list[dict[str, Any]]:
    source = BufstoreFormat(options(deployment, table, **more))
    reader = source.reader(source.schema())
    return await asyncio.to_thread(rows_of, reader)


class History:
    """A random history of some threads."""

    def __init__(self, seed: int, threads: int = 8) -> None:
        self.chance = random.Random(seed)
        self.threads = [fresh() for _ in range(threads)]
        self.runs: set[str] = set()
        self._n = 0

    async def go_on(self, store: BufferedThreadStore, steps: int) -> None:
        for _ in range(steps):
            await self.step(store, self.chance.choice(self.threads))

    async def step(self, store: BufferedThreadStore, thread_id: str) -> None:
        self._n += 1
        n, chance = self._n, self.chance
        status = chance.choice(list(RunStatus))
        agent = chance.choice(["", "ada", "bob"])
        run = run_of(thread_id, chance.randrange(3), agent_id=agent, status=status, steps=n)
        new = [said(n * 100 + i) for i in range(chance.randrange(1, 4))]
        try:
            match chance.randrange(10):
                case 0 | 1 | 2 | 3:
                    await store.checkpoint_append(thread_id, new, run)
                    self.runs.add(run.run_id)
                case 4 | 5:
                    there = await store.load_messages(thread_id) or []
                    await store.checkpoint(thread_id, there[: chance.randrange(len(there) + 1)] + new, run)
                    self.runs.add(run.run_id)
                case 6:
                    await store.update_metadata(thread_id, ThreadMetadata(title=f"{n}", custom={"n": n}))
                case 7:
                    await store.save_thread_state(thread_id, {"at": n})
                case 8:
                    there = await store.load_messages(thread_id) or []
                    if there:
                        await store.delete_messages(thread_id, [chance.choice(there)["id"]])
                case 9:
                    await store.bulk.edit(edits.delete_thread(thread_id), None)  # needs no flush
        except NotFound:
            pass


async def check(deployment: Deployment, store: BufferedThreadStore, history: History, **more: Any) -> None:
    """Check that the tables agree with the store."""
    threads = {row["thread_id"]: row for row in await read(deployment, "threads", **more)}
    runs = {row["run_id"]: row for row in await read(deployment, "runs", **more)}
    messages: dict[str, list[dict[str, Any]]] = {}
    for row in await read(deployment, "messages", **more):
        messages.setdefault(row["thread_id"], []).append(row["message"])
    for thread_id in history.threads:
        found = await store.load_checkpoint(thread_id, quarantined="known")
        row = threads.pop(thread_id, None)
        said = sorted(messages.pop(thread_id, []), key=lambda m: m["number"])
        assert (row is None) == (found is None)
        if found is None or row is None:
            assert not said
            continue
        assert [json.loads(m["json"]) for m in said] == found.messages
        assert [m["number"] for m in said] == list(range(len(found.messages)))
        thread, run = found.thread, found.latest_run
        assert {name: row[name] for name in ("version", "latest_run_id", "active_run_id", "open_run_id")} == {
            "version": thread.version,
            "latest_run_id": thread.latest_run_id,
            "active_run_id": thread.active_run_id,
            "open_run_id": thread.open_run_id,
        }
        assert (row["parent_thread_id"], row["title"]) == (thread.parent_thread_id, thread.metadata.title)
        assert json.loads(row["custom"]) == thread.metadata.custom
        assert (json.loads(row["state"]) if row["state"] is not None else None) == found.state
        assert row["agent_id"] == (run.agent_id if run is not None else None)
        assert row["changed_at"] is not None
        assert row["position"] < row["as_of"]
    assert not threads
    assert not messages
    for run_id in history.runs | runs.keys():
        known = await store.load_run(run_id, quarantined="known")
        shown = runs.pop(run_id, None)
        assert (json.loads(shown["json"]) if shown is not None else None) == (
            json.loads(json.dumps(_plain(known))) if known is not None else None
        )


def _plain(run: Run) -> Any:
    return msgspec.to_builtins(run)


@pytest.mark.parametrize("seed", [0, *seldom(1, 2, 3)])
@pytest.mark.parametrize("deployment", [2, *seldom(1)], indirect=True)
async def test_the_tables_say_what_the_store_says(
    deployment: Deployment, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that are flushed, partly flushed, only in a log, removed or recreated: each as a read shows it."""
    history = History(seed)
    for steps in (30, 20):
        async with deployment.store() as store:
            await history.go_on(store, steps)
            await store.force_flush_all()
            await check(deployment, store, history)
        async with deployment.store(flusher=False) as store:
            history.threads += [fresh(), fresh()]
            await history.go_on(store, steps)
            await check(deployment, store, history)
            with monkeypatch.context() as patch:  # nothing is handed over, and each thread is a piece of its own
                patch.setattr(tail, "_HANDED_BYTES", 0)
                patch.setattr(tail, "_PIECE_BYTES", 100)
                await check(deployment, store, history, numPartitions=1)


async def test_threads_in_quarantine_are_shown_as_far_as_they_are_known(deployment: Deployment) -> None:
    history = History(0, threads=0)
    broken, whole, late = history.threads = [fresh(), fresh(), fresh()]
    async with deployment.store() as store:
        for n in range(3):
            for t in history.threads:
                await store.checkpoint_append(t, [said(n)], run_of(t))
        await publish_entry(store, broken, b"NATS/1.0\r\nBufstore-Entry: 1.x.y\r\n\r\n", b"poison")
        await store.force_flush_all()
        await check(deployment, store, history)
    async with deployment.store(flusher=False) as store:
        await publish_entry(store, late, b"NATS/1.0\r\nBufstore-Entry: 1.x.y\r\n\r\n", b"poison")
        await check(deployment, store, history)
        found = {row["thread_id"]: row["quarantined_since"] for row in await read(deployment, "threads")}
        assert found[whole] is None
        assert found[broken]
        assert found[late] > found[broken]
        await store.buffer.ledger.parked.discard([found[broken]])
    deployment.verified = False


async def test_wide_messages_come_as_they_are(deployment: Deployment) -> None:
    """Messages larger than a message of the log and than a batch of rows: flushed, and in parts in the log."""
    history = History(0, threads=0)
    first, second = history.threads = [fresh(), fresh()]
    async with deployment.store() as store:
        await store.checkpoint(first, [said(n, 3 << 20) for n in range(3)], run_of(first))
        await store.force_flush_all()
    async with deployment.store(flusher=False) as store:
        await store.checkpoint_append(first, [said(3, 3 << 20)], run_of(first))
        await store.checkpoint(second, [said(0, 3 << 20), said(1)], run_of(second))
        await check(deployment, store, history)


@pytest.mark.parametrize("deployment", [1, *seldom(2)], indirect=True)
async def test_what_waits_in_postgres_is_shown(deployment: Deployment) -> None:
    """A thread's row is locked, so its entries wait in Postgres, and the cursor has passed them."""
    history = History(0, threads=0)
    last = lane_logs(deployment.log)[-1]
    held, free = history.threads = [next(t for t in iter(fresh, "") if lane_of(t, last) == last.lane) for _ in range(2)]
    async with deployment.store() as store:
        await store.checkpoint(held, [said(0)], run_of(held))
        await store.force_flush_all()
        inner = deployment.inner()
        async with inner, inner.pool.lend(60) as connection, connection.transaction():
            schema = ledger_schema(deployment.name, last)
            await connection.execute(f'SELECT FROM "{schema}".buffer_threads WHERE thread_id = %s FOR UPDATE', [held])
            for n in range(1, 4):
                await store.checkpoint_append(held, [said(n)], run_of(held, n))
                await store.checkpoint_append(free, [said(n)], run_of(free, n))
            await eventually(lambda: waits(store, held))
            await check(deployment, store, history)
        await store.force_flush_all()
        await check(deployment, store, history)


async def waits(store: BufferedThreadStore, thread_id: str) -> int:
    return (await store.lanes.of(thread_id).ledger.watermark(thread_id)).waits_to


@pytest.mark.parametrize("deployment", [2, *seldom(1)], indirect=True)
async def test_a_held_position_shows_one_moment_while_everything_goes_on(deployment: Deployment) -> None:
    """Without a held position, entries flushed behind it are refused, because Postgres has no earlier state."""
    history = History(5)
    async with deployment.store() as store:
        await history.go_on(store, 20)
        await store.force_flush_all()
    async with deployment.store(flusher=False) as store:
        await history.go_on(store, 10)
        with hold_position(where(deployment)) as held:
            asked = {name: held.options[name] for name in ("endingPosition", "postgresSnapshot")}
            before = {table: await everything(deployment, table, **asked) for table in TABLES}
            assert before == {
                table: await everything(deployment, table, endingPosition=held.options["endingPosition"])
                for table in TABLES
            }
            async with deployment.store() as other:
                for thread_id in history.threads:
                    await history.step(other, thread_id)
                await other.checkpoint_append(history.threads[0], [said(9)], run_of(history.threads[0]))
                await other.force_flush_all()
                await check(deployment, other, history)
            assert before == {table: await everything(deployment, table, **asked) for table in TABLES}
            for row in map(json.loads, before["threads"]):
                assert row["as_of"] == held.positions[lane_of(row["thread_id"], deployment.log)]
            with pytest.raises(PositionPassed, match="is flushed up to"):
                await read(deployment, "threads", endingPosition=held.options["endingPosition"])
        with pytest.raises(Exception, match="the position is no longer held"):
            await read(deployment, "threads", **asked)
        with pytest.raises(Exception, match="the log ends before"):
            too_far = ",".join(str(position << 1) for position in held.positions)
            await read(deployment, "threads", endingPosition=too_far)


@pytest.mark.parametrize("all_of_it", [True, False])
async def test_a_position_that_is_held_longer_than_the_log_keeps_its_tail_is_a_loss(
    deployment: Deployment, all_of_it: bool
) -> None:
    """Entries that Postgres did not have then have left the log: no thread is shown without them."""
    deployment.verified = False
    await half_flushed(deployment)
    async with deployment.store(flusher=False) as store:
        middle = group_of(await store.buffer.log.end(5.0))
        await store.checkpoint_append("t-0", [said(2)], run_of("t-0"))
    with hold_position(where(deployment)) as held:
        asked = {name: held.options[name] for name in ("endingPosition", "postgresSnapshot")}
        assert len(await read(deployment, "messages", **asked)) == 25
        async with deployment.store() as store:
            await store.force_flush_all()
        await purge(deployment, group_of(held.positions[0]) if all_of_it else middle)
        for table in TABLES:
            with pytest.raises(DataLoss):
                await read(deployment, table, **asked)


async def test_a_postgres_from_before_its_first_flush_is_a_loss_where_the_log_is_purged(
    deployment: Deployment,
) -> None:
    """Regression: the tables lacked all threads of which the log had been purged, and nobody was told."""
    deployment.verified = False
    await half_flushed(deployment)
    found = {table: await everything(deployment, table) for table in TABLES}
    async with deployment.store() as store:
        await store.force_flush_all()
        last = group_of(await store.buffer.log.end(5.0))
    # What a backup has that was made when the store was new.
    schema = deployment.name
    made_anew = [f"DELETE FROM {schema}.{table}" for table in ("messages", "runs", "threads", "buffer_threads")]
    made_anew.append(f"UPDATE {schema}.buffer_partitions SET cursor_seq = 0, cursor_id = 0")
    async with await psycopg.AsyncConnection.connect(deployment.servers.postgres.dsn, autocommit=True) as connection:
        for statement in made_anew:
            await connection.execute(statement)
    for table in TABLES:
        assert len(await everything(deployment, table)) == len(found[table]), "the log still has everything"
    await purge(deployment, last)
    for table in TABLES:
        with pytest.raises(DataLoss, match="nothing of it was flushed"):
            await read(deployment, table)


async def test_planning_reads_the_tail_once_and_tasks_what_was_written_since(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that are flushed, written or deleted after planning are shown as the tasks find them."""
    await half_flushed(deployment)
    sequences: list[int] = []
    read_range = LogReader.read

    async def counted(self: LogReader, *given: Any, **more: Any) -> Any:
        async for some in read_range(self, *given, **more):
            sequences.extend(one.message.seq for one in some)
            yield some

    monkeypatch.setattr(LogReader, "read", counted)
    readers = {}
    for table in TABLES:
        source = BufstoreFormat(options(deployment, table))
        readers[table] = source.reader(source.schema())
    planned = {table: await asyncio.to_thread(reader.partitions) for table, reader in readers.items()}
    assert sequences
    sequences.clear()

    async def rows(table: str) -> list[dict[str, Any]]:
        found = [b for part in planned[table] for b in await asyncio.to_thread(list, readers[table].read(part))]
        return [row for batch in found for row in batch.to_pylist()]

    assert len(await rows("threads")) == 12
    assert not sequences, "nothing was written since"
    async with deployment.store() as store:
        await store.force_flush_all()
        await store.checkpoint_append("t-9", [said(2)], run_of("t-9", 1, agent_id="eve"))
        await store.bulk.edit(edits.delete_thread("t-10"), None)
        await store.checkpoint("t-12", [said(0), said(1)], run_of("t-12"))
    first = max(row["position"] for row in await rows("threads") if row["thread_id"] in ("t-9", "t-12"))
    assert min(sequences) > group_of(first) - 3, "only what is new"
    for table, expected in (("threads", 12), ("runs", 13), ("messages", 25)):
        fresh_read = await everything(deployment, table)
        assert len(fresh_read) == expected
        assert sorted(json.dumps(row, default=str, sort_keys=True) for row in await rows(table)) == fresh_read


async def test_a_tail_that_is_too_large_for_the_driver_is_read_once_by_each_task(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    await half_flushed(deployment)
    found = {table: await everything(deployment, table) for table in TABLES}
    ranges: list[tuple[int, int]] = []
    pieces: list[int] = []
    read_range, divided = LogReader.read, TailPieces.__init__

    def counted(self: LogReader, start: int, end: int, *given: Any, **more: Any) -> Any:
        ranges.append((start, end))
        return read_range(self, start, end, *given, **more)

    def noted(self: TailPieces, share: Share, number: int, bytes_max: int) -> None:
        pieces.append(number)
        divided(self, share, number, bytes_max)

    monkeypatch.setattr(LogReader, "read", counted)
    monkeypatch.setattr(TailPieces, "__init__", noted)
    monkeypatch.setattr(tail, "_PIECE_BYTES", 100)
    for limit in (0, 500):  # before the tail is read, and while it is
        monkeypatch.setattr(tail, "_HANDED_BYTES", limit)
        if limit:  # messages are larger than their average
            monkeypatch.setattr(LogState, "bytes_between", lambda *_: 499)
        source = BufstoreFormat(options(deployment, "threads"))
        parts = await asyncio.to_thread(source.reader(source.schema()).partitions)
        assert [part.value.handed for part in parts] == [{}] * 3
        for table in TABLES:
            ranges.clear()
            assert await everything(deployment, table) == found[table]
            assert len(ranges) - 3 == (limit > 0), "each of three tasks, and planning until it is too much"
            assert len(set(ranges)) == 1
        assert min(pieces) > 1


async def test_a_tail_of_large_messages_in_a_log_of_small_ones_is_read_in_pieces(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: pieces were as large as messages of the log are on average, so a task had all of such a tail."""
    async with deployment.store(retain_after_flush_s=600.0) as store:
        for n in range(600):  # in all partitions
            thread_id = f"small-{n % 50}"
            await store.checkpoint_append(thread_id, [n], run_of(thread_id))
        await store.force_flush_all()
    async with deployment.store(flusher=False) as store:
        for n in range(8):
            await store.checkpoint(f"large-{n}", [said(0, 20_000)], run_of(f"large-{n}"))
    monkeypatch.setattr(tail, "_HANDED_BYTES", 0)
    monkeypatch.setattr(tail, "_PIECE_BYTES", 50_000)
    sizes: list[int] = []
    tail_of = tail.tail_of

    async def noted(*given: Any) -> AsyncGenerator[Any]:
        async for piece, found in tail_of(*given):
            sizes.append(sum(bytes_of(late.item) for some in found.values() for late in some))
            yield piece, found

    monkeypatch.setattr(table_scan, "tail_of", noted)
    assert len(await read(deployment, "threads", numPartitions=1)) == 58
    assert sum(sizes) > 8 * 20_000
    assert max(sizes) <= 50_000


async def test_a_position_is_held_where_idle_transactions_are_ended(deployment: Deployment) -> None:
    await half_flushed(deployment)
    impatient = make_conninfo(deployment.servers.postgres.dsn, options="-c idle_in_transaction_session_timeout=100ms")
    with hold_position(dataclasses.replace(where(deployment), postgres=impatient)) as held:
        await asyncio.sleep(0.5)
        asked = {name: held.options[name] for name in ("endingPosition", "postgresSnapshot", "postgresUrl")}
        assert len(await read(deployment, "threads", **asked)) == 12


@asynccontextmanager
async def locked(deployment: Deployment, table: str) -> AsyncIterator[None]:
    """Lock the table against all readers, as while it is altered or rewritten."""
    async with await psycopg.AsyncConnection.connect(deployment.servers.postgres.dsn) as connection:
        await connection.execute(f'LOCK TABLE "{deployment.name}"."{table}" IN ACCESS EXCLUSIVE MODE')
        yield


async def test_a_table_is_read_where_statements_and_transactions_are_ended(deployment: Deployment) -> None:
    """A statement lasts as long as Spark takes its rows; here as long as it waits for a lock."""
    await half_flushed(deployment)
    dsn = deployment.servers.postgres.dsn
    settings = await query(
        dsn, "SELECT name FROM pg_settings WHERE name IN ('statement_timeout', 'transaction_timeout')"
    )
    short = make_conninfo(dsn, options=" ".join(f"-c {name}=500ms" for (name,) in settings))

    async def lasts() -> bool:
        asked = "SELECT pid FROM pg_stat_activity WHERE query LIKE %s AND wait_event_type = 'Lock' AND query_start < %s"
        return bool(
            await query(dsn, asked, f'%"{deployment.name}".messages%', datetime.now(UTC) - timedelta(seconds=1))
        )

    async with asyncio.TaskGroup() as group, locked(deployment, "messages"):
        reading = group.create_task(read(deployment, "messages", postgresUrl=short, numPartitions=1))
        await eventually(lasts)
    assert len(reading.result()) == len(await read(deployment, "messages"))


@pytest.mark.parametrize("table", ["buffer_partitions", "messages"])
async def test_a_read_does_not_wait_for_ever_for_a_lock(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, table: str
) -> None:
    await half_flushed(deployment)
    monkeypatch.setattr(moment, "_ANSWER_S", 1.0)

    def hold() -> None:
        with hold_position(where(deployment)):
            pass

    async with locked(deployment, table), asyncio.timeout(20):
        with pytest.raises(StoreUnavailable):
            await read(deployment, "messages", numPartitions=1)
        if table == "buffer_partitions":
            with pytest.raises(StoreUnavailable):
                await asyncio.to_thread(hold)


@pytest.mark.parametrize(
    ("deployment", "room", "lane"),
    [(1, "threads", ""), (1, "buffer", ""), (2, "buffer", "_lane1")],
    indirect=["deployment"],
)
async def test_tables_that_a_store_would_refuse_are_not_read(deployment: Deployment, room: str, lane: str) -> None:
    """Regression: a read showed threads without messages where a newer release had moved these."""
    await half_flushed(deployment)
    deployment.verified = False
    await upgrade(deployment.servers, f"{deployment.name}{lane}", room, works_with=None)

    def hold() -> None:
        with hold_position(where(deployment)):
            pass

    refused = f"the {room} tables in schema .*{lane}' .*: upgrade bufstore"
    with pytest.raises(ConfigError, match=refused):
        await read(deployment, "messages", numPartitions=1)
    with pytest.raises(ConfigError, match=refused):
        await asyncio.to_thread(hold)


async def test_tables_of_the_next_release_are_read(deployment: Deployment) -> None:
    await half_flushed(deployment)
    for room in ("threads", "buffer"):
        await upgrade(deployment.servers, deployment.name, room, works_with=newest(FOLDERS[room]))
    assert len(await read(deployment, "threads")) == 12


TABLES = ("threads", "runs", "messages")


async def everything(deployment: Deployment, table: str, **more: Any) -> list[str]:
    return sorted(json.dumps(row, default=str, sort_keys=True) for row in await read(deployment, table, **more))


@pytest.mark.parametrize(
    ("table", "asked", "expected"),
    [
        ("threads", {"threads": '["t-3"]'}, {"t-3"}),
        ("messages", {"threads": '["t-3", "t-9"]'}, {"t-3", "t-9"}),
        ("threads", {"agents": '["bob"]'}, {"t-1", "t-3", "t-5", "t-7", "t-9", "t-11"}),
        ("runs", {"agents": '["bob"]', "threads": '["t-10"]'}, set()),
        ("runs", {"agents": '[""]'}, set()),
    ],
)
async def test_what_options_ask_for_is_all_that_is_read(
    deployment: Deployment, table: str, asked: dict[str, str], expected: set[str]
) -> None:
    """Flushed and unflushed threads of two agents in turn. A run's input names the other agent and must not count."""
    await half_flushed(deployment)
    assert {row["thread_id"] for row in await read(deployment, table, **asked)} == expected


async def half_flushed(deployment: Deployment) -> None:
    """Write threads t-0 to t-11, of "ada" and "bob" in turn; the last four are not flushed."""
    for numbers, flushed in ((range(8), True), (range(8, 12), False)):
        async with deployment.store(flusher=flushed) as store:
            for n in numbers:
                agents = ("ada", "bob") if n % 2 == 0 else ("bob", "ada")
                run = run_of(f"t-{n}", agent_id=agents[0], input={"agent_id": agents[1]})
                await store.checkpoint(f"t-{n}", [said(0), said(1)], run)
            if flushed:
                await store.force_flush_all()


async def test_only_what_changed_in_a_time_is_read(deployment: Deployment) -> None:
    """A thread whose row in Postgres is old has changed lately if the log has a recent entry."""
    await half_flushed(deployment)
    dsn, name = deployment.servers.postgres.dsn, deployment.name
    for table in ("threads", "runs"):
        await query(
            dsn, f"UPDATE \"{name}\".{table} SET updated_at = '2020-01-01Z' WHERE thread_id < 't-4'"
        )  # as text: t-10 would match, but is not flushed
    async with deployment.store(flusher=False) as store:
        await store.checkpoint_append("t-0", [said(2)], run_of("t-0", agent_id="ada"))
    old, lately = {"t-1", "t-2", "t-3"}, {f"t-{n}" for n in range(12)} - {"t-1", "t-2", "t-3"}
    for table in TABLES:
        for option, expected in (("changedFrom", lately), ("changedBefore", old)):
            found = await read(deployment, table, **{option: "2021-01-01T00:00:00Z"})
            assert {row["thread_id"] for row in found} == expected
    found = await read(deployment, "messages", changedFrom="2021-01-01T00:00:00Z", threads='["t-0"]')
    assert len(found) == 3, "those that Postgres has are among them"


async def test_postgres_reads_no_more_than_is_asked_for(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source sends only the agent's rows, although it reads all runs to find them."""
    async with deployment.store() as store:
        for n in range(100):
            run = run_of(f"t-{n:03}", agent_id="ada" if n % 10 == 0 else "bob")
            await store.checkpoint(f"t-{n:03}", [said(i) for i in range(50)], run)
        await store.force_flush_all()
    dsn, name = deployment.servers.postgres.dsn, deployment.name

    async def alone() -> bool:
        """True when the store's sessions have ended: each reports what it has read when it ends."""
        return not await query(dsn, "SELECT 1 FROM pg_stat_activity WHERE application_name = 'bufstore'")

    await eventually(alone, 120)  # an idle worker of Spark keeps its sessions for a minute
    await query(dsn, f'ANALYZE "{name}".messages')

    async def fetched() -> int:
        asked = "SELECT seq_tup_read + idx_tup_fetch FROM pg_stat_user_tables WHERE schemaname = %s AND relname = %s"
        return int((await query(dsn, asked, name, "messages"))[0][0])

    async def read_by(**more: Any) -> int:
        before = await fetched()
        rows = await read(deployment, "messages", **more)
        # A session reports its statistics when it ends.
        return await eventually(lambda: told(fetched, before, len(rows)))

    assert await read_by(threads='["t-007", "t-070"]', numPartitions=1) == 100
    assert await read_by(threads='["t-007", "t-070"]', numPartitions=2) == 100
    assert await read_by(numPartitions=1) == 5000

    sent, stream = 0, Moment.stream

    async def counted(self: Moment, *asked: Any, **lane: int) -> AsyncGenerator[tuple[Any, ...]]:
        nonlocal sent
        async with aclosing(stream(self, *asked, **lane)) as rows:
            async for row in rows:
                sent += 1
                yield row

    monkeypatch.setattr(Moment, "stream", counted)
    for table in ("threads", "runs"):
        for agents, expected in (('["ada"]', 10), ('["ada", "bob"]', 100), ('["nobody"]', 0), (None, 100)):
            sent = 0
            found = await read(deployment, table, **({"agents": agents} if agents is not None else {}))
            assert (len(found), sent) == (expected, expected)


async def test_a_read_that_is_broken_off_leaves_no_transaction(deployment: Deployment) -> None:
    """A LIMIT breaks a read off like this, because it takes only the first rows."""
    async with deployment.store() as store:
        for n in range(3):
            await store.checkpoint(f"t-{n}", [said(i) for i in range(2000)], run_of(f"t-{n}"))
        await store.force_flush_all()
    source = BufstoreFormat(options(deployment, "messages", numPartitions=1))
    reader = source.reader(source.schema())
    found = reader.read(reader.partitions()[0])

    async def reading() -> bool:
        there = "SELECT pid FROM pg_stat_activity WHERE query LIKE %s AND xact_start < now()"
        return bool(await query(deployment.servers.postgres.dsn, there, f'%"{deployment.name}".messages%'))

    async def over() -> bool:
        return not await reading()

    assert 0 < (await asyncio.to_thread(next, found)).num_rows < 6000
    assert await reading()
    await asyncio.to_thread(found.close)
    await eventually(over)


async def told(fetched: Callable[[], Any], before: int, least: int) -> int:
    found = await fetched() - before
    return found if found >= least else 0
