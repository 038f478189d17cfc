"""How entries are read from archived groups and parts, also from missing or damaged ones, without Spark."""

from __future__ import annotations

import struct
from base64 import b64encode
from collections.abc import Sequence
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch
from zlib import crc32

import msgspec
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bufstore import Run
from bufstore.buffer.chain import Watermark
from bufstore.buffer.entry import Base, Entry, Malformed, StoredEntry, bytes_of, encode
from bufstore.buffer.groups.group import Draft, NewEntry
from bufstore.buffer.groups.oversize import parts_of, reference
from bufstore.buffer.places import place
from bufstore.buffer.subjects import Subjects
from bufstore.config import NatsConfig
from bufstore.errors import DataLoss
from bufstore.jetstream.messages import StoredMessage
from bufstore.spark.group_entries import EntryMessage, entries_of
from bufstore.spark.log_archive import portions as module
from bufstore.spark.log_archive.applicable import applicable
from bufstore.spark.log_archive.archived_entries import _entries, threads_of
from bufstore.spark.log_archive.portions import portions
from bufstore.spark.source.log_entries import LogEntries
from bufstore.spark.source.offsets import Range
from bufstore.spark.source.options import ReadOptions
from bufstore.threads.model import RunSave, encode_run
from bufstore.threads.payload import Payload, encode_payload

SUBJECTS = Subjects("thread", 4)
THEN = datetime(2026, 11, 22, tzinfo=UTC)
THREADS = [f"t{n}" for n in range(5)]


class Written(NamedTuple):
    thread_id: str
    payload: bytes
    #: How many parts the payload is stored in; 0: in the group itself.
    parts: int = 0


WRITTEN = st.builds(Written, st.sampled_from(THREADS), st.binary(min_size=8, max_size=40), st.integers(0, 3))
GROUPS = st.lists(st.lists(WRITTEN, min_size=1, max_size=6), min_size=1, max_size=6)


def entry(id_: int, payload: bytes) -> Entry:
    return Entry(
        id=id_, prev_id=0, base=Base.NONE, seen=0, version=1, self_contained=True, keys=b"", payload=payload
    )  # fmt: skip


def log_of(groups: Sequence[Sequence[Written]]) -> tuple[list[dict[str, Any]], dict[str, list[StoredEntry]]]:
    """The messages of the stream, and the entries of each thread in them."""
    messages: list[dict[str, Any]] = []
    held: dict[str, list[StoredEntry]] = {}

    def store(subject: str, header: str | None, body: bytes) -> int:
        messages.append(
            {"position": len(messages) + 1, "stored_at": THEN, "subject": subject, "header": header, "body": body}
        )
        return len(messages)

    ids = iter(range(1, 1000))
    for number, group in enumerate(groups):
        entries, stored = [], []
        for written in group:
            made = entry(next(ids), written.payload)
            header, body = encode(made)
            if written.parts:
                size = -(-len(body) // written.parts)
                body = reference(
                    body, [store(SUBJECTS.parts, None, p.body) for p in parts_of(SUBJECTS.parts, body, size)]
                )
            partition = SUBJECTS.partition(written.thread_id)
            entries.append(NewEntry(written.thread_id, partition, 0, header, body, bool(written.parts)))
            stored.append((written.thread_id, made))
        draft = Draft(number + 1, entries)
        seq = store(SUBJECTS.groups, draft.header(number, max(len(messages) - 1, 0), 0), draft.body)
        for n, (thread_id, made) in enumerate(stored):
            held.setdefault(thread_id, []).append(StoredEntry(thread_id, place(seq, n), made))
    return messages, held


def restored(messages: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """What `threads_of` returns, after the steps that Spark does in between."""
    schema = pyarrow.schema(
        [
            ("position", pyarrow.int64()),
            ("stored_at", pyarrow.timestamp("us", tz="GMT+02:00")),  # the session's zone, which Python does not know
            ("subject", pyarrow.string()),
            ("header", pyarrow.string()),
            ("body", pyarrow.binary()),
        ]
    )
    batch = pyarrow.RecordBatch.from_pylist(messages, schema)
    parts = {m["position"]: m["body"] for m in messages if m["subject"] == SUBJECTS.parts}
    pieces = []
    for found in _entries(SUBJECTS, SUBJECTS, iter([batch])):
        for row in found.to_pylist():
            named = row.pop("parts")
            for number, part in enumerate(named) if named is not None else [(None, None)]:
                pieces.append(row | {"number": number, "part": part, "part_body": parts.get(part)})
    pieces.sort(key=lambda p: (p["subject"], p["position"], p["number"] or 0))
    found = threads_of(SUBJECTS, iter([pyarrow.RecordBatch.from_pylist(pieces)] if pieces else []))
    return {thread_id: some for thread_id, items in found if (some := list(items))}


@given(GROUPS)
def test_each_thread_gets_its_entries_in_order(groups: list[list[Written]]) -> None:
    messages, held = log_of(groups)
    strange = {"position": 999, "stored_at": THEN, "subject": "thread.0.none", "header": None, "body": b"\xff"}
    assert restored([*messages, strange]) == held


@given(GROUPS, st.data())
def test_what_is_missing_or_damaged_is_told_or_left_out(groups: list[list[Written]], data: st.DataObject) -> None:
    """One message is removed, or its body changed: no entry comes out that was not written."""
    messages, held = log_of(groups)
    at = data.draw(st.integers(0, len(messages) - 1))
    damaged = messages[at]
    if data.draw(st.booleans()):
        del messages[at]
    else:
        body = bytearray(damaged["body"])
        body[data.draw(st.integers(0, len(body) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        messages[at] = damaged | {"body": bytes(body)}
    found = restored(messages)
    for thread_id, entries in held.items():
        items = found.pop(thread_id, [])
        sound = [item for item in items if isinstance(item, StoredEntry)]
        assert [e for e in entries if e in sound] == sound
        touched = {place(damaged["position"], n) for n in range(10)}
        if damaged["subject"] == SUBJECTS.groups:
            assert [e for e in entries if e.seq not in touched] == [e for e in sound if e.seq not in touched]
        else:
            assert len(entries) - len(sound) <= 1, "a part belongs to one entry"
        # At a thread's beginning, a missing part counts as purged earlier; later it must be reported.
        if items and damaged["subject"] == SUBJECTS.parts:
            assert [i.seq for i in items] == [e.seq for e in entries][len(entries) - len(items) :]
    assert found == {}


@given(GROUPS)
def test_entries_of_a_group_are_taken_by_its_header(groups: list[list[Written]]) -> None:
    messages, held = log_of(groups)
    found: dict[str, list[int]] = {}
    for m in messages:
        if m["subject"] == SUBJECTS.groups:
            message = StoredMessage(m["subject"], m["position"], m["header"], m["body"])
            for partition, what in entries_of(message, SUBJECTS, lambda position, record: record.partition != 1):
                assert isinstance(what, EntryMessage)
                assert partition == SUBJECTS.partition(what.thread_id) != 1
                found.setdefault(what.thread_id, []).append(what.message.seq)
    assert found == {t: [e.seq for e in held[t]] for t in held if SUBJECTS.partition(t) != 1}


def test_a_group_that_cannot_be_read_is_given_whatever_is_wanted() -> None:
    [(partition, what)] = entries_of(StoredMessage(SUBJECTS.groups, 7, None, b"\xff"), SUBJECTS, lambda *_: False)
    assert (partition, what.seq if isinstance(what, Malformed) else 0) == (-1, place(7, 0))


@given(GROUPS, st.integers(1, 5), st.integers(1, 60), st.booleans())
def test_a_restore_takes_each_entry_once_and_not_too_many_at_a_time(
    groups: list[list[Written]], entries_max: int, bytes_max: int, whole: bool
) -> None:
    _, held = log_of(groups)
    with patch.multiple(module, ENTRIES_MAX=entries_max, BYTES_MAX=bytes_max):
        found = list(portions(((t, iter(items)) for t, items in held.items()), None if whole else iter))
    together: dict[str, list[Any]] = {}
    for portion, goes_on in found:
        assert goes_on == any(thread in together for thread in portion)
        assert not goes_on or len(portion) == 1
        assert not goes_on or not whole
        for thread, items in portion.items():
            together.setdefault(thread, []).extend(items)
        if not whole:
            some = [item for items in portion.values() for item in items]
            largest = max(bytes_of(item) for item in some)
            assert len(some) < 2 * entries_max + 1
            assert sum(map(bytes_of, some)) < 2 * (bytes_max + largest)
    assert together == held


def test_a_reference_to_a_part_that_cannot_be_spoils_its_entry_alone() -> None:
    """Regression: it ended every restore of the archive, and every run that made its table."""
    messages, held = log_of([[Written("t0", b"x" * 40), Written("t1", b"y" * 40, 2), Written("t2", b"z" * 40)]])
    group = messages[-1]
    assert struct.pack(">QQ", 1, 2) in group["body"]
    messages[-1] = group | {"body": group["body"].replace(struct.pack(">QQ", 1, 2), struct.pack(">QQ", 1, 1 << 63))}
    found = restored(messages)
    assert [found["t0"], found["t2"]] == [held["t0"], held["t2"]]
    assert [type(item) for item in found["t1"]] == [Malformed]


@pytest.mark.parametrize("parts", [[10**9], [0], [1, 1 << 63], [7], [3]])
async def test_a_part_that_never_was_is_no_loss(parts: list[int]) -> None:
    """Regression: an entry that names such a part ended all reads of tables until it was flushed."""

    class Reader:
        """A log that has nothing but message 2: message 1 was purged."""

        async def message(self, sequence: int) -> StoredMessage | None:
            assert 0 < sequence < 7
            return StoredMessage(SUBJECTS.parts, 2, None, b"xyz") if sequence == 2 else None

        async def erased(self, start: int, *, fresh: bool = False) -> set[int]:
            return set()

    options = ReadOptions(nats=NatsConfig())
    log: Any = SimpleNamespace(subjects=SUBJECTS)
    reader: Any = Reader()
    entries = LogEntries(reader, log, options, Range(start=1, end=9, created="c"))
    body = struct.pack(">QI", 3, 0) + b"".join(struct.pack(">Q", part) for part in parts)
    asked = entries.item(EntryMessage("t", StoredMessage(SUBJECTS.of("t"), place(7, 0), None, body), elsewhere=True))
    if parts == [3]:
        with pytest.raises(DataLoss):
            await asked
    else:
        assert isinstance(await asked, Malformed)


def test_of_an_archive_of_an_earlier_version_entries_in_several_pieces_are_refused_with_what_follows_them() -> None:
    """In that version an entry is one message of its thread, or several, which say so; the rest is as now."""
    of, written = SUBJECTS.of("t0"), Run(run_id="r", thread_id="t0")
    payload = encode_payload(Payload(0, [], encode_run(written), RunSave("r", written.status, None)))
    messages: list[dict[str, Any]] = []

    def store(id_: int, prev_id: int, pieces: int = 1) -> None:
        base = Base.CHAINED if prev_id else Base.NONE
        for number in range(pieces):
            fields = (id_, prev_id, base, 0, 0, False, b"", number, pieces, True)
            text = b64encode(msgspec.msgpack.encode(fields)).decode()
            header = f"1.{crc32(payload, crc32(text.encode())):08x}.{text}"
            position = len(messages) + 1
            messages.append({"position": position, "stored_at": THEN, "subject": of, "header": header, "body": payload})

    store(1, 0)
    store(2, 1)
    store(3, 2, pieces=2)
    store(4, 3)
    ((thread_id, items),) = restored(messages).items()
    found = applicable(thread_id, Watermark(), 0, items)
    assert [step.seq for step in found.plan.apply] == [1, 2]
    assert found.refused == 3
    assert found.reason == "thread 't0', position 3: piece 0 of 2; this release reads whole entries"
