"""A stream's rows become checkpoints exactly once, whatever is repeated."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from pyspark.errors import PySparkException

from bufstore import ConfigError, InvalidRecord, Run, RunStatus
from bufstore.spark import SinkConfig, checkpoint_sink
from bufstore.spark.process_loop import loop
from bufstore.spark.sink.app_id import AppId
from bufstore.spark.sink.foreach_batch import _Rows
from bufstore.spark.sink.open_sink import open_sink
from bufstore.spark.sink.parts import Part
from bufstore.spark.sink.row_writer import Pass, write_rows
from bufstore.spark.sink.spark_ledger import Query
from conftest import Deployment
from helpers import eventually, fresh, query
from spark.jobs import SCHEMA, ended, frame, held, prepared, put, rows_of, stream, uncommit, write_options
from thorough import seldom


async def test_a_stream_arrives_once_and_a_batch_done_again_changes_nothing(
    spark: Any, deployment: Deployment, config: SinkConfig, tmp_path: Path
) -> None:
    await prepared(deployment)
    threads = [fresh() for _ in range(7)]
    for batch in range(3):
        put(tmp_path / "in", f"{batch}.json", rows_of(threads, range(4 * batch, 4 * batch + 4)))
    await ended(stream(spark, tmp_path / "in", tmp_path / "ck", checkpoint_sink(config)))
    assert await held(deployment, threads) == {t: list(range(12)) for t in threads}
    uncommit(tmp_path / "ck", 2)
    put(tmp_path / "in", "3.json", rows_of(threads, range(12, 14)))
    # Make it look as if the sink had died before it noted the batch as done.
    unfinished = f'UPDATE "{deployment.name}".spark_sources SET done = false, noted_batch = NULL'
    await query(deployment.servers.postgres.dsn, unfinished)
    await ended(stream(spark, tmp_path / "in", tmp_path / "ck", checkpoint_sink(config)))
    assert await held(deployment, threads) == {t: list(range(14)) for t in threads}
    # A source that gives other rows for the repeated batch.
    await query(deployment.servers.postgres.dsn, unfinished)
    uncommit(tmp_path / "ck", 3)
    put(tmp_path / "in", "3.json", rows_of(threads, range(12, 15)))
    with pytest.raises(Exception, match="begun before with other rows"):
        await ended(stream(spark, tmp_path / "in", tmp_path / "ck", checkpoint_sink(config)))
    assert await held(deployment, threads) == {t: list(range(14)) for t in threads}


async def test_a_new_checkpoint_folder_with_an_old_app_id_is_refused(
    spark: Any, deployment: Deployment, config: SinkConfig, tmp_path: Path
) -> None:
    await prepared(deployment)
    threads = [fresh()]
    put(tmp_path / "in", "0.json", rows_of(threads, range(2)))
    await ended(stream(spark, tmp_path / "in", tmp_path / "one", checkpoint_sink(config)))
    query = stream(spark, tmp_path / "in", tmp_path / "two", checkpoint_sink(config))
    with pytest.raises(Exception, match="app id of its own"):
        await ended(query)
    own = replace(config, app_id="another")
    await ended(stream(spark, tmp_path / "in", tmp_path / "three", checkpoint_sink(own)))
    assert await held(deployment, threads) == {threads[0]: [0, 1, 0, 1]}, "as something of its own, it is written again"


async def test_tasks_that_fail_after_they_wrote_are_done_again_without_effect(
    spark: Any, deployment: Deployment, config: SinkConfig
) -> None:
    await prepared(deployment)
    threads = [fresh() for _ in range(5)]
    df = frame(spark, rows_of(threads, range(6)))

    def failing_once(batches: Any) -> Any:
        from pyspark import TaskContext

        rows = [row for batch in batches for row in batch.to_pylist()]
        if rows:
            write_rows(config, 0, [rows])
        if TaskContext.get().attemptNumber() == 0:
            raise RuntimeError("after its own writes")
        yield from ()

    ordered = df.repartition(2, "thread_id").sortWithinPartitions("thread_id", "position", "run_id", "delta")
    await asyncio.to_thread(ordered.mapInArrow(failing_once, "n bigint").collect)
    await asyncio.to_thread(checkpoint_sink(config), df, 0)
    assert await held(deployment, threads) == {t: list(range(6)) for t in threads}


@pytest.mark.long
async def test_rows_without_positions_go_in_the_order_of_their_contents_once(
    spark: Any, deployment: Deployment, config: SinkConfig
) -> None:
    """The rows come in any order, and again after a driver died with some of the threads written."""
    await prepared(deployment)
    threads = [fresh() for _ in range(6)]
    rows = rows_of(threads, range(9, -1, -1)) + rows_of(threads[:2], range(3))  # some of the rows twice

    def shuffled(seed: int) -> Any:
        return frame(spark, Random(seed).sample(rows, len(rows))).drop("position").repartition(3)

    begun = _Rows(config, 0, shuffled(1))
    await asyncio.to_thread(AppId(config).begin, Query(), 0)
    await asyncio.to_thread(begun.write, Pass(only=dict.fromkeys(threads[:3], 0), judging=False, noting=True))
    write = checkpoint_sink(config)
    counts = []
    for seed in range(2, 4):
        await asyncio.to_thread(write, shuffled(seed), 0)
        assert write.last is not None
        counts.append((write.last.counts.written, write.last.counts.repeated))
        # Make it look as if the driver had died before it noted the batch as done.
        unfinished = f'UPDATE "{deployment.name}".spark_sources SET done = false, noted_batch = NULL'
        await query(deployment.servers.postgres.dsn, unfinished)
    assert counts == [(30, 36), (0, 66)]
    twice = [n for n in range(10) for _ in range(2 if n < 3 else 1)]
    assert await held(deployment, threads) == {t: twice if t in threads[:2] else list(range(10)) for t in threads}


async def test_bad_rows_end_the_batch_and_the_others_are_written(
    spark: Any, deployment: Deployment, config: SinkConfig
) -> None:
    await prepared(deployment)
    good, bad = fresh(), fresh()
    rows = [*rows_of([good], range(3)), {"thread_id": bad, "run_id": "r", "delta": ["{"], "position": 0}]
    df = frame(spark, rows)
    with pytest.raises(Exception, match="1 rows cannot become"):
        await asyncio.to_thread(checkpoint_sink(config), df, 0)
    assert await held(deployment, [good]) == {good: [0, 1, 2]}
    await asyncio.to_thread(checkpoint_sink(replace(config, bad_rows="quarantine")), df, 0)
    assert await held(deployment, [good]) == {good: [0, 1, 2]}


def test_rows_that_spark_does_not_forget_hide_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client of Connect has errors of its own, and may have no Py4J (`pyspark-client`)."""

    def unpersist() -> None:
        raise PySparkException("the session is closed")

    rows = _Rows.__new__(_Rows)
    monkeypatch.setattr(rows, "_owned", SimpleNamespace(unpersist=unpersist), raising=False)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "py4j.protocol", None)
        rows.forget()


#: A zone where 0001-01-01 of UTC is before Python's first year, and a name that Python does not know.
ZONES = ["America/Los_Angeles", "GMT-07:00"]


@pytest.mark.parametrize("zone", [ZONES[0], *seldom(*ZONES[1:])])
async def test_rows_that_python_cannot_read_stop_no_other(
    spark: Any, deployment: Deployment, config: SinkConfig, zone: str
) -> None:
    """Text that is not UTF-8, made by a cast of bytes, and extreme times as positions; in the sink and the format."""
    await prepared(deployment)
    threads = [fresh() for _ in range(4)]
    bad = threads[0]
    times = ["timestamp'0001-01-01 00:00:00Z'", "timestamp_micros(253402300800000000L)", "CAST(NULL AS timestamp)"]
    rows = [
        f"""('{t}', 'run-{t}', array('{{"n":1}}'), {at})""" for t, at in zip(threads, [times[2], *times], strict=True)
    ]
    rows += [
        f"""('{bad}', 'run-{bad}', array('1', CAST(X'7B226E223A22FF227D' AS string)), {times[1]})""",
        *(f"(CAST(X'{id_}' AS string), 'r', array('1'), {times[0]})" for id_ in ("FF", "FE")),
    ]
    sink = checkpoint_sink(replace(config, bad_rows="quarantine"))
    options = write_options(deployment, appId="format", batchId=0, badRows="quarantine")
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        df = spark.sql(f"SELECT * FROM VALUES {', '.join(rows)} AS t(thread_id, run_id, delta, position)")
        with pytest.raises(InvalidRecord, match="3 rows cannot become"):
            await asyncio.to_thread(checkpoint_sink(config), df, 0)
        assert await held(deployment, threads) == {t: [1] for t in threads}
        await asyncio.to_thread(sink, df, 0)
        df.write.format("bufstore").options(**options).mode("append").save()
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)
    assert sink.last is not None
    assert (sink.last.counts.repeated, sink.last.counts.bad) == (4, 3)
    assert await held(deployment, threads) == {t: [1, 1] for t in threads}
    asked = f'SELECT app_id, thread_id, row, cause FROM "{deployment.name}".spark_quarantine'
    found = await query(deployment.servers.postgres.dsn, asked)
    assert sorted((app, thread) for app, thread, *_ in found) == sorted(
        (app, thread) for app in (config.app_id, "format") for thread in (bad, r"\xff", r"\xfe")
    )
    (row, *_) = [json.loads(row) for _, thread, row, _ in found if thread == bad]
    assert row["delta"] == ["1", r'{"n":"\xff"}'], "which no replay takes for a message"
    assert row.keys() == {"thread_id", "run_id", "delta", "position", "bufstore_unreadable"}
    assert all("not UTF-8" in cause for *_, cause in found)


async def test_a_backfill_past_the_log_writes_each_row_once(
    spark: Any, deployment: Deployment, config: SinkConfig
) -> None:
    threads = [fresh() for _ in range(6)]
    async with deployment.store() as store:
        # A thread with entries in the log is written through the log in this mode, too.
        await store.checkpoint_append(threads[0], [{"n": -1}], Run(run_id="before", thread_id=threads[0]))
    past = replace(config, mode="postgres")
    for _ in range(2):
        await asyncio.to_thread(checkpoint_sink(past), frame(spark, rows_of(threads, range(5))), 0)
    await asyncio.to_thread(checkpoint_sink(past), frame(spark, rows_of(threads, range(5, 8))), 1)
    wanted = {t: [*([-1] if t == threads[0] else []), *range(8)] for t in threads}
    assert await held(deployment, threads) == wanted
    async with deployment.store() as store:
        assert len(await store.load_messages(threads[1]) or []) == 8
        # The next writer, through the log, builds on it, and the log path still knows the same source.
        await store.checkpoint_append(
            threads[1], [{"n": 8}], Run(run_id=f"run-{threads[1]}", thread_id=threads[1], status=RunStatus.DONE)
        )
        await store.force_flush_all()
        assert await store.quarantined() == 0
    await asyncio.to_thread(checkpoint_sink(config), frame(spark, rows_of(threads, range(5, 8))), 1)
    wanted[threads[1]].append(8)
    assert await held(deployment, threads) == wanted


async def test_what_goes_through_the_log_builds_on_what_went_past_it(
    deployment: Deployment, config: SinkConfig
) -> None:
    """A process writes a thread in one mode, then in the other."""
    await prepared(deployment)
    thread, past = fresh(), replace(config, app_id="past", mode="postgres")
    rows = rows_of([thread], range(4))
    rows[2]["delta"] = [json.dumps({"n": 2, "id": "known"})]  # only the log's checks can tell whether this id exists
    write_rows(config, 0, [rows[:1]])
    assert await held(deployment, [thread]) == {thread: [0]}
    log = loop().run(open_sink(config)).store.buffer.log

    async def forget() -> None:
        """Forget these entries, as a process does that remembers too many."""
        log._forgetting.forget(1 + await log.end(5.0))  # type: ignore[attr-defined]

    loop().run(forget())
    end = loop().run(log.end(5.0))
    write_rows(past, 0, [rows[1:2]])
    assert loop().run(log.end(5.0)) == end, "it went past the log"
    write_rows(past, 1, [rows[2:3]])
    write_rows(config, 1, [rows[3:]])
    assert await held(deployment, [thread]) == {thread: [0, 1, 2, 3]}
    async with deployment.store() as store:
        assert await store.quarantined() == 0


async def test_nothing_goes_past_what_waits_in_the_ledger(deployment: Deployment, config: SinkConfig) -> None:
    thread = fresh()
    run = Run(run_id=f"run-{thread}", thread_id=thread)
    dsn, schema = deployment.servers.postgres.dsn, f'"{deployment.name}"'
    async with deployment.store() as store, await psycopg.AsyncConnection.connect(dsn) as somebody:
        await store.checkpoint_append(thread, [{"n": 0}], run)
        await store.force_flush(thread)
        held_row = f"SELECT FROM {schema}.buffer_threads WHERE thread_id = %s FOR UPDATE"
        await somebody.execute(held_row, [thread])  # type: ignore[arg-type]
        await store.checkpoint_append(thread, [{"n": 1}], run)

        async def waits() -> bool:
            return await query(dsn, f"SELECT count(*) FROM {schema}.buffer_waiting") == [(1,)]

        await eventually(waits)
        await store.aclose()  # so that no flusher flushes it
    past = replace(config, mode="postgres")
    await asyncio.to_thread(write_rows, past, 0, [rows_of([fresh()], range(1))])  # opens everything
    log = loop().run(open_sink(past)).store.buffer.log
    log._forgetting.forget(1 + loop().run(log.end(5.0)))  # type: ignore[attr-defined]
    await asyncio.to_thread(write_rows, past, 1, [rows_of([thread], range(2, 3))])
    assert await held(deployment, [thread]) == {thread: [0, 1, 2]}
    async with deployment.store() as store:
        assert await store.quarantined() == 0


async def test_two_threads_of_a_backfill_with_one_run_id(deployment: Deployment, config: SinkConfig) -> None:
    """Postgres accepts the first and refuses the second. The log once took the second, and no flush could write it."""
    await prepared(deployment)
    first, second = threads = sorted(fresh() for _ in range(2))
    rows = [row | {"run_id": f"run-{first}"} for row in rows_of(threads, range(1))]
    past = replace(config, mode="postgres")
    found = await asyncio.to_thread(write_rows, past, 0, [rows])
    assert (found.counts.written, found.counts.bad) == (1, 1)
    assert "belongs to another thread" in found.counts.reasons[0]
    async with deployment.store() as store:
        await store.force_flush_all()
        assert await store.quarantined() == 0
        assert [await store.load_messages(t) is None for t in (first, second)].count(True) == 1


async def test_others_are_told_what_went_past_the_log(deployment: Deployment, config: SinkConfig) -> None:
    thread = fresh()
    run = Run(run_id=f"run-{thread}", thread_id=thread)
    async with deployment.store(flusher=False) as app:
        await app.checkpoint_append(thread, [{"n": 0}], run)
        assert await held(deployment, [thread]) == {thread: [0]}
        past = replace(config, mode="postgres")
        await asyncio.to_thread(write_rows, past, 0, [rows_of([fresh()], range(1))])  # opens everything
        end = await app.buffer.log.end(5.0)
        for log in (app.buffer.log, loop().run(open_sink(past)).store.buffer.log):
            log._forgetting.forget(1 + end)  # type: ignore[attr-defined]
        await asyncio.to_thread(write_rows, past, 1, [rows_of([thread], range(1, 2))])

        async def forgotten() -> bool:
            return app.buffer.appender.tip(thread) is None

        await eventually(forgotten)
        await app.checkpoint_append(thread, [{"n": 2}], run)
    assert await held(deployment, [thread]) == {thread: [0, 1, 2]}
    async with deployment.store() as store:
        assert await store.quarantined() == 0


async def test_a_source_that_gives_other_rows_for_a_batch_is_found_out(
    spark: Any, deployment: Deployment, config: SinkConfig
) -> None:
    await prepared(deployment)
    thread = fresh()
    write = checkpoint_sink(config)  # called as in a notebook, where an event loop already runs
    write(frame(spark, rows_of([thread], range(3))), 0)
    write(frame(spark, rows_of([thread], range(3))), 0)
    with pytest.raises(ConfigError, match="with other rows"):
        write(frame(spark, rows_of([thread], range(5))), 0)
    assert await held(deployment, [thread]) == {thread: [0, 1, 2]}, "nothing of it was written"


async def test_a_thread_stops_at_its_bad_row_and_goes_on_when_it_is_mended(
    spark: Any, deployment: Deployment, config: SinkConfig
) -> None:
    await prepared(deployment)
    thread = fresh()
    rows = rows_of([thread], range(5))
    good, rows[2]["delta"] = rows[2]["delta"], ["{"]
    with pytest.raises(InvalidRecord, match="2 rows behind them"):
        await asyncio.to_thread(checkpoint_sink(config), frame(spark, rows), 0)
    assert await held(deployment, [thread]) == {thread: [0, 1]}
    rows[2]["delta"] = good
    await asyncio.to_thread(checkpoint_sink(config), frame(spark, rows), 0)
    assert await held(deployment, [thread]) == {thread: [0, 1, 2, 3, 4]}, "what waited behind it is no repeat"


async def test_a_batch_that_was_not_finished_comes_again_with_the_same_rows_only(
    spark: Any, deployment: Deployment, config: SinkConfig
) -> None:
    """Spark does not name the query, and its tasks died after a write, so nothing of the batch was noted."""
    await prepared(deployment)
    thread = fresh()
    rows = rows_of([thread], range(3))
    app = AppId(config)
    frames = [frame(spark, rows), frame(spark, rows_of([thread], range(7, 10)))]
    begun = _Rows(config, 0, frames[0])
    await asyncio.to_thread(app.begin, Query(), 0)
    await asyncio.to_thread(begun.write, Pass(judging=False, noting=True, again=True))
    with pytest.raises(ConfigError, match="begun before with other rows"):
        await asyncio.to_thread(checkpoint_sink(config), frames[1], 0)
    await asyncio.to_thread(checkpoint_sink(config), frames[0], 0)
    assert await held(deployment, [thread]) == {thread: [0, 1, 2]}


@pytest.mark.long
async def test_of_a_batch_that_was_begun_in_part_nothing_is_written_when_that_part_has_changed(
    spark: Any, deployment: Deployment, config: SinkConfig
) -> None:
    """A driver dies after one task of three was done. The next is set to two tasks, and uses three for this batch."""
    await prepared(deployment)
    threads = [fresh() for _ in range(12)]
    rows = rows_of(threads, range(3))
    placed = dict(
        frame(spark, rows_of(threads, range(1))).selectExpr("thread_id", "pmod(hash(thread_id), 3)").collect()
    )
    begun = [t for t in threads if placed[t] == placed[threads[0]]]
    one = _Rows(replace(config, tasks=3), 0, frame(spark, rows_of(begun, range(3))))
    await asyncio.to_thread(AppId(config).begin, Query(), 0)
    await asyncio.to_thread(one.write, Pass(judging=False, noting=True, again=True))
    write = checkpoint_sink(replace(config, tasks=2))
    changed = [row | {"run_id": "another"} if row["thread_id"] == begun[0] else row for row in rows]
    with pytest.raises(ConfigError, match="begun before with other rows"):
        await asyncio.to_thread(write, frame(spark, changed), 0)
    nothing: dict[str, list[int]] = {t: [] for t in threads}
    assert await held(deployment, threads) == nothing | {t: [0, 1, 2] for t in begun}
    ((part, planned),) = await query(
        deployment.servers.postgres.dsn, f'SELECT part, planned FROM "{deployment.name}".spark_parts'
    )
    with pytest.raises(ConfigError, match="was begun before with other rows"):  # as when the rows change after it
        other = rows_of(begun, range(3, 6))
        await asyncio.to_thread(write_rows, config, 0, [other], Pass(noting=True), Part(part, 3, planned ^ 1))
    await asyncio.to_thread(write, frame(spark, rows[::-1]), 0)
    assert write.last is not None
    assert write.last.counts.repeated >= 3 * len(begun)
    assert await held(deployment, threads) == {t: [0, 1, 2] for t in threads}


async def test_a_batch_that_an_earlier_release_has_begun_comes_again_with_the_same_rows_only(
    spark: Any, deployment: Deployment, config: SinkConfig
) -> None:
    await prepared(deployment)
    thread = fresh()
    same = frame(spark, rows_of([thread], range(3)))
    await asyncio.to_thread(checkpoint_sink(config), same, 0)
    schema = f'"{deployment.name}"'
    for statement in (f"UPDATE {schema}.spark_sources SET done = false", f"DELETE FROM {schema}.spark_parts"):
        await query(deployment.servers.postgres.dsn, statement)
    with pytest.raises(ConfigError, match="begun before with other rows"):
        await asyncio.to_thread(checkpoint_sink(config), frame(spark, rows_of([thread], range(4))), 0)
    await asyncio.to_thread(checkpoint_sink(config), same, 0)
    assert await held(deployment, [thread]) == {thread: [0, 1, 2]}


async def test_a_batch_that_ended_with_bad_rows_goes_on_without_the_rows_in_front(
    spark: Any, deployment: Deployment, config: SinkConfig
) -> None:
    await prepared(deployment)
    thread, other = fresh(), fresh()
    rows = rows_of([thread, other], range(5))
    bad = [row | {"delta": ["{"]} if (row["thread_id"], row["position"]) == (thread, 2) else row for row in rows]
    with pytest.raises(InvalidRecord, match="2 rows behind them"):
        await asyncio.to_thread(checkpoint_sink(config), frame(spark, bad), 0)
    changed = [row | {"run_id": "another"} if row["position"] == 1 else row for row in rows]
    with pytest.raises(Exception, match="not as it was written"):
        await asyncio.to_thread(checkpoint_sink(config), frame(spark, changed), 0)
    later = [row for row in rows if row["position"] >= 2]
    await asyncio.to_thread(checkpoint_sink(config), frame(spark, later), 0)
    assert await held(deployment, [thread, other]) == {thread: list(range(5)), other: list(range(5))}


async def test_a_parent_and_its_children_in_one_batch(spark: Any, deployment: Deployment, config: SinkConfig) -> None:
    """The tasks and the order of parents and children do not matter."""
    await prepared(deployment)
    parents, lost = [fresh() for _ in range(20)], fresh()
    rows = [(p, f"run-{p}", ['{"n": 0}'], 0, None) for p in parents]
    rows += [(f"child-of-{p}", f"run-of-{p}", [f'{{"n": {n}}}'], n, p) for p in parents for n in range(2)]
    rows += [(f"child-of-child-of-{p}", f"run-of-of-{p}", ['{"n": 0}'], 0, f"child-of-{p}") for p in parents]
    rows += [(lost, "run-lost", ['{"n": 0}'], 0, "nobody")]
    df = spark.createDataFrame(rows, f"{SCHEMA}, parent_thread_id string")
    quarantining = replace(config, bad_rows="quarantine", tasks=2)
    write = checkpoint_sink(quarantining)
    await asyncio.to_thread(write, df, 0)
    assert write.last is not None
    assert (write.last.counts.written, write.last.counts.repeated, write.last.counts.bad) == (80, 0, 1)
    children = [f"child-of-{p}" for p in parents]
    assert await held(deployment, [*children, lost]) == {c: [0, 1] for c in children} | {lost: []}


@pytest.mark.long  # forty seconds
async def test_a_thread_is_deleted_behind_its_children_whichever_task_has_them(
    spark: Any, deployment: Deployment, config: SinkConfig
) -> None:
    """Families of three generations, each with threads in both tasks; one of them keeps its last child."""
    await prepared(deployment)
    names = [fresh() for _ in range(60)]
    schema = f"{SCHEMA}, edit string"
    rows = [(t, "", None, 0, '{"delete_thread": "reject"}') for t in names]
    parts = spark.createDataFrame(rows, schema).selectExpr("thread_id", "pmod(hash(thread_id), 2)").collect()
    ones, others = ([t for t, part in parts if part == wanted] for wanted in (0, 1))
    families = [(a.pop(), b.pop(), a.pop()) for a, b in ((ones, others), (others, ones)) * 2]
    kept = families[-1]
    gone = [t for family in families[:-1] for t in family]
    async with deployment.store() as store:
        for family in families:
            for parent, child in pairwise((None, *family)):
                assert child is not None
                await store.checkpoint(child, [], Run(run_id=fresh("run"), thread_id=child, parent_thread_id=parent))
        deleted = [row for row in rows if row[0] in (*gone, *kept[:-1])]
        write = checkpoint_sink(replace(config, bad_rows="quarantine", tasks=2))
        await asyncio.to_thread(write, spark.createDataFrame(deleted, schema), 0)
        assert write.last is not None
        counts = write.last.counts
        assert (counts.written, counts.repeated, counts.bad) == (9, 0, 2), counts.reasons
        assert all("has children" in reason for reason in counts.reasons)
        assert [t for family in families for t in family if await store.load_thread(t) is not None] == list(kept)
