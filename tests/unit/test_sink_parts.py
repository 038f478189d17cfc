"""How a batch that came again with other rows is recognized, and what a task keeps until then; without Spark."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterator
from typing import Any

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import ArrayType, StringType, StructType

from bufstore import ConfigError
from bufstore.spark import SinkConfig
from bufstore.spark.sink import bufstore_format
from bufstore.spark.sink.bufstore_format import cut
from bufstore.spark.sink.kept_batches import KeptBatches
from bufstore.spark.sink.parts import Part, differ, sum_of
from bufstore.spark.sink.settled import ROW

_NUMBERS = st.integers(-(1 << 63), (1 << 63) - 1)
_OF = 3


def sums_of(rows: list[int]) -> dict[int, int]:
    return {n: sum_of(row for row in rows if row % _OF == n) for n in range(_OF) if any(r % _OF == n for r in rows)}


@given(st.lists(_NUMBERS), st.sets(st.integers(0, _OF - 1)), st.randoms(), st.integers(0, 1 << 62))
def test_other_rows_in_a_part_that_was_begun_are_found_out(
    rows: list[int], begun: set[int], random: Any, change: int
) -> None:
    noted = [Part(number, _OF, planned) for number, planned in sums_of(rows).items() if number in begun]
    again = random.sample(rows, len(rows))
    assert not differ(noted, sums_of(again), _OF), "in any order"
    assert differ(noted, sums_of(again), _OF + 1) == bool(noted), "divided otherwise, no part is what it was"
    for number in {part.number for part in noted}:
        assert differ(noted, sums_of([row for row in rows if row % _OF != number or row == 0]), _OF) == (
            sum_of(row for row in rows if row % _OF == number) != 0
        )
    # A part of which nothing was written may change: its rows are new.
    other = next(number for number in range(_OF) if number not in begun) if len(begun) < _OF else None
    if other is not None:
        assert not differ(noted, sums_of([*rows, change * _OF + other]), _OF)


@given(st.lists(_NUMBERS))
def test_the_sum_over_a_batch_is_that_over_its_parts(rows: list[int]) -> None:
    assert sum_of(sums_of(rows).values()) == sum_of(rows)


@pytest.mark.parametrize("bytes_max", [0, 600, 1 << 20])
def test_a_task_keeps_its_rows_in_memory_up_to_a_bound_and_then_in_a_file(
    bytes_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = []
    monkeypatch.setattr(
        tempfile, "TemporaryFile", lambda new=tempfile.TemporaryFile, **more: files.append(new(**more)) or files[-1]
    )
    rows = [{"thread_id": f"t{n}", ROW: (1 << 62) + n} for n in range(40)]
    batches = [pyarrow.RecordBatch.from_pylist(rows[at : at + 10]) for at in range(0, 40, 10)]
    kept = KeptBatches([batches[0].slice(0, 0), *batches], bytes_max)
    assert not kept.empty
    assert kept.planned == sum_of(row[ROW] for row in rows)
    assert [row for batch in kept for row in batch.to_pylist()] == rows
    assert len(files) == (bytes_max < sum(batch.nbytes for batch in batches))
    assert all(file.closed for file in files)
    assert KeptBatches(batches[:0], bytes_max).empty


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=30), st.integers(1, 5000))
def test_a_large_batch_comes_out_of_its_file_in_pieces(sizes: list[int], bytes_max: int) -> None:
    rows = [{"text": "x" * size, ROW: number} for number, size in enumerate(sizes)]
    kept = list(KeptBatches([pyarrow.RecordBatch.from_pylist(rows)], bytes_max))
    assert [row for piece in kept for row in piece.to_pylist()] == rows
    assert all(piece.num_rows == 1 or piece.nbytes <= bytes_max for piece in kept)


@given(st.lists(st.integers(0, 3000), max_size=30), st.integers(1, 5000))
def test_rows_in_memory_are_written_in_parts_of_so_many_bytes(sizes: list[int], bytes_max: int) -> None:
    rows = [{"text": "x" * size} for size in sizes]
    parts = list(cut(rows, bytes_max))
    assert [row for part in parts for row in part] == rows
    assert all(len(part) == 1 or sum(len(row["text"]) for row in part) <= bytes_max for part in parts)
    assert [len(part) for part in cut([{}] * 2001, 1 << 20)] == [1000, 1000, 1]


def test_a_task_hands_over_no_more_than_the_driver_bears(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bufstore_format, "_TASK_BYTES_MAX", 1 << 20)
    schema = StructType().add("thread_id", "string").add("run_id", "string").add("delta", ArrayType(StringType()))
    config = SinkConfig(app_id="a", nats="nats://h:4222", postgres="postgresql://h/db")
    taken: list[str] = []

    def batches(*texts: str) -> Iterator[pyarrow.RecordBatch]:
        for text in texts:
            taken.append(text)
            yield pyarrow.RecordBatch.from_pylist([{"thread_id": "t", "run_id": "r", "delta": [text]}])

    writer = bufstore_format._BatchWriter(config, schema, None)
    half = [secrets.token_hex(800_000) for _ in range(4)]  # random, so it stays large when it is packed
    writer.write(batches("x" * 4_000_000, half[0]))
    taken.clear()
    with pytest.raises(ConfigError, match=r"more than 1 MiB of rows.*checkpoint_sink"):
        writer.write(batches(*half))
    assert taken == half[:2], "and takes no more than that either"
