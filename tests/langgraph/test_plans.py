"""What a saver reads of a long thread, on tables without statistics, too: blobs and checkpoints through their keys."""

from __future__ import annotations

from typing import Any

import pytest

from bufstore.embedded import Servers
from helpers import fresh
from langgraph_savers import META, Place, checkpoint, config, rows_looked_at

_STEPS = 300


@pytest.fixture(scope="module")
async def long_thread(servers: Servers) -> tuple[Place, str, list[str], dict[str, str]]:
    """Where a thread of many checkpoints is, each with two blobs and a write, its checkpoints, and the statements."""
    place, thread_id, ids = Place(servers), fresh(), []
    async with place.saver() as saver:
        at: Any = config(thread_id)
        for step in range(_STEPS):
            versions: Any = {"a": f"{step:08}", "b": f"{step:08}"}
            at = await saver.aput(at, checkpoint(versions, {"a": [step], "b": [step]}), META, versions)
            await saver.aput_writes(at, [("a", step)], "task")
            ids.append(at["configurable"]["checkpoint_id"])
        await saver.force_flush()
        return place, thread_id, ids, saver.engine._store._sql.texts  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("blobs_of", {"checkpoints": 10, "checkpoint_blobs": 20}),
        ("writes_of", {}),
        ("rows", {"checkpoint_blobs": 10, "buffer_threads": 1}),
        ("one", {"checkpoint_blobs": 2, "buffer_threads": 1}),
        ("latest", {"checkpoint_blobs": 2, "buffer_threads": 1}),
    ],
)
async def test_only_the_rows_that_are_asked_for_are_looked_at(
    long_thread: tuple[Place, str, list[str], dict[str, str]], name: str, expected: dict[str, int]
) -> None:
    place, thread_id, ids, statements = long_thread
    some, versions = ids[100:110], [f"{step:08}" for step in range(100, 110)]
    threads, namespaces, channels = [thread_id] * 10, [""] * 10, ["a"] * 10
    parameters: dict[str, tuple[Any, ...]] = {
        "blobs_of": (threads, namespaces, some),
        "writes_of": (threads, namespaces, some),
        "rows": (thread_id, namespaces, channels, versions, namespaces, some),
        "one": (thread_id, "", ids[100]),
        "latest": (thread_id, "", 10),
    }
    seen = await rows_looked_at(place, statements[name], *parameters[name])
    assert {table: seen.get(table) for table in expected} == expected
    assert seen.get("checkpoint_writes", 0) <= _STEPS, "they are gone through once at most"
