"""The envelope: what was written is read back, and anything else is a MalformedEntry."""

from __future__ import annotations

import zlib
from base64 import b64decode, b64encode
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bufstore.buffer import recent_keys
from bufstore.buffer.entry import Base, Entry, Malformed, StoredEntry, decode, encode, items_of
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


def message_of(entry: Entry) -> StoredMessage:
    return StoredMessage(SUBJECT, 1, *encode(entry))


def an_entry(payload: bytes = b"x", **fields: Any) -> Entry:
    given_ = {"id": 7, "prev_id": 0, "base": Base.CHAINED, "seen": 0, "version": 1, "self_contained": False}
    return Entry(**(given_ | fields), keys=recent_keys.item("k", b""), payload=payload)


def sealed(meta: Any, body: bytes = b"", version: object = 1) -> StoredMessage:
    """A message with any content and a correct checksum."""
    text = b64encode(meta if isinstance(meta, bytes) else msgspec.msgpack.encode(meta))
    return StoredMessage(SUBJECT, 1, f"{version}.{zlib.crc32(body, zlib.crc32(text)):08x}.{text.decode()}", body)


def refused_or_read(message: StoredMessage) -> Entry | None:
    try:
        return decode(message)
    except MalformedEntry:
        return None


@given(entry=ENTRIES)
def test_what_is_written_is_what_is_read(entry: Entry) -> None:
    message = message_of(entry)
    assert decode(message) == entry
    assert items_of([message], "t") == [StoredEntry("t", 1, entry)]


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
    header, _ = encode(largest)
    assert len(f"NATS/1.0\r\n{HEADER}: {header}\r\n{expected}{batch}\r\n") < HEADER_BYTES_MAX


@given(header=st.none() | st.text() | st.from_regex(r"1\.[0-9a-f]{1,10}\.[A-Za-z0-9+/=]*", fullmatch=True), body=...)
def test_arbitrary_bytes_are_an_entry_or_malformed(header: str | None, body: bytes) -> None:
    refused_or_read(StoredMessage(SUBJECT, 1, header, body))


@examples(200)
@given(entry=ENTRIES, data=st.data())
def test_a_damaged_entry_is_never_read_as_another(entry: Entry, data: st.DataObject) -> None:
    message = message_of(entry)
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
    header = decode(sealed([1, 2, 0, 3, 4, True, b"", 0, 1, True, None, {"new": "field"}]))
    assert (header.id, header.prev_id, header.seen, header.version) == (1, 2, 3, 4)


@pytest.mark.parametrize("version", ["0", "2", "", "1 ", "９", "x" * 1000])
def test_another_version_is_malformed(version: str) -> None:
    with pytest.raises(MalformedEntry):
        decode(sealed([1, 0, 0, 0, 0, True, b"", 0, 1], version=version))


def test_a_piece_of_an_entry_of_an_earlier_form_is_malformed() -> None:
    (item,) = items_of([sealed([1, 0, 0, 0, 0, True, b"", 0, 2])], "t")
    assert isinstance(item, Malformed)
    assert item.thread_id == "t"
    assert "piece 0 of 2" in item.cause


def test_the_header_is_what_a_protocol_line_can_carry() -> None:
    header = encode(an_entry())[0]
    assert header.isascii()
    assert header.isprintable()
    assert b64decode(header.split(".")[2], validate=True)
