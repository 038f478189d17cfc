"""Two releases on the same tables: a rolling upgrade and the way back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

import pytest
from psycopg import AsyncConnection
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from bufstore import ConfigError, StoreMisconfigured
from bufstore.buffer.ports.waiting import WaitingEntry
from bufstore.embedded import Servers
from bufstore.mailbox import PostgresMailboxStore
from bufstore.postgres.connection.migrate import applied_migrations, migrate, newest, waiting
from bufstore.postgres.connection.pool import new_pool
from bufstore.postgres.ledger.ledger import PostgresLedger
from bufstore.spark.sink.spark_ledger import Query, SparkLedger
from bufstore.testing.ledger import decides, moved, parked
from command_line import Result, bufstore_cli, where
from conftest import Deployment
from helpers import fresh, query, run_of, said
from unit.counters import CounterStore

#: Changes that a later release may make to tables in use: new tables, and columns with a default.
EXPANDED = {
    "threads": "ALTER TABLE {schema}.threads ADD COLUMN later text NOT NULL DEFAULT '';"
    "ALTER TABLE {schema}.messages ADD COLUMN later bigint; ALTER TABLE {schema}.runs ADD COLUMN later jsonb;",
    "buffer": "ALTER TABLE {schema}.buffer_threads ADD COLUMN later bigint NOT NULL DEFAULT 0;"
    "ALTER TABLE {schema}.buffer_partitions ADD COLUMN later text;"
    "ALTER TABLE {schema}.buffer_log ADD COLUMN later text;"
    "ALTER TABLE {schema}.buffer_quarantine ADD COLUMN later text;"
    "CREATE TABLE {schema}.buffer_later (thread_id text PRIMARY KEY);",
    "mailbox": "ALTER TABLE {schema}.mailbox_threads ADD COLUMN later text NOT NULL DEFAULT '';"
    "ALTER TABLE {schema}.mailbox_dispatches ADD COLUMN later bigint;",
    "spark": "ALTER TABLE {schema}.spark_sources ADD COLUMN later text;",
}
FOLDERS = {
    "threads": files("bufstore.threads.postgres") / "sql",
    "buffer": files("bufstore.postgres.ledger") / "sql",
    "mailbox": files("bufstore.mailbox") / "sql",
    "spark": files("bufstore.spark") / "sql",
}


class Later:
    """A room's migrations as in a later release: with one more."""

    def __init__(self, room: str, works_with: int | None) -> None:
        self._folder: Traversable = FOLDERS[room]
        self.name = f"{newest(self._folder) + 1:04}_later.sql"
        self._text = (f"-- Works with: {works_with:04}\n" if works_with else "") + EXPANDED[room]

    def read_text(self, encoding: str) -> str:
        return self._text

    def iterdir(self) -> Iterator[Any]:
        yield from self._folder.iterdir()
        yield self


class Earlier:
    """A room's migrations as in an earlier release: those up to this version."""

    def __init__(self, room: str, version: int) -> None:
        self._folder: Traversable = FOLDERS[room]
        self._version = version

    def iterdir(self) -> Iterator[Any]:
        return (
            text
            for text in self._folder.iterdir()
            if not text.name[:4].isdigit() or self._version >= int(text.name[:4])
        )


async def upgrade(servers: Servers, schema: str, room: str, *, works_with: int | None) -> None:
    """Migrate as a later release does when it opens."""
    folder: Any = Later(room, works_with)
    async with new_pool(servers.postgres.dsn, size=1) as pool, pool.lend(10) as connection:
        await migrate(connection, schema, folder, room)


async def test_this_release_goes_on_and_restarts_on_the_tables_of_the_next(
    deployment: Deployment, servers: Servers
) -> None:
    thread_id = fresh()
    async with deployment.store() as running:
        await running.checkpoint(thread_id, [said(0)], run_of(thread_id))
        await running.force_flush(thread_id)
        for room in ("threads", "buffer"):
            await upgrade(servers, deployment.name, room, works_with=newest(FOLDERS[room]))
        await running.checkpoint(thread_id, [said(0), said(1)], run_of(thread_id, 1))
        await running.force_flush(thread_id)
    async with deployment.store() as restarted:
        await restarted.checkpoint_append(thread_id, [said(2)], run_of(thread_id, 2), expected_version=2)
        await restarted.force_flush(thread_id)
        assert await flushed(deployment, thread_id) == [said(0), said(1), said(2)]
        await restarted.save_thread_state(thread_id, {"step": 1})
        assert [t.thread_id for t in (await restarted.query_threads()).threads] == [thread_id]
        await restarted.delete_thread(thread_id)
        await restarted.force_flush(thread_id)
        assert await flushed(deployment, thread_id) is None


async def flushed(deployment: Deployment, thread_id: str) -> list[Any] | None:
    async with deployment.inner() as plain:
        return await plain.load_messages(thread_id)


async def test_a_mailbox_and_a_pipeline_open_on_the_tables_of_the_next_release(servers: Servers) -> None:
    schema = fresh("next")[:20]
    for room in ("mailbox", "spark"):
        await upgrade(servers, schema, room, works_with=newest(FOLDERS[room]))
    async with PostgresMailboxStore(servers.postgres.dsn, schema=schema) as mailbox:
        await mailbox.enqueue("t", b"work", dispatch_id="d")
        assert await mailbox.load_dispatch("t", "d") is not None
    ledger = SparkLedger(servers.postgres.dsn, schema)
    await ledger.open()
    try:
        await ledger.setup()
        assert (await ledger.begin("app", Query("query"), 0, 30.0)).query_id == "query"
    finally:
        await ledger.aclose()


@pytest.mark.parametrize("room", ["threads", "buffer"])
async def test_tables_that_this_release_cannot_work_with_are_refused(
    deployment: Deployment, servers: Servers, room: str
) -> None:
    async with deployment.store():
        pass
    await upgrade(servers, deployment.name, room, works_with=None)
    version = newest(FOLDERS[room]) + 1
    with pytest.raises(ConfigError, match=f"version {version}, made by a newer release .* up to {version - 1}"):
        async with deployment.store() as store:
            await store.force_flush_all()


LOOKS = [("status",), ("verify",), ("quarantine", "list"), ("repair",)]


@pytest.mark.parametrize("command", LOOKS, ids=" ".join)
async def test_a_command_that_only_looks_leaves_the_tables_of_an_older_release_as_they_are(
    deployment: Deployment, servers: Servers, command: tuple[str, ...]
) -> None:
    """Regression: it migrated them, in a running app of the older release."""
    async with deployment.store(flusher=False):
        pass
    async with new_pool(servers.postgres.dsn, size=1) as pool, pool.lend(120) as connection:
        await connection.execute(f"DROP SCHEMA {deployment.name} CASCADE")  # type: ignore[arg-type]
        earlier: Any = Earlier("buffer", newest(FOLDERS["buffer"]) - 1)
        made = await migrate(connection, deployment.name, earlier, "buffer")
        for arguments in (command, ("repair", "--apply")):
            looked = await asyncio.to_thread(bufstore_cli, *arguments, **where(deployment))
            there = set((await applied_migrations(connection, deployment.name))["buffer"])
            if arguments == command:
                assert (there, looked.code) == (set(made), 2), looked
                assert "made by an older release" in looked.err
    assert there > set(made), "a command that changes something migrates"


async def test_a_command_that_only_looks_makes_no_tables(deployment: Deployment, servers: Servers) -> None:
    """Regression: `repair` without --apply made a schema with eight tables, also for a log that never was."""
    elsewhere, there = fresh("look").replace("-", "_"), "SELECT oid FROM pg_namespace WHERE nspname = %s"
    for made in (False, True):
        for command in LOOKS:
            options = where(deployment) | {"BUFSTORE_SCHEMA": elsewhere}
            looked = await asyncio.to_thread(bufstore_cli, *command, **options)
            # An empty database has nothing of the log that is flushed into another one.
            expected = 2 if command != ("repair",) else 1 if made else 0
            assert looked.code == expected, (command, looked)
            assert await query(servers.postgres.dsn, there, elsewhere) == []
        async with deployment.store(flusher=False) as store:
            await store.checkpoint(t := fresh(), [said(0)], run_of(t))


async def test_who_waited_for_another_ones_migration_finds_it_done(servers: Servers) -> None:
    """A session may remember that it found no such object, even after another has created it."""
    schema = fresh()
    async with new_pool(servers.postgres.dsn, size=3) as pool, pool.lend(10) as first, pool.lend(10) as second:
        async with first.transaction():
            await first.execute(waiting()[0])
            late = asyncio.create_task(migrate(second, schema, FOLDERS["buffer"], "buffer"))
            waits = "SELECT FROM pg_locks WHERE pid = %s AND locktype = 'advisory' AND NOT granted"
            while not late.done() and not (await first.execute(waits, [second.info.backend_pid])).rowcount:
                pass
            assert not late.done()
            assert await migrate(first, schema, FOLDERS["buffer"], "buffer")
        assert await late == []


#: `take` as in the release before waiting entries existed.
_EARLIER_TAKE = """
WITH free AS (
    SELECT p.partition FROM {schema}.buffer_partitions AS p
    WHERE p.partition = ANY (ARRAY[0, 1, 2]) ORDER BY p.partition FOR UPDATE SKIP LOCKED
), raised AS (
    UPDATE {schema}.buffer_partitions AS p SET term = p.term + 1, owner = 'earlier'
    FROM free WHERE p.partition = free.partition
    RETURNING p.partition, p.term, p.cursor_seq, p.cursor_id
)
SELECT partition, term FROM raised ORDER BY partition
"""


async def test_an_earlier_release_never_owns_a_partition_in_which_entries_wait(servers: Servers) -> None:
    """An earlier release would flush later entries of the same threads past them."""
    schema = fresh("waiting").replace("-", "_")[:20]
    ledger = PostgresLedger(servers.postgres.dsn, CounterStore(), schema=schema)
    await ledger.open()
    try:
        held = await ledger.take([0, 1, 2], "me")
        waiting = [WaitingEntry(parked(7, "t").item, 1, "its row is held")]
        await ledger.flush(held[1:2], [], decides(waiting=waiting, cursors=[moved(held[1], 7)]))

        async def earlier() -> list[Any]:
            async with new_pool(servers.postgres.dsn, size=1) as pool, pool.lend(10) as connection:
                return await (await connection.execute(_EARLIER_TAKE.format(schema=schema))).fetchall()  # type: ignore[arg-type]

        assert await earlier() == [(0, 2), (2, 2)]
        (cursor,) = await ledger.take([1], "this release takes it")
        assert (cursor.term, cursor.seq) == (2, 7)
        assert await earlier() == [(0, 3), (2, 3)], "and what it said to the trigger was said for its statement only"
        await ledger.flush([cursor], [], decides(left={"t": 7}, cursors=[cursor]))
        assert await earlier() == [(0, 4), (1, 3), (2, 4)]
    finally:
        await ledger.aclose()


@pytest.fixture
async def guarded(servers: Servers) -> AsyncIterator[tuple[str, str]]:
    """The logins of an owner whose new functions are not for everybody, and of an app."""
    names = [f"{who}_{fresh()[:8]}".replace("-", "_") for who in ("owner", "app")]
    async with await AsyncConnection.connect(servers.postgres.dsn, autocommit=True) as admin:
        for name in names:
            await admin.execute(f"CREATE ROLE {name} LOGIN PASSWORD 'x'")  # type: ignore[arg-type]
        await admin.execute(f"GRANT CREATE ON DATABASE {admin.info.dbname} TO {names[0]}")  # type: ignore[arg-type]
        hidden = f"ALTER DEFAULT PRIVILEGES FOR ROLE {names[0]} REVOKE EXECUTE ON FUNCTIONS FROM PUBLIC"
        await admin.execute(hidden)  # type: ignore[arg-type]
        owner, app = (make_conninfo(servers.postgres.dsn, user=name, password="x") for name in names)
        yield owner, app
        for name in names:
            await admin.execute(f"DROP OWNED BY {name} CASCADE; DROP ROLE {name}")  # type: ignore[arg-type]


async def _given(owner: str, app: str, schema: str, version: int) -> None:
    """Make a mailbox as an earlier release does, and give the app what it needs there."""
    role = conninfo_to_dict(app)["user"]
    folder: Any = Earlier("mailbox", version)
    async with new_pool(owner, size=1) as pool, pool.lend(10) as connection:
        await migrate(connection, schema, folder, "mailbox")
        for statement in (
            f"GRANT USAGE ON SCHEMA {schema} TO {role}",
            f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO {role}",
            f"GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA {schema} TO {role}",
            f"GRANT USAGE ON ALL SEQUENCES IN SCHEMA {schema} TO {role}",
        ):
            await connection.execute(statement)  # type: ignore[arg-type]


async def test_who_could_use_a_mailbox_before_its_migration_can_use_it_afterwards(guarded: tuple[str, str]) -> None:
    """The functions that are there call new ones since then, also for workers of earlier releases."""
    owner, app = guarded
    schema = fresh("mbx").replace("-", "_")[:20]
    await _given(owner, app, schema, 4)
    async with PostgresMailboxStore(owner, schema=schema):
        pass
    async with PostgresMailboxStore(app, schema=schema) as mailbox:
        await mailbox.enqueue("t", b"x")
        claim = await mailbox.claim("t", "me")
        assert claim is not None
        await mailbox.ack(claim)


async def test_who_may_not_migrate_a_mailbox_is_told_what_does(guarded: tuple[str, str]) -> None:
    owner, app = guarded
    schema = fresh("mbx").replace("-", "_")[:20]
    await _given(owner, app, schema, 4)
    role = str(conninfo_to_dict(app)["user"])

    async def setup(*arguments: str) -> Result:
        where = {"BUFSTORE_POSTGRES": owner, "BUFSTORE_SCHEMA": schema}
        return await asyncio.to_thread(bufstore_cli, "setup", "--mailbox", *arguments, **where)

    with pytest.raises(
        StoreMisconfigured, match="run `bufstore setup --mailbox --grant ROLE` with their owner's rights"
    ):
        async with PostgresMailboxStore(app, schema=schema):
            pass
    assert "mailbox 0005" in (await setup("--sql")).out
    done = await setup("--grant", role, "--json")
    assert (done.json["migrated"], done.json["granted"], done.json["log_made"]) == ({"mailbox": [5]}, [role], None)
    assert "Nothing is missing" in (await setup("--sql")).out
    assert "up to date" in (await setup()).out
    for wrong in (["--own-store"], ["--partitions", "8"]):
        assert "--mailbox makes no log" in (await setup(*wrong)).err
    async with PostgresMailboxStore(app, schema=schema) as mailbox:
        await mailbox.enqueue("t", b"x")
        assert await mailbox.claim("t", "me") is not None


async def test_a_new_mailbox_is_set_up_beside_the_lanes_of_a_store(guarded: tuple[str, str]) -> None:
    owner, app = guarded
    schema = fresh("mbx").replace("-", "_")[:20]
    where, role = {"BUFSTORE_POSTGRES": owner, "BUFSTORE_SCHEMA": schema}, str(conninfo_to_dict(app)["user"])
    for arguments in (["--own-store", "--lanes", "2"], ["--mailbox", "--grant", role]):
        done = await asyncio.to_thread(bufstore_cli, "setup", *arguments, "--json", **where)
        assert done.code == 0, done.err
    assert done.json["lanes"] == {}
    async with PostgresMailboxStore(app, schema=schema) as mailbox:
        await mailbox.enqueue("t", b"x")
        claim = await mailbox.claim("t", "me")
        assert claim is not None
        await mailbox.ack(claim)
