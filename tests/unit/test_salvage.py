"""What is saved of a log that no longer fits to Postgres."""

from __future__ import annotations

import asyncio
import itertools
import random
from datetime import datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bufstore.buffer import recent_keys
from bufstore.buffer.chain import Watermark, plan, superseded
from bufstore.buffer.entry import Base, Entry, Malformed, StoredEntry
from bufstore.buffer.operate.replay import ParkedEntry, plan_replay
from bufstore.buffer.operate.salvage import known_up_to, lost_what_is_archived, plan_salvage, reason_to_repair
from bufstore.buffer.prepare import _behind_archive
from bufstore.threads.coalesce import coalesce
from thorough import examples
from unit.history import THREAD, Flushed, Item, Oracle, write_story

FITS = {
    "stream": "S",
    "log_epoch": 1,
    "epoch": 1,
    "log_start": 100,
    "log_first": 100,
    "log_end": 150,
    "applied": 140,
} | {"archived": 0, "made": False}


@pytest.mark.parametrize(
    ("differs", "says"),
    [
        ({}, None),
        ({"log_epoch": None, "applied": 99}, None),
        ({"log_epoch": None, "applied": 100}, "is gone"),
        ({"epoch": None, "applied": 0}, None),
        ({"epoch": None, "applied": 0, "log_first": 101}, "never had"),
        ({"epoch": 2}, "the stream is an older one"),
        ({"epoch": 0}, "Postgres is an older copy"),
        ({"applied": 150}, None),
        ({"applied": 151}, "ends at 150"),
        ({"archived": 152}, None),
        ({"log_epoch": None, "applied": 99, "archived": 100}, None),
        ({"log_epoch": None, "applied": 99, "archived": 101}, "an archive has entries"),
        ({"log_epoch": None, "applied": 99, "made": True}, "before anything of it was flushed"),
        ({"made": True}, None),
    ],
)
def test_a_log_that_does_not_fit_is_told_from_one_that_does(differs: dict[str, Any], says: str | None) -> None:
    reason = reason_to_repair(**(FITS | differs))  # type: ignore[arg-type]
    assert reason is None if says is None else says in (reason or "")


def test_a_log_ends_where_its_archive_does_or_behind() -> None:
    assert lost_what_is_archived("S", 150, 151) is None
    assert lost_what_is_archived("S", 150, 152) == "stream S ends at 150, and an archive has it up to 151"


async def test_the_look_for_what_is_archived_stores_nothing() -> None:
    """Regression: each refused open of a replicated log stored a proof, and the last one took the log for whole."""

    class Short:
        proved = 0

        async def archived(self) -> int:
            return 152

        async def bounds(self) -> tuple[int, int]:
            return 100, 150 + self.barriers

        async def prove_leader(self, timeout_s: float) -> None:
            self.proved += 1

        barriers = 0

        async def barrier(self, timeout_s: float) -> int:
            self.barriers += 1
            return 150 + self.barriers

    log: Any = Short()
    for opened in (1, 2, 3):
        assert await _behind_archive(log, log, "S") is not None
        assert (log.proved, log.barriers) == (opened, 0)


def entry(seq: int, id_: int, prev: int, *, whole: bool = False, base: Base = Base.CHAINED, seen: int = 0) -> Item:
    keys = recent_keys.item(recent_keys.key_of(id_), b"")
    found = Entry(id=id_, prev_id=prev, base=base, seen=seen, version=seq, self_contained=whole, keys=keys, payload=b"")
    return StoredEntry(THREAD, seq, found)


def ring_of(*ids: int) -> bytes:
    return b"".join(recent_keys.item(recent_keys.key_of(i), b"") for i in ids)


#: Postgres has applied entries 1 … 5 at 11 … 15; the log lost everything from 13 on.
AHEAD = Watermark(flushed_seq=15, applied_id=5, version=5, keys=ring_of(1, 2, 3, 4, 5))
REST = [entry(11, 1, 0), entry(12, 2, 1)]


def saved(
    watermark: Watermark, items: list[Item], *, common: int = 0, settled: set[int] | None = None
) -> tuple[list[int], list[int]]:
    found = plan_salvage(watermark, items, common=common, settled=settled or set())
    assert found.watermark.flushed_seq == max([watermark.flushed_seq, *(i.seq for i in items)])
    return [i.seq for i in found.apply], [p.item.seq for p in found.park]


def test_a_log_that_only_lost_its_end_has_nothing_that_postgres_lacks() -> None:
    assert saved(AHEAD, REST) == ([], [])
    assert known_up_to(AHEAD, REST) == 12
    # The entry is older than the ring, but another thread shows that the log is the same up to there.
    assert saved(AHEAD, [entry(3, 90, 80)], common=12) == ([], [])


def test_what_was_not_flushed_is_applied_in_order() -> None:
    behind = Watermark(flushed_seq=11, applied_id=1, version=1)
    assert saved(behind, [*REST, entry(20, 3, 2)]) == ([12, 20], [])


def test_deltas_whose_base_is_gone_are_parked_and_a_snapshot_behind_them_applied() -> None:
    behind = Watermark(flushed_seq=11, applied_id=1, version=1)
    assert saved(behind, [entry(30, 7, 6), entry(31, 8, 7)]) == ([], [30, 31])
    assert saved(behind, [entry(30, 7, 6), entry(31, 8, 7, whole=True), entry(32, 9, 8)]) == ([31, 32], [30])


def test_what_was_written_on_another_base_at_the_same_positions_is_parked_not_taken_for_applied() -> None:
    assert saved(AHEAD, [*REST, entry(13, 70, 2), entry(14, 71, 70)]) == ([], [13, 14])


def test_a_snapshot_written_after_the_log_had_gone_back_is_the_newest_state() -> None:
    # Its writer read the state that Postgres holds.
    assert saved(AHEAD, [*REST, entry(13, 70, 2, whole=True), entry(14, 71, 70)]) == ([13, 14], [])


@pytest.mark.parametrize("base", [Base.CHAINED, Base.UNKNOWN])
def test_a_snapshot_that_may_be_older_than_all_that_is_known_rewinds_nothing(base: Base) -> None:
    older = [entry(4, 80, 79, whole=True, base=base, seen=3), entry(5, 81, 80)]
    assert saved(AHEAD, older) == ([], [4, 5])


#: Postgres has applied so many entries, ids 101 … 140 at 201 … 240, that it remembers the last 16 of them only.
FORGETFUL = Watermark(flushed_seq=240, applied_id=140, version=40, keys=ring_of(*range(125, 141)))


def bases(watermark: Watermark, items: list[Item], *, settled: set[int] | None = None) -> dict[int, int | None]:
    found = plan_salvage(watermark, items, common=0, settled=settled or set())
    return {p.item.seq: p.base_id for p in found.park}


@pytest.mark.parametrize("base", [Base.CHAINED, Base.UNKNOWN, Base.NONE])
def test_what_may_be_older_than_all_that_is_remembered_can_never_be_replayed(base: Base) -> None:
    """Regression: a replay of all that was parked took the thread back to where the old copy of the log ends."""
    older = [entry(201, 101, 0 if base is Base.NONE else 100, whole=True, base=base, seen=200), entry(202, 102, 101)]
    assert bases(FORGETFUL, older) == {201: None, 202: None}
    # What was written behind it waits, until a whole list.
    written = [*older, entry(241, 70, 102), entry(242, 71, 70), entry(243, 72, 71, whole=True), entry(244, 73, 72)]
    assert bases(FORGETFUL, written) == {201: None, 202: None, 241: 140, 242: 140}
    assert saved(FORGETFUL, written) == ([243, 244], [201, 202, 241, 242])


def test_what_is_not_among_all_that_was_ever_applied_can_be_replayed() -> None:
    """Postgres remembers each of its five entries, so this one was written after the log had gone back."""
    assert bases(AHEAD, [entry(4, 80, 0, whole=True, base=Base.UNKNOWN, seen=3), entry(16, 81, 80)]) == {4: 5, 16: 5}


def test_a_thread_that_was_deleted_is_not_begun_again_by_its_first_entry() -> None:
    """Regression: an entry that finds a tombstone begins the thread anew, also if it stands before the deletion."""
    gone = msgspec.structs.replace(FORGETFUL, gone=True)
    assert saved(gone, [entry(201, 101, 0, base=Base.NONE, seen=0)]) == ([], [201])


def keyed(seq: int, id_: int, prev: int, keys: bytes) -> Item:
    found = Entry(
        id=id_, prev_id=prev, base=Base.CHAINED, seen=0, version=seq, self_contained=False, keys=keys, payload=b""
    )
    return StoredEntry(THREAD, seq, found)


def test_what_builds_on_what_is_remembered_is_newer() -> None:
    assert saved(FORGETFUL, [entry(240, 71, 139, whole=True)]) == ([240], [])
    mine = recent_keys.item("my key", b"content")
    watermark = msgspec.structs.replace(FORGETFUL, keys=ring_of(125) + mine + ring_of(*range(127, 141)))
    newer = entry(227, 71, 70, whole=True)
    assert saved(watermark, [keyed(226, 70, 125, ring_of(124, 125) + mine), newer]) == ([227], [])
    # Regression: a key that was used before, and again later, made what stands behind its first use newer, too.
    assert bases(watermark, [keyed(226, 70, 103, ring_of(102, 103) + mine), newer]) == {227: None}


def test_what_builds_on_what_is_parked_is_as_new_as_that() -> None:
    behind = entry(240, 71, 70)
    assert bases(FORGETFUL, [entry(239, 70, 139), behind], settled={239}) == {240: 140}
    assert bases(FORGETFUL, [entry(239, 70, 99), behind], settled={239}) == {240: None}


def test_a_late_entry_is_parked_on_what_was_applied_before_it() -> None:
    """Regression: it was parked on the newest that was applied, so that a replay put it over later lists."""
    late = entry(13, 70, 0, whole=True, base=Base.NONE, seen=12)
    assert bases(AHEAD, [late, entry(16, 71, 5, whole=True)]) == {13: 5}


def test_what_builds_on_what_is_known_and_is_refused_can_be_replayed() -> None:
    found = plan_salvage(AHEAD, [*REST, entry(13, 70, 2, whole=True)], common=0, settled=set(), poison={70: "refused"})
    assert [(p.base_id, p.cause) for p in found.park] == [(AHEAD.applied_id, "refused")]


def test_a_write_that_expected_nothing_is_not_dropped() -> None:
    found = plan_salvage(AHEAD, [entry(13, 70, 0, whole=True, base=Base.NONE, seen=12)], common=12, settled=set())
    assert [p.item.seq for p in found.park] == [13]
    assert (found.watermark.broken_since, found.watermark.flushed_seq, found.watermark.applied_id) == (13, 15, 5)


def test_a_write_that_was_repeated_with_its_key_is_not_done_twice() -> None:
    mine = recent_keys.item("my key", b"content")
    watermark = Watermark(flushed_seq=15, applied_id=5, version=5, keys=mine)
    again = Entry(id=70, prev_id=2, base=Base.CHAINED, seen=0, version=3, self_contained=False, keys=mine, payload=b"")
    assert saved(watermark, [StoredEntry(THREAD, 13, again)], common=12) == ([], [])


def test_what_is_in_quarantine_is_not_parked_again_and_garbage_is() -> None:
    garbage = Malformed("s", 14, (), "damage", THREAD)
    assert saved(AHEAD, [*REST, entry(13, 70, 2), garbage], settled={13}) == ([], [14])


def test_a_thread_that_was_salvaged_before_is_left_alone() -> None:
    items = [*REST, entry(13, 70, 2, whole=True), *(entry(14 + n, 71 + n, 70 + n) for n in range(40))]
    once = plan_salvage(AHEAD, items, common=12, settled=set())
    assert len(once.apply) == 41
    assert saved(once.watermark, items, common=12) == ([], [])


class Writer:
    """Writes entries to a log, each behind the last one that it knows; some with keys, of which few come again."""

    def __init__(self, chance: random.Random) -> None:
        self.chance, self.ids = chance, itertools.count(1)

    def write(self, log: list[Item], seq: int, behind: StoredEntry | None, watermark: Watermark) -> None:
        id_, chance = next(self.ids), self.chance
        known = behind.entry.keys if behind is not None else b""
        key = recent_keys.item(f"key {chance.randint(0, 40)}", b"content") if chance.random() < 0.3 else b""
        mine = key if key and not recent_keys.holds(known, key) else recent_keys.item_of(id_)
        base = Base.CHAINED if behind is not None else Base.UNKNOWN if watermark.flushed_seq else Base.NONE
        whole = base is Base.UNKNOWN or chance.random() < 0.35
        prev = behind.entry.id if behind is not None else 0
        found = Entry(
            id=id_, prev_id=prev, base=base, seen=seq - 1, version=seq, self_contained=whole,
            keys=recent_keys.add(known, mine), payload=b"",
        )  # fmt: skip
        log.append(StoredEntry(THREAD, seq, found))


@examples(500)
@given(st.integers(0, 10**9))
def test_whatever_copy_of_the_log_is_put_back_nothing_is_applied_twice_and_nothing_new_is_dropped(seed: int) -> None:
    """By the repair, or by a replay of all that it parks. The copy is of any age, purged, and others wrote on in it."""
    chance = random.Random(seed)
    writer, story, watermark = Writer(chance), list[Item](), Watermark()
    for seq in range(1, chance.choice([3, 10, 25, 40])):
        last = story[-1] if story else None
        writer.write(story, seq, last if isinstance(last, StoredEntry) else None, watermark)
        watermark = plan(watermark, story[-1:], complete=True).watermark
    log = story[: chance.randint(0, len(story))][chance.randint(0, 20) :]
    older = len(log)
    for seq in range(max([i.seq for i in log], default=chance.randint(0, 9)) + 1, 70)[: chance.randint(0, 8)]:
        last = log[-1] if log and chance.random() < 0.8 else None
        writer.write(log, seq, last if isinstance(last, StoredEntry) else None, watermark)
    found = plan_salvage(watermark, log, common=0, settled=set())
    parked = [
        ParkedEntry(
            seq=p.item.seq, thread_id=THREAD, base_id=p.base_id, cause=p.cause, parked_at=datetime.min, item=p.item
        )
        for p in found.park
    ]
    replayed = plan_replay(found.watermark, parked)
    before = {i.entry.id for i in story if isinstance(i, StoredEntry)}
    assert before.isdisjoint(i.entry.id for i in (*found.apply, *replayed.apply))
    kept = {i.seq for i in found.apply} | {p.seq for p in parked}
    for item in log[older:]:
        assert isinstance(item, StoredEntry)
        repeated = recent_keys.holds(watermark.keys, recent_keys.newest(item.entry.keys))
        assert item.seq in kept or repeated or superseded(item, watermark)


@examples(300)
@given(st.integers(0, 10**9))
def test_a_log_cut_anywhere_and_salvaged_equals_one_that_was_flushed(seed: int) -> None:
    """Postgres and the log end at different places of a thread's story: nothing is lost, doubled or guessed."""
    chance = random.Random(seed)
    story = write_story(chance, damage=True)
    before = [i for chapter in story.chapters[:-1] for i in chapter]
    last = story.chapters[-1]
    flushed_to, cut = chance.randint(0, len(last)), chance.randint(0, len(last))
    log = last[:cut]

    async def main() -> None:
        flushed = Flushed()
        for chapter in [*story.chapters[:-1], last[:flushed_to]]:
            if chapter:
                await flushed.window(chapter, chapter, story.poison)
        settled = {p.item.seq for p in flushed.parked}
        known = known_up_to(flushed.watermark, log)
        ids = story.poison & {i.entry.id for i in log if isinstance(i, StoredEntry)}
        poison = dict.fromkeys(ids, "poison")
        found = plan_salvage(flushed.watermark, log, common=known, settled=settled, poison=poison)
        if found.apply:
            await flushed.store.apply(None, [coalesce(THREAD, flushed.watermark.version, found.apply)])
        oracle = Oracle()
        for item in [*before, *last[: max(flushed_to, cut)]]:
            oracle.take(item, poison=isinstance(item, StoredEntry) and item.entry.id in story.poison)
        assert flushed.store._messages.get(THREAD, []) == oracle.messages
        assert found.watermark.applied_id == oracle.watermark.applied_id
        assert found.watermark.flushed_seq == oracle.watermark.flushed_seq
        parked = settled | {p.item.seq for p in found.park}
        assert parked >= set(oracle.parked)
        if cut > flushed_to:
            # Only what a flush would park is parked, and late entries that nobody can judge.
            doubtful = {p.item.seq for p in found.park if "gone back" in p.cause}
            assert parked - doubtful == set(oracle.parked)
        else:
            assert not found.apply

    asyncio.run(main())
