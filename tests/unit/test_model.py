"""Messages and runs come back exactly as they were given, or are refused before any I/O."""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import uuid
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bufstore.errors import InvalidId, InvalidRecord, Rejected
from bufstore.threads.model import (
    MAX_DEPTH,
    Run,
    RunStatus,
    Thread,
    ThreadMetadata,
    decode_message,
    decode_run,
    encode_messages,
    encode_run,
    free_checker,
    free_fields,
)
from bufstore.types import check_id
from thorough import examples

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
PLAIN = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | TEXT | st.binary(max_size=12)
KEYS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | TEXT | st.binary(max_size=6)
VALUES = st.recursive(PLAIN, lambda v: st.lists(v, max_size=4) | st.dictionaries(KEYS, v, max_size=4), max_leaves=15)


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    ONE = 1


class MyStr(str):
    pass


class MyDict(dict[str, Any]):
    pass


@dataclass
class Point:
    x: int


def shape(value: Any) -> Any:
    """The value with its types: 1, 1.0 and True differ, a NaN equals itself, -0.0 is not 0.0."""
    if isinstance(value, dict):
        return ("dict", [(shape(k), shape(v)) for k, v in value.items()])
    if isinstance(value, list):
        return ("list", [shape(v) for v in value])
    return (type(value), repr(value))


@examples(300)
@given(value=VALUES)
def test_any_plain_value_comes_back_exactly(value: Any) -> None:
    (data,) = encode_messages([value])
    assert shape(decode_message(data)) == shape(value)


@pytest.mark.parametrize(
    "value",
    [0, -1, 2**63 - 1, -(2**63), 2**64 - 1, 0.0, -0.0, float("inf"), float("-inf"), float("nan"), 5e-324, "", "\0", b"",
     b"\0\xff", "🧵\U0010ffff\ufeff", {"": 1}, {None: 1, True: 2, b"k": 3, 7: 4, "7": 5}, [], {}, [[]], {"id": None},
     {"\0": "\0"}, {"kind": "checkpoint", "id": {"id": 1}}],
    ids=repr,
)  # fmt: skip
def test_edge_values_come_back_exactly(value: Any) -> None:
    for wrapped in (value, [value], {"content": value}):
        (data,) = encode_messages([wrapped])
        assert shape(decode_message(data)) == shape(wrapped)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def loop() -> Any:
    value: list[Any] = []
    value.append({"again": value})
    return value


@pytest.mark.parametrize(
    "value",
    [(1, 2), {1, 2}, frozenset(), 2**64, -(2**63) - 1, 10**400, "\ud800", "a\udfff", 1j, decimal.Decimal(1),
     uuid.UUID(int=1), datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC), datetime.date(2026, 1, 1),
     datetime.timedelta(1), Colour.RED, Level.ONE, RunStatus.DONE, MyStr("x"), MyDict(), collections.OrderedDict(),
     collections.deque(), Point(1), bytearray(b"x"), memoryview(b"x"), object(), range(3), len, Ellipsis, int,
     nested(MAX_DEPTH + 1), nested(100_000), loop(), Thread(thread_id="x"), msgspec.Raw(b"\x01"),
     msgspec.msgpack.Ext(1, b"x"), (i for i in range(3))],
    ids=lambda v: type(v).__name__,
)  # fmt: skip
@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: [v], lambda v: {"deep": [{"er": v}]}], ids="vld")
def test_what_would_not_come_back_is_refused(value: Any, wrap: Any) -> None:
    with pytest.raises(InvalidRecord, match=r"messages\[1\]"):
        encode_messages(["fine", wrap(value)])
    with pytest.raises(InvalidRecord):
        encode_run(Run(run_id="r", thread_id="t", input=wrap(value)))


@pytest.mark.parametrize(
    "key", [(1, 2), frozenset(), Colour.RED, Level.ONE, MyStr("k"), uuid.UUID(int=1), "\ud800", 2**64], ids=repr
)
def test_keys_that_would_not_come_back_are_refused(key: Any) -> None:
    with pytest.raises(InvalidRecord):
        encode_messages([{key: 1}])


@pytest.mark.parametrize("depth", [1, MAX_DEPTH - 1, MAX_DEPTH])
def test_nesting_up_to_the_limit_comes_back(depth: int) -> None:
    assert decode_message(encode_messages([nested(depth)])[0]) == nested(depth)


NO_LISTS = ["text", b"x", None, 5, {"a": 1}, {1, 2}, iter([1]), bytearray(b"x")]


@pytest.mark.parametrize("messages", NO_LISTS, ids=lambda m: type(m).__name__)
def test_messages_must_be_a_list(messages: Any) -> None:
    with pytest.raises(InvalidRecord):
        encode_messages(messages)


def test_what_the_caller_does_afterwards_changes_nothing() -> None:
    message = {"role": "user", "content": ["a", {"b": [1]}]}
    run = Run(run_id="r", thread_id="t", extensions={"x": [1]})
    encoded, record = encode_messages([message]), encode_run(run)
    message["content"][1]["b"].append(2)  # type: ignore[index]
    message["role"] = "assistant"
    run.extensions["x"].append(2)
    assert decode_message(encoded[0]) == {"role": "user", "content": ["a", {"b": [1]}]}
    assert decode_run(record).extensions == {"x": [1]}


ANY = VALUES | st.just((1,)) | st.just({1}) | st.just("\ud800") | st.just("a\0b") | st.just(2**70)
FIELDS = [f for f in Run.__struct_fields__ if f not in ("run_id", "thread_id", "status")]
RUN_FIELDS = st.dictionaries(st.sampled_from(FIELDS), ANY, max_size=4)


@examples(300)
@given(fields=RUN_FIELDS, status=st.sampled_from(RunStatus))
def test_a_run_comes_back_exactly_or_is_refused(fields: dict[str, Any], status: RunStatus) -> None:
    run = Run(run_id="r", thread_id="t", status=status, **fields)
    try:
        run.check("t")
        record = encode_run(run)
    except (InvalidRecord, InvalidId):
        return
    back = decode_run(record)
    for name in Run.__struct_fields__:
        before, after = getattr(run, name), getattr(back, name)
        if name.endswith("_at") and type(before) is int:
            assert before == after, name  # a time given as an int is read as a float
        else:
            assert shape(after) == shape(before), name


class LaterRun(Run, frozen=True, kw_only=True, omit_defaults=True):
    """A run as a later release may declare it."""

    verdict: Any = None
    notes: dict[str, Any] = {}  # noqa: RUF012
    maybe: list[Any] | None = None
    pair: tuple[int, ...] | None = None
    rating: float | None = None
    raw: object = None
    place: int = 0


def test_every_field_that_lets_any_value_in_is_checked() -> None:
    now = ("input", "output", "error", "waiting", "extensions")
    assert free_fields(Run) == now
    assert free_fields(ThreadMetadata) == ("custom",)
    later = free_fields(LaterRun)
    assert later == (*now, "verdict", "notes", "maybe", "pair", "raw")
    check = free_checker(LaterRun, lambda run: f"the run {run.run_id}")
    for name in later:
        with pytest.raises(InvalidRecord, match=f"the run r: {name}"):  # it would come back as [[1, 2]]
            check(LaterRun(run_id="r", thread_id="t", **{name: [(1, 2)]}))
        check(LaterRun(run_id="r", thread_id="t", **{name: [[1, 2]]}))
        check(LaterRun(run_id="r", thread_id="t", **{name: {}}))


def test_a_run_of_a_wider_type_is_refused_where_it_would_lose_a_field() -> None:
    assert decode_run(encode_run(LaterRun(run_id="r", thread_id="t"))) == Run(run_id="r", thread_id="t")
    with pytest.raises(InvalidRecord, match="would come back as None: use the fields and types that Run declares"):
        encode_run(LaterRun(run_id="r", thread_id="t", verdict="good"))


@pytest.mark.parametrize("name", free_fields(Run))
@pytest.mark.parametrize(
    "value", [(), (1,), collections.OrderedDict(), MyDict(), MyStr(), frozenset(), Level.ONE], ids=repr
)
def test_what_looks_like_nothing_is_refused_in_every_free_field(name: str, value: Any) -> None:
    with pytest.raises(InvalidRecord, match=f"run 'r': {name}"):
        encode_run(Run(run_id="r", thread_id="t", **{name: value}))


STORABLE = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=12)
BY_TYPE: dict[Any, st.SearchStrategy[Any]] = {
    Any: VALUES,
    dict[str, Any]: st.dictionaries(TEXT, VALUES, max_size=3),
    str: STORABLE,
    str | None: st.none() | STORABLE,
    float | None: st.none() | st.floats(),
    int: st.integers(-(2**63), 2**63 - 1),
    RunStatus: st.sampled_from(RunStatus),
}


@given(st.fixed_dictionaries({f.name: BY_TYPE[f.type] for f in msgspec.structs.fields(Run)}))
def test_a_run_with_a_value_in_every_field_comes_back_exactly(fields: dict[str, Any]) -> None:
    run = Run(**fields)
    run.check(run.thread_id)
    back = decode_run(encode_run(run))
    for name in Run.__struct_fields__:
        assert shape(getattr(back, name)) == shape(getattr(run, name)), name


@pytest.mark.parametrize(
    "fields",
    [
        {"agent_id": None},
        {"agent_id": 5},
        {"agent_id": b"bytes"},
        {"agent_id": "a\0b"},
        {"termination_reason": 5},
        {"termination_reason": "\ud800"},
        {"steps": "three"},
        {"steps": 1.5},
        {"steps": True},
        {"steps": None},
        {"steps": 2**64},
        {"input_tokens": "1"},
        {"created_at": "now"},
        {"created_at": datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)},
        {"extensions": None},
        {"extensions": {1: 2}},
        {"extensions": [1]},
        {"parent_run_id": 5},
        {"parent_thread_id": ""},
        {"status": "running"},
        {"status": None},
        {"run_id": ""},
        {"run_id": None},
        {"run_id": "a\0"},
        {"thread_id": "another"},
    ],
    ids=repr,
)
def test_a_run_that_could_not_be_read_again_is_refused(fields: dict[str, Any]) -> None:
    run = Run(**({"run_id": "r", "thread_id": "t"} | fields))
    with pytest.raises(Rejected):
        run.check("t")
        encode_run(run)


@pytest.mark.parametrize("id_", [None, 5, b"x", "", "\0", "a\0b", "\ud800", "a" * 1025, "é" * 513, MyStr("x")])
def test_ids_that_cannot_be_stored_are_refused(id_: Any) -> None:
    with pytest.raises(InvalidId):
        check_id(id_, "thread_id")


@pytest.mark.parametrize("id_", ["a", " ", "*", "\r\n", "\x01", "a" * 1024, "é" * 512, "🧵" * 256, "\ufeff", "e\u0301"])
def test_any_other_id_is_taken_as_it_is(id_: str) -> None:
    assert check_id(id_, "thread_id") is id_
