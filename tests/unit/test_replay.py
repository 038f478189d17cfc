"""Which entries may be replayed: in the log's order, never below what was applied since, exactly once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bufstore.buffer.chain import Parked, Watermark
from bufstore.buffer.entry import Base, Entry, Malformed, StoredEntry
from bufstore.buffer.flush.verdict import Verdict
from bufstore.buffer.operate.quarantine import Quarantine
from bufstore.buffer.operate.replay import Outcome, ParkedEntry, plan_replay
from bufstore.buffer.ports.ledger import FlushFailed
from bufstore.errors import NotFound, StoreUnavailable
from bufstore.memory.quarantine import MemoryParked
from bufstore.threads.domain import THREADS
from bufstore.threads.model import Run, decode_message, encode_messages, encode_run
from bufstore.threads.payload import Payload, encode_payload
from bufstore.threads.write import save_of
from thorough import examples
from unit.history import THREAD, Flushed, Oracle, write_story

ROW = Watermark(flushed_seq=20, applied_id=100, version=3, broken_since=11)


def waits(seq: int, id_: int, prev: int, *, base: int | None = 100, whole: bool = False) -> ParkedEntry:
    entry = Entry(
        id=id_, prev_id=prev, base=Base.CHAINED, seen=0, version=seq, self_contained=whole, keys=b"", payload=b""
    )
    item = StoredEntry("t", seq, entry)
    return ParkedEntry(seq=seq, thread_id="t", base_id=base, cause="c", parked_at=datetime.now(UTC), item=item)


def saved(number: int, keep: int, *, whole: bool = False) -> StoredEntry:
    """The checkpoint at this position, which keeps `keep` messages and adds its number as one."""
    run = Run(run_id="r", thread_id=THREAD)
    payload = encode_payload(Payload(keep, encode_messages([number]), encode_run(run), save_of(run)))
    entry = Entry(
        id=number, prev_id=number - 1, base=Base.CHAINED, seen=0, version=keep + 1, self_contained=whole, keys=b"",
        payload=payload,
    )  # fmt: skip
    return StoredEntry(THREAD, number, entry)


def damaged(seq: int) -> ParkedEntry:
    item = Malformed("s", seq, (), "damage", "t")
    return ParkedEntry(seq=seq, thread_id="t", base_id=100, cause="c", parked_at=datetime.now(UTC), item=item)


def outcomes(watermark: Watermark, *parked: ParkedEntry, refused: dict[int, str] | None = None) -> list[str]:
    return [o.outcome.value for o in plan_replay(watermark, parked, refused=refused).outcomes]


def test_what_builds_on_the_row_is_applied_in_order_with_what_was_parked_behind_it() -> None:
    plan = plan_replay(ROW, [waits(13, 103, 102), waits(11, 101, 100), waits(12, 102, 101)])
    assert [e.seq for e in plan.apply] == [11, 12, 13]
    assert (plan.watermark.applied_id, plan.watermark.version, plan.watermark.flushed_seq) == (103, 13, 20)


def test_once_the_thread_has_gone_on_nothing_is_applied_not_even_a_snapshot() -> None:
    healed = Watermark(flushed_seq=20, applied_id=200, version=3)
    assert outcomes(healed, waits(11, 101, 100), waits(12, 102, 999, whole=True)) == ["superseded"] * 2
    assert outcomes(healed, waits(11, 101, 200, base=None)) == ["superseded"]


def test_a_missing_predecessor_holds_up_deltas_until_a_snapshot() -> None:
    parked = [damaged(11), waits(12, 102, 7), waits(13, 103, 102, whole=True), waits(14, 104, 103)]
    assert outcomes(ROW, *parked) == ["undecodable", "waits", "applied", "applied"]


def test_what_the_store_refuses_holds_up_what_builds_on_it() -> None:
    parked = [waits(11, 101, 100), waits(12, 102, 101), waits(13, 103, 102)]
    assert outcomes(ROW, *parked, refused={102: "why"}) == ["applied", "refused", "waits"]


class Bench:
    """A thread that was flushed with poison in it, and its quarantine."""

    def __init__(self, flushed: Flushed) -> None:
        self.watermarks = {THREAD: flushed.watermark}
        self.store = flushed.store
        self.parked = MemoryParked(self.watermarks, flushed.store)
        self.parked.park(flushed.parked)
        self.told: list[str] = []
        self.quarantine = Quarantine(
            SimpleNamespace(  # type: ignore[arg-type]
                ledger=SimpleNamespace(parked=self.parked),
                domain=THREADS,
                shared=SimpleNamespace(tell_parked=self._tell),
            )
        )

    async def _tell(self, thread_id: str) -> None:
        self.told.append(thread_id)

    def messages(self) -> list[Any]:
        return [decode_message(m) for m in self.store._messages.get(THREAD, [])]


async def flushed(seed: int) -> tuple[Any, Bench]:
    story = write_story(random.Random(seed), damage=True)
    flushed = Flushed()
    for chapter in story.chapters:
        await flushed.window(chapter, chapter, story.poison)
    return story, Bench(flushed)


@examples(300)
@given(seed=st.integers(0, 1 << 32), single=st.booleans())
def test_a_replay_makes_what_the_log_would_have_made_without_that_poison(seed: int, single: bool) -> None:
    async def main() -> None:
        story, bench = await flushed(seed)
        before = set(bench.parked.entries)
        last = bench.watermarks[THREAD]
        if single and before:
            done = []
            for seq in sorted(before):
                if seq in bench.parked.entries:
                    done += await bench.quarantine.replay(seq)
        else:
            done = list(await bench.quarantine.replay_thread(THREAD))
        applied = [o.seq for o in done if o.outcome is Outcome.APPLIED]
        assert applied == sorted(set(applied))
        assert before - set(applied) == set(bench.parked.entries)
        oracle = Oracle()
        for item in (item for chapter in story.chapters for item in chapter):
            poison = isinstance(item, StoredEntry) and item.entry.id in story.poison and item.seq not in applied
            oracle.take(item, poison=poison)
        assert bench.messages() == [decode_message(m) for m in oracle.messages]
        watermark = bench.watermarks[THREAD]
        assert (watermark.applied_id, watermark.version, watermark.flushed_seq) == (
            oracle.watermark.applied_id,
            oracle.watermark.version,
            last.flushed_seq,
        )
        again = await bench.quarantine.replay_thread(THREAD)
        assert not [o for o in again if o.outcome is Outcome.APPLIED]
        assert bench.watermarks[THREAD] == watermark
        assert bool(bench.told) == bool(applied)

    asyncio.run(main())


@examples(100)
@given(whole=st.lists(st.booleans(), min_size=2, max_size=8), refused=st.sets(st.integers(1, 8)))
def test_what_the_store_still_refuses_is_found_and_the_rest_is_applied(whole: list[bool], refused: set[int]) -> None:
    async def main() -> None:
        items, version = [], 0
        for n, is_whole in enumerate(whole, 1):
            keep = 0 if is_whole else version
            version = keep + 1
            items.append(saved(n, keep, whole=is_whole))
        flushed_ = Flushed()
        await flushed_.window(items, items, frozenset(range(1, 9)))  # all of it is parked
        bench = Bench(flushed_)
        wanted, sound = [], True
        for n, is_whole in enumerate(whole, 1):
            builds = is_whole or sound
            sound = builds and n not in refused
            wanted.append((n, Outcome.APPLIED if sound else Outcome.REFUSED if builds else Outcome.WAITS))
        apply, folding, folded = bench.store.apply, bench.quarantine._coalesce, list[int]()

        def noting(thread_id: str, version: int, entries: Sequence[StoredEntry]) -> Any:
            folded[:] = [e.entry.id for e in entries]
            return folding(thread_id, version, entries)

        async def picky(connection: object, batch: Any) -> None:
            if refused & set(folded):
                raise FlushFailed("22012", Verdict.POISON)
            await apply(connection, batch)

        bench.quarantine._coalesce = noting
        bench.store.apply = picky  # type: ignore[method-assign]
        done = list(await bench.quarantine.replay_thread(THREAD))
        assert [(o.seq, o.outcome) for o in done] == wanted
        assert list(bench.parked.entries) == [n for n, outcome in wanted if outcome is not Outcome.APPLIED]

    asyncio.run(main())


@pytest.mark.parametrize("error", [MemoryError(), FlushFailed("57014", Verdict.SHRINK)], ids=lambda e: type(e).__name__)
def test_entries_that_are_too_much_together_are_replayed_one_by_one(error: Exception) -> None:
    """Regression: such a replay ended as if Postgres were away, each time."""

    async def main() -> None:
        items, most = [saved(n, n - 1) for n in (1, 2, 3)], 1
        flushed_ = Flushed()
        await flushed_.window(items, items, frozenset({1}))
        bench = Bench(flushed_)
        apply = bench.store.apply

        async def limited(connection: object, batch: Any) -> None:
            if sum(len(change.messages) for change in batch) > most:
                raise error
            await apply(connection, batch)

        bench.store.apply = limited  # type: ignore[method-assign]
        most = 0
        with pytest.raises(StoreUnavailable):
            await bench.quarantine.replay_thread(THREAD)
        most = 1
        done = await bench.quarantine.replay_thread(THREAD)
        assert [o.outcome for o in done] == [Outcome.APPLIED] * 3
        assert not bench.parked.entries

    asyncio.run(main())


async def test_a_discard_that_fails_half_way_tells_the_writers_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each position is a transaction of its own. A writer that is not told goes on building on what is parked."""
    flushed = Flushed()
    flushed.watermark = ROW
    flushed.parked = [Parked(waits(11, 101, 100).item, "c", 100)]
    bench = Bench(flushed)

    async def half(_: Sequence[int]) -> int:
        raise StoreUnavailable("Postgres went away")

    monkeypatch.setattr(bench.quarantine._ledger.parked, "discard", half)
    with pytest.raises(StoreUnavailable):
        await bench.quarantine.discard([11, 12])
    assert bench.told == ["t"]


async def test_discarding_all_that_waits_makes_a_thread_whole_again() -> None:
    flushed = Flushed()
    flushed.watermark = ROW
    items = [waits(11, 101, 100).item, Malformed("s", 12, (), "damage", "t")]
    flushed.parked = [Parked(i, "c", 100) for i in items]
    bench = Bench(flushed)
    bench.watermarks["t"] = ROW
    assert await bench.quarantine.discard([11, 11, 99]) == 1
    assert bench.watermarks["t"].broken_since == 12
    assert await bench.quarantine.discard([12]) == 1
    assert bench.watermarks["t"].broken_since is None
    assert bench.told == ["t", "t"]
    with pytest.raises(NotFound):
        await bench.quarantine.show(12)
