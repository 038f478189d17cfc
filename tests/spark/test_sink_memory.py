"""A worker's memory does not depend on how Python objects blow a large batch up."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from conftest import Deployment
from spark.jobs import QUICK, prepared, settings_of

#: 10 000 rows of 20 KB in one batch of Arrow.
_ROWS, _TEXT_BYTES = 10_000, 20_480


@pytest.mark.long  # 200 MB of messages
async def test_a_large_batch_takes_little_more_than_itself(deployment: Deployment) -> None:
    """Decoded as a whole, 193 MiB took 1.3 GB."""
    await prepared(deployment)
    settings = {"where": settings_of(deployment), "spark": QUICK, "rows": _ROWS, "text_bytes": _TEXT_BYTES}
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
    # The batch itself, as Spark hands it over, and what Python makes of pieces of 16 MiB. Much less than the batch
    # would mean that Spark handed over several: three quarters, because what was free before is used again.
    assert batch_mib * 3 / 4 < found["after"] - found["before"] < batch_mib + 48
    async with deployment.store() as store:
        await store.force_flush_all()
        held = [await store.load_messages(f"large-{n}") or [] for n in (0, 57, 99)]
    assert [sorted(m["n"] for m in of) for of in held] == [list(range(n, _ROWS, 100)) for n in (0, 57, 99)]
