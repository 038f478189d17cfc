"""Headers as they come over the wire: ours are found, and those of others raise nothing."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from bufstore.jetstream.frames import framed
from bufstore.jetstream.headers import entry_header, fields, status_of
from bufstore.jetstream.messages import HEADER, Outgoing

TEXTS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=300)


def headers_of(frame: bytes) -> bytes:
    line, _, rest = frame.partition(b"\r\n")
    assert line.startswith(b"HPUB ")
    return rest[: int(line.split()[-2])]


@given(header=TEXTS, expected=st.none() | st.integers(0, 2**62), batch=st.booleans())
def test_what_was_framed_is_found(header: str, expected: int | None, batch: bool) -> None:
    messages = [Outgoing("a.b.c", b"body", header, expected), Outgoing("a.b.d", b"", header)]
    raw = headers_of(framed(messages[: 1 + batch], "id" if batch else "", "reply"))
    assert entry_header(raw) == header
    found = fields(raw)
    assert found[HEADER] == header
    assert found.get("Nats-Expected-Last-Subject-Sequence") == (str(expected) if expected is not None else None)
    assert found.get("Nats-Batch-Sequence") == ("1" if batch else None)
    assert status_of(raw) == ("", "")


@given(st.binary(max_size=200) | st.binary(max_size=100).map(lambda b: b"NATS/1.0" + b + b"\r\n" + b + b"\r\n\r\n"))
@example(b"")
@example(b"\r\n")
@example(b"NATS/1.0")
@example(f"NATS/1.0\r\n{HEADER}: ".encode())
def test_whatever_others_write_is_read_without_an_error(raw: bytes) -> None:
    entry_header(raw)
    fields(raw)
    status_of(raw)


def test_a_status_is_told_from_headers() -> None:
    assert status_of(b"NATS/1.0 503\r\n\r\n") == ("503", "")
    assert status_of(b"NATS/1.0 409 Message Size Exceeds MaxBytes\r\nNats-Pending: 1\r\n\r\n") == (
        "409",
        "Message Size Exceeds MaxBytes",
    )
    assert fields(b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer: 7\r\n\r\n") == {"Nats-Last-Consumer": "7"}


def test_what_the_server_adds_counts_more_than_what_was_stored_under_its_name() -> None:
    raw = b"NATS/1.0\r\nNats-Sequence: 1\r\nX: y\r\nNats-Sequence: 12\r\n\r\n"
    assert fields(raw)["Nats-Sequence"] == "12"


def test_another_spelling_of_the_entry_header_is_read_as_well() -> None:
    assert entry_header(f"NATS/1.0\r\n{HEADER}:abc\r\n\r\n".encode()) == "abc"
    assert entry_header(b"NATS/1.0\r\nOther: abc\r\n\r\n") is None
