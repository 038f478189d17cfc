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
    OutcomeUnknown,
    StoreUnavailable,
    ThreadQuarantined,
)
from bufstore.buffer.flush.verdict import Verdict
from bufstore.buffer.operate.replay import Outcome
from bufstore.buffer.ports.ledger import FlushFailed, Replay
from bufstore.cli.operate import quarantine as command
from bufstore.jetstream.messages import Outgoing
from bufstore.memory import MemoryNats
from bufstore.threads.parked_parents import ParkedParents
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


@pytest.mark.parametrize("to", ["other", None])
def test_a_descendant_that_was_moved_away_is_not_deleted_with_its_old_parent(to: str | None) -> None:
    async def main() -> None:
        inner = Refusing()
        async with opened(inner) as store:
            for thread_id in ("parent", "other"):
                await store.checkpoint(thread_id, [1], run_of(thread_id))
            await store.checkpoint("child", [1], run_of("child", parent_thread_id="parent"))
            await store.force_flush_all()
            inner.refused.add("child")
            await store.set_parent("child", to)
            await store.force_flush_all()
            inner.refused.clear()
            with pytest.raises(ThreadQuarantined):
                await store.delete_thread("parent", children=Children.CASCADE)
            assert await replayed(store, "child") == [Outcome.APPLIED]
            await store.delete_thread("parent", children=Children.CASCADE)
            assert await store.load_messages("child") == [1]

    run(main())


@pytest.mark.parametrize("moved", [["parent", None], ["parent", "other"], ["other", "parent", "other"]])
def test_a_thread_that_was_moved_on_is_no_child_though_all_of_it_is_parked(moved: list[str | None]) -> None:
    async def main() -> None:
        inner = Refusing()
        async with opened(inner) as store:
            for thread_id in ("parent", "other"):
                await store.checkpoint(thread_id, [1], run_of(thread_id))
            await store.force_flush_all()
            inner.refused.add("child")
            first, *later = moved
            await store.checkpoint("child", [1], run_of("child", parent_thread_id=first))
            for parent in later:
                await store.set_parent("child", parent)
            await store.force_flush_all()
            inner.refused.clear()
            await store.delete_thread("parent", children=Children.CASCADE)
            assert set(await replayed(store, "child")) == {Outcome.APPLIED}
            assert await store.load_messages("child") == [1]

    run(main())


def test_a_thread_that_was_deleted_and_written_again_is_no_child_of_before_though_that_is_parked() -> None:
    async def main() -> None:
        inner = Refusing()
        async with opened(inner) as store:
            for thread_id in ("parent", "other"):
                await store.checkpoint(thread_id, [1], run_of(thread_id))
            await store.checkpoint("child", [1], run_of("child", parent_thread_id="parent"))
            await store.force_flush_all()
            inner.refused.add("child")
            await store.delete_thread("child")
            await store.checkpoint("child", ["new"], run_of("child", 1, parent_thread_id="other"))
            await store.force_flush_all()
            inner.refused.clear()
            for delete in (store.delete_thread, store.erase):
                with pytest.raises(ThreadQuarantined):
                    await delete("parent", children=Children.CASCADE)
            with pytest.raises(LineageError):
                await store.delete_thread("other")
            assert await replayed(store, "child") == [Outcome.APPLIED] * 2
            await store.delete_thread("parent", children=Children.CASCADE)
            assert await store.load_messages("child") == ["new"]

    run(main())


def test_a_deletion_that_an_older_release_gave_up_is_not_said_to_be_done() -> None:
    """A process of a release that knows no threads of which all is parked marks their deletions as done."""

    async def main() -> None:
        inner = Refusing()
        inner.refused.add("t")
        async with opened(inner) as store:
            await store.checkpoint("t", [1], run_of("t"))
            await store.force_flush_all()
            lineage = store._lineage
            carry_out = lineage._carry_out

            async def given_up(record: Any, seq: int, going: Any = None) -> Any:
                await lineage._mark(record, seq)
                return await carry_out(record, seq, going)

            lineage._carry_out = given_up  # type: ignore[method-assign]
            with pytest.raises(OutcomeUnknown):
                await store.delete_thread("t")
            lineage._carry_out = carry_out  # type: ignore[method-assign]
            await store.delete_thread("t")
            assert await store.load_thread("t") is None

    run(main())


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_replay_beside_a_deletion_hides_no_child(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        inner = Refusing()
        inner.refused.add("child")
        async with opened(inner) as store:
            await store.checkpoint("parent", [1], run_of("parent"))
            await store.checkpoint("child", [1], run_of("child", parent_thread_id="parent"))
            await store.force_flush_all()
            inner.refused.clear()
            children = ParkedParents.children

            async def meanwhile(parked: ParkedParents, thread_id: str) -> list[str]:
                if when == "before":
                    await replayed(store, "child")
                found = await children(parked, thread_id)
                if when == "after":
                    await replayed(store, "child")
                return found

            monkeypatch.setattr(ParkedParents, "children", meanwhile)
            with pytest.raises(LineageError):
                await store.delete_thread("parent")
            assert await store.load_messages("child") == [1]

    run(main())


def test_threads_below_one_that_only_quarantine_has_are_written() -> None:
    """Regression: the ancestor did not exist for them, and each checkpoint of a new descendant was refused."""

    async def main() -> None:
        inner = Refusing()
        inner.refused.add("root")
        async with opened(inner) as store:
            await store.checkpoint("root", [1], run_of("root"))
            await store.checkpoint("child", [1], run_of("child", parent_thread_id="root"))
            await store.force_flush_all()
            await store.checkpoint("sibling", [1], run_of("sibling", parent_thread_id="root"))
            await store.checkpoint("grandchild", [1], run_of("grandchild", parent_thread_id="child"))
            await store.checkpoint("above", [1], run_of("above"))
            with pytest.raises(ThreadQuarantined):
                await store.set_parent("root", "above")
            inner.refused.clear()
            assert await replayed(store, "root") == [Outcome.APPLIED]
            with pytest.raises(LineageError):
                await store.delete_thread("root")

    run(main())


@pytest.mark.parametrize("how", ["set_parent", "checkpoint"])
@pytest.mark.parametrize("flushed", [False, True])
def test_no_circle_closes_through_what_is_parked(how: str, flushed: bool) -> None:
    async def main() -> None:
        inner = Refusing()
        async with opened(inner) as store:
            await store.checkpoint("below", [1], run_of("below"))
            if flushed:
                await store.checkpoint("root", [1], run_of("root"))
            await store.force_flush_all()
            inner.refused.add("root")
            if flushed:
                await store.set_parent("root", "below")
            else:
                await store.checkpoint("root", [1], run_of("root", parent_thread_id="below"))
            await store.force_flush_all()
            with pytest.raises(LineageError):
                if how == "set_parent":
                    await store.set_parent("below", "root")
                else:
                    await store.checkpoint("below", [1], run_of("below", 1, parent_thread_id="root"))
            inner.refused.clear()
            assert await replayed(store, "root") == [Outcome.APPLIED]
            root, below = await store.load_thread("root"), await store.load_thread("below")
            assert root is not None
            assert below is not None
            assert (root.parent_thread_id, below.parent_thread_id) == ("below", None)

    run(main())


def test_an_append_says_since_when_its_thread_is_in_quarantine() -> None:
    """Regression: it named the thread's last entry."""

    async def main() -> None:
        inner = Refusing()
        inner.refused.add("t")
        async with opened(inner) as store:
            since = [(await store.checkpoint_append("t", [n], run_of("t"))).thread_seq for n in range(3)]
            await store.force_flush_all()
            with pytest.raises(ThreadQuarantined) as refused:
                await store.checkpoint_append("t", [3], run_of("t"))
            with pytest.raises(ThreadQuarantined) as unread:
                await store.load_messages("t")
            assert refused.value.since == unread.value.since == since[0]

    run(main())


def test_each_parked_entry_is_read_once_for_all_deletions() -> None:
    """Regression: each deletion read each of them, one at a time, and others waited for their turn in vain."""

    async def main() -> None:
        inner, reads = Refusing(), list[int]()
        inner.refused.add("t")
        async with opened(inner) as store:
            for n in range(20):
                await store.checkpoint_append("t", [n], run_of("t"))
            await store.force_flush_all()
            parked = store.buffer.ledger.parked
            of_thread = parked.of_thread

            async def counted(thread_id: str, start: int) -> Any:
                found = (await of_thread(thread_id, start))[:7]
                reads.append(len(found))
                return found

            parked.of_thread = counted  # type: ignore[method-assign]
            for n in range(3):
                await store.checkpoint(f"other {n}", [1], run_of(f"other {n}"))
                await store.delete_thread(f"other {n}")
            assert sum(reads) == 20

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


@pytest.mark.parametrize("how", ["moved", "written again"])
def test_a_child_that_leaves_is_not_deleted_because_its_move_is_parked(how: str) -> None:
    """Regression: quarantine was looked at before the flush that parked the move, which had been acknowledged."""

    async def main() -> None:
        inner, nats = Refusing(), MemoryNats()
        config = BufferConfig(flush_interval_s=60.0, lease_s=4)
        async with await BufferedThreadStore.open(inner, nats=nats, config=config) as store:
            for thread_id in ("parent", "other"):
                await store.checkpoint(thread_id, [1], run_of(thread_id))
            await store.checkpoint("child", [1], run_of("child", parent_thread_id="parent"))
            await store.force_flush_all()
            inner.refused.add("child")
            if how == "moved":
                await store.set_parent("child", "other")
            else:
                await store.delete_thread("child")
                await store.checkpoint("child", ["new"], run_of("child", 1, parent_thread_id="other"))
            with pytest.raises(ThreadQuarantined):
                await store.delete_thread("parent", children=Children.CASCADE)
            inner.refused.clear()
            outcomes = await replayed(store, "child")
            assert outcomes and set(outcomes) == {Outcome.APPLIED}
            assert await store.load_messages("child") == ([1] if how == "moved" else ["new"])
            child = await store.load_thread("child")
            assert child is not None and child.parent_thread_id == "other"
            await store.delete_thread("parent", children=Children.CASCADE)
            assert await store.load_thread("child") == child

    run(main())
