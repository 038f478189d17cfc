"""Rows that edit a thread, among its checkpoints, each once; without Spark."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from bufstore import InvalidRecord, ThreadMetadata
from bufstore.spark import SinkConfig
from bufstore.spark.sink.app_id import AppId
from bufstore.spark.sink.checkpoint_rows import check_columns, wanted_of
from bufstore.spark.sink.row_writer import write_rows
from conftest import Deployment
from helpers import fresh
from spark.jobs import prepared, settings_of


def row(thread: str, position: int, delta: list[Any] | None = None, **edit: Any) -> dict[str, Any]:
    texts = [json.dumps(m) for m in delta] if delta is not None else None
    wanted = json.dumps(edit) if edit else None
    return {"thread_id": thread, "run_id": f"run-{thread}", "delta": texts, "position": position, "edit": wanted}


@pytest.mark.parametrize("mode", ["log", "postgres"])
async def test_edits_take_their_turn_and_effect_once(deployment: Deployment, mode: Any) -> None:
    await prepared(deployment)
    thread, named = fresh(), fresh()
    config = SinkConfig(app_id="app", bad_rows="quarantine", mode=mode, **settings_of(deployment))
    await asyncio.to_thread(AppId(config).setup)
    rows = [
        row(thread, 0, [{"id": "a"}, {"id": "b"}]),
        row(thread, 1, delete_messages=["a"]),
        row(thread, 2, [{"id": "c"}]),
        row(thread, 3, metadata={"title": "first"}),
        row(thread, 4, delete_messages=["nobody"]),
        row(thread, 5, metadata={"title": "last"}),
        row(named, 0, metadata={"title": "empty", "resource_id": "me"}),
    ]
    found = (await asyncio.to_thread(write_rows, config, 0, [rows])).counts
    assert (found.written, found.bad) == (6, 1)
    async with deployment.store() as store:
        await store.update_metadata(thread, ThreadMetadata(title="by somebody else"))
        again = (await asyncio.to_thread(write_rows, config, 0, [rows])).counts
        assert (again.written, again.repeated) == (0, 7), "what is set aside is dealt with, too"
        await store.force_flush_all()
        once_more = (await asyncio.to_thread(write_rows, config, 0, [rows])).counts
        assert (once_more.written, once_more.repeated) == (0, 7)
        assert [m["id"] for m in await store.load_messages(thread) or []] == ["b", "c"]
        loaded, other = await store.load_thread(thread), await store.load_thread(named)
    assert loaded is not None
    assert loaded.metadata.title == "by somebody else"
    assert other is not None
    assert (other.metadata.title, other.metadata.resource_id) == ("empty", "me")


@pytest.mark.parametrize("edit", ["[]", "{}", "{", '{"metadata": {}, "delete_messages": []}', '{"surprise": 1}'])
def test_an_edit_that_says_nothing_clear_is_refused(edit: str) -> None:
    with pytest.raises(InvalidRecord):
        wanted_of({"thread_id": "t", "run_id": "r", "edit": edit})
    with pytest.raises(InvalidRecord):
        wanted_of({"thread_id": "t", "run_id": "r", "edit": '{"delete_messages": []}', "delta": ["1"]})


def test_a_stream_may_consist_of_edits() -> None:
    check_columns([("thread_id", "string"), ("run_id", "string"), ("edit", "string")])
