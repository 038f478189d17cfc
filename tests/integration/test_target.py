"""Commands and instances on a log that is flushed elsewhere, or no longer says where, are refused, change nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from contextlib import suppress
from typing import Any

import nats
import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from bufstore import BufferedThreadStore, ConfigDrift, Consistency, LogRolledBack, PostgresThreadStore
from bufstore.embedded import Servers
from command_line import bufstore_cli, lines_of, where
from conftest import Deployment
from helpdesk_store import TABLES, HelpdeskStore
from helpers import eventually, fresh, query, run_of, said
from thorough import seldom


async def cli(deployment: Deployment, *arguments: object, **environment: str) -> Any:
    return await asyncio.to_thread(bufstore_cli, *arguments, **where(deployment) | environment)


async def says(deployment: Deployment, store: BufferedThreadStore) -> dict[str, str]:
    """Return bufstore's metadata of the stream."""
    found = await store.buffer.session.stream.api(f"STREAM.INFO.{deployment.log.stream}")
    return {n: v for n, v in found["config"]["metadata"].items() if n.startswith("bufstore.")}


async def damage(deployment: Deployment, *names: str, **values: str) -> None:
    """Remove these names from what the log says, and change these, as an operator might by hand."""
    async with deployment.store(flusher=False) as store:
        stream, name = store.buffer.session.stream, deployment.log.stream  # type: ignore[attr-defined]
        config = (await stream.api(f"STREAM.INFO.{name}"))["config"]
        changed = config["metadata"] | {f"bufstore.{n}": v for n, v in values.items()}
        left = {n: v for n, v in changed.items() if n.removeprefix("bufstore.") not in names}
        await stream.api(f"STREAM.UPDATE.{name}", config | {"metadata": left})


async def helpdesk(deployment: Deployment) -> str:
    """Make an app's own tables in Postgres, and return their DSN."""
    dsn, tables = deployment.servers.postgres.dsn, fresh("app")
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        await connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(tables)))
    dsn = make_conninfo(dsn, options=f"-csearch_path={tables}")
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        await connection.execute(TABLES)
    return dsn


async def test_no_command_flushes_what_belongs_into_an_apps_own_store(deployment: Deployment) -> None:
    dsn, thread_id = await helpdesk(deployment), fresh()
    async with HelpdeskStore(dsn) as mine:
        own = {"inner": mine, "postgres": dsn, "schema": deployment.name}
        async with deployment.store(flusher=False, **own) as store:
            await store.checkpoint(thread_id, [said(0)], run_of(thread_id))
        file = lines_of([(fresh(), [1])])
        for command in (["flush", "--all"], ["quarantine", "replay", "--all"], ["repair", "--apply"], ["import", "-"]):
            refused = await asyncio.to_thread(bufstore_cli, *command, stdin=file, **where(deployment))
            assert (refused.code, "in a process that opens that store" in refused.err) == (2, True), refused
        for command, code in (["status"], 1), (["verify"], 0), (["repair"], 0), (["quarantine", "list"], 0):
            looked = await cli(deployment, *command)
            assert looked.code == code, looked  # status reports that nobody flushes
        made = "SELECT count(*) FROM pg_tables WHERE schemaname = %s AND tablename = 'threads'"
        assert await query(dsn, made, deployment.name) == [(0,)]
        assert await mine.load_checkpoint(thread_id) is None
        async with deployment.store(**own) as store:
            await store.force_flush_all()
        found = await mine.load_checkpoint(thread_id)
        assert found is not None
        assert found.messages == [said(0)]


async def test_setup_takes_no_log_away_from_an_apps_own_store(deployment: Deployment) -> None:
    dsn = await helpdesk(deployment)
    async with HelpdeskStore(dsn) as mine, deployment.store(inner=mine, postgres=dsn, schema=deployment.name):
        pass
    refused = await cli(deployment, "setup")
    assert (refused.code, "in a process that opens that store" in refused.err) == (2, True), refused
    assert (await cli(deployment, "setup", "--own-store")).code == 0


async def test_a_database_of_an_earlier_release_is_given_the_logs_name(deployment: Deployment) -> None:
    async with deployment.store() as store:
        await store.checkpoint("t", [said(0)], run_of("t"))
        await store.force_flush("t")
        name = (await says(deployment, store))["bufstore.target"]
    dsn, table = deployment.servers.postgres.dsn, f"{deployment.name}.buffer_log"
    await query(dsn, f"UPDATE {table} SET domain = NULL, store = NULL, target = NULL")
    elsewhere = Deployment(deployment.servers)
    elsewhere.log = deployment.log
    with pytest.raises(ConfigDrift, match="flushed nothing of this log"):
        async with elsewhere.store():
            pass
    async with deployment.store():
        assert await query(dsn, f"SELECT target FROM {table}") == [(name,)]


@pytest.mark.parametrize(
    "damaged",
    [("target", "store"), ("partitions",), *seldom(("bucket",), ("failover_window_s",), {"epoch": "many"})],
)
async def test_a_log_whose_metadata_somebody_has_damaged_is_refused_by_name(
    deployment: Deployment, damaged: tuple[str, ...] | dict[str, str]
) -> None:
    async with deployment.store() as store:
        await store.checkpoint("t", [said(0)], run_of("t"))
        before = await says(deployment, store)
        if isinstance(damaged, dict):
            await damage(deployment, **damaged)
        else:
            await damage(deployment, *damaged)
        # Who has the log open goes on with what it said before.
        await store.checkpoint("t", [said(0), said(1)], run_of("t"))
        await store.force_flush("t")
    with pytest.raises(ConfigDrift, match=r"metadata is .* Somebody has changed it"):
        async with deployment.store():
            pass
    for command in (["status"], ["flush", "--all"], ["log", "show"], ["verify"], ["repair"], ["setup"]):
        refused = await cli(deployment, *command)
        assert (refused.code, "Somebody has changed it" in refused.err) == (2, True), refused
    assert "Somebody has changed it" in (await cli(deployment, "doctor", "--json")).out
    # The error's advice.
    client = await nats.connect(deployment.servers.nats.url)
    try:
        name = deployment.log.stream
        config = json.loads((await client.request(f"$JS.API.STREAM.INFO.{name}", timeout=10)).data)["config"]
        config["metadata"] |= before
        await client.request(f"$JS.API.STREAM.UPDATE.{name}", json.dumps(config).encode(), timeout=10)
    finally:
        await client.close()
    async with deployment.store() as store:
        assert len(await store.load_messages("t") or ()) == 2


async def test_a_command_with_another_schema_is_refused(deployment: Deployment) -> None:
    async with deployment.store(flusher=False) as store:
        await store.checkpoint("t", [said(0)], run_of("t"))
    refused = await cli(deployment, "flush", "--all", BUFSTORE_SCHEMA=fresh("empty"))
    assert (refused.code, "database is" in refused.err) == (2, True), refused
    assert (await cli(deployment, "flush", "--all")).code == 0


async def test_who_runs_while_an_empty_database_takes_the_place_of_the_logs_own_flushes_nothing_into_it(
    deployment: Deployment,
) -> None:
    """Regression: the flusher took the partitions in the tables that `setup` had made there, and went on in these."""
    dsn, away = deployment.servers.postgres.dsn, f"{deployment.name}_away"
    async with deployment.store() as store:
        await store.checkpoint("t", [said(0)], run_of("t"))
        await store.force_flush("t")
        await query(dsn, f"ALTER SCHEMA {deployment.name} RENAME TO {away}")
        refused = await cli(deployment, "setup")
        assert (refused.code, "flushed nothing of this log" in refused.err) == (2, True), refused
        with suppress(LogRolledBack):  # it may have noticed
            await store.checkpoint("t", [said(0), said(1)], run_of("t"))

        async def noticed() -> bool:
            return "flushed nothing of this log" in (await store.health()).write_trouble

        await eventually(noticed)
        for table in ("messages", "buffer_threads", "buffer_waiting"):
            assert await query(dsn, f"SELECT count(*) FROM {deployment.name}.{table}") == [(0,)]
        await query(dsn, f"DROP SCHEMA {deployment.name} CASCADE")
        await query(dsn, f"ALTER SCHEMA {away} RENAME TO {deployment.name}")

        async def goes_on() -> bool:
            with suppress(LogRolledBack):
                await store.checkpoint("t", [said(0), said(1)], run_of("t"))
                return (await store.health()).ok
            return False

        await eventually(goes_on, 60)
        await store.force_flush("t", timeout_s=60)
        assert await store.load_messages("t", consistency=Consistency.EVENTUAL) == [said(0), said(1)]


@pytest.mark.long  # two starts without Postgres
async def test_who_begins_in_an_outage_compares_log_and_database_once_postgres_is_back(own_servers: Servers) -> None:
    """Regression: without a flusher nobody did, and reads and appends built on another log's database."""
    deployment, another = Deployment(own_servers), Deployment(own_servers)
    for of, text in (deployment, "ours"), (another, "theirs"):
        async with of.store() as store:
            await store.checkpoint("t", [text], run_of("t"))
            await store.force_flush_all()
    async with another.store() as store:
        await store.checkpoint("u", ["theirs"], run_of("u"))
        await store.force_flush_all()
    own_servers.postgres.stop()
    deployment.verified = False
    async with deployment.store(another.inner(), flusher=False) as wrong, deployment.store(flusher=False) as right:
        assert all([(await store.health()).can_write for store in (wrong, right)])
        own_servers.postgres.start()

        async def noticed() -> bool:
            return "is not the one that the log is flushed into" in (await wrong.health()).write_trouble

        await eventually(noticed)
        with pytest.raises(ConfigDrift, match="database is"):
            await wrong.load_messages("u")
        with pytest.raises(LogRolledBack, match="database is"):
            await wrong.checkpoint("u", ["ours"], run_of("u"))
        assert await wrong.load_messages("t") == ["ours"]
        assert await right.load_messages("t") == ["ours"]
        assert await right.load_messages("u") is None


async def test_of_two_databases_that_begin_on_one_log_at_once_one_gets_it(deployment: Deployment) -> None:
    schemas = [deployment.name, fresh("second")]
    stores = [PostgresThreadStore(deployment.servers.postgres.dsn, schema=s, pool_size=2) for s in schemas]
    for store in stores:  # make the tables first, so that the two meet at the log
        async with store:
            await store.setup()
    stores = [PostgresThreadStore(deployment.servers.postgres.dsn, schema=s, pool_size=2) for s in schemas]
    opening = (
        BufferedThreadStore.open(s, nats=deployment.servers.nats.url, config=deployment.config()) for s in stores
    )
    ended = await asyncio.gather(*opening, return_exceptions=True)
    (winner,) = [e for e in ended if isinstance(e, BufferedThreadStore)]
    (refused,) = [e for e in ended if isinstance(e, ConfigDrift)]
    assert refused.field == "database"
    assert (await says(deployment, winner))["bufstore.target"] in str(refused)
    await winner.aclose()


async def test_windows_are_changed_from_the_command_line_and_both_may_open_meanwhile(deployment: Deployment) -> None:
    async with deployment.store() as store:
        assert "next" not in (await cli(deployment, "log", "show")).out
        for command in (("set", "--failover-window", 30), ("settle",)):  # of another log than the one that is named
            refused = await cli(deployment, "log", *command, "--bucket", "another")
            assert (refused.code, "another" in refused.err) == (2, True), refused
        assert "next" not in (await cli(deployment, "log", "show")).out
        begun = await cli(deployment, "log", "set", "--failover-window", 30, "--archive")
        assert (begun.code, "LogConfig(failover_window_s=30, archive=True)" in begun.out) == (0, True), begun
        assert "next failover window s" in (await cli(deployment, "log", "show")).out
        await store.buffer.log.fill()
        windows = store.buffer.log.windows
        assert (windows.keep_s, windows.rely_s, windows.archives) == (60.0, 30.0, True)
    changed = Deployment(deployment.servers)
    changed.name = deployment.name
    changed.log = dataclasses.replace(deployment.log, failover_window_s=30.0, archive=True)
    for one in (deployment, changed):
        async with one.store(flusher=False):
            pass
    settled = await cli(deployment, "log", "settle", "--json")
    assert (settled.json["failover_window_s"], settled.json["archive"]) == (30.0, True), settled
    assert (await cli(deployment, "log", "settle")).code == 2, "there is nothing to settle"
    assert (await cli(deployment, "log", "show", "--json")).json == settled.json
    async with changed.store(flusher=False):
        pass
    with pytest.raises(ConfigDrift, match="failover_window_s"):
        async with deployment.store():
            pass
