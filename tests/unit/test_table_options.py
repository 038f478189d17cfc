"""Which rows of threads, runs and messages a job reads: by options, and in which task."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bufstore import ConfigError
from bufstore.spark.option_values import ids
from bufstore.spark.tables.shares import ALL_THREADS, Share, hash_of
from bufstore.spark.tables.table_options import table_options
from bufstore.spark.typed_columns import microseconds


@given(st.integers(1, 50), st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_each_thread_is_in_one_share(tasks: int, thread_id: str) -> None:
    assert sum(share.has(thread_id) for share in ALL_THREADS.divided(tasks)) == 1
    assert 0 <= hash_of(thread_id) < 1 << 32
    assert ALL_THREADS.divided(1) == [Share()]


def test_options_that_cannot_be_are_said_at_once() -> None:
    good = {"nats": "nats://a", "postgres": "postgresql://b", "table": "threads"}
    for wrong, match in (
        ({"table": "people"}, "threads, runs, messages"),
        ({"postgres": "postgresql://me:secret@b"}, "password"),
        ({"postgres": "host=b sslpassword=secret"}, "password"),
        ({"postgresUrl": "postgresql://b"}, "one of the options"),
        ({"columns": "version,surprise"}, "surprise"),
        ({"table": "messages", "agents": '["a"]'}, "agent_id"),
        ({"postgresSnapshot": "0-1"}, "endingPosition"),
        ({"endingPosition": "1", "postgresSnapshot": "'; DROP"}, "name of a snapshot"),
        ({"appId": "a"}, "appId"),
    ):
        with pytest.raises(ConfigError, match=match) as raised:
            table_options(good | wrong)
        assert "secret" not in str(raised.value)


def test_an_id_with_a_nul_is_refused() -> None:
    """Postgres takes no such text."""
    with pytest.raises(ConfigError, match="threads"):
        ids({"threads": '["a\\u0000"]'}, "threads")


@pytest.mark.parametrize("seconds", [-1e11, -62_135_596_800.0, 253_402_300_799.0, float("nan")])
def test_a_time_that_python_would_not_take_from_spark_is_null(seconds: float) -> None:
    assert microseconds(seconds) is None
    assert microseconds(-62_135_400_000) == -62_135_400_000_000_000
