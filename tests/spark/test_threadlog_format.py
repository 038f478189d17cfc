"""The log as a source: each entry once, whatever is read again, and every loss is noticed."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nats
import pytest
from pyspark.sql import functions as F
from pyspark.sql.streaming.datasource import ReadAllAvailable

from bufstore import Consistency, Run, RunStatus
from bufstore.buffer.places import group_of
from bufstore.buffer.subjects import Subjects
from bufstore.spark import DataLoss
from bufstore.spark.progress import ProgressListener, QueryProgress
from bufstore.spark.source.threadlog_format import ThreadLogSource
from conftest import Deployment
from helpers import fresh
from spark.jobs import delete, ended, prepared, purge, read_options, rows_of, uncommit, write_together


async def written(deployment: Deployment, threads: list[str], steps: range) -> None:
    async with deployment.store(flusher=False) as store:
        for row in rows_of(threads, steps):
            run = Run(run_id=row["run_id"], thread_id=row["thread_id"], agent_id="agent", status=RunStatus.RUNNING)
            await store.checkpoint_append(row["thread_id"], [json.loads(m) for m in row["delta"]], run)


def read(spark: Any, deployment: Deployment, **more: Any) -> Any:
    return spark.read.format("threadlog").options(**read_options(deployment, **more)).load()


async def collected(df: Any) -> list[Any]:
    found: list[Any] = await asyncio.to_thread(df.collect)
    return found


def steps_of(rows: list[Any]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for row in sorted(rows, key=lambda row: row.position):
        found.setdefault(row.thread_id, []).extend(json.loads(m)["n"] for m in row.messages)
    return found


async def test_entries_come_decoded_and_each_once(spark: Any, either: Deployment) -> None:
    threads = [fresh() for _ in range(5)]
    await written(either, threads, range(6))
    big = fresh()
    async with either.store(flusher=False) as store:
        # An oversize entry takes several messages, and a range may begin or end among them.
        await store.checkpoint(big, [{"n": 0, "text": "x" * 3_000_000}], Run(run_id="big", thread_id=big))
    rows = await collected(read(spark, either, numPartitions=7))
    assert steps_of(rows) == {t: list(range(6)) for t in threads} | {big: [0]}
    row = next(r for r in rows if r.thread_id == threads[0] and r.version == 6)
    assert (row.kind, row.run_id, row.keep, row.cause, row.body) == ("checkpoint", f"run-{threads[0]}", 5, None, None)
    assert json.loads(row.run)["agent_id"] == "agent"
    few = await collected(read(spark, either, columns="thread_id, position", threads=json.dumps(threads[:1])))
    assert [(r.thread_id, len(r)) for r in few] == [(threads[0], 2)] * 6
    partition = Subjects(either.name, either.log.partitions).partition(threads[0])
    few = await collected(read(spark, either, partitions=partition))
    assert [r.position for r in few] == [r.position for r in rows if r.partition == partition]
    assert len(await collected(read(spark, either, startingPosition=rows[0].position + 1))) == 30


async def test_what_is_no_entry_is_a_row_with_its_cause(spark: Any, deployment: Deployment) -> None:
    await written(deployment, [fresh()], range(1))
    client = await nats.connect(deployment.servers.nats.url)
    strange = f"{deployment.name}.groups.0"
    for _ in range(2):
        await client.jetstream(timeout=10).publish(strange, b"\xff")
    await client.close()
    rows = await collected(read(spark, deployment, numPartitions=1))
    none = (False, bytearray(b"\xff"))
    assert [(r.cause is None, r.body) for r in rows] == [(True, None), none, none]
    raw = await collected(read(spark, deployment, form="messages", numPartitions=1))
    assert [r.subject for r in raw][1:] == [strange] * 2
    assert raw[0].header is not None


@pytest.mark.long
async def test_a_group_is_read_whole_and_a_position_may_be_within_it(
    spark: Any, deployment: Deployment, tmp_path: Path
) -> None:
    threads = [fresh() for _ in range(40)]
    await write_together(deployment, threads, range(3))
    groups = await collected(read(spark, deployment, form="messages"))
    assert len(groups) < 60, "several entries share a group"
    rows = sorted(await collected(read(spark, deployment, numPartitions=5)), key=lambda row: row.position)
    assert steps_of(rows) == {t: [0, 1, 2] for t in threads}
    assert {group_of(r.position) for r in rows} == {r.position for r in groups}
    first, last = rows[50].position, rows[90].position
    some = await collected(read(spark, deployment, startingPosition=first, endingPosition=last, numPartitions=3))
    assert sorted(r.position for r in some) == [r.position for r in rows[50:90]]
    # A micro-batch ends at a group's end, however small its limit.
    options = {"startingPosition": first, "maxMessagesPerTrigger": 1}
    running = query(spark, deployment, tmp_path, **options)
    await ended(running)
    kept = await collected(spark.read.parquet(str(tmp_path / "out")))
    assert sorted(r.position for r in kept) == [r.position for r in rows[50:]]
    batches = [p for p in running.recentProgress if p["numInputRows"]]
    assert len(batches) == len({group_of(r.position) for r in rows[50:]})


@pytest.mark.long
async def test_a_large_entry_of_which_a_part_is_gone(spark: Any, deployment: Deployment, tmp_path: Path) -> None:
    """The entry's parts are stored before its group, on another subject."""
    deployment.verified = False
    big, small = fresh(), fresh()
    await written(deployment, [small], range(1))
    await ended(query(spark, deployment, tmp_path, startingPosition="earliest"))
    async with deployment.store(flusher=False) as store:
        await store.checkpoint(big, [{"n": 0, "text": "x" * 3_000_000}], Run(run_id="big", thread_id=big))
    await written(deployment, [small], range(1, 2))
    await ended(query(spark, deployment, tmp_path, maxMessagesPerTrigger=1, maxBytesPerTrigger=1_000_000))
    rows = await collected(spark.read.parquet(str(tmp_path / "out")))
    assert steps_of(rows) == {small: [0, 1], big: [0]}, "also where each part is in a micro-batch of its own"
    parts = [r.position for r in await collected(read(spark, deployment, form="messages")) if "parts" in r.subject]
    at = {"startingPosition": next(r.position for r in rows if r.thread_id == big), "numPartitions": 1}
    assert steps_of(await collected(read(spark, deployment, **at))) == {big: [0], small: [1]}
    await delete(deployment, min(parts))
    with pytest.raises(Exception, match=r"purged before entry \d+ was read"):
        await collected(read(spark, deployment, **at))
    (torn, _) = await collected(read(spark, deployment, failOnDataLoss=False, **at))
    assert (torn.thread_id, torn.cause) == (big, f"part {min(parts)} of a large entry is missing")
    # Imitate an interrupted erasure, which announces what it removes, and then removes the parts first.
    client = await nats.connect(deployment.servers.nats.url)
    await client.jetstream(timeout=10).publish(f"{deployment.name}.erased.0", str(min(parts)).encode())
    await client.close()
    assert steps_of(await collected(read(spark, deployment))) == {small: [0, 1]}, "what is left of it is no entry"


async def test_a_range_of_time(spark: Any, deployment: Deployment) -> None:
    thread = fresh()
    await written(deployment, [thread], range(3))
    rows = await collected(read(spark, deployment))
    second = next(r for r in rows if r.version == 2)
    at = second.stored_at.isoformat() + "+00:00"
    later = await collected(read(spark, deployment, startingTimestamp=at))
    assert [r.version for r in sorted(later, key=lambda r: r.version)] == [2, 3]
    assert [r.version for r in await collected(read(spark, deployment, endingTimestamp=at))] == [1]
    # nats-server counts nanoseconds in 64 bits, and a time that they do not hold wraps.
    for later in ("9999-12-31T23:59:59Z", "2300-01-01T00:00:00Z"):
        assert len(await collected(read(spark, deployment, endingTimestamp=later))) == 3
        assert await collected(read(spark, deployment, startingTimestamp=later)) == []
    for earlier in ("0001-01-01T00:00:00Z", "1600-01-01T00:00:00Z"):
        assert len(await collected(read(spark, deployment, startingTimestamp=earlier))) == 3
        assert await collected(read(spark, deployment, endingTimestamp=earlier)) == []


async def test_a_stream_takes_no_end(spark: Any, deployment: Deployment, tmp_path: Path) -> None:
    await prepared(deployment)
    with pytest.raises(Exception, match="for a batch"):
        await ended(query(spark, deployment, tmp_path, endingPosition=5))


def query(spark: Any, deployment: Deployment, folder: Path, **more: Any) -> Any:
    df = spark.readStream.format("threadlog").options(**read_options(deployment, **more)).load()
    return (
        df.writeStream.format("parquet")
        .option("path", str(folder / "out"))
        .option("checkpointLocation", str(folder / "ck"))
        .trigger(availableNow=True)
        .start()
    )


async def test_a_stream_goes_on_where_it_stopped(spark: Any, either: Deployment, tmp_path: Path) -> None:
    threads = [fresh() for _ in range(3)]
    await written(either, threads, range(10))
    options = {"startingPosition": "earliest", "maxMessagesPerTrigger": 8}
    first = query(spark, either, tmp_path, **options)
    await ended(first)
    assert len([p for p in first.recentProgress if p["numInputRows"]]) == 4, "30 entries, 8 at a time"
    await written(either, threads, range(10, 12))
    await ended(query(spark, either, tmp_path, startingPosition="earliest", maxBytesPerTrigger=300))
    rows = await collected(spark.read.parquet(str(tmp_path / "out")))
    assert steps_of(rows) == {t: list(range(12)) for t in threads}


async def test_a_first_batch_that_comes_again_is_the_same_wherever_the_query_would_begin_by_then(
    spark: Any, deployment: Deployment, tmp_path: Path
) -> None:
    """Regression: Spark does not note where a query began, so what was purged, or is before another start, was lost."""
    deployment.verified = False
    thread = fresh()
    await written(deployment, [thread], range(3))
    await ended(query(spark, deployment, tmp_path, startingPosition="earliest"))

    def forget_the_first_batch() -> None:
        """As if the driver had been killed before Spark noted the batch."""
        shutil.rmtree(tmp_path / "out")
        uncommit(tmp_path / "ck", 0)

    forget_the_first_batch()
    await ended(query(spark, deployment, tmp_path, startingPosition="latest"))
    assert steps_of(await collected(spark.read.parquet(str(tmp_path / "out")))) == {thread: [0, 1, 2]}
    at_end = tmp_path / "at end"
    await ended(query(spark, deployment, at_end, startingPosition="latest"))
    shutil.rmtree(at_end / "out")
    uncommit(at_end / "ck", 0)
    again = query(spark, deployment, at_end, startingPosition="earliest")
    await ended(again)
    assert [p["numInputRows"] for p in again.recentProgress if p["numInputRows"]] == []
    forget_the_first_batch()
    await purge(deployment, 3)
    with pytest.raises(Exception, match="the log begins at message 3, but the reader has only reached 1"):
        await ended(query(spark, deployment, tmp_path, startingPosition="earliest"))


@pytest.mark.long
async def test_a_batch_begins_at_the_first_entry_and_a_stream_behind_the_last(
    spark: Any, deployment: Deployment, tmp_path: Path
) -> None:
    """The reads name no start. A stream that has started goes on from there, even if the log was empty then."""
    thread = fresh()
    await written(deployment, [thread], range(3))
    assert steps_of(await collected(read(spark, deployment))) == {thread: [0, 1, 2]}
    await ended(query(spark, deployment, tmp_path))
    await written(deployment, [thread], range(3, 5))
    await ended(query(spark, deployment, tmp_path))
    assert steps_of(await collected(spark.read.parquet(str(tmp_path / "out")))) == {thread: [3, 4]}


@pytest.mark.long  # several queries
async def test_what_was_purged_unread_fails_the_query_unless_it_may_be_lost(
    spark: Any, deployment: Deployment, tmp_path: Path
) -> None:
    deployment.verified = False
    threads = [fresh() for _ in range(4)]
    await written(deployment, threads, range(5))
    await ended(query(spark, deployment, tmp_path, startingPosition="earliest", maxMessagesPerTrigger=100))
    await written(deployment, threads, range(5, 10))
    rows = await collected(read(spark, deployment))
    last = max(group_of(r.position) for r in rows)
    await delete(deployment, last - 8)
    with pytest.raises(Exception, match="was purged before it was read"):
        await ended(query(spark, deployment, tmp_path))
    await purge(deployment, last - 2)
    with pytest.raises(Exception, match="the log begins at message"):
        await ended(query(spark, deployment, tmp_path))
    await ended(query(spark, deployment, tmp_path, failOnDataLoss=False))
    kept = await collected(spark.read.parquet(str(tmp_path / "out")))
    assert len(kept) == 20 + 3


@pytest.mark.long  # its own servers
async def test_what_proves_who_leads_is_no_loss(spark: Any, replicated: Deployment, tmp_path: Path) -> None:
    """Strong reads make the leader prove that it leads. Then a partition gets its first message."""
    subjects = Subjects(replicated.name, replicated.log.partitions)
    early, late = (next(t for t in iter(fresh, None) if subjects.partition(t) == p) for p in (0, 1))
    await written(replicated, [early], range(2))
    await ended(query(spark, replicated, tmp_path, startingPosition="earliest"))
    async with replicated.store() as store:
        for _ in range(3):
            await store.load_messages(early, consistency=Consistency.STRONG)
    await written(replicated, [late], range(2))
    await ended(query(spark, replicated, tmp_path))
    rows = await collected(spark.read.parquet(str(tmp_path / "out")))
    assert steps_of(rows) == {early: [0, 1], late: [0, 1]}
    # A purge of unread messages is a loss.
    replicated.verified = False
    await written(replicated, [late], range(2, 5))
    await purge(replicated, max(group_of(row.position) for row in rows) + 3)
    with pytest.raises(Exception, match="the log begins at message"):
        await ended(query(spark, replicated, tmp_path))


@pytest.mark.long
async def test_proofs_that_have_gone_are_no_loss(spark: Any, replicated: Deployment, tmp_path: Path) -> None:
    thread = fresh()
    await written(replicated, [thread], range(2))
    await ended(query(spark, replicated, tmp_path, startingPosition="earliest"))
    async with replicated.store() as store:
        before = await store.buffer.log.fill()
        for _ in range(3):
            await store.load_messages(thread)
        assert await store.buffer.log.fill() > before, "each leaves something behind"
        await store.buffer.session.log._stream._forget_proofs({"keep": 1})
    await written(replicated, [thread], range(2, 4))
    await ended(query(spark, replicated, tmp_path))
    rows = await collected(spark.read.parquet(str(tmp_path / "out")))
    assert steps_of(rows) == {thread: [0, 1, 2, 3]}


@pytest.mark.long
async def test_holes_of_barriers_that_earlier_versions_wrote_are_no_loss(
    spark: Any, deployment: Deployment, tmp_path: Path
) -> None:
    thread = fresh()
    await written(deployment, [thread], range(2))
    await ended(query(spark, deployment, tmp_path, startingPosition="earliest"))
    client = await nats.connect(deployment.servers.nats.url)
    for _ in range(3):
        await client.request(f"{deployment.name}.proof.0", b"", timeout=10, headers={"Nats-Rollup": "sub"})
    await client.close()
    await written(deployment, [thread], range(2, 4))
    await ended(query(spark, deployment, tmp_path))
    rows = await collected(spark.read.parquet(str(tmp_path / "out")))
    assert steps_of(rows) == {thread: [0, 1, 2, 3]}


@pytest.mark.long
async def test_what_was_erased_on_purpose_is_no_loss(
    spark: Any, deploy: Callable[..., Deployment], tmp_path: Path
) -> None:
    deployment = deploy(failover_window_s=8.0)
    gone, kept = fresh(), fresh()
    await written(deployment, [gone], range(2))
    await ended(query(spark, deployment, tmp_path, startingPosition="earliest"))
    await written(deployment, [gone, kept], range(2, 4))
    async with deployment.store() as store:
        await store.force_flush_all()
        # The erasure removes the log's beginning, up to beyond the read position, and an entry further on.
        assert (await store.erase(gone)).log_messages == 4
    await ended(query(spark, deployment, tmp_path))
    rows = await collected(spark.read.parquet(str(tmp_path / "out")))
    assert steps_of([r for r in rows if r.kind == "checkpoint"]) == {gone: [0, 1], kept: [2, 3]}
    assert [r.thread_id for r in rows if r.kind != "checkpoint"] == [gone], "its removal"


async def made_anew(deployment: Deployment, count: int = 1) -> None:
    """Replace the log by another stream with its name and settings, and this many messages."""
    client = await nats.connect(deployment.servers.nats.url)
    name = deployment.log.stream
    info = json.loads((await client.request(f"$JS.API.STREAM.INFO.{name}", timeout=10)).data)
    await client.request(f"$JS.API.STREAM.DELETE.{name}", timeout=10)
    await client.request(f"$JS.API.STREAM.CREATE.{name}", json.dumps(info["config"]).encode(), timeout=10)
    for _ in range(count):
        await client.jetstream(timeout=10).publish(f"{deployment.name}.groups.0", b"new")
    await client.close()


@pytest.mark.long
async def test_a_stream_that_was_made_anew_is_another_one(spark: Any, deployment: Deployment, tmp_path: Path) -> None:
    deployment.verified = False
    await written(deployment, [fresh()], range(3))
    await ended(query(spark, deployment, tmp_path, startingPosition="earliest"))
    await made_anew(deployment)
    with pytest.raises(Exception, match="replaced by a new one"):
        await ended(query(spark, deployment, tmp_path))
    await ended(query(spark, deployment, tmp_path, failOnDataLoss=False))
    rows = await collected(spark.read.parquet(str(tmp_path / "out")))
    assert len(rows) == 4
    assert [bytes(r.body) for r in rows if r.cause] == [b"new"]


async def test_a_batch_of_a_stream_that_is_gone_reads_nothing_of_the_one_with_its_numbers(
    deployment: Deployment,
) -> None:
    """The batch was planned but not read when the stream was recreated; the next one reads the new from its start."""
    deployment.verified = False
    await written(deployment, [fresh()], range(3))

    def stream(**more: Any) -> Any:  # the stream of a driver that starts
        source = ThreadLogSource(read_options(deployment, startingPosition="earliest", columns="body", **more))
        return source.streamReader(source.schema())

    def planned() -> tuple[Any, Any]:
        start = (one := stream()).initialOffset()
        return start, one.latestOffset(start, ReadAllAvailable())

    def bodies(one: Any, start: Any, end: Any) -> list[Any]:
        return [b for part in one.partitions(start, end) for batch in one.read(part) for b in batch.to_pydict()["body"]]

    def both() -> tuple[list[Any], list[Any]]:
        one = stream(failOnDataLoss=False)
        first = bodies(one, start, end)
        return first, bodies(one, end, one.latestOffset(end, ReadAllAvailable()))

    start, end = await asyncio.to_thread(planned)
    await made_anew(deployment, end["position"])
    assert await asyncio.to_thread(both) == ([], [b"new"] * end["position"])
    with pytest.raises(DataLoss, match="replaced by a new one"):
        await asyncio.to_thread(bodies, stream(), start, end)


@pytest.mark.long
async def test_a_plan_shows_no_login(
    spark: Any, deployment: Deployment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await written(deployment, [fresh()], range(1))
    login = re.findall("://(.*)@", deployment.servers.nats.url)[0].split(":")
    stream = spark.readStream.format("threadlog").options(**read_options(deployment, numPartitions=3)).load()
    for df in (stream, read(spark, deployment, numPartitions=3)):
        for mode in ("extended", "formatted"):
            await asyncio.to_thread(df.explain, mode=mode)
    running = query(spark, deployment, tmp_path)
    await ended(running)
    running.explain(True)
    shown = capsys.readouterr().out + json.dumps([p.json for p in running.recentProgress])
    shown = shown.replace(str(tmp_path), "")  # the sink's folder, which may have the user's name in it
    assert "numPartitions=3" in shown, "options are shown"
    assert [word for word in login if word in shown] == []


async def test_a_view_of_sql(spark: Any, deployment: Deployment) -> None:
    threads, name = [fresh() for _ in range(3)], deployment.name
    await written(deployment, threads, range(2))
    options = ", ".join(f"{name} '{value}'" for name, value in read_options(deployment).items())

    def asked() -> list[Any]:
        spark.sql(f"CREATE TEMPORARY VIEW {name} USING threadlog OPTIONS ({options})")
        counted = f"SELECT thread_id, max(version) AS version FROM {name} GROUP BY thread_id"
        found: list[Any] = spark.sql(counted).collect()
        spark.catalog.dropTempView(name)
        return found

    assert {row.thread_id: row.version for row in await asyncio.to_thread(asked)} == dict.fromkeys(threads, 2)


async def test_a_dataframe_and_a_view_keep_the_range_of_their_first_action(spark: Any, deployment: Deployment) -> None:
    """Spark asks a source in Python once for what all their queries read; for a table of a catalog, in each query."""
    deployment.verified = False
    threads, name = [fresh()], deployment.name
    await written(deployment, threads, range(2))
    given = read_options(deployment)
    options = ", ".join(f"{name} '{value}'" for name, value in given.items())
    login = given.pop("natsUrl")
    kept = ", ".join(f"{name} '{value}'" for name, value in (given | {"nats": "nats://" + login.split("@")[1]}).items())
    frame = read(spark, deployment)

    def counts() -> list[int]:
        of_view = spark.sql(f"SELECT * FROM {name}").count()
        of_table = spark.sql(f"SELECT * FROM log_{name} WITH (natsUrl = '{login}')").count()
        return [frame.count(), of_view, of_table, read(spark, deployment).count()]

    def make() -> None:
        spark.sql(f"CREATE TEMPORARY VIEW {name} USING threadlog OPTIONS ({options})")
        spark.sql(f"CREATE TABLE log_{name} USING threadlog OPTIONS ({kept})")

    await asyncio.to_thread(make)
    try:
        assert await asyncio.to_thread(counts) == [2, 2, 2, 2]
        await written(deployment, threads, range(2, 5))
        assert await asyncio.to_thread(counts) == [2, 2, 5, 5]
        await purge(deployment, 4)
        with pytest.raises(Exception, match="load it anew"):
            await asyncio.to_thread(frame.count)
    finally:
        spark.catalog.dropTempView(name)
        spark.sql(f"DROP TABLE log_{name}")


async def test_a_wrong_option_is_named(spark: Any, deployment: Deployment) -> None:
    await prepared(deployment)
    for option, value in {
        "surprise": "1",
        "columns": "nothing",
        "numPartitions": "0",
        "startingPosition": "soon",
    }.items():
        with pytest.raises(Exception, match=option):
            await collected(read(spark, deployment, **{option: value}))


@pytest.mark.long
async def test_a_listener_tells_of_each_batch(spark: Any, deployment: Deployment, tmp_path: Path) -> None:
    await written(deployment, [fresh()], range(10))
    told: list[QueryProgress] = []
    # Spark reports from a thread of its own, at any time.
    loop, all_told = asyncio.get_running_loop(), asyncio.Event()

    def tell(progress: QueryProgress) -> None:
        if progress.query == "watched":
            told.append(progress)
            if progress.lag == 0:
                loop.call_soon_threadsafe(all_told.set)

    listener = ProgressListener(tell)
    spark.streams.addListener(listener)
    try:
        options = read_options(deployment, startingPosition="earliest", maxMessagesPerTrigger=6)
        df = spark.readStream.format("threadlog").options(**options).load()
        counted = df.observe("entries", F.count("*").alias("count"), F.sum("bytes").alias("bytes"))
        writer = counted.writeStream.queryName("watched").format("noop").trigger(availableNow=True)
        await ended(writer.option("checkpointLocation", str(tmp_path / "ck")).start())
        async with asyncio.timeout(60):
            await all_told.wait()
    finally:
        spark.streams.removeListener(listener)
    assert [(p.batch_id, p.rows, p.lag) for p in told if p.rows] == [(0, 6, 4), (1, 4, 0)]
    assert [(p.lag_bytes == 0, p.unread_since is None, p.headroom) for p in told if p.rows] == [
        (False, False, 6),
        (True, True, 10),
    ]
    assert [p.observed["entries"]["count"] for p in told if p.rows] == [6, 4]
    assert all(p.seconds > 0 and p.rows_per_second > 0 for p in told if p.rows)
