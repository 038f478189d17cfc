"""``format("bufstore")``, the declarative form of the sink, keeps the same promise."""

from __future__ import annotations

import asyncio
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyarrow
import pytest
from pyspark.sql.types import ArrayType, StringType, StructType

from bufstore import ConfigError
from bufstore.spark import SinkConfig
from bufstore.spark.sink.bufstore_format import _BatchWriter
from conftest import Deployment
from helpers import fresh, query
from spark.jobs import SCHEMA, ended, frame, held, prepared, put, rows_of, uncommit, write_options


def save(df: Any, options: dict[str, str]) -> None:
    # Only in the thread that has the session does Spark find Python data sources for writing.
    df.write.format("bufstore").options(**options).mode("append").save()


def streamed(spark: Any, folder: Path, **more: str) -> Any:
    df = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).json(str(folder / "in"))
    return (
        df.writeStream.format("bufstore")
        .options(**more)
        .option("checkpointLocation", str(folder / "ck"))
        .trigger(availableNow=True)
        .start()
    )


@pytest.mark.long  # thirty seconds
async def test_a_numbered_batch_is_written_once(spark: Any, deployment: Deployment) -> None:
    await prepared(deployment)
    threads = [fresh() for _ in range(4)]
    df = frame(spark, rows_of(threads, range(5))).repartition(3)  # a thread's rows are in several tasks
    for _ in range(2):
        save(df, write_options(deployment, appId="nightly", batchId=7))
    assert await held(deployment, threads) == {t: list(range(5)) for t in threads}
    other = frame(spark, rows_of(threads, range(9)))
    with pytest.raises(Exception, match="was done before with other rows"):
        save(other, write_options(deployment, appId="nightly", batchId=7))
    with pytest.raises(Exception, match="an app id of its own"):
        save(df, write_options(deployment, appId="nightly", batchId=6))
    save(df, write_options(deployment))
    assert (await held(deployment, threads))[threads[0]] == [*range(5), *range(5)], "without a number it is new"


@pytest.mark.parametrize("batch_id", [3, None])
async def test_a_numbered_batch_that_comes_again_without_rows_is_refused(
    config: SinkConfig, deployment: Deployment, batch_id: int | None
) -> None:
    """Regression: a source that cannot be replayed was not noticed when it gave no rows at all."""
    await prepared(deployment)
    schema = StructType().add("thread_id", "string").add("run_id", "string").add("delta", ArrayType(StringType()))
    writer, thread = _BatchWriter(config, schema, batch_id), fresh()

    async def committed(*rows: dict[str, Any]) -> None:
        await asyncio.to_thread(writer.commit, [writer.write(pyarrow.RecordBatch.from_pylist([row]) for row in rows)])

    await committed({"thread_id": thread, "run_id": f"run-{thread}", "delta": ['{"n": 0}']})
    with pytest.raises(ConfigError, match="with other rows") if batch_id is not None else nullcontext():
        await committed()
    assert await held(deployment, [thread]) == {thread: [0]}


@pytest.mark.long  # half a minute
async def test_rows_without_a_thread_do_not_hide_each_other(spark: Any, deployment: Deployment) -> None:
    """A null id and an empty id name no thread, and are kept as different rows."""
    await prepared(deployment)
    rows = rows_of([None, ""], range(3))  # type: ignore[list-item]
    save(frame(spark, rows), write_options(deployment, appId="nobody", batchId=0, badRows="quarantine"))
    kept = await query(deployment.servers.postgres.dsn, f'SELECT row FROM "{deployment.name}".spark_quarantine')
    rejected = [json.loads(row) for (row,) in kept]
    found = sorted((row["thread_id"] or "", row["position"], row["thread_id"] is None) for row in rejected)
    assert found == [("", n, is_null) for n in range(3) for is_null in (False, True)]


@pytest.mark.long  # several streams
async def test_a_stream_whose_commit_fails_is_gone_on_with(spark: Any, deployment: Deployment, tmp_path: Path) -> None:
    await prepared(deployment)
    good, bad = fresh(), fresh()
    put(tmp_path / "in", "0.json", rows_of([good], range(3)))
    rows = rows_of([good], range(3, 6)) + rows_of([bad], range(3))
    rows[4]["delta"] = ["{"]
    put(tmp_path / "in", "1.json", rows)
    given = write_options(deployment, appId="stream")
    with pytest.raises(Exception, match=r"1 rows cannot become checkpoints \(1 rows behind them"):
        await ended(streamed(spark, tmp_path, **given))
    assert await held(deployment, [good, bad]) == {good: list(range(6)), bad: [0]}
    await ended(streamed(spark, tmp_path, **given, badRows="quarantine"))
    assert await held(deployment, [good, bad]) == {good: list(range(6)), bad: [0, 2]}
    parked = await query(
        deployment.servers.postgres.dsn, f'SELECT thread_id, row FROM "{deployment.name}".spark_quarantine'
    )
    assert [(t, json.loads(row)["position"]) for t, row in parked] == [(bad, 1)]
    uncommit(tmp_path / "ck", 1)
    await ended(streamed(spark, tmp_path, **given, badRows="quarantine"))
    assert await held(deployment, [good, bad]) == {good: list(range(6)), bad: [0, 2]}


async def test_what_cannot_be_is_said_at_once(spark: Any, deployment: Deployment) -> None:
    # Imported here, because a Spark without Python data sources runs other tests of this file.
    from bufstore.spark.sink.bufstore_format import BufstoreFormat

    await prepared(deployment)
    df = frame(spark, rows_of([fresh()], range(1)))
    for wrong, match in (
        ({"appId": "a"}, "go together"),
        ({"batchId": "x", "appId": "a"}, "number"),
        ({"surprise": "1"}, "surprise"),
        ({"badRows": "maybe"}, "bad_rows"),
        ({"outageTimeout": "an hour"}, "outageTimeout must be a number of seconds"),
        ({"outageTimeout": "-1"}, "outageTimeout must be a number of seconds, at least 0"),
        ({"postgres": "host=h"}, "one of the options postgres and postgresUrl"),
    ):
        with pytest.raises(ConfigError, match=match):  # as Spark calls it
            BufstoreFormat(write_options(deployment, **wrong)).writer(df.schema, False)
    with pytest.raises(Exception, match="thread_id"):
        save(df.drop("thread_id"), write_options(deployment))


@pytest.mark.parametrize("kind", ["timestamp", "timestamp_ntz"])
async def test_rows_go_in_the_order_of_their_times(spark: Any, deployment: Deployment, kind: str) -> None:
    await prepared(deployment)
    threads = [fresh() for _ in range(2)]
    df = frame(spark, rows_of(threads, range(3, 0, -1)))
    save(df.withColumn("position", df.position.cast("timestamp").cast(kind)), write_options(deployment))
    assert await held(deployment, threads) == {t: [1, 2, 3] for t in threads}


async def test_a_plan_of_a_write_shows_no_login(spark: Any, deployment: Deployment) -> None:
    """Spark shows a batch's options in its logical plan: in its UI on request, to listeners, and in its logs."""
    from bufstore.spark.sink.bufstore_format import BufstoreFormat

    await prepared(deployment)
    df, given = frame(spark, rows_of([fresh()], range(1))), write_options(deployment)
    logins = [urlsplit(given[name]).password or "" for name in ("natsUrl", "postgresUrl")]
    for shown, url in (("nats", "natsUrl"), ("postgres", "postgresUrl")):
        open_ = given | {shown: given[url]}
        del open_[url]
        with pytest.raises(ConfigError, match="which plans would show") as refused:
            BufstoreFormat(open_).writer(df.schema, False)
        assert not [login for login in logins if login in str(refused.value)]
    spark.conf.set("spark.sql.ui.explainMode", "extended")
    try:
        save(df, given)
    finally:
        spark.conf.unset("spark.sql.ui.explainMode")
    spark.sparkContext._jsc.sc().listenerBus().waitUntilEmpty()
    executions = spark._jsparkSession.sharedState().statusStore().executionsList()
    plans = [executions.apply(n).physicalPlanDescription() for n in range(executions.size())]
    ours = [plan for plan in plans if f"stream={deployment.log.stream}" in plan]
    assert len(ours) == 1
    assert [login for login in logins if login in ours[0]] == []
