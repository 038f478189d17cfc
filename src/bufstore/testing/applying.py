"""What a store does with the batches that the buffer flushes into it: checks that take an `Applier`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from bufstore.testing.basics import Capability, Check, fresh, raises, registrar, run_of
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
from bufstore.threads.queries import RunQuery, ThreadQuery

CHECKS: list[Check] = []
_check = registrar(CHECKS)


@dataclass(frozen=True)
class Applier:
    """A store, and a way to have it apply a batch in a transaction of its own, all or nothing."""

    #: A `WrappableStore`; with Capability.LISTS it is `Queryable` too.
    store: Any
    apply: Callable[[Sequence[ThreadChange]], Awaitable[None]]

    async def messages(self, thread_id: str) -> list[Any] | None:
        """Return the messages that the store has for the thread; None if it does not know the thread."""
        found = await self.store.load_checkpoint(thread_id)
        return None if found is None else list(found.messages)

    async def thread(self, thread_id: str) -> Thread | None:
        """Return the thread's row; None if the store does not know the thread."""
        found = await self.store.load_checkpoint(thread_id)
        return None if found is None else found.thread


def change(
    thread_id: str, keep: int, messages: list[Any], *runs: Run, whole: bool = False, appends: bool = False
) -> ThreadChange:
    """Return a change as the buffer makes it from checkpoints with these runs."""
    return ThreadChange(
        thread_id=thread_id,
        keep=keep,
        messages=encode_messages(messages),
        whole=whole,
        appends=appends,
        runs={run.run_id: encode_run(run) for run in runs},
        saves=[RunSave(run.run_id, run.status, run.parent_thread_id) for run in runs],
    )


@_check()
async def what_was_never_applied_is_none(applier: Applier) -> None:
    assert await applier.store.load_checkpoint(fresh()) is None
    assert await applier.store.load_run(fresh("run")) is None


@_check()
async def a_batch_is_applied(applier: Applier) -> None:
    a, b, c = fresh("c"), fresh("b"), fresh("a")
    await applier.apply(
        [
            change(a, 0, [1, 2, 3], run_of(a)),
            change(b, 0, [4], run_of(b), run_of(b, "second-" + b), whole=True),
            change(c, 0, []),
        ]
    )
    await applier.apply(
        [
            change(b, 0, [4, 5, 6], run_of(b, status=RunStatus.DONE), whole=True),
            change(a, 2, ["three", {"id": "four"}], run_of(a, status=RunStatus.DONE)),
        ]
    )
    await applier.apply([change(a, 3, [])])
    assert [await applier.messages(t) for t in (a, b, c)] == [[1, 2, "three"], [4, 5, 6], []]
    assert await applier.thread(a) == Thread(thread_id=a, version=3, latest_run_id=f"run-of-{a}")
    second = "second-" + b
    assert await applier.thread(b) == Thread(
        thread_id=b, version=3, latest_run_id=f"run-of-{b}", active_run_id=second, open_run_id=second
    )
    assert await applier.store.load_run(f"run-of-{b}") == run_of(b, status=RunStatus.DONE)
    assert await applier.store.load_run(second) == run_of(b, second)
    found = await applier.store.load_checkpoint(b)
    assert found.latest_run == run_of(b, status=RunStatus.DONE)


@_check()
async def numbers_come_back_as_they_were(applier: Applier) -> None:
    """A column of type jsonb makes an integer of a large float, which may have more digits than bufstore takes."""
    thread_id = fresh()
    messages = [{"n": n} for n in (6.02e23, 1e17, -0.0, 0.1, 3.0, 2**53 + 1, 2**64 - 1, -(2**63), 0, True)]
    run = run_of(thread_id, input=messages)
    await applier.apply([change(thread_id, 0, messages, run)])
    assert list(map(repr, await applier.messages(thread_id) or [])) == list(map(repr, messages))
    saved = await applier.store.load_run(run.run_id)
    assert repr(saved.input) == repr(messages)


@_check()
async def a_thread_becomes_shorter_and_longer_again(applier: Applier) -> None:
    thread_id = fresh()
    run = run_of(thread_id)
    for keep, new, expected in [
        (0, list("abcde"), "abcde"),
        (1, [], "a"),
        (1, ["B"], "aB"),
        (0, ["x"], "x"),
        (1, list("yz"), "xyz"),
        (0, [], ""),
    ]:
        await applier.apply([change(thread_id, keep, new, run)])
        assert await applier.messages(thread_id) == list(expected)
        thread = await applier.thread(thread_id)
        assert thread is not None
        assert thread.version == len(expected)


@_check()
async def the_row_of_a_thread_follows_its_runs(applier: Applier) -> None:
    """A change may have several saves: `ThreadChange.project` says which row they lead to."""
    thread_id, parent = fresh(), fresh()
    expected = Thread(thread_id=thread_id)
    for statuses in (["running", "waiting"], ["done", "created"], ["running", "running"], ["done", "done"]):
        runs = [
            run_of(thread_id, f"{n}-{thread_id}", status=RunStatus(s), parent_thread_id=parent)
            for n, s in enumerate(statuses)
        ]
        step = change(thread_id, 0, [], *runs)
        expected = step.project(expected)
        await applier.apply([step])
        assert await applier.thread(thread_id) == expected
    assert expected.parent_thread_id == parent


@_check(Capability.EDITS)
async def metadata_and_state_of_a_change_are_applied(applier: Applier) -> None:
    thread_id = fresh()
    metadata = ThreadMetadata(title="t", resource_id=fresh("resource"))
    first = change(thread_id, 0, [1, 2], run_of(thread_id))
    await applier.apply(
        [msgspec.structs.replace(first, metadata=encode_metadata(metadata), state=encode_value([1], "state"))]
    )
    for _ in range(2):
        found = await applier.store.load_checkpoint(thread_id)
        assert (found.thread.metadata, found.state, found.messages) == (metadata, [1], [1, 2])
        await applier.apply([change(thread_id, 2, [])])  # a change without metadata and state leaves both


@_check(Capability.LINEAGE)
async def parents_and_deletions_are_applied(applier: Applier) -> None:
    a, b, c = fresh(), fresh(), fresh()
    store = applier.store
    await applier.apply(
        [
            change(a, 0, [1, 2], run_of(a, parent_thread_id=b)),
            change(b, 0, [3], run_of(b)),
            change(c, 0, [4], run_of(c)),
        ]
    )
    thread = await applier.thread(a)
    assert thread is not None
    assert thread.parent_thread_id == b
    again = change(b, 0, [5], run_of(b, "new-" + b))
    await applier.apply(
        [
            msgspec.structs.replace(change(a, 2, []), parent=(c,)),
            msgspec.structs.replace(again, deleted=True),
            msgspec.structs.replace(change(c, 0, []), deleted=True, gone=True),
        ]
    )
    thread = await applier.thread(a)
    assert thread is not None
    assert (thread.parent_thread_id, thread.active_run_id) == (c, f"run-of-{a}")
    assert [await applier.messages(t) for t in (a, b, c)] == [[1, 2], [5], None]
    assert [await store.load_run(f"run-of-{t}") for t in (b, c)] == [None, None]
    assert await applier.thread(b) == change(b, 0, [5], run_of(b, "new-" + b)).project(Thread(thread_id=b))


@_check(Capability.LISTS)
async def lists_follow_the_order_of_the_log(applier: Applier) -> None:
    """Within a batch, threads go by `thread_seq`, the highest first, and runs by `run_seqs`, the lowest first."""
    prefix = fresh()
    a, b, c = (f"{prefix}-{n}" for n in "abc")
    runs = [run_of(a, "2" + a), run_of(a, "1" + a)]
    await applier.apply(
        [
            msgspec.structs.replace(change(a, 0, [], *runs), thread_seq=9, run_seqs={"2" + a: 1, "1" + a: 9}),
            msgspec.structs.replace(change(b, 0, [], run_of(b)), thread_seq=3, run_seqs={f"run-of-{b}": 3}),
            msgspec.structs.replace(change(c, 0, [], run_of(c)), thread_seq=5, run_seqs={f"run-of-{c}": 5}),
        ]
    )
    page = await applier.store.query_threads(ThreadQuery(id_prefix=prefix))
    assert [t.thread_id for t in page.threads] == [a, c, b]
    created = [r.run_id for r in (await applier.store.query_runs(RunQuery(thread_id=a))).runs]
    assert created == ["2" + a, "1" + a]


@_check()
async def an_empty_batch_changes_nothing(applier: Applier) -> None:
    a = fresh()
    await applier.apply([change(a, 0, [1], run_of(a))])
    before = await applier.thread(a)
    await applier.apply([])
    assert before is not None
    assert await applier.thread(a) == before


@_check(Capability.RUN_OWNERS)
async def another_threads_run_fails_the_batch(applier: Applier) -> None:
    """The store may choose the error, but it must leave nothing of the batch."""
    a, b, c = fresh(), fresh(), fresh()
    await applier.apply([change(a, 0, [1], run_of(a))])
    for batch in (
        [change(c, 0, [3], run_of(c)), change(b, 0, [2], run_of(b, f"run-of-{a}"))],
        [change(c, 0, [3], run_of(c, "x" + c)), change(b, 0, [2], run_of(b, "x" + c))],
    ):
        with raises(Exception):
            await applier.apply(batch)
    assert [await applier.thread(t) for t in (b, c)] == [None, None]
    assert await applier.store.load_run(f"run-of-{a}") == run_of(a)
