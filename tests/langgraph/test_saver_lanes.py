"""A saver with two lanes, on real servers: calls that concern threads of both, and what each lane has for itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from langchain_core.runnables import RunnableConfig

from bufstore.buffer.lanes import lane_of
from bufstore.embedded import Servers
from bufstore.errors import ConfigDrift, ThreadQuarantined
from bufstore.langgraph import AsyncBufferedSaver
from helpers import fresh, query
from langgraph_savers import Place, checkpoint, command, config


@pytest.fixture
def place(servers: Servers) -> Place:
    return Place(servers, lanes=2)


@pytest.fixture
async def saver(place: Place) -> AsyncIterator[AsyncBufferedSaver]:
    async with place.saver() as opened:
        yield opened


def thread_in(place: Place, lane: int) -> str:
    """Return a new thread's id that falls into this lane."""
    return next(name for name in iter(fresh, "") if lane_of(name, place.log) == lane)


async def put(saver: AsyncBufferedSaver, at: RunnableConfig, value: Any, run: str = "") -> RunnableConfig:
    metadata: Any = {"source": "loop", "step": 1, "parents": {}, "run_id": run}
    version = str(value)
    return await saver.aput(at, checkpoint({"a": version}, {"a": [value]}), metadata, {"a": version})


async def threads(saver: AsyncBufferedSaver) -> set[str]:
    return {found.config["configurable"]["thread_id"] async for found in saver.alist(None)}


async def test_threads_of_both_lanes_are_listed_copied_and_deleted_by_run(
    place: Place, saver: AsyncBufferedSaver
) -> None:
    here, there, copied = thread_in(place, 0), thread_in(place, 1), thread_in(place, 1)
    for name in (here, there):
        await put(saver, await put(saver, config(name), 1, "old"), 2, "new")
    assert await threads(saver) == {here, there}
    await saver.acopy_thread(here, copied)
    last = await saver.aget_tuple(config(copied))
    assert last is not None
    assert last.checkpoint["channel_values"] == {"a": [2]}
    await saver.adelete_for_runs(["old"])
    for name in (here, there, copied):
        assert [f.checkpoint["channel_values"] async for f in saver.alist(config(name))] == [{"a": [2]}]
    assert set(await saver.aprune_idle(timedelta(0), strategy="delete")) == {here, there, copied}
    assert await threads(saver) == set()
    for buffer in saver.engine.lanes.all:
        assert (await buffer.verify()).ok


async def test_each_thread_is_in_the_log_and_the_ledger_of_its_lane_alone(
    place: Place, saver: AsyncBufferedSaver
) -> None:
    names = [thread_in(place, lane) for lane in (0, 1)]
    for name in names:
        await put(saver, config(name), 1)
    await saver.force_flush()
    for name, ledger in zip(names, (f"{place.schema}_b", f"{place.schema}_b_lane1"), strict=True):
        assert await query(place.dsn, f"SELECT thread_id FROM {ledger}.buffer_threads") == [(name,)]
    async with place.plain() as plain:  # the tables are one
        assert {f.config["configurable"]["thread_id"] async for f in plain.alist(None)} == set(names)


async def test_an_entry_in_quarantine_stops_only_its_thread(place: Place, saver: AsyncBufferedSaver) -> None:
    good, bad = thread_in(place, 0), thread_in(place, 1)
    at = [await put(saver, config(name), 1) for name in (good, bad)]
    await saver.force_flush()
    constraint = f"{place.schema}.checkpoint_blobs ADD CONSTRAINT no CHECK (version <> '2' OR thread_id <> '{bad}')"
    await query(place.dsn, f"ALTER TABLE {constraint}")
    for each in at:
        await put(saver, await put(saver, each, 2, "parked"), 3, "behind")
    await saver.force_flush()
    with pytest.raises(ThreadQuarantined):
        await saver.aget_tuple(config(bad))
    assert await saver.aprune_idle(timedelta(0)) == [good]
    with pytest.raises(ThreadQuarantined):  # a replay would bring its checkpoint back
        await saver.adelete_for_runs(["parked"])
    assert [f.checkpoint["channel_values"] async for f in saver.alist(config(good))] == [{"a": [3]}]
    await query(place.dsn, f"ALTER TABLE {place.schema}.checkpoint_blobs DROP CONSTRAINT no")
    of_lane = ("--stream", f"{place.log.stream}-1")
    assert (await command(place, "quarantine", "list"))["entries"] == []
    assert (await command(place, "quarantine", "replay", "--all", *of_lane))["applied"] == 2
    found = await saver.aget_tuple(config(bad))
    assert found is not None
    assert found.checkpoint["channel_values"] == {"a": [3]}


@pytest.mark.long
async def test_commands_flush_all_lanes_and_look_at_each(place: Place) -> None:
    async with place.saver(flusher=False) as saver:
        for lane in (0, 1):
            await put(saver, config(thread_in(place, lane)), 1)
        assert (await command(place, "flush", "--all"))["flushed_here"]
        assert await query(place.dsn, f"SELECT count(*) FROM {place.schema}.checkpoints") == [(2,)]
        for number, stream in enumerate((place.log.stream, f"{place.log.stream}-1")):
            of_lane = ("--stream", stream)
            status = await command(place, "status", *of_lane, code=None)
            assert (status["lane"], status["lanes"]) == (number, 2)
            assert (await command(place, "verify", *of_lane))["findings"] == []
            assert len((await command(place, "log", "entries", *of_lane))["entries"]) == 1


@pytest.mark.long
async def test_a_lane_that_went_back_is_repaired_by_itself(place: Place) -> None:
    here, there = thread_in(place, 0), thread_in(place, 1)
    async with place.saver() as saver:
        at = [await put(saver, config(name), 1) for name in (here, there)]
        await saver.force_flush()
    async with place.saver(flusher=False) as saver:
        for each in at:
            await put(saver, each, 2)
    # Restore the second lane's ledger to a state before the first entry.
    for table in ("checkpoints", "checkpoint_blobs"):
        await query(place.dsn, f"DELETE FROM {place.schema}.{table} WHERE thread_id = '{there}'")
    lane = f"{place.schema}_b_lane1"
    await query(place.dsn, f"DELETE FROM {lane}.buffer_threads")
    await query(place.dsn, f"UPDATE {lane}.buffer_partitions SET cursor_seq = cursor_seq + 1000")
    of_lane = ("--stream", f"{place.log.stream}-1")
    assert (await command(place, "repair"))["reason"] is None
    assert (await command(place, "repair", "--apply", *of_lane))["applied"] == 2
    async with place.saver() as saver:
        for name in (here, there):
            found = await saver.aget_tuple(config(name))
            assert found is not None
            assert found.checkpoint["channel_values"] == {"a": [2]}


async def test_how_many_lanes_there_are_is_fixed(place: Place) -> None:
    async with place.saver():
        pass
    place.log = replace(place.log, lanes=1)
    with pytest.raises(ConfigDrift, match="lanes"):
        async with asyncio.timeout(20), place.saver():
            pass
