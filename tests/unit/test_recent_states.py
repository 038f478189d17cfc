"""A read goes on from the state of an earlier read, as long as the log shows that nothing else has changed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bufstore import BufferedThreadStore, Consistency, LogConfig, MemoryThreadStore, ThreadQuarantined
from bufstore.buffer.chain import Watermark
from bufstore.buffer.flush.verdict import Verdict
from bufstore.buffer.ports.ledger import FlushFailed
from bufstore.buffer.read.recent_states import ASKED_FOR_S, Kept, Link, RecentStates
from bufstore.jetstream.messages import Outgoing
from bufstore.memory import MemoryNats
from bufstore.threads.domain import THREADS
from bufstore.threads.model import Thread, ThreadMetadata
from bufstore.threads.state import ThreadState
from helpers import fresh, run_of
from unit.fake_log import run
from unit.test_buffered_in_memory import instance

WINDOWS: dict[str, Any] = {"log": LogConfig(failover_window_s=20.0), "retain_after_flush_s": 20.0}
NOTHING = ThreadState(watermark=Watermark())


def kept(last: int, size: int = 1, anchor: int = 0, behind: Sequence[Link] = ()) -> Kept[ThreadState]:
    return Kept(NOTHING, last, 0.0, (anchor, 100 + anchor), behind, size)


def link(seq: int, *, self_contained: bool = False) -> Link:
    return Link(seq, 100 + seq, self_contained)


def row(seq: int, **more: Any) -> Watermark:
    return Watermark(flushed_seq=seq, **{"applied_id": 100 + seq} | more)


class Asked:
    """Counts how often a store is asked for threads' states."""

    def __init__(self, store: BufferedThreadStore) -> None:
        self.times = 0
        self._watch = store.buffer.reads.store
        self._ask = self._watch.ask
        self._watch.ask = self._counted  # type: ignore[method-assign]

    def _counted(self, thread_id: str) -> Any:
        self.times += 1
        return self._ask(thread_id)


async def read_in(store: BufferedThreadStore) -> str:
    """Make a thread that is flushed and was read. Returns its id."""
    thread_id = fresh()
    await store.checkpoint(thread_id, [1], run_of(thread_id))
    await store.force_flush(thread_id)
    assert await store.load_messages(thread_id) == [1]
    return thread_id


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("keep"), st.integers(0, 5), st.integers(0, 70)),
            st.tuples(st.sampled_from(["forget", "forget all"]), st.integers(0, 5)),
        ),
        max_size=40,
    )
)
def test_it_takes_no_more_than_it_may_and_the_newest_stays(steps: list[Any]) -> None:
    states: RecentStates[ThreadState] = RecentStates(100)
    held: dict[str, Kept[ThreadState]] = {}
    for what, number, *size in steps:
        thread_id = f"t{number}"
        match what:
            case "keep":
                read = kept(1, *size)
                states.keep(thread_id, read)
                held.pop(thread_id, None)
                if read.size:
                    held[thread_id] = read
                    assert states.get(thread_id, 0.0) is read
                    assert states.get(thread_id, ASKED_FOR_S + 1) is None
            case "forget":
                states.forget(thread_id)
                held.pop(thread_id, None)
            case _:
                states.forget_all()
                held.clear()
        held = {t: k for t, k in held.items() if states.get(t, 0.0) is k}
        assert states.bytes == sum(k.size for k in held.values()) <= 100


_TAIL = (link(6), link(7))


@pytest.mark.parametrize(
    ("state", "now", "new", "last", "left"),
    [
        # The kept state goes up to 7; the watermark was at 5.
        (kept(7, anchor=5, behind=_TAIL), row(5), [], 7, [6, 7]),
        (kept(7, anchor=5, behind=_TAIL), row(6), [], 7, [7]),
        (kept(7, anchor=5, behind=_TAIL), row(7), [], 7, []),
        (kept(7, anchor=5, behind=_TAIL), row(6), [link(8), link(9)], 8, [7, 8, 9]),
        (kept(7, anchor=5, behind=_TAIL), row(8), [link(8), link(9)], 9, [9]),
        (kept(7, anchor=5, behind=_TAIL), row(7), [], 0, []),
        (kept(0, anchor=5), row(5), [], 0, []),
        # Not all wanted entries have come, or the log shows less than before.
        (kept(7, anchor=5, behind=_TAIL), row(7), [link(8)], 9, None),
        (kept(7, anchor=5, behind=_TAIL), row(7), [], 6, None),
        (kept(7, anchor=5, behind=_TAIL), row(6), [], 0, None),
        # The watermark does not fit: entries in between were parked, discarded, or are not seen yet.
        (kept(7, anchor=5, behind=_TAIL), row(7, applied_id=106), [], 7, None),
        (kept(7, anchor=5, behind=_TAIL), row(6, applied_id=105), [], 7, None),
        (kept(7, anchor=5, behind=_TAIL), row(8), [], 7, None),
        (kept(7, anchor=5, behind=_TAIL), row(4), [], 7, None),
        (kept(7, anchor=5, behind=_TAIL), row(7, broken_since=7), [], 7, None),
        (kept(7, anchor=5, behind=_TAIL), row(7, gone=True), [], 7, None),
        (kept(7, anchor=5, behind=_TAIL), row(5, waits_to=7), [], 7, None),
        (kept(7, anchor=5, behind=_TAIL), row(5), None, 7, None),
        # A self-contained entry hides what was parked before it, once it is applied.
        (kept(7, anchor=5, behind=(link(6), link(7, self_contained=True))), row(5), [], 7, [6, 7]),
        (kept(7, anchor=5, behind=(link(6), link(7, self_contained=True))), row(6), [], 7, [7]),
        (kept(7, anchor=5, behind=(link(6), link(7, self_contained=True))), row(7), [], 7, None),
    ],
)
def test_what_the_watermark_says_of_what_is_kept(
    state: Kept[ThreadState], now: Watermark, new: list[Link] | None, last: int, left: list[int] | None
) -> None:
    found = state.anchored(now, new, last)
    assert (None if found is None else [known.seq for known in found.behind]) == left
    if found is not None:
        assert found.last == (max(last, new[-1].seq if new else 0) if last else 0)
        assert found.anchor == (now.flushed_seq, now.applied_id)


def test_a_process_that_has_read_a_thread_asks_postgres_for_its_watermark() -> None:
    async def main() -> None:
        nats, inner, thread_id = MemoryNats(), MemoryThreadStore(), fresh()
        async with instance(nats, inner) as other, instance(nats, inner, flusher=False) as app:
            asked = Asked(app)
            await other.checkpoint(thread_id, [1], run_of(thread_id))
            await other.force_flush(thread_id)
            assert await app.load_messages(thread_id) == [1]
            await app.checkpoint_append(thread_id, [2], run_of(thread_id, 2))
            assert await app.load_messages(thread_id) == [1, 2]
            await other.checkpoint_append(thread_id, [3], run_of(thread_id, 3))
            assert await app.load_messages(thread_id) == [1, 2, 3]
            await other.force_flush(thread_id)
            assert await app.load_messages(thread_id) == [1, 2, 3]
            found = await app.load_checkpoint(thread_id)
            assert found is not None
            assert (found.thread.version, found.latest_run) == (3, run_of(thread_id, 3))
            assert asked.times == 1
            await asyncio.sleep(ASKED_FOR_S + 1)
            assert await app.load_messages(thread_id) == [1, 2, 3]
            assert asked.times == 2

    run(main())


@pytest.mark.parametrize("trouble", ["hangs", "fails"])
def test_a_watermark_that_does_not_come_leaves_the_read_to_who_waits_for_the_store(trouble: str) -> None:
    async def main() -> None:
        async with instance(MemoryNats(), MemoryThreadStore()) as store:
            thread_id = await read_in(store)

            async def away(_: str) -> Watermark:
                if trouble == "hangs":
                    await asyncio.sleep(3600)
                raise FlushFailed("refused", Verdict.RETRY)

            asked = Asked(store)
            store.buffer.reads._with_waiting.watermark = away  # type: ignore[method-assign]
            assert await store.load_messages(thread_id) == [1]
            assert asked.times == 1

    run(main())


def test_the_caller_of_a_read_cannot_change_what_the_next_one_shows() -> None:
    async def main() -> None:
        nats, inner, thread_id = MemoryNats(), MemoryThreadStore(), fresh()
        async with instance(nats, inner) as store:
            await store.checkpoint(thread_id, [{"n": [1]}], run_of(thread_id))
            for _ in range(2):
                found = await store.load_checkpoint(thread_id)
                assert found is not None
                assert found.messages == [{"n": [1]}]
                found.messages[0]["n"].append(2)
                found.messages.append("more")

    run(main())


def test_a_thread_that_was_read_and_then_broken_is_told_to_be() -> None:
    async def main() -> None:
        nats, inner, thread_id = MemoryNats(), MemoryThreadStore(), fresh()
        async with instance(nats, inner) as other, instance(nats, inner, flusher=False) as app:
            await other.checkpoint(thread_id, [1], run_of(thread_id))
            await other.force_flush(thread_id)
            assert await app.load_messages(thread_id) == [1]
            await other.buffer.log.publish(Outgoing(other.buffer.subjects.of(thread_id), b"garbage"), 5.0)
            with pytest.raises(ThreadQuarantined):
                await app.load_messages(thread_id)
            await other.force_flush(thread_id)
            with pytest.raises(ThreadQuarantined):
                await app.load_messages(thread_id)
            await other.checkpoint(thread_id, [2], run_of(thread_id, 2))
            assert await app.load_messages(thread_id) == [2]

    run(main())


def test_a_thread_that_was_deleted_buried_and_written_again_is_read_from_postgres() -> None:
    """Only the watermark shows this, and the remembered state outlived the watermark."""

    async def main() -> None:
        nats, inner, thread_id = MemoryNats(), MemoryThreadStore(), fresh()
        async with instance(nats, inner, **WINDOWS) as other, instance(nats, inner, flusher=False, **WINDOWS) as app:
            await other.checkpoint(thread_id, [1], run_of(thread_id))
            assert await app.load_messages(thread_id) == [1]
            await other.delete_thread(thread_id)
            assert await app.load_messages(thread_id) is None
            for n in range(4):  # long enough to be purged and buried
                await asyncio.sleep(40)
                await other.checkpoint("another", [n], run_of("another", n))
            assert not await inner.ledger(0).watermarks([thread_id])
            await other.checkpoint(thread_id, [2], run_of(thread_id, 2))
            assert await app.load_messages(thread_id) == [2]
            await app.checkpoint_append(thread_id, [3], run_of(thread_id, 3))
            assert await app.load_messages(thread_id, consistency=Consistency.STRONG) == [2, 3]

    run(main())


def test_nothing_is_kept_of_a_log_that_began_anew() -> None:
    async def main() -> None:
        async with instance(MemoryNats(), MemoryThreadStore()) as store:
            thread_id = await read_in(store)
            assert store.buffer.reads._recent.get(thread_id, 0.0) is not None
            store.buffer.log._forgetting.all_begins_anew()  # type: ignore[attr-defined]
            assert store.buffer.reads._recent.get(thread_id, 0.0) is None

    run(main())


def test_what_comes_from_the_log_alone_is_not_kept() -> None:
    async def main() -> None:
        nats, inner, thread_id = MemoryNats(), MemoryThreadStore(), fresh()
        async with instance(nats, inner, flusher=False) as app:
            await app.checkpoint(thread_id, [1], run_of(thread_id))
            app.buffer.reads.store.down = "it is away"
            assert await app.load_messages(thread_id) == [1]
            assert app.buffer.reads._recent.get(thread_id, 0.0) is None
            app.buffer.reads.store.down = None

    run(main())


def test_a_threads_metadata_counts() -> None:
    """Regression: metadata of any size counted as nothing, and states with it were kept without a bound."""
    thread = Thread(thread_id="t", metadata=ThreadMetadata(custom={"notes": "x" * 100_000}))
    assert THREADS.size(ThreadState(watermark=Watermark(), thread=thread)) > 100_000
