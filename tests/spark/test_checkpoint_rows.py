"""Which columns a stream must have, and what a row says; without Spark."""

from __future__ import annotations

from typing import Any

import pytest

from bufstore import ConfigError, InvalidRecord, Run, RunStatus
from bufstore.spark.config import SinkConfig
from bufstore.spark.sink.checkpoint_rows import CheckpointRow, check_columns, checkpoint_of, number_of

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
    ],
)
def test_a_row_that_says_nothing_clear_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRecord):
        checkpoint_of({"thread_id": "t", "run_id": "r"} | fields)


def test_numbers_grow_with_batches_and_places() -> None:
    numbers = [number_of(batch, rank) for batch in range(3) for rank in (0, 1, 2**24 - 1)]
    assert numbers == sorted(set(numbers))
    assert number_of(2**38, 2**24 - 1) < 2**63
    with pytest.raises(InvalidRecord):
        number_of(1, 2**24)


def test_a_configuration_shows_no_secret() -> None:
    config = SinkConfig(app_id="q", nats="nats://me:hush@h:4222", postgres="postgresql://me:hush@h/db")
    assert "hush" not in repr(config)
    with pytest.raises(ConfigError):
        SinkConfig(app_id="q", nats="nats://h:0", postgres="postgresql://h/db")
    with pytest.raises(ConfigError):
        SinkConfig(app_id="q", nats="nats://h:4222", postgres="postgresql://h/db", in_flight=0)
