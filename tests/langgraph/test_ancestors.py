"""The history of a DeltaChannel: reading many ancestors at a time gives what LangGraph gathers one at a time."""

from __future__ import annotations

import random
from typing import Any

import pytest
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.serde.types import _DeltaSnapshot

from bufstore import StoreUnavailable
from bufstore.embedded import Servers
from bufstore.langgraph import AsyncBufferedSaver, reads
from helpers import fresh
from langgraph_graphs import diary
from langgraph_savers import META, Place, asked_of, checkpoint, config, rows_looked_at
from thorough import seldom

_CHANNELS = ("a", "b", "c")
_STEPS = 40


@pytest.fixture(params=["memory", "servers"])
def place(request: pytest.FixtureRequest) -> Place:
    return Place(request.getfixturevalue("servers") if request.param == "servers" else None)


#: A stored None counts as a value, as when ancestors are read one at a time; LangGraph's saver for Postgres skips it.
_NONE = [None]


def _value(chance: random.Random, step: int, others: list[Any]) -> Any:
    """Return a value stored in a blob, one stored in the row, a snapshot, or one of the others."""
    return chance.choice([[f"value {step}"], f"inline {step}", _DeltaSnapshot([f"snapshot {step}"]), *others])


async def _grow(
    saver: AsyncBufferedSaver, thread_id: str, chance: random.Random, ns: str, others: list[Any]
) -> list[Any]:
    """Save checkpoints that fork now and then; some channels are stored, others only written to."""
    places: list[Any] = [config(thread_id, ns=ns)]
    versions: list[dict[str, Any]] = [{}]
    for step in range(_STEPS):
        at = len(places) - 1 if chance.random() < 0.85 else chance.randrange(len(places))
        changed = {c: saver.get_next_version(versions[at].get(c), None) for c in _CHANNELS if chance.random() < 0.5}
        values = {c: _value(chance, step, others) for c in changed if chance.random() < 0.2}
        all_ = {**versions[at], **changed}
        places.append(await saver.aput(places[at], checkpoint(all_, values), META, changed))  # type: ignore[arg-type]
        versions.append(all_)
        for task in range(chance.randrange(3)):
            channels = [c for c in (*_CHANNELS, "other") if chance.random() < 0.5]
            writes = [(c, f"write {step} {task}") for c in channels]
            await saver.aput_writes(places[-1], writes, f"task-{task}", f"~{chance.randrange(3)}")
    return places[1:]


async def _one_at_a_time(saver: AsyncBufferedSaver, at: Any, channels: list[str]) -> Any:
    return await BaseCheckpointSaver.aget_delta_channel_history(saver, config=at, channels=channels)


def _flush_between(saver: AsyncBufferedSaver, monkeypatch: pytest.MonkeyPatch, likely: float = 1.0) -> None:
    """Flush everything between a read's look at the tail and its query to the store."""
    store, chance = saver.engine._store, random.Random(11)

    def behind_a_flush(ask: Any) -> Any:
        async def asked(*args: Any) -> Any:
            if chance.random() < likely:
                await saver.engine.buffer.force_flush_all()
            return await ask(*args)

        return asked

    for name in ("ancestors", "rows"):
        monkeypatch.setattr(store, name, behind_a_flush(getattr(store, name)))


@pytest.mark.parametrize("seed", [0, *seldom(1, 2, 3)])
@pytest.mark.parametrize("flush", [0.1, *seldom(0.0, 1.0)])
async def test_it_is_what_one_ancestor_after_the_other_tells(
    place: Place, monkeypatch: pytest.MonkeyPatch, flush: float, seed: int
) -> None:
    monkeypatch.setattr(reads, "_ANCESTORS", 7)
    chance, thread_id = random.Random(seed), fresh()
    async with place.saver(flush=flush) as saver, place.saver(flush=0.0) as other:
        _flush_between(saver, monkeypatch, 0.5)
        for ns in ("", "inner:1"):
            places = [*await _grow(saver, thread_id, chance, ns, [] if ns else _NONE), config(thread_id, ns=ns)]
            for at in (places[-1], *chance.sample(places, 5)):
                channels = chance.sample(_CHANNELS, chance.randint(1, 3))
                expected = await _one_at_a_time(saver, at, channels)
                for reader in (saver, other):
                    assert await reader.aget_delta_channel_history(config=at, channels=channels) == expected
        if place.dsn:
            await saver.force_flush()
            async with place.plain() as plain:
                for at in places:
                    found = await saver.aget_delta_channel_history(config=at, channels=_CHANNELS)
                    assert {c: h["writes"] for c, h in found.items()} == {
                        c: h["writes"]
                        for c, h in (await plain.aget_delta_channel_history(config=at, channels=_CHANNELS)).items()
                    }


@pytest.mark.parametrize("history", ["all", "latest"])
async def test_a_flush_during_the_read_takes_nothing_from_it(
    place: Place, monkeypatch: pytest.MonkeyPatch, history: str
) -> None:
    """The flush moves entries which are neither in the tail that was read nor behind the ancestor asked for then."""
    async with place.saver(flush=0.0, history=history) as saver:
        at, changed = config(fresh()), dict[str, Any]()
        for step in range(6):
            changed = {"a": str(step)}
            # Step 4 stores the value again, with later writes: leaving out history drops this value too.
            at = await saver.aput(at, checkpoint(changed, {"a": [step]} if step == 4 else {}), META, changed)  # type: ignore[arg-type]
            await saver.aput_writes(at, [("a", f"write {step}"), ("b", f"write {step}")], "task")
            if step == 1:
                await saver.force_flush()
        expected = await _one_at_a_time(saver, at, ["a", "b"])
        _flush_between(saver, monkeypatch)
        assert await saver.aget_delta_channel_history(config=at, channels=["a", "b"]) == expected


async def test_there_is_nothing_of_what_is_not_there(place: Place) -> None:
    async with place.saver() as saver:
        for at in (config(fresh()), config(fresh(), "no such checkpoint")):
            assert await saver.aget_delta_channel_history(config=at, channels=["a"]) == {"a": {"writes": []}}
            assert await saver.aget_delta_channel_history(config=at, channels=[]) == {}


@pytest.mark.parametrize("flush", [0.0, 1.0])
async def test_checkpoints_that_are_each_others_parents_end_somewhere(place: Place, flush: float) -> None:
    thread_id, changed = fresh(), {"a": "1"}
    one, two = "1f000000-0000-6000-8000-000000000001", "1f000000-0000-6000-8000-000000000002"
    async with place.saver(flush=flush) as saver:
        for parent, id_ in ((two, one), (one, two)):
            at = await saver.aput(config(thread_id, parent), checkpoint(changed, {}, id_), META, changed)  # type: ignore[arg-type]
            await saver.aput_writes(at, [("a", id_)], "task")
        found = await saver.aget_delta_channel_history(config=config(thread_id, two), channels=["a"])
        assert found == {"a": {"writes": [("task", "a", two), ("task", "a", one)]}}


async def test_a_long_history_is_a_question_or_two(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    place, thread_id = Place(servers), fresh()
    async with place.saver() as saver:
        at: Any = config(thread_id)
        for step in range(30):
            changed: Any = {"a": saver.get_next_version(None, None)}
            at = await saver.aput(at, checkpoint(changed, {}), META, changed)
            await saver.aput_writes(at, [("a", step)], "task")
        await saver.force_flush()
        asked = asked_of(saver, monkeypatch)
        history = await saver.aget_delta_channel_history(config=at, channels=["a"])
        assert [value for _, _, value in history["a"]["writes"]] == list(range(29))
        assert asked.count("ancestors") == 1
        assert "one" not in asked[1:], "the checkpoint itself, and no ancestor"


async def test_only_the_ancestors_rows_are_looked_at(servers: Servers) -> None:
    """Tables without statistics are included. The thread's writes are then scanned once, not for each ancestor."""
    place, thread_id, limit, steps = Place(servers), fresh(), 5, 200
    async with place.saver() as saver:
        at: Any = config(thread_id)
        for step in range(steps):
            changed: Any = {"a": saver.get_next_version(None, None), "b": saver.get_next_version(None, None)}
            at = await saver.aput(at, checkpoint(changed, {"b": [step]}), META, changed)
            await saver.aput_writes(at, [("a", step)], "task")
        await saver.force_flush()
        statement = saver.engine._store._sql.texts["ancestors"]  # type: ignore[attr-defined]
    seen = await rows_looked_at(place, statement, thread_id, "", at["configurable"]["checkpoint_id"], ["a"], limit)
    assert limit <= seen.pop("checkpoint_writes") <= steps
    assert seen == {"checkpoints": limit, "buffer_threads": 1}


async def test_it_goes_one_by_one_where_the_store_does_not_answer(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This works as long as each ancestor is remembered or readable from the log."""
    place, thread_id = Place(servers), fresh()
    async with place.saver() as saver:
        await diary(saver).ainvoke({"entries": ["first"]}, config(thread_id))
        at = config(thread_id)
        expected = await _one_at_a_time(saver, at, ["entries"])

        async def away(*_: Any) -> Any:
            raise StoreUnavailable("away")

        monkeypatch.setattr(saver.engine._store, "ancestors", away)
        assert await saver.aget_delta_channel_history(config=at, channels=["entries"]) == expected
