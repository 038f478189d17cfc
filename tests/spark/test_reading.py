"""Ranges of the log as Spark's workers read them, without Spark: empty ranges, and ranges with holes."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import nats
import pytest
from pyspark.sql.datasource import InputPartition

from bufstore import LogUnavailable
from bufstore.config import as_nats_config
from bufstore.embedded import Servers
from bufstore.jetstream.stream import NatsStream
from bufstore.nats.ranges import LogReader, LogState
from bufstore.spark import DataLoss
from bufstore.spark.sink.bufstore_format import BufstoreFormat
from bufstore.spark.source import log_scan
from bufstore.spark.source.threadlog_format import ThreadLogSource
from conftest import Deployment
from helpers import eventually, fresh, run_of
from spark.jobs import prepared, purge, read_options, settings_of, write


def planned(deployment: Deployment, **more: Any) -> tuple[Any, list[Any]]:
    """Return a reader, and its partitions as Spark takes them."""
    source = ThreadLogSource(read_options(deployment, **more))
    reader: Any = source.reader(source.schema())
    return reader, list(reader.partitions()) or [InputPartition(None)]


def rows(deployment: Deployment, **more: Any) -> list[dict[str, Any]]:
    reader, partitions = planned(deployment, **more)
    return [row for p in partitions for batch in reader.read(p) for row in batch.to_pylist()]


async def read(deployment: Deployment, **more: Any) -> list[dict[str, Any]]:
    return await asyncio.to_thread(rows, deployment, **more)


async def test_where_nothing_is_to_be_read_nothing_is_read(deployment: Deployment) -> None:
    await prepared(deployment)
    assert await read(deployment) == [], "an empty log"
    await write(deployment, [fresh()], range(3))
    found = await read(deployment)
    assert len(found) == 3
    second = sorted(row["position"] for row in found)[1]
    for nothing in (
        {"startingPosition": "latest"},
        {"startingTimestamp": "2100-01-01T00:00:00Z"},
        {"startingPosition": second, "endingPosition": second},
        {"startingTimestamp": "2100-01-01T00:00:00Z", "endingPosition": second},
    ):
        assert await read(deployment, **nothing) == []
    assert await read(deployment, form="messages", startingPosition="latest") == []


@pytest.mark.parametrize("tasks", [1, 3, 100])
async def test_a_log_with_holes_is_read_exactly(deployment: Deployment, tasks: int) -> None:
    """The leader's proofs leave holes at the log's beginning, between groups, and before its end."""
    threads = [fresh() for _ in range(3)]
    await prepared(deployment)
    client = await nats.connect(deployment.servers.nats.url)
    for n in range(4):
        for _ in range(3):
            await client.request(f"{deployment.name}.proof.0", b"", timeout=10, headers={"Nats-Rollup": "sub"})
        if n < 3:
            await write(deployment, threads, range(n, n + 1))
    await client.close()
    found = await read(deployment, numPartitions=tasks)
    steps = {
        t: [json.loads(m)["n"] for row in found if row["thread_id"] == t for m in row["messages"]] for t in threads
    }
    assert steps == {t: [0, 1, 2] for t in threads}
    assert len({row["position"] for row in found}) == len(found) == 9


async def test_a_stream_that_is_made_anew_while_it_is_read_is_noticed(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment.verified = False
    await write(deployment, [fresh()], range(3))
    reader, partitions = await asyncio.to_thread(planned, deployment, numPartitions=1)
    client, stream = await nats.connect(deployment.servers.nats.url), deployment.log.stream
    entry_rows = log_scan._rows

    async def anew(*args: Any) -> Any:
        config = json.loads((await client.request(f"$JS.API.STREAM.INFO.{stream}", timeout=10)).data)["config"]
        await client.request(f"$JS.API.STREAM.DELETE.{stream}", timeout=10)
        await client.request(f"$JS.API.STREAM.CREATE.{stream}", json.dumps(config).encode(), timeout=10)
        return await entry_rows(*args)

    def work() -> list[Any]:
        return list(reader.read(partitions[0]))

    loop = asyncio.get_running_loop()

    async def there(*args: Any) -> Any:  # the client belongs to the test's event loop
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(anew(*args), loop))

    monkeypatch.setattr(log_scan, "_rows", there)
    with pytest.raises(DataLoss, match="replaced by a new one"):
        await asyncio.to_thread(work)
    await client.close()


async def test_a_message_that_is_no_group_hides_no_loss_before_it(deployment: Deployment) -> None:
    """Regression: retention removed unread entries up to such a message, and a job went on without a word."""
    deployment.verified = False
    thread = fresh()
    await write(deployment, [thread], range(3))
    client = await nats.connect(deployment.servers.nats.url)
    strange = await client.jetstream(timeout=10).publish(f"{deployment.name}.groups.0", b"\xff")
    await client.close()
    await write(deployment, [thread], range(3, 5))
    reader, (part,) = await asyncio.to_thread(planned, deployment, numPartitions=1)
    stream = _stream(read_options(deployment, startingPosition="earliest"))
    start = await asyncio.to_thread(stream.initialOffset)
    await purge(deployment, strange.seq)
    with pytest.raises(DataLoss, match="was purged before it was read"):
        await asyncio.to_thread(lambda: list(reader.read(part)))
    with pytest.raises(DataLoss, match="the log begins at message"):
        await asyncio.to_thread(_latest, stream, start)
    assert [row["thread_id"] for row in await read(deployment)] == [None, thread, thread], "what is there is read"


def _stream(options: dict[str, str], **more: str) -> Any:
    source = ThreadLogSource(options | more)
    return source.streamReader(source.schema())


def _latest(reader: Any, start: Any) -> Any:
    return reader.latestOffset(start, reader.getDefaultReadLimit())


async def test_a_micro_batch_waits_for_rows_and_not_for_ever(deployment: Deployment) -> None:
    thread = fresh()
    await write(deployment, [thread], range(2))
    options = read_options(deployment, startingPosition="earliest", minOffsetsPerTrigger=3, maxTriggerDelay="1h")

    waiting, hasty = _stream(options), _stream(options, maxTriggerDelay="0s")
    start = await asyncio.to_thread(waiting.initialOffset)
    assert await asyncio.to_thread(hasty.initialOffset) == start
    first = await asyncio.to_thread(_latest, waiting, start)
    assert first != start, "what a query finds when it starts does not wait"
    assert await asyncio.to_thread(_latest, hasty, start) == first
    for steps in (range(2, 4), range(4, 5)):
        assert await asyncio.to_thread(_latest, waiting, first) == first, "fewer than 3 rows"
        await write(deployment, [thread], steps)
    assert await asyncio.to_thread(_latest, hasty, first) != first, "it has waited long enough"
    behind = await asyncio.to_thread(waiting.reportLatestOffset)
    assert (behind["messagesBehind"], behind["headroom"]) == (3, 2)
    assert behind["bytesBehind"] > 0
    assert behind["unreadSince"] is not None
    at_once = _stream(options)
    await asyncio.to_thread(at_once.prepareForTriggerAvailableNow)
    second = await asyncio.to_thread(_latest, waiting, first)
    assert second["position"] == first["position"] + 3
    assert await asyncio.to_thread(_latest, at_once, first) == second, "with availableNow nothing waits"
    behind = await asyncio.to_thread(waiting.reportLatestOffset)
    assert (behind["messagesBehind"], behind["bytesBehind"], behind["unreadSince"]) == (0, 0, None)


@pytest.mark.long  # waits until the server's outage is noticed
async def test_a_stream_waits_for_a_server_that_is_away(own_servers: Servers) -> None:
    """The stream reports no new rows while it waits, shows that it waits, and then continues where it was."""
    deployment = Deployment(own_servers)
    thread = fresh()
    await write(deployment, [thread], range(3))
    options = read_options(deployment, startingPosition="earliest", numPartitions=1)

    patient, hasty = _stream(options), _stream(options, outageTimeout="0")
    start = await asyncio.to_thread(patient.initialOffset)
    end = await asyncio.to_thread(_latest, patient, start)
    told = await asyncio.to_thread(patient.reportLatestOffset)
    (part,) = await asyncio.to_thread(patient.partitions, start, end)
    own_servers.nats.stop()

    assert await asyncio.to_thread(_latest, patient, end) == end
    with pytest.raises(LogUnavailable):
        await asyncio.to_thread(_latest, hasty, end)
    waits = await asyncio.to_thread(patient.reportLatestOffset)
    assert waits.pop("unavailableSince") is not None
    assert waits == told
    reading = asyncio.create_task(asyncio.to_thread(lambda: list(patient.read(part))))
    own_servers.nats.start()
    assert sum(batch.num_rows for batch in await reading) == 3
    await write(deployment, [thread], range(3, 5))
    assert await asyncio.to_thread(_latest, patient, end) != end
    assert "unavailableSince" not in await asyncio.to_thread(patient.reportLatestOffset)


@pytest.mark.long  # waits until the server's outage is noticed
async def test_a_query_outlives_an_outage_of_its_source(spark: Any, own_servers: Servers, tmp_path: Path) -> None:
    deployment = Deployment(own_servers)
    thread = fresh()
    await write(deployment, [thread], range(3))
    df = spark.readStream.format("threadlog").options(**read_options(deployment, startingPosition="earliest")).load()
    writer = df.writeStream.format("parquet").option("path", str(tmp_path / "out"))
    query = writer.option("checkpointLocation", str(tmp_path / "ck")).start()

    async def done(rows: int) -> bool:
        return query.exception() is not None or await asyncio.to_thread(found) == rows

    def found() -> int:
        return sum(p.numInputRows for p in query.recentProgress)

    async def waits() -> bool:
        last = query.lastProgress
        return query.exception() is not None or "unavailableSince" in last.sources[0].latestOffset

    try:
        await eventually(partial(done, 3), 60)
        own_servers.nats.stop()
        await eventually(waits, 90)
        assert query.exception() is None
        own_servers.nats.start()
        await write(deployment, [thread], range(3, 5))
        await eventually(partial(done, 5), 60)
        assert query.exception() is None
    finally:
        await asyncio.to_thread(query.stop)
    assert await asyncio.to_thread(spark.read.parquet(str(tmp_path / "out")).count) == 5


@pytest.mark.long  # each look waits until that node would have heard of the next leader
async def test_a_read_has_what_was_acknowledged_though_an_old_leader_tells_where_the_log_ends(
    replicated: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: where a node that was cut off has led, it says for seconds where the log ended before."""
    thread_id, settings = fresh(), settings_of(replicated)
    table = {"natsUrl": settings["nats"], "postgresUrl": settings["postgres"], "schema": settings["schema"],
             "stream": settings["stream"], "table": "messages"}  # fmt: skip

    def messages() -> int:
        source = BufstoreFormat(table)
        reader: Any = source.reader(source.schema())
        return sum(batch.num_rows for part in reader.partitions() for batch in reader.read(part))

    await write(replicated, [thread_id], range(1))
    before, info = (await _looked(replicated)).end, NatsStream.info

    async def old(self: NatsStream, timeout_s: float = 5.0) -> dict[str, Any]:
        answer = await info(self, timeout_s)
        return answer | {"state": answer["state"] | {"last_seq": before - 1}}

    had = await asyncio.to_thread(messages)
    await write(replicated, [thread_id], range(1, 4))
    behind = {"endingPosition": str(max(row["position"] for row in await read(replicated)) + 1)}
    ended = (await _looked(replicated)).end
    assert len(await read(replicated, **behind)) == 4
    assert (await _looked(replicated)).end == ended, "an end that is given, and there, needs no proof"
    monkeypatch.setattr(NatsStream, "info", old)
    assert len(await read(replicated, **behind)) == 4
    assert len(await read(replicated)) == 4
    assert await asyncio.to_thread(messages) == 4 * had


async def test_a_part_that_an_old_leader_lacks_is_no_loss(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: such a node said that the part of a large entry is not there, and the entry counted as purged."""
    thread_id, get, lacks = fresh(), NatsStream._leader_get, iter(range(2))
    async with deployment.store(flusher=False) as store:
        await store.checkpoint(thread_id, [{"n": 0, "text": "x" * 2_000_000}], run_of(thread_id))

    async def old(self: NatsStream, request: dict[str, Any], timeout_s: float) -> Any:
        return None if next(lacks, None) is not None else await get(self, request, timeout_s)

    monkeypatch.setattr(NatsStream, "_leader_get", old)
    assert len(await read(deployment)) == 1
    assert next(lacks, None) is None


async def _looked(deployment: Deployment) -> LogState:
    reader = LogReader(as_nats_config(deployment.servers.nats.url), deployment.log.stream)
    await reader.open()
    try:
        return await reader.look()
    finally:
        await reader.aclose()
