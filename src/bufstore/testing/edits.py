"""What every `ThreadRunStore` does with edits of metadata, state, runs and messages."""

from __future__ import annotations

import asyncio

from bufstore.errors import AlreadyExists, InvalidId, InvalidRecord, NotFound, VersionConflict
from bufstore.testing.basics import Capability, Check, at_once, count, fresh, raises, registrar, run_of
from bufstore.threads.model import RunStatus, Thread, ThreadMetadata
from bufstore.threads.protocol import ThreadRunStore
from bufstore.threads.queries import RunQuery

CHECKS: list[Check] = []
_check = registrar(CHECKS)


@_check(Capability.EDITS, Capability.LISTS)
async def a_run_is_created_once(store: ThreadRunStore) -> None:
    thread_id = fresh()
    run = run_of(thread_id, status=RunStatus.CREATED)
    receipt = await store.create_run(run)
    assert (receipt.thread_id, receipt.version) == (thread_id, 0)
    assert await store.load_run(run.run_id) == run
    assert await store.load_thread(thread_id) == Thread(thread_id=thread_id)
    assert await store.latest_run(thread_id) is None
    for again in (run, run_of(fresh(), run.run_id)):
        with raises(AlreadyExists):
            await store.create_run(again)
    started = run_of(thread_id, steps=1)
    await store.checkpoint(thread_id, ["kept"], started)
    with raises(AlreadyExists):
        await store.create_run(run)
    second = run_of(thread_id, "second-" + thread_id)
    assert (await store.create_run(second)).version == 1
    found = await store.load_checkpoint(thread_id)
    assert found is not None
    assert (found.messages, found.latest_run, found.thread.active_run_id) == (["kept"], started, started.run_id)
    assert (await store.query_runs(RunQuery(thread_id=thread_id))).runs == [started, second]


@_check(Capability.EDITS)
async def of_many_creators_of_a_run_one_wins(store: ThreadRunStore) -> None:
    thread_id = fresh()
    outcomes = await at_once(*(store.create_run(run_of(thread_id, steps=n)) for n in range(8)), refused=AlreadyExists)
    assert count(outcomes, AlreadyExists) == 7


@_check(Capability.EDITS, Capability.ANY_VALUE)
async def metadata_stay_until_replaced(store: ThreadRunStore) -> None:
    thread_id = fresh()
    first = ThreadMetadata(title="t\0", resource_id="r", custom={"k": [1, {"deep": b"x"}]})
    with raises(NotFound):
        await store.update_metadata(thread_id, first)
    assert await store.load_thread(thread_id) is None
    await store.save_thread(thread_id, first)
    assert await store.load_thread(thread_id) == Thread(thread_id=thread_id, metadata=first)
    await store.checkpoint(thread_id, [1, 2], run_of(thread_id))
    found = await store.load_checkpoint(thread_id)
    assert found is not None
    assert (found.messages, found.thread.metadata, found.thread.version) == ([1, 2], first, 2)
    second = ThreadMetadata(title="new")
    assert (await store.update_metadata(thread_id, second)).version == 2
    found = await store.load_checkpoint(thread_id)
    assert found is not None
    assert (found.messages, found.thread.metadata, found.latest_run) == ([1, 2], second, run_of(thread_id))
    assert found.thread.active_run_id == run_of(thread_id).run_id
    await store.save_thread(thread_id)
    thread = await store.load_thread(thread_id)
    assert thread is not None
    assert thread.metadata == ThreadMetadata()
    assert await store.load_messages(thread_id) == [1, 2]


@_check(Capability.EDITS)
async def metadata_that_cannot_be_stored_are_refused(store: ThreadRunStore) -> None:
    thread_id = fresh()
    for bad in (
        ThreadMetadata(title=7),  # type: ignore[arg-type]
        ThreadMetadata(title="\ud800"),
        ThreadMetadata(custom={"k": object()}),
        ThreadMetadata(custom={1: 2}),  # type: ignore[dict-item]
        ThreadMetadata(custom=[1]),  # type: ignore[arg-type]
        {"title": "t"},
    ):
        with raises(InvalidRecord):
            await store.save_thread(thread_id, bad)  # type: ignore[arg-type]
    with raises(InvalidId):
        await store.save_thread(thread_id, ThreadMetadata(resource_id="x" * 1025))
    with raises(InvalidId):
        await store.save_thread("nul\0")
    assert await store.load_thread(thread_id) is None
    await store.save_thread(thread_id, ThreadMetadata(title="t", resource_id="x" * 1024))


@_check(Capability.EDITS, Capability.ANY_VALUE)
async def a_state_is_kept_with_the_thread(store: ThreadRunStore) -> None:
    thread_id = fresh()
    with raises(NotFound):
        await store.save_thread_state(thread_id, 1)
    assert await store.load_thread_state(thread_id) is None
    await store.checkpoint(thread_id, [1], run_of(thread_id))
    assert await store.load_thread_state(thread_id) is None
    state = {"revision": 3, "extensions": {"a": [None, b"\0"]}}
    await store.save_thread_state(thread_id, state)
    await store.checkpoint(thread_id, [2], run_of(thread_id))
    found = await store.load_checkpoint(thread_id)
    assert found is not None
    assert (found.state, found.messages) == (state, [2])
    assert await store.load_thread_state(thread_id) == state
    await store.save_thread_state(thread_id, None)
    assert await store.load_thread_state(thread_id) is None
    with raises(InvalidRecord):
        await store.save_thread_state(thread_id, (1,))


@_check(Capability.EDITS)
async def messages_are_appended_without_a_run(store: ThreadRunStore) -> None:
    thread_id = fresh()
    assert (await store.append_messages(thread_id, [{"id": "a"}, 2])).version == 2
    assert await store.latest_run(thread_id) is None
    with raises(AlreadyExists):
        await store.append_messages(thread_id, [{"id": "a"}])
    with raises(AlreadyExists):
        await store.append_messages(thread_id, [{"id": "b"}, {"id": "b"}])
    with raises(VersionConflict):
        await store.append_messages(thread_id, [3], expected_version=1)
    await store.append_messages(thread_id, [3], expected_version=2)
    await store.checkpoint_append(thread_id, [4], run_of(thread_id), expected_version=3)
    with raises(AlreadyExists):
        await store.checkpoint_append(thread_id, [{"id": "a"}], run_of(thread_id))
    assert await store.load_messages(thread_id) == [{"id": "a"}, 2, 3, 4]
    await asyncio.gather(*(store.append_messages(thread_id, [{"id": str(n)}]) for n in range(10)))
    thread = await store.load_thread(thread_id)
    assert thread is not None
    assert thread.version == 14


@_check(Capability.EDITS)
async def messages_are_deleted_by_id_or_all(store: ThreadRunStore) -> None:
    thread_id = fresh()
    with raises(NotFound):
        await store.delete_messages(thread_id)
    await store.checkpoint(thread_id, [{"id": "a"}, 1, {"id": "b"}, 2, {"id": "c"}], run_of(thread_id))
    with raises(NotFound):
        await store.delete_messages(thread_id, ["a", "x"])
    assert (await store.delete_messages(thread_id, ["b", "c"])).version == 3
    assert await store.load_messages(thread_id) == [{"id": "a"}, 1, 2]
    await store.checkpoint_append(thread_id, [{"id": "b"}], run_of(thread_id), expected_version=3)
    assert (await store.delete_messages(thread_id, [])).version == 4
    assert await store.load_messages(thread_id) == [{"id": "a"}, 1, 2, {"id": "b"}]
    assert (await store.delete_messages(thread_id)).version == 0
    assert await store.load_messages(thread_id) == []
    assert await store.latest_run(thread_id) == run_of(thread_id)
    await store.checkpoint_append(thread_id, [5], run_of(thread_id), expected_version=0)
    assert await store.load_messages(thread_id) == [5]


@_check(Capability.EDITS)
async def edits_and_checkpoints_at_once_lose_nothing(store: ThreadRunStore) -> None:
    thread_id = fresh()
    await store.checkpoint(thread_id, [], run_of(thread_id))

    async def talk() -> None:
        for n in range(5):
            await store.checkpoint_append(thread_id, [{"id": f"talk {n}"}], run_of(thread_id, steps=n))

    async def edit() -> None:
        for n in range(5):
            await store.update_metadata(thread_id, ThreadMetadata(title=str(n)))
            await store.save_thread_state(thread_id, n)

    async def add() -> None:
        for n in range(5):
            await store.append_messages(thread_id, [{"id": f"add {n}"}])

    await asyncio.gather(talk(), edit(), add())
    found = await store.load_checkpoint(thread_id)
    assert found is not None
    assert (found.thread.metadata, found.state, found.latest_run) == (
        ThreadMetadata(title="4"),
        4,
        run_of(thread_id, steps=4),
    )
    ids = [m["id"] for m in found.messages]
    for who in ("talk", "add"):
        assert [i for i in ids if i.startswith(who)] == [f"{who} {n}" for n in range(5)]
