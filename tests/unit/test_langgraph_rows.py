"""Operations on LangGraph's rows: flushed together, they make what they make one by one."""

from __future__ import annotations

import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bufstore.langgraph.folded import Folded
from bufstore.langgraph.model import (
    BlobRow,
    CheckpointRow,
    Delete,
    Drop,
    Operation,
    Put,
    Rows,
    Tables,
    WriteRow,
    Writes,
    orphaned,
)
from bufstore.langgraph.payload import decode_payload, encode_payload, holds_nul, saves_of

_ns = st.sampled_from(["", "child:1"])
_id = st.sampled_from("abcd")
_byte = st.binary(min_size=1, max_size=1)
_checkpoints = st.builds(
    CheckpointRow,
    _ns,
    _id,
    st.none() | _id,
    st.integers(0, 9).map(lambda n: b'{"v":4,"channel_versions":{"x":%d}}' % n),
    st.just(b"{}"),
)
_blobs = st.builds(BlobRow, _ns, st.sampled_from("xy"), st.sampled_from("12"), st.just("bytes"), _byte)
_writes = st.builds(
    WriteRow, _ns, _id, st.sampled_from("tu"), st.sampled_from([0, 1, -1]), st.just("x"), st.just("bytes"), _byte, _id
)
OPERATIONS: st.SearchStrategy[Operation] = st.one_of(
    st.builds(Put, _checkpoints, st.lists(_blobs, max_size=2)),
    st.builds(Writes, st.lists(_writes, max_size=3), st.booleans()),
    st.just(Delete()),
    st.builds(
        Drop,
        st.lists(st.tuples(_ns, _id), max_size=2),
        st.lists(_ns, max_size=1),
        st.lists(st.tuples(_ns, st.sampled_from("xy"), st.sampled_from("12")), max_size=2),
    ),
    st.builds(Rows, st.lists(_checkpoints, max_size=2), st.lists(_blobs, max_size=2), st.lists(_writes, max_size=2)),
)


def content(tables: Tables) -> tuple[object, ...]:
    return tables.checkpoints, tables.blobs, tables.writes


@given(st.lists(OPERATIONS, max_size=6), st.lists(OPERATIONS, max_size=8), st.integers(0, 8))
def test_folded_in_any_windows_they_mean_the_same(
    before: list[Operation], operations: list[Operation], cut: int
) -> None:
    one_by_one = Tables()
    for operation in before:
        one_by_one.apply(operation)
    flushed = one_by_one.copy()
    for operation in operations:
        one_by_one.apply(operation)
    for window in (operations[:cut], operations[cut:]):
        flushed = Folded("t", window).written(flushed)
    assert content(flushed) == content(one_by_one)


@given(OPERATIONS)
def test_an_operation_comes_back_from_its_bytes(operation: Operation) -> None:
    again = decode_payload(encode_payload(operation))
    assert encode_payload(again) == encode_payload(operation)
    assert msgspec.json.encode(again) == msgspec.json.encode(operation)


def test_a_process_without_memory_takes_no_payload_for_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    class Decoder:
        def decode(self, data: bytes) -> Operation:
            raise MemoryError

    monkeypatch.setattr("bufstore.langgraph.payload._decoder", Decoder())
    with pytest.raises(MemoryError):
        decode_payload(b"whatever it is")


@given(st.binary(max_size=60) | OPERATIONS.flatmap(lambda o: st.just(encode_payload(o)[:-1])))
def test_anything_else_is_a_value_error(data: bytes) -> None:
    try:
        decode_payload(data)
    except ValueError:
        return


@pytest.mark.parametrize(
    "wrong",
    [
        Put(CheckpointRow("", "a\0", None, b"{}", b"{}")),
        Put(CheckpointRow("", "a", None, b"{", b"{}")),
        Put(CheckpointRow("", "a", None, b"{}", rb'{"a":"\u0000"}')),
        Put(CheckpointRow("", "a", None, b"{}", b"{}"), [BlobRow("", "x\0", "1", "t", b"")]),
        Writes([WriteRow("", "a", "t", 1 << 31, "x", "t", b"", "")]),
        Writes([WriteRow("", "a", "t", 0, "x", "t", b"", "\0")]),
        Drop([("", "\0")]),
    ],
)
def test_what_no_table_could_hold_is_found_at_once(wrong: Operation) -> None:
    with pytest.raises(ValueError, match="undecodable payload"):
        decode_payload(encode_payload(wrong))


def test_an_escaped_nul_is_told_from_an_escaped_backslash() -> None:
    assert holds_nul(rb'"a\u0000"')
    assert holds_nul(rb'"a\\\u0000"')
    assert not holds_nul(rb'"a\\u0000"')


def test_a_row_loses_a_parent_that_goes() -> None:
    row = CheckpointRow("", "b", "a", b"{}", b"{}")
    assert orphaned(row, {("", "a")}).parent is None
    assert orphaned(row, {("x", "a")}) is row


def test_rows_count_about_as_many_bytes_as_they_take() -> None:
    """Regression: small rows counted a quarter of what they take, so that `cache_bytes` was no bound."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tables = [Tables() for _ in range(100)]
        for number, each in enumerate(tables):
            for row in range(8):
                blob = BlobRow("", f"channel-{number}-{row}", f"version-{number}-{row}", "msgpack", bytes([row] * 20))
                each.blobs[blob.key] = blob
                each.known.add(blob.key)
        took = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert took / 2 < sum(each.size for each in tables) < took * 2


def test_a_payload_says_whether_it_saves_a_checkpoint_of_a_run() -> None:
    """What is parked of a run keeps its thread from being deleted with the run, also what was copied to the thread."""
    ours, another, unnamed, wrong = (
        CheckpointRow("", id_, None, b"{}", metadata)
        for id_, metadata in zip("abcd", [b'{"run_id":"r"}', b'{"run_id":"s"}', b"{}", b'{"run_id":5}'], strict=True)
    )
    saving: list[Operation] = [Put(ours), Rows([another, ours]), Rows([wrong, unnamed, ours])]
    others: list[Operation] = [Put(another), Put(unnamed), Put(wrong), Rows([another]), Writes([]), Drop([]), Delete()]
    payloads = [encode_payload(operation) for operation in saving + others]
    assert [saves_of(payload, {"r"}) for payload in payloads] == [True] * len(saving) + [False] * len(others)
    assert not saves_of(payloads[0][:-1], {"r"}), "one that cannot be decoded"
