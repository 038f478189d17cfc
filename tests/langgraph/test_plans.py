"""What a saver looks at in long threads: only what it reads, on tables without statistics, too, or drops."""

from __future__ import annotations

from typing import Any

import pytest

from bufstore.embedded import Servers
from helpers import fresh, query
from langgraph_savers import META, Place, checkpoint, config, rows_looked_at, rows_of_queries

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


async def test_dropping_many_checkpoints_of_a_thread_looks_at_each_a_few_times(servers: Servers) -> None:
    """Regression: a prune of one long thread went through all that it drops for each; no flush of it ever ended."""
    place, many = Place(servers), 2000
    async with place.saver() as saver:
        statements = saver.engine._store._sql.texts  # type: ignore[attr-defined]
    for id_, count in (("'heavy'", many), ("'t' || n", 50_000)):
        await query(
            place.dsn,
            f"INSERT INTO {place.schema}.checkpoints "
            "(thread_id, checkpoint_ns, checkpoint_id, parent_checkpoint_id, checkpoint, metadata) "
            f"SELECT {id_}, '', lpad(n::text, 9, '0'), lpad((n - 1)::text, 9, '0'), '{{}}', '{{}}' "
            f"FROM generate_series(1, {count}) AS n",
        )
    await query(place.dsn, f"ANALYZE {place.schema}.checkpoints")
    ids = [f"{n:09}" for n in range(1, many)]
    dropped = ["heavy"] * len(ids), [""] * len(ids), ids
    seen = await rows_of_queries(place, statements["drop_checkpoints"], *dropped)
    assert seen["gone"] < 20 * many, seen
    left = f"SELECT checkpoint_id, parent_checkpoint_id FROM {place.schema}.checkpoints WHERE thread_id = 'heavy'"
    assert await query(place.dsn, left) == [(f"{many:09}", None)]
