"""Several logs in front of one store, on real servers; `tests/unit/test_lanes.py` has the tests without servers."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
from collections.abc import Callable

import pytest
from psycopg.conninfo import make_conninfo

from bufstore import (
    ConfigDrift,
    ConfigError,
    Consistency,
    LogConfig,
    LogRolledBack,
    LogUnavailable,
    PostgresThreadStore,
    repair,
)
from bufstore.buffer.lanes import lane_configs, lane_of
from bufstore.testing import CHECKS
from command_line import Result, bufstore_cli, where
from conftest import Deployment
from helpers import eventually, fresh, query, run_of, said
from integration.test_quarantine import picky, poisoned
from thorough import seldom


@pytest.fixture
def laned(deploy: Callable[..., Deployment]) -> Deployment:
    return deploy(lanes=2, max_bytes=64 << 20)


def in_lane(deployment: Deployment, lane: int) -> str:
    """Return a new thread id that belongs to this lane."""
    return next(name for _ in range(1000) if lane_of(name := fresh(), deployment.log) == lane)


def with_log(deployment: Deployment, log: LogConfig) -> Deployment:
    """Return the deployment with another log configuration."""
    other = copy.copy(deployment)
    other.log = log
    return other


async def cli(deployment: Deployment, *arguments: object, stream: str | None = None) -> Result:
    named = {"BUFSTORE_STREAM": stream} if stream is not None else {}
    return await asyncio.to_thread(bufstore_cli, *arguments, **(where(deployment) | named))


@pytest.mark.long  # the same contract; `tests/unit/test_lanes.py` has it without servers
async def test_a_store_of_two_lanes_keeps_the_contract(laned: Deployment) -> None:
    async with laned.store() as store, laned.store(consistency=Consistency.STRONG, flusher=False) as strong:
        for check in CHECKS:
            await check(store)
        for check in CHECKS[::8]:
            await check(strong)
        moved = [buffer.flusher.state.entries for buffer in store.lanes.all if buffer.flusher is not None]
    assert all(moved)
    for schema in (laned.name, f"{laned.name}_lane1"):
        assert (await query(laned.servers.postgres.dsn, f"SELECT count(*) FROM {schema}.buffer_threads"))[0][0] > 0


async def test_a_new_process_reads_what_is_flushed_and_what_is_not_from_the_lane_of_the_thread(
    laned: Deployment,
) -> None:
    threads = [in_lane(laned, lane) for lane in (0, 1, 1, 0)]
    runs = {t: run_of(t) for t in threads}
    async with laned.store() as store:
        for t in threads:
            await store.checkpoint(t, [said(0)], runs[t])
        await store.force_flush_all()
    async with laned.store(flusher=False) as store:
        for t in threads:
            await store.checkpoint_append(t, [said(1)], runs[t], expected_version=1)
    async with laned.store(flusher=False) as reader:
        for t in threads:
            assert await reader.load_messages(t) == [said(0), said(1)]
            assert await reader.load_messages(t, consistency=Consistency.EVENTUAL) == [said(0)]
            assert await reader.load_run(runs[t].run_id) == runs[t]
        async with laned.store():
            assert {t.thread_id for t in (await reader.query_threads()).threads} == set(threads)
            for t in threads:
                assert await reader.load_messages(t, consistency=Consistency.STRONG) == [said(0), said(1)]


async def test_how_many_lanes_there_are_is_fixed(laned: Deployment) -> None:
    async with laned.store():
        pass
    for lanes in (1, 3):
        with pytest.raises(ConfigDrift, match="lanes is '2'"):
            async with with_log(laned, dataclasses.replace(laned.log, lanes=lanes)).store():
                pass
    second = lane_configs(laned.config())[1].log
    with pytest.raises(ConfigError, match="lane 1 of 2"):
        async with with_log(laned, second).store():
            pass
    # Open the second lane as if it were a log of its own.
    with pytest.raises(ConfigDrift, match="lanes is '2'"):
        async with with_log(laned, dataclasses.replace(second, lanes=1, lane=0)).store():
            pass


async def test_a_log_that_has_no_lanes_gets_none(deployment: Deployment) -> None:
    async with deployment.store():
        pass
    with pytest.raises(ConfigDrift, match="lanes is '1'"):
        async with with_log(deployment, dataclasses.replace(deployment.log, lanes=2)).store():
            pass


@pytest.mark.long  # fifteen seconds
@pytest.mark.parametrize("by", ["command", *seldom("call")])
async def test_a_lane_that_is_gone_stops_no_other_and_is_repaired_by_itself(laned: Deployment, by: str) -> None:
    laned.verified = False
    well, ill = in_lane(laned, 0), in_lane(laned, 1)
    second = lane_configs(laned.config())[1].log.stream
    async with laned.store() as store:
        for t in (well, ill):
            await store.checkpoint(t, [said(0)], run_of(t))
        await store.force_flush_all()
        await store.lanes.all[1].session.stream.api(f"STREAM.DELETE.{second}")
        with pytest.raises((LogUnavailable, LogRolledBack)):
            await store.checkpoint(ill, [said(1)], run_of(ill, 1))
        await store.checkpoint(well, [said(1)], run_of(well, 1))
        await store.force_flush(well)

        async def named() -> bool:
            return (await store.health()).write_trouble.startswith("lane 1: ")

        await eventually(named)
    with pytest.raises(LogRolledBack, match=second):
        async with laned.store():
            pass
    if by == "command":
        whole = await cli(laned, "repair", "--json")
        assert (whole.code, whole.json["reason"]) == (0, None), whole
        for command in (("repair", "--apply"), ("status",)):
            unnamed = await cli(laned, *command, stream=second)
            assert (unnamed.code, "repair --lane" in unnamed.err) == (2, True), unnamed
        wrong = await cli(laned, "repair", "--lane", 2, stream=second)
        assert (wrong.code, "no ledger of lane 2" in wrong.err) == (2, True), wrong
        schemas = "SELECT 1 FROM pg_namespace WHERE nspname = '{}_lane2'"
        assert not await query(laned.servers.postgres.dsn, schemas.format(laned.name))
        doctor = await cli(laned, "doctor", "--json", stream=second)
        assert [c["level"] for c in doctor.json["checks"] if (c["part"], c["what"]) == ("Postgres", "log")] == [
            "unknown"
        ]
        repaired = await cli(laned, "repair", "--apply", "--json", "--lane", 1, stream=second)
        assert (repaired.code, repaired.json["done"]) == (0, True), repaired
    else:
        nats, config = laned.servers.nats.url, laned.config()
        with pytest.raises(ConfigError, match="no lane 2"):
            await repair(laned.inner(), nats=nats, config=config, lane=2)
        assert (await repair(laned.inner(), nats=nats, config=config)).reason is None
        assert (await repair(laned.inner(), nats=nats, config=config, lane=1, apply=True)).done
    async with laned.store() as store:
        assert await store.load_messages(ill) == [said(0)]
        await store.checkpoint(ill, [said(2)], run_of(ill, 2))
        await store.force_flush_all()
        assert (await store.verify()).ok
    looked = await cli(laned, "doctor", "--json", stream=second)
    logs = [check for check in looked.json["checks"] if check["what"] == "log"]
    assert [(check["part"], check["level"]) for check in logs] == [("Postgres, lane 1", "ok")]


async def test_the_self_check_sees_the_damage_of_each_lane(laned: Deployment) -> None:
    laned.verified = False
    async with laned.store() as store:
        threads = [in_lane(laned, lane) for lane in (0, 1)]
        for t in threads:
            await store.checkpoint(t, [said(0), said(1)], run_of(t))
        await store.force_flush_all()
        assert (await store.verify()).ok
        for broken, t in enumerate(threads, 1):
            await query(laned.servers.postgres.dsn, f"DELETE FROM {laned.name}.messages WHERE thread_id = %s", t)
            found = await store.verify()
            assert (found.wrong, found.partitions) == (broken, 16), found


@pytest.mark.long
async def test_commands_look_at_one_lane_and_flush_all(laned: Deployment) -> None:
    threads = [in_lane(laned, lane) for lane in (0, 1, 1)]
    second = lane_configs(laned.config())[1].log.stream
    async with laned.store(flusher=False) as store:
        for t in threads:
            await store.checkpoint(t, [said(0)], run_of(t))
        for stream, lane, entries in ((laned.log.stream, 0, 1), (second, 1, 2)):
            status = (await cli(laned, "status", "--json", stream=stream)).json
            assert (status["lane"], status["lanes"], status["lag"]) == (lane, 2, entries)
        shown = await cli(laned, "status", stream=second)
        assert "lane 1 of 2" in shown.out
        refused = await cli(laned, "flush", "--all", stream=second)
        assert (refused.code, "lane 1 of 2" in refused.err) == (2, True), refused
        flushed = await cli(laned, "flush", threads[1], "--json")
        assert (flushed.code, flushed.json["flushed_here"]) == (0, True), flushed
        assert await store.load_messages(threads[1], consistency=Consistency.EVENTUAL) == [said(0)]
        flushed = await cli(laned, "flush", "--all", "--json")
        assert flushed.code == 0, flushed
        for t in threads:
            assert await store.load_messages(t, consistency=Consistency.EVENTUAL) == [said(0)]
        for stream in (laned.log.stream, second):
            assert (await cli(laned, "verify", "--json", stream=stream)).json["ok"] is True


async def test_poison_goes_to_the_quarantine_of_its_lane(laned: Deployment) -> None:
    ill = in_lane(laned, 1)
    second = lane_configs(laned.config())[1].log.stream
    async with laned.store(picky(laned)) as store:
        await poisoned(store, ill)
        assert await store.lanes.all[0].quarantine.count() == 0
        assert (await store.quarantined(), await store.quarantine_of(ill).count()) == (3, 3)
        for stream, count in ((laned.log.stream, 0), (second, 3)):
            listed = await cli(laned, "quarantine", "list", "--json", stream=stream)
            assert len(listed.json["entries"]) == count


async def test_setup_migrates_all_lanes_before_their_ledgers_say_how_many_there_are(laned: Deployment) -> None:
    dsn, schemas = laned.servers.postgres.dsn, [laned.name, f"{laned.name}_lane1"]
    async with laned.store():
        pass
    laned.verified = False
    for schema in schemas:  # the tables of the release before
        await query(dsn, f"ALTER TABLE {schema}.buffer_log DROP COLUMN lanes, DROP COLUMN partitions")
        await query(dsn, f"DROP TABLE {schema}.buffer_erasures")
        await query(dsn, f"DELETE FROM {schema}.bufstore_migrations WHERE room = 'buffer' AND version = 9")
    shown = await cli(laned, "setup", "--sql")
    assert shown.out.count("-- buffer 0009") == 2, shown
    made = await cli(laned, "setup", "--own-store", "--json")
    assert (made.json["migrated"], made.json["lanes"]) == ({"buffer": [9]}, {schemas[1]: {"buffer": [9]}})


async def test_setup_makes_all_lanes_so_that_an_app_needs_no_rights(laned: Deployment) -> None:
    dsn, app = laned.servers.postgres.dsn, f"app_{laned.name}"
    await query(dsn, f"CREATE ROLE {app} LOGIN PASSWORD 'right'")
    try:
        log = ("--subject", laned.log.subject, "--max-bytes", 64 << 20, "--lanes", 2)
        made = await cli(laned, "setup", "--grant", app, *log, "--json")
        assert (made.code, list(made.json["lanes"])) == (0, [f"{laned.name}_lane1"]), made
        again = await cli(laned, "setup", "--grant", app, *log, "--json")
        assert again.json["lanes"] == {f"{laned.name}_lane1": {"buffer": []}}
        other = await cli(laned, "setup", "--lanes", 4)
        assert (other.code, "lanes is '2'" in other.err) == (2, True), other
        made = await query(dsn, "SELECT 1 FROM pg_namespace WHERE nspname = %s", f"{laned.name}_lane2")
        assert not made, "what is refused makes nothing"
        nothing = await cli(laned, "setup", "--sql", "--lanes", 2)
        assert nothing.out == "-- Nothing is missing.\n"
        more = await cli(laned, "setup", "--sql", "--lanes", 3)
        assert (more.code, "lanes is '2'" in more.err) == (2, True), more
        inner = PostgresThreadStore(make_conninfo(dsn, user=app, password="right"), schema=laned.name, pool_size=2)
        async with laned.store(inner) as store:
            for lane in (0, 1):
                t = in_lane(laned, lane)
                await store.checkpoint(t, [said(0)], run_of(t))
                await store.force_flush(t)
        # The first lane's ledger says how many lanes there are.
        laned.verified = False
        await query(dsn, f"DROP SCHEMA {laned.name}_lane1 CASCADE")
        lost = await cli(laned, "setup", "--sql")
        assert f"{laned.name}_lane1" in lost.out
        assert "-- threads 0001" not in lost.out
        assert f"{laned.name}_lane1" in (await cli(laned, "setup", "--own-store", "--json")).json["lanes"]
    finally:
        await query(dsn, f"DROP OWNED BY {app} CASCADE")
        await query(dsn, f"DROP ROLE {app}")


async def test_a_lane_with_the_bucket_of_another_log_stops_all_before_a_log_is_made(
    laned: Deployment, deployment: Deployment
) -> None:
    """A log that was made first would keep the names of its buckets, and the error's advice would not help."""
    own = laned.log
    laned.log = dataclasses.replace(own, bucket=fresh("hot"))
    taken = with_log(deployment, dataclasses.replace(deployment.log, bucket=lane_configs(laned.config())[1].log.bucket))
    async with taken.store(flusher=False):
        pass
    with pytest.raises(ConfigDrift, match=rf"bucket {taken.log.bucket}: log is '{taken.log.stream}'"):
        async with laned.store():
            pass
    laned.log = own  # the error's advice
    async with laned.store(flusher=False):
        pass


@pytest.mark.parametrize("lane", [0, 1])
async def test_any_lost_lane_of_any_layout_is_repaired_by_the_command(
    deploy: Callable[..., Deployment], lane: int
) -> None:
    """Regression: the command took the lane for the last of a log with the default number of partitions."""
    laned = deploy(lanes=3, partitions=4, max_bytes=96 << 20)
    laned.verified = False
    stream, thread_id = lane_configs(laned.config())[lane].log.stream, in_lane(laned, lane)
    async with laned.store() as store:
        await store.checkpoint(thread_id, [said(0)], run_of(thread_id))
        await store.force_flush_all()
        await store.lanes.all[lane].session.stream.api(f"STREAM.DELETE.{stream}")
    other = await cli(laned, "repair", "--lane", lane, stream=lane_configs(laned.config())[1 - lane].log.stream)
    assert (other.code, f"is lane {1 - lane} of 3: name the stream of lane {lane}" in other.err) == (2, True), other
    shown = await cli(laned, "repair", "--lane", lane, stream=stream)
    if lane:
        first = await cli(laned, "doctor", "--json")
        wrong = [c["found"] for c in first.json["checks"] if c["what"] == f"lane {lane}"]
        assert (first.code, wrong) == (2, [f"there is no {stream}"]), first
    again = f"repair --stream {stream} --bucket {laned.log.bucket} --schema {laned.name} --lane {lane} --apply"
    assert (shown.code, again in shown.out) == (1, True), shown
    repaired = await cli(laned, "repair", "--apply", "--json", "--lane", lane, stream=stream)
    assert (repaired.code, repaired.json["done"]) == (0, True), repaired
    async with laned.store() as store:
        assert await store.load_messages(thread_id) == [said(0)]
        await store.checkpoint(thread_id, [said(0), said(1)], run_of(thread_id, 1))
        await store.force_flush_all()
        assert (await store.verify()).ok
