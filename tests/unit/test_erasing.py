"""Erasing a thread, on a log in memory and in virtual time: what goes, what stays, and when."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bufstore import (
    AlreadyExists,
    BufferedThreadStore,
    Children,
    Consistency,
    LineageError,
    LogConfig,
    MemoryThreadStore,
    Run,
    Unavailable,
)
from bufstore.memory import MemoryNats
from helpers import fresh, run_of
from unit.fake_log import run
from unit.test_buffered_in_memory import alone, instance


class Picky(MemoryThreadStore):
    """Refuses messages with a mark."""

    async def apply(self, connection: Any, batch: Any) -> None:
        if any(b"poison" in m for c in batch for m in c.messages):
            raise AlreadyExists("refused")
        await super().apply(connection, batch)


async def content_of(store: BufferedThreadStore, thread_id: str) -> list[bytes]:
    """The bodies of what the log holds of a thread."""
    return [m.body for m in await store.buffer.log.after(store.buffer.subjects.of(thread_id), 0, 5.0)]


def test_what_was_written_leaves_the_log_and_others_stay() -> None:
    async def main(store: BufferedThreadStore) -> None:
        gone, other = fresh(), fresh()
        for thread_id in (gone, other):
            for n in range(3):
                await store.checkpoint(thread_id, [f"secret {i}" for i in range(n + 1)], run_of(thread_id))
        erasure = await store.erase(gone)
        assert (erasure.thread_ids, erasure.found, erasure.log_messages) == ((gone,), True, 3)
        assert not any(b"secret" in body for body in await content_of(store, gone))
        assert await store.load_checkpoint(gone, consistency=Consistency.STRONG) is None
        assert len(await content_of(store, other)) == 3
        assert await store.load_messages(other) == [f"secret {n}" for n in range(3)]
        await store.checkpoint(gone, ["new"], run_of(gone, 1))
        assert await store.load_messages(gone, consistency=Consistency.STRONG) == ["new"]

    alone(main)


def test_nothing_leaves_the_log_while_postgres_may_still_need_it() -> None:
    async def main(store: BufferedThreadStore) -> None:
        thread_id = fresh()
        await store.checkpoint(thread_id, ["secret"], run_of(thread_id))
        loop = asyncio.get_running_loop()
        began = loop.time()
        erasing = asyncio.create_task(store.erase(thread_id))
        await asyncio.sleep(19)
        assert any(b"secret" in body for body in await content_of(store, thread_id))
        await erasing
        assert loop.time() - began >= 20

    alone(main, log=LogConfig(failover_window_s=20.0))


def test_a_postgres_that_goes_back_is_waited_for_again() -> None:
    async def main() -> None:
        nats, inner, thread_id = MemoryNats(), MemoryThreadStore(), fresh()
        async with instance(nats, inner, log=LogConfig(failover_window_s=20.0)) as store:
            ledger = inner.ledger(0)
            tables = [inner._threads, inner._messages, ledger._rows, ledger._cursors]
            await store.checkpoint(thread_id, ["secret"], run_of(thread_id))
            await store.force_flush(thread_id)
            copies = [dict(table) for table in tables]
            erasing = asyncio.create_task(store.erase(thread_id))
            await asyncio.sleep(15)
            for table, copy in zip(tables, copies, strict=True):
                table.clear()
                table.update(copy)
            await asyncio.sleep(10)
            # It has flushed the removal again, and a copy of now may be without it.
            assert any(b"secret" in body for body in await content_of(store, thread_id))
            assert (await erasing).log_messages == 1
            assert await inner.load_checkpoint(thread_id) is None

    run(main())


def test_where_nobody_flushes_it_says_so_and_can_be_repeated() -> None:
    async def main() -> None:
        nats, inner, thread_id = MemoryNats(), MemoryThreadStore(), fresh()
        async with instance(nats, inner, flusher=False, flush_timeout_s=5.0) as store:
            await store.checkpoint(thread_id, ["secret"], run_of(thread_id))
            with pytest.raises(Unavailable):
                await store.erase(thread_id)
            async with instance(nats, inner):
                assert (await store.erase(thread_id)).log_messages == 1
            assert not any(b"secret" in body for body in await content_of(store, thread_id))

    run(main())


def test_it_may_be_repeated_and_says_when_there_was_nothing() -> None:
    async def main(store: BufferedThreadStore) -> None:
        thread_id = fresh()
        await store.checkpoint(thread_id, ["secret"], run_of(thread_id))
        await store.delete_thread(thread_id)
        assert (await store.erase(thread_id)).found
        again = await store.erase(thread_id)
        assert (again.found, again.log_messages, again.quarantined) == (False, 0, 0)
        assert not (await store.erase(fresh())).found

    alone(main)


@pytest.mark.parametrize("first", [[], ["good"]], ids=["alone", "behind what was applied"])
def test_poison_leaves_log_and_quarantine(first: list[str]) -> None:
    async def main() -> None:
        nats, inner, thread_id, other = MemoryNats(), Picky(), fresh(), fresh()
        async with instance(nats, inner) as store:
            if first:
                await store.checkpoint(thread_id, first, run_of(thread_id))
            for t in (thread_id, other):
                await store.checkpoint(t, [*first, "poison"], run_of(t, 1))
            await asyncio.sleep(120)
            assert await store.quarantined() == 2
            erasure = await store.erase(thread_id)
            assert (erasure.found, erasure.quarantined) == (True, 1)
            assert not any(b"poison" in body for body in await content_of(store, thread_id))
            assert await store.quarantined() == 1
            await store.checkpoint(thread_id, ["new"], run_of(thread_id, 2))
            assert await store.load_messages(thread_id, consistency=Consistency.STRONG) == ["new"]

    run(main())


def test_poison_that_came_behind_a_deletion_leaves_the_log_too() -> None:
    async def main() -> None:
        nats, inner, thread_id, other = MemoryNats(), Picky(), fresh(), fresh()
        async with instance(nats, inner) as store:
            await store.checkpoint(thread_id, ["good"], run_of(thread_id))
            await store.delete_thread(thread_id)
            for t in (thread_id, other):
                await store.checkpoint(t, ["poison"], run_of(t, 1))
            await asyncio.sleep(120)
            assert await store.quarantined() == 2
            erasure = await store.erase(thread_id)
            assert (erasure.written_again, erasure.quarantined) == ((), 1)
            assert not any(b"poison" in body for body in await content_of(store, thread_id))
            await store.checkpoint(thread_id, ["new"], run_of(thread_id, 2))
            assert await store.load_messages(thread_id, consistency=Consistency.STRONG) == ["new"]

    run(main())


def test_descendants_are_erased_with_their_ancestor() -> None:
    async def main(store: BufferedThreadStore) -> None:
        parent, child, grandchild = fresh("parent"), fresh("child"), fresh("grandchild")
        await store.checkpoint(parent, ["secret"], run_of(parent))
        for thread_id, above in ((child, parent), (grandchild, child)):
            run_ = Run(run_id=fresh("run"), thread_id=thread_id, parent_thread_id=above)
            await store.checkpoint(thread_id, ["secret"], run_)
        with pytest.raises(LineageError):
            await store.erase(parent)
        erasure = await store.erase(parent, children=Children.CASCADE)
        assert sorted(erasure.thread_ids) == sorted([parent, child, grandchild])
        assert erasure.log_messages == 3
        for thread_id in erasure.thread_ids:
            assert not any(b"secret" in body for body in await content_of(store, thread_id))

    alone(main)


def test_what_is_written_while_it_waits_stays() -> None:
    async def main(store: BufferedThreadStore) -> None:
        thread_id = fresh()
        await store.checkpoint(thread_id, ["secret"], run_of(thread_id))
        erasing = asyncio.create_task(store.erase(thread_id))
        await asyncio.sleep(10)
        await store.checkpoint(thread_id, ["new"], run_of(thread_id, 1))
        await erasing
        bodies = await content_of(store, thread_id)
        assert not any(b"secret" in body for body in bodies)
        assert any(b"new" in body for body in bodies)
        assert await store.load_messages(thread_id, consistency=Consistency.STRONG) == ["new"]

    alone(main)
