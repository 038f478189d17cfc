"""The in-memory store keeps the contract."""

from __future__ import annotations

import pytest

from bufstore.memory.store import MemoryThreadStore
from bufstore.threads.model import ThreadChange
from thread_store_contract import APPLY_CHECKS, CHECKS, Check


class MemoryApplier:
    def __init__(self) -> None:
        self.store = MemoryThreadStore()

    async def apply(self, *changes: ThreadChange) -> None:
        await self.store.apply(None, changes)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_direct_writes(check: Check) -> None:
    await check(MemoryThreadStore())


@pytest.mark.parametrize("check", APPLY_CHECKS, ids=lambda check: check.__name__)
async def test_batches(check: Check) -> None:
    await check(MemoryApplier())
