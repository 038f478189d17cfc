"""The in-memory store keeps the contract."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from bufstore.testing import APPLY_CHECKS, CHECKS, Applier, Check
from bufstore.threads.memory_store import MemoryThreadStore
from bufstore.threads.model import ThreadChange


@pytest.mark.parametrize("check", CHECKS, ids=str)
async def test_direct_writes(check: Check) -> None:
    await check(MemoryThreadStore())


@pytest.mark.parametrize("check", APPLY_CHECKS, ids=str)
async def test_batches(check: Check) -> None:
    store = MemoryThreadStore()

    async def apply(batch: Sequence[ThreadChange]) -> None:
        await store.apply(None, batch)

    await check(Applier(store, apply))
