"""Checkpoints and the reads of one thread: what every store does."""

from __future__ import annotations

from typing import Any

from bufstore.errors import AlreadyExists, IdempotencyConflict, InvalidId, InvalidRecord, VersionConflict
from bufstore.testing.basics import Capability, Check, at_once, count, fresh, raises, registrar, run_of
from bufstore.threads.model import RunStatus, Thread
from bufstore.threads.protocol import ThreadRunStore
from bufstore.types import Receipt

CHECKS: list[Check] = []
_check = registrar(CHECKS)


@_check()
async def what_does_not_exist_is_none(store: ThreadRunStore) -> None:
    thread_id = fresh()
    assert await store.load_checkpoint(thread_id) is None
    assert await store.load_thread(thread_id) is None
    assert await store.load_messages(thread_id) is None
    assert await store.load_run(thread_id) is None
    assert await store.latest_run(thread_id) is None


@_check()
async def a_checkpoint_is_read_back(store: ThreadRunStore) -> None:
    thread_id = fresh()
    run = run_of(thread_id, agent_id="a", input={"x": [1, None, 1.5]}, extensions={"k": "v"}, steps=3)
    messages = [{"id": "1", "role": "user", "content": "hé\u2028"}, {"id": "2", "new": {"deep": [True]}}]
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


@_check(Capability.ANY_VALUE)
async def any_value_comes_back_exactly(store: ThreadRunStore) -> None:
    thread_id = fresh()
    run = run_of(thread_id, input=[b"\0\xff", {1: {None: "\0"}}], output=-(2**63), extensions={"k": 2**63})
    messages = ["\0", b"\0", {"id": "x" * 5000 + "\0"}, {1: 2, "id": "odd"}, 2**64 - 1, 1e300, float("inf"), None, []]
    await store.checkpoint(thread_id, messages, run)
    saved = await store.load_checkpoint(thread_id)
    assert saved is not None
    assert (saved.messages, saved.latest_run) == (messages, run)
    assert [type(m) for m in saved.messages] == [type(m) for m in messages]
    for taken in ("x" * 5000 + "\0", "odd"):
        with raises(AlreadyExists):
            await store.checkpoint_append(thread_id, [{"id": taken}], run)


@_check()
async def a_checkpoint_replaces_the_whole_list(store: ThreadRunStore) -> None:
    thread_id = fresh()
    run = run_of(thread_id)
    for messages in ([1, 2, 3], [1, 2], [1, "two", 3, 4], [], [5]):
        receipt = await store.checkpoint(thread_id, messages, run)
        assert receipt.version == len(messages)
        assert await store.load_messages(thread_id) == messages


@_check()
async def an_append_makes_the_next_version(store: ThreadRunStore) -> None:
    thread_id = fresh()
    run = run_of(thread_id)
    first = await store.checkpoint_append(thread_id, [{"id": "a"}], run, expected_version=0)
    second = await store.checkpoint_append(thread_id, [{"id": "b"}, "no id", {"id": 7}], run, expected_version=1)
    assert [first.version, second.version] == [1, 4]
    assert first.thread_seq < second.thread_seq
    assert await store.load_messages(thread_id) == [{"id": "a"}, {"id": "b"}, "no id", {"id": 7}]


@_check()
async def an_append_without_a_version_goes_behind_whatever_there_is(store: ThreadRunStore) -> None:
    thread_id = fresh()
    run = run_of(thread_id)
    receipts = [await store.checkpoint_append(thread_id, [1], run), await store.checkpoint(thread_id, [2, 3, 4], run)]
    receipts += [await store.checkpoint_append(thread_id, delta, run) for delta in ([5, 6], [], [7])]
    assert [r.version for r in receipts] == [1, 3, 5, 5, 6]
    assert await store.load_messages(thread_id) == [2, 3, 4, 5, 6, 7]


@_check()
async def an_append_to_another_version_is_refused(store: ThreadRunStore) -> None:
    thread_id = fresh()
    with raises(VersionConflict) as new:
        await store.checkpoint_append(thread_id, [1], run_of(thread_id), expected_version=2)
    assert (new.value.expected, new.value.actual) == (2, 0)
    assert await store.load_thread(thread_id) is None
    await store.checkpoint(thread_id, [1, 2], run_of(thread_id))
    with raises(VersionConflict) as stale:
        await store.checkpoint_append(thread_id, [3], run_of(thread_id), expected_version=1)
    assert (stale.value.expected, stale.value.actual) == (1, 2)
    assert await store.load_messages(thread_id) == [1, 2]


@_check()
async def a_message_id_is_appended_once(store: ThreadRunStore) -> None:
    thread_id, long = fresh(), "x" * 5000
    run = run_of(thread_id)
    with raises(AlreadyExists):
        await store.checkpoint_append(thread_id, [{"id": "a"}, {"id": "a"}], run)
    with raises(AlreadyExists):
        await store.checkpoint_append(thread_id, [{"id": "a"}, {"id": "a"}], run, expected_version=9)
    assert await store.load_thread(thread_id) is None
    await store.checkpoint(thread_id, [{"id": "a"}, {"id": long}, {"id": None}], run)
    for taken in ("a", long):
        with raises(AlreadyExists):
            await store.checkpoint_append(thread_id, [{"id": "b"}, {"id": taken}], run)
    await store.checkpoint_append(thread_id, [{"id": "b"}, {"id": None}], run)
    await store.checkpoint(thread_id, [{"id": "b"}], run)
    assert (await store.checkpoint_append(thread_id, [{"id": "a"}], run)).version == 2


@_check()
async def a_run_keeps_its_thread(store: ThreadRunStore) -> None:
    mine, other = fresh(), fresh()
    await store.checkpoint(mine, [1], run_of(mine, "run-" + mine))
    for write in (store.checkpoint, store.checkpoint_append):
        with raises(AlreadyExists):
            await write(other, [2], run_of(other, "run-" + mine))
    assert await store.load_thread(other) is None
    assert await store.load_run("run-" + mine) == run_of(mine, "run-" + mine)


@_check()
async def runs_move_the_threads_row(store: ThreadRunStore) -> None:
    thread_id, parent = fresh(), fresh()
    expected = Thread(thread_id=thread_id)
    await store.checkpoint(parent, [], run_of(parent))
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


@_check()
async def an_idempotency_key_works_once(store: ThreadRunStore) -> None:
    thread_id = fresh()
    run = run_of(thread_id)
    first = await store.checkpoint_append(thread_id, [1], run, idempotency_key="k")
    again = await store.checkpoint_append(thread_id, [1], run, idempotency_key="k")
    assert not first.repeated
    assert (again.repeated, again.id, again.thread_seq) == (True, first.id, first.thread_seq)
    for messages, other_run in (([2], run), ([1], run_of(thread_id, steps=1))):
        with raises(IdempotencyConflict):
            await store.checkpoint_append(thread_id, messages, other_run, idempotency_key="k")
    with raises(IdempotencyConflict):
        await store.checkpoint(thread_id, [1], run, idempotency_key="k")
    assert await store.load_messages(thread_id) == [1]
    # The key is looked up before the version: a retry must not be refused for what it has done itself.
    kept = await store.checkpoint_append(thread_id, [2], run, expected_version=1, idempotency_key="v")
    retried = await store.checkpoint_append(thread_id, [2], run, expected_version=1, idempotency_key="v")
    assert (retried.repeated, retried.version, kept.version) == (True, 2, 2)


@_check()
async def the_last_16_keys_are_known(store: ThreadRunStore) -> None:
    thread_id = fresh()
    run = run_of(thread_id)
    for n in range(17):
        await store.checkpoint(thread_id, [n], run, idempotency_key=f"key {n}")
    assert (await store.checkpoint(thread_id, [1], run, idempotency_key="key 1")).repeated
    assert await store.load_messages(thread_id) == [16]
    assert not (await store.checkpoint(thread_id, [0], run, idempotency_key="key 0")).repeated
    assert await store.load_messages(thread_id) == [0]


@_check()
async def any_allowed_id_is_its_own(store: ThreadRunStore) -> None:
    base = fresh()
    ids = [base + end for end in ("", ".", "*", " ", "'; --", "%s", "\n", "é", "e\u0301", "\u2028", "A", "a", "🙂")]
    ids.append("x" * (1024 - len(base)) + base)
    for n, thread_id in enumerate(ids):
        await store.checkpoint(thread_id, [n], run_of(thread_id, "r" + thread_id if n < 13 else thread_id))
    for n, thread_id in enumerate(ids):
        assert await store.load_messages(thread_id) == [n]


@_check()
async def what_cannot_be_stored_is_refused_first(store: ThreadRunStore) -> None:
    thread_id = fresh()
    for bad in ("", "nul\0", "\ud800", "x" * 1025, b"bytes", None):
        with raises(InvalidId):
            await store.checkpoint(bad, [], run_of(fresh()))  # type: ignore[arg-type]
        with raises(InvalidId):
            await store.load_checkpoint(bad)  # type: ignore[arg-type]
        with raises(InvalidId):
            await store.load_run(bad)  # type: ignore[arg-type]
    with raises(InvalidId):
        await store.checkpoint(thread_id, [], run_of(thread_id), idempotency_key="")
    with raises(InvalidRecord):
        await store.checkpoint(thread_id, [], run_of("another"))
    for value in (object(), (1,), 2**64, "\ud800"):
        with raises(InvalidRecord):
            await store.checkpoint(thread_id, [value], run_of(thread_id))
        with raises(InvalidRecord):
            await store.checkpoint_append(thread_id, [], run_of(thread_id, output=value))
    assert await store.load_thread(thread_id) is None


@_check()
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


@_check()
async def every_runs_last_record_stays(store: ThreadRunStore) -> None:
    """Runs of one thread take turns; none is left behind because another one was saved after it."""
    thread_id = fresh()
    last = {}
    for step in range(4):
        for n in range(3):
            status = RunStatus.DONE if step == n + 1 else RunStatus.RUNNING
            if step <= n + 1:
                last[n] = run_of(thread_id, f"{n}-{thread_id}", status=status, steps=step)
                await store.checkpoint_append(thread_id, [{"step": step}], last[n])
    for run in last.values():
        assert run.status is RunStatus.DONE
        assert await store.load_run(run.run_id) == run
    thread = await store.load_thread(thread_id)
    assert thread is not None
    assert (thread.active_run_id, thread.open_run_id) == (None, None)


@_check()
async def writers_of_one_new_thread_take_turns(store: ThreadRunStore) -> None:
    thread_id = fresh()
    run = run_of(thread_id)
    receipts = await at_once(
        *(store.checkpoint_append(thread_id, [{"id": str(n)}], run) for n in range(20)), refused=VersionConflict
    )
    stored = [r for r in receipts if isinstance(r, Receipt)]
    assert sorted(r.version for r in stored) == list(range(1, 21))
    assert len({r.thread_seq for r in stored}) == 20
    messages = await store.load_messages(thread_id)
    assert messages is not None
    assert sorted(int(m["id"]) for m in messages) == list(range(20))


@_check()
async def of_writers_of_one_version_one_wins(store: ThreadRunStore) -> None:
    thread_id = fresh()
    calls = (store.checkpoint_append(thread_id, [n], run_of(thread_id), expected_version=0) for n in range(20))
    assert count(await at_once(*calls, refused=VersionConflict), VersionConflict) == 19
    assert len(await store.load_messages(thread_id) or []) == 1


@_check()
async def of_two_threads_with_one_run_one_wins(store: ThreadRunStore) -> None:
    run_id = fresh("run")
    threads = [fresh() for _ in range(10)]
    outcomes = await at_once(*(store.checkpoint(t, [1], run_of(t, run_id)) for t in threads), refused=AlreadyExists)
    assert count(outcomes, AlreadyExists) == 9
    assert [await store.load_thread(t) is None for t in threads].count(False) == 1


@_check()
async def messages_and_run_of_a_checkpoint_belong_together(store: ThreadRunStore) -> None:
    """When whole lists are written at once, one is the last, and the latest run is its own."""
    thread_id = fresh()
    calls = (store.checkpoint(thread_id, [n], run_of(thread_id, f"{n}-{thread_id}", steps=n)) for n in range(20))
    await at_once(*calls, refused=VersionConflict)
    saved = await store.load_checkpoint(thread_id)
    assert saved is not None
    assert saved.latest_run is not None
    assert saved.messages == [saved.latest_run.steps]
    for n in range(20):
        assert await store.load_run(f"{n}-{thread_id}") is not None
