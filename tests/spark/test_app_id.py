"""Which query may write a batch under an app id; without Spark."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from bufstore import ConfigError
from bufstore.spark import SinkConfig
from bufstore.spark.sink import app_id
from bufstore.spark.sink.app_id import AppId, check_rows
from bufstore.spark.sink.parts import Part
from bufstore.spark.sink.row_writer import RowCounts
from bufstore.spark.sink.spark_ledger import Holder, Query
from helpers import fresh


async def begin(config: SinkConfig, run: str, batch_id: int) -> AppId:
    app = AppId(config)
    await asyncio.to_thread(app.begin, Query("query", run), batch_id)
    return app


@pytest.fixture(autouse=True)
def _ends_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ends is noted though this process stands still for a moment; a job would go on without its note."""
    monkeypatch.setattr(app_id, "_SHORT_S", 8.0)


async def test_an_app_id_is_not_renamed_in_the_middle_of_a_batch(config: SinkConfig) -> None:
    old, new = replace(config, app_id=fresh("old")), replace(config, app_id=fresh("new"))
    for batch_id in range(3):
        app = await begin(old, "run 1", batch_id)
    await asyncio.to_thread(app.done, 2, 1, RowCounts())
    with pytest.raises(ConfigError, match="its rows would be written again"):
        await begin(new, "run 2", 2)  # the sink has finished it, and Spark has not
    await begin(old, "run 2", 2)
    await begin(new, "run 3", 3)


async def test_a_query_may_have_two_sinks(config: SinkConfig) -> None:
    one, two = replace(config, app_id=fresh("one")), replace(config, app_id=fresh("two"))
    for run, batch_id in (("run 1", 0), ("run 1", 1), ("run 2", 1), ("run 2", 2)):
        await begin(one, run, batch_id)
        await begin(two, run, batch_id)


async def test_a_batch_that_ends_is_noted_though_its_beginning_was_not(config: SinkConfig) -> None:
    """The batch began while Postgres was away."""
    app = await begin(config, "run 1", 0)
    await asyncio.to_thread(app.stopped, 3, b"settled")
    later = AppId(config)
    stopped = await asyncio.to_thread(later.begin, Query("query", "run 2"), 3)
    assert (stopped.batch_id, stopped.settled, stopped.done) == (3, b"settled", False)
    await asyncio.to_thread(later.done, 5, 1, RowCounts())
    done = await asyncio.to_thread(AppId(config).begin, Query("query", "run 3"), 5)
    assert (done.batch_id, done.planned, done.done, done.settled) == (5, 1, True, None)
    with pytest.raises(ConfigError, match="has written batch 5"):
        await begin(config, "run 4", 3)


async def test_who_has_put_back_an_older_checkpoint_folder_is_not_told_to_choose_another_app_id(
    config: SinkConfig,
) -> None:
    """Regression: it was the advice, with which the batches in between were written twice, or refused once more."""
    old, new = replace(config, app_id=fresh("old")), replace(config, app_id=fresh("new"))
    await begin(old, "run 1", 5)
    for one in old, new:
        with pytest.raises(ConfigError, match=r"older than that.*Continue with the newest folder"):
            await begin(one, "run 2", 3)
    for done in True, False:
        part = Holder("query", 5, planned=1 if done else None, done=done, parts=[Part(0, 1, 1)])
        for holder, says in ((part, "with a new checkpoint folder"), (part._replace(query_id=""), "of its own")):
            with pytest.raises(ConfigError, match=says) as refused:
                check_rows(holder, "old", {0: 2}, 1)
            assert ("give it an app id" in str(refused.value)) == (not holder.query_id)


async def test_what_is_noted_late_takes_nothing_from_a_later_batch_or_another_query(config: SinkConfig) -> None:
    late = await begin(config, "run 1", 0)
    now = await begin(config, "run 2", 2)
    await asyncio.to_thread(now.done, 2, 7, RowCounts())
    await asyncio.to_thread(late.done, 0, 1, RowCounts())
    await asyncio.to_thread(late.stopped, 0, b"settled")
    held = await asyncio.to_thread(AppId(config).begin, Query("query", "run 3"), 2)
    assert (held.batch_id, held.planned, held.done, held.settled) == (2, 7, True, None)
    other = AppId(config)
    other._query = Query("other query", "run 1")
    await asyncio.to_thread(other.done, 9, 1, RowCounts())
    held = await asyncio.to_thread(AppId(config).begin, Query("query", "run 4"), 2)
    assert (held.query_id, held.batch_id) == ("query", 2)


async def test_an_earlier_run_that_ends_late_takes_nothing_from_a_later_one(config: SinkConfig) -> None:
    late = await begin(config, "run 1", 5)
    now = await begin(config, "run 2", 5)
    await asyncio.to_thread(now.done, 5, 7, RowCounts())
    await asyncio.to_thread(late.stopped, 5, b"settled")
    held = await asyncio.to_thread(AppId(config).begin, Query("query", "run 2"), 5)
    assert (held.planned, held.done, held.settled) == (7, True, None), "what is done stays done"
    await asyncio.to_thread(late.done, 6, 1, RowCounts())  # the earlier run went on while Postgres was away
    await asyncio.to_thread(now.begin, Query("query", "run 2"), 6)
    held = await asyncio.to_thread(AppId(config).begin, Query("query", "run 2"), 6)
    assert (held.planned, held.done) == (None, False)
    await asyncio.to_thread(late.done, 6, 1, RowCounts())
    await begin(replace(config, app_id=fresh("second sink")), "run 2", 6)  # a second sink of one run is no renamed one
