"""Reclaiming expired claims when some cannot be reclaimed."""

from __future__ import annotations

import time

import pytest

from bufstore import LogUnavailable
from bufstore.mailbox import MailboxConfig, MemoryMailbox
from bufstore.mailbox.decisions import Step
from bufstore.mailbox.memory import MemoryBackend
from bufstore.mailbox.model import MailboxThread
from bufstore.mailbox.store import MailboxStore


class _Stubborn(MemoryBackend):
    """A backend that refuses every step of some threads."""

    refused: frozenset[str] = frozenset()

    async def write(self, before: MailboxThread, step: Step, now_ms: int) -> MailboxThread:
        if before.thread_id in self.refused:
            raise LogUnavailable("not this one")
        return await super().write(before, step, now_ms)


async def _expired(*threads: str) -> tuple[MailboxStore, _Stubborn]:
    backend = _Stubborn(MemoryMailbox(), time.time, 1.0)
    store = MailboxStore(backend, MailboxConfig(lease_s=0.001, timeout_s=0.01))
    for thread_id in threads:
        await store.enqueue(thread_id)
        assert await store.claim(thread_id, "a worker that dies") is not None
    return store, backend


async def _reclaim(store: MailboxStore) -> list[str]:
    return [d.thread_id for d in await store.reclaim_expired(now_ms=store.backend.now_ms() + 1000)]


async def test_a_claim_that_cannot_be_taken_back_holds_up_no_other() -> None:
    store, backend = await _expired("stuck", "t1", "t2")
    backend.refused = frozenset({"stuck"})
    assert await _reclaim(store) == ["t1", "t2"]
    with pytest.raises(LogUnavailable, match="not this one"):
        await _reclaim(store)
    backend.refused = frozenset()
    assert await _reclaim(store) == ["stuck"]
    assert await _reclaim(store) == []


async def test_many_that_cannot_be_taken_back_come_last() -> None:
    """Each call tries only a few of them, so that it takes a bounded time when the store is away."""
    stuck = [f"stuck{n}" for n in range(7)]
    store, backend = await _expired(*stuck, "t1")
    backend.refused = frozenset(stuck)
    for _ in range(2):
        with pytest.raises(LogUnavailable):
            await _reclaim(store)
    assert await _reclaim(store) == ["t1"]
    backend.refused = frozenset()
    assert sorted(await _reclaim(store)) == stuck
