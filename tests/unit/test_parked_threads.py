"""Threads with entries in quarantine: deletions and erasures know them, and a replay says how far it came."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from bufstore import (
    BufferConfig,
    BufferedThreadStore,
    Children,
    LineageError,
    LogConfig,
    MemoryThreadStore,
    NotFound,
    StoreUnavailable,
    ThreadQuarantined,
)
from bufstore.buffer.flush.verdict import Verdict
from bufstore.buffer.operate.replay import Outcome
from bufstore.buffer.ports.ledger import FlushFailed, Replay
from bufstore.cli.operate import quarantine as command
from bufstore.jetstream.messages import Outgoing
from bufstore.memory import MemoryNats
from helpers import run_of
from unit.fake_log import run


class Refusing(MemoryThreadStore):
    """A store that refuses everything of some threads."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: set[str] = set()

    async def apply(self, connection: Any, batch: Sequence[Any]) -> None:
        if not self.refused.isdisjoint(change.thread_id for change in batch):
            raise FlushFailed("a trigger refuses it", Verdict.POISON)
        await super().apply(connection, batch)


@asynccontextmanager
async def opened(inner: Refusing, lanes: int = 1) -> AsyncIterator[BufferedThreadStore]:
    config = BufferConfig(flush_interval_s=0.05, lease_s=4, log=LogConfig(lanes=lanes))
    async with await BufferedThreadStore.open(inner, nats=MemoryNats(), config=config) as store:
        yield store


async def replayed(store: BufferedThreadStore, thread_id: str) -> list[Outcome]:
    return [outcome.outcome for outcome in await store.quarantine_of(thread_id).replay_thread(thread_id)]


@pytest.mark.parametrize("children", Children)
def test_a_thread_that_only_quarantine_has_is_deleted(children: Children) -> None:
    async def main() -> None:
        inner = Refusing()
        inner.refused.add("t")
        async with opened(inner) as store:
            await store.checkpoint("t", [1], run_of("t"))
            await store.force_flush_all()
            with pytest.raises(ThreadQuarantined):
                await store.load_thread("t")
            inner.refused.clear()
            await store.delete_thread("t", children=children)
            await store.force_flush_all()
            assert await replayed(store, "t") == [Outcome.SUPERSEDED], "a replay would bring back what was deleted"
            assert await store.load_thread("t") is None
            with pytest.raises(NotFound):
                await store.delete_thread("t", children=children)

    run(main())


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("how", ["checkpoint", "set_parent"])
def test_a_child_that_only_quarantine_knows_is_a_child(how: str, lanes: int) -> None:
    async def main() -> None:
        inner = Refusing()
        async with opened(inner, lanes) as store:
            await store.checkpoint("parent", [1], run_of("parent"))
            if how == "checkpoint":
                inner.refused.add("child")
                await store.checkpoint("child", [1], run_of("child", parent_thread_id="parent"))
            else:
                await store.checkpoint("child", [1], run_of("child"))
                await store.force_flush_all()
                inner.refused.add("child")
                await store.set_parent("child", "parent")
            await store.force_flush_all()
            inner.refused.clear()
            with pytest.raises(LineageError):
                await store.delete_thread("parent")
            with pytest.raises(ThreadQuarantined):
                await store.delete_thread("parent", children=Children.DETACH)
            assert await store.load_thread("parent") is not None
            await store.delete_thread("parent", children=Children.CASCADE)
            await store.force_flush_all()
            assert await replayed(store, "child") == [Outcome.SUPERSEDED]
            assert await store.load_thread("child") is None
            assert await store.load_thread("parent") is None

    run(main())


@pytest.mark.parametrize("lanes", [1, 2])
def test_an_erasure_takes_descendants_along_that_only_quarantine_has(lanes: int) -> None:
    async def main() -> None:
        inner = Refusing()
        inner.refused |= {"child", "grandchild"}
        async with opened(inner, lanes) as store:
            await store.checkpoint("parent", [1], run_of("parent"))
            await store.checkpoint("child", ["private"], run_of("child", parent_thread_id="parent"))
            await store.checkpoint("grandchild", ["private"], run_of("grandchild", parent_thread_id="child"))
            await store.force_flush_all()
            inner.refused.clear()
            erasure = await store.erase("parent", children=Children.CASCADE)
            assert sorted(erasure.thread_ids) == ["child", "grandchild", "parent"]
            assert erasure.quarantined == 2
            for thread_id in erasure.thread_ids:
                assert await store.quarantine_of(thread_id).page() == []
                assert await store.load_thread(thread_id) is None

    run(main())


def test_what_a_replay_would_not_make_a_child_is_none() -> None:
    async def main() -> None:
        inner = Refusing()
        async with opened(inner) as store:
            for thread_id in ("parent", "other"):
                await store.checkpoint(thread_id, [1], run_of(thread_id))
            await store.checkpoint("sticky", [1], run_of("sticky", parent_thread_id="other"))
            await store.force_flush_all()
            inner.refused |= {"sticky", "healed"}
            await store.checkpoint("sticky", [1, 2], run_of("sticky", 2, parent_thread_id="parent"))
            await store.checkpoint("healed", [1], run_of("healed", parent_thread_id="parent"))
            await store.force_flush_all()
            inner.refused.discard("healed")
            await store.checkpoint("healed", [1, 2], run_of("healed", 2))
            await store.force_flush_all()
            await store.delete_thread("parent")
            assert await store.load_thread("parent") is None
            with pytest.raises(LineageError):
                await store.delete_thread("other")

    run(main())


def test_what_no_replay_can_read_stops_no_deletion() -> None:
    async def main() -> None:
        inner = Refusing()
        async with opened(inner) as store:
            await store.checkpoint("parent", [1], run_of("parent"))
            await store.buffer.log.publish(Outgoing(store.buffer.subjects.of("broken"), b"garbage"), 5.0)
            await store.force_flush_all()
            assert await store.quarantine.count() == 1
            await store.delete_thread("parent")

    run(main())


@pytest.mark.parametrize("before", [0, 1, 2])
def test_a_replay_that_ends_with_an_error_says_what_it_has_done(before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: what was applied before the error counted as left, and of what was left only one page was told."""
    monkeypatch.setattr(command, "_PAGE", 2)

    async def main() -> None:
        inner, told = Refusing(), list[str]()
        inner.refused.add("t")
        async with opened(inner) as store:
            for n in range(1, 7):
                await store.checkpoint_append("t", [n], run_of("t"))
            await store.force_flush_all()
            assert await store.quarantine.count() == 6
            inner.refused.clear()
            parked, left = store.buffer.ledger.parked, before
            replay = parked.replay

            async def one_at_a_time(thread_id: str, start: int, decide: Any) -> Replay:
                nonlocal left
                if not left:
                    raise FlushFailed("another session holds its row", Verdict.LOCKED)
                left -= 1
                return await replay(thread_id, start, lambda watermark, found: decide(watermark, found[:1]))

            async def tell(thread_id: str) -> None:
                told.append(thread_id)

            with monkeypatch.context() as patch:
                patch.setattr(parked, "replay", one_at_a_time)
                patch.setattr(store.quarantine, "_tell", tell)
                if not before:
                    with pytest.raises(StoreUnavailable):
                        await command.replayed(store.quarantine, "t")
                outcomes = [o.outcome for o in await command.replayed(store.quarantine, "t", one_of_many=True)]
            assert outcomes == [Outcome.APPLIED] * before + [Outcome.WAITS] * (6 - before)
            assert told == ["t"] * bool(before), "writers remember a thread without what was applied"
            assert await store.quarantine.count() == 6 - before
            assert await replayed(store, "t") == [Outcome.APPLIED] * (6 - before)
            assert await store.load_messages("t") == [1, 2, 3, 4, 5, 6]

    run(main())
