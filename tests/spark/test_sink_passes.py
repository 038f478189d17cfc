"""What the sink counts of rows that wait for a parent, which it writes in passes of their own; without Spark."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from bufstore import InvalidRecord
from bufstore.spark import SinkConfig
from bufstore.spark.sink.app_id import AppId
from bufstore.spark.sink.batch import write_batch
from bufstore.spark.sink.bufstore_format import _InMemory
from bufstore.spark.sink.row_writer import RowCounts
from bufstore.spark.sink.spark_ledger import Query
from conftest import Deployment
from helpers import fresh, query
from spark.jobs import held, prepared

#: Portions of one row, and a portion that has all rows of the child and not the parent's, which is larger than that.
ONE_ROW, ALL_BUT_ONE = 1, 4000


async def batch(config: SinkConfig, rows: list[dict[str, Any]]) -> RowCounts:
    """Write the rows as batch 0 of the same query, in a new process."""
    app, of = AppId(config), Query("query", "run")
    return (await asyncio.to_thread(write_batch, config, app, of, 0, _InMemory(config, 0, rows))).counts


def family(*, bad: bool) -> tuple[str, str, list[dict[str, Any]]]:
    """Return a child, its parent, which comes last, and their rows: the child's last two wait for the parent."""
    child, parent = fresh("a"), fresh("z")

    def row(thread: str, n: int, message: Any, **more: Any) -> dict[str, Any]:
        delta = [json.dumps({"n": n} | message)]
        return {"thread_id": thread, "run_id": f"run-{thread}", "delta": delta, "position": n} | more

    rows = [row(child, n, {}, parent_thread_id=parent if n >= 2 else None) for n in range(4)]
    if bad:
        rows[0]["delta"] = ["{"]
    return child, parent, [*rows, row(parent, 0, {"text": "x" * ALL_BUT_ONE})]


@pytest.mark.parametrize("in_flight_bytes", [ONE_ROW, ALL_BUT_ONE])
@pytest.mark.parametrize("bad", [True, False])
async def test_each_row_of_a_thread_that_waits_for_its_parent_is_counted_once(
    deployment: Deployment, config: SinkConfig, *, bad: bool, in_flight_bytes: int
) -> None:
    """Regression: its earlier rows counted as repeated, too, and one that was set aside did not count as bad."""
    await prepared(deployment)
    child, parent, rows = family(bad=bad)
    found = await batch(replace(config, bad_rows="quarantine", in_flight_bytes=in_flight_bytes), rows)
    assert (found.written, found.repeated, found.bad, len(found.reasons)) == (5 - bad, 0, bad, bad)
    noted = f'SELECT rows, repeated, bad FROM "{deployment.name}".spark_sources'
    assert await query(deployment.servers.postgres.dsn, noted) == [(5, 0, bad)]
    assert await held(deployment, [child, parent]) == {child: list(range(bad, 4)), parent: [0]}


@pytest.mark.parametrize("in_flight_bytes", [ONE_ROW, ALL_BUT_ONE])
async def test_the_rows_that_an_earlier_attempt_has_written_are_counted_once(
    deployment: Deployment, config: SinkConfig, in_flight_bytes: int
) -> None:
    """Regression: those of a thread that waits for its parent were counted in each pass."""
    await prepared(deployment)
    config = replace(config, in_flight_bytes=in_flight_bytes)
    child, parent, rows = family(bad=False)
    wrong = [row | {"delta": ["{"]} if n >= 2 else row for n, row in enumerate(rows)]
    with pytest.raises(InvalidRecord, match=r"2 rows cannot become checkpoints \(1 rows behind them"):
        await batch(config, wrong)
    found = await batch(config, rows)
    assert (found.written, found.repeated, found.bad) == (3, 2, 0)
    assert await held(deployment, [child, parent]) == {child: list(range(4)), parent: [0]}
