"""The in-memory store keeps the contract."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from bufstore.testing import APPLY_CHECKS, CHECKS, Applier, Check
from bufstore.threads.memory_store import MemoryThreadStore
from bufstore.threads.model import ThreadChange
from helpers import run_of


@pytest.mark.parametrize("check", CHECKS, ids=str)
async def test_direct_writes(check: Check) -> None:
    await check(MemoryThreadStore())


@pytest.mark.parametrize("check", APPLY_CHECKS, ids=str)
async def test_batches(check: Check) -> None:
    store = MemoryThreadStore()

    async def apply(batch: Sequence[ThreadChange]) -> None:
        await store.apply(None, batch)

    await check(Applier(store, apply))


async def test_a_deleted_thread_begins_anew() -> None:
    """Regression: for a test in memory, a checkpoint with a key of the deleted thread was repeated and stored nothing,
    where Postgres makes a new thread.
    """
    store = MemoryThreadStore()
    run = run_of("t")
    await store.checkpoint("t", [1], run, idempotency_key="k")
    await store.delete_thread("t")
    receipt = await store.checkpoint("t", [1], run, idempotency_key="k")
    assert (receipt.version, receipt.repeated) == (1, False)
    assert await store.load_messages("t") == [1]
