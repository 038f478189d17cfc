"""A log that has lost groups in the middle: it is said, it stops nobody, and nothing is made up."""

from __future__ import annotations

import asyncio

import pytest

from bufstore import Consistency, MemoryThreadStore
from bufstore.buffer.places import group_of
from bufstore.memory import MemoryNats
from helpers import fresh, run_of
from unit.fake_log import run
from unit.test_buffered_in_memory import instance


def test_a_lost_group_is_said_and_threads_without_entries_in_it_go_on(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        nats, inner, lost, whole = MemoryNats(), MemoryThreadStore(), fresh(), fresh()
        async with instance(nats, inner, flusher=False) as store:
            for n in range(3):
                for t in (lost, whole):
                    receipt = await store.checkpoint_append(t, [n], run_of(t, n))
                    if (t, n) == (lost, 1):
                        gone = group_of(receipt.thread_seq)
        nats.streams["THREADLOG"].remove(gone)
        # Everybody who comes now reads behind the hole.
        async with instance(nats, inner) as store:
            async with asyncio.timeout(60):
                assert await store.load_messages(whole, consistency=Consistency.STRONG) == [0, 1, 2]
                await store.checkpoint_append(whole, [3], run_of(whole, 3))
                await store.force_flush_all()
            assert await inner.load_messages(whole) == [0, 1, 2, 3]
            # What was built on the lost entry is parked, and not applied on something else.
            assert await inner.load_messages(lost) == [0]
            assert [p.thread_id for p in await store.quarantine.page()] == [lost]
            await store.checkpoint(lost, ["new"], run_of(lost, 4))
            await store.force_flush(lost)
            assert await inner.load_messages(lost) == ["new"]

    run(main())
    assert "log_gap" in {getattr(r, "action", None) for r in caplog.records if r.levelname == "ERROR"}
