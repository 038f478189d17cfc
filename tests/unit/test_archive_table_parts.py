"""Which parts of an archive's table count, and what rows say of entries: decisions, without Spark."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta, timezone
from itertools import pairwise
from typing import Any

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from bufstore import ConfigError, Run, RunStatus
from bufstore.buffer.chain import Watermark, plan
from bufstore.buffer.entry import Base, Entry, Item, Malformed, StoredEntry
from bufstore.buffer.flush.deciding import decide_thread
from bufstore.jetstream.messages import StoredMessage
from bufstore.spark.log_archive.entry_table import APPLIED, PARKED, SCHEMA, SUPERSEDED, Known, known_of, thread_rows
from bufstore.spark.log_archive.table_parts import VERSION, Part, cover, newest_us, replaced, to_merge
from bufstore.spark.log_archive.tables_job import expire
from bufstore.spark.source.log_columns import LogItem, entry_rows
from bufstore.spark.tables.table_rows import TABLES, batch_of, message_row, thread_row
from bufstore.threads.coalesce import coalesce
from bufstore.threads.model import RunSave, Thread, encode_messages, encode_run
from bufstore.threads.payload import Edit, Payload, Removal, encode_payload

THEN = datetime(2026, 11, 22, 23, 30, tzinfo=UTC)


def part(start: int, end: int, n: int = 0, made: int = 0, count: int = 1) -> Part:
    return Part(
        version=VERSION, start=start, end=end, count=count, checksum="", newest_us=0, made_us=made, attempt=f"{n:02d}"
    )  # fmt: skip


def test_a_message_of_the_future_makes_nothing_look_old() -> None:
    stored = [replace(part(1, 2), newest_us=at) for at in (5, 900, 7)]
    assert newest_us(stored, 1000) == 900
    assert newest_us(stored, 10) == 10


SIZES = st.tuples(st.integers(1, 30), st.integers(1, 12), st.integers(0, 9), st.integers(0, 9))
PARTS = st.lists(SIZES, max_size=8).map(
    lambda found: [part(start, start + length, n, *more) for n, (start, length, *more) in enumerate(found)]
)


def counted(parts: Sequence[Part]) -> list[int]:
    for piece in cover(parts):
        assert piece.part.start <= piece.start < piece.end <= piece.part.end
    return [at for piece in cover(parts) for at in range(piece.start, piece.end)]


@given(PARTS, st.randoms())
def test_each_message_counts_once_whichever_parts_there_are(parts: list[Part], random: Any) -> None:
    there = sorted({at for p in parts for at in range(p.start, p.end)})
    assert counted(parts) == there
    mixed = list(parts)
    random.shuffle(mixed)
    assert cover(mixed) == cover(parts)


@given(PARTS, st.integers(0, 10))
def test_what_is_removed_did_not_count(parts: list[Part], before: int) -> None:
    gone = replaced(parts, before)
    assert cover([p for p in parts if p not in gone]) == cover(parts)
    for p in gone:
        assert any(q.made_us < before and q.start <= p.start and p.end <= q.end for q in parts if q != p)


@given(PARTS, st.integers(1, 20))
def test_small_neighbours_are_merged_and_nothing_else(parts: list[Part], rows: int) -> None:
    before = counted(parts)
    merged = to_merge(parts, rows)
    made = [part(start, end, 50 + n) for n, (start, end) in enumerate(merged)]
    assert [start for start, _ in merged] == sorted({start for start, _ in merged})
    assert all(one[1] <= other[0] for one, other in pairwise(merged))
    assert counted([*parts, *made]) == before
    for start, end in merged:
        some = [piece for piece in cover(parts) if start <= piece.start and piece.end <= end]
        assert len(some) > 1
        assert sum(piece.part.count for piece in some) <= rows


def stored(seq: int, id_: int, prev: int, base: Base, payload: bytes, **more: Any) -> StoredEntry:
    values = {"seen": 0, "version": 1, "self_contained": False, "keys": b""} | more
    return StoredEntry("t", seq, Entry(id=id_, prev_id=prev, base=base, payload=payload, **values))


def said(*messages: Any, keep: int = 0, **run: Any) -> bytes:
    made = Run(**({"run_id": "r", "thread_id": "t"} | run))
    return encode_payload(
        Payload(keep, encode_messages(list(messages)), encode_run(made), RunSave("r", made.status, None))
    )


ENTRIES = st.lists(
    st.tuples(
        st.sampled_from([Base.CHAINED, Base.CHAINED, Base.CHAINED, Base.NONE, Base.UNKNOWN]),
        st.integers(0, 3),  # how many entries back its base is
        st.booleans(),
        st.sampled_from(["sound", "sound", "sound", "damaged", "unreadable"]),
    ),
    min_size=1,
    max_size=12,
)


def history(entries: Sequence[tuple[Base, int, bool, str]]) -> list[Item]:
    items: list[Item] = []
    for n, (base, back, whole, state) in enumerate(entries, 1):
        if state == "damaged":
            items.append(Malformed("s", n, (StoredMessage("s", n, None, b"x"),), "torn", "t"))
            continue
        prev = max(0, n - 1 - back) if base is Base.CHAINED and n > 1 else 0
        self_contained = whole or base is Base.UNKNOWN
        payload = said() if state == "sound" else b"\xff"
        made_base = base if n > 1 or base is not Base.CHAINED else Base.NONE
        items.append(stored(n, n, prev, made_base, payload, self_contained=self_contained, seen=n, version=0))
    return items


@given(ENTRIES, st.data())
def test_rows_say_what_a_flush_makes_of_entries_however_they_are_cut(
    entries: list[tuple[Base, int, bool, str]], data: st.DataObject
) -> None:
    items = history(entries)
    poison = {i.entry.id: "torn" for i in items if isinstance(i, StoredEntry) and i.entry.payload == b"\xff"}
    first = items[0]
    done = plan(Watermark(), items, complete=True, poison=poison)
    expected = dict.fromkeys((i.seq for i in items), SUPERSEDED)
    expected |= {p.item.seq: PARKED for p in done.park} | {i.seq: APPLIED for i in done.apply}
    cuts = sorted(data.draw(st.sets(st.integers(1, len(items)))) | {len(items)})
    found: dict[int, str] = {}
    so_far: list[dict[str, Any]] = []
    known, at = None, 0
    for cut in cuts:
        rows = list(thread_rows("t", 3, known, ((i, THEN) for i in items[at:cut])))
        found |= {row["position"]: row["effect"] for row in rows}
        assert [row["cause"] is None for row in rows] == [row["effect"] != PARKED for row in rows]
        so_far += rows
        applied = [row for row in so_far if row["effect"] == APPLIED]
        known = known_of(rows[-1]["position"], applied[-1] if applied else None)
        at = cut
    assert found == expected
    assert first.seq == 1


def test_a_thread_that_began_before_the_archive_is_trusted() -> None:
    items = [stored(5, 50, 40, Base.CHAINED, said("a", keep=3), version=4),
             stored(6, 60, 50, Base.CHAINED, said("b", keep=4), version=5)]  # fmt: skip
    rows = list(thread_rows("t", 0, None, ((i, THEN) for i in items)))
    assert [row["effect"] for row in rows] == [APPLIED, APPLIED]
    later = stored(9, 90, 777, Base.STORED, said("c"), seen=8)  # Postgres was written past the log
    late = stored(9, 90, 777, Base.STORED, said("c"), seen=5)
    known = Known(6, 60, 5, False)
    assert [r["effect"] for i in (later, late) for r in thread_rows("t", 0, known, iter([(i, THEN)]))] == [
        APPLIED,
        SUPERSEDED,
    ]


def test_what_json_and_spark_cannot_hold_stops_nobody() -> None:
    """The store takes such values, and returns them as they were."""
    odd = {"role": "tool", "content": {None: "x", True: [{False: b"y"}], 5: 1, b"z": 2}}
    payload = said(odd, output={True: 1}, input_tokens=1 << 63, output_tokens=(1 << 63) - 1)
    item = stored(7, 1, 0, Base.NONE, payload)
    (row,) = thread_rows("t", 3, None, iter([(item, THEN)]))
    table = pyarrow.Table.from_pylist([row], SCHEMA).to_pylist()[0]
    told = '{"role":"tool","content":{"null":"x","true":[{"false":"eQ=="}],"5":1,"eg==":2}}'
    assert (table["effect"], table["messages"][0]["json"]) == (APPLIED, told)
    assert (table["run"]["input_tokens"], table["run"]["output_tokens"]) == (None, (1 << 63) - 1)
    assert '"output":{"true":1}' in table["run"]["json"]
    columns = ["messages", "run"]
    assert entry_rows(columns, [LogItem(item, 0, 3)]).to_pylist()[0]["messages"] == [told]


def holding(message: bytes, keep: int = 0) -> bytes:
    """A checkpoint with a message as a foreign writer may encode it."""
    run = Run(run_id="r", thread_id="t")
    return encode_payload(Payload(keep, [message], encode_run(run), RunSave("r", run.status, None)))


def effects(*items: Item) -> tuple[list[str], list[str]]:
    """What the table says of a new thread's entries, and what a flush makes of them."""
    todo, _ = decide_thread("t", Watermark(), items, {}, coalesce, complete=True)
    applied = {item.seq for item in todo.apply}
    rows = list(thread_rows("t", 3, None, iter([(item, THEN) for item in items])))
    pyarrow.RecordBatch.from_pylist(rows, SCHEMA)
    return [row["effect"] for row in rows], [APPLIED if item.seq in applied else PARKED for item in items]


@pytest.mark.parametrize(("message", "effect"), [(b"\xa1\xff", APPLIED), (b"\x81\x80\x01", APPLIED), (b"\xc1", PARKED)])
def test_an_entry_of_which_a_message_cannot_be_decoded_has_a_cause(message: bytes, effect: str) -> None:
    """A flush checks the frame of messages only: a text may be no text all the same."""
    items = [
        stored(7, 1, 0, Base.NONE, holding(message)),
        stored(8, 2, 0, Base.UNKNOWN, said("good"), self_contained=True, seen=7),
    ]
    told, expected = effects(*items)
    assert told == expected == [effect, APPLIED]
    first, _ = thread_rows("t", 3, None, iter([(item, THEN) for item in items]))
    assert first["messages"] is None
    assert "undecodable" in (first["cause"] or "")
    found = entry_rows(["position", "cause", "messages", "body"], [LogItem(item, 0, 3) for item in items]).to_pylist()
    assert [(row["position"], row["messages"]) for row in found] == [(7, None), (8, ['"good"'])]
    assert "undecodable" in found[0]["cause"]


def test_an_entry_whose_messages_do_not_add_up_is_parked_with_what_builds_on_it() -> None:
    """Regression: the table called entries applied that the flush parks."""
    items = [
        stored(7, 1, 0, Base.NONE, said("a"), version=5),
        stored(8, 2, 1, Base.CHAINED, said("b", keep=5), version=6),
    ]
    told, expected = effects(*items)
    assert told == expected == [PARKED, PARKED]


@pytest.mark.parametrize("keep", [1 << 63, (1 << 63) - 1])
def test_an_entry_that_keeps_more_messages_than_a_number_holds_stops_nobody(keep: int) -> None:
    """Regression: it ended reads of the log, and every run that made the archive's table."""
    items = [
        stored(7, 1, 0, Base.NONE, holding(b"\x01", keep)),
        stored(8, 2, 0, Base.UNKNOWN, said("good"), self_contained=True, seen=7),
    ]
    told, expected = effects(*items)
    assert told == expected == [PARKED, APPLIED]
    found = entry_rows(["keep", "cause"], [LogItem(item, 0, 3) for item in items]).to_pylist()
    assert found == [{"keep": None, "cause": "keep out of range"}, {"keep": 0, "cause": None}]


def test_a_message_or_state_that_json_lacks_stops_no_table() -> None:
    """Regression: one such message of a foreign writer ended the reads of all threads' messages."""
    messages = {b"\x01": "1", b"\xc7\x01\x05a": "null", b"\x81\xa1a\xc7\x01\x05a": '{"a":null}', b"\xa1\xff": None}
    rows = [message_row("t", n, message) | {"as_of": 9, "changed_at": 0} for n, message in enumerate(messages)]
    found = [row["message"] for row in batch_of("messages", tuple(TABLES["messages"]), rows).to_pylist()]
    assert [(message["number"], message["json"]) for message in found] == list(enumerate(messages.values()))
    states = [
        thread_row(Thread(thread_id="t"), None, state, position=9, broken_since=None)["state"] for state in messages
    ]
    assert states == list(messages.values())


def test_a_row_is_typed() -> None:
    messages = [
        {"role": "user", "content": "hello", "id": "m1"},
        {"type": "ai", "content": [{"type": "text", "text": "a"}, {"type": "image"}, "b"], "name": "x"},
        "plain",
        {"role": 7, "content": None, "more": b"\x00"},
    ]
    run = {"agent_id": "planner", "status": RunStatus.DONE, "created_at": 1.5, "finished_at": 1e300, "steps": 3}
    payload = said(*messages, keep=2, **run)
    tomorrow_there = THEN.astimezone(timezone(timedelta(hours=2)))
    (row,) = thread_rows("t", 3, None, iter([(stored(7, 1, 0, Base.NONE, payload, version=6), tomorrow_there)]))
    table = pyarrow.Table.from_pylist([row], SCHEMA)
    (back,) = table.to_pylist()
    assert (back["kind"], back["keep"], back["version"], back["date"]) == ("checkpoint", 2, 6, THEN.date())
    assert [(m["number"], m["id"], m["role"], m["name"], m["text"]) for m in back["messages"]] == [
        (2, "m1", "user", None, "hello"),
        (3, None, "ai", "x", "a\nb"),
        (4, None, None, None, "plain"),
        (5, None, None, None, None),
    ]
    assert (back["run"]["agent_id"], back["run"]["status"], back["run"]["steps"]) == ("planner", "done", 3)
    assert back["run"]["created_at"] == datetime(1970, 1, 1, 0, 0, 1, 500000, tzinfo=UTC)
    assert back["run"]["finished_at"] is None
    others: list[Any] = [Edit(1, parent=(None,)), Removal()]
    for n, other in enumerate(others):
        (row,) = thread_rows("t", 3, None, iter([(stored(7, 1, 0, Base.NONE, encode_payload(other)), THEN)]))
        (back,) = pyarrow.Table.from_pylist([row], SCHEMA).to_pylist()
        assert (back["kind"], back["run"], back["messages"]) == (("edit", "removal")[n], None, [])


def test_a_time_without_its_offset_expires_nothing() -> None:
    nothing: Any = None
    with pytest.raises(ConfigError, match="offset"):
        expire(nothing, "archive", before=THEN.replace(tzinfo=None))
