"""The conformance suite of ledgers: one check per promise of `bufstore.buffer.ports.ledger.Ledger`.

Each takes a `Ledgers` of its own, whose tables are empty. The quarantine's checks are in `parked`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import msgspec

from bufstore.buffer.chain import Parked, Watermark
from bufstore.buffer.entry import Base, Entry, StoredEntry
from bufstore.buffer.flush.verdict import Verdict
from bufstore.buffer.lanes import Layout
from bufstore.buffer.ports.ledger import Cursor, Decision, Flushed, FlushFailed, Ledger, NotOwner
from bufstore.buffer.target import Made, Target
from bufstore.testing.basics import Check, raises, registrar

CHECKS: list[Check] = []
_check = registrar(CHECKS)

#: A value that the store refuses, and one at which its code raises ArithmeticError.
REFUSED, RAISES = "refused", "raises"
#: How many entries the quarantine takes.
QUARANTINE_MAX = 5

_HERE, _ELSEWHERE = Target("counters", "table", "a"), Target("counters", "table", "b")


class LedgerChange(msgspec.Struct, frozen=True):
    """What the checks flush: the store has `value` for the thread afterwards."""

    thread_id: str
    value: str
    gone: bool = False
    whole: bool = False


@dataclass(frozen=True)
class Ledgers:
    """What the checks are run against."""

    #: Opens one more instance on the same tables, set up, with ``quarantine_max=QUARANTINE_MAX``. It flushes into a
    #: store whose `apply` writes the value of each `LedgerChange` in the flush's transaction. `apply` refuses the value
    #: `REFUSED` for good, as one that cannot be stored, and raises at `RAISES`. The check's caller closes the ledgers.
    open: Callable[[], Awaitable[Ledger]]
    #: Returns the values that the store has, by thread.
    stored: Callable[[], Awaitable[dict[str, str]]]
    #: Returns a context in which somebody else holds the thread's row.
    hold: Callable[[str], AbstractAsyncContextManager[None]]


def decides(**fields: Any) -> Callable[[Mapping[str, Watermark]], Decision]:
    """Return a function that makes this decision without a look at the rows."""
    return lambda _: Decision(**fields)


def moved(cursor: Cursor, seq: int) -> Cursor:
    """Return the cursor moved on to `seq`."""
    return Cursor(cursor.partition, cursor.term, seq, seq)


def parked(seq: int, thread_id: str, base_id: int = 0) -> Parked:
    """Return an entry to be parked."""
    entry = Entry(
        id=1000 + seq, prev_id=base_id, base=Base.CHAINED, seen=0, version=1, self_contained=False, keys=b"",
        payload=b"payload",
    )  # fmt: skip
    return Parked(StoredEntry(thread_id, seq, entry), f"cause {seq}", base_id)


def writes(**values: str) -> Callable[[Mapping[str, Watermark]], Decision]:
    """Return a function that decides, for the threads whose rows it gets, to write these values.

    It moves the watermarks of those threads by one.
    """

    def decide(rows: Mapping[str, Watermark]) -> Decision:
        return Decision(
            batch=[LedgerChange(t, values[t]) for t in sorted(rows)],
            watermarks={t: msgspec.structs.replace(row, flushed_seq=row.flushed_seq + 1) for t, row in rows.items()},
        )

    return decide


async def flush(ledger: Ledger, threads: Sequence[str], **decision: Any) -> Flushed:
    """Flush without holding a partition."""
    return await ledger.flush([], threads, decides(**decision))


@_check()
async def a_new_ledger_knows_nothing(ledgers: Ledgers) -> None:
    ledger, other = await ledgers.open(), await ledgers.open()
    assert await ledger.server_run() == await ledger.server_run() == await other.server_run()
    assert await ledger.epoch() is None
    assert await ledger.target() is None
    assert await ledger.layout() is None
    assert await ledger.begin_erasure("t", []) == []
    assert await ledger.cursors() == {}
    assert await ledger.watermark("t") == Watermark()
    assert await ledger.watermarks(["t"]) == {}
    assert await ledger.broken() == frozenset()
    assert await ledger.tombstones(1 << 62, "", 10) == []
    assert await ledger.archived() == await ledger.may_be_archived() == await ledger.quarantined() == 0
    assert await ledger.parked.page(0, None, 10) == []


@_check()
async def what_one_instance_writes_another_reads(ledgers: Ledgers) -> None:
    here, there = await ledgers.open(), await ledgers.open()
    await here.set_epoch(7)
    await flush(here, ["t"], watermarks={"t": Watermark(flushed_seq=3)})
    assert await there.epoch() == 7
    assert (await there.watermark("t")).flushed_seq == 3


@_check()
async def a_look_shows_what_is_there(ledgers: Ledgers) -> None:
    here, there = await ledgers.open(), await ledgers.open()
    await here.set_epoch(7)
    assert await there.look()
    assert await there.epoch() == 7


@_check()
async def the_epoch_never_goes_back(ledgers: Ledgers) -> None:
    ledger = await ledgers.open()
    for epoch, known in ((3, 3), (2, 3), (4, 4)):
        await ledger.set_epoch(epoch)
        assert await ledger.epoch() == known
    await ledger.claim(1, _HERE)
    assert await ledger.epoch() == 4


@_check()
async def the_first_target_stands(ledgers: Ledgers) -> None:
    ledger = await ledgers.open()
    await ledger.set_epoch(1)
    assert await ledger.target() is None
    assert await ledger.claim(2, _HERE) == _HERE
    assert await ledger.claim(3, _ELSEWHERE) == _HERE
    assert await ledger.target() == _HERE
    assert await ledger.epoch() == 3


@_check()
async def of_targets_that_are_claimed_at_once_all_see_the_same(ledgers: Ledgers) -> None:
    here, there = await ledgers.open(), await ledgers.open()
    claimed = await asyncio.gather(here.claim(1, _HERE), there.claim(1, _ELSEWHERE))
    assert claimed[0] == claimed[1] == await here.target()


@_check()
async def the_first_layout_stands(ledgers: Ledgers) -> None:
    here, there = await ledgers.open(), await ledgers.open()
    await here.claim(1, _HERE)
    assert await here.layout() is None
    await here.set_layout(Layout(2, 8))
    await there.set_layout(Layout(1, 4))
    assert await there.layout() == Layout(2, 8)


@_check()
async def the_last_log_that_existed_is_remembered(ledgers: Ledgers) -> None:
    here, there = await ledgers.open(), await ledgers.open()
    await here.claim(1, _HERE)
    assert await here.made() is None
    for epoch, stream, known in ((1, "S", (1, "S")), (1, "T", (1, "S")), (3, "T", (3, "T")), (2, "S", (3, "T"))):
        await here.note_made(Made(epoch, stream))
        assert await there.made() == known


@_check()
async def threads_that_are_to_be_erased_are_remembered_until_they_are(ledgers: Ledgers) -> None:
    here, there = await ledgers.open(), await ledgers.open()
    assert await here.begin_erasure("a", ["a2", "a1"]) == ["a1", "a2"]
    assert await here.begin_erasure("b", ["a1"]) == ["a1"]
    assert await there.begin_erasure("a", []) == ["a1", "a2"]
    assert await there.begin_erasure("a", ["a3", "a1"]) == ["a1", "a2", "a3"]
    await here.end_erasure("a", ["a1", "a3"])
    assert await there.begin_erasure("a", []) == ["a2"], "it may have been remembered since"
    await here.end_erasure("a", ["a2"])
    assert await there.begin_erasure("a", []) == []
    assert await there.begin_erasure("b", []) == ["a1"]


@_check()
async def an_archive_goes_forward_only(ledgers: Ledgers) -> None:
    ledger = await ledgers.open()
    for position, known in ((10, 10), (5, 10), (11, 11)):
        await ledger.set_archived(position)
        assert await ledger.archived() == await ledger.may_be_archived() == known


@_check()
async def a_run_of_an_archive_that_has_begun_is_known_and_lets_nothing_go(ledgers: Ledgers) -> None:
    ledger, other = await ledgers.open(), await ledgers.open()
    for begun in (10, 5):
        await ledger.begin_archiving(begun)
        assert (await other.archived(), await other.may_be_archived()) == (0, 10)
    await ledger.set_archived(7)
    assert (await other.archived(), await other.may_be_archived()) == (7, 10)
    await ledger.set_archived(12)
    assert (await other.archived(), await other.may_be_archived()) == (12, 12)


# Partitions: terms and cursors


@_check()
async def taking_raises_the_term_and_keeps_the_cursor(ledgers: Ledgers) -> None:
    ledger = await ledgers.open()
    first = await ledger.take([2, 0], "me")
    assert first == [Cursor(0, 1, 0, 0), Cursor(2, 1, 0, 0)]
    await ledger.flush(first, [], decides(cursors=[moved(first[1], 40)]))
    assert await ledger.take([2, 1], "you") == [Cursor(1, 1, 0, 0), Cursor(2, 2, 40, 40)]
    assert await ledger.cursors() == {0: first[0], 1: Cursor(1, 1, 0, 0), 2: Cursor(2, 2, 40, 40)}


@_check()
async def of_those_who_take_at_once_each_has_a_term_of_its_own(ledgers: Ledgers) -> None:
    here, there = await ledgers.open(), await ledgers.open()
    taken = [c for cs in await asyncio.gather(here.take([0], "a"), there.take([0], "b")) for c in cs]
    # An instance that finds the row held takes nothing.
    assert len({c.term for c in taken}) == len(taken) >= 1
    assert (await here.cursors())[0].term == max(c.term for c in taken)


@_check()
async def who_was_replaced_commits_nothing(ledgers: Ledgers) -> None:
    old, new = await ledgers.open(), await ledgers.open()
    held = await old.take([0, 1], "old")
    await new.take([1], "new")

    def decide(_: Mapping[str, Watermark]) -> Decision:
        raise AssertionError("rows of a partition that is another's were shown")

    with raises(NotOwner) as caught:
        await old.flush(held, ["t"], decide)
    assert caught.value.partition == 1
    assert await new.watermark("t") == Watermark()


@_check()
async def a_cursor_that_is_not_the_rows_commits_nothing(ledgers: Ledgers) -> None:
    ledger = await ledgers.open()
    (held,) = await ledger.take([0], "me")
    await ledger.flush([held], [], decides(cursors=[moved(held, 5)]))
    for cursor in (held, moved(held, 6), Cursor(1, 1, 0, 0)):
        with raises(NotOwner):
            await ledger.flush([cursor], ["t"], writes(t="x"))
    assert await ledgers.stored() == {}


@_check()
async def of_two_flushes_with_one_cursor_one_commits(ledgers: Ledgers) -> None:
    here, there = await ledgers.open(), await ledgers.open()
    held = await here.take([0], "me")

    async def attempt(ledger: Ledger, value: str) -> bool:
        change = decides(batch=[LedgerChange("t", value)], cursors=[moved(held[0], 9)])
        try:
            await ledger.flush(held, ["t"], change)
        except (NotOwner, FlushFailed):  # FlushFailed: the other one holds the partition
            return False
        return True

    committed = await asyncio.gather(attempt(here, "a"), attempt(there, "b"))
    assert sorted(committed) == [False, True]
    assert await ledgers.stored() == {"t": "a" if committed[0] else "b"}


# The flush: all of it or nothing


@_check()
async def a_flush_writes_changes_watermarks_and_cursors(ledgers: Ledgers) -> None:
    ledger = await ledgers.open()
    (held,) = await ledger.take([0], "me")
    watermark = Watermark(
        flushed_seq=1 << 41, applied_id=(1 << 63) - 1, version=7, keys=b"\0keys", broken_since=1 << 40, gone=True,
        producers=b"producers",
    )  # fmt: skip
    after = moved(held, 1 << 41)
    decision = decides(
        batch=[LedgerChange("t", "one"), LedgerChange("ü/1", "two")], watermarks={"t": watermark}, cursors=[after]
    )
    flushed = await ledger.flush([held], ["t", "ü/1"], decision, size=1000)
    assert (set(flushed.locked), dict(flushed.refused), set(flushed.untried)) == (set(), {}, set())
    assert flushed.decision.cursors == [after]
    assert await ledgers.stored() == {"t": "one", "ü/1": "two"}
    assert await ledger.watermark("t") == watermark
    assert (await ledger.watermarks(["t", "other"])) == {"t": (watermark, 0)}
    assert await ledger.cursors() == {0: after}


@_check()
async def a_flush_decides_on_the_rows_as_they_are(ledgers: Ledgers) -> None:
    ledger = await ledgers.open()
    await flush(ledger, ["t"], watermarks={"t": Watermark(flushed_seq=3, applied_id=4)})
    seen: list[Mapping[str, Watermark]] = []

    def decide(rows: Mapping[str, Watermark]) -> Decision:
        seen.append(rows)
        return Decision()

    await ledger.flush([], ["t", "new"], decide)
    assert seen == [{"t": Watermark(flushed_seq=3, applied_id=4), "new": Watermark()}]


@_check()
async def an_error_of_the_decision_passes_through_and_changes_nothing(ledgers: Ledgers) -> None:
    ledger = await ledgers.open()

    def decide(_: Mapping[str, Watermark]) -> Decision:
        raise LookupError("mine")

    with raises(LookupError):
        await ledger.flush([], ["t"], decide)
    assert await ledger.watermark("t") == Watermark()


@_check()
async def what_the_store_refuses_leaves_nothing_behind(ledgers: Ledgers) -> None:
    ledger = await ledgers.open()
    (held,) = await ledger.take([0], "me")
    decision = decides(
        batch=[LedgerChange("good", "one"), LedgerChange("bad", REFUSED)],
        watermarks={"good": Watermark(flushed_seq=1), "bad": Watermark(flushed_seq=2)},
        parked=[parked(3, "good")],
        cursors=[moved(held, 3)],
    )
    with raises(FlushFailed) as caught:
        await ledger.flush([held], ["good", "bad"], decision)
    assert caught.value.verdict.of_statement
    assert caught.value.of_batch
    assert caught.value.cause
    assert await ledgers.stored() == {}
    assert await ledger.watermark("good") == await ledger.watermark("bad") == Watermark()
    assert await ledger.cursors() == {0: held}
    assert await ledger.quarantined() == 0


@_check()
async def an_error_of_the_stores_code_is_one_of_the_flush(ledgers: Ledgers) -> None:
    ledger = await ledgers.open()
    with raises(FlushFailed) as caught:
        await ledger.flush([], ["t", "u"], writes(t="one", u=RAISES))
    assert caught.value.verdict is Verdict.SUSPECT
    assert await ledgers.stored() == {}
    flushed = await ledger.flush([], ["t", "u"], writes(t="one", u=RAISES), probe=10)
    assert flushed.refused["u"].verdict is Verdict.SUSPECT
    assert await ledgers.stored() == {"t": "one"}


@_check()
async def the_store_is_not_asked_to_write_nothing(ledgers: Ledgers) -> None:
    ledger = await ledgers.open()
    (held,) = await ledger.take([0], "me")
    await ledger.flush([held], ["t"], decides(watermarks={"t": Watermark(flushed_seq=1)}, cursors=[moved(held, 1)]))
    assert await ledgers.stored() == {}
    assert await ledger.cursors() == {0: moved(held, 1)}


@_check()
async def a_probe_finds_who_is_refused_and_writes_the_others(ledgers: Ledgers) -> None:
    ledger = await ledgers.open()
    asked: list[set[str]] = []
    values = {"a": "one", "b": REFUSED, "c": "two", "d": REFUSED}

    def decide(rows: Mapping[str, Watermark]) -> Decision:
        asked.append(set(rows))
        return writes(**values)(rows)

    flushed = await ledger.flush([], list(values), decide, probe=10)
    assert flushed.refused.keys() == {"b", "d"}
    assert all(e.verdict.of_statement for e in flushed.refused.values())
    assert asked == [set(values), {"a", "c"}]
    assert await ledgers.stored() == {"a": "one", "c": "two"}
    assert {t: (await ledger.watermark(t)).flushed_seq for t in values} == {"a": 1, "b": 0, "c": 1, "d": 0}


@_check()
async def a_row_that_somebody_holds_is_left_out(ledgers: Ledgers) -> None:
    ledger = await ledgers.open()
    await ledger.flush([], ["held", "free"], writes(held="one", free="one"))
    async with ledgers.hold("held"):
        flushed = await ledger.flush([], ["held", "free"], writes(held="two", free="two"))
    assert set(flushed.locked) == {"held"}
    assert set(flushed.decision.watermarks) == {"free"}
    assert await ledgers.stored() == {"held": "one", "free": "two"}
    assert not (await ledger.flush([], ["held"], writes(held="two"))).locked


# Threads that are gone


async def _gone(ledger: Ledger, **positions: int) -> None:
    rows = {t: Watermark(flushed_seq=seq, gone=True) for t, seq in positions.items()}
    await flush(ledger, list(rows), watermarks=rows)


@_check()
async def tombstones_are_listed_below_a_position_in_the_order_of_ids(ledgers: Ledgers) -> None:
    ledger = await ledgers.open()
    await _gone(ledger, b=2, a=3, c=1, late=9)
    known = {"alive": Watermark(flushed_seq=1), "numbered": Watermark(flushed_seq=1, gone=True, producers=b"p")}
    await flush(ledger, list(known), watermarks=known)
    assert await ledger.tombstones(9, "", 10) == [(3, "a"), (2, "b"), (1, "c")]
    assert await ledger.tombstones(9, "a", 1) == [(2, "b")]
    assert await ledger.tombstones(3, "", 10) == [(2, "b"), (1, "c")]


@_check()
async def a_tombstone_is_buried_unless_the_thread_was_written_again(ledgers: Ledgers) -> None:
    ledger = await ledgers.open()
    await _gone(ledger, a=1, b=2, c=3)
    again = {"b": Watermark(flushed_seq=5, gone=True), "c": Watermark(flushed_seq=3)}
    await flush(ledger, list(again), watermarks=again)
    await ledger.bury([(1, "a"), (2, "b"), (3, "c"), (4, "never")])
    assert (await ledger.watermarks(["a", "b", "c"])).keys() == {"b", "c"}


@_check()
async def what_quarantine_or_a_producer_needs_is_not_buried(ledgers: Ledgers) -> None:
    ledger = await ledgers.open()
    rows = {
        "parked": Watermark(flushed_seq=1, gone=True),
        "numbered": Watermark(flushed_seq=1, gone=True, producers=b"p"),
    }
    await flush(ledger, list(rows), watermarks=rows, parked=[parked(1, "parked")])
    await ledger.bury([(1, "parked"), (1, "numbered")])
    assert (await ledger.watermarks(list(rows))).keys() == rows.keys()


@_check()
async def nothing_is_known_of_a_thread_that_was_buried(ledgers: Ledgers) -> None:
    ledger = await ledgers.open()
    await flush(ledger, ["t"], watermarks={"t": Watermark(flushed_seq=1)}, parked=[parked(1, "t")])
    await ledger.parked.discard([1])
    await _gone(ledger, t=2)
    await ledger.bury([(2, "t")])
    assert await ledger.watermark("t") == Watermark()
    await flush(ledger, ["t"], watermarks={"t": Watermark(flushed_seq=3)})
    assert await ledger.watermarks(["t"]) == {"t": (Watermark(flushed_seq=3), 0)}
