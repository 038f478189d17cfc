"""The conformance suite of ledgers, second part: `bufstore.buffer.ports.ledger.ParkedEntries`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta

import msgspec

from bufstore.buffer.chain import Parked, Watermark
from bufstore.buffer.entry import Malformed
from bufstore.buffer.operate.replay import Outcome, ParkedEntry, plan_replay
from bufstore.buffer.ports.ledger import FlushFailed, Ledger, QuarantineFull, Replay
from bufstore.jetstream.messages import StoredMessage
from bufstore.tasks import spawn
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


async def _park(ledger: Ledger, *entries: Parked) -> None:
    """Park these entries with a flush, which breaks their threads."""
    broken: dict[str, Watermark] = {}
    for p in entries:
        if p.item.thread_id is not None:
            first = broken.get(p.item.thread_id, Watermark(broken_since=p.item.seq)).broken_since
            broken[p.item.thread_id] = Watermark(flushed_seq=p.item.seq, applied_id=p.base_id or 0, broken_since=first)
    await flush(ledger, list(broken), watermarks=broken, parked=entries)


def _replays(value: str) -> Callable[[Watermark, Sequence[ParkedEntry]], Replay]:
    """Return a function that replays what can be replayed; the store has `value` afterwards."""

    def decide(row: Watermark, entries: Sequence[ParkedEntry]) -> Replay:
        plan = plan_replay(row, entries)
        return Replay(plan, LedgerChange(plan.apply[0].thread_id, value) if plan.apply else None)

    return decide


@_check()
async def what_is_parked_comes_back_whole(ledgers: Ledgers) -> None:
    ledger = await ledgers.open()
    messages = (StoredMessage("s.0.x", 2, "1.header", b"\0one"), StoredMessage("s.0.x", 3, None, b""))
    malformed = Malformed("s.0.x", 3, messages, "no entry", "t")
    nameless = Malformed("s.0.y", 4, (StoredMessage("s.0.y", 4, "", b"two"),), "no subject")
    items = [parked(1, "t", 11), Parked(malformed, "no entry", 11), Parked(nameless, "no subject")]
    await _park(ledger, *items)
    for p in items:
        found = await ledger.parked.entry(p.item.seq)
        assert found is not None
        assert abs(datetime.now(UTC) - found.parked_at) < timedelta(hours=1)
        assert msgspec.structs.replace(found, parked_at=datetime.min) == ParkedEntry(
            seq=p.item.seq, thread_id=p.item.thread_id, base_id=p.base_id, cause=p.cause, parked_at=datetime.min,
            item=p.item,
        )  # fmt: skip
    assert await ledger.parked.entry(5) is None
    assert [e.seq for e in await ledger.parked.of_thread("t", 0)] == [1, 3]
    assert [e.item for e in await ledger.parked.of_thread("t", 2)] == [malformed]
    assert await ledger.parked.of_thread("u", 0) == []
    assert await ledger.parked.ends() == {"t": 3}
    assert await ledger.parked.present([1, 3, 5]) == {1, 3}
    assert await ledger.quarantined() == 3


@_check()
async def the_list_goes_by_position_thread_and_page(ledgers: Ledgers) -> None:
    ledger = await ledgers.open()
    nameless = Malformed("s.0.y", 4, (StoredMessage("s.0.y", 4, "", b"two"),), "no subject")
    await _park(ledger, parked(3, "b"), parked(1, "a"), parked(2, "b"), Parked(nameless, "no subject"))
    page = await ledger.parked.page(0, None, 10)
    assert [(p.seq, p.thread_id, p.entry_id, p.cause) for p in page] == [
        (1, "a", 1001, "cause 1"), (2, "b", 1002, "cause 2"), (3, "b", 1003, "cause 3"), (4, None, None, "no subject"),
    ]  # fmt: skip
    assert all(p.bytes > 0 and len(p.hash) == 64 and not p.superseded for p in page)
    assert [p.seq for p in await ledger.parked.page(1, None, 2)] == [2, 3]
    assert [p.seq for p in await ledger.parked.page(2, "b", 10)] == [3]
    assert await ledger.parked.threads("", 10) == ["a", "b"]
    assert await ledger.parked.threads("a", 10) == ["b"]
    assert await ledger.parked.threads("", 1) == ["a"]


@_check()
async def what_is_parked_again_stays_as_it_was(ledgers: Ledgers) -> None:
    ledger = await ledgers.open()
    await _park(ledger, parked(1, "t", 11))
    await _park(ledger, Parked(parked(1, "t").item, "another cause", 12))
    found = await ledger.parked.entry(1)
    assert found is not None
    assert (found.cause, found.base_id) == ("cause 1", 11)
    assert await ledger.quarantined() == 1


@_check()
async def an_entry_is_superseded_when_the_thread_went_on(ledgers: Ledgers) -> None:
    ledger = await ledgers.open()
    await _park(ledger, parked(1, "t", 11), parked(2, "u", 11))
    await flush(ledger, ["t"], watermarks={"t": Watermark(flushed_seq=5, applied_id=12)})
    assert [(p.seq, p.superseded) for p in await ledger.parked.page(0, None, 10)] == [(1, True), (2, False)]
    assert await ledger.broken() == {"u"}


@_check()
async def a_full_quarantine_refuses_the_flush_that_parks_more(ledgers: Ledgers) -> None:
    ledger = await ledgers.open()
    (held,) = await ledger.take([0], "me")
    await _park(ledger, *(parked(seq, "t") for seq in range(1, QUARANTINE_MAX)))
    more = decides(
        batch=[LedgerChange("u", "one")], watermarks={"u": Watermark(flushed_seq=9)}, cursors=[moved(held, 9)],
        parked=[parked(8, "u"), parked(9, "u")],
    )  # fmt: skip
    with raises(QuarantineFull) as caught:
        await ledger.flush([held], ["u"], more)
    assert caught.value.room == 1
    assert await ledger.quarantined() == QUARANTINE_MAX - 1
    assert await ledger.watermark("u") == Watermark()
    assert await ledger.cursors() == {0: held}
    assert await ledgers.stored() == {}
    # One more entry fits, and a flush that parks nothing succeeds even when the quarantine is full.
    await _park(ledger, parked(8, "u"))
    await ledger.flush([], ["v"], writes(v="two"))
    assert await ledgers.stored() == {"v": "two"}


@_check()
async def what_is_discarded_is_gone_and_known_to_be(ledgers: Ledgers) -> None:
    ledger = await ledgers.open()
    nameless = Malformed("s.0.y", 4, (StoredMessage("s.0.y", 4, "", b"two"),), "no subject")
    await _park(ledger, parked(1, "t"), parked(2, "t"), Parked(nameless, "no subject"))
    assert await ledger.broken() == {"t"}
    assert await ledger.parked.discard([1, 7]) == 1
    assert (await ledger.watermark("t")).broken_since == 2
    assert (await ledger.watermarks(["t"]))["t"][1] == 1
    assert await ledger.parked.discard([2, 2, 4]) == 2
    # No entry of the thread is parked any more: the thread is whole.
    assert await ledger.broken() == frozenset()
    assert await ledger.watermarks(["t"]) == {"t": (Watermark(flushed_seq=2), 2)}
    assert await ledger.quarantined() == 0


@_check()
async def what_is_replayed_meanwhile_is_not_discarded(ledgers: Ledgers) -> None:
    ledger = await ledgers.open()
    threads = {seq: f"t{seq}" for seq in range(1, 6)}
    await _park(ledger, *(parked(seq, thread_id, 11) for seq, thread_id in threads.items()))
    for seq, thread_id in threads.items():
        discards: list[asyncio.Task[int]] = []

        def decide(row: Watermark, entries: Sequence[ParkedEntry], seq: int = seq) -> Replay:
            discards.append(spawn(ledger.parked.discard([seq])))  # noqa: B023 - awaited in this round
            return _replays("replayed")(row, entries)

        await ledger.parked.replay(thread_id, 0, decide)
        assert await discards[0] == 0
        replayed = Watermark(flushed_seq=seq, applied_id=1000 + seq, version=1)
        assert await ledger.watermarks([thread_id]) == {thread_id: (replayed, 0)}
    assert await ledger.quarantined() == 0


@_check()
async def a_replay_applies_what_waits_and_mends_the_thread(ledgers: Ledgers) -> None:
    ledger = await ledgers.open()
    chained = msgspec.structs.replace(parked(2, "t", 11).item.entry, prev_id=1001)  # type: ignore[union-attr]
    await _park(ledger, parked(1, "t", 11), Parked(msgspec.structs.replace(parked(2, "t").item, entry=chained), "", 11))
    assert await ledger.broken() == {"t"}
    replay = await ledger.parked.replay("t", 0, _replays("replayed"))
    assert [o.outcome for o in replay.plan.outcomes] == [Outcome.APPLIED, Outcome.APPLIED]
    assert await ledgers.stored() == {"t": "replayed"}
    assert await ledger.watermark("t") == Watermark(flushed_seq=2, applied_id=1002, version=1)
    assert await ledger.broken() == frozenset()
    assert await ledger.quarantined() == 0


@_check()
async def what_stays_behind_a_replay_waits_on_it(ledgers: Ledgers) -> None:
    ledger = await ledgers.open()
    await _park(ledger, parked(1, "t", 11), parked(2, "t", 11), parked(3, "u", 11))
    replay = await ledger.parked.replay("t", 0, _replays("replayed"))
    assert [o.outcome for o in replay.plan.outcomes] == [Outcome.APPLIED, Outcome.WAITS]
    behind = await ledger.parked.entry(2)
    assert behind is not None
    assert behind.base_id == 1001
    assert (await ledger.watermark("t")).broken_since == 2
    assert await ledger.broken() == {"t", "u"}
    assert [p.seq for p in await ledger.parked.page(0, None, 10)] == [2, 3]


@_check()
async def a_replay_shows_the_row_and_the_threads_entries_in_order(ledgers: Ledgers) -> None:
    ledger = await ledgers.open()
    await _park(ledger, parked(3, "t", 11), parked(1, "t", 11), parked(2, "t", 11), parked(4, "u"))
    row, shown = await ledger.watermark("t"), list[object]()

    def decide(found: Watermark, entries: Sequence[ParkedEntry]) -> Replay:
        shown.extend((found, *(e.seq for e in entries)))
        return Replay(plan_replay(found, ()), None)

    await ledger.parked.replay("t", 2, decide)
    assert shown == [row, 2, 3]
    # A replay without a change writes nothing.
    assert await ledger.watermark("t") == row
    assert await ledger.quarantined() == 4


@_check()
async def a_replay_that_fails_changes_nothing(ledgers: Ledgers) -> None:
    ledger = await ledgers.open()
    await _park(ledger, parked(1, "t", 11))
    row = await ledger.watermark("t")

    def decide(_: Watermark, __: Sequence[ParkedEntry]) -> Replay:
        raise LookupError("mine")

    with raises(LookupError):
        await ledger.parked.replay("t", 0, decide)
    with raises(FlushFailed) as caught:
        await ledger.parked.replay("t", 0, _replays(REFUSED))
    assert caught.value.verdict.of_statement
    assert await ledger.watermark("t") == row
    assert await ledger.parked.present([1]) == {1}
    assert await ledgers.stored() == {}
