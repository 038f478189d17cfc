"""Rows that edit a thread, among its checkpoints, take effect once; without Spark."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from bufstore import InvalidRecord, ProducerSequence, Receipt, ThreadMetadata, failpoints
from bufstore.failpoints import Failpoint
from bufstore.spark import SinkConfig
from bufstore.spark.sink.app_id import AppId
from bufstore.spark.sink.checkpoint_rows import check_columns, wanted_of
from bufstore.spark.sink.row_writer import Pass, write_rows
from bufstore.threads.lineage import Children, deletion
from conftest import Deployment
from helpers import fresh, run_of
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


@pytest.mark.parametrize("mode", ["log", "postgres"])
async def test_deletions_take_their_turn_and_effect_once(deployment: Deployment, mode: Any) -> None:
    """A repeated deletion spares a thread that another writer has recreated; an unknown thread counts as deleted."""
    await prepared(deployment)
    again, gone, other, nobody = fresh(), fresh(), fresh(), fresh()
    config = SinkConfig(app_id="app", mode=mode, **settings_of(deployment))
    await asyncio.to_thread(AppId(config).setup)
    rows = [
        row(again, 0, [{"id": "a"}]),
        row(again, 1, delete_thread="reject"),
        row(again, 2, [{"id": "b"}]),
        row(gone, 0, [{"id": "a"}]),
        row(gone, 1, delete_thread="reject"),
        row(other, 0, [{"id": "a"}]),
        row(other, 1, delete_thread="reject"),
        row(nobody, 0, delete_thread="reject"),
    ]
    async with deployment.store() as store:
        found = (await asyncio.to_thread(write_rows, config, 0, [rows])).counts
        assert (found.written, found.repeated, found.bad) == (7, 1, 0)
        await store.checkpoint(other, [{"id": "c"}], run_of(other, 1))
        for _ in range(2):
            found = (await asyncio.to_thread(write_rows, config, 0, [rows])).counts
            assert (found.written, found.repeated) == (0, 8)
            loaded = {t: await store.load_messages(t) for t in (again, gone, other, nobody)}
            assert loaded == {again: [{"id": "b"}], gone: None, other: [{"id": "c"}], nobody: None}
            await store.force_flush_all()


async def test_a_deletion_says_what_happens_to_children(deployment: Deployment) -> None:
    await prepared(deployment)
    config = SinkConfig(app_id="app", bad_rows="quarantine", **settings_of(deployment))
    await asyncio.to_thread(AppId(config).setup)
    names = {how: (fresh(), fresh()) for how in ("reject", "detach", "cascade", "both")}
    async with deployment.store() as store:
        for parent, child in names.values():
            await store.checkpoint(parent, [], run_of(parent))
            await store.checkpoint(child, [], run_of(child, parent_thread_id=parent))
        rows = [row(parent, 0, delete_thread=how) for how, (parent, _) in names.items() if how != "both"]
        # In the order of ids the parent may come first: its deletion waits for the child's.
        rows += [row(t, 0, delete_thread="reject") for t in names["both"]]
        found = (await asyncio.to_thread(write_rows, config, None, [rows], Pass(judging=False))).counts
        assert (found.written, found.bad) == (4, 1), found.reasons
        assert "has children" in found.reasons[0]
        there = {how: [await store.load_thread(t) is not None for t in both] for how, both in names.items()}
        assert there == {
            "reject": [True, True], "detach": [False, True], "cascade": [False, False], "both": [False, False]
        }  # fmt: skip


@pytest.mark.parametrize(
    ("point", "effective"),
    [
        (Failpoint.LINEAGE_PLACED, False),
        (Failpoint.LINEAGE_EDITED, True),
        (Failpoint.LINEAGE_CARRIED_OUT, True),
        (Failpoint.LINEAGE_MARKED, True),
    ],
)
async def test_a_deletion_that_was_broken_off_is_not_done_twice(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, point: Failpoint, effective: bool
) -> None:
    """Entries written behind the deletion stay, if it had taken effect."""
    thread, number = fresh(), ProducerSequence("app", 7)

    def fail(reached: Failpoint) -> None:
        if reached is point:
            raise asyncio.CancelledError

    async with deployment.store() as store, deployment.store() as other:
        await store.checkpoint(thread, ["old"], run_of(thread))
        with monkeypatch.context() as patched:
            patched.setattr(failpoints, "active", fail)
            with pytest.raises(asyncio.CancelledError):
                await store.bulk.delete(deletion(thread, Children.REJECT), number)
        await other.checkpoint_append(thread, ["new"], run_of(thread))
        assert await other.bulk.delete(deletion(thread, Children.REJECT), number) is effective
        assert await store.load_messages(thread) == (["new"] if effective else None)


async def test_a_deletion_that_another_finished_was_not_done_before(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next deletion completes one that has begun; of concurrent deletions all but one once met their own mark."""
    thread, beside, number = fresh(), fresh(), ProducerSequence("app", 7)
    async with deployment.store() as store, deployment.store() as other:
        for one in (thread, beside):
            await store.checkpoint(one, ["old"], run_of(one))
        lineage = store.bulk._lineage
        carry_out = lineage._carry_out

        async def after_another(*of: Any) -> Receipt:
            await other.bulk.delete(deletion(beside, Children.REJECT), number)
            return await carry_out(*of)

        monkeypatch.setattr(lineage, "_carry_out", after_another)
        assert await store.bulk.delete(deletion(thread, Children.REJECT), number) is False
        assert [await store.load_thread(one) for one in (thread, beside)] == [None, None]


@pytest.mark.parametrize(
    "edit",
    ["[]", "{}", "{", '{"delete_thread": "maybe"}', '{"metadata": {}, "delete_messages": []}', '{"surprise": 1}'],
)
def test_an_edit_that_says_nothing_clear_is_refused(edit: str) -> None:
    with pytest.raises(InvalidRecord):
        wanted_of({"thread_id": "t", "run_id": "r", "edit": edit})
    with pytest.raises(InvalidRecord):
        wanted_of({"thread_id": "t", "run_id": "r", "edit": '{"delete_messages": []}', "delta": ["1"]})


def test_a_stream_may_consist_of_edits() -> None:
    check_columns([("thread_id", "string"), ("run_id", "string"), ("edit", "string")])
