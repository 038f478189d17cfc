"""Which columns a stream must have, and how its rows are read; without Spark."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import ArrayType, StringType, StructType, TimestampType

from bufstore import ConfigError, InvalidRecord, Run, RunStatus
from bufstore.spark.config import SinkConfig
from bufstore.spark.sink.bufstore_format import BufstoreFormat, _BatchWriter, _order, _Rows, _unpacked
from bufstore.spark.sink.checkpoint_rows import (
    CheckpointRow,
    check_columns,
    checkpoint_of,
    number_of,
    row_of_json,
    wanted_of,
)
from bufstore.spark.sink.foreach_batch import checkpoint_sink, parts_of
from bufstore.spark.sink.lines import shown
from bufstore.spark.sink.parked_rows import ParkedRows
from bufstore.spark.sink.settled import position_of

GOOD = [("thread_id", "string"), ("run_id", "string"), ("delta", "array<string>")]


@pytest.mark.parametrize(
    ("columns", "named"),
    [
        (GOOD[1:], "thread_id"),
        ([("thread_id", "bigint"), *GOOD[1:]], "thread_id"),
        (GOOD[:2], "messages or delta"),
        ([*GOOD, ("surprise", "string")], "surprise"),
        ([*GOOD[:2], ("delta", "string")], "delta"),
    ],
)
def test_a_column_that_does_not_fit_is_named(columns: list[tuple[str, str]], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        check_columns(columns)


def test_a_row_becomes_a_checkpoint() -> None:
    check_columns([*GOOD, ("position", "bigint"), ("run", "string")])
    row = {
        "thread_id": "t", "run_id": "r", "delta": ['{"role": "user", "n": 1}', "null"], "status": "done",
        "run": '{"steps": 3, "output": [1]}', "agent_id": None,
    }  # fmt: skip
    run = Run(run_id="r", thread_id="t", status=RunStatus.DONE, steps=3, output=[1])
    assert checkpoint_of(row) == CheckpointRow("t", False, [{"role": "user", "n": 1}, None], run)
    assert checkpoint_of({"thread_id": "t", "run_id": "r", "messages": []}).whole


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"messages": ["1"], "delta": ["1"]},
        {"delta": ["{"]},
        {"delta": ["1"], "status": "unheard of"},
        {"delta": ["1"], "run": "[]"},
        {"delta": ["1"], "run": '{"steps": "many"}'},
        {"delta": [None]},
        {"delta": ["[" * 100_000 + "]" * 100_000]},
        {"delta": ["1"], "run": '{"output": ' + "[" * 100_000 + "]" * 100_000 + "}"},
    ],
)
def test_a_row_that_says_nothing_clear_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRecord):
        checkpoint_of({"thread_id": "t", "run_id": "r"} | fields)


@pytest.mark.parametrize(
    "fields", [{"edit": '{"metadata": {"titel": "new"}}'}, {"delta": ["1"], "run": '{"step": 3}'}], ids=["edit", "run"]
)
def test_a_field_that_nothing_has_is_refused(fields: dict[str, Any]) -> None:
    """Regression: an edit with a misspelt title took a thread's title, owner and custom metadata away."""
    with pytest.raises(InvalidRecord, match=r"titel|step"):
        wanted_of({"thread_id": "t", "run_id": "r"} | fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"edit": {"metadata": {"title": "x"}}},
        {"delta": "12"},
        {"delta": {"1": 2}},
        {"delta": [{"role": "user"}]},
        {"messages": 5},
        {"delta": ["1"], "run": {"steps": 3}},
        {"delta": ["1"], "thread_id": ["t"]},
        {"delta": ["1"], "agent_id": 1},
    ],
)
def test_a_row_of_json_that_has_not_the_types_of_a_table_is_refused(fields: dict[str, Any]) -> None:
    corrected = json.dumps({"thread_id": "t", "run_id": "r"} | fields)

    async def correct() -> None:
        await ParkedRows("host=nowhere", "bufstore").correct(1, corrected)

    with pytest.raises(InvalidRecord, match="wrong type"):
        asyncio.run(correct())


def test_a_row_of_json_with_bytes_that_are_no_text_is_refused() -> None:
    """Regression: a corrected row with such a byte on the command line ended in a traceback."""
    with pytest.raises(InvalidRecord):
        row_of_json('{"thread_id": "t", "run_id": "\udcff"}')


def test_numbers_grow_with_batches_and_places() -> None:
    numbers = [number_of(batch, rank) for batch in range(3) for rank in (0, 1, 2**24 - 1)]
    assert numbers == sorted(set(numbers))
    assert number_of(2**39 - 1, 2**24 - 1) < 2**63
    with pytest.raises(InvalidRecord):
        number_of(1, 2**24)


@pytest.mark.parametrize("batch_id", [-1, 2**39, 1764072000000, 20261125120000])
def test_a_batch_whose_rows_can_have_no_numbers_is_refused_before_anything_is_noted(batch_id: int) -> None:
    sink = checkpoint_sink(SinkConfig(app_id="q", nats="nats://h:4222", postgres="postgresql://h/db"))
    with pytest.raises(ConfigError, match="number is at least 0"):
        sink(cast(Any, SimpleNamespace(dtypes=GOOD)), batch_id)
    schema = (
        StructType().add("thread_id", StringType()).add("run_id", StringType()).add("delta", ArrayType(StringType()))
    )
    given = {"natsUrl": "nats://h:4222", "postgresUrl": "postgresql://h/db", "appId": "q", "batchId": str(batch_id)}
    with pytest.raises(ConfigError, match="number"):
        BufstoreFormat(given).writer(schema, False)
    for fits in (0, 2**39 - 1, 1764072000, 202611251200):
        BufstoreFormat(given | {"batchId": str(fits)}).writer(schema, False)


def test_a_configuration_shows_no_secret() -> None:
    config = SinkConfig(app_id="q", nats="nats://me:hush@h:4222", postgres="postgresql://me:hush@h/db")
    assert "hush" not in repr(config)
    with pytest.raises(ConfigError):
        SinkConfig(app_id="q", nats="nats://h:0", postgres="postgresql://h/db")
    with pytest.raises(ConfigError):
        SinkConfig(app_id="q", nats="nats://h:4222", postgres="postgresql://h/db", in_flight=0)


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=40), st.integers(1, 2000))
def test_a_part_holds_no_more_bytes_than_it_may(sizes: list[int], bytes_max: int) -> None:
    rows = [{"thread_id": f"t{n}", "delta": ["x" * size]} for n, size in enumerate(sizes)]
    batch = pyarrow.RecordBatch.from_pylist(rows)
    parts = list(parts_of(iter([batch]), bytes_max))
    assert [row for part in parts for row in part] == rows
    for part in parts:
        assert len(part) == 1 or sum(len(row["delta"][0]) for row in part) <= bytes_max


def test_a_batch_for_the_driver_is_sorted_by_times_too() -> None:
    moments = [datetime(2026, 1, day, tzinfo=UTC) for day in (3, 1, 2)]
    rows = [{"thread_id": "t", "run_id": "r", "delta": ["1"], "position": moment} for moment in moments]
    assert [row["position"] for row in sorted(rows, key=_order)] == sorted(moments)


def as_text(values: list[bytes | None]) -> pyarrow.Array:
    """Spark's column of strings that holds these bytes."""
    raw = pyarrow.array(values, pyarrow.binary())
    return pyarrow.Array.from_buffers(pyarrow.string(), len(raw), raw.buffers())


def given_by(way: str, batch: pyarrow.RecordBatch) -> list[Any]:
    """A batch's rows, as each of the two ways into the sink gets them."""
    if way == "foreachBatch":
        return [row for part in parts_of([batch], 1 << 20) for row in part]
    schema = StructType().add("thread_id", StringType()).add("run_id", StringType())
    schema = schema.add("delta", ArrayType(StringType())).add("position", TimestampType())
    config = SinkConfig(app_id="a", nats="nats://h:4222", postgres="postgresql://h/db")
    written = _BatchWriter(config, schema, 0).write(iter([batch]))
    assert isinstance(written, _Rows)
    return [row for packed in written.packed for row in _unpacked(packed)]


WAYS = pytest.mark.parametrize("way", ["foreachBatch", "format"])


@WAYS
def test_a_row_that_is_no_text_is_bad_and_no_other(way: str) -> None:
    threads = as_text([b"good", b"bad", b"\xff", b"\xfe", b"more"])
    deltas = pyarrow.ListArray.from_arrays([0, 2, 3, 4, 5, 6], as_text([b"1", None, b'"\xff"', b"1", b"1", b"1"]))
    runs = pyarrow.array(["r"] * 5, pyarrow.string())
    rows = given_by(way, pyarrow.RecordBatch.from_arrays([threads, runs, deltas], ["thread_id", "run_id", "delta"]))
    assert [row["thread_id"] for row in rows] == ["good", "bad", r"\xff", r"\xfe", "more"], "each thread is itself"
    assert (rows[0]["delta"], rows[1]["delta"]) == (["1", None], [r'"\xff"'])
    for row, wrong in zip(rows[1:4], ("delta", "thread_id", "thread_id"), strict=True):
        kept = json.dumps(shown(row))  # as quarantine stores it
        for again in (row, row_of_json(kept)):
            with pytest.raises(InvalidRecord, match=rf"not UTF-8 in {wrong} \(.*\)$"):
                wanted_of(again)
    assert isinstance(wanted_of(rows[4]), CheckpointRow)


@WAYS
@pytest.mark.parametrize("zone", [None, "America/Los_Angeles", "Asia/Tokyo", "GMT+02:00"])
def test_each_time_that_spark_has_is_a_position(way: str, zone: str | None) -> None:
    first, last = -62_135_596_800_000_000, 253_402_300_799_999_999  # the range of Python's datetime, in UTC
    times = [first - 1, first, -1, 0, last, last + 1, None]
    position = pyarrow.array(times, pyarrow.int64()).cast(pyarrow.timestamp("us", tz=zone))
    rows = [{"thread_id": "t", "run_id": "r", "delta": ["1"]}] * len(times)
    found = given_by(way, pyarrow.RecordBatch.from_pylist(rows).append_column("position", position))
    assert [position_of(row) for row in found] == [*times[:-1], position_of({})]
    assert found[3]["position"] == datetime(1970, 1, 1, tzinfo=UTC), "as people read it, in quarantine"
