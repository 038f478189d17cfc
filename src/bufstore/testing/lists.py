"""What every `ThreadRunStore` does with queries: pages of messages, runs and threads."""

from __future__ import annotations

from typing import Any

from bufstore.errors import InvalidId, InvalidQuery
from bufstore.testing.basics import Capability, Check, fresh, raises, registrar, run_of
from bufstore.threads.model import Run, RunStatus, Thread, ThreadMetadata
from bufstore.threads.protocol import ThreadRunStore
from bufstore.threads.queries import MessageQuery, Order, RunQuery, ThreadQuery, Visibility

CHECKS: list[Check] = []
_check = registrar(CHECKS)


def _message(n: int) -> dict[str, Any]:
    return {
        "id": f"m{n}",
        "visibility": "internal" if n % 3 == 0 else "all",
        "metadata": {"run_id": f"run {n % 2}"},
    }


async def _all_seqs(store: ThreadRunStore, thread_id: str, query: MessageQuery, limit: int) -> list[int]:
    seqs: list[int] = []
    cursor = None
    while True:
        page = await store.query_messages(thread_id, query, limit=limit, cursor=cursor)
        assert len(page.records) <= limit
        seqs += [record.seq for record in page.records]
        cursor = page.next_cursor
        if cursor is None:
            return seqs
        assert len(page.records) == limit


@_check(Capability.MESSAGE_PAGES)
async def messages_come_in_pages(store: ThreadRunStore) -> None:
    thread_id = fresh()
    assert (await store.query_messages(thread_id)).records == []
    messages = [_message(n) for n in range(1, 12)]
    await store.checkpoint(thread_id, messages, run_of(thread_id))
    page = await store.query_messages(thread_id)
    assert page.next_cursor is None
    assert [(r.seq, r.message_id, r.message, r.thread_id) for r in page.records] == [
        (n, f"m{n}", _message(n), thread_id) for n in range(1, 12)
    ]
    assert [(r.run_id, r.internal) for r in page.records[:3]] == [("run 1", False), ("run 0", False), ("run 1", True)]
    every = list(range(1, 12))
    for limit in (1, 2, 5, 11):
        assert await _all_seqs(store, thread_id, MessageQuery(), limit) == every
        assert await _all_seqs(store, thread_id, MessageQuery(order=Order.NEWEST_FIRST), limit) == every[::-1]
        between = MessageQuery(after=3, before=9, order=Order.NEWEST_FIRST)
        assert await _all_seqs(store, thread_id, between, limit) == [8, 7, 6, 5, 4]
        assert await _all_seqs(store, thread_id, MessageQuery(after=9, before=9), limit) == []
        assert await _all_seqs(store, thread_id, MessageQuery(visibility=Visibility.INTERNAL), limit) == [3, 6, 9]
        external = MessageQuery(visibility=Visibility.EXTERNAL, run_id="run 1", order=Order.NEWEST_FIRST)
        assert await _all_seqs(store, thread_id, external, limit) == [11, 7, 5, 1]


@_check(Capability.MESSAGE_PAGES)
async def a_page_goes_on_where_it_ended(store: ThreadRunStore) -> None:
    thread_id = fresh()
    await store.checkpoint(thread_id, [1, 2, 3], run_of(thread_id))
    page = await store.query_messages(thread_id, limit=2)
    await store.checkpoint(thread_id, [1, 2, "three", 4], run_of(thread_id))
    rest = await store.query_messages(thread_id, limit=2, cursor=page.next_cursor)
    assert [r.message for r in rest.records] == ["three", 4]
    assert [r.message_id for r in rest.records] == [None, None]


@_check(Capability.MESSAGE_PAGES)
async def limits_are_bounded(store: ThreadRunStore) -> None:
    thread_id = fresh()
    await store.checkpoint(thread_id, list(range(250)), run_of(thread_id))
    assert len((await store.query_messages(thread_id)).records) == 50
    assert len((await store.query_messages(thread_id, limit=1000)).records) == 200
    assert len((await store.query_messages(thread_id, limit=0)).records) == 1
    assert len((await store.query_messages(thread_id, MessageQuery(visibility=Visibility.EXTERNAL))).records) == 50


@_check(Capability.MESSAGE_PAGES)
async def a_cursor_belongs_to_its_query(store: ThreadRunStore) -> None:
    thread_id, other = fresh(), fresh()
    await store.checkpoint(thread_id, [1, 2, 3], run_of(thread_id))
    cursor = (await store.query_messages(thread_id, limit=1)).next_cursor
    assert cursor is not None
    assert len((await store.query_messages(thread_id, limit=2, cursor=cursor)).records) == 2
    for query in (MessageQuery(order=Order.NEWEST_FIRST), MessageQuery(after=0), MessageQuery(run_id="r")):
        with raises(InvalidQuery):
            await store.query_messages(thread_id, query, cursor=cursor)
    with raises(InvalidQuery):
        await store.query_messages(other, cursor=cursor)
    for garbage in ("", "x", "é", "AAAA", cursor[:-3], 7):
        with raises(InvalidQuery):
            await store.query_messages(thread_id, cursor=garbage)  # type: ignore[arg-type]
    with raises(InvalidQuery):
        await store.query_messages(thread_id, limit="5")  # type: ignore[arg-type]
    with raises(InvalidQuery):
        await store.query_messages(thread_id, MessageQuery(after=-1))
    with raises(InvalidId):
        await store.query_messages("", MessageQuery())


@_check(Capability.MESSAGE_PAGES)
async def messages_are_found_by_id_and_position(store: ThreadRunStore) -> None:
    thread_id, long = fresh(), "x" * 5000
    assert await store.load_message(thread_id, "a") is None
    assert await store.load_message_range(thread_id, 1, 9) == []
    await store.checkpoint(thread_id, [{"id": "a"}, "no id", {"id": long}, {"id": "a"}], run_of(thread_id))
    found = await store.load_message(thread_id, "a")
    assert found is not None
    assert (found.seq, found.message) == (1, {"id": "a"})
    last = await store.load_message(thread_id, long)
    assert last is not None
    assert last.seq == 3
    assert await store.load_message(thread_id, "b") is None
    assert [r.seq for r in await store.load_message_range(thread_id, 2, 3)] == [2, 3]
    assert [r.seq for r in await store.load_message_range(thread_id, 0, 100)] == [1, 2, 3, 4]
    assert await store.load_message_range(thread_id, 3, 2) == []
    for bad in (7, "\ud800"):
        with raises(InvalidId):
            await store.load_message(thread_id, bad)  # type: ignore[arg-type]
    with raises(InvalidId):
        await store.load_message_range("", 3, 2)


async def _arrived(store: ThreadRunStore) -> None:
    """Read a list, which covers everything before it: what is written next reaches the store behind all of that."""
    await store.query_threads(ThreadQuery(id_prefix=fresh()))


@_check(Capability.LISTS)
async def runs_of_one_thread_come_in_the_order_of_their_creation(store: ThreadRunStore) -> None:
    thread_id = fresh()
    runs = [run_of(thread_id, f"{n}-{thread_id}") for n in (3, 1, 2)]
    for run in [*runs, runs[0]]:
        await store.checkpoint(thread_id, [], run)
    assert (await store.query_runs(RunQuery(thread_id=thread_id))).runs == runs


async def _all_runs(store: ThreadRunStore, query: RunQuery, limit: int) -> list[Run]:
    runs: list[Run] = []
    cursor = None
    while True:
        page = await store.query_runs(query, limit=limit, cursor=cursor)
        runs += page.runs
        cursor = page.next_cursor
        if cursor is None:
            return runs
        assert len(page.runs) == limit


@_check(Capability.LISTS)
async def runs_come_in_the_order_of_their_creation(store: ThreadRunStore) -> None:
    prefix = fresh("run")
    threads = [fresh(), fresh()]
    made = []
    for n in (5, 3, 8, 1, 9):
        run = run_of(threads[n % 2], f"{prefix}-{n}", status=RunStatus.DONE if n > 5 else RunStatus.RUNNING)
        made.append(run)
        await store.checkpoint(run.thread_id, [], run)
        await _arrived(store)
    again = run_of(threads[1], f"{prefix}-5", steps=7)
    await store.checkpoint(threads[1], [], again)
    made[0] = again
    for limit in (1, 2, 5, 9):
        assert await _all_runs(store, RunQuery(id_prefix=prefix), limit) == made
        assert await _all_runs(store, RunQuery(thread_id=threads[0]), limit) == [made[2]]
        assert await _all_runs(store, RunQuery(thread_id=threads[1], status=RunStatus.DONE), limit) == [made[4]]
        running = RunQuery(status=RunStatus.RUNNING, id_prefix=prefix)
        assert await _all_runs(store, running, limit) == [again, made[1], made[3]]
    assert await _all_runs(store, RunQuery(id_prefix=prefix + "%"), 5) == []
    cursor = (await store.query_runs(RunQuery(id_prefix=prefix), limit=1)).next_cursor
    with raises(InvalidQuery):
        await store.query_runs(RunQuery(id_prefix=prefix, status=RunStatus.DONE), cursor=cursor)
    with raises(InvalidQuery):
        await store.query_runs(RunQuery(status="done"))  # type: ignore[arg-type]


async def _all_threads(store: ThreadRunStore, query: ThreadQuery, limit: int) -> list[Thread]:
    threads: list[Thread] = []
    cursor = None
    while True:
        page = await store.query_threads(query, limit=limit, cursor=cursor)
        threads += page.threads
        cursor = page.next_cursor
        if cursor is None:
            return threads
        assert len(page.threads) == limit


@_check(Capability.LISTS, Capability.EDITS)
async def the_thread_that_was_changed_last_comes_first(store: ThreadRunStore) -> None:
    prefix = fresh()
    resource, parent = f"resource of {prefix}", f"{prefix}-parent"
    names = [parent, *(f"{prefix}-{n}" for n in (4, 2, 7, 1))]
    for n, name in enumerate(names):
        run = run_of(name, parent_thread_id=parent if n in (2, 3) else None)
        await store.checkpoint(name, [n], run)
        await _arrived(store)
    for name in (names[1], names[3]):
        await store.update_metadata(name, ThreadMetadata(resource_id=resource))
        await _arrived(store)
    expected = [names[i] for i in (3, 1, 4, 2, 0)]
    for limit in (1, 2, 5, 9):
        for query, ids in [
            (ThreadQuery(id_prefix=prefix), expected),
            (ThreadQuery(resource_id=resource), [names[3], names[1]]),
            (ThreadQuery(parent_thread_id=parent), [names[3], names[2]]),
            (ThreadQuery(id_prefix=prefix, roots=True), [names[1], names[4], names[0]]),
            (ThreadQuery(resource_id=resource, parent_thread_id=parent), [names[3]]),
            (ThreadQuery(id_prefix=prefix + "_"), []),
        ]:
            found = await _all_threads(store, query, limit)
            assert [thread.thread_id for thread in found] == ids
            for thread in found:
                assert thread == await store.load_thread(thread.thread_id)
    cursor = (await store.query_threads(ThreadQuery(id_prefix=prefix), limit=1)).next_cursor
    with raises(InvalidQuery):
        await store.query_threads(ThreadQuery(), cursor=cursor)
    with raises(InvalidQuery):
        await store.query_threads(ThreadQuery(roots=True, parent_thread_id=parent))
    with raises(InvalidId):
        await store.query_threads(ThreadQuery(resource_id="\0"))
