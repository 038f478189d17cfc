"""Our saver and LangGraph's own use the same tables, and each continues what the other has written."""

from __future__ import annotations

import asyncio
import enum
import itertools
from datetime import timedelta
from typing import Any

import pytest
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from langgraph.types import Command
from psycopg.conninfo import make_conninfo

from bufstore import BufferConfig, ConfigDrift, ConfigError, Consistency, LogRolledBack, StoreMisconfigured
from bufstore.buffer.lanes import lane_of
from bufstore.embedded import Servers
from bufstore.langgraph import AsyncBufferedSaver, PostgresCheckpointStore
from helpers import fresh, query
from langgraph_graphs import assistant, diary
from langgraph_savers import META, Place, checkpoint, command, config


@pytest.fixture
async def place(servers: Servers) -> Place:
    """Tables made by LangGraph's own saver."""
    place = Place(servers)
    await query(place.dsn, f"CREATE SCHEMA {place.schema}")
    async with place.plain() as plain:
        await plain.setup()
    return place


class Room(str, enum.Enum):  # noqa: UP042  (not as str() prints it)
    """Names of threads in an app."""

    LOBBY = "lobby"


async def _history(saver: BaseCheckpointSaver[str], thread_id: str) -> list[Any]:
    return [item async for item in saver.alist({"configurable": {"thread_id": thread_id}})]


async def _say(saver: BaseCheckpointSaver[str], thread_id: str) -> Any:
    return await assistant(saver).ainvoke({"said": ["user: hello"]}, config(thread_id))


async def _approve(saver: BaseCheckpointSaver[str], thread_id: str) -> Any:
    return await assistant(saver).ainvoke(Command(resume="yes"), config(thread_id))


async def test_a_graph_interrupted_there_is_resumed_here_and_the_other_way_round(place: Place) -> None:
    first, second = fresh(), fresh()
    async with place.plain() as plain:
        assert "__interrupt__" in await _say(plain, first)
    async with place.saver() as ours:
        resumed = await _approve(ours, first)
        assert resumed["approved"] == "yes"
        assert "__interrupt__" in await _say(ours, second)
    async with place.plain() as plain:
        again = await _approve(plain, second)
        assert again == resumed
        # Each saver continues where the other has ended.
        assert (await _say(plain, first))["turns"] == 2
    async with place.saver() as ours:
        assert (await _approve(ours, first))["approved"] == "yes"
        assert (await _say(ours, second))["turns"] == 2


async def _turn(saver: BaseCheckpointSaver[str], thread_id: str) -> int:
    shown = await saver.aget_tuple(config(thread_id))
    return shown.checkpoint["channel_values"]["turns"] if shown is not None else 0


async def test_threads_go_to_and_fro_while_a_deployment_rolls(place: Place) -> None:
    async with (
        place.plain() as plain,
        place.saver(consistency=Consistency.STRONG, flush=0.0) as one,
        place.saver(consistency=Consistency.STRONG, flush=0.0) as other,
    ):
        workers, thread_id = (plain, one, other), fresh()

        async def seen_by_all(saver: BaseCheckpointSaver[str], turn: int) -> None:
            if isinstance(saver, AsyncBufferedSaver):
                await saver.force_flush(thread_id)
            assert [await _turn(each, thread_id) for each in workers] == [turn] * 3

        for turn, (said, approved) in enumerate(itertools.permutations(workers, 2), 1):
            assert (await _say(said, thread_id))["turns"] == turn
            await seen_by_all(said, turn)
            assert (await _approve(approved, thread_id))["turns"] == turn
            await seen_by_all(approved, turn)
        for turn, saver in enumerate(workers, 100):
            await assistant(saver).aupdate_state(config(thread_id), {"turns": turn}, as_node="ask")
            await seen_by_all(saver, turn)
        for deletes, says in itertools.permutations(workers, 2):
            await deletes.adelete_thread(thread_id)
            await seen_by_all(deletes, 0)
            await _say(says, thread_id)
            await seen_by_all(says, 1)


async def test_a_thread_that_a_member_of_an_enum_names_is_the_one_that_the_other_has_written(place: Place) -> None:
    async with place.plain() as plain:
        await _say(plain, Room.LOBBY)
    async with place.saver() as ours:
        assert (await _approve(ours, Room.LOBBY))["approved"] == "yes"
        assert (await _say(ours, "lobby"))["turns"] == 2
        await ours.adelete_thread(Room.LOBBY)
        assert await ours.aget_tuple(config("lobby")) is None


async def test_both_read_the_same_of_what_either_has_written(place: Place) -> None:
    threads = fresh(), fresh()
    async with place.plain() as plain:
        await _say(plain, threads[0])
        await _approve(plain, threads[0])
    async with place.saver() as ours:
        await _say(ours, threads[1])
        await _approve(ours, threads[1])
        await ours.force_flush()
        async with place.plain() as plain:
            for thread_id in threads:
                history = await _history(plain, thread_id)
                assert len(history) > 5
                assert await _history(ours, thread_id) == history
                for item in history:
                    assert await ours.aget_tuple(item.config) == await plain.aget_tuple(item.config)


async def test_rows_are_byte_for_byte_those_of_the_other(place: Place) -> None:
    thread_ids = fresh(), fresh()
    put = checkpoint({"a": "1", "b": "1", "c": "1"}, {"a": [1, {"x": b"\0"}], "b": 2.5, "c": None})
    metadata: Any = {"source": "loop", "step": 1, "parents": {}, "writes": {"left": "out"}, "text": "a\0b"}
    async with place.plain() as plain, place.saver() as ours:
        for saver, thread_id in zip((plain, ours), thread_ids, strict=True):
            given = config(thread_id)
            given["metadata"] = {"run_id": "r", "x": 1}
            at = await saver.aput(given, put, metadata, {"a": "1", "b": "1", "c": "1"})
            await saver.aput_writes(at, [("a", [1]), ("b", None)], "task", "path")
            await saver.aput_writes(at, [("__interrupt__", "x")], "task", "path")
            await saver.aput_writes(at, [("__interrupt__", "y")], "task", "other")
            await saver.aput_writes(at, [("a", "second")], "task", "path")
        await ours.force_flush()
    for table in ("checkpoints", "checkpoint_blobs", "checkpoint_writes"):
        columns = [
            f"to_jsonb(t) - 'thread_id' FROM {place.schema}.{table} AS t WHERE thread_id = '{t}'" for t in thread_ids
        ]
        found = [sorted(map(str, await query(place.dsn, f"SELECT {c}"))) for c in columns]
        assert found[0] == found[1]
        assert found[0]


@pytest.mark.parametrize(("history", "checkpoints"), [("all", 17), ("run", 9), ("latest", 5)])
async def test_less_history_is_written_and_a_graph_goes_on_there(place: Place, history: str, checkpoints: int) -> None:
    """Two turns, each flushed at once: each flush keeps the newest checkpoint of the root and of the subgraphs."""
    thread_id, count = fresh(), f"SELECT count(*) FROM {place.schema}.checkpoints"
    async with place.saver(flush=0.0, history=history) as ours:
        for what in (_say, _approve, _say):
            before = await what(ours, thread_id)
            await ours.force_flush()
    assert await query(place.dsn, count) == [(checkpoints,)]
    async with place.plain() as plain:
        after = await _approve(plain, thread_id)
        assert after["said"][: len(before["said"])] == before["said"]
        assert after["turns"] == 2
    async with place.saver() as ours:
        assert await ours.aprune_idle(timedelta(days=1)) == []
        assert await ours.aprune_idle(timedelta(days=-1)) == [thread_id]
        assert (await _say(ours, thread_id))["turns"] == 3
        assert await ours.aprune_idle(timedelta(days=-1), strategy="delete") == [thread_id]
    assert await query(place.dsn, count) == [(0,)]


async def test_tables_that_we_make_are_those_that_they_make(place: Place, servers: Servers) -> None:
    ours = Place(servers)
    async with ours.saver():
        pass
    async with ours.plain() as plain:
        await plain.setup()  # finds nothing to migrate

    async def shape(of: Place) -> list[Any]:
        columns = await query(
            of.dsn,
            "SELECT table_name, column_name, data_type, is_nullable, column_default FROM information_schema.columns "
            "WHERE table_schema = %s AND table_name LIKE 'checkpoint%%' ORDER BY 1, 2",
            of.schema,
        )
        indexes = await query(
            of.dsn,
            "SELECT replace(indexdef, schemaname, '') FROM pg_indexes "
            "WHERE schemaname = %s AND tablename LIKE 'checkpoint%%' ORDER BY 1",
            of.schema,
        )
        return [*columns, *indexes, *await query(of.dsn, f"SELECT v FROM {of.schema}.checkpoint_migrations ORDER BY v")]

    assert await shape(ours) == await shape(place)


@pytest.mark.parametrize(
    ("change", "says"), [("INSERT INTO {} VALUES (10)", "upgrade"), ("DELETE FROM {} WHERE v = 9", "setup")]
)
async def test_tables_of_another_version_are_refused(place: Place, change: str, says: str) -> None:
    await query(place.dsn, change.format(f"{place.schema}.checkpoint_migrations"))
    with pytest.raises(ConfigError, match=says):
        async with place.saver():
            pass


@pytest.mark.parametrize("lane", [0, 1])
async def test_tables_that_are_gone_with_what_was_flushed_are_not_made_anew(servers: Servers, lane: int) -> None:
    """Regression: every thread was read as if it had never been, and a graph began it again."""
    place = Place(servers, lanes=2)
    thread_id = next(name for name in map(str, itertools.count()) if lane_of(name, place.log) == lane)
    async with place.saver() as saver:
        at = await saver.aput(config(thread_id), checkpoint({"a": "1"}, {"a": [1]}), META, {"a": "1"})
        await saver.force_flush()
    await query(place.dsn, f"ALTER SCHEMA {place.schema} RENAME TO {place.schema}_away")
    with pytest.raises(StoreMisconfigured, match="from one backup"):
        async with place.saver():
            pass
    (said,) = [c for c in (await command(place, "doctor", code=2))["checks"] if c["what"] == "LangGraph tables"]
    assert said["level"] == "bad"
    assert "from one backup" in said["found"]
    await command(place, "flush", code=None)
    stream = f"{place.log.stream}-1" if lane else place.log.stream
    await command(place, "repair", "--apply", "--stream", stream, code=2)
    made = "SELECT count(*) FROM pg_tables WHERE schemaname = %s"
    assert await query(place.dsn, made, place.schema) == [(0,)]
    await query(place.dsn, f"ALTER SCHEMA {place.schema}_away RENAME TO {place.schema}")
    async with place.saver() as saver:
        assert (await saver.aget_tuple(config(thread_id))).config == at  # type: ignore[union-attr]
        await saver.adelete_thread(thread_id)
        await saver.force_flush()
    await query(place.dsn, f"DROP SCHEMA {place.schema} CASCADE")
    async with place.saver() as saver:  # nothing is missing
        assert await saver.aget_tuple(config(thread_id)) is None


async def test_what_became_of_the_log_while_tables_were_made_counts(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a log that others had made, flushed and lost meanwhile was made again, and took writes."""
    place, making, go_on, setup = Place(servers), asyncio.Event(), asyncio.Event(), PostgresCheckpointStore.setup

    async def slow(self: PostgresCheckpointStore) -> None:
        if not making.is_set():
            making.set()
            await go_on.wait()
        await setup(self)

    async def late() -> None:
        async with place.saver(flusher=False):
            pass

    monkeypatch.setattr(PostgresCheckpointStore, "setup", slow)
    opening = asyncio.create_task(late())
    await making.wait()
    async with place.saver() as saver:
        await saver.aput(config(fresh()), checkpoint({"a": "1"}, {"a": [1]}), META, {"a": "1"})
        await saver.force_flush()
        await saver.engine.buffer.session.stream.api(f"STREAM.DELETE.{place.log.stream}")  # type: ignore[attr-defined]
    go_on.set()
    with pytest.raises(LogRolledBack):
        await opening


async def test_in_a_database_that_is_refused_no_tables_are_made(servers: Servers) -> None:
    """Regression: they were found when the buffer's schema was restored, and taken for those of its threads."""
    place, thread_id = Place(servers), fresh()
    async with place.saver() as saver:
        await saver.aput(config(thread_id), checkpoint({"a": "1"}, {"a": [1]}), META, {"a": "1"})
        await saver.force_flush()
    buffer = f"{place.schema}_b"
    for schema in (place.schema, buffer):
        await query(place.dsn, f"ALTER SCHEMA {schema} RENAME TO {schema}_away")
    with pytest.raises(ConfigDrift):
        async with place.saver():
            pass
    await query(place.dsn, f"DROP SCHEMA {buffer} CASCADE")
    await query(place.dsn, f"ALTER SCHEMA {buffer}_away RENAME TO {buffer}")
    with pytest.raises(StoreMisconfigured, match="from one backup"):
        async with place.saver():
            pass


class Unnamed(Place):
    """Opens savers as who only swaps the class: without the tables' schema."""

    def store(self, **options: Any) -> Any:
        return PostgresCheckpointStore(self.dsn, pool_size=4, buffer_schema="public_b", **options)


async def _elsewhere(place: Place) -> None:
    """Lead a place to `public` of a new database, whose search path names another schema first."""
    database, place.schema = place.schema, "public"
    await query(place.dsn, f"CREATE DATABASE {database}")
    without_path = make_conninfo(place.dsn, dbname=database)
    await query(without_path, "CREATE SCHEMA app")
    place.dsn = make_conninfo(without_path, options="-c search_path=app,public")


async def test_tables_that_langgraphs_own_saver_finds_elsewhere_are_not_passed_over(servers: Servers) -> None:
    """Regression: ours began anew in `public`, so every thread was read as if it had never been."""
    swapped, thread_id, versions = Unnamed(servers), fresh(), {"a": "1"}
    await _elsewhere(swapped)
    async with AsyncPostgresSaver.from_conn_string(swapped.dsn) as plain:
        await plain.setup()
        at = await plain.aput(config(thread_id), checkpoint(versions, {"a": [1]}), META, versions)
    for _ in range(2):  # the second time there are tables in `public`, too, which nobody has flushed into
        with pytest.raises(ConfigError, match=r"schema='app' .* or schema='public'"):
            async with swapped.saver():
                pass
        async with swapped.plain() as elsewhere:
            await elsewhere.setup()
    named = Place(servers)
    named.dsn, named.schema = swapped.dsn, "app"
    async with named.saver() as ours:
        found = await ours.aget_tuple(config(thread_id))
        assert found is not None
        assert found.config == at


async def test_who_names_public_means_it_and_what_was_begun_there_goes_on(servers: Servers) -> None:
    named, thread_id, versions = Place(servers), fresh(), {"a": "1"}
    await _elsewhere(named)
    async with AsyncPostgresSaver.from_conn_string(named.dsn) as plain:
        await plain.setup()
    async with named.saver() as ours:
        await ours.aput(config(thread_id), checkpoint(versions, {"a": [1]}), META, versions)
        await ours.adelete_thread(thread_id)
    begun = Unnamed(servers)
    begun.dsn, begun.log = named.dsn, named.log
    async with begun.saver() as ours:
        assert await ours.aget_tuple(config(thread_id)) is None


async def test_a_log_of_other_tables_is_refused(servers: Servers) -> None:
    place = Place(servers)
    async with place.saver():
        pass
    buffer_schema, place.schema = f"{place.schema}_b", f"{place.schema}_other"
    store = PostgresCheckpointStore(place.dsn, schema=place.schema, buffer_schema=buffer_schema)
    with pytest.raises(ConfigDrift, match=place.schema):
        await AsyncBufferedSaver.open(store, nats=place.nats, config=BufferConfig.fitting(place.log))


@pytest.mark.parametrize("history", ["all", "latest"])
async def test_a_delta_channel_is_rebuilt_from_its_history_on_either_side(place: Place, history: str) -> None:
    thread_id = fresh()
    entries: list[str] = []
    async with place.plain() as plain, place.saver(flush=0.0, history=history) as ours:
        for turn in range(8):
            saver: Any = plain if turn % 4 == 3 else ours
            result = await diary(saver).ainvoke({"entries": [f"turn {turn}"]}, config(thread_id))
            entries += [f"turn {turn}", f"entry {len(entries) + 1}", f"entry {len(entries) + 2}"]
            assert result["entries"] == entries
            assert (await diary(saver).aget_state(config(thread_id))).values["entries"] == entries
            await ours.force_flush()
        assert len(await _history(plain, thread_id)) == len(await _history(ours, thread_id)) == 32
