"""What every `ThreadRunStore` does: one function per promise, run against each store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import msgspec
import pytest

from bufstore.errors import (
    AlreadyExists,
    IdempotencyConflict,
    InvalidId,
    InvalidRecord,
    VersionConflict,
)
from bufstore.threads.model import (
    Run,
    RunSave,
    RunStatus,
    Thread,
    ThreadChange,
    ThreadMetadata,
    encode_messages,
    encode_metadata,
    encode_run,
    encode_value,
)
from bufstore.threads.protocol import ThreadRunStore
from thread_store_basics import fresh, run_of
from thread_store_edits import EDIT_CHECKS
from thread_store_lineage import LINEAGE_CHECKS
from thread_store_lists import LIST_CHECKS

Check = Callable[[Any], Awaitable[None]]
#: Promises of a store that is written to directly.
CHECKS: list[Check] = [*LIST_CHECKS, *EDIT_CHECKS, *LINEAGE_CHECKS]
#: Promises of a store that the buffer flushes into: these take an `Applier`.
APPLY_CHECKS: list[Check] = []


class Applier(Protocol):
    """A store, and a way to apply a batch to it in a transaction of its own."""

    store: ThreadRunStore

    async def apply(self, *changes: ThreadChange) -> None: ...


def _check(check: Check) -> Check:
    CHECKS.append(check)
    return check


def _apply_check(check: Check) -> Check:
    APPLY_CHECKS.append(check)
    return check


def change(thread_id: str, keep: int, messages: list[Any], *runs: Run, whole: bool = False) -> ThreadChange:
    return ThreadChange(
        thread_id=thread_id,
        keep=keep,
        messages=encode_messages(messages),
        whole=whole,
        runs={run.run_id: encode_run(run) for run in runs},
        saves=[RunSave(run.run_id, run.status, run.parent_thread_id) for run in runs],
    )


@_check
async def what_does_not_exist_is_none(store: ThreadRunStore) -> None:
    thread_id = fresh()
    assert await store.load_checkpoint(thread_id) is None
    assert await store.load_thread(thread_id) is None
    assert await store.load_messages(thread_id) is None
    assert await store.load_run(thread_id) is None
    assert await store.latest_run(thread_id) is None


@_check
async def a_checkpoint_is_read_back(store: ThreadRunStore) -> None:
    thread_id = fresh()
    run = run_of(thread_id, agent_id="a", input={"x": [1, None, b"\0", 1.5]}, extensions={"k": 2**63}, steps=3)
    messages = [{"id": "1", "role": "user", "content": "hé\0\u2028"}, {"id": "2", "new": {"deep": [True]}}]
    receipt = await store.checkpoint(thread_id, messages, run)
    assert (receipt.thread_id, receipt.version, receipt.repeated) == (thread_id, 2, False)
    assert receipt.thread_seq > 0
    assert 0 <= receipt.id < 2**63
    saved = await store.load_checkpoint(thread_id)
    assert saved is not None
    assert (saved.messages, saved.latest_run, saved.version) == (messages, run, 2)
    assert saved.thread == Thread(
        thread_id=thread_id,
        version=2,
        latest_run_id=run.run_id,
        active_run_id=run.run_id,
        open_run_id=run.run_id,
    )
    assert await store.load_thread(thread_id) == saved.thread
    assert await store.load_messages(thread_id) == messages
    assert await store.load_run(run.run_id) == await store.latest_run(thread_id) == run


@_check
async def a_checkpoint_replaces_the_whole_list(store: ThreadRunStore) -> None:
    thread_id = fresh()
    run = run_of(thread_id)
    for messages in ([1, 2, 3], [1, 2], [1, "two", 3, 4], [], [5]):
        receipt = await store.checkpoint(thread_id, messages, run)
        assert receipt.version == len(messages)
        assert await store.load_messages(thread_id) == messages


@_check
async def an_append_extends_the_list(store: ThreadRunStore) -> None:
    thread_id = fresh()
    run = run_of(thread_id)
    first = await store.checkpoint_append(thread_id, [{"id": "a"}], run, expected_version=0)
    second = await store.checkpoint_append(thread_id, [{"id": "b"}, "no id", {"id": 7}], run, expected_version=1)
    third = await store.checkpoint_append(thread_id, [], run)
    assert [first.version, second.version, third.version] == [1, 4, 4]
    assert first.thread_seq < second.thread_seq < third.thread_seq
    assert await store.load_messages(thread_id) == [{"id": "a"}, {"id": "b"}, "no id", {"id": 7}]


@_check
async def an_append_to_another_version_is_refused(store: ThreadRunStore) -> None:
    thread_id = fresh()
    with pytest.raises(VersionConflict) as new:
        await store.checkpoint_append(thread_id, [1], run_of(thread_id), expected_version=2)
    assert (new.value.expected, new.value.actual) == (2, 0)
    assert await store.load_thread(thread_id) is None
    await store.checkpoint(thread_id, [1, 2], run_of(thread_id))
    with pytest.raises(VersionConflict) as stale:
        await store.checkpoint_append(thread_id, [3], run_of(thread_id), expected_version=1)
    assert (stale.value.expected, stale.value.actual) == (1, 2)
    assert await store.load_messages(thread_id) == [1, 2]


@_check
async def a_message_id_is_appended_once(store: ThreadRunStore) -> None:
    thread_id, long = fresh(), "x" * 5000 + "\0"
    run = run_of(thread_id)
    with pytest.raises(AlreadyExists):
        await store.checkpoint_append(thread_id, [{"id": "a"}, {"id": "a"}], run)
    assert await store.load_thread(thread_id) is None
    await store.checkpoint(thread_id, [{"id": "a"}, {"id": long}, {1: 2, "id": "odd"}, {"id": None}], run)
    for taken in ("a", long, "odd"):
        with pytest.raises(AlreadyExists):
            await store.checkpoint_append(thread_id, [{"id": "b"}, {"id": taken}], run)
    await store.checkpoint_append(thread_id, [{"id": "b"}, {"id": None}], run)
    await store.checkpoint(thread_id, [{"id": "b"}], run)
    assert (await store.checkpoint_append(thread_id, [{"id": "a"}], run)).version == 2


@_check
async def a_run_keeps_its_thread(store: ThreadRunStore) -> None:
    mine, other = fresh(), fresh()
    await store.checkpoint(mine, [1], run_of(mine, "run-" + mine))
    for write in (store.checkpoint, store.checkpoint_append):
        with pytest.raises(AlreadyExists):
            await write(other, [2], run_of(other, "run-" + mine))
    assert await store.load_thread(other) is None
    assert await store.load_run("run-" + mine) == run_of(mine, "run-" + mine)


@_check
async def runs_move_the_threads_row(store: ThreadRunStore) -> None:
    thread_id, parent = fresh(), fresh()
    expected = Thread(thread_id=thread_id)
    await store.save_thread(parent)
    steps = [
        ("one", RunStatus.CREATED, None),
        ("one", RunStatus.RUNNING, parent),
        ("two", RunStatus.DONE, fresh()),
        ("one", RunStatus.WAITING, None),
        ("two", RunStatus.RUNNING, None),
        ("one", RunStatus.DONE, None),
        ("two", RunStatus.DONE, None),
    ]
    for name, status, parent_id in steps:
        run = run_of(thread_id, f"{name}-{thread_id}", status=status, parent_thread_id=parent_id)
        await store.checkpoint(thread_id, [], run)
        expected = expected.with_run(run)
        assert await store.load_thread(thread_id) == expected
        assert await store.latest_run(thread_id) == run


@_check
async def an_idempotency_key_works_once(store: ThreadRunStore) -> None:
    thread_id = fresh()
    run = run_of(thread_id)
    first = await store.checkpoint_append(thread_id, [1], run, idempotency_key="k")
    again = await store.checkpoint_append(thread_id, [1], run, idempotency_key="k")
    assert not first.repeated
    assert (again.repeated, again.id, again.thread_seq) == (True, first.id, first.thread_seq)
    for messages, other_run in (([2], run), ([1], run_of(thread_id, steps=1))):
        with pytest.raises(IdempotencyConflict):
            await store.checkpoint_append(thread_id, messages, other_run, idempotency_key="k")
    with pytest.raises(IdempotencyConflict):
        await store.checkpoint(thread_id, [1], run, idempotency_key="k")
    assert await store.load_messages(thread_id) == [1]
    # Known before the version is looked at: a retry must not be refused for what it has done itself.
    kept = await store.checkpoint_append(thread_id, [2], run, expected_version=1, idempotency_key="v")
    retried = await store.checkpoint_append(thread_id, [2], run, expected_version=1, idempotency_key="v")
    assert (retried.repeated, retried.version, kept.version) == (True, 2, 2)


@_check
async def the_last_16_keys_are_known(store: ThreadRunStore) -> None:
    thread_id = fresh()
    run = run_of(thread_id)
    for n in range(17):
        await store.checkpoint(thread_id, [n], run, idempotency_key=f"key {n}")
    assert (await store.checkpoint(thread_id, [1], run, idempotency_key="key 1")).repeated
    assert await store.load_messages(thread_id) == [16]
    assert not (await store.checkpoint(thread_id, [0], run, idempotency_key="key 0")).repeated
    assert await store.load_messages(thread_id) == [0]


@_check
async def any_allowed_id_is_its_own(store: ThreadRunStore) -> None:
    base = fresh()
    ids = [base + end for end in ("", ".", "*", " ", "'; --", "%s", "\n", "é", "e\u0301", "\u2028", "A", "a", "🙂")]
    ids.append("x" * (1024 - len(base)) + base)
    for n, thread_id in enumerate(ids):
        await store.checkpoint(thread_id, [n], run_of(thread_id, "r" + thread_id if n < 13 else thread_id))
    for n, thread_id in enumerate(ids):
        assert await store.load_messages(thread_id) == [n]


@_check
async def what_cannot_be_stored_is_refused_first(store: ThreadRunStore) -> None:
    thread_id = fresh()
    for bad in ("", "nul\0", "\ud800", "x" * 1025, b"bytes", None):
        with pytest.raises(InvalidId):
            await store.checkpoint(bad, [], run_of(fresh()))  # type: ignore[arg-type]
        with pytest.raises(InvalidId):
            await store.load_checkpoint(bad)  # type: ignore[arg-type]
        with pytest.raises(InvalidId):
            await store.load_run(bad)  # type: ignore[arg-type]
    with pytest.raises(InvalidId):
        await store.checkpoint(thread_id, [], run_of(thread_id), idempotency_key="")
    with pytest.raises(InvalidRecord):
        await store.checkpoint(thread_id, [], run_of("another"))
    for value in (object(), (1,), 2**64, "\ud800"):
        with pytest.raises(InvalidRecord):
            await store.checkpoint(thread_id, [value], run_of(thread_id))
        with pytest.raises(InvalidRecord):
            await store.checkpoint_append(thread_id, [], run_of(thread_id, output=value))
    assert await store.load_thread(thread_id) is None


@_check
async def the_callers_objects_stay_the_callers(store: ThreadRunStore) -> None:
    thread_id = fresh()
    message: dict[str, Any] = {"list": [1]}
    given = [message]
    await store.checkpoint(thread_id, given, run_of(thread_id))
    message["list"].append(2)
    given.append(message)
    loaded = await store.load_messages(thread_id)
    assert loaded == [{"list": [1]}]
    loaded[0]["list"].append(3)
    assert await store.load_messages(thread_id) == [{"list": [1]}]


@_check
async def writers_of_one_new_thread_take_turns(store: ThreadRunStore) -> None:
    thread_id = fresh()
    run = run_of(thread_id)
    receipts = await asyncio.gather(*(store.checkpoint_append(thread_id, [{"id": str(n)}], run) for n in range(20)))
    assert sorted(r.version for r in receipts) == list(range(1, 21))
    assert len({r.thread_seq for r in receipts}) == 20
    messages = await store.load_messages(thread_id)
    assert messages is not None
    assert sorted(int(m["id"]) for m in messages) == list(range(20))
    other = fresh()
    outcomes = await asyncio.gather(
        *(store.checkpoint_append(other, [n], run_of(other), expected_version=0) for n in range(20)),
        return_exceptions=True,
    )
    assert sum(isinstance(o, VersionConflict) for o in outcomes) == 19


@_check
async def of_two_threads_with_one_run_one_wins(store: ThreadRunStore) -> None:
    run_id = fresh("run")
    threads = [fresh() for _ in range(10)]
    outcomes = await asyncio.gather(
        *(store.checkpoint(t, [1], run_of(t, run_id)) for t in threads), return_exceptions=True
    )
    assert sum(isinstance(o, AlreadyExists) for o in outcomes) == 9
    assert [await store.load_thread(t) is None for t in threads].count(False) == 1


@_apply_check
async def a_batch_is_applied(applier: Applier) -> None:
    a, b, c = fresh("c"), fresh("b"), fresh("a")
    await applier.apply(
        change(a, 0, [1, 2, 3], run_of(a)),
        change(b, 0, [4], run_of(b), run_of(b, "second-" + b), whole=True),
        change(c, 0, []),
    )
    await applier.apply(
        change(b, 0, [4, 5, 6], run_of(b, status=RunStatus.DONE), whole=True),
        change(a, 2, ["three", {"id": "four"}], run_of(a, status=RunStatus.DONE)),
    )
    await applier.apply(change(a, 3, []))
    store = applier.store
    assert await store.load_messages(a) == [1, 2, "three"]
    assert await store.load_messages(b) == [4, 5, 6]
    assert await store.load_messages(c) == []
    assert await store.load_thread(a) == Thread(thread_id=a, version=3, latest_run_id=f"run-of-{a}")
    second = "second-" + b
    assert await store.load_thread(b) == Thread(
        thread_id=b, version=3, latest_run_id=f"run-of-{b}", active_run_id=second, open_run_id=second
    )
    assert await store.load_run(f"run-of-{b}") == run_of(b, status=RunStatus.DONE)
    assert await store.load_run(second) == run_of(b, second)


@_apply_check
async def every_field_of_a_change_is_applied(applier: Applier) -> None:
    a, b, c = fresh(), fresh(), fresh()
    store = applier.store
    metadata = ThreadMetadata(title="t", resource_id=fresh("resource"))
    first = change(a, 0, [1, 2], run_of(a, parent_thread_id=b))
    await applier.apply(
        msgspec.structs.replace(first, metadata=encode_metadata(metadata), state=encode_value([1], "state")),
        change(b, 0, [3], run_of(b)),
        change(c, 0, [4], run_of(c)),
    )
    found = await store.load_checkpoint(a)
    assert found is not None
    assert (found.thread.metadata, found.state, found.thread.parent_thread_id) == (metadata, [1], b)
    again = change(b, 0, [5], run_of(b, "new-" + b))
    await applier.apply(
        msgspec.structs.replace(change(a, 2, []), parent=(c,), thread_seq=3),
        msgspec.structs.replace(again, deleted=True, thread_seq=2),
        msgspec.structs.replace(change(c, 0, []), deleted=True, gone=True),
    )
    found = await store.load_checkpoint(a)
    assert found is not None
    assert (found.messages, found.thread.metadata, found.state) == ([1, 2], metadata, [1])
    assert (found.thread.parent_thread_id, found.thread.active_run_id) == (c, f"run-of-{a}")
    assert await store.load_messages(b) == [5]
    assert [await store.load_run(f"run-of-{t}") for t in (b, c)] == [None, None]
    assert await store.load_thread(c) is None
    order = [t.thread_id for t in (await store.query_threads()).threads[:2]]
    assert order == [a, b]


@_apply_check
async def applied_messages_have_ids(applier: Applier) -> None:
    thread_id = fresh()
    await applier.apply(change(thread_id, 0, [{"id": "a"}], run_of(thread_id)))
    with pytest.raises(AlreadyExists):
        await applier.store.checkpoint_append(thread_id, [{"id": "a"}], run_of(thread_id))


@_apply_check
async def an_empty_batch_changes_nothing(applier: Applier) -> None:
    await applier.apply()


@_apply_check
async def another_threads_run_fails_the_batch(applier: Applier) -> None:
    a, b, c = fresh(), fresh(), fresh()
    await applier.apply(change(a, 0, [1], run_of(a)))
    # Which error says so differs; that nothing of the batch is left does not.
    with pytest.raises(Exception, match="belongs to another thread"):
        await applier.apply(change(c, 0, [3], run_of(c)), change(b, 0, [2], run_of(b, f"run-of-{a}")))
    with pytest.raises(Exception, match="belongs to another thread"):
        await applier.apply(change(c, 0, [3], run_of(c, "x" + c)), change(b, 0, [2], run_of(b, "x" + c)))
    assert await applier.store.load_thread(b) is None
    assert await applier.store.load_thread(c) is None
    assert await applier.store.load_run(f"run-of-{a}") == run_of(a)
