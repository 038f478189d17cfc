"""The command line on a log of LangGraph's checkpoints, as an operator uses it."""

from __future__ import annotations

from typing import Any

import nats
import pytest
from langchain_core.runnables import RunnableConfig
from psycopg.conninfo import make_conninfo

from bufstore.buffer.append.tip import Tip
from bufstore.embedded import Servers
from bufstore.errors import ThreadQuarantined
from bufstore.langgraph.domain import Known
from bufstore.langgraph.postgres.store import MIGRATION
from helpers import eventually, fresh, query
from langgraph_savers import META, Place, checkpoint, command, config
from thorough import seldom


async def _count(place: Place) -> int:
    return int((await query(place.dsn, f"SELECT count(*) FROM {place.schema}.checkpoints"))[0][0])


async def test_a_log_is_looked_at_flushed_and_verified(servers: Servers) -> None:
    place = Place(servers)
    async with place.saver(flusher=False) as saver:
        for _ in range(3):
            await saver.aput(config(fresh()), checkpoint({"a": "1"}, {"a": [1]}), META, {"a": "1"})
        assert (await command(place, "status", code=1))["members"] == []
        assert await _count(place) == 0
        flushed = await command(place, "flush", "--all")
        assert flushed["flushed_here"]
        assert await _count(place) == 3
        assert (await command(place, "verify"))["findings"] == []
        shown = await command(place, "log", "show")
        assert (shown["stream"], shown["store"]) == (place.log.stream, f"bufstore.langgraph.postgres:{place.schema}")
        assert (await command(place, "repair"))["reason"] is None


@pytest.mark.parametrize("arguments", [("setup",), *seldom(("erase", "a thread"))])
async def test_commands_for_threads_of_messages_leave_this_log_alone(
    servers: Servers, arguments: tuple[str, ...]
) -> None:
    place = Place(servers)
    async with place.saver() as saver:
        at = await saver.aput(config("a thread"), checkpoint({"a": "1"}, {"a": [1]}), META, {"a": "1"})
        assert (await command(place, *arguments, code=2))["error"] == "ConfigDrift"
        assert await saver.aget_tuple(at) is not None
        assert (await command(place, "verify"))["findings"] == []


async def test_what_is_in_quarantine_is_listed_and_replayed(servers: Servers) -> None:
    place, bad = Place(servers), fresh()
    async with place.saver() as saver:
        await saver.aput(config(bad), checkpoint({"a": "1"}, {"a": [1]}), META, {"a": "1"})
        await saver.force_flush()
        constraint = f"{place.schema}.checkpoint_blobs ADD CONSTRAINT no CHECK (version <> '2')"
        await query(place.dsn, f"ALTER TABLE {constraint}")
        await saver.aput(config(bad), checkpoint({"a": "2"}, {"a": [2]}), META, {"a": "2"})
        await saver.force_flush()
        (entry,) = (await command(place, "quarantine", "list"))["entries"]
        assert entry["thread_id"] == bad
        shown = await command(place, "quarantine", "show", str(entry["seq"]))
        assert [c["version"] for c in shown["operation"]["channels"]] == ["2"]
        await query(place.dsn, f"ALTER TABLE {place.schema}.checkpoint_blobs DROP CONSTRAINT no")
        replayed = await command(place, "quarantine", "replay", "--all")
        assert replayed["applied"] == 1
        assert await _count(place) == 2
        assert (await saver.aget_tuple(config(bad))) is not None


@pytest.mark.long
async def test_what_stands_behind_an_outdated_entry_is_shown_and_given_up(servers: Servers) -> None:
    """The entry was written after others had moved on: no replay may apply it, and the thread goes on without it."""
    place, thread_id = Place(servers), fresh()
    async with place.saver() as saver:

        async def put(at: RunnableConfig, version: str) -> tuple[RunnableConfig, Tip[Known]]:
            made = checkpoint({"a": version}, {"a": [version]})
            at = await saver.aput(at, made, META, {"a": version})
            tip = saver.engine.buffer.appender.tip(thread_id)
            assert tip is not None
            return at, tip

        async def value() -> Any:
            found = await saver.aget_tuple(config(thread_id))
            return found.checkpoint["channel_values"]["a"] if found is not None else None

        at, first = await put(config(thread_id), "1")
        at, last = await put(at, "2")
        last.id = first.id
        at, _ = await put(at, "3")
        await put(at, "4")
        await saver.force_flush()
        parked = (await command(place, "quarantine", "list"))["entries"]
        assert [entry["cause"] for entry in parked] == ["its predecessor is not applied"] * 2
        with pytest.raises(ThreadQuarantined):
            await value()
        replayed = await command(place, "quarantine", "replay", thread_id, code=1)
        assert (replayed["applied"], {one["outcome"] for one in replayed["left"]}) == (0, {"waits"})
        seqs = [str(entry["seq"]) for entry in parked]
        shown = [await command(place, "quarantine", "show", seq) for seq in seqs]
        assert [entry["operation"]["channels"][0]["version"] for entry in shown] == ["3", "4"]
        assert (await command(place, "repair", code=None))["reason"] is None
        await command(place, "quarantine", "discard", *seqs)
        assert await value() == ["2"]
        await put(config(thread_id), "5")
        await saver.force_flush()
        assert await value() == ["5"]
        assert (await command(place, "verify"))["findings"] == []


async def test_the_logs_entries_say_what_they_do(servers: Servers) -> None:
    place, thread_id, copied = Place(servers), fresh(), fresh()
    async with place.saver() as saver:
        at = await saver.aput(config(thread_id), checkpoint({"a": "1"}, {"a": [1]}), META, {"a": "1"})
        await saver.aput_writes(at, [("a", 1)], "task")
        await saver.acopy_thread(thread_id, copied)
        last = await saver.aput(at, checkpoint({"a": "2"}, {"a": [2]}), META, {"a": "2"})
        await saver.aprune([thread_id], strategy="keep_latest")
        await saver.adelete_thread(thread_id)
    entries = (await command(place, "log", "entries", "--payload"))["entries"]
    kinds = [e["kind"] for e in entries]
    assert kinds == ["put", "writes", "rows", "put", "drop", "delete"]
    put, writes, rows, _, drop, delete = (e["payload"]["operation"] for e in entries)
    first_id = at["configurable"]["checkpoint_id"]
    for operation in (put, rows):
        (shown,) = operation["checkpoints"]
        assert (shown["namespace"], shown["checkpoint_id"], shown["parent_checkpoint_id"]) == ("", first_id, None)
        assert shown["metadata"]["source"] == "loop"
        assert operation["channels"] == [{"namespace": "", "channel": "a", "version": "1"}]
    assert [(w["checkpoint_id"], w["task_id"], w["channel"]) for w in writes["writes"]] == [(first_id, "task", "a")]
    assert [c["checkpoint_id"] for c in drop["checkpoints"]] == [first_id] != [last["configurable"]["checkpoint_id"]]
    assert delete == {"kind": "delete"}


async def test_a_log_that_lost_its_end_is_repaired(servers: Servers) -> None:
    place, thread_id = Place(servers), fresh()
    async with place.saver() as saver:
        at = await saver.aput(config(thread_id), checkpoint({"a": "1"}, {"a": [1]}), META, {"a": "1"})
        await saver.force_flush()
    async with place.saver(flusher=False) as saver:
        await saver.aput(at, checkpoint({"a": "2"}, {"a": [2]}), META, {"a": "2"})
    # Restore Postgres to a state before the first entry.
    for table in ("checkpoints", "checkpoint_blobs"):
        await query(place.dsn, f"DELETE FROM {place.schema}.{table}")
    await query(place.dsn, f"DELETE FROM {place.schema}_b.buffer_threads")
    await query(place.dsn, f"UPDATE {place.schema}_b.buffer_partitions SET cursor_seq = cursor_seq + 1000")
    found = await command(place, "repair", code=1)
    assert found["reason"]
    assert found["applied"] == 2
    assert (await command(place, "repair", "--apply"))["done"]
    assert await _count(place) == 2
    async with place.saver() as saver:
        shown = await saver.aget_tuple(config(thread_id))
        assert shown is not None
        assert shown.checkpoint["channel_values"] == {"a": [2]}


@pytest.mark.long
async def test_the_doctor_sees_what_keeps_langgraphs_tables_from_being_written(servers: Servers) -> None:
    place, mine, user = Place(servers), Place(servers), fresh("u").replace("-", "_")

    async def checks() -> dict[str, dict[str, str]]:
        found = await command(mine, "doctor", code=None)
        return {f"{c['part']} {c['what']}": c for c in found["checks"]}

    async with place.saver():
        pass
    await query(place.dsn, f"CREATE ROLE {user} LOGIN PASSWORD 'x'")
    try:
        for schema, rights in (place.schema, "SELECT"), (f"{place.schema}_b", "ALL"):
            await query(place.dsn, f"GRANT USAGE ON SCHEMA {schema} TO {user}")
            await query(place.dsn, f"GRANT {rights} ON ALL TABLES IN SCHEMA {schema} TO {user}")
        mine.schema, mine.log, mine.dsn = place.schema, place.log, make_conninfo(place.dsn, user=user, password="x")
        async with mine.saver() as saver:
            await saver.aput(config(fresh()), checkpoint({"a": "1"}, {"a": [1]}), META, {"a": "1"})
            await eventually(saver.engine.buffer.shared.troubles, 30)
            await eventually(lambda: query(place.dsn, f"SELECT 1 FROM {place.schema}_b.buffer_waiting"), 30)
            found = await checks()
            assert found["Postgres LangGraph permissions"]["level"] == "bad", found
            assert "INSERT on checkpoint_writes" in found["Postgres LangGraph permissions"]["found"]
            assert found["Postgres waiting entries"]["level"] == found["NATS flushing"]["level"] == "warning", found
            await query(place.dsn, f"GRANT ALL ON ALL TABLES IN SCHEMA {place.schema} TO {user}")
            await saver.force_flush()
            found = await checks()
            assert found["Postgres LangGraph permissions"]["level"] == found["Postgres log"]["level"] == "ok", found
            assert found["Postgres waiting entries"]["found"] == "none"
            assert found["Postgres LangGraph tables"]["level"] == "ok"
            await query(place.dsn, f"INSERT INTO {place.schema}.checkpoint_migrations VALUES ({MIGRATION + 1})")
            found = await checks()
            assert found["Postgres LangGraph tables"]["level"] == "bad", found
    finally:
        for schema in (place.schema, f"{place.schema}_b"):
            await query(place.dsn, f"REVOKE ALL ON ALL TABLES IN SCHEMA {schema} FROM {user}")
            await query(place.dsn, f"REVOKE ALL ON SCHEMA {schema} FROM {user}")
        await query(place.dsn, f"DROP ROLE {user}")


@pytest.mark.long
async def test_a_log_that_is_gone_is_begun_anew(servers: Servers) -> None:
    place, thread_id = Place(servers), fresh()
    async with place.saver() as saver:
        at = await saver.aput(config(thread_id), checkpoint({"a": "1"}, {"a": [1]}), META, {"a": "1"})
        await saver.force_flush()
    client = await nats.connect(place.nats)
    await client.jetstream().delete_stream(place.log.stream)
    await client.close()
    assert (await command(place, "repair", code=1))["reason"]
    assert (await command(place, "repair", "--apply"))["done"]
    async with place.saver() as saver:
        shown = await saver.aget_tuple(at)
        assert shown is not None
        assert shown.checkpoint["channel_values"] == {"a": [1]}
