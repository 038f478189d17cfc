"""Apps' own stores behind the buffer: a complete one, and one with the least that can be wrapped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import msgspec
import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo
from psycopg.rows import dict_row
from psycopg.types.json import Json

from bufstore import (
    Checkpoint,
    ConfigError,
    Consistency,
    NotFound,
    PostgresThreadStore,
    Queryable,
    ReadNotFresh,
    Run,
    StoreUnavailable,
    Thread,
    ThreadChange,
    ThreadQuarantined,
    decode_message,
    decode_run,
)
from bufstore.embedded import Servers
from bufstore.testing import APPLY_CHECKS, CHECKS, EVERYTHING, Applier, Capability, Check
from bufstore.testing.applying import change as change_of
from conftest import Deployment
from helpdesk_store import TABLES, HelpdeskStore
from helpers import eventually, fresh, run_of, said


class NotesStore:
    """The least store that can be wrapped, on JSON columns: two reads and `apply`, for checkpoints only."""

    TABLES = """
    CREATE TABLE note (id text PRIMARY KEY, lines json[] NOT NULL, run text, parent text, active text, open text);
    CREATE TABLE note_run (id text PRIMARY KEY, note text NOT NULL, document bytea NOT NULL);
    """
    OFFERS = frozenset({Capability.MESSAGE_PAGES, Capability.RUN_OWNERS})

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn

    async def apply(self, connection: psycopg.AsyncConnection[Any], batch: Sequence[ThreadChange]) -> None:
        async with connection.cursor() as cursor:
            for c in batch:
                await cursor.execute("SELECT run, parent, active, open FROM note WHERE id = %s", [c.thread_id])
                row = await cursor.fetchone() or (None, None, None, None)
                after = c.project(_thread(c.thread_id, 0, row))
                await cursor.execute(
                    "INSERT INTO note AS n VALUES (%s, %s, %s, %s, %s, %s) ON CONFLICT (id) DO UPDATE"
                    " SET lines = n.lines[:%s] || excluded.lines, run = excluded.run, parent = excluded.parent,"
                    " active = excluded.active, open = excluded.open",
                    [
                        c.thread_id,
                        [Json(decode_message(m)) for m in c.messages],
                        after.latest_run_id,
                        after.parent_thread_id,
                        after.active_run_id,
                        after.open_run_id,
                        c.keep,
                    ],
                )
                for run_id, document in c.runs.items():
                    done = await cursor.execute(
                        "INSERT INTO note_run AS r VALUES (%s, %s, %s) ON CONFLICT (id) DO UPDATE"
                        " SET document = excluded.document WHERE r.note = excluded.note",
                        [run_id, c.thread_id, document],
                    )
                    if not done.rowcount:
                        raise psycopg.errors.UniqueViolation("a run belongs to another note")

    async def load_checkpoint(self, thread_id: str) -> Checkpoint | None:
        async with await psycopg.AsyncConnection.connect(self.dsn) as connection:
            found = await connection.execute(
                "SELECT lines, document, run, parent, active, open FROM note"
                " LEFT JOIN note_run ON note_run.id = run WHERE note.id = %s",
                [thread_id],
            )
            row = await found.fetchone()
        if row is None:
            return None
        lines, document, *rest = row
        run = decode_run(document) if document is not None else None
        return Checkpoint(thread=_thread(thread_id, len(lines), rest), messages=lines, latest_run=run)

    async def load_run(self, run_id: str) -> Run | None:
        async with await psycopg.AsyncConnection.connect(self.dsn) as connection:
            found = await connection.execute("SELECT document FROM note_run WHERE id = %s", [run_id])
            row = await found.fetchone()
        return decode_run(row[0]) if row else None


def _thread(thread_id: str, version: int, row: Sequence[str | None]) -> Thread:
    run, parent, active, opened = row
    return Thread(
        thread_id=thread_id,
        version=version,
        latest_run_id=run,
        parent_thread_id=parent,
        active_run_id=active,
        open_run_id=opened,
    )


@pytest.fixture(scope="module")
async def app_dsn(servers: Servers) -> AsyncIterator[str]:
    """A database schema of the app, without any of bufstore's tables."""
    name = fresh("app")
    async with await psycopg.AsyncConnection.connect(servers.postgres.dsn, autocommit=True) as connection:
        await connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(name)))
    dsn = make_conninfo(servers.postgres.dsn, options=f"-csearch_path={name}")
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        await connection.execute(TABLES)
        await connection.execute(NotesStore.TABLES)
    yield dsn


def applier(store: Any, dsn: str) -> Applier:
    async def apply(batch: Sequence[ThreadChange]) -> None:
        async with await psycopg.AsyncConnection.connect(dsn) as connection:
            await store.apply(connection, batch)

    return Applier(store, apply)


@pytest.mark.long  # the short tests run the same contract on the least store
@pytest.mark.parametrize("check", CHECKS, ids=str)
async def test_a_complete_app_store_behind_the_buffer(deployment: Deployment, app_dsn: str, check: Check) -> None:
    async with (
        HelpdeskStore(app_dsn) as mine,
        deployment.store(mine, postgres=app_dsn, schema=deployment.name) as store,
    ):
        await check(store)


@pytest.mark.parametrize("check", APPLY_CHECKS, ids=str)
async def test_what_a_complete_app_store_applies(app_dsn: str, check: Check) -> None:
    async with HelpdeskStore(app_dsn) as mine:
        assert isinstance(mine, Queryable)
        await check(applier(mine, app_dsn))


def _offered(checks: list[Check]) -> list[Check]:
    return [check for check in checks if check.needs <= NotesStore.OFFERS]


@pytest.mark.parametrize("check", _offered(CHECKS), ids=str)
async def test_the_least_app_store_behind_the_buffer(deployment: Deployment, app_dsn: str, check: Check) -> None:
    async with deployment.store(NotesStore(app_dsn), postgres=app_dsn, schema=deployment.name) as store:
        await check(store)


@pytest.mark.parametrize("check", _offered(APPLY_CHECKS), ids=str)
async def test_what_the_least_app_store_applies(app_dsn: str, check: Check) -> None:
    await check(applier(NotesStore(app_dsn), app_dsn))


@pytest.mark.parametrize(
    "check", [c for c in CHECKS if c.needs & (EVERYTHING - NotesStore.OFFERS - {Capability.ANY_VALUE})], ids=str
)
async def test_what_an_app_store_lacks_is_refused(deployment: Deployment, app_dsn: str, check: Check) -> None:
    async with deployment.store(NotesStore(app_dsn), postgres=app_dsn, schema=deployment.name) as store:
        with pytest.raises(ConfigError, match="wrapped store"):
            await check(store)


async def test_a_value_that_an_apps_columns_refuse_is_parked(deployment: Deployment, app_dsn: str) -> None:
    async with deployment.store(NotesStore(app_dsn), postgres=app_dsn, schema=deployment.name) as store:
        bad, good = fresh(), fresh()
        for thread_id, content in ((bad, float("inf")), (good, said(1))):
            await store.checkpoint(thread_id, [said(0)], run_of(thread_id))
            await store.checkpoint_append(thread_id, [content], run_of(thread_id))
        await store.force_flush_all()
        with pytest.raises(ThreadQuarantined):
            await store.load_messages(bad)
        assert "22P02" in (await store.quarantine.page())[0].cause
        assert await store.load_messages(good, consistency=Consistency.EVENTUAL) == [said(0), said(1)]


class FailsOn(NotesStore):
    """Runs a fault in the transaction whenever a batch contains one thread."""

    def __init__(self, dsn: str, thread_id: str, fault: Callable[[psycopg.AsyncConnection[Any]], Awaitable[Any]]):
        super().__init__(dsn)
        self.thread_id, self.fault, self.faults = thread_id, fault, 0

    async def apply(self, connection: psycopg.AsyncConnection[Any], batch: Sequence[ThreadChange]) -> None:
        await super().apply(connection, batch)
        if any(change.thread_id == self.thread_id for change in batch):
            self.faults += 1
            await self.fault(connection)


async def _raises(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        pytest.param(lambda c: c.execute("SELECT %s::text", ["a\0b"]), "DataError", id="a NUL in text"),
        pytest.param(lambda c: c.execute("SELECT %s", [{}]), "ProgrammingError", id="what psycopg cannot adapt"),
        pytest.param(lambda c: c.commit(), "ProgrammingError", id="a commit"),
        pytest.param(lambda _: _raises(psycopg.InterfaceError()), "InterfaceError", id="a closed cursor"),
        pytest.param(lambda _: _raises(NotFound("x")), "NotFound", id="an error of bufstore's"),
        pytest.param(lambda _: _raises(asyncio.CancelledError()), "CancelledError", id="a cancel of something else"),
        pytest.param(lambda c: c.close(), "", id="a closed connection"),
    ],
)
async def test_a_fault_of_an_apps_store_in_one_thread_delays_that_thread_only(
    deployment: Deployment, app_dsn: str, fault: Any, name: str
) -> None:
    bad, good = fresh("bad"), [fresh("good") for _ in range(5)]
    mine = FailsOn(app_dsn, bad, fault)
    async with deployment.store(mine, postgres=app_dsn, schema=deployment.name) as store:
        for thread_id in (bad, *good):
            await store.checkpoint(thread_id, [said(0)], run_of(thread_id))
        for thread_id in good:
            await store.force_flush(thread_id, timeout_s=20)

        async def named() -> bool:
            return mine.faults > 0 and name in (await store.health()).flusher

        await eventually(named)
        mine.thread_id = ""
        await store.force_flush(bad, timeout_s=20)
        assert await store.quarantined() == 0


async def test_what_an_apps_store_does_to_its_connection_stays_there(deployment: Deployment, app_dsn: str) -> None:
    """Regression: after one `row_factory`, every flush and read of the process failed."""
    thread_id = fresh()

    async def changes(connection: psycopg.AsyncConnection[Any]) -> None:
        connection.row_factory = dict_row

    mine = FailsOn(app_dsn, thread_id, changes)
    async with deployment.store(mine, postgres=app_dsn, schema=deployment.name) as store:
        for n in range(3):
            await store.checkpoint_append(thread_id, [said(n)], run_of(thread_id))
            await store.force_flush(thread_id, timeout_s=20)
        assert mine.faults == 3
        assert not (await store.verify()).findings
        assert await store.quarantined() == 0
        assert await store.load_messages(thread_id, consistency=Consistency.STRONG) == [said(n) for n in range(3)]


@pytest.mark.parametrize(
    "statement", ["ROLLBACK", "COMMIT", "ROLLBACK; BEGIN", "ROLLBACK AND CHAIN", "ROLLBACK; SELECT 'no number'::int"]
)
async def test_a_flush_whose_transaction_an_apps_store_ends_moves_nothing(
    deployment: Deployment, app_dsn: str, statement: str
) -> None:
    """Regression: the watermarks of all its threads moved, and their rows were gone."""
    bad, good = fresh("bad"), fresh("good")
    mine = FailsOn(app_dsn, bad, lambda c: c.execute(statement))
    async with deployment.store(mine, postgres=app_dsn, schema=deployment.name) as store:
        for thread_id in (good, bad):
            await store.checkpoint(thread_id, [said(0)], run_of(thread_id))

        async def named() -> bool:
            return "ended the flush's transaction" in (await store.health()).flusher

        await eventually(named)
        # A flush that began before the other entry was there may have written the good one by itself.
        moved = (await store.buffer.ledger.watermark(good)).flushed_seq > 0
        assert not moved or await store.load_messages(good, consistency=Consistency.EVENTUAL) == [said(0)]
        assert (await store.buffer.ledger.watermark(bad)).flushed_seq == 0
        mine.thread_id = ""
        await store.force_flush_all(timeout_s=20)
        for thread_id in (good, bad):
            assert await store.load_messages(thread_id, consistency=Consistency.EVENTUAL) == [said(0)]


@pytest.mark.parametrize("kind", ["ours", "an app's"])
async def test_a_thread_from_before_the_buffer_keeps_its_messages_when_its_first_entry_is_discarded(
    deployment: Deployment, app_dsn: str, kind: str
) -> None:
    """Regression: the next append was the thread's first message, and the others were gone."""
    thread_id, before = fresh(), [said(n) for n in range(3)]
    run = run_of(thread_id)
    change = change_of(thread_id, 0, before, run)

    async def refuses(connection: psycopg.AsyncConnection[Any]) -> None:
        await connection.execute("SELECT 'no number'::int")

    if kind == "ours":

        class Refuses(PostgresThreadStore):
            thread_id = ""

            async def apply(self, connection: Any, batch: Sequence[ThreadChange]) -> None:
                await super().apply(connection, batch)
                if any(change.thread_id == self.thread_id for change in batch):
                    await refuses(connection)

        mine: Any = Refuses(app_dsn, schema=deployment.name)
        again: Any = PostgresThreadStore(app_dsn, schema=deployment.name)
        async with PostgresThreadStore(app_dsn, schema=deployment.name) as plain:
            await plain.setup()
            await plain.checkpoint(thread_id, before, run)
    else:
        mine = again = FailsOn(app_dsn, "", refuses)
        await applier(mine, app_dsn).apply([change])
    mine.thread_id = thread_id
    async with deployment.store(mine, postgres=app_dsn, schema=deployment.name) as store:
        await store.checkpoint_append(thread_id, [said(3)], run)
        await eventually(store.quarantined)
        mine.thread_id = ""
        with pytest.raises(ThreadQuarantined):
            await store.load_messages(thread_id)
        assert await store.load_messages(thread_id, quarantined="known") == before
        await store.quarantine.discard([entry.seq for entry in await store.quarantine.page()])
        assert await store.load_messages(thread_id) == before
        receipt = await store.checkpoint_append(thread_id, [said(4)], run)
        assert receipt.version == 4
        await store.force_flush(thread_id, timeout_s=20)
        assert await store.load_messages(thread_id, consistency=Consistency.STRONG) == [*before, said(4)]
        assert await store.quarantined() == 0
    async with deployment.store(again, postgres=app_dsn, schema=deployment.name) as store:
        await store.checkpoint_append(thread_id, [said(5)], run)
        await store.force_flush(thread_id, timeout_s=20)
        shown = await store.load_messages(thread_id, consistency=Consistency.EVENTUAL)
        assert shown == [*before, said(4), said(5)]


async def test_an_apps_store_that_shows_what_was_before_is_asked_again(deployment: Deployment, app_dsn: str) -> None:
    """Regression: what a lagging replica showed was kept, and an append stood behind a state that never was."""

    class Lags(NotesStore):
        late = 0

        async def load_checkpoint(self, thread_id: str) -> Checkpoint | None:
            found = await super().load_checkpoint(thread_id)
            if self.late and found is not None:
                self.late -= 1
                return msgspec.structs.replace(found, messages=found.messages[:1])
            return found

    mine, thread_id = Lags(app_dsn), fresh()
    whole = [said(n) for n in range(3)]
    async with deployment.store(mine, postgres=app_dsn, schema=deployment.name) as store:
        await store.checkpoint(thread_id, whole, run_of(thread_id))
        await store.force_flush(thread_id, timeout_s=20)
    async with deployment.store(mine, postgres=app_dsn, schema=deployment.name) as store:
        mine.late = 2
        assert await store.load_messages(thread_id) == whole
    async with deployment.store(mine, postgres=app_dsn, schema=deployment.name) as store:
        mine.late = 10**6
        with pytest.raises(ReadNotFresh, match="not from a replica"):
            await store.load_messages(thread_id)
        mine.late = 0
        assert await store.load_messages(thread_id) == whole


async def test_an_apps_store_that_hangs_holds_up_no_list_or_run(deployment: Deployment, app_dsn: str) -> None:
    """Regression: these reads waited for as long as the store did."""

    class Hangs(HelpdeskStore):
        hangs = False

        async def query_threads(self, *args: Any, **options: Any) -> Any:
            return await (asyncio.Event().wait() if self.hangs else super().query_threads(*args, **options))

        async def load_run(self, run_id: str) -> Run | None:
            if self.hangs:
                await asyncio.Event().wait()
            return await super().load_run(run_id)

    async with (
        Hangs(app_dsn) as mine,
        deployment.store(mine, postgres=app_dsn, schema=deployment.name, read_timeout_s=0.5) as store,
    ):
        thread_id = fresh()
        await store.checkpoint(thread_id, [said(0)], run_of(thread_id))
        await store.force_flush(thread_id, timeout_s=20)
        mine.hangs = True
        for level in (Consistency.EVENTUAL, Consistency.STRONG):
            with pytest.raises((StoreUnavailable, ReadNotFresh)):
                await asyncio.wait_for(store.query_threads(consistency=level), 20)
            with pytest.raises((StoreUnavailable, ReadNotFresh)):
                await asyncio.wait_for(store.load_run("another", consistency=level), 20)


def test_every_check_runs_on_the_least_store_or_says_what_it_needs() -> None:
    assert len({c.name for c in CHECKS + APPLY_CHECKS}) == len(CHECKS + APPLY_CHECKS)
    for check in CHECKS + APPLY_CHECKS:
        assert " " not in check.name
        assert check.name.count("_") >= 2, "a name is a sentence"
    assert len(_offered(CHECKS)) >= 16
    assert {need for check in CHECKS + APPLY_CHECKS for need in check.needs} == EVERYTHING
