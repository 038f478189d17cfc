"""Repair on a log in memory: what Postgres lacks is found by ids, a share of the threads at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from bufstore import BufferConfig, MemoryThreadStore
from bufstore.buffer.operate import repair
from bufstore.buffer.operate.repair import Repair
from bufstore.buffer.places import group_of
from bufstore.memory import MemoryNats
from bufstore.threads.behind import buffer_of
from helpers import fresh, run_of
from unit.fake_log import run
from unit.test_buffered_in_memory import instance

THREADS, ROUNDS = 40, 6


def tables(inner: MemoryThreadStore) -> list[dict[Any, Any]]:
    ledger = inner.ledger(0)
    return [inner._threads, inner._messages, ledger._rows, ledger._cursors]


def restore(inner: MemoryThreadStore, copies: Sequence[dict[Any, Any]]) -> None:
    for table, copy in zip(tables(inner), copies, strict=True):
        table.clear()
        table.update(copy)


async def written(nats: MemoryNats, inner: MemoryThreadStore, threads: Sequence[str], rounds: range) -> None:
    """A message for each thread in each round; all that come in a round are a group."""
    async with instance(nats, inner) as store:
        for n in rounds:
            await asyncio.gather(*(store.checkpoint_append(t, [f"{t} {n}"], run_of(t, n)) for t in threads))
        await store.force_flush_all()


@pytest.mark.parametrize("share_bytes", [1 << 30, 20_000, 1], ids=["at once", "in shares", "one by one"])
def test_what_postgres_lost_comes_from_the_log_whatever_fits_into_memory(
    share_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repair, "_SHARE_BYTES", share_bytes)
    monkeypatch.setattr(repair, "_CHUNK", 7)

    async def main() -> None:
        nats, inner, threads = MemoryNats(), MemoryThreadStore(), [fresh() for _ in range(THREADS)]
        await written(nats, inner, threads, range(2))
        copies = [dict(table) for table in tables(inner)]
        await written(nats, inner, threads, range(2, ROUNDS))
        restore(inner, copies)
        buffer = buffer_of(inner, nats, BufferConfig(flusher=False), name="repair")
        async with buffer.connected():
            lacking = THREADS * (ROUNDS - 2)
            found = await Repair(buffer.parts, "it went back").look()
            assert (found.done, found.threads, found.applied, found.parked) == (False, THREADS, lacking, 0)
            done = await Repair(buffer.parts, "it went back").carry_out()
            assert (done.done, done.applied, done.parked, done.epoch) == (True, lacking, 0, 1)
            assert "THREADLOG" not in nats.streams
            for t in threads:
                assert await inner.load_messages(t) == [f"{t} {n}" for n in range(ROUNDS)]

    run(main())


def test_an_entry_whose_predecessor_is_gone_is_parked_and_nothing_is_dropped() -> None:
    async def main() -> None:
        nats, inner, threads = MemoryNats(), MemoryThreadStore(), [fresh() for _ in range(3)]
        await written(nats, inner, threads, range(2))
        copies = [dict(table) for table in tables(inner)]
        await written(nats, inner, threads, range(2, ROUNDS))
        restore(inner, copies)
        stream = nats.streams["THREADLOG"]
        buffer = buffer_of(inner, nats, BufferConfig(flusher=False), name="repair")
        async with buffer.connected():
            groups = sorted({group_of(m.seq) async for _, m in buffer.log.scan()})
            stream.remove(groups[3])
            done = await Repair(buffer.parts, "it went back").carry_out()
            assert (done.applied, done.parked) == (len(threads), (ROUNDS - 4) * len(threads))
            assert await buffer.ledger.quarantined() == done.parked

    run(main())
