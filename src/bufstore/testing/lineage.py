"""What every `ThreadRunStore` does with parents, children and deletions."""

from __future__ import annotations

from bufstore.errors import (
    AlreadyExists,
    IdempotencyConflict,
    InvalidId,
    InvalidQuery,
    LineageError,
    NotFound,
    VersionConflict,
)
from bufstore.testing.basics import Capability, Check, at_once, count, fresh, raises, registrar, run_of
from bufstore.threads.lineage import Children
from bufstore.threads.model import Thread, ThreadMetadata
from bufstore.threads.protocol import ThreadRunStore
from bufstore.threads.queries import RunQuery, ThreadQuery

CHECKS: list[Check] = []
_check = registrar(CHECKS)


async def _family(store: ThreadRunStore, *parents: int | None) -> list[str]:
    """Make threads; each number is the index of that thread's parent."""
    ids = [fresh() for _ in parents]
    for thread_id, parent in zip(ids, parents, strict=True):
        await store.checkpoint(thread_id, [thread_id], run_of(thread_id))
        if parent is not None:
            await store.set_parent(thread_id, ids[parent])
    return ids


async def _parent(store: ThreadRunStore, thread_id: str) -> str | None:
    thread = await store.load_thread(thread_id)
    assert thread is not None
    return thread.parent_thread_id


async def _children(store: ThreadRunStore, thread_id: str) -> set[str]:
    page = await store.query_threads(ThreadQuery(parent_thread_id=thread_id))
    return {thread.thread_id for thread in page.threads}


@_check(Capability.LINEAGE, Capability.LISTS)
async def a_parent_is_set_and_taken_off(store: ThreadRunStore) -> None:
    a, b, c = await _family(store, None, 0, 0)
    assert await _children(store, a) == {b, c}
    await store.set_parent(c, b)
    assert (await _children(store, a), await _children(store, b)) == ({b}, {c})
    await store.set_parent(b, None)
    assert (await _parent(store, b), await _children(store, a)) == (None, set())
    # The next run that names a parent decides again.
    await store.checkpoint(b, [], run_of(b, parent_thread_id=a))
    await store.checkpoint(b, [], run_of(b, parent_thread_id=c))
    assert await _parent(store, b) == a


@_check(Capability.LINEAGE)
async def lineage_is_validated(store: ThreadRunStore) -> None:
    a, b, c, d = await _family(store, None, 0, 1, None)
    for thread_id, parent in [(a, a), (a, b), (a, c), (b, c), (d, fresh())]:
        with raises(LineageError):
            await store.set_parent(thread_id, parent)
    with raises(NotFound):
        await store.set_parent(fresh(), a)
    with raises(InvalidId):
        await store.set_parent(a, "")
    assert [await _parent(store, t) for t in (a, b, c, d)] == [None, a, b, None]


@_check(Capability.LINEAGE)
async def a_parent_that_a_run_names_is_validated(store: ThreadRunStore) -> None:
    (a, b), new = await _family(store, None, 0), fresh()
    for thread_id, parent in [(new, fresh()), (new, new), (a, b), (a, a)]:
        run = run_of(thread_id, "named-" + thread_id, parent_thread_id=parent)
        with raises(LineageError):
            await store.checkpoint(thread_id, [1], run)
        with raises(LineageError):
            await store.checkpoint_append(thread_id, [1], run)
    assert await store.load_thread(new) is None
    assert await store.load_messages(a) == [a]
    # A parent is sticky: the parent that a later run names does not count.
    await store.checkpoint(b, [1], run_of(b, parent_thread_id=fresh()))
    await store.checkpoint(new, [1], run_of(new, parent_thread_id=b))
    assert [await _parent(store, t) for t in (a, b, new)] == [None, a, b]


@_check(Capability.LINEAGE)
async def a_repeat_sets_no_parent(store: ThreadRunStore) -> None:
    """The parent was taken off since the write that is repeated, by itself or because it was deleted."""
    (parent, gone), whole, appended = await _family(store, None, None), fresh(), fresh()
    for thread_id, named in [(whole, parent), (appended, gone)]:
        save = store.checkpoint if thread_id == whole else store.checkpoint_append
        run = run_of(thread_id, parent_thread_id=named)
        await save(thread_id, [{"id": "a"}], run, idempotency_key="k")
        await store.set_parent(thread_id, None)
        if named == gone:
            await store.delete_thread(gone)
        assert (await save(thread_id, [{"id": "a"}], run, idempotency_key="k")).repeated
        with raises(IdempotencyConflict):
            await save(thread_id, [{"id": "b"}], run, idempotency_key="k")
        assert await _parent(store, thread_id) is None
        assert await store.load_messages(thread_id) == [{"id": "a"}]


@_check(Capability.LINEAGE)
async def an_append_that_is_refused_sets_no_parent(store: ThreadRunStore) -> None:
    """What stands against an append is told before what stands against the parent that it names."""
    (_, parent, there), new = await _family(store, None, 0, None), fresh()
    await store.checkpoint(there, [{"id": "a"}], run_of(there))
    for named in (parent, fresh()):
        with raises(VersionConflict):
            run = run_of(there, parent_thread_id=named)
            await store.checkpoint_append(there, [{"id": "b"}], run, expected_version=2)
        with raises(AlreadyExists):
            await store.checkpoint_append(there, [{"id": "a"}], run)
        with raises(VersionConflict):
            run = run_of(new, parent_thread_id=named)
            await store.checkpoint_append(new, [{"id": "b"}], run, expected_version=2)
    assert await _parent(store, there) is None
    assert await store.load_messages(there) == [{"id": "a"}]
    assert await store.load_thread(new) is None


@_check(Capability.LINEAGE)
async def two_threads_do_not_become_each_others_parents(store: ThreadRunStore) -> None:
    a, b, c = await _family(store, None, None, None)
    outcomes = await at_once(
        store.set_parent(a, b), store.set_parent(b, c), store.set_parent(c, a), refused=LineageError
    )
    assert count(outcomes, LineageError) == 1
    assert [await _parent(store, t) for t in (a, b, c)].count(None) == 1


@_check(Capability.LINEAGE, Capability.EDITS, Capability.LISTS, Capability.MESSAGE_PAGES)
async def a_deleted_thread_is_gone_with_all_that_is_its_own(store: ThreadRunStore) -> None:
    thread_id, resource = fresh(), fresh("resource")
    run = run_of(thread_id)
    await store.checkpoint(thread_id, [{"id": "a"}, 2], run)
    await store.create_run(run_of(thread_id, "other-" + thread_id))
    await store.save_thread(thread_id, ThreadMetadata(resource_id=resource))
    await store.save_thread_state(thread_id, 1)
    before = await store.checkpoint(thread_id, [{"id": "a"}, 2, 3], run)
    receipt = await store.delete_thread(thread_id)
    assert (receipt.thread_id, receipt.version) == (thread_id, 0)
    assert receipt.thread_seq > before.thread_seq
    assert await store.load_checkpoint(thread_id) is None
    assert await store.load_run(run.run_id) is None
    assert await store.load_run("other-" + thread_id) is None
    assert (await store.query_runs(RunQuery(thread_id=thread_id))).runs == []
    assert (await store.query_threads(ThreadQuery(resource_id=resource))).threads == []
    assert (await store.query_messages(thread_id)).records == []
    with raises(NotFound):
        await store.delete_thread(thread_id)
    with raises(NotFound):
        await store.save_thread_state(thread_id, 2)
    with raises(InvalidQuery):
        await store.delete_thread(thread_id, children="all")  # type: ignore[arg-type]
    # A new thread with the same id begins empty.
    await store.checkpoint_append(thread_id, [{"id": "a"}], run, expected_version=0)
    found = await store.load_checkpoint(thread_id)
    assert found is not None
    assert (found.messages, found.state, found.latest_run) == ([{"id": "a"}], None, run)
    assert found.thread == Thread(
        thread_id=thread_id,
        version=1,
        latest_run_id=run.run_id,
        active_run_id=run.run_id,
        open_run_id=run.run_id,
    )
    assert await store.load_run("other-" + thread_id) is None
    assert (await store.query_runs(RunQuery(thread_id=thread_id))).runs == [run]


@_check(Capability.LINEAGE, Capability.EDITS, Capability.LISTS)
async def deleted_and_written_again_at_once(store: ThreadRunStore) -> None:
    thread_id = fresh()
    for n in range(3):
        await store.checkpoint(thread_id, list(range(n + 2)), run_of(thread_id, f"{n}-{thread_id}"))
        await store.delete_thread(thread_id)
    await store.save_thread(thread_id, ThreadMetadata(title="new"))
    await store.append_messages(thread_id, ["first"])
    assert await store.load_messages(thread_id) == ["first"]
    assert await store.load_thread(thread_id) == Thread(
        thread_id=thread_id, version=1, metadata=ThreadMetadata(title="new")
    )
    assert (await store.query_runs(RunQuery(thread_id=thread_id))).runs == []


@_check(Capability.LINEAGE)
async def a_thread_with_children_is_not_deleted(store: ThreadRunStore) -> None:
    a, b = await _family(store, None, 0)
    with raises(LineageError):
        await store.delete_thread(a)
    assert await store.load_messages(a) == [a]
    assert await _parent(store, b) == a


@_check(Capability.LINEAGE)
async def children_are_detached(store: ThreadRunStore) -> None:
    a, b, c, d = await _family(store, None, 0, 0, 1)
    await store.delete_thread(a, children=Children.DETACH)
    assert await store.load_thread(a) is None
    assert [await _parent(store, t) for t in (b, c, d)] == [None, None, b]
    assert await store.load_messages(b) == [b]


@_check(Capability.LINEAGE, Capability.LISTS)
async def children_are_deleted_too(store: ThreadRunStore) -> None:
    a, b, c, d, other, top = await _family(store, None, 0, 0, 1, None, None)
    await store.set_parent(a, top)
    await store.delete_thread(a, children=Children.CASCADE)
    assert [await store.load_thread(t) for t in (a, b, c, d)] == [None] * 4
    assert await store.load_messages(other) == [other]
    assert await _children(store, top) == set()


@_check(Capability.LINEAGE)
async def runs_that_name_each_others_threads_close_no_circle(store: ThreadRunStore) -> None:
    for _ in range(3):
        _, *ring = await _family(store, None, 0, 0, 0)
        for t in ring:
            await store.set_parent(t, None)
        outcomes = await at_once(
            *(
                store.checkpoint(t, ["new"], run_of(t, f"named-{t}", parent_thread_id=ring[n - 1]))
                for n, t in enumerate(ring)
            ),
            refused=LineageError,
        )
        assert count(outcomes, LineageError) == 1
        parents = {t: await _parent(store, t) for t in ring}
        assert sum(p is None for p in parents.values()) == 1
        assert all(parents[t] in (None, ring[n - 1]) for n, t in enumerate(ring))
        found = [await store.load_messages(t) for t in ring]
        assert found.count(["new"]) == 2, "what was refused is not stored"


@_check(Capability.LINEAGE)
async def a_parent_is_not_deleted_from_under_a_new_child(store: ThreadRunStore) -> None:
    a, b = await _family(store, None, None)
    outcomes = await at_once(store.delete_thread(a), store.set_parent(b, a), refused=LineageError)
    assert count(outcomes, LineageError) == 1
    assert (await store.load_thread(a) is None) == (await _parent(store, b) is None)
