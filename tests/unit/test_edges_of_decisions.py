"""What one changed operator in a decision would break, and no other test would show."""

from __future__ import annotations

from typing import Any

import pytest

from bufstore import Run, RunStatus, ThreadMetadata
from bufstore.buffer import recent_keys
from bufstore.buffer.append.tip import tip_of_row
from bufstore.buffer.chain import Watermark, counts, plan
from bufstore.buffer.domain import Inapplicable
from bufstore.buffer.entry import Base, Entry, Malformed, StoredEntry
from bufstore.buffer.flush.deciding import decide_thread, is_one_entry
from bufstore.buffer.flush.passed import Passed, purgeable
from bufstore.buffer.groups.group import Draft, NewEntry, body_of
from bufstore.buffer.operate.salvage import plan_salvage
from bufstore.buffer.read.overlay import from_log_alone
from bufstore.spark.log_archive.applicable import applicable
from bufstore.threads.coalesce import coalesce
from bufstore.threads.domain import THREADS
from bufstore.threads.model import decode_run, encode_messages, encode_metadata, encode_run
from bufstore.threads.payload import AnyPayload, Edit, Payload, Removal, content_hash, decode_payload, encode_payload
from bufstore.threads.write import save_of

RUN = Run(run_id="r", thread_id="t")
KEYS = [recent_keys.item(f"key {n}", b"content") for n in range(3)]


def entry(
    seq: int, id_: int, prev_id: int = 0, base: Base = Base.CHAINED, payload: AnyPayload | None = None, **fields: Any
) -> StoredEntry:
    body = encode_payload(payload) if payload is not None else b""
    given: dict[str, Any] = {"seen": 0, "version": 1, "self_contained": False, "keys": b""}
    return StoredEntry("t", seq, Entry(id=id_, prev_id=prev_id, base=base, payload=body, **(given | fields)))


def said(message: str, keep: int = 0) -> Payload:
    return Payload(keep, encode_messages([message]), encode_run(RUN), save_of(RUN))


def appended(seq: int, id_: int, message: str, prev_id: int = 0, *, keep: int = 0, **fields: Any) -> StoredEntry:
    return entry(seq, id_, prev_id, payload=said(message, keep), **({"version": keep + 1} | fields))


def deleted(seq: int, id_: int, prev_id: int) -> StoredEntry:
    return entry(seq, id_, prev_id, payload=Removal(), self_contained=True, version=0)


def titled(seq: int, id_: int, prev_id: int, title: str) -> StoredEntry:
    return entry(seq, id_, prev_id, payload=Edit(1, metadata=encode_metadata(ThreadMetadata(title=title))))


# What is told to a writer.


def test_an_entry_that_was_passed_over_does_not_count_because_another_stands_behind_it() -> None:
    """Else its writer would be told that it is stored."""
    late = entry(20, 5, 7, Base.STORED, seen=10, keys=KEYS[0])
    row = Watermark(flushed_seq=30, applied_id=9, keys=KEYS[1] + KEYS[2])
    assert counts(late, row, entry(21, 9, 7, keys=KEYS[1] + KEYS[2])) is None
    assert counts(late, row, entry(21, 9, 5, keys=KEYS[0] + KEYS[2])) is True
    assert counts(late, row, Malformed("s", 21, (), "damage", "t")) is None


def test_an_entry_that_was_passed_over_and_that_nobody_followed_is_not_stored() -> None:
    late = entry(20, 5, 7, Base.STORED, seen=10, keys=KEYS[0])
    row = Watermark(flushed_seq=30, applied_id=9, keys=KEYS[1])
    assert counts(late, row, None) is False
    assert counts(late, row, entry(21, 9, 5, keys=KEYS[0] + KEYS[2])) is True


def test_a_tip_without_a_row_says_how_far_its_writer_has_seen() -> None:
    """A tombstone may be there again after a failover: the entry behind it is newer."""
    tip = tip_of_row(Watermark(), 12, 0.0, None)
    assert (tip.base, tip.seen) == (Base.NONE, 12)
    back = Watermark(flushed_seq=10, applied_id=7, gone=True)
    first = entry(20, 8, tip.id, tip.base, seen=tip.seen)
    assert [item.seq for item in plan(back, [first], complete=True).apply] == [20]


def test_a_tip_of_a_row_has_seen_at_least_what_the_row_has() -> None:
    row = Watermark(flushed_seq=15, applied_id=7)
    tip = tip_of_row(row, 12, 0.0, None)
    behind = entry(20, 8, tip.id, tip.base, seen=tip.seen)
    assert [item.seq for item in plan(row, [behind], complete=True).apply] == [20]


# What is read while Postgres is away.


def test_the_log_alone_takes_the_keys_of_the_last_entry_and_none_of_one_that_may_not_count() -> None:
    """Else a repeat would be answered as stored though nothing took effect."""
    first = appended(50, 1, "a", base=Base.UNKNOWN, self_contained=True, seen=10, keys=KEYS[0], producers=b"p" * 16)
    second = appended(51, 2, "b", 1, keep=1, keys=KEYS[1], producers=b"q" * 16)
    third = appended(52, 3, "c", 2, keep=2, keys=KEYS[1] + KEYS[2], producers=b"r" * 16)
    for items, keys, numbers in (
        ([first], b"", b""),
        ([first, second], KEYS[1], b"q" * 16),
        ([first, second, third], KEYS[1] + KEYS[2], b"r" * 16),
    ):
        shown = from_log_alone(THREADS, "t", items)
        assert shown is not None
        assert shown.unjudged
        assert (shown.watermark.keys, shown.watermark.producers) == (keys, numbers)


def test_the_log_alone_does_not_show_what_a_later_whole_list_skips() -> None:
    first = appended(50, 1, "a", base=Base.NONE, self_contained=True, seen=10)
    whole = appended(52, 3, "b", 1, self_contained=True)
    shown = from_log_alone(THREADS, "t", [first, titled(51, 2, 1, "discarded"), whole])
    assert shown is None or (shown.partial and shown.thread is not None and shown.thread.metadata == ThreadMetadata())


def test_the_log_alone_does_not_show_what_is_before_damage() -> None:
    first = appended(50, 1, "a", base=Base.NONE, self_contained=True, seen=10)
    damage = Malformed("s", 52, (), "damage", "t")
    whole = appended(53, 4, "b", 3, self_contained=True)
    shown = from_log_alone(THREADS, "t", [first, titled(51, 2, 1, "before"), damage, whole])
    assert shown is None or shown.partial


def test_the_log_alone_shows_no_thread_that_is_broken_although_all_of_it_is_chained() -> None:
    first = appended(50, 1, "a", base=Base.NONE, self_contained=True, seen=10)
    assert from_log_alone(THREADS, "t", [first]) is not None
    assert from_log_alone(THREADS, "t", [first, appended(51, 2, "b", 1, keep=3, version=4)]) is None


def test_the_log_alone_shows_a_thread_that_was_healed_although_nobody_can_read_what_was_parked_of_it() -> None:
    """Regression: an entry of a kind that this release does not know, say, ended each such read."""
    first = appended(50, 1, "a", base=Base.NONE, self_contained=True, seen=10)
    unknown = entry(51, 2, 1, self_contained=True)
    whole = appended(52, 3, "b", 2, self_contained=True)
    for items in ([first, unknown, whole], [unknown, whole]):
        shown = from_log_alone(THREADS, "t", items)
        assert shown is not None
        assert shown.messages == encode_messages(["b"])
    assert from_log_alone(THREADS, "t", [first, unknown]) is None


# What is flushed, repaired, purged.


def test_an_edit_that_expected_nothing_and_may_be_older_than_all_that_is_known_rewinds_nothing() -> None:
    keys = b"".join(recent_keys.item(recent_keys.key_of(id_), b"") for id_ in range(1, 6))
    ahead = Watermark(flushed_seq=15, applied_id=5, version=5, keys=keys)
    found = plan_salvage(ahead, [entry(4, 80, 79, Base.UNKNOWN, seen=3)], common=0, settled=set())
    assert ([item.seq for item in found.apply], [parked.item.seq for parked in found.park]) == ([], [4])


def test_a_deletion_leaves_a_tombstone_and_what_follows_it_none() -> None:
    row, removal = Watermark(flushed_seq=10, applied_id=1, version=1), deleted(20, 2, 1)
    for items, gone in (([removal], True), ([removal, appended(30, 3, "b", 2)], False)):
        assert decide_thread("t", row, items, {}, coalesce, complete=True)[0].watermark.gone is gone


def test_a_change_behind_a_deletion_appends_nothing() -> None:
    made = coalesce("t", 0, [deleted(10, 1, 7), appended(11, 2, "a", 1)])
    assert (made.deleted, made.gone, made.appends) == (True, False, False)
    assert coalesce("t", 0, [appended(11, 2, "a", 1)]).appends


def test_nothing_is_kept_of_what_was_deleted() -> None:
    made = coalesce(
        "t",
        3,
        [
            appended(8, 6, "a", 5, keep=3),
            entry(9, 7, 6, payload=Edit(4, metadata=encode_metadata(ThreadMetadata(title="x"))), version=4),
            deleted(10, 1, 7),
        ],
    )
    assert (made.keep, made.messages, made.runs, made.saves, made.metadata) == (0, [], {}, [], None)
    with pytest.raises(Inapplicable, match="keeps 1 of 0 messages"):
        coalesce("t", 3, [deleted(10, 1, 7), appended(11, 2, "b", 1, keep=1)])


def test_behind_an_edit_that_takes_the_parent_off_the_next_run_that_names_one_decides() -> None:
    child = Run(run_id="r", thread_id="t", parent_thread_id="p")
    named = entry(12, 3, 2, payload=Payload(1, [], encode_run(child), save_of(child)))
    for edited, parent in ((None, "p"), ("q", "q")):
        edit = entry(10, 1, 7, payload=Edit(1, parent=(edited,)))
        for between in ([], [entry(11, 2, 1, payload=said("b"))]):
            assert coalesce("t", 1, [edit, *between, named]).parent == (parent,)


def test_a_run_that_is_saved_on_its_own_is_saved_and_leaves_the_row_as_it_was() -> None:
    made = coalesce("t", 1, [entry(10, 1, 7, payload=Edit(1, run=encode_run(RUN), run_id="r"))])
    assert (made.runs, made.run_seqs, made.saves) == ({"r": encode_run(RUN)}, {"r": 10}, [])


def test_runs_stand_in_the_order_of_their_last_saves_and_begin_with_their_first() -> None:
    def saved(seq: int, run_id: str, status: RunStatus) -> StoredEntry:
        run = Run(run_id=run_id, thread_id="t", status=status)
        return entry(seq, seq, seq - 1, payload=Edit(1, run=encode_run(run), run_id=run_id))

    saves = [saved(10, "a", RunStatus.RUNNING), saved(11, "b", RunStatus.RUNNING), saved(12, "a", RunStatus.DONE)]
    made = coalesce("t", 1, saves)
    assert [decode_run(run).status for run in made.runs.values()] == [RunStatus.RUNNING, RunStatus.DONE]
    assert (list(made.runs), made.run_seqs) == (["b", "a"], {"a": 10, "b": 11})


def test_one_entry_is_one_of_a_known_thread() -> None:
    one, two = entry(1, 1), entry(2, 2)
    assert is_one_entry({"t": [one]})
    assert not is_one_entry({"t": [one, two]})
    assert not is_one_entry({"t": [one], "u": [two]})
    assert not is_one_entry({None: [one]})


def test_nothing_goes_before_its_time_while_there_is_room_also_in_whole_units() -> None:
    passed = Passed()
    for n in range(1, 51):
        passed.note(float(n), n)
    passed.gone(10)
    assert purgeable(passed, confirmed=50.0, wished=float("-inf"), to_go=0, unit=30) is None


def test_a_damaged_entry_keeps_exactly_its_own_bytes() -> None:
    new = [NewEntry(f"t{n}", 0, 0, f"header{n}", b"payload%d" % n * (n + 1)) for n in range(3)]
    draft = Draft(5, new)
    group = draft.stored(7, 0, 0, 0)
    parts = [body_of(group, n, draft.body) for n in range(3)]
    assert b"".join(parts) == draft.body
    for n, part in enumerate(parts):
        assert part.endswith(new[n].header.encode() + new[n].payload)
        assert part[4:].startswith(b"t%d" % n)


# What is restored.


def test_a_thread_that_was_buried_twice_is_restored_with_what_followed_the_second_deletion() -> None:
    items = [
        appended(10, 1, "a", base=Base.NONE),
        deleted(20, 2, 1),
        appended(30, 3, "b", 2),
        deleted(40, 4, 3),
        appended(50, 5, "c", base=Base.NONE, seen=45),
    ]
    found = applicable("t", Watermark(), 0, items)
    assert ([item.entry.id for item in found.plan.apply], found.refused) == ([1, 2, 3, 4, 5], 0)


def test_a_late_entry_of_a_buried_thread_is_passed_by_the_watermark() -> None:
    items = [appended(10, 1, "a", base=Base.NONE), deleted(20, 2, 1), appended(25, 3, "late", base=Base.NONE, seen=5)]
    assert applicable("t", Watermark(), 0, items).plan.watermark.flushed_seq == 25


# What stands in the log.


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        (Removal(keep=1), "removal that keeps"),
        (Removal(messages=[b"\xc0"]), "removal that keeps"),
        (Edit(0, parent=("a\0b",)), "undecodable"),
        (Edit(0, state=b"\xc1"), "undecodable"),
        (Edit(0, run=encode_run(RUN)), "a run without"),
        (Edit(0, run_id="r"), "a run without"),
        (Edit(-1), "negative"),
        (Edit(0, messages=[b"\xc1"]), "undecodable"),
        (Edit(0, metadata=b"\xc1"), "undecodable"),
    ],
)
def test_a_payload_that_no_store_could_take_is_refused(payload: AnyPayload, says: str) -> None:
    """Else a whole batch would fail with it, again and again."""
    with pytest.raises(ValueError, match=says):
        decode_payload(encode_payload(payload))


def test_what_another_release_has_written_is_understood() -> None:
    """The encoding stays as it is, and so does the hash by which a repeat is known."""
    assert encode_payload(Removal()) == bytes.fromhex("93a772656d6f76616c0090")
    assert encode_payload(Edit(1, [b"m"])) == bytes.fromhex("98a4656469740191c4016dc0c0c0c0c0")
    assert encode_payload(said("m"))[:11] == bytes.fromhex("95aa636865636b706f696e")
    assert content_hash("checkpoint", [b"a", b"bc"], b"run").hex() == "312780b9cc923a49977bffcd908cf73c"
