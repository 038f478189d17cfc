"""The envelope: what is written is what is read, and anything else is a MalformedEntry."""

from __future__ import annotations

import zlib
from base64 import b64decode, b64encode
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bufstore.buffer import recent_keys
from bufstore.buffer.entry import Assembler, Base, Entry, Malformed, StoredEntry, assemble, decode, encode
from bufstore.errors import MalformedEntry
from bufstore.jetstream.messages import HEADER, HEADER_BYTES_MAX, StoredMessage
from thorough import examples

SUBJECT = "thread.0.dA"
NUMBERS = st.integers(0, 2**63 - 1)
ENTRIES = st.builds(
    Entry,
    id=NUMBERS,
    prev_id=NUMBERS,
    base=st.sampled_from(Base),
    seen=NUMBERS,
    version=NUMBERS,
    self_contained=st.booleans(),
    keys=st.binary(max_size=16).map(lambda b: (b * 16)[: 12 * (len(b) % 17)]),
    payload=st.binary(max_size=300),
)


def messages_of(entry: Entry, message_bytes_max: int = 1 << 20, start: int = 1) -> list[StoredMessage]:
    parts = encode(entry, message_bytes_max)
    return [StoredMessage(SUBJECT, start + i, header, body) for i, (header, body) in enumerate(parts)]


def an_entry(payload: bytes = b"x", **fields: Any) -> Entry:
    given_ = {"id": 7, "prev_id": 0, "base": Base.CHAINED, "seen": 0, "version": 1, "self_contained": False}
    return Entry(**(given_ | fields), keys=recent_keys.item("k", b""), payload=payload)


def sealed(meta: Any, body: bytes = b"", version: object = 1) -> StoredMessage:
    """A message whose checksum is right, whatever it says."""
    text = b64encode(meta if isinstance(meta, bytes) else msgspec.msgpack.encode(meta))
    return StoredMessage(SUBJECT, 1, f"{version}.{zlib.crc32(body, zlib.crc32(text)):08x}.{text.decode()}", body)


def refused_or_read(message: StoredMessage) -> Entry | None:
    try:
        entry, chunk, chunks = decode(message)
    except MalformedEntry:
        return None
    assert 0 <= chunk < chunks
    return entry


@given(entry=ENTRIES)
def test_what_is_written_is_what_is_read(entry: Entry) -> None:
    (message,) = messages_of(entry)
    assert decode(message) == (entry, 0, 1)


@examples(60)
@given(entry=ENTRIES, room=st.integers(1, 40), extra=st.integers(-1, 1), times=st.integers(1, 5))
def test_an_entry_around_the_size_of_a_message_comes_back_whole(
    entry: Entry, room: int, extra: int, times: int
) -> None:
    payload = bytes(i % 251 for i in range(max(0, room * times + extra)))
    entry = msgspec.structs.replace(entry, payload=payload)
    messages = messages_of(entry, HEADER_BYTES_MAX + room)
    assert len(messages) == max(1, -(-len(payload) // room))
    assert all(len(m.body) <= room for m in messages)
    assert assemble(messages, "t") == [StoredEntry("t", messages[-1].seq, entry)]


def test_headers_at_their_largest_stay_below_the_bound() -> None:
    largest = an_entry(
        id=2**63 - 1,
        prev_id=2**63 - 1,
        base=Base.STORED,
        seen=2**63 - 1,
        version=2**63 - 1,
        self_contained=True,
    )
    largest = msgspec.structs.replace(largest, keys=b"\xff" * 192, payload=b"x" * 1000)
    batch = "Nats-Batch-Id: 0123456789abcdef\r\nNats-Batch-Sequence: 1000\r\nNats-Batch-Commit: 1\r\n"
    expected = f"Nats-Expected-Last-Subject-Sequence: {2**64}\r\n"
    for header, _ in encode(largest, HEADER_BYTES_MAX + 1):
        assert len(f"NATS/1.0\r\n{HEADER}: {header}\r\n{expected}{batch}\r\n") < HEADER_BYTES_MAX


@given(header=st.none() | st.text() | st.from_regex(r"1\.[0-9a-f]{1,10}\.[A-Za-z0-9+/=]*", fullmatch=True), body=...)
def test_arbitrary_bytes_are_an_entry_or_malformed(header: str | None, body: bytes) -> None:
    refused_or_read(StoredMessage(SUBJECT, 1, header, body))


@examples(200)
@given(entry=ENTRIES, data=st.data())
def test_a_damaged_entry_is_never_read_as_another(entry: Entry, data: st.DataObject) -> None:
    (message,) = messages_of(entry)
    raw = list(message.header or "") + [chr(b) for b in message.body]
    split = len(message.header or "")
    match data.draw(st.sampled_from(["flip", "cut", "insert"])):
        case "flip":
            raw[data.draw(st.integers(0, len(raw) - 1))] = chr(data.draw(st.integers(0, 255)))
        case "cut":
            at = data.draw(st.integers(0, len(raw) - 1))
            del raw[at : at + data.draw(st.integers(1, 5))]
            split = min(split, len(raw))
        case _:
            raw.insert(data.draw(st.integers(0, split)), chr(data.draw(st.integers(0, 0x10FFFF))))
            split += 1
    body = bytes(ord(c) & 255 for c in raw[split:])
    found = refused_or_read(StoredMessage(SUBJECT, 1, "".join(raw[:split]), body))
    assert found is None or found == entry


DEEP = b"\x91" * 100_000


@pytest.mark.parametrize(
    "meta",
    [
        DEEP,
        b"\x99" + b"\x01" * 6 + DEEP,
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"",
        b"\xc1",
        [],
        {},
        None,
        [1] * 9,
        [2**64 - 1, 0, 0, 0, 0, True, b"", 0, 1],
        [1, -1, 0, 0, 0, True, b"", 0, 1],
        [1, 0, 4, 0, 0, True, b"", 0, 1],
        [1, 0, -1, 0, 0, True, b"", 0, 1],
        [1, 0, 0, 0, 0, True, b"", 1, 1],
        [1, 0, 0, 0, 0, True, b"", -1, 1],
        [1, 0, 0, 0, 0, True, b"", 0, 0],
        [1, 0, 0, 0, 2**63, True, b"", 0, 1],
        [1, 0, 0, 0, 0, 1, b"", 0, 1],
        [1, 0, 0, 0, 0, True, "text", 0, 1],
        [float("nan"), 0, 0, 0, 0, True, b"", 0, 1],
    ],
    ids=lambda m: repr(m)[:40],
)
def test_a_sealed_header_that_makes_no_sense_is_malformed(meta: Any) -> None:
    with pytest.raises(MalformedEntry):
        decode(sealed(meta))


def test_later_fields_are_skipped() -> None:
    header = decode(sealed([1, 2, 0, 3, 4, True, b"", 0, 1, True, None, {"new": "field"}]))[0]
    assert (header.id, header.prev_id, header.seen, header.version) == (1, 2, 3, 4)


@pytest.mark.parametrize("version", ["0", "2", "", "1 ", "９", "x" * 1000])
def test_another_version_is_malformed(version: str) -> None:
    with pytest.raises(MalformedEntry):
        decode(sealed([1, 0, 0, 0, 0, True, b"", 0, 1], version=version))


@examples(150)
@given(
    picks=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=25),
    subjects=st.booleans(),
    damage=st.sets(st.integers(0, 24), max_size=3),
)
def test_no_order_of_pieces_makes_a_wrong_entry(picks: list[tuple[int, int]], subjects: bool, damage: set[int]) -> None:
    # Entries of one to four pieces; pieces arrive in any order, repeated, left out, damaged.
    entries = [an_entry(bytes([65 + n]) * (10 * (n + 1) - 5), id=n + 1) for n in range(4)]
    pieces = [encode(e, HEADER_BYTES_MAX + 10) for e in entries]
    assembler = Assembler()
    fed: list[StoredMessage] = []
    out: list[StoredEntry | Malformed] = []
    for seq, (n, chunk) in enumerate(picks, 1):
        header, body = pieces[n][chunk % len(pieces[n])]
        subject = f"thread.0.{n}" if subjects else SUBJECT
        message = StoredMessage(subject, seq, None if seq in damage else header, body)
        fed.append(message)
        out += list(assembler.feed(message, subject))
    whole = [item for item in out if isinstance(item, StoredEntry)]
    assert all(item.entry == entries[item.entry.id - 1] for item in whole)
    # Nothing disappears: each message is part of an entry, malformed, or waits.
    malformed = [m.seq for item in out if isinstance(item, Malformed) for m in item.messages]
    used = sum(len(pieces[item.entry.id - 1]) for item in whole)
    waiting = 0 if assembler.pending_from is None else len(fed) - assembler.pending_from + 1
    assert len(malformed) == len(set(malformed))
    assert len(malformed) + used + waiting == len(fed)
    assert [item.seq for item in out] == sorted(item.seq for item in out)


def test_what_was_begun_and_never_ended_is_the_fault_of_its_own_thread() -> None:
    begun = messages_of(an_entry(b"a" * 35, id=1), HEADER_BYTES_MAX + 10)[:2]
    sound = StoredMessage("thread.0.dQ", 3, *encode(an_entry(b"b", id=2), 1 << 20)[0])
    for last, alone in ((sound, True), (StoredMessage("thread.0.dQ", 3, None, b"garbage"), False)):
        assembler = Assembler()
        assert not [item for message in begun for item in assembler.feed(message, "t")]
        broken, other = assembler.feed(last, "u")
        assert isinstance(broken, Malformed)
        assert (broken.thread_id, broken.messages) == ("t", tuple(begun))
        assert isinstance(other, StoredEntry) is alone
        assert other.thread_id == "u"


def test_an_entry_cut_off_at_its_beginning_is_left_out_of_a_read() -> None:
    first = messages_of(an_entry(b"a" * 35, id=1), HEADER_BYTES_MAX + 10)
    second = messages_of(an_entry(b"b", id=2, prev_id=1), start=5)
    assert [i.seq for i in assemble(first[2:] + second, "t")] == [5]
    assert isinstance(assemble(second + first[2:], "t")[1], Malformed), "in the middle it is damage"


def test_the_header_is_what_a_protocol_line_can_carry() -> None:
    header = encode(an_entry(), 1 << 20)[0][0]
    assert header.isascii()
    assert header.isprintable()
    assert b64decode(header.split(".")[2], validate=True)
