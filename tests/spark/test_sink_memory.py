"""A worker's memory depends neither on the size of a batch as Python objects nor on the length of a batch."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pytest

from bufstore.spark import SinkConfig
from bufstore.spark.sink.foreach_batch import parts_of
from bufstore.spark.sink.row_writer import write_rows
from bufstore.threads.bulk import BulkCheckpoint, BulkWriter, Series
from conftest import Deployment
from helpers import fresh
from spark.jobs import QUICK, held, prepared, rows_of, settings_of

#: 10 000 rows of 20 KB in one Arrow batch.
_ROWS, _TEXT_BYTES = 10_000, 20_480


@pytest.mark.long  # 200 MB of messages
@pytest.mark.parametrize("mode", ["log", "postgres"])
async def test_a_large_batch_takes_little_more_than_itself(deploy: Any, mode: str) -> None:
    """Decoded as a whole, 193 MiB once took 1.3 GB."""
    deployment = deploy(max_bytes=1 << 30)
    await prepared(deployment)
    settings = {"where": settings_of(deployment), "mode": mode, "spark": QUICK}
    settings |= {"rows": _ROWS, "text_bytes": _TEXT_BYTES}
    job = str(Path(__file__).with_name("sink_memory_job.py"))
    process = await asyncio.create_subprocess_exec(
        sys.executable, job, json.dumps(settings), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(400):
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()[-3000:]
    found = json.loads(out.splitlines()[-1])
    batch_mib = _ROWS * _TEXT_BYTES >> 20
    assert found["same"], "another worker than the one that wrote was asked"
    # The batch as Spark hands it over, and Python's objects for pieces of 16 MiB. Much less than the batch would mean
    # that Spark handed over several batches; three quarters, because free memory is used first.
    assert batch_mib * 3 / 4 < found["after"] - found["before"] < batch_mib + 48
    async with deployment.store() as store:
        await store.force_flush_all()
        held = [await store.load_messages(f"large-{n}") or [] for n in (0, 57, 99)]
    assert [sorted(m["n"] for m in of) for of in held] == [list(range(n, _ROWS, 100)) for n in (0, 57, 99)]


class OnTheirWay:
    """Watches the rows being written, and the bytes of their messages."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        #: The largest numbers at one time.
        self.rows = self.bytes = 0
        write = BulkWriter.write
        rows = size = 0

        async def watched(bulk: BulkWriter, thread_id: str, steps: Sequence[BulkCheckpoint]) -> Series:
            nonlocal rows, size
            more = len(steps), sum(len(json.dumps(m)) for step in steps for m in step.messages)
            rows, size = rows + more[0], size + more[1]
            self.rows, self.bytes = max(self.rows, rows), max(self.bytes, size)
            try:
                return await write(bulk, thread_id, steps)
            finally:
                rows, size = rows - more[0], size - more[1]

        monkeypatch.setattr(BulkWriter, "write", watched)


@pytest.mark.parametrize("in_flight", [1, 2, 10])
async def test_no_more_rows_are_on_their_way_than_may_be(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, in_flight: int
) -> None:
    """A thread with more rows than the limit is written in portions, so that other threads get their share."""
    await prepared(deployment)
    threads = sorted(fresh() for _ in range(8))
    rows = sorted(rows_of(threads, range(12)), key=lambda row: (row["thread_id"], row["position"]))
    config = SinkConfig(app_id="app", in_flight=in_flight, **settings_of(deployment))
    seen = OnTheirWay(monkeypatch)
    found = await asyncio.to_thread(write_rows, config, 0, [rows])
    assert found.counts.written == 96
    assert seen.rows == in_flight
    assert await held(deployment, threads) == {t: list(range(12)) for t in threads}


async def test_no_more_bytes_are_on_their_way_than_may_be(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row larger than the limit is written alone."""
    await prepared(deployment)
    threads, bound = sorted(fresh() for _ in range(8)), 20_000

    def rows(steps: range, sizes: Sequence[int]) -> list[dict[str, Any]]:
        found = sorted(rows_of(threads, steps), key=lambda row: (row["thread_id"], row["position"]))
        for row, size in zip(found, sizes, strict=True):
            row["delta"] = [json.dumps({"n": row["position"], "text": "x" * size})]
        return found

    config = SinkConfig(app_id="app", in_flight_bytes=bound, **settings_of(deployment))
    small, one_large = [1000] * 96, [3 * bound if n == 40 else 1000 for n in range(96)]
    most: list[int] = []
    for batch_id, sizes in enumerate((small, one_large)):
        batch = pyarrow.RecordBatch.from_pylist(rows(range(12 * batch_id, 12 * batch_id + 12), sizes))
        seen, parts = OnTheirWay(monkeypatch), parts_of(iter([batch]), config.in_flight_bytes)
        assert (await asyncio.to_thread(write_rows, config, batch_id, parts)).counts.written == 96
        most.append(seen.bytes)
    assert bound / 3 < most[0] <= bound
    assert 3 * bound < most[1] < 3 * bound + 100
    assert await held(deployment, threads) == {t: list(range(24)) for t in threads}
