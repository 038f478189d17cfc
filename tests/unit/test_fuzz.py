"""Arbitrary and damaged bytes: the envelope, payloads, cursors, addresses, and the inputs of the command line."""

from __future__ import annotations

import contextlib
import io
import tracemalloc
import zlib
from base64 import b64decode, b64encode
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st

from bufstore import ConfigError, InvalidQuery, MessageQuery, NatsConfig, RunQuery, ThreadQuery
from bufstore.buffer.domain import Inapplicable
from bufstore.buffer.entry import Base, Entry, Malformed, StoredEntry, decode, encode, items_of
from bufstore.buffer.recent_keys import find, item
from bufstore.cli.app import app
from bufstore.cli.importing.lines import BadLine, Input, Line, _split
from bufstore.config import split_url
from bufstore.errors import MalformedEntry
from bufstore.jetstream.messages import StoredMessage
from bufstore.postgres.connection.conninfo import check_conninfo
from bufstore.postgres.connection.migrate import check_schema
from bufstore.threads.coalesce import coalesce
from bufstore.threads.model import Run, RunSave, RunStatus, encode_run
from bufstore.threads.payload import Edit, Payload, Removal, decode_payload, encode_payload
from bufstore.threads.queries import new_cursor, read_cursor, read_position
from thorough import examples

SUBJECT = "thread.0.dA"
NUMBERS = st.integers(0, 2**63 - 1)
JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)
ENTRIES = st.builds(
    Entry,
    id=NUMBERS,
    prev_id=NUMBERS,
    base=st.sampled_from(Base),
    seen=NUMBERS,
    version=st.integers(0, 2**40),
    self_contained=st.booleans(),
    keys=st.binary(max_size=50),
    payload=st.binary(max_size=60),
)


def sealed(text: bytes, body: bytes, version: str = "1") -> StoredMessage:
    """A message with any content and a correct checksum."""
    return StoredMessage(SUBJECT, 1, f"{version}.{zlib.crc32(body, zlib.crc32(text)):08x}.{text.decode()}", body)


def read(message: StoredMessage) -> Entry | None:
    """The entry of a message, or None if it is malformed; any error but MalformedEntry is a bug."""
    try:
        entry = decode(message)
    except MalformedEntry as e:
        assert len(str(e)) < 200, "a cause is a line, not the data"
        return None
    assert 0 <= entry.id < 2**63
    # An entry that can be decoded can be used.
    find(entry.keys, item("k", b""))
    found = items_of([message], "t")
    assert all(isinstance(i, (StoredEntry, Malformed)) for i in found)
    for i in found:
        if isinstance(i, StoredEntry):
            try:
                coalesce("t", 5, [i])
            except Inapplicable as e:
                assert e.entry_id == entry.id
    return entry


@examples(150)
@given(header=st.none() | st.text(max_size=80) | st.binary(max_size=60).map(lambda b: b.decode("latin-1")), body=...)
@example(header="1.0.", body=b"")
@example(header="1.-1.AA==", body=b"")
@example(header="1.0x_0.AA==", body=b"")
@example(header="1." + "f" * 100_000 + ".", body=b"")
@example(header="\ud800.0.", body=b"")
def test_any_header_and_body_is_an_entry_or_malformed(header: str | None, body: bytes) -> None:
    read(StoredMessage(SUBJECT, 1, header, body))


@examples(150)
@given(
    meta=st.lists(JUNK, max_size=12) | JUNK, body=st.binary(max_size=20), version=st.sampled_from(["1", "0", "2", ""])
)
def test_any_sealed_header_is_an_entry_or_malformed(meta: Any, body: bytes, version: str) -> None:
    read(sealed(b64encode(msgspec.msgpack.encode(meta)), body, version))


@examples(200)
@given(entry=ENTRIES, data=st.data())
def test_a_mutated_entry_is_itself_or_malformed_and_with_its_checksum_mended_harmless(
    entry: Entry, data: st.DataObject
) -> None:
    header, body = encode(entry)
    version, _, text = header.split(".")
    where = data.draw(st.sampled_from(["header", "meta", "body"]))
    if where == "header":
        changed = StoredMessage(SUBJECT, 1, _mutated(header.encode(), data).decode("latin-1"), body)
    elif where == "meta":
        raw = b64encode(_mutated(b64decode(text), data))
        changed = StoredMessage(SUBJECT, 1, f"{version}.{header.split('.')[1]}.{raw.decode()}", body)
        read(sealed(raw, body))
    else:
        other = _mutated(body, data)
        changed = StoredMessage(SUBJECT, 1, header, other)
        read(sealed(text.encode(), other))
    found = read(changed)
    assert found is None or found == entry


def _mutated(raw: bytes, data: st.DataObject) -> bytes:
    changed = bytearray(raw)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(0, len(changed) - 1)))
        match data.draw(st.sampled_from(["flip", "cut", "insert", "double"])):
            case "flip" if changed:
                changed[at] ^= data.draw(st.integers(1, 255))
            case "cut":
                del changed[at : at + data.draw(st.integers(1, 8))]
            case "insert":
                changed[at:at] = data.draw(st.binary(min_size=1, max_size=8))
            case _:
                changed += changed[at:]
    return bytes(changed)


RUN = encode_run(Run(run_id="r", thread_id="t"))
PAYLOADS = [
    encode_payload(Payload(0, [b"\x01", b"\xa1x"], RUN, RunSave("r", RunStatus.DONE, None))),
    encode_payload(Edit(keep=1, messages=[b"\x01"], metadata=b"\x80", state=b"\x01", parent=("p",))),
    encode_payload(Removal()),
]


@examples(200)
@given(data=st.data(), raw=st.none() | st.binary(max_size=40) | JUNK.map(msgspec.msgpack.encode))
def test_any_payload_is_one_or_a_value_error(data: st.DataObject, raw: bytes | None) -> None:
    raw = raw if raw is not None else _mutated(data.draw(st.sampled_from(PAYLOADS)), data)
    try:
        payload = decode_payload(raw)
    except ValueError:
        return
    assert payload.keep >= 0
    assert decode_payload(encode_payload(payload)) == payload


LENGTHS = [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"]
DEPTHS = [b"\x91" * 1_000_000, b"\x81\xa0" * 1_000_000]


@pytest.mark.parametrize("bomb", [*LENGTHS, *DEPTHS], ids=lambda b: f"{b[:2]!r} {len(b)}")
@pytest.mark.parametrize("around", [b"", b"\x95\xaacheckpoint\x00", b"\x98\xa4edit\x00\x90\xc0\xc0"])
def test_a_bomb_costs_no_memory(bomb: bytes, around: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="payload"):
            decode_payload(around + bomb)
        assert read(sealed(b64encode(around + bomb), b"")) is None
        assert tracemalloc.get_traced_memory()[1] < 10 * len(bomb) + (4 << 20)
    finally:
        tracemalloc.stop()


QUERIES = [(MessageQuery(), int), (RunQuery(), tuple[int, str]), (ThreadQuery(roots=True), tuple[int, str])]


@examples(150)
@given(
    which=st.sampled_from(QUERIES), data=st.data(), text=st.none() | st.text(max_size=40) | st.binary().map(b64encode)
)
def test_any_cursor_is_a_position_or_an_invalid_query(which: Any, data: st.DataObject, text: Any) -> None:
    query, kind = which
    if text is None:
        sound = new_cursor(query, "", data.draw(JUNK | st.tuples(NUMBERS, st.text(max_size=4))))
        text = data.draw(st.just(sound) | st.just(_mutated(sound.encode(), data).decode("latin-1")))
    text = text.decode() if isinstance(text, bytes) else text
    try:
        if kind is int:
            assert isinstance(read_cursor(text, query, "", kind), int)
        else:
            position = read_position(text, query)
            assert position is not None
            position[1].encode()
    except InvalidQuery:
        pass


# --- addresses and the command line -------------------------------------------------------------------------------


@examples(150)
@given(
    text=st.text(max_size=30) | st.from_regex(r"(nats|tls|ws)://([^@]{0,9}@)?[a-z0-9:.\[\]/@%]{0,12}", fullmatch=True)
)
def test_any_nats_url_is_usable_or_a_config_error_that_does_not_show_it(text: str) -> None:
    try:
        bare, _, _ = split_url(text)
    except ConfigError as e:
        assert len(text) < 9 or text not in str(e)
        assert e.__context__ is None
        return
    assert "@" not in bare
    assert bare.isprintable() or not bare.isascii()
    NatsConfig(servers=text)


@examples(150)
@given(text=st.text(max_size=30) | st.from_regex(r"postgres(ql)?://[a-z:@/?=%#&\[\],0-9]{0,20}", fullmatch=True))
def test_any_connection_string_is_usable_or_a_config_error_that_does_not_show_it(text: str) -> None:
    try:
        check_conninfo(text)
    except ConfigError as e:
        assert len(text) < 9 or text not in str(e)
        assert e.__context__ is None


@given(text=st.text(max_size=70))
@example(text="\udcff")
def test_any_schema_is_usable_or_a_config_error(text: str) -> None:
    with contextlib.suppress(ConfigError):
        assert check_schema(text).encode()


@examples(200)
@given(raw=st.binary(max_size=200) | st.lists(JUNK).map(lambda v: b"\n".join(msgspec.json.encode([x]) for x in v)))
@example(raw=b"\x1f\x8b")
@example(raw=b'{"thread_id": "t", "messages": ' + b"[" * 100_000)
@example(raw=b'{"thread_id": "\\ud800", "messages": []}')
@example(raw=b'{"thread_id": "a\\u0000", "messages": []}')
@example(raw=b'{"thread_id": "t", "messages": [1e999, 123456789012345678901234567890]}')
@example(raw=b"\xef\xbb\xbf{}")
def test_any_file_is_lines_or_bad_lines(raw: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("lines") / "x.jsonl"
    file.write_bytes(raw)
    producer = Input(str(file))
    try:
        first, again = list(producer.read()), list(producer.read_again())
    finally:
        producer.close()
    assert all(isinstance(line, (Line, BadLine)) for line in first)
    assert list(map(repr, first)) == list(map(repr, again))
    assert len(list(_split(io.BufferedReader(io.BytesIO(raw))))) >= len(first)  # type: ignore[arg-type]


WORDS = ["", " ", "--", "-", "-x", "--no-such", "\udcff", "a\nb", "x" * 3000, "é", "../..", "*", "0", "-1", "9" * 40]
# Without doctor, which asks silent servers again for seconds.
COMMANDS = [
    *(c for c in app.commands if c != "doctor"),
    "quarantine list",
    "quarantine show",
    "quarantine replay",
    "no",
]
OPTIONS = [
    *("--schema", "--stream", "--bucket", "--thread", "--after", "--limit", "--timeout", "--all", "--json", "--seed"),
    *("--overwrite", "--seconds", "--writers", "--outage", "--think-ms", "--nats-user", "--nats-creds", "--data"),
]


@pytest.mark.long
@examples(20, suppress_health_check=[HealthCheck.too_slow])
@given(
    command=st.sampled_from(COMMANDS),
    # No argument of a process has a NUL.
    words=st.lists(
        st.sampled_from(OPTIONS) | st.sampled_from(WORDS) | st.text(st.characters(exclude_characters="\0"), max_size=6),
        max_size=6,
    ),
)
@example(command="status", words=["--schema", "\udcff"])
@example(command="status", words=["--stream", "a b"])
@example(command="status", words=["--stream", "a\r\nPUB x 0\r\n"])
@example(command="flush", words=["t", "--timeout", "nan"])
@example(command="demo", words=["--seconds", "nan"])
def test_any_arguments_end_with_an_exit_code_and_no_traceback(command: str, words: list[str]) -> None:
    # No server is there, so no valid call gets far; an invalid one must not get even there.
    at = "u:s3cret@127.0.0.1:1"
    addresses = {"BUFSTORE_NATS": f"nats://{at}", "BUFSTORE_POSTGRES": f"postgresql://{at}/x"}
    arguments = [*command.split(), *(w for w in words if w != "--embedded")]
    result = CliRunner(env=addresses).invoke(app, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code in (0, 1, 2)
    assert "s3cret" not in result.output
    assert "Traceback" not in result.output
