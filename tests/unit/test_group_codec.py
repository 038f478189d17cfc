"""How a group is written and read back (`bufstore.buffer.groups.group`)."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bufstore.buffer.groups.choosing import too_large, unfit
from bufstore.buffer.groups.group import (
    HEAD_BYTES_MAX,
    Draft,
    Group,
    NewEntry,
    decode_entry,
    decode_header,
    hash_of,
    in_group,
    size_of,
)
from bufstore.buffer.groups.oversize import joined, parts_of, reference, reference_bytes
from bufstore.buffer.places import ENTRIES_MAX, first_place, group_of, last_place, number_of, place
from bufstore.errors import LogUnavailable, MalformedEntry, TooLarge
from bufstore.jetstream.messages import Outgoing, StoredMessage
from thorough import examples

U62 = st.integers(0, 2**62 - 1)
SEQS = st.integers(1, 2**52 - 1)
THREADS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=40)
HEADERS = st.none() | st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=60)


@st.composite
def drafts(draw: st.DrawFn, max_size: int = 6) -> tuple[list[NewEntry], Draft]:
    entries: list[NewEntry] = []
    for number in range(draw(st.integers(0, max_size))):
        prev = draw(st.sampled_from([0, *map(in_group, range(number))]) | st.integers(ENTRIES_MAX, 2**62))
        entry = NewEntry(draw(THREADS), draw(st.integers(0, 2**16 - 1)), prev, draw(HEADERS), draw(st.binary()))
        entries.append(entry)
    return entries, Draft(draw(st.integers(1, 2**63 - 1)), entries)


def message_of(draft: Draft, seq: int, before: int = 0, purged: int = 0) -> StoredMessage:
    return StoredMessage("log.groups.0", seq, draft.header(7, before, purged), draft.body)


@given(drafts(), SEQS, st.data())
@examples()
def test_what_is_written_is_read(made: tuple[list[NewEntry], Draft], seq: int, data: st.DataObject) -> None:
    entries, draft = made
    before, purged = data.draw(st.integers(0, seq - 1)), data.draw(st.integers(0, first_place(seq)))
    message = message_of(draft, seq, before, purged)
    group = decode_header(message)
    assert group == draft.stored(seq, 7, before, purged)
    assert (group.seq, group.id, group.before_id, group.before, group.purged) == (seq, draft.id, 7, before, purged)
    places = list(group.places())
    assert [at for at, _ in places] == [place(seq, n) for n in range(len(entries))]
    for number, ((_, record), entry) in enumerate(zip(places, entries, strict=True)):
        assert (record.hash, record.partition) == (hash_of(entry.thread_id), entry.partition)
        in_this = 0 < entry.prev <= number
        assert record.prev == (place(seq, entry.prev - 1) if in_this else entry.prev)
        found = decode_entry(group, number, message.body)
        assert (found.thread_id, found.header, found.payload) == (entry.thread_id, entry.header, entry.payload)


@given(drafts(), st.data())
@examples(300)
def test_a_damaged_header_is_malformed_and_nothing_else(
    made: tuple[list[NewEntry], Draft], data: st.DataObject
) -> None:
    _, draft = made
    header = draft.header(3, 4, 5)
    kind = data.draw(st.sampled_from(["cut", "flip", "garbage", "none"]))
    damaged: str | None = None
    if kind == "cut":
        damaged = header[: data.draw(st.integers(0, len(header) - 1))]
    elif kind == "flip":
        at = data.draw(st.integers(0, len(header) - 1))
        damaged = header[:at] + chr(ord(header[at]) ^ 1 << data.draw(st.integers(0, 6))) + header[at + 1 :]
    elif kind == "garbage":
        damaged = data.draw(st.text(max_size=200) | st.text(max_size=60).map("G1.".__add__))
    try:
        group = decode_header(StoredMessage("log.groups.0", 9, damaged, draft.body))
    except MalformedEntry:
        return
    # A checksum in capitals or with a sign is still the same, so nothing is damaged.
    assert group == draft.stored(9, 3, 4, 5)


@given(drafts(), st.data())
@examples(300)
def test_a_damaged_body_takes_no_entry_with_it_that_is_sound(
    made: tuple[list[NewEntry], Draft], data: st.DataObject
) -> None:
    entries, draft = made
    group = draft.stored(5, 0, 0, 0)
    body = bytearray(draft.body)
    if not body:
        return
    at = data.draw(st.integers(0, len(body) - 1))
    if data.draw(st.booleans()):
        body[at] ^= data.draw(st.integers(1, 255))
    else:
        del body[at:]
    for number, entry in enumerate(entries):
        begins = group.records[number].begins
        ends = group.records[number + 1].begins if number + 1 < len(entries) else len(draft.body)
        try:
            found = decode_entry(group, number, bytes(body))
        except MalformedEntry:
            assert bytes(body[begins:ends]) != draft.body[begins:ends]
            continue
        if bytes(body[begins:ends]) == draft.body[begins:ends]:  # else its header's checksum shows it
            assert (found.thread_id, found.header, found.payload) == (entry.thread_id, entry.header, entry.payload)


@given(st.binary(max_size=300), drafts(max_size=4))
@examples()
def test_a_body_of_garbage_raises_malformed_only(body: bytes, made: tuple[list[NewEntry], Draft]) -> None:
    entries, draft = made
    for number in range(len(entries)):
        try:
            decode_entry(draft.stored(5, 0, 0, 0), number, body)
        except MalformedEntry:
            continue


@pytest.mark.parametrize(("seq", "before", "purged"), [(5, 5, 0), (5, 6, 0), (5, 4, first_place(5) + 1), (1, 2**60, 0)])
def test_a_group_cannot_name_what_comes_behind_it(seq: int, before: int, purged: int) -> None:
    with pytest.raises(MalformedEntry):
        decode_header(message_of(Draft(1, []), seq, before, purged))


def test_parts_that_stand_behind_their_group_are_malformed() -> None:
    draft = Draft(1, [NewEntry("t", 0, 0, None, reference(b"x" * 10, [5, 7]), elsewhere=True)])
    assert decode_header(message_of(draft, 8)).parts == 5
    with pytest.raises(MalformedEntry):
        decode_header(message_of(draft, 5))


def test_the_largest_group_has_room_in_a_header_and_its_size_was_known() -> None:
    threads = [f"{'ü' * (n % 300)}{n}" for n in range(ENTRIES_MAX)]
    entries = [NewEntry(t, 65535, 2**62, "h" * (n % 500), b"p" * (n % 50)) for n, t in enumerate(threads)]
    header = Draft(2**63 - 1, entries).header(2**63 - 1, 2**52, 2**62)
    assert len(f"NATS/1.0\r\nBufstore-Entry: {header}\r\nNats-Expected-Last-Subject-Sequence: {2**63}\r\n\r\n") < 65535
    for count in (1, 2, 3, 100, ENTRIES_MAX):
        some = Draft(2**63 - 1, entries[:count])
        # A real subject is at least as long: it holds the thread's id in base64.
        out = [Outgoing(f"l.0.{'x' * len(e.thread_id.encode())}", e.payload, e.header) for e in entries[:count]]
        sent = f"NATS/1.0\r\nBufstore-Entry: {some.header(1, 2, 3)}\r\n"
        sent += f"Nats-Expected-Last-Subject-Sequence: {2**63}\r\n\r\n"
        assert len(sent) + len(some.body) <= sum(map(size_of, out)) + HEAD_BYTES_MAX


@given(SEQS, st.integers(0, ENTRIES_MAX - 1))
def test_places_are_ordered_as_their_entries(seq: int, number: int) -> None:
    at = place(seq, number)
    assert (group_of(at), number_of(at)) == (seq, number)
    assert first_place(seq) <= at <= last_place(seq) < first_place(seq + 1) < 2**63


@given(st.binary(max_size=3000), st.integers(1, 700), st.sampled_from(["", "missing", "swapped", "cut", "flipped"]))
@examples()
def test_parts_make_the_payload_or_are_malformed(payload: bytes, size: int, fault: str) -> None:
    parts = {n + 10: m.body for n, m in enumerate(parts_of("log.parts.0", payload, size))}
    assert all(0 < len(body) <= size for body in parts.values())
    named = reference(payload, list(parts))
    assert len(named) == reference_bytes(len(payload), size)
    if fault == "missing" and parts:
        del parts[10]
    elif fault == "swapped" and len(set(parts.values())) > 1:
        parts = dict(zip(parts, [*list(parts.values())[1:], parts[10]], strict=True))
    elif fault == "cut":
        named = named[:-1]
    elif fault == "flipped" and parts:
        parts[10] = bytes([parts[10][0] ^ 1]) + parts[10][1:]
    else:
        fault = ""
    if fault == "swapped" and b"".join(parts.values()) == payload:
        fault = ""

    async def read(seq: int) -> StoredMessage | None:
        return StoredMessage("log.parts.0", seq, None, parts[seq]) if seq in parts else None

    if not fault:
        assert asyncio.run(joined(named, read)) == payload
    else:
        with pytest.raises(MalformedEntry):
            asyncio.run(joined(named, read))


def test_a_group_is_equal_to_itself_only() -> None:
    """A group as its sequencer notes it equals the group that others read."""
    draft = Draft(5, [NewEntry("t", 1, in_group(0) + 5000, None, b"")])
    assert isinstance(draft.stored(9, 1, 2, 3), Group)
    assert decode_header(message_of(draft, 9, 2, 3)) == draft.stored(9, 7, 2, 3)


@given(st.integers(500, 5000), st.integers(0, 200), st.binary(max_size=40))
def test_an_entry_with_more_parts_than_one_message_can_name_is_refused_for_good(
    room: int, more: int, header: bytes
) -> None:
    """Regression: the error said to try again."""

    def message(size: int) -> Outgoing:
        return Outgoing("log.0.t", bytes(size), header.hex())

    refused = unfit([message(room * room)], room)
    assert isinstance(refused, TooLarge)
    assert too_large([message(refused.limit)], room) == {0}
    above = unfit([message(refused.limit + 1 + more)], room)
    assert too_large([message(refused.limit + 1 + more)], room) is None
    assert isinstance(above, TooLarge)
    assert (above.limit, above.size) == (refused.limit, refused.limit + 1 + more)
    assert isinstance(unfit([message(1), message(1)], room), LogUnavailable)
