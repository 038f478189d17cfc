"""Several processes on the same threads: what one deletes, leaves out or does not know takes no value from another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any

import pytest
from langgraph.checkpoint.memory import InMemorySaver

from bufstore.embedded import Servers
from bufstore.errors import ConcurrentWriter
from bufstore.langgraph import AsyncBufferedSaver
from helpers import fresh
from langgraph_savers import META, Place, checkpoint, config
from unit.fake_log import run


def values(found: Any) -> dict[str, Any] | None:
    return found and dict(found.checkpoint["channel_values"])


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


async def two(stack: AsyncExitStack, **options: Any) -> tuple[AsyncBufferedSaver, AsyncBufferedSaver]:
    """Open two processes that flush nothing by themselves."""
    place = Place(None)
    return tuple([await stack.enter_async_context(place.saver(flush=0, **options)) for _ in range(2)])  # type: ignore[return-value]


async def put(saver: AsyncBufferedSaver, at: Any, versions: Any, held: Any, new: Any, **meta: Any) -> Any:
    return await saver.aput(at, checkpoint(versions, held), META | meta, new)


@pytest.mark.parametrize("real", [False, True])
async def test_behind_a_deletion_the_newest_that_is_left_is_read(servers: Servers, real: bool) -> None:
    """Postgres was once asked for the newest only, which the tail deletes: the next run would have started empty."""
    place, t = Place(servers if real else None), fresh()
    async with place.saver(flush=0) as one, place.saver(flush=0) as other:
        first = await put(one, config(t), {"a": "1"}, {"a": [1]}, {"a": "1"}, run_id="r1")
        await put(one, first, {"a": "2"}, {"a": [2]}, {"a": "2"}, run_id="r2")
        await one.adelete_for_runs(["r2"])
        for saver in (one, other):
            assert values(await saver.aget_tuple(config(t))) == {"a": [1]}
        await one.adelete_for_runs(["r1"])
        for saver in (one, other):
            assert await saver.aget_tuple(config(t)) is None


@pytest.mark.parametrize("history", ["run", "latest", "all"])
async def test_a_fork_has_what_its_parent_held_though_that_was_left_out(stack: AsyncExitStack, history: str) -> None:
    """Another process saved on the same parent, and one flush had both: the parent goes, with the values it brought."""
    (one, other), t = await two(stack, history=history), fresh()
    parent = await put(one, config(t), {"x": "1", "y": "1"}, {"x": ["X"], "y": ["Y"]}, {"x": "1", "y": "1"})
    await other.aget_tuple(parent)
    await put(other, parent, {"x": "2", "y": "1"}, {"x": ["other"], "y": ["Y"]}, {"x": "2"})
    await one.force_flush(t)
    fork = await put(one, parent, {"x": "1", "y": "3"}, {"x": ["X"], "y": ["one"]}, {"y": "3"})
    for _ in range(2):
        for saver, named in ((one, fork), (other, config(t))):
            assert values(await saver.aget_tuple(named)) == {"x": ["X"], "y": ["one"]}
        await one.force_flush(t)


@pytest.mark.parametrize("history", ["run", "latest"])
async def test_checkpoints_that_are_saved_side_by_side_each_have_all(stack: AsyncExitStack, history: str) -> None:
    (one, other), t = await two(stack, history=history), fresh()
    parent = await put(one, config(t), {"x": "1", "y": "1"}, {"x": ["X"], "y": ["Y"]}, {"x": "1", "y": "1"})
    made = [checkpoint({"x": "1", "y": str(n)}, {"x": ["X"], "y": [n]}) for n in (2, 3)]
    left, right = await asyncio.gather(*(one.aput(parent, c, META, {"y": c["channel_versions"]["y"]}) for c in made))
    await one.force_flush(t)
    for n, at in ((2, left), (3, right)):
        z = str(n)
        behind = await put(one, at, {"x": "1", "y": str(n), "z": z}, {"x": ["X"], "y": [n], "z": [n]}, {"z": z})
        await one.force_flush(t)
        assert values(await other.aget_tuple(behind)) == {"x": ["X"], "y": [n], "z": [n]}


async def test_a_worker_whose_graph_lacks_a_channel_hides_its_value_from_nobody(stack: AsyncExitStack) -> None:
    """This happens in a rolling deployment. LangGraph keeps the channel's version."""
    (one, other), t = await two(stack), fresh()
    first = await put(one, config(t), {"old": "1", "y": "1"}, {"old": ["O"], "y": ["Y"]}, {"old": "1", "y": "1"})
    await put(one, first, {"old": "2", "y": "1"}, {"old": ["O2"], "y": ["Y"]}, {"old": "2"})
    await one.force_flush(t)
    await other.aget_tuple(first)
    last = await put(other, first, {"old": "1", "y": "2"}, {"y": ["Y2"]}, {"y": "2"})
    theirs = InMemorySaver()
    begun = theirs.put(config(t), checkpoint({"old": "1"}, {"old": ["O"]}), META, {"old": "1"})
    theirs_last = theirs.put(begun, checkpoint({"old": "1", "y": "2"}, {"y": ["Y2"]}), META, {"y": "2"})
    expected = values(theirs.get_tuple(theirs_last))
    for _ in range(2):
        for saver in (one, other):
            assert values(await saver.aget_tuple(config(t))) == values(await saver.aget_tuple(last)) == expected
        await other.engine.buffer.force_flush(t)


def test_a_worker_that_has_read_nothing_keeps_house_all_the_same() -> None:
    """Two workers may not write to a thread here, but no other writes meanwhile. In virtual time: an erasure waits."""

    async def main() -> None:
        async with AsyncExitStack() as stack:
            await _keeps_house(*await two(stack, on_conflict="reject"))

    run(main())


async def _keeps_house(one: AsyncBufferedSaver, other: AsyncBufferedSaver) -> None:
    threads = [fresh() for _ in range(5)]
    for t in threads:
        first = await put(one, config(t), {"a": "1"}, {"a": [1]}, {"a": "1"}, run_id=f"{t}1")
        await put(one, first, {"a": "2"}, {"a": [2]}, {"a": "2"}, run_id=f"{t}2")
    await one.force_flush()
    pruned, of_run, deleted, erased, idle = threads
    await other.aprune([pruned])
    await other.adelete_for_runs([f"{of_run}2"])
    await other.adelete_thread(deleted)
    await other.aerase_thread(erased)
    assert await other.aprune_idle(timedelta(seconds=-60)) == [idle]
    await other.force_flush()
    left = {t: [found.checkpoint["channel_values"]["a"] async for found in one.alist(config(t))] for t in threads}
    assert left == {pruned: [[2]], of_run: [[1]], deleted: [], erased: [], idle: [[2]]}
    with pytest.raises(ConcurrentWriter):
        await one.adelete_thread(pruned)


async def test_a_copy_of_a_thread_that_is_pruned_meanwhile_has_all_values(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page of a list was once read by several statements with a snapshot each."""
    place, t, target = Place(servers), fresh(), fresh()
    async with place.saver() as one, place.saver() as other:
        first = await put(one, config(t), {"a": "1"}, {"a": [1]}, {"a": "1"})
        await put(one, first, {"a": "2"}, {"a": [2]}, {"a": "2"})
        store: Any = one.engine._store
        on = store._sql.on

        async def pruned_before(connection: Any, name: str, *rest: Any) -> Any:
            if name == "blobs_of":
                await other.aprune([t])
                await other.force_flush(t)
            return await on(connection, name, *rest)

        monkeypatch.setattr(store._sql, "on", pruned_before)
        await one.acopy_thread(t, target)
        monkeypatch.undo()
        assert [values(found) async for found in other.alist(config(target))] == [{"a": [2]}, {"a": [1]}]
        assert [values(found) async for found in other.alist(config(t))] == [{"a": [2]}]


async def test_writes_that_were_flushed_before_their_checkpoint_are_in_its_history(stack: AsyncExitStack) -> None:
    (one, other), t = await two(stack), fresh()
    first = await put(one, config(t), {"m": "1"}, {"m": [0]}, {"m": "1"})
    second = checkpoint({"m": "2"}, {})
    await one.aput_writes(config(t, second["id"]), [("m", "written early")], "task")
    await one.force_flush(t)
    third = await put(one, await one.aput(first, second, META, {"m": "2"}), {"m": "3"}, {}, {"m": "3"})
    expected = {"m": {"writes": [("task", "m", "written early")], "seed": [0]}}
    for _ in range(2):
        for saver in (one, other):
            assert await saver.aget_delta_channel_history(config=third, channels=["m"]) == expected
        await one.force_flush(t)
