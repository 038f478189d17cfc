"""The conformance suite of ledgers, third part: `bufstore.buffer.ports.waiting.WaitingEntries`."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

import msgspec

from bufstore.buffer.chain import Parked, Watermark
from bufstore.buffer.entry import Malformed
from bufstore.buffer.ports.ledger import Cursor, Decision, FlushFailed, Ledger, NotOwner, QuarantineFull
from bufstore.buffer.ports.waiting import WaitingEntry, WaitingTotals
from bufstore.jetstream.messages import StoredMessage
from bufstore.testing.basics import Check, raises, registrar
from bufstore.testing.ledger import (
    QUARANTINE_MAX,
    REFUSED,
    LedgerChange,
    Ledgers,
    decides,
    flush,
    moved,
    parked,
    writes,
)

CHECKS: list[Check] = []
_check = registrar(CHECKS)

_ALL = 1 << 40


def _waits(seq: int, thread_id: str, partition: int = 0, payload: bytes = b"payload", reason: str = "") -> WaitingEntry:
    """Return an entry that waits."""
    item = parked(seq, thread_id).item
    assert not isinstance(item, Malformed)
    item = msgspec.structs.replace(item, entry=msgspec.structs.replace(item.entry, payload=payload))
    return WaitingEntry(item, partition, reason or f"reason of {thread_id}")


async def _wait(ledger: Ledger, *entries: WaitingEntry) -> None:
    await flush(ledger, [], waiting=entries)


@_check()
async def in_a_new_ledger_nothing_waits(ledgers: Ledgers) -> None:
    ledger = await ledgers.open()
    (held,) = await ledger.take([0], "me")
    assert await ledger.waiting.totals() == WaitingTotals()
    assert await ledger.waiting.queues(0) == []
    assert await ledger.waiting.first(["t"], 10, _ALL) == {}
    assert await ledger.waiting.of_thread("t") == []
    assert await ledger.waiting.threads("", 10) == []
    assert await ledger.flushed() == {0: held.seq}


@_check()
async def what_waits_comes_back_whole_and_in_order(ledgers: Ledgers) -> None:
    here, there = await ledgers.open(), await ledgers.open()
    messages = (StoredMessage("s.0.x", 5, "1.header", b"\0one"), StoredMessage("s.0.x", 6, None, b""))
    malformed = Malformed("s.0.x", 6, messages[1:], "no Bufstore-Entry header", "t")
    entries = [_waits(4, "t", payload=b"\0" * 100_000), _waits(12, "t", payload=b""), _waits(5, "ü/1")]
    await _wait(here, *entries[1:], WaitingEntry(malformed, 0, "nul \0 in it"), entries[0])
    assert await there.waiting.of_thread("t") == [entries[0].item, malformed, entries[1].item]
    assert await there.waiting.of_thread("ü/1") == [entries[2].item]
    assert await there.waiting.threads("", 10) == ["t", "ü/1"]
    assert await there.waiting.threads("t", 10) == ["ü/1"]
    assert await there.waiting.threads("", 1) == ["t"]
    assert await there.waiting.among(["u", "ü/1", "t", "t"]) == {"t", "ü/1"}
    assert await there.waiting.among([]) == set()


@_check()
async def the_first_entries_are_given_as_far_as_asked_for(ledgers: Ledgers) -> None:
    ledger = await ledgers.open()
    waiting = [_waits(n, t, payload=b"x" * 1000) for n, t in enumerate("abcabc", 1)]
    await _wait(ledger, *waiting)

    async def positions(threads: str, entries: int, bytes_: int) -> dict[str, list[int]]:
        return {
            t: [i.seq for i in items] for t, items in (await ledger.waiting.first(threads, entries, bytes_)).items()
        }

    assert await positions("ca", 10, _ALL) == {"a": [1, 4], "c": [3, 6]}
    assert await positions("abc", 1, _ALL) == {"a": [1], "b": [2], "c": [3]}
    assert await positions("cba", 10, 1) == {"c": [3]}, "one in any case, and of the thread named first"
    assert await positions("cba", 10, 2500) in ({"c": [3, 6]}, {"c": [3, 6], "b": [2]})


@_check()
async def a_watermark_says_up_to_where_entries_wait(ledgers: Ledgers) -> None:
    ledger = await ledgers.open()
    rows = {"t": Watermark(flushed_seq=3, applied_id=4), "u": Watermark(flushed_seq=3)}
    await flush(ledger, ["t", "u"], watermarks=rows)
    await _wait(ledger, _waits(7, "t"), _waits(9, "t"), _waits(8, "rowless"))
    waits = {
        "t": Watermark(flushed_seq=3, applied_id=4, waits_to=9), "u": rows["u"], "rowless": Watermark(waits_to=8)
    }  # fmt: skip
    assert {t: await ledger.watermark(t) for t in waits} == waits
    assert await ledger.watermarks([*waits, "unknown"]) == {t: (w, 0) for t, w in waits.items()}
    seen: list[Mapping[str, Watermark]] = []

    def decide(found: Mapping[str, Watermark]) -> Decision:
        seen.append(found)
        return Decision()

    await ledger.flush([], ["t"], decide)
    assert seen == [{"t": rows["t"]}], "a flush is shown the row"


@_check()
async def what_is_flushed_ends_before_the_first_that_waits(ledgers: Ledgers) -> None:
    ledger = await ledgers.open()
    held = await ledger.take([0, 1, 2], "me")
    after = [moved(cursor, 20) for cursor in held]
    waiting = [_waits(12, "a", 1), _waits(7, "b", 1), _waits(20, "c", 2)]
    await ledger.flush(held, [], decides(waiting=waiting, cursors=after))
    assert await ledger.flushed() == {0: 20, 1: 6, 2: 19}
    assert {p: c.seq for p, c in (await ledger.cursors()).items()} == {0: 20, 1: 20, 2: 20}
    await flush(ledger, [], left={"b": 7})
    assert await ledger.flushed() == {0: 20, 1: 11, 2: 19}


@_check()
async def what_is_applied_leaves_in_the_same_transaction(ledgers: Ledgers) -> None:
    ledger = await ledgers.open()
    await _wait(ledger, _waits(1, "t"), _waits(2, "t"), _waits(3, "t"), _waits(4, "u"))
    change, row = LedgerChange("t", "two"), {"t": Watermark(flushed_seq=2)}
    await flush(ledger, ["t"], batch=[change], watermarks=row, left={"t": 2})
    assert [i.seq for i in await ledger.waiting.of_thread("t")] == [3]
    assert await ledger.watermark("t") == Watermark(flushed_seq=2, waits_to=3)
    assert await ledgers.stored() == {"t": "two"}
    refused = {"batch": [LedgerChange("t", REFUSED)], "left": {"t": 3, "u": 4}, "waiting": [_waits(5, "u")]}
    with raises(FlushFailed):
        await flush(ledger, ["t"], **refused)
    with raises(QuarantineFull):
        await flush(ledger, [], parked=[parked(n, "v") for n in range(QUARANTINE_MAX + 1)], **refused | {"batch": ()})
    assert [i.seq for i in await ledger.waiting.of_thread("t")] == [3], "all of a flush or nothing"
    assert [i.seq for i in await ledger.waiting.of_thread("u")] == [4]


@_check()
async def a_thread_may_leave_and_wait_again_in_one_flush(ledgers: Ledgers) -> None:
    ledger = await ledgers.open()
    await _wait(ledger, _waits(1, "t"))
    await flush(ledger, ["t"], watermarks={"t": Watermark(flushed_seq=1)}, left={"t": 1}, waiting=[_waits(2, "t")])
    assert [i.seq for i in await ledger.waiting.of_thread("t")] == [2]


@_check()
async def entries_of_a_thread_whose_row_is_held_can_be_made_wait(ledgers: Ledgers) -> None:
    ledger = await ledgers.open()
    (held,) = await ledger.take([0], "me")
    await ledger.flush([], ["held"], writes(held="one"))
    async with ledgers.hold("held"):
        await ledger.flush([held], [], decides(waiting=[_waits(5, "held")], cursors=[moved(held, 5)]))
        assert (await ledger.watermark("held")).waits_to == 5
    assert await ledger.cursors() == {0: moved(held, 5)}


@_check()
async def who_was_replaced_makes_nothing_wait(ledgers: Ledgers) -> None:
    old, new = await ledgers.open(), await ledgers.open()
    (held,) = await old.take([0], "old")
    await old.flush([held], [], decides(waiting=[_waits(1, "t")], cursors=[moved(held, 1)]))
    (taken,) = await new.take([0], "new")
    for decision in (decides(waiting=[_waits(2, "t")]), decides(left={"t": 1})):
        with raises(NotOwner):
            await old.flush([moved(held, 1)], [], decision)
    assert taken == Cursor(0, 2, 1, 1), "a partition in which entries wait can be taken"
    assert [q.thread_id for q in await new.waiting.queues(0)] == ["t"]
    assert [i.seq for i in await new.waiting.of_thread("t")] == [1]


@_check()
async def an_owner_finds_who_waits_in_its_partition(ledgers: Ledgers) -> None:
    ledger = await ledgers.open()
    await _wait(ledger, _waits(3, "late", payload=b"x" * 5000), _waits(9, "early"), _waits(2, "early"))
    await _wait(ledger, _waits(1, "elsewhere", partition=1))
    early, late = await ledger.waiting.queues(0)
    assert (early.thread_id, early.entries, early.reason, early.last) == ("early", 2, "reason of early", 9)
    assert (late.thread_id, late.entries, late.reason, late.last) == ("late", 1, "reason of late", 3)
    assert 5000 <= late.bytes < 6000


@_check()
async def the_totals_say_how_much_waits_since_when_and_why(ledgers: Ledgers) -> None:
    ledger = await ledgers.open()
    began = datetime.now(UTC)
    await _wait(ledger, _waits(1, "t", reason="often"), _waits(2, "t", reason="often"), _waits(3, "u", 1))
    totals = await ledger.waiting.totals()
    assert (totals.entries, totals.threads, totals.reason) == (3, 2, "often")
    assert totals.since is not None
    assert began - timedelta(seconds=5) < totals.since < datetime.now(UTC) + timedelta(seconds=5)
    assert 21 <= totals.bytes < 3000


@_check()
async def a_tombstone_with_entries_that_wait_behind_it_is_not_buried(ledgers: Ledgers) -> None:
    ledger = await ledgers.open()
    gone = {"t": Watermark(flushed_seq=1, gone=True)}
    await flush(ledger, ["t"], watermarks=gone)
    await _wait(ledger, _waits(2, "t"))
    await ledger.bury([(1, "t")])
    assert await ledger.watermark("t") == msgspec.structs.replace(gone["t"], waits_to=2)
    await flush(ledger, [], left={"t": 2})
    await ledger.bury([(1, "t")])
    assert await ledger.watermark("t") == Watermark()


@_check()
async def what_waited_can_be_parked(ledgers: Ledgers) -> None:
    ledger = await ledgers.open()
    entry = _waits(1, "t")
    await _wait(ledger, entry)
    (item,) = await ledger.waiting.of_thread("t")
    row = {"t": Watermark(flushed_seq=1, broken_since=1)}
    await flush(ledger, ["t"], watermarks=row, parked=[Parked(item, "poison", 0)], left={"t": 1})
    found = await ledger.parked.entry(1)
    assert found is not None
    assert found.item == entry.item
    assert await ledger.watermark("t") == row["t"]
