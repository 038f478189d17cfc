"""Behaviour that LangGraph's suite does not test: order, conflicts, wrong values, blocking calls, many callers."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import secrets
import threading
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.serde.types import _DeltaSnapshot

from bufstore import BufferConfig, ConfigError, Consistency, InvalidId, InvalidRecord, ThreadQuarantined
from bufstore.buffer.operate.replay import Outcome
from bufstore.embedded import Servers
from bufstore.langgraph import AsyncBufferedSaver, BufferedSaver, ConcurrentWriter, MemoryCheckpointStore
from bufstore.memory import MemoryNats
from helpers import eventually, fresh, query
from langgraph_graphs import assistant
from langgraph_savers import META, Place, checkpoint, config


@pytest.fixture(params=["memory", "servers"])
def place(request: pytest.FixtureRequest) -> Place:
    return Place(request.getfixturevalue("servers") if request.param == "servers" else None)


@pytest.fixture(params=[0.0, 1.0], ids=["unflushed", "flushed"])
async def saver(request: pytest.FixtureRequest, place: Place) -> AsyncIterator[AsyncBufferedSaver]:
    async with place.saver(flush=request.param) as saver:
        yield saver


async def _put(saver: BaseCheckpointSaver[str], at: Any, values: dict[str, Any], **versions: Any) -> Any:
    changed = versions or {channel: saver.get_next_version(None, None) for channel in values}
    return await saver.aput(at, checkpoint(changed, values), META, changed)


async def test_writes_come_before_their_checkpoint_and_in_their_order(saver: AsyncBufferedSaver) -> None:
    thread_id, put = fresh(), checkpoint({}, {})
    at = config(thread_id, put["id"])
    await saver.aput_writes(at, [("a", 1), ("b", 2)], "task-2", "~2")
    await saver.aput_writes(at, [("a", 3)], "task-1", "~3")
    assert await saver.aget_tuple(config(thread_id)) is None
    await saver.aput(config(thread_id), put, META, {})
    await saver.aput_writes(at, [("c", 4)], "task-9", "~1")
    found = await saver.aget_tuple(config(thread_id))
    assert found is not None
    assert found.pending_writes == [("task-9", "c", 4), ("task-2", "a", 1), ("task-2", "b", 2), ("task-1", "a", 3)]


async def test_the_first_write_of_an_index_counts_and_the_last_of_a_special_channel(saver: AsyncBufferedSaver) -> None:
    at = await _put(saver, config(fresh()), {})
    for value in (1, 2):
        await saver.aput_writes(at, [("a", value)], "task")
        await saver.aput_writes(at, [("__interrupt__", value)], "task")
        await saver.aput_writes(at, [("__error__", value), ("a", value)], "other")
    await saver.aput_writes(at, [], "nothing")
    found = await saver.aget_tuple(at)
    assert found is not None
    # When a call has other channels too, a special channel's first write wins as well.
    assert sorted(found.pending_writes or ()) == [
        ("other", "__error__", 1),
        ("other", "a", 1),
        ("task", "__interrupt__", 2),
        ("task", "a", 1),
    ]


async def test_a_thread_is_deleted_and_begins_anew(saver: AsyncBufferedSaver) -> None:
    thread_id = fresh()
    await _put(saver, config(thread_id), {"a": [1], "b": [2]})
    await saver.adelete_thread(thread_id)
    assert await saver.aget_tuple(config(thread_id)) is None
    await saver.adelete_thread(thread_id)
    await _put(saver, config(thread_id), {"a": [3]})
    await saver.force_flush()
    (found,) = [item async for item in saver.alist(config(thread_id))]
    assert found.checkpoint["channel_values"] == {"a": [3]}


async def test_a_fork_finds_the_values_of_its_branch(saver: AsyncBufferedSaver) -> None:
    thread_id = fresh()
    one = await _put(saver, config(thread_id), {"a": [1], "b": [1]}, a="1", b="1")
    await saver.aput(one, checkpoint({"a": "2", "b": "1"}, {"a": [2], "b": [1]}), META, {"a": "2"})
    fork = await saver.aput(one, checkpoint({"a": "1", "b": "3"}, {"a": [1], "b": [3]}), META, {"b": "3"})
    found = await saver.aget_tuple(fork)
    assert found is not None
    assert found.checkpoint["channel_values"] == {"a": [1], "b": [3]}
    assert found.parent_config == one


@pytest.mark.parametrize("how", ["prune", "delete_for_runs", "prune_idle"])
async def test_a_fork_beside_a_prune_keeps_its_values(place: Place, how: str) -> None:
    """Another worker continues from an older checkpoint, whose values it uses, while the prune looks for candidates."""
    thread_id, meta = fresh(), {**META, "run_id": "first"}
    async with place.saver() as one, place.saver() as other:
        base = await other.aput(config(thread_id), checkpoint({"a": "1"}, {"a": [1]}), meta, {"a": "1"})  # type: ignore[arg-type]
        await one.aput(base, checkpoint({"a": "2"}, {"a": [2]}), META, {"a": "2"})
        forks: list[Any] = []
        store: Any = one.engine._store
        outlines = store.outlines

        looks = 2 if how == "prune" else 1  # a prune's first look has another purpose

        async def looked(of: str) -> Any:
            nonlocal looks
            found = await outlines(of)
            looks -= 1
            if not looks:
                fork = checkpoint({"a": "1", "b": "3"}, {"a": [1], "b": [3]})
                forks.append(await other.aput(base, fork, META, {"b": "3"}))
            return found

        store.outlines = looked
        if how == "prune":
            await one.aprune([thread_id])
        elif how == "prune_idle":
            await one.aprune_idle(timedelta(seconds=-60))
        else:
            await one.adelete_for_runs(["first"])
        await one.force_flush()
        found = await one.aget_tuple(forks[0])
        assert found is not None
        assert found.checkpoint["channel_values"] == {"a": [1], "b": [3]}


async def test_a_large_value_comes_back(saver: AsyncBufferedSaver) -> None:
    at = await _put(saver, config(fresh()), {"a": [bytes(3 << 20)], "b": "x" * (1 << 20)})
    found = await saver.aget_tuple(at)
    assert found is not None
    assert found.checkpoint["channel_values"] == {"a": [bytes(3 << 20)], "b": "x" * (1 << 20)}


async def test_a_thread_whose_state_is_larger_than_an_entry_is_copied(place: Place) -> None:
    """Each checkpoint added one value, and the newest has all of them."""
    source, target = fresh(), fresh()
    place.log = dataclasses.replace(place.log, max_entry_bytes=64 << 10)
    values: dict[str, Any] = {}
    versions: dict[str, Any] = {}
    async with place.saver() as saver:
        at = config(source)
        for channel in "abcde":
            new = {channel: saver.get_next_version(None, None)}
            values[channel], versions[channel] = [channel * 30_000], new[channel]
            at = await saver.aput(at, checkpoint(dict(versions), dict(values)), META, new)
            for n in range(3):
                await saver.aput_writes(at, [("w", channel * 30_000)], f"task {n}")
        await saver.acopy_thread(source, target)
        theirs, ours = [[item async for item in saver.alist(config(t))] for t in (source, target)]
        assert len(theirs) == 5
        for one, other in zip(theirs, ours, strict=True):
            assert (one.checkpoint, one.metadata, one.pending_writes) == (
                other.checkpoint,
                other.metadata,
                other.pending_writes,
            )
        assert (await saver.aget_tuple(config(target))).checkpoint["channel_values"] == values  # type: ignore[union-attr]


@pytest.mark.parametrize("versions", [{"a": "2"}, {}], ids=["beside others", "alone"])
async def test_what_an_old_version_was_sent_stands_with_its_parent(
    saver: AsyncBufferedSaver, versions: dict[str, Any]
) -> None:
    thread_id = fresh()
    old = {**checkpoint({"a": "1"}, {"a": [1]}), "v": 1}
    parent = await saver.aput(config(thread_id), old, META, {"a": "1"})  # type: ignore[arg-type]
    await saver.aput_writes(parent, [("__pregel_tasks", "sent")], "task")
    values = {channel: [2] for channel in versions}
    at = await saver.aput(parent, {**checkpoint(versions, values), "v": 1}, META, versions)  # type: ignore[arg-type]
    found = await saver.aget_tuple(at)
    assert found is not None
    assert found.checkpoint["channel_values"] == {**values, "__pregel_tasks": ["sent"]}
    sent = found.checkpoint["channel_versions"]["__pregel_tasks"]
    assert found.checkpoint["channel_versions"] == {**versions, "__pregel_tasks": sent}
    assert int(str(sent).partition(".")[0]) == (2 if versions else 1)
    assert [item.checkpoint["channel_values"] async for item in saver.alist(config(thread_id))] == [
        {**values, "__pregel_tasks": ["sent"]},
        {"a": [1]},
    ]


async def test_numbers_are_the_same_before_a_flush_and_after_it(saver: AsyncBufferedSaver) -> None:
    values = {"a": 1e16, "b": -0.0, "c": 1e23, "d": 0.5, "e": 1e-300, "f": -1.5e300, "g": "1e+16,"}
    as_read = {**values, "a": 10**16, "b": 0.0, "c": 10**23, "f": -15 * 10**299}
    at = await _put(saver, config(fresh()), values)
    found = await saver.aget_tuple(at)
    assert found is not None
    assert repr(found.checkpoint["channel_values"]) == repr(as_read)


@pytest.mark.parametrize(
    "value", ["a\0b", "\ud800", float("nan"), float("inf")], ids=["NUL", "surrogate", "NaN", "infinity"]
)
async def test_what_a_row_cannot_hold_is_refused_at_once(saver: AsyncBufferedSaver, value: Any) -> None:
    thread_id = fresh()
    with pytest.raises(InvalidRecord, match="the value of channel 'a' "):
        await _put(saver, config(thread_id), {"good": 1, "a": value, "bytes": b"\0"})
    with pytest.raises(InvalidRecord, match="metadata 'deep' "):
        await saver.aput(config(thread_id), checkpoint({}, {}), {**META, "deep": [value]}, {})
    if isinstance(value, str):
        with pytest.raises(InvalidRecord, match=r"^the checkpoint has "):
            await _put(saver, config(thread_id), {value: 1})
    for wrong in (f"{thread_id}\0", "x" * 1025, "\ud800"):
        with pytest.raises(InvalidId):
            await _put(saver, config(wrong), {})
    with pytest.raises(InvalidId):
        await _put(saver, config(thread_id, ns="n" * 2600), {})
    assert await saver.aget_tuple(config(thread_id)) is None
    if value != "\ud800":
        at = await _put(saver, config(thread_id), {"a": [value]})
        assert str((await saver.aget_tuple(at)).checkpoint["channel_values"]) == str({"a": [value]})  # type: ignore[union-attr]


async def test_ids_and_names_in_any_script_fit_into_a_key_up_to_its_limit(saver: AsyncBufferedSaver) -> None:
    """What is not ASCII is looked at part by part: what is refused there, or not, must be what Postgres refuses."""
    thread_id, channel, task_id = f"{fresh()} łódź 🧵", "ключ", "задача ✓"
    at = await _put(saver, config(thread_id, ns="graph:子|ß"), {channel: ["ü"], "inline": "ö"})
    await saver.aput_writes(at, [(channel, "ä")], task_id, "~путь")
    # Of letters and digits in an order in which nothing recurs, so that Postgres cannot make the key smaller.
    longest = secrets.token_urlsafe(3000)
    at_limit = await _put(saver, config(thread_id, ns=f"é{longest[:2000]}"), {})
    taken = sum(len(str(part).encode()) for part in at_limit["configurable"].values())
    await saver.aput_writes(at_limit, [("a", [1])], longest[-(2600 - taken) :])
    with pytest.raises(InvalidId, match="has 2601 bytes"):
        await saver.aput_writes(at_limit, [("a", [1])], longest[-(2601 - taken) :])
    await saver.force_flush(thread_id)
    found, full = await saver.aget_tuple(at), await saver.aget_tuple(at_limit)
    assert found is not None
    assert full is not None
    assert found.checkpoint["channel_values"] == {channel: ["ü"], "inline": "ö"}
    assert found.pending_writes == [(task_id, channel, "ä")]
    assert full.pending_writes == [(longest[-(2600 - taken) :], "a", [1])]


async def test_a_snapshot_of_a_delta_channel_is_told_from_a_value_that_is_true(place: Place) -> None:
    """By the rows alone: metadata say it only since LangGraph counts. What builds on a snapshot keeps its history."""
    async with place.saver() as saver:
        delta, plain, gone = (fresh() for _ in range(3))
        for thread_id, values in ((delta, {"d": _DeltaSnapshot([1]), "b": True}), (plain, {"b": True, "c": [True]})):
            await _put(saver, config(thread_id), values)
        await saver.aput(config(gone), checkpoint({"d": "1"}, {"d": _DeltaSnapshot([1])}), META, {})  # without a blob
        outlines = {}
        for thread_id in (delta, plain, gone):
            await saver.force_flush(thread_id)
            (outlines[thread_id],) = await saver.engine.of(thread_id)._store.outlines(thread_id)
        assert [outlines[t].delta for t in (delta, plain, gone)] == [True, False, False]
        assert {channel for _, channel, _ in outlines[delta].blobs} == {"d", "b"}


async def test_a_filter_finds_metadata_that_contain_it_as_a_jsonb_does(saver: AsyncBufferedSaver) -> None:
    thread_id = fresh()
    await saver.aput(config(thread_id), checkpoint({}, {}), {**META, "tags": ["a", "b", {"k": [1, 2]}]}, {})  # type: ignore[typeddict-unknown-key]
    found: list[Any] = [["b"], [], ["b", "a", "b"], [{"k": [2]}], [{}], [{"k": []}, "a"]]
    missed: list[Any] = [["c"], ["a", "c"], "a", [["a"]], [{"k": 1}], [{"l": [1]}], {}, None]
    assert [t for t in found + missed if [_ async for _ in saver.alist(None, filter={"tags": t})]] == found
    steps = [1.0, True, "1", [1], [[]]]
    assert [s for s in steps if [_ async for _ in saver.alist(config(thread_id), filter={"step": s})]] == [1.0]


@pytest.mark.parametrize("wrong", ["a\0b", "\ud800", 5], ids=["NUL", "surrogate", "no str"])
async def test_a_parent_that_no_row_could_have_is_refused_at_once(saver: AsyncBufferedSaver, wrong: Any) -> None:
    """If acknowledged, it would be poison: the thread would go into quarantine, with all later entries."""
    thread_id = fresh()
    with pytest.raises(InvalidId):
        await _put(saver, config(thread_id, wrong), {"a": [1]})
    for named in (config(thread_id, wrong), config(thread_id, ns=wrong)):
        with pytest.raises(InvalidId):
            await saver.aget_tuple(named)
        with pytest.raises(InvalidId):
            await anext(saver.alist(named), None)
    with pytest.raises(InvalidId):
        await anext(saver.alist(config(thread_id), before=config(thread_id, wrong)), None)
    await _put(saver, config(thread_id), {"a": [1]})
    await saver.force_flush(thread_id)
    assert await saver.aget_tuple(config(thread_id)) is not None


@pytest.mark.parametrize("wrong", ["", "a\0b", "\ud800", "x" * 1025], ids=["empty", "NUL", "surrogate", "long"])
async def test_no_method_takes_an_id_that_no_thread_could_have(saver: AsyncBufferedSaver, wrong: str) -> None:
    """Such a deletion could never be flushed, and every flush of the whole log would wait for it."""
    at = await _put(saver, config(fresh()), {"a": [1]})
    good = at["configurable"]["thread_id"]
    for work in (
        saver.adelete_thread(wrong),
        saver.aprune([good, wrong]),
        saver.aprune([good, wrong], strategy="delete"),
        saver.acopy_thread(wrong, good),
        saver.acopy_thread(good, wrong),
        saver.aerase_thread(wrong),
        saver.force_flush(wrong),
        saver.adelete_for_runs(["r", wrong]),
    ):
        with pytest.raises(InvalidId):
            await work
    for time in (timedelta.max, timedelta.min, 5):
        with pytest.raises(ValueError, match="idle_for"):
            await saver.aprune_idle(time)  # type: ignore[arg-type]
    await saver.force_flush(timeout_s=20)
    assert await saver.aget_tuple(at) is not None


async def test_who_has_no_id_is_given_nobody_elses_thread(saver: AsyncBufferedSaver) -> None:
    """LangGraph hands on an id that is None. As text it would be the id of one thread, for all who lack one."""
    nobody: Any = {"configurable": {"thread_id": None, "checkpoint_ns": ""}}
    graph = assistant(saver)
    for work in (
        graph.ainvoke({"said": ["a secret"]}, nobody),
        saver.aput(nobody, checkpoint({"a": "1"}, {"a": [1]}), META, {"a": "1"}),
        saver.aput_writes({"configurable": {**nobody["configurable"], "checkpoint_id": "1"}}, [("a", 1)], "task"),
        saver.aget_tuple(nobody),
        anext(saver.alist(nobody), None),
        saver.adelete_thread(None),  # type: ignore[arg-type]
        saver.aprune([None]),  # type: ignore[list-item]
        saver.acopy_thread(None, "t"),  # type: ignore[arg-type]
        saver.adelete_for_runs([None]),  # type: ignore[list-item]
    ):
        with pytest.raises(InvalidId, match="_id is None"):
            await work
    assert not (await graph.aget_state(config("None"))).values


async def test_a_list_goes_on_before_a_checkpoint_of_which_only_the_id_is_given(saver: AsyncBufferedSaver) -> None:
    first = await _put(saver, config(fresh()), {"a": [1]})
    second = await _put(saver, first, {"a": [2]})
    before: Any = {"configurable": {"checkpoint_id": second["configurable"]["checkpoint_id"]}}
    thread: Any = {"configurable": {"thread_id": first["configurable"]["thread_id"]}}
    assert [item.config async for item in saver.alist(thread, before=before)] == [first]
    assert [item.config async for item in saver.alist({}, before=before, limit=1)] == [first]


@pytest.mark.parametrize(("limit", "many"), [("2", 2), (True, 1), (2.7, 2), (0, 0)], ids=str)
async def test_the_limit_of_a_list_is_any_number_that_int_takes(
    saver: AsyncBufferedSaver, limit: Any, many: int
) -> None:
    """So does LangGraph's own saver, and a limit is often a parameter of a URL, which is text."""
    at = config(fresh())
    for _ in range(3):
        at = await _put(saver, at, {"a": [1]})
    thread: Any = {"configurable": {"thread_id": at["configurable"]["thread_id"]}}
    assert len([item async for item in saver.alist(thread, limit=limit)]) == many
    with pytest.raises(ValueError, match="many"):
        await anext(saver.alist(thread, limit="many"), None)  # type: ignore[arg-type]


async def test_all_levels_show_what_they_promise(place: Place) -> None:
    thread_id = fresh()
    async with place.saver(flush=0.0) as writer:
        await _put(writer, config(thread_id), {"a": [1]})
        async with place.saver(flush=0.0, flusher=False, consistency=Consistency.EVENTUAL) as eventual:
            assert await eventual.aget_tuple(config(thread_id)) is None
            assert not [item async for item in eventual.alist(config(thread_id))]
        async with place.saver(flush=0.0, flusher=False, consistency=Consistency.STRONG) as strong:
            found = await strong.aget_tuple(config(thread_id))
            assert found is not None
            assert found.checkpoint["channel_values"] == {"a": [1]}


async def test_poison_parks_its_thread_until_it_is_replayed(servers: Servers) -> None:
    """A later checkpoint uses values that only the parked one has, so it must not be applied before it."""
    place, bad, good = Place(servers), fresh(), fresh()
    async with place.saver() as saver:
        at = await saver.aput(config(bad), checkpoint({"a": "1"}, {"a": [1]}), META, {"a": "1"})
        await saver.force_flush()
        constraint = f"{place.schema}.checkpoint_blobs ADD CONSTRAINT no CHECK (version <> '2')"
        await query(place.dsn, f"ALTER TABLE {constraint}")
        at = await saver.aput(at, checkpoint({"a": "2"}, {"a": [2]}), META, {"a": "2"})
        await saver.aput_writes(at, [("a", 3)], "task")
        await _put(saver, config(good), {"a": [1]})
        await saver.force_flush()
        assert await saver.aget_tuple(config(good)) is not None
        with pytest.raises(ThreadQuarantined):
            await saver.aget_tuple(config(bad))
        with pytest.raises(ThreadQuarantined):
            await anext(saver.alist(config(bad)))
        with pytest.raises(ThreadQuarantined):
            await saver.acopy_thread(bad, "copy")
        assert [item async for item in saver.alist(config("copy"))] == []
        everything = {item.config["configurable"]["thread_id"] async for item in saver.alist(None)}
        assert everything == {bad, good}
        async with place.saver(consistency=Consistency.EVENTUAL) as eventual:
            assert len([item async for item in eventual.alist(config(bad))]) == 1
            with pytest.raises(ThreadQuarantined):
                await eventual.acopy_thread(bad, "copy")
        with pytest.raises(ThreadQuarantined):
            await saver.aput(at, checkpoint({"a": "2", "b": "3"}, {"a": [2], "b": [3]}), META, {"b": "3"})
        quarantine = saver.engine.buffer.quarantine
        parked = await quarantine.page(thread_id=bad)
        assert len(parked) == 2
        await query(place.dsn, f"ALTER TABLE {place.schema}.checkpoint_blobs DROP CONSTRAINT no")
        outcomes = await quarantine.replay_thread(bad)
        assert [r.outcome for r in outcomes] == [Outcome.APPLIED] * 2
        found = await saver.aget_tuple(config(bad))
        assert found is not None
        assert found.checkpoint["channel_values"] == {"a": [2]}
        assert found.pending_writes == [("task", "a", 3)]
        await saver.aput(at, checkpoint({"a": "2", "b": "3"}, {"a": [2], "b": [3]}), META, {"b": "3"})
        assert (await saver.aget_tuple(config(bad))).checkpoint["channel_values"] == {"a": [2], "b": [3]}  # type: ignore[union-attr]
        assert (await saver.engine.buffer.verify()).ok


async def test_deleting_runs_tells_of_what_only_the_quarantine_has(servers: Servers) -> None:
    """All other checkpoints of them are deleted. A replay would restore the parked one, so the call raises."""
    place, bad, good, meta = Place(servers), fresh(), fresh(), {**META, "run_id": "over"}
    async with place.saver() as saver:
        constraint = f"{place.schema}.checkpoint_blobs ADD CONSTRAINT no CHECK (version <> '2')"
        await query(place.dsn, f"ALTER TABLE {constraint}")
        await saver.aput(config(bad), checkpoint({"a": "2"}, {"a": [2]}), meta, {"a": "2"})  # type: ignore[arg-type]
        await saver.aput(config(good), checkpoint({"a": "1"}, {"a": [1]}), meta, {"a": "1"})  # type: ignore[arg-type]
        await saver.adelete_for_runs(["another"])
        with pytest.raises(ThreadQuarantined) as refused:
            await saver.adelete_for_runs(["another", "over"])
        assert refused.value.thread_id == bad
        assert await saver.aget_tuple(config(good)) is None
        await query(place.dsn, f"ALTER TABLE {place.schema}.checkpoint_blobs DROP CONSTRAINT no")
        await saver.engine.buffer.quarantine.replay_thread(bad)
        assert await saver.aget_tuple(config(bad)) is not None
        await saver.adelete_for_runs(["over"])
        assert await saver.aget_tuple(config(bad)) is None


async def test_two_workers_fork_a_thread_or_the_second_one_is_refused(place: Place) -> None:
    thread_id = fresh()
    async with place.saver() as one, place.saver(on_conflict="reject") as careful:
        at = await _put(one, config(thread_id), {"a": [0]})
        for saver in (one, careful):
            assert await saver.aget_tuple(config(thread_id)) is not None
        first = await _put(one, at, {"a": [1]})
        with pytest.raises(ConcurrentWriter):
            await _put(careful, at, {"a": [2]})
        with pytest.raises(ConcurrentWriter):
            await careful.aput_writes(at, [("a", 1)], "task")
        found = await careful.aget_tuple(config(thread_id))
        assert found is not None
        assert found.config == first
        # The process's own concurrent writes are no conflict.
        await asyncio.gather(*(careful.aput_writes(first, [("a", n)], f"task {n}") for n in range(20)))
        await _put(careful, first, {"a": [3]})
        fork = await _put(one, at, {"a": [4]})
        assert (await one.aget_tuple(config(thread_id))).config == fork  # type: ignore[union-attr]
        assert len([item async for item in one.alist(config(thread_id))]) == 4
    with pytest.raises(ConfigError, match="on_conflict"):
        await AsyncBufferedSaver.open(MemoryCheckpointStore(), nats=MemoryNats(), on_conflict="maybe")  # type: ignore[arg-type]


@pytest.mark.parametrize("cache_bytes", [None, "64MB", 1.5, True, -1])
async def test_a_cache_of_a_size_that_is_none_is_refused(cache_bytes: Any) -> None:
    with pytest.raises(ConfigError, match="cache_bytes must be an int, 0 or more, not "):
        await AsyncBufferedSaver.open(MemoryCheckpointStore(), nats=MemoryNats(), cache_bytes=cache_bytes)


@pytest.mark.parametrize("name", ["50%s", "{schema} {0}"])
async def test_any_name_of_the_schemas(name: str, servers: Servers) -> None:
    """Regression: with a % in `buffer_schema`, a saver could not be opened."""
    place = Place(servers)
    place.schema = f"{name} {place.schema}"
    for steps in (1, 2):
        async with place.saver() as saver:
            await _put(saver, config("t"), {"a": [steps]})
            await saver.force_flush()
            assert len([each async for each in saver.alist(config("t"))]) == steps


async def test_a_thread_that_is_looked_up_again_knows_its_own_last_write(place: Place) -> None:
    """The look-up happens after a lost connection. No other process has written, so nothing is refused."""
    thread_id = fresh()
    async with place.saver(on_conflict="reject") as careful, place.saver() as other:
        forget = careful.engine.buffer.appender.forget
        at = await _put(careful, config(thread_id), {"a": [0]})
        forget(thread_id)
        at = await _put(careful, at, {"a": [1]})
        await asyncio.gather(*(careful.aput_writes(at, [("a", n)], f"task {n}") for n in range(20)))
        forget(thread_id)
        await careful.aput_writes(at, [("a", 1)], "task")
        await careful.adelete_thread(thread_id)
        forget(thread_id)
        await careful.adelete_thread(thread_id)
        await _put(other, config(thread_id), {"a": [2]})
        forget(thread_id)
        with pytest.raises(ConcurrentWriter):
            await careful.adelete_thread(thread_id)


async def test_many_threads_of_two_instances_at_once(place: Place) -> None:
    async with place.saver() as one, place.saver() as two:

        async def run(thread_id: str) -> None:
            at = config(thread_id)
            for n in range(6):
                saver = (one, two)[n % 2]
                at = await _put(saver, at, {"a": [n]})
                await saver.aput_writes(at, [("a", n)], "task")
                shown = await (two, one)[n % 2].aget_tuple(config(thread_id))
                assert shown is not None
                assert (shown.config, shown.pending_writes) == (at, [("task", "a", n)])

        threads = [fresh() for _ in range(20)]
        await asyncio.gather(*map(run, threads))
        await one.force_flush()
        for thread_id in threads:
            assert len([item async for item in two.alist(config(thread_id))]) == 6


async def test_a_clone_for_other_classes_shares_log_and_store(place: Place) -> None:
    async with place.saver(serde=JsonPlusSerializer(allowed_msgpack_modules=[])) as saver:
        clone = saver.with_allowlist([("builtins", "complex")])
        assert clone is not saver
        at = await _put(clone, config(fresh()), {"a": [1]})
        assert await saver.aget_tuple(at) == await clone.aget_tuple(at)


async def test_blocking_calls_from_other_threads_than_the_loops(place: Place) -> None:
    async with place.saver() as saver:

        def work() -> list[Any]:
            at = saver.put(config("t"), checkpoint({"a": "1"}, {"a": [1]}), META, {"a": "1"})
            saver.put_writes(at, [("a", 1)], "task")
            saver.copy_thread("t", "copy")
            saver.delete_for_runs(["nobody"])
            saver.prune(["t"])
            assert saver.get_tuple(at) is not None
            assert saver.get_delta_channel_history(config=at, channels=["a"]) == {"a": {"writes": []}}
            saver.delete_thread("t")
            return list(saver.list(None))

        assert [item.config["configurable"]["thread_id"] for item in await asyncio.to_thread(work)] == ["copy"]
        with pytest.raises(ConfigError, match="own event loop"):
            saver.get_tuple(config("t"))


def test_the_blocking_saver_serves_the_main_thread_and_others_at_once(servers: Servers) -> None:
    place = Place(servers)
    with BufferedSaver.from_conn_string(
        place.dsn, place.nats, schema=place.schema, buffer_schema=f"{place.schema}_b", config=_config(place)
    ) as saver:
        _use(saver)
        threads = [threading.Thread(target=_use, args=[saver]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        saver.force_flush()
        assert len({item.config["configurable"]["thread_id"] for item in saver.list(None)}) == 5
        assert saver.health().can_write
        assert saver.statistics().appended > 5


async def test_the_blocking_saver_has_the_asynchronous_methods_too() -> None:
    serde = JsonPlusSerializer(allowed_msgpack_modules=[])
    saver = await asyncio.to_thread(BufferedSaver.open, MemoryCheckpointStore(), nats=MemoryNats(), serde=serde)
    try:
        thread_id = fresh()
        assert "__interrupt__" in await assistant(saver).ainvoke({"said": ["hello"]}, config(thread_id))
        await saver.acopy_thread(thread_id, "copy")
        await saver.aprune(["copy"])
        await saver.adelete_for_runs(["nobody"])
        assert await saver.aget_tuple(config("copy")) is not None
        assert [item async for item in saver.alist(config("copy", ns=""))]
        await saver.adelete_thread("copy")
        assert await saver.aget_tuple(config("copy")) is None
        assert saver.with_allowlist([("builtins", "complex")]) is not saver
    finally:
        await asyncio.to_thread(saver.close)


async def test_a_list_of_the_blocking_saver_shows_what_stands_before_an_error() -> None:
    """Regression: up to 49 good checkpoints before one that could not be read were not shown."""

    class Lacks(JsonPlusSerializer):
        def loads_typed(self, data: tuple[str, bytes]) -> Any:
            value = super().loads_typed(data)
            if value == [1]:
                raise ValueError("the class is gone")
            return value

    saver = await asyncio.to_thread(BufferedSaver.open, MemoryCheckpointStore(), nats=MemoryNats(), serde=Lacks())
    try:
        at: Any = config("t")
        for n in range(5):
            at = await saver.aput(at, checkpoint({"a": str(n)}, {"a": [n]}), META, {"a": str(n)})

        def shown() -> None:
            for item in saver.list(config("t")):
                found.append(item.checkpoint["channel_values"]["a"])

        found = list[Any]()
        with pytest.raises(ValueError, match="class is gone"):
            await asyncio.to_thread(shown)
        with pytest.raises(ValueError, match="class is gone"):
            async for item in saver.alist(config("t")):
                found.append(item.checkpoint["channel_values"]["a"])
        assert found == [[4], [3], [2]] * 2
    finally:
        await asyncio.to_thread(saver.close)


async def test_a_cancel_ends_what_an_asynchronous_call_of_the_blocking_saver_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saver = await asyncio.to_thread(BufferedSaver.open, MemoryCheckpointStore(), nats=MemoryNats())
    begun: list[bool] = []
    ended: list[bool] = []

    async def stuck(*_: Any, **__: Any) -> Any:
        begun.append(True)
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    async def all_of(these: list[bool]) -> bool:
        return len(these) == len(calls)

    monkeypatch.setattr(AsyncBufferedSaver, "aput", stuck)
    try:
        calls = [asyncio.create_task(saver.aput(config("t"), checkpoint({}, {}), META, {})) for _ in range(20)]
        await eventually(lambda: all_of(begun))
        for call in calls:
            call.cancel()
        await eventually(lambda: all_of(ended))
        assert {type(e) for e in await asyncio.gather(*calls, return_exceptions=True)} == {asyncio.CancelledError}
    finally:
        await asyncio.to_thread(saver.close)


def _config(place: Place) -> BufferConfig:
    return BufferConfig.fitting(place.log, flush_interval_s=0.02)


def _use(saver: BufferedSaver) -> None:
    at = saver.put(config(fresh()), checkpoint({"a": "1"}, {"a": [1]}), META, {"a": "1"})
    saver.put_writes(at, [("a", 2)], "task")
    found = saver.get_tuple(at)
    assert found is not None
    assert found.pending_writes == [("task", "a", 2)]


class Channel(enum.StrEnum):
    """A channel's name as an enum, as graphs have it."""

    FOO = "foo"


async def test_a_member_of_an_enum_names_its_channel() -> None:
    """The name is stored as LangGraph's own saver stores it."""
    async with Place(None).saver() as saver:
        at = await saver.aput(config("t"), checkpoint({"foo": "1"}, {"foo": [0]}), {"source": "loop"}, {"foo": "1"})
        await saver.aput_writes(at, [(Channel.FOO, 1)], "task")
        found = await saver.aget_tuple(at)
        assert found is not None
        assert found.pending_writes == [("task", "foo", 1)]
        assert type(found.pending_writes[0][1]) is str


async def test_what_a_caller_changes_afterwards_is_not_what_was_saved() -> None:
    value = bytearray(b"one")
    async with Place(None).saver(flush=0) as saver:
        await saver.aput(config("t"), checkpoint({"a": "1"}, {"a": [1]}), {"source": "loop"}, {"a": "1"})
        assert await saver.aget_tuple(config("t")) is not None
        put = checkpoint({"a": "1", "b": "1"}, {"a": [1], "b": value})
        at = await saver.aput(config("t"), put, {"source": "loop"}, {"b": "1"})
        await saver.aput_writes(at, [("b", value)], "task")
        value[:] = b"two"
        found = await saver.aget_tuple(at)
        assert found is not None
        assert (found.checkpoint["channel_values"]["b"], found.pending_writes) == (b"one", [("task", "b", b"one")])


@pytest.mark.parametrize("history", ["all", "run", "latest"])
@pytest.mark.parametrize("parents", [["x"], "x", {"": 1}, None])
async def test_metadata_may_say_anything(history: str, parents: Any) -> None:
    metadata: Any = {"source": "loop", "parents": parents}
    async with Place(None).saver(history=history) as saver:
        at = config("t")
        for n in ("1", "2"):
            at = await saver.aput(at, checkpoint({"a": n}, {"a": [n]}), metadata, {"a": n})
        await saver.force_flush()
        await saver.aprune(["t"])
        found = await saver.aget_tuple(config("t"))
        assert found is not None
        assert (found.checkpoint["channel_values"], found.metadata) == ({"a": ["2"]}, metadata)
