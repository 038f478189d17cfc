"""Which rows of threads, runs and messages a job reads: by options, by filters of a query, and in which task."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    In,
    LessThanOrEqual,
    Not,
    StringContains,
    StringStartsWith,
)

from bufstore import ConfigError
from bufstore.spark.option_values import ids
from bufstore.spark.tables.narrowing import ALL, Narrowing, narrowed_by
from bufstore.spark.tables.shares import ALL_THREADS, Share, hash_of
from bufstore.spark.tables.table_options import table_options
from bufstore.spark.typed_columns import microseconds

IDS = ["a", "ab", "abc", "b", "ba"]
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
some_ids = st.none() | st.frozensets(st.sampled_from(IDS))
times = st.none() | st.integers(0, 9)
narrowings = st.builds(
    Narrowing,
    threads=some_ids,
    thread_prefix=st.none() | st.sampled_from(["a", "ab", "b"]),
    agents=some_ids,
    changed_from=times,
    changed_before=times,
)
rows = st.fixed_dictionaries(
    {
        "thread_id": st.sampled_from(IDS),
        "agent_id": st.none() | st.sampled_from(IDS),
        "changed_at": st.none() | st.integers(0, 9),
    }
)


@given(narrowings, narrowings, rows)
def test_two_narrowings_hold_what_both_hold(one: Narrowing, other: Narrowing, row: dict[str, Any]) -> None:
    assert one.and_(other).has(row) == (one.has(row) and other.has(row))
    assert one.and_(ALL) == one


filters = st.one_of(
    st.builds(EqualTo, st.sampled_from([("thread_id",), ("agent_id",)]), st.sampled_from(IDS)),
    st.builds(In, st.sampled_from([("thread_id",), ("agent_id",)]), st.lists(st.sampled_from(IDS)).map(tuple)),
    st.builds(StringStartsWith, st.just(("thread_id",)), st.sampled_from(["", "a", "ab"])),
    st.builds(StringContains, st.just(("thread_id",)), st.just("b")),
    st.builds(
        lambda kind, us: kind(("changed_at",), EPOCH + timedelta(microseconds=us)),
        st.sampled_from([GreaterThan, LessThanOrEqual]),
        st.integers(0, 9),
    ),
    st.builds(lambda agent: Not(EqualTo(("agent_id",), agent)), st.sampled_from(IDS)),
)


def passes(one: Filter, row: dict[str, Any]) -> bool:
    """Whether Spark lets the row pass the filter."""
    if isinstance(one, Not):
        return row["agent_id"] is not None and not passes(one.child, row)
    assert isinstance(one, EqualTo | In | StringStartsWith | StringContains | GreaterThan | LessThanOrEqual)
    value = row[one.attribute[0]]
    if value is None:
        return False
    match one:
        case EqualTo():
            return bool(value == one.value)
        case In():
            return value in one.value
        case StringStartsWith():
            return bool(value.startswith(one.value))
        case StringContains():
            return one.value in value
    at = EPOCH + timedelta(microseconds=value)
    return bool(at > one.value) if isinstance(one, GreaterThan) else bool(at <= one.value)


@given(st.lists(filters, max_size=4), rows)
def test_no_row_is_left_out_that_passes_all_filters(pushed: list[Filter], row: dict[str, Any]) -> None:
    if all(passes(one, row) for one in pushed):
        assert narrowed_by(pushed, row).has(row)


def test_a_filter_of_a_column_that_the_table_lacks_says_nothing() -> None:
    assert narrowed_by([EqualTo(("agent_id",), "a"), EqualTo(("message", "role"), "user")], ["thread_id"]) == ALL


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


def test_an_id_with_a_nul_is_nobodys() -> None:
    """Postgres takes no such text: the read ended in its error, where Spark alone would have found no row."""
    assert narrowed_by([EqualTo(("thread_id",), "a\0")], ["thread_id"]) == Narrowing(threads=frozenset())
    assert narrowed_by([In(("thread_id",), ("a", "a\0"))], ["thread_id"]) == Narrowing(threads=frozenset({"a"}))
    assert narrowed_by([StringStartsWith(("thread_id",), "a\0")], ["thread_id"]) == Narrowing(threads=frozenset())
    with pytest.raises(ConfigError, match="threads"):
        ids({"threads": '["a\\u0000"]'}, "threads")


@pytest.mark.parametrize("seconds", [-1e11, -62_135_596_800.0, 253_402_300_799.0, float("nan")])
def test_a_time_that_python_would_not_take_from_spark_is_null(seconds: float) -> None:
    assert microseconds(seconds) is None
    assert microseconds(-62_135_400_000) == -62_135_400_000_000_000
